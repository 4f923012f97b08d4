"""Checkpoints: all that it takes to go on with a run, in sealed files.

Their notes say what run it is of, how far that was, and which software wrote it. Equal runs have equal files.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cotrain.choice import flattened
from cotrain.data.stream import Stream
from cotrain.engine import Snapshot, blank
from cotrain.errors import Damaged, Invalid
from cotrain.experiments import provenance
from cotrain.experiments.files import read_bytes, write_bytes
from cotrain.experiments.result import NUMERICS
from cotrain.experiments.sealed import DIGEST, LIMIT, difference, filled, named, seal, unseal
from cotrain.growth import grown_snapshot, resized
from cotrain.methods.method import Method
from cotrain.steps import keys_of

__all__ = ["DIGEST"]

FORMAT = 2  # the first had other names for its arrays, and another form of configuration
NAME = re.compile(r"checkpoint-(\d+)-(\d+)\.safetensors")


def encode(snapshot: Snapshot, about: dict[str, Any]) -> bytes:
    """A checkpoint of a run, with what tells the run apart from others."""
    return seal(_arrays(snapshot), FORMAT, {"phase": snapshot.phase, "step": snapshot.step, **about})


def decode(data: bytes, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `encode` has made a checkpoint of: its notes and arrays."""
    return unseal(data, FORMAT, "checkpoint", path)


class Smaller:
    """A run with fewer tasks, which can go on with more."""

    def __init__(self, method: Method, stream: Stream, seeds: Sequence[int]):
        self.method, self.stream, self.seeds = method, stream, seeds
        self.found = False  # whether it is such a run that goes on

    def like(self, tasks: int) -> Snapshot:
        """Its snapshot with nothing in it."""
        spec = self.stream.spec
        spec = spec._replace(tasks=tasks, widths=spec.widths[:tasks] if len(set(spec.widths[:tasks])) > 1 else ())
        stream = replace(self.stream, spec=spec)
        return blank(resized(self.method, spec), stream, len(self.seeds))

    def grown(self, snapshot: Snapshot, empty: Snapshot) -> Snapshot:
        """Where it was, as of the run with more tasks."""
        if not np.isnan(snapshot.initial).any():
            tasks = empty.accuracy.shape[2]
            raise Invalid(
                "tasks", tasks, "with evaluate_all, all tasks are tested from the start; there can be no more"
            )
        self.found = True
        return grown_snapshot(self.method, keys_of(self.seeds), snapshot, empty)


def load(
    path: Path,
    like: Snapshot,
    about: dict[str, Any] | None = None,
    report: Callable[[str], None] = lambda line: None,
    smaller: Smaller | None = None,
) -> Snapshot:
    """Reads a checkpoint of a run whose arrays are shaped as in `like` (see `engine.blank`).

    With `about`, it must be of that very run, or with `smaller` of one that differs from it by fewer tasks alone; that
    other software wrote it is only told.
    """
    empty = like
    notes, arrays = decode(read_bytes(path, LIMIT), path)
    if notes.get("numerics") != NUMERICS:
        raise _other(path, f"its numbers are of version {notes.get('numerics')}, and this cotrain's of {NUMERICS}")
    tasks, every = _tasks(arrays), _tasks({"accuracy": like.accuracy})
    if smaller is not None and 0 < tasks < every and like.accuracy.shape[1] == every:
        like, notes = smaller.like(tasks), with_tasks(notes, about or {})
    for name, wanted in (about or {}).items():
        if notes.get(name) != wanted:
            raise _other(path, _difference(name, notes.get(name), wanted))
    if wrong := difference(arrays, _arrays(like)):
        raise _other(path, wrong)
    phase, step = notes.get("phase"), notes.get("step")
    if not (isinstance(phase, int) and isinstance(step, int) and 0 <= phase <= like.accuracy.shape[1] and step >= 0):
        raise Damaged(path, f"it is at task {phase!r}, step {step!r}")
    before, now = notes.get("software"), provenance.software()
    if changed := [
        name for name in now if name != "commit" and (not isinstance(before, dict) or before.get(name) != now[name])
    ]:
        report(f"{path} was written with another {', '.join(changed)}: the last bits of what follows may differ")
    snapshot = _filled(replace(like, phase=phase, step=step), arrays)
    return snapshot if smaller is None or like is empty else smaller.grown(snapshot, empty)


def with_tasks(notes: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The notes of a run as if it had as many tasks as another, if they differ in nothing else."""
    config, other = notes.get("config"), wanted.get("config")
    if not (isinstance(config, dict) and isinstance(other, dict)):
        return notes
    for part, name in (("benchmark", "tasks"), ("network", "budget_tasks")):
        if isinstance(config.get(part), dict) and name in other[part]:
            config = {**config, part: {**config[part], name: other[part][name]}}
    return {**notes, "config": config}


def _tasks(arrays: Mapping[str, Any]) -> int:
    """For how many tasks there are accuracies, [S, P, T]."""
    accuracy = arrays.get("accuracy")
    return accuracy.shape[2] if accuracy is not None and accuracy.ndim == 3 else 0


class Checkpoints:
    """The last two checkpoints of a run, in its directory."""

    def __init__(
        self, directory: Path, about: dict[str, Any], every: float = 60.0, report: Callable[[str], None] | None = None
    ):
        self.directory, self.about, self.every = directory, about, every
        self.report = report or (lambda line: None)
        self.last: Path | None = None  # the newest that is known to be good
        self.saved = time.monotonic()

    def all(self) -> list[Path]:
        """What is there, the newest first."""
        found = [path for path in self.directory.glob("checkpoint-*") if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: _position(path), reverse=True)

    def latest(self, like: Snapshot, smaller: Smaller | None = None) -> Snapshot | None:
        """The newest that is not damaged; None if there is none. See `load`."""
        paths = self.all()
        for path in paths:
            try:
                snapshot = load(path, like, self.about, self.report, smaller)
            except (Damaged, OSError) as error:
                self.report(f"{error}; trying the one before")
                continue
            self.last = path
            if smaller is not None and smaller.found:
                self.last = None
                self.save(snapshot)  # in the place of those of fewer tasks
            return snapshot
        if paths:
            self.report(f"{self.directory} has no checkpoint that is whole: starting from the beginning")
        return None

    def due(self) -> bool:
        """Whether the last one is old."""
        return time.monotonic() - self.saved >= self.every

    def save(self, snapshot: Snapshot) -> None:
        """Adds one, and removes those before the last two. What cannot be written is told, and tried again later."""
        path = self.directory / f"checkpoint-{snapshot.phase:05}-{snapshot.step:08}.safetensors"
        self.saved = time.monotonic()
        if path == self.last:
            return
        try:
            write_bytes(path, encode(snapshot, self.about))
        except OSError as error:
            self.report(f"cannot write {path} ({error.strerror}); going on without it")
            return
        for old in self.all():
            if old not in (path, self.last):
                old.unlink(missing_ok=True)
        self.last = path

    def remove(self, but: int = 0) -> None:
        """Removes them all, but for the newest ones."""
        for path in self.all()[but:]:
            path.unlink(missing_ok=True)
        self.last = None


def _position(path: Path) -> tuple[int, int]:
    matched = NAME.fullmatch(path.name)
    assert matched is not None
    return int(matched[1]), int(matched[2])


def _arrays(snapshot: Snapshot) -> dict[str, Any]:
    """The arrays of a snapshot, or their shapes, by name."""
    layers = {f"{name}_{i}": array for name in ("logits", "gates") for i, array in enumerate(getattr(snapshot, name))}
    sample = snapshot.sample._asdict() if snapshot.sample.y.size else {}
    some = {f"sample.{name}": array for name, array in sample.items()}
    return named("state", snapshot.state) | layers | some | {"accuracy": snapshot.accuracy, "initial": snapshot.initial}


def _filled(like: Snapshot, arrays: dict[str, np.ndarray]) -> Snapshot:
    """The snapshot with arrays in the place of its shapes."""
    logits, gates = (
        tuple(arrays[f"{name}_{i}"].copy() for i in range(len(getattr(like, name)))) for name in ("logits", "gates")
    )
    some = {name: arrays[f"sample.{name}"] for name in like.sample._fields} if like.sample.y.size else {}
    return replace(
        like,
        state=filled("state", like.state, arrays),
        accuracy=arrays["accuracy"].copy(),
        initial=arrays["initial"].copy(),
        logits=logits,
        gates=gates,
        sample=like.sample._replace(**some),
    )


def _other(path: Path, reason: str) -> Invalid:
    return Invalid("checkpoint", str(path), f"it is of another run ({reason}); choose another directory")


def _difference(name: str, found: Any, wanted: Any) -> str:
    if name == "data":
        return f"{wanted['name']} is not the file that it was"
    if isinstance(found, dict) and isinstance(wanted, dict):
        found, wanted = flattened(found), flattened(wanted)
        for key in [*wanted, *found]:
            if found.get(key) != wanted.get(key):
                return f"{key} {found.get(key)!r}, not {wanted.get(key)!r}"
    return f"{name} {found!r}, not {wanted!r}"
