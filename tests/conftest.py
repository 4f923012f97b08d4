"""What the tests share: a stream that is easy to learn, and comparisons of whole pytrees."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np

from cotrain.data.batch import Batch
from cotrain.data.stream import Stream

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("cotrain", deadline=None, derandomize=True)
hypothesis.settings.load_profile("cotrain")


def toy(tasks=3, examples=40, tests=30, shape=(2, 3), classes=3, seed=0) -> Stream:
    """Each task tells apart classes that lie around random points, far from each other."""
    draws = np.random.default_rng(seed)

    def part(centres, size):
        y = np.arange(size) % classes
        return (centres[y] + 0.2 * draws.normal(size=(size, *shape))).astype(np.float32), y

    centres = draws.normal(size=(tasks, classes, *shape))
    return Stream.from_arrays([(*part(task, examples), *part(task, tests)) for task in centres], classes)


def first_batch(stream: Stream, task: int, size: int = 6) -> Batch:
    """The first examples of a task."""
    x, y = stream[task].train.take(np.arange(size))
    return Batch(jnp.asarray(x), jnp.asarray(y), jnp.array(task, jnp.int32), jnp.ones(size))


def mixed_batch(stream: Stream, tasks: list[int], weight: list[float]) -> Batch:
    """An example of each of these tasks."""
    x, y = zip(*(stream[task].train.take(np.array([i])) for i, task in enumerate(tasks)), strict=True)
    return Batch(
        jnp.concatenate(x), jnp.concatenate(y), jnp.array(tasks, jnp.int32), jnp.array(weight, dtype=jnp.float32)
    )


def run(iterator):
    """The last of what an iterator yields."""
    *_, last = iterator
    return last


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def identical(one, other) -> bool:
    """Whether two pytrees agree in structure, types and every bit."""
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(leaves(one), leaves(other), strict=True)
    )


def distance(one, other) -> float:
    """The largest difference between two pytrees of the same structure."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    return max(
        float(np.max(np.abs(a.astype(float) - b.astype(float)), initial=0))
        for a, b in zip(leaves(one), leaves(other), strict=True)
    )
