"""Damages files and calls those who read them: each must say so, by name."""

import gzip
import hashlib
import random
import shutil
import struct
import tempfile
import traceback
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from cotrain.data import fetch
from cotrain.engine import Snapshot, blank
from cotrain.errors import Damaged, Invalid
from cotrain.experiments.build import build
from cotrain.experiments.check import check
from cotrain.experiments.checkpoint import Checkpoints, decode
from cotrain.experiments.config import Config
from cotrain.experiments.provenance import data as data_of
from cotrain.experiments.saved import load_learner
from cotrain.report.study import read_study
from cotrain.report.table import read_records
from torture.cases import GRID, MAIN, TASKS, Tally, apart, arrays_of, reference_of
from torture.damage import damaged
from torture.learners import METHODS, NAME, fed

NEWEST, BEFORE = "checkpoint-00003-00000000.safetensors", "checkpoint-00002-00000006.safetensors"

LEARNERS = ("a run's learner", *(f"a learner, {kind}" for kind in METHODS))


class Target(NamedTuple):
    """Files to be damaged below a directory, and those who read them: each returns its complaints, or raises one."""

    source: Path
    files: tuple[str, ...]
    readers: dict[str, Callable[[Path], str]]


def targets(home: Path) -> dict[str, Target]:
    """What is damaged and read, by name."""
    run, grid, data = reference_of(MAIN, home), reference_of(GRID, home), data_in(home)
    newest, before = f"seed-0/{NEWEST}", f"seed-0/{BEFORE}"
    record = {"check": _check, "table": lambda out: _nothing(read_records([out])), "report": _report}
    from_before, from_start = (partial(_resume, home, phase) for phase in (TASKS - 1, None))
    learner = {"load": lambda out: _nothing(load_learner(out / NAME))}
    kept = {"check": _check, "load": lambda out: _nothing(load_learner(out / "seed-0"))}
    load = {"load": lambda folder: _nothing(fetch.load("mnist", folder))}
    return {
        LEARNERS[0]: Target(run, ("seed-0/learner.safetensors",), kept),
        **{name: Target(fed(kind, home), (NAME,), learner) for name, kind in zip(LEARNERS[1:], METHODS, strict=True)},
        "the newest checkpoint": Target(run, (newest,), {"check": _check, "resume": from_before}),
        "both checkpoints": Target(run, (newest, before), {"check": _check, "resume": from_start}),
        "result.json": Target(run, ("seed-0/result.json",), record),
        "routing.npz": Target(run, ("seed-0/routing.npz",), record),
        "times.json": Target(run, ("seed-0/times.json",), {"check": _check}),
        "grid.json": Target(grid, ("grid.json",), {"check": _check, "report": _report}),
        "a data set's file": Target(data, (fetch.FILES[0],), load),
        "a data set's zipped file": Target(data, (f"{fetch.FILES[3]}.gz",), load),
        "a file of tasks": Target(arrays_of(home).parent, ("tasks.npz",), {"build, resume": partial(_build, home)}),
    }


def damage_and_read(name: str, count: int, home: Path, seed: int) -> Tally:
    """Damages files in many ways, and has them read each time."""
    return apart(f"corruptions, {name}", partial(_damage_and_read, name, count, home, f"{seed} {name}"))


def _damage_and_read(name: str, count: int, home: Path, seed: str, tally: Tally) -> None:
    draws, target = random.Random(seed), targets(home)[name]
    know(data_in(home))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(shutil.copytree(target.source, Path(folder, "out")))
        paths = [place / file for file in target.files]
        good = [path.read_bytes() for path in paths]
        for number in range(count):
            hurt = [_damaged(draws, data, path) for path, data in zip(paths, good, strict=True)]
            for path, (_, bad) in zip(paths, hurt, strict=True):
                path.write_bytes(bad)
            names = [path.name.removesuffix(".gz") for path in paths]
            silent = [reader for reader, call in target.readers.items() if not _tells(call, place, names, tally)]
            tally.corruptions += 1
            tally.detected += not silent
            if silent:
                tally.wrong(f"number {number} ({', '.join(kind for kind, _ in hurt)}): not told by {', '.join(silent)}")
            for path, data in zip(paths, good, strict=True):
                path.write_bytes(data)


def _damaged(draws: random.Random, data: bytes, path: Path) -> tuple[str, bytes]:
    """Damage that matters: of a zipped file only what is in it does, and not when it was zipped."""
    while True:
        kind, bad = damaged(draws, data)
        try:
            if path.suffix != ".gz" or gzip.decompress(bad) != gzip.decompress(data):
                return kind, bad
        except (OSError, EOFError, zlib.error):
            return kind, bad


def _tells(call: Callable[[Path], str], place: Path, names: list[str], tally: Tally) -> bool:
    """Whether a reader tells the names of the damaged files."""
    try:
        said = call(place)
    except (Damaged, Invalid) as error:
        said = str(error)
    except Exception:
        tally.tracebacks += 1
        tally.wrong(f"reading {', '.join(names)}: {traceback.format_exc()}")
        return False
    return all(name in said for name in names)


def _nothing(_: Any) -> str:
    return ""


def _check(out: Path) -> str:
    return "\n".join(map(str, check(out).problems))


def _report(out: Path) -> str:
    return "\n".join(note for table in read_study(out).tables for note in table.notes)


def _resume(home: Path, phase: int | None, out: Path) -> str:
    """What is said when a run is taken up, which must be from this phase; None: from the beginning."""
    said, (about, like) = [], known(home)
    snapshot = Checkpoints(out / "seed-0", about, report=said.append).latest(like)
    assert (None if snapshot is None else snapshot.phase) == phase
    return "\n".join(said)


def _build(home: Path, place: Path) -> str:
    """What is said when a run is taken up whose tasks have changed."""
    about, like = known(home)
    config = Config(arrays=str(place / "tasks.npz"))
    build(config)
    return _nothing(Checkpoints(reference_of(MAIN, home) / "seed-0", about | {"data": data_of(config)}).latest(like))


@cache
def known(home: Path) -> tuple[dict[str, Any], Snapshot]:
    """What the checkpoints of the main case are about, and what they are like."""
    path = reference_of(MAIN, home) / "seed-0" / NEWEST
    notes, _ = decode(path.read_bytes(), path)
    method, stream = build(Config.read(notes["config"]))
    return {name: notes[name] for name in ("seeds", "config", "data")}, blank(method, stream(0), 1)


def data_in(home: Path) -> Path:
    """A directory with a small data set, of which the last file is zipped; it is made if it is not there."""
    folder, draws = home / "data", random.Random(0)
    if not folder.exists():
        folder.mkdir()
        for file, size in zip(fetch.FILES, (30, 30, 10, 10), strict=True):
            images = "images" in file
            header = struct.pack(">HBB", 0, 8, 3 if images else 1) + struct.pack(">I", size)
            header += struct.pack(">II", 28, 28) * images
            (folder / file).write_bytes(header + draws.randbytes(size * (784 if images else 1)))
        last = folder / fetch.FILES[3]
        Path(f"{last}.gz").write_bytes(gzip.compress(last.read_bytes(), mtime=0))
        last.unlink()
    return folder


def know(data: Path) -> None:
    """Has this process take the small data set for MNIST."""
    raw = [(data / file).read_bytes() for file in fetch.FILES[:3]]
    raw.append(gzip.decompress((data / f"{fetch.FILES[3]}.gz").read_bytes()))
    fetch.SHA256["mnist"] = tuple(hashlib.sha256(each).hexdigest() for each in raw)  # pyright: ignore
