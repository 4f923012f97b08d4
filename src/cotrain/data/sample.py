"""Some of a task's examples, drawn as they come, for what a method does at the task's end.

Axes: S seeds, N examples of the sample, C minibatches, B examples of a minibatch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from cotrain.data.batch import Batch
from cotrain.data.stream import Spec

NEVER = 2.0  # the priority of nothing; an example's is below 1


class Sample(NamedTuple):
    """The examples of the least priorities so far, for each seed.

    An example's priority is a random number that depends on its place in the phase alone. So a sample is uniform,
    without replacement of places, however many there are and in whatever chunks they come.
    """

    x: Float[np.ndarray, "S N ..."]
    y: Int[np.ndarray, "S N"]
    task: Int[np.ndarray, "S N"]
    priority: Float[np.ndarray, "S N"]

    @staticmethod
    def empty(spec: Spec, seeds: int, size: int) -> "Sample":
        """Nothing yet."""
        numbers = np.zeros((seeds, size), np.int32)
        x = np.zeros((seeds, size, *spec.shape), np.float32)
        return Sample(x, numbers, numbers, np.full((seeds, size), NEVER))

    def fed(self, chunks: Sequence[Batch], count: int, seeds: Sequence[int], phase: int, first: int) -> "Sample":
        """With the first `count` minibatches of each seed's chunk; `first` is their place in the phase."""
        size = self.y.shape[1]
        if size == 0:
            return self
        kept = []
        for i, (seed, chunk) in enumerate(zip(seeds, chunks, strict=True)):
            x, y, task, weight = (np.asarray(a)[:count] for a in chunk)
            tasks = np.broadcast_to(task[:, None] if task.ndim == 1 else task, y.shape)
            draws = np.random.Generator(np.random.PCG64([13, seed, phase]).advance(first * y.shape[1]))
            priority = np.where(weight > 0, draws.random(y.shape), NEVER).ravel()
            best = np.argsort(priority, kind="stable")[:size]
            new = x.reshape(-1, *x.shape[2:])[best], y.ravel()[best], tasks.ravel()[best], priority[best]
            joined = [np.concatenate([old[i], part], dtype=old.dtype) for old, part in zip(self, new, strict=True)]
            order = np.argsort(joined[3], kind="stable")[:size]
            kept.append([part[order] for part in joined])
        return Sample(*map(np.stack, zip(*kept, strict=True)))

    def batch(self, task: int | None) -> Batch:
        """The examples, of a task or each of its own; those that are missing have weight 0."""
        tasks = self.task if task is None else np.full(len(self.y), task, np.int32)
        parts: Any = (self.x, self.y, tasks, (self.priority < NEVER).astype(np.float32))
        return Batch(*parts)  # NumPy arrays here, JAX arrays in the compiled program
