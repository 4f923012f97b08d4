"""Learners in files: sealed, with all that it takes to predict and to go on."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cotrain.data.sample import Sample
from cotrain.devices import over_seeds
from cotrain.errors import Damaged, Invalid, check_positive
from cotrain.experiments.described import describe, known, rebuild
from cotrain.experiments.files import leftovers, read_bytes, write_bytes
from cotrain.experiments.learner import Learner
from cotrain.experiments.result import NUMERICS
from cotrain.experiments.sealed import LIMIT, difference, filled, named, seal, unseal
from cotrain.steps import init, keys_of

FORMAT = 1
NAME = "learner.safetensors"  # in a run's directory
SEEDS, COUNTS = (1 << 63) - 1, (1 << 31) - 1
WHERE = {"seed": (0, SEEDS), "batch": (1, COUNTS), "finished": (0, COUNTS), "step": (0, COUNTS)}  # least and most


def encode(learner: Learner, about: dict[str, Any] | None = None) -> bytes:
    """A learner as a file's bytes, with what else there is to note about it."""
    learner.check()
    where = {name: getattr(learner, name) for name in WHERE}
    notes = {"kind": "learner", "method": describe(learner.method), **where, **(about or {})}
    return seal(_arrays(learner.state, learner.sample), FORMAT, notes)


def decode(data: bytes, path: Any, own: Iterable[Any] | None = ()) -> Learner:
    """The learner that `encode` has made a file of; see `load_learner`."""
    names = None if own is None else known(own)
    notes, arrays = unseal(data, FORMAT, "learner", path)
    if notes.get("numerics") != NUMERICS:
        other = f"its numbers are of version {notes.get('numerics')!r:.40}"
        raise Invalid("learner", str(path), f"{other}, and this cotrain's of {NUMERICS}")
    try:
        where = {name: _whole(name, notes[name], *bounds) for name, bounds in WHERE.items()}
        method = rebuild(notes["method"], names)
        state, sample = _like(method)
        if (wrong := difference(arrays, _arrays(state, sample))) is not None:
            raise ValueError(f"its arrays are not those of its method: {wrong}")
        held = Sample(*(arrays[f"sample.{name}"].copy() for name in Sample._fields)) if sample.y.size else None
        state = jax.tree.map(jnp.array, filled("state", state, arrays))  # a copy, which it may write over
        return Learner(method, state=state, sample=held, **where)
    except Exception as error:  # whatever a description that nobody has written by saving may lead to
        if isinstance(error, Invalid) and error.field == "own":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Damaged(path, f"it describes no learner ({reason:.200})") from error


def notes_of(data: bytes, path: Any) -> dict[str, Any]:
    """What a file says of its learner, if it is sound; of what is not of this package, that is the checksum's word."""
    try:
        decode(data, path)
    except Invalid as error:
        if error.field != "own":
            raise
    return unseal(data, FORMAT, "learner", path)[0]


def _whole(name: str, value: Any, least: int, most: int) -> int:
    """A number of a learner's, if it can be one."""
    if check_positive(name, value, least) > most:
        raise Invalid(name, value, f"choose at most {most}")
    return value


def _like(method: Any) -> tuple[Any, Sample]:
    """The shapes of a method's state and of its sample; its network must be one that predicts."""
    spec, form = method.network.spec, jax.ShapeDtypeStruct
    state = jax.eval_shape(lambda: init(method, keys_of([0])))
    asked = state.learner.parameters, form((1,), jnp.int32), form((1, 1, *spec.shape), jnp.float32)
    logits = jax.eval_shape(over_seeds(method.network.predict, 1), *asked)
    if logits.shape != (1, 1, spec.classes):
        raise ValueError(f"its network predicts {logits.shape}")
    size, nothing = check_positive("examples", method.examples, least=0), Sample.empty(spec, 1, 0)
    parts: Any = (form((1, size, *part.shape[2:]), part.dtype) for part in nothing)
    return state, Sample(*parts)


def save_learner(learner: Learner, path: Path | str) -> None:
    """Writes a learner to a file, which appears whole or not at all."""
    path, data = Path(path), encode(learner)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _cleared(path):
        write_bytes(path, data)


@contextmanager
def _cleared(path: Path) -> Iterator[None]:
    """Removes what killed writes of a file have left, unless another process is writing in its directory just now."""
    with ExitStack() as stack:
        with suppress(ImportError, OSError):  # no such locks here
            import fcntl

            directory = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, directory)
            with suppress(BlockingIOError):
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for part in leftovers(path.parent):
                    if re.fullmatch(rf"\.{re.escape(path.name)}\.\w+\.part", part.name):
                        part.unlink(missing_ok=True)
            fcntl.flock(directory, fcntl.LOCK_SH)
        yield


def load_learner(path: Path | str, own: Iterable[Any] = ()) -> Learner:
    """Reads a learner from a file, or from the directory of a run of one seed.

    Reading executes nothing. Classes and functions that are not of this package, which the learner's method is made of,
    must be handed in, or the modules that define them: `load_learner(path, own=[my_module])`. What is handed in may be
    called, with whatever the file says.
    """
    if own is None:  # which stands for trust in all that there is, as in a pickle
        raise Invalid("own", own, "give a list of modules, classes and functions")
    path = _file(Path(path))
    return decode(read_bytes(path, LIMIT), path, own)


def unpickled(data: bytes) -> Learner:
    """A learner from a pickle, which is trusted as every pickle is: what it names is imported."""
    return decode(data, "a pickled learner", own=None)


def _file(path: Path) -> Path:
    """The file of a learner, by its own name or that of a run's directory."""
    if not path.is_dir():
        return path
    found = [path / NAME] if (path / NAME).exists() else sorted(path.glob(f"seed-*/{NAME}"))
    if len(found) != 1:
        there = f"it has {', '.join(one.parent.name for one in found)}" if found else "it has no learner"
        raise Invalid("learner", str(path), f"name a file, or the directory of one seed ({there})")
    return found[0]


def _arrays(state: Any, sample: Sample) -> dict[str, Any]:
    some = sample._asdict() if sample.y.size else {}
    return named("state", state) | {f"sample.{name}": array for name, array in some.items()}
