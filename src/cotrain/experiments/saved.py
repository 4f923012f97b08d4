"""Learners in files: sealed, with all that it takes to predict and to go on."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cotrain.data.sample import Sample
from cotrain.errors import Damaged, Invalid, check_positive
from cotrain.experiments.described import describe, rebuild
from cotrain.experiments.files import read_bytes, write_bytes
from cotrain.experiments.learner import Learner
from cotrain.experiments.result import NUMERICS
from cotrain.experiments.sealed import LIMIT, difference, filled, named, seal, unseal
from cotrain.steps import init, keys_of

FORMAT = 1
NAME = "learner.safetensors"  # in a run's directory
WHERE = {"seed": 0, "batch": 1, "finished": 0, "step": 0}  # with the least that they can be


def encode(learner: Learner, about: dict[str, Any] | None = None) -> bytes:
    """A learner as a file's bytes, with what else there is to note about it."""
    where = {name: getattr(learner, name) for name in WHERE}
    notes = {"kind": "learner", "method": describe(learner.method), **where, **(about or {})}
    return seal(_arrays(learner.state, learner.sample), FORMAT, notes)


def decode(data: bytes, path: Any, own: Iterable[Any] | None = (), method: Any = None) -> Learner:
    """The learner that `encode` has made a file of; a method that is given is the one that it has."""
    notes, arrays = unseal(data, FORMAT, "learner", path)
    if notes.get("numerics") != NUMERICS:
        other = f"its numbers are of version {notes.get('numerics')}"
        raise Invalid("learner", str(path), f"{other}, and this cotrain's of {NUMERICS}")
    try:
        where = {name: check_positive(name, notes[name], least) for name, least in WHERE.items()}
        method = rebuild(notes.get("method"), own) if method is None else method
        state = jax.eval_shape(lambda: init(method, keys_of([0])))
        sample = Sample.empty(method.network.spec, 1, method.examples)
        wrong = difference(arrays, _arrays(state, sample))
    except Exception as error:  # whatever a description that nobody has written by saving may lead to
        if isinstance(error, Invalid) and error.field == "own":
            raise
        raise Damaged(path, f"its description makes no sense ({' '.join(str(error).split()):.200})") from error
    if wrong is not None:
        raise Damaged(path, f"its arrays are not those of its method: {wrong}")
    if sample.y.size:
        sample = Sample(*(arrays[f"sample.{name}"].copy() for name in Sample._fields))
    state = jax.tree.map(jnp.array, filled("state", state, arrays))  # a copy, which the learner may write over
    return Learner(method, state=state, sample=sample, **where)


def save_learner(learner: Learner, path: Path | str) -> None:
    """Writes a learner to a file, which appears whole or not at all."""
    write_bytes(Path(path), encode(learner))


def load_learner(path: Path | str, own: Iterable[Any] = ()) -> Learner:
    """Reads a learner from a file, or from the directory of a run of one seed.

    Reading executes nothing. Classes and functions that are not of this package, which the learner's method is made of,
    must be handed in, or the modules that define them: `load_learner(path, own=[my_module])`.
    """
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
