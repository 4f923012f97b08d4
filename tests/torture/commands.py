"""Damages files and has a user's commands meet them: they say so, and what can be mended is mended, to the byte."""

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cotrain import cli
from cotrain.data import fetch
from cotrain.experiments.checkpoint import decode
from torture.cases import GRID, MAIN, OTHER, Tally, arrays_of, differences, program, reference_of
from torture.child import attempt
from torture.damage import damaged, reseal, reseal_record
from torture.readers import BEFORE, NEWEST, data_in, know

AGAIN = "the same command again"

Harm = Callable[[random.Random, bytes], bytes]


class Step(NamedTuple):
    """What is typed, and what should come of it; {} is where the damaged files are."""

    command: str
    code: int
    says: tuple[str, ...] = ()


class Scene(NamedTuple):
    """Harm to files of a directory, and what a user does then."""

    source: Path
    harm: dict[str, Harm]
    steps: tuple[Step, ...]
    mended: bool = False  # whether all is as before in the end; otherwise, everything is as it was damaged


def scenes(home: Path) -> dict[str, Scene]:
    """The scenes by name."""
    run, grid = reference_of(MAIN, home), reference_of(GRID, home)
    newest, before, result, routing = (f"seed-0/{name}" for name in (NEWEST, BEFORE, "result.json", "routing.npz"))
    damaged_newest = (f"{NEWEST} is damaged", "trying the one before")
    damaged_both = (*damaged_newest, f"{BEFORE} is damaged", "starting from the beginning")
    known = {
        "newest checkpoint": Scene(
            run, {newest: _hurt}, (Step("check {}", 1, (NEWEST,)), Step(AGAIN, 0, damaged_newest)), mended=True
        ),
        "both checkpoints": Scene(run, {newest: _hurt, before: _hurt}, (Step(AGAIN, 0, damaged_both),), mended=True),
        "grid.json": Scene(
            grid,
            {"grid.json": _hurt},
            (Step("check {}", 1, ("grid.json",)), Step("report {}", 1, ("grid.json is damaged",)), Step(AGAIN, 0)),
            mended=True,
        ),
        "a data set's file": Scene(
            data_in(home),
            {fetch.FILES[1]: _hurt},
            (Step("data mnist --data-dir {}", 2, (f"{fetch.FILES[1]} there is corrupt",)),),
        ),
        "a file of tasks": Scene(
            arrays_of(home).parent,
            {"tasks.npz": lambda draws, data: data[: draws.randrange(len(data))]},
            (Step("run --arrays {}/tasks.npz", 2, ("tasks.npz",)),),
        ),
        "a record of another run": Scene(
            run,
            {result: lambda draws, data: reseal_record(data, **{draws.choice(("numerics", "seed")): _other(draws)})},
            (Step("check {}", 1, ("result.json",)), Step(AGAIN, 0, ("result.json is damaged: it is of another run",))),
            mended=True,
        ),
    }
    steps = Step("check {}", 1, ("learner.safetensors",)), Step(AGAIN, 0, ("learner.safetensors is damaged",))
    known["what was learned"] = Scene(run, {"seed-0/learner.safetensors": _hurt}, steps, mended=True)
    for file in (result, routing):
        name = Path(file).name
        steps = Step("check {}", 1, (name,)), Step("table {}", 1, (f"{name} is damaged",)), Step(AGAIN, 0, (name,))
        known[name] = Scene(run, {file: _hurt}, steps, mended=True)
    for what, harm, why in (
        ("another optimizer", lambda *_: other.read_bytes(), "of another run (optimizer 'adam', not 'sgd')"),
        ("another configuration", _with_other_options, "of another run ("),
        ("another seed", lambda draws, data: reseal(data, seeds=[_other(draws)]), "of another run (seeds ["),
        ("another numerics", lambda draws, data: reseal(data, numerics=_other(draws)), "its numbers are of version"),
        ("a newer format", lambda draws, data: reseal(data, format=_other(draws)), "of a newer cotrain"),
    ):
        steps = Step("check {}", 1, (NEWEST,)), Step(AGAIN, 2, (NEWEST, why))
        known[f"a checkpoint of {what}"] = Scene(run, {newest: harm}, steps)
    other = reference_of(OTHER, home) / newest
    return known


def damage_and_type(name: str, times: int, home: Path, seed: int) -> Tally:
    """Plays a scene several times."""
    draws, tally = random.Random(f"{seed} {name}"), Tally(f"corruptions, commands, {name}")
    for _ in range(times):
        problems = len(tally.problems)
        _play(name, scenes(home)[name], draws, home, tally)
        tally.corruptions += 1
        tally.detected += len(tally.problems) == problems
    return tally


def _play(name: str, scene: Scene, draws: random.Random, home: Path, tally: Tally) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(shutil.copytree(scene.source, Path(folder, "out")))
        for file, harm in scene.harm.items():
            data = (out / file).read_bytes()
            (out / file).write_bytes(bad := harm(draws, data))
            assert bad != data
        hurt = Path(shutil.copytree(out, Path(folder, "hurt")))
        for command, code, says in scene.steps:
            again = program(GRID if name == "grid.json" else MAIN, home, out)
            run = again if command == AGAIN else partial(cli.main, command.format(out).split())
            ended = attempt(run, before=partial(know, data_in(home)))
            tally.look(f"{command} after {name}", ended, (code,))
            said = " ".join(ended.said.split())
            for words in says:
                if words not in said:
                    tally.wrong(f"{command} after {name} does not say {words!r}", ended)
        if unlike := differences(out, scene.source if scene.mended else hurt):
            tally.wrong(f"{name}: not as it should be in the end: {', '.join(unlike)}")


def _hurt(draws: random.Random, data: bytes) -> bytes:
    return damaged(draws, data)[1]


def _other(draws: random.Random) -> int:
    return draws.randrange(2, 10**6)


def _with_other_options(draws: random.Random, data: bytes) -> bytes:
    """A checkpoint that says that it is of another configuration."""
    config = decode(data, Path())[0]["config"]
    numbers = [(part, name) for part in _parts(config) for name, value in part.items() if type(value) in (int, float)]
    part, name = draws.choice(numbers)
    part[name] += _other(draws)
    return reseal(data, config=config)


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A record's table, and those in it."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(value)
