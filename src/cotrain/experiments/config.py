"""What a run is, in words and numbers: a benchmark, a network and a method, each with options of its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cotrain.choice import (
    Choice,
    NoOption,
    Option,
    Table,
    add,
    choose,
    entry_of,
    fitted,
    known_options,
    meanings,
    options_of,
    read,
)
from cotrain.data import BENCHMARKS
from cotrain.errors import Invalid, check_name, check_positive
from cotrain.experiments.migration import is_old, migrated
from cotrain.experiments.protocols import DECIDED, PROTOCOLS, undecided
from cotrain.methods import BUFFERS, METHODS, OPTIMIZERS
from cotrain.networks import NETWORKS, ROUTERS, SAMPLINGS

PARTS: dict[str, tuple[Table, str]] = {  # with what they are by default
    "benchmark": (BENCHMARKS, "rotated-mnist"),
    "network": (NETWORKS, "routing-network"),
    "method": (METHODS, "cotraining"),
}
TABLES: dict[str, Table] = {  # all of them
    "benchmark": BENCHMARKS,
    "network": NETWORKS,
    "router": ROUTERS,
    "sampling": SAMPLINGS,
    "method": METHODS,
    "buffer": BUFFERS,
    "optimizer": OPTIMIZERS,
}


@dataclass(frozen=True)
class Schedule:
    """How a method is fed, and tested."""

    batch: int = 10
    """examples of a minibatch"""
    epochs: int = 1
    """passes over each task"""
    evaluate_all: bool = False
    """evaluate on tasks to come as well, for forward transfer"""

    def __post_init__(self):
        check_positive("batch", self.batch)
        check_positive("epochs", self.epochs)


@dataclass(frozen=True, init=False)
class Config:
    """A benchmark, a network and a method; the defaults are the paper's, or our reading of it.

    It is made from options by their names, `Config(method="replay", lr=0.05)`: each belongs to one of the parts.
    Other defaults than the paper's have names too, `Config(protocol="gem", lr=0.05)`.
    """

    benchmark: Choice
    network: Choice
    method: Choice
    schedule: Schedule

    def __init__(self, **options: Any):
        wanted = with_protocol(options)
        given = dict(wanted)
        parts = {kind: choose(kind, given.pop(kind, usual), table, given) for kind, (table, usual) in PARTS.items()}
        schedule = _schedule(given)
        for name, value in given.items():
            raise no_option(name, value, wanted)
        self._set(**parts, schedule=schedule)

    def _set(self, **parts: Any) -> None:
        for name, value in parts.items():
            object.__setattr__(self, name, value)
        _ = self.flat  # in which each name occurs once

    @staticmethod
    def read(record: Any) -> "Config":
        """The configuration that `record` made, or an earlier version; nothing of somebody's own is imported."""
        if is_old(record):
            return Config(**migrated(record, known_names))
        if not isinstance(record, dict):
            raise Invalid("config", record, "a record of a configuration is a table")
        rest = {name: value for name, value in record.items() if name not in PARTS}
        parts = {kind: read(kind, record.get(kind), table) for kind, (table, _) in PARTS.items()}
        schedule = _schedule(rest)
        for name, value in rest.items():
            raise NoOption(name, value, "a record has it in the part that it belongs to")
        config = object.__new__(Config)
        config._set(**parts, schedule=schedule)
        return config

    @property
    def flat(self) -> dict[str, Any]:
        """All options by their names."""
        named: dict[str, Any] = {}
        for kind in PARTS:
            add(named, getattr(self, kind).flat(kind))
        add(named, vars(self.schedule))
        return named

    @property
    def options(self) -> dict[str, Any]:
        """What is not as by default, for JSON."""
        named: dict[str, Any] = {}
        for kind, (_, usual) in PARTS.items():
            add(named, getattr(self, kind).changed(kind, usual))
        usual = vars(Schedule())
        named |= {name: value for name, value in vars(self.schedule).items() if value != usual[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}

    @property
    def protocol(self) -> str | None:
        """The protocol that it keeps to in all that the protocol decides, other than the paper's."""
        flat = self.flat
        for name, (_, options) in PROTOCOLS.items():
            decided = {one: value for one, value in options.items() if one in DECIDED}
            if "tasks" in flat and decided and all(flat.get(one, value) == value for one, value in decided.items()):
                return name
        return None

    @property
    def told(self) -> dict[str, Any]:
        """`options`, for people: with the protocol in the place of what it decides."""
        if self.protocol is None:
            return self.options
        rest = {name: value for name, value in self.options.items() if name not in PROTOCOLS[self.protocol].options}
        return {"protocol": self.protocol, **rest}

    def record(self) -> dict[str, Any]:
        """The configuration as it is written to and read from JSON and TOML."""
        return {**{kind: getattr(self, kind).nested() for kind in PARTS}, **vars(self.schedule)}

    def but(self, **options: Any) -> "Config":
        """The same with other options; those that another part does not have are left out."""
        wanted = {**(undecided(self.flat) if "protocol" in options else self.flat), **options}
        names = known_names(wanted)
        return Config(**{name: value for name, value in wanted.items() if name in names or name in options})

    @property
    def joint(self) -> bool:
        """Whether all tasks are learned at once."""
        return self.method.name == "joint"


def with_protocol(given: Mapping[str, Any], /, **typed: Any) -> dict[str, Any]:
    """Options, with those of their protocol that what is chosen has; what is `typed` may choose it too."""
    given = _with_benchmark(given)
    _, usual = PROTOCOLS[check_name("protocol", given.pop("protocol", "paper"), PROTOCOLS)]
    known = known_names({**usual, **given, **typed})
    return {**{name: value for name, value in usual.items() if name in known}, **given}


def all_options(given: Mapping[str, Any]) -> Iterator[tuple[str, Option]]:
    """All options that there are with the parts that are given, each with the choice that it belongs to."""
    given = _with_benchmark(given)
    for kind, (table, usual) in PARTS.items():
        yield from known_options(kind, usual, table, given)
    yield from (("training", option) for option in options_of(Schedule))


def meanings_of(given: Mapping[str, Any]) -> dict[str, str]:
    """What all those options mean."""
    known = dict(meanings(Schedule))
    for kind, option in all_options(given):
        if option.name == kind and option.table is not None:
            known |= meanings(entry_of(kind, given.get(kind, option.default), option.table))
    return known


def known_names(given: Mapping[str, Any]) -> set[str]:
    """Their names."""
    return {option.name for _, option in all_options(given)}


def every_name() -> set[str]:
    """All options of everything that can be chosen."""
    known = {option.name for option in options_of(Schedule)}
    for kind, table in TABLES.items():
        for name in table:
            known |= {option.name for _, option in known_options(kind, name, table, {kind: name})}
    return known


def _schedule(given: dict[str, Any]) -> Schedule:
    """The schedule; takes its options from `given`."""
    known = [one for one in options_of(Schedule) if one.name in given]
    return Schedule(**{one.name: fitted(one.name, given.pop(one.name), one.type) for one in known})


def _with_benchmark(options: Mapping[str, Any]) -> dict[str, Any]:
    """Own arrays are a benchmark, whether it is named or not."""
    return {**({"benchmark": "arrays"} if "arrays" in options else {}), **options}


def no_option(name: str, value: Any, given: Mapping[str, Any]) -> NoOption:
    """The refusal of an option that nothing has that is chosen."""
    chosen = [f"{kind} {given.get(kind, known.default)}" for kind, known in all_options(given) if known.name == kind]
    owners = [
        f"{kind} {entry}"
        for kind, table in TABLES.items()
        for entry in table
        if f"{kind} {entry}" not in chosen
        and any(option.name == name for _, option in known_options(kind, entry, table, {kind: entry}))
    ]
    has = f"; it is one of {', '.join(owners)}" if owners else ""
    return NoOption(name, value, f"there is no such option with {', '.join(chosen)}{has}")
