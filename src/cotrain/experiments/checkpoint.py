"""Checkpoints: all that it takes to go on with a run, in files that execute nothing and know when they are damaged.

A checkpoint is a safetensors file. Its metadata begin with a checksum, which is that of the whole file with zeros in
its place; then follow, as JSON, what run it is of, how far that was, and which software wrote it. So equal runs have
equal files, to the byte.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from cotrain.choice import flattened
from cotrain.engine import Snapshot
from cotrain.errors import Damaged, Invalid
from cotrain.experiments import provenance
from cotrain.experiments.files import read_bytes, write_bytes
from cotrain.experiments.result import NUMERICS

FORMAT = 2  # the first had other names for its arrays, and another form of configuration
LIMIT = 1 << 34  # bytes
HEADER = b'{"__metadata__":{"cotrain":"'  # after 8 bytes for the length of the header
DIGEST = slice(8 + len(HEADER), 8 + len(HEADER) + 64)
NAME = re.compile(r"checkpoint-(\d+)-(\d+)\.safetensors")


def encode(snapshot: Snapshot, about: dict[str, Any]) -> bytes:
    """A checkpoint of a run, with what tells the run apart from others."""
    position = {"phase": snapshot.phase, "step": snapshot.step}
    notes = {"format": FORMAT, "numerics": NUMERICS, **position, **about, "software": provenance.software()}
    arrays = {name: np.ascontiguousarray(array) for name, array in _arrays(snapshot).items()}
    data = save(arrays, {"cotrain": "0" * 64 + json.dumps(notes, allow_nan=False)})
    assert data[8 : DIGEST.start] == HEADER
    return b"".join((data[: DIGEST.start], hashlib.sha256(data).hexdigest().encode(), data[DIGEST.stop :]))


def decode(data: bytes, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `encode` has made a checkpoint of: its notes and arrays, which are views of the data."""
    view = memoryview(data)
    if view[8 : DIGEST.start] != HEADER or len(view) < DIGEST.stop:
        raise Damaged(path, "it is not a checkpoint, or was cut short")
    digest = hashlib.sha256(view[: DIGEST.start])
    digest.update(b"0" * 64)
    digest.update(view[DIGEST.stop :])
    if digest.hexdigest().encode() != view[DIGEST]:
        raise Damaged(path, "its checksum does not agree with its content")
    try:
        header = json.loads(bytes(view[8 : 8 + int.from_bytes(view[:8], "little")]))
        notes = json.loads(header["__metadata__"]["cotrain"][64:])
        version = notes["format"]
        if isinstance(version, int) and version != FORMAT:
            other = "a newer" if version > FORMAT else "an older"
            raise Invalid("checkpoint", str(path), f"its format is {version}, of {other} cotrain; this reads {FORMAT}")
        return notes, {name: _array(entry) for name, entry in deserialize(data)}
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, Invalid):
            raise
        raise Damaged(path, f"it is not a checkpoint ({error!r:.100})") from error


def load(
    path: Path,
    like: Snapshot,
    about: dict[str, Any] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Snapshot:
    """Reads a checkpoint of a run whose arrays are shaped as in `like` (see `engine.blank`).

    With `about`, it must be of that very run; that other software wrote it is only told.
    """
    notes, arrays = decode(read_bytes(path, LIMIT), path)
    if notes.get("numerics") != NUMERICS:
        raise _other(path, f"its numbers are of version {notes.get('numerics')}, and this cotrain's of {NUMERICS}")
    for name, wanted in (about or {}).items():
        if notes.get(name) != wanted:
            raise _other(path, _difference(name, notes.get(name), wanted))
    wanted = _arrays(like)
    for name in wanted.keys() | arrays.keys():
        found, fits = (_form(known.get(name)) for known in (arrays, wanted))
        if found != fits:
            raise _other(path, f"{name} is {found}, and {fits} is wanted")
    phase, step = notes.get("phase"), notes.get("step")
    if not (isinstance(phase, int) and isinstance(step, int) and 0 <= phase <= like.accuracy.shape[1] and step >= 0):
        raise Damaged(path, f"it is at task {phase!r}, step {step!r}")
    before, now = notes.get("software"), provenance.software()
    if changed := [
        name for name in now if name != "commit" and (not isinstance(before, dict) or before.get(name) != now[name])
    ]:
        report(f"{path} was written with another {', '.join(changed)}: the last bits of what follows may differ")
    return _filled(replace(like, phase=phase, step=step), arrays)


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

    def latest(self, like: Snapshot) -> Snapshot | None:
        """The newest that is not damaged; None if there is none."""
        paths = self.all()
        for path in paths:
            try:
                snapshot = load(path, like, self.about, self.report)
            except (Damaged, OSError) as error:
                self.report(f"{error}; trying the one before")
                continue
            self.last = path
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
    leaves = jax.tree_util.tree_leaves_with_path(snapshot.state)
    named = {f"state{jax.tree_util.keystr(path)}": _plain(leaf) for path, leaf in leaves}
    layers = {f"{name}_{i}": array for name in ("logits", "gates") for i, array in enumerate(getattr(snapshot, name))}
    return {**named, **layers, "accuracy": snapshot.accuracy, "initial": snapshot.initial}


def _filled(like: Snapshot, arrays: dict[str, np.ndarray]) -> Snapshot:
    """The snapshot with arrays in the place of its shapes."""

    def leaf(path: Any, shape: Any) -> Any:
        array = arrays[f"state{jax.tree_util.keystr(path)}"]
        return (
            jax.random.wrap_key_data(jax.numpy.asarray(array))
            if jax.numpy.issubdtype(shape.dtype, jax.dtypes.prng_key)
            else array
        )

    logits, gates = (
        tuple(arrays[f"{name}_{i}"].copy() for i in range(len(getattr(like, name)))) for name in ("logits", "gates")
    )
    return replace(
        like,
        state=jax.tree_util.tree_map_with_path(leaf, like.state),
        accuracy=arrays["accuracy"].copy(),
        initial=arrays["initial"].copy(),
        logits=logits,
        gates=gates,
    )


def _plain(leaf: Any) -> Any:
    """A leaf as numbers: random keys are some too."""
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return (
        jax.eval_shape(jax.random.key_data, leaf)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else jax.random.key_data(leaf)
    )


def _array(entry: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"])


DTYPES = {
    "BOOL": np.bool_,
    **{f"I{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
}


def _form(array: Any) -> str:
    return "absent" if array is None else f"{np.dtype(array.dtype).name}{list(array.shape)}"


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
