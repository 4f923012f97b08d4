"""What every contestant learns: the same arrays, the same sizes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Pass(NamedTuple):
    """What one pass over the stream took, and what came of it."""

    iterations: int
    seconds: float  # in the training loops
    loss: float | None = None  # mean over the last iterations, of the current batch before its step
    model: Any = None


@dataclass(frozen=True)
class Workload:
    """A stream of tasks and the paper's sizes; `tasks` holds each task's inputs [N, 784] and labels [N]."""

    tasks: list[tuple[np.ndarray, np.ndarray]]
    seed: int = 0
    batch: int = 10
    memory: int = 1000
    memory_batch: int = 10
    lr: float = 0.1
    classes: int = 10
    hidden: tuple[int, ...] = (256, 256)  # of the shared bottom
    layers: int = 2  # of the routing network, and so on
    experts: int = 20
    k: int = 4
    units: int = 19
    noise: float = 0.05
    limit: int | None = None  # tasks to learn; by default all
    method: str = "replay"  # whose step is measured


def permuted_mnist(tasks: int, examples: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first tasks of MNIST-Permutations, with some of the examples of each."""
    from cotrain.data.fetch import load
    from cotrain.data.stream import permuted

    stream = permuted(load("mnist"), tasks, examples=examples)
    made = (stream[task].train.take(np.arange(examples)) for task in range(tasks))
    return [(x.reshape(examples, -1), y.astype(np.int64)) for x, y in made]
