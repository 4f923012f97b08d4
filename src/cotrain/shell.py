"""The command line of `cotrain run`: the options that apply to what is chosen, by typing or in a file."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from cotrain.choice import Option, fitted, flattened
from cotrain.errors import Invalid
from cotrain.experiments.config import (
    Config,
    all_options,
    every_name,
    known_names,
    meanings_of,
    no_option,
    with_protocol,
)
from cotrain.experiments.protocols import PROTOCOLS, undecided
from cotrain.experiments.toml import read_toml

PROTOCOL = f"whose defaults: {', '.join(PROTOCOLS)}; any other option goes before it"
CHOICES = {"protocol": PROTOCOL, "benchmark": "stream of tasks", "network": "what learns", "method": "how to learn"}


@dataclass(frozen=True)
class Parsed:
    """What was typed."""

    config: Config
    command: Any

    def __call__(self) -> None:
        self.command(self.config)


def parse_run(arguments: Sequence[str], command: type) -> Parsed:
    """A run's configuration, and the command with the options that are not of it."""
    words = list(arguments)
    file = words.pop(0) if words and not words[0].startswith("-") else None
    given = {} if file is None else flattened(read_toml(Path(file)))
    typed = _typed(words)
    if "arrays" in typed:
        given |= {"benchmark": "arrays"}
    if "protocol" in typed:
        given = {**undecided(given), "protocol": typed["protocol"]}
    protocol = Option("protocol", str, given.get("protocol", "paper"), None)
    given = with_protocol(given, **typed)
    known = [("protocol", protocol), *all_options(given | typed)]
    own = {one.name for one in fields(command)}
    names = {option.name for _, option in known} | own
    if len(names) < len(known) + len(own):
        _refuse_twins([*own, *(option.name for _, option in known)])
    for name in typed.keys() - names:
        if name in every_name():  # others the parser complains of, with what is near
            raise no_option(name, typed[name], given | typed)
    parsed: Any = tyro.cli(
        _form(known, given, given | typed, command),
        prog="cotrain run [FILE.toml]",
        args=words,
        description=f"{command.__doc__}\n\nFILE.toml has options too, in groups or not; what is typed goes before it.",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    parts = [getattr(parsed, kind) for kind in dict.fromkeys(kind for kind, _ in known)]
    flat = {name: value for part in parts for name, value in vars(part).items()}
    del flat["protocol"]  # what it stands for is in the others
    replaced = known_names(given)  # what the file's own choices have, if others were typed
    left = {name: value for name, value in given.items() if name not in flat and name not in replaced}
    return Parsed(Config(**flat, **left), command(**{name: getattr(parsed.run, name) for name in own}))


def _refuse_twins(names: Sequence[str]) -> None:
    """Says which option is there twice."""
    [(name, _)] = Counter(names).most_common(1)
    raise Invalid(name, name, "two parts, or the command itself, have an option of this name; rename yours")


def _typed(words: Sequence[str]) -> dict[str, str]:
    """The options that were typed, with what comes after each."""
    typed = {}
    for word, after in zip(words, [*words[1:], ""], strict=False):  # there may be none
        name, sign, value = word.partition("=")
        if name.startswith("--") and name != "--help":
            typed[name[2:].removeprefix("no-").replace("-", "_")] = value if sign else after
    return typed


def _form(known: Sequence[Any], given: Mapping[str, Any], chosen: Mapping[str, Any], command: type) -> type:
    """A dataclass with a group of options for each choice."""
    texts, groups = CHOICES | meanings_of(chosen), dict[str, list[Any]]()
    for kind, option in known:
        default = option.default
        if option.name in given:
            default = fitted(option.name, given[option.name], option.type)
        about = texts.get(option.name, "")
        if option.table is not None:
            about, default = f"{about}: {', '.join(option.table)}, or package.module:Class", chosen.get(kind, default)
        row = field() if default is MISSING else field(default=default)
        groups.setdefault(kind, []).append((option.name, Annotated[option.type, tyro.conf.arg(help=about)], row))
    forms = {kind: make_dataclass(kind, rows, frozen=True, kw_only=True) for kind, rows in groups.items()}
    told = {kind: Annotated[form, tyro.conf.arg(help="")] for kind, form in forms.items()}  # or tyro searches for it
    return make_dataclass("run", [("run", command), *told.items()], frozen=True)
