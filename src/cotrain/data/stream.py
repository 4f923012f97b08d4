"""Task streams: the tasks of a continual learner, each made when it is reached.

A stream depends on its own seed alone, never on a method's, so that every method sees the same tasks.
Inputs are handed out as floats (bytes are scaled to [0, 1]) in the shape the user gave them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from cotrain.data.fetch import Dataset
from cotrain.errors import Invalid, check_positive

Transform = Callable[[np.ndarray], np.ndarray]
Empty = Callable[[tuple[int, ...], Any], np.ndarray]  # from shape and type to an array to fill

BLOCK = 128  # examples transformed at a time: few enough to stay in the cache
LARGEST = np.finfo(np.float32).max  # what is larger would be infinite for JAX


class Spec(NamedTuple):
    """What a network must know of a stream."""

    shape: tuple[int, ...]  # of one input
    classes: int  # outputs of each task's head
    tasks: int


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs with labels, transformed when they are taken."""

    x: np.ndarray
    y: np.ndarray
    transform: Transform | None = None
    name: str = field(default="examples", repr=False)

    def __post_init__(self):
        if len(self.x) != len(self.y):
            raise Invalid(self.name, f"{len(self.x)} inputs and {len(self.y)} labels", "give one label per input")
        if len(self.x) == 0:
            raise Invalid(self.name, "no examples", "give at least one")
        floats = np.issubdtype(self.x.dtype, np.floating)
        if floats and not (-LARGEST <= self.x.min(initial=0) and self.x.max(initial=0) <= LARGEST):
            bad = np.argwhere(~(np.abs(self.x) <= LARGEST))[0]
            wrong = float(self.x[tuple(bad)])
            raise Invalid(f"{self.name}, example {bad[0]}", wrong, "inputs must be finite 32-bit numbers")

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: np.ndarray, empty: Empty = np.empty) -> tuple[np.ndarray, np.ndarray]:
        """The inputs, as floats, in an array that `empty` makes, and labels at `indices`."""
        labels = self.y[indices].astype(np.int32)
        if self.transform is None and np.issubdtype(self.x.dtype, np.floating):
            x = empty((len(indices), *self.x.shape[1:]), self.x.dtype)
            return np.take(self.x, indices, axis=0, out=x, mode="clip"), labels  # "raise" would copy twice
        x = np.empty(0)
        for start in range(0, len(indices), BLOCK):
            part = self.x[indices[start : start + BLOCK]]
            if not np.issubdtype(part.dtype, np.floating):
                part = part.astype(np.float32) / np.float32(255 if part.dtype == np.uint8 else 1)
            part = part if self.transform is None else self.transform(part)
            x = x if start else empty((len(indices), *part.shape[1:]), part.dtype)
            x[start : start + BLOCK] = part
        return x, labels

    def subset(self, indices: np.ndarray) -> "Examples":
        """Only the examples at `indices`."""
        return replace(self, x=self.x[indices], y=self.y[indices])


class Task(NamedTuple):
    """What one task trains and is tested on."""

    train: Examples
    test: Examples


@dataclass(frozen=True)
class Stream:
    """A sequence of tasks: `stream[i]` makes task i.

    `phases` says which tasks are learned together: one after another, unless the stream is joint.
    """

    spec: Spec
    make: Callable[[int], Task]
    joint: bool = False

    @staticmethod
    def from_arrays(tasks: Sequence[Sequence[Any]], classes: int | None = None) -> "Stream":
        """Your own tasks, each as `(train_x, train_y, test_x, test_y)`; labels count from 0 in every task."""
        if len(tasks) == 0:
            raise Invalid("tasks", "an empty list", "give at least one task")
        arrays = [tuple(_native(np.asarray(a)) for a in task) for task in tasks]
        for i, task in enumerate(arrays):
            if len(task) != 4:
                raise Invalid(f"task {i}", f"{len(task)} arrays", "give (train_x, train_y, test_x, test_y)")
            for part, y in (("train", task[1]), ("test", task[3])):
                if y.ndim != 1 or y.dtype.kind not in "iu":
                    found = f"{y.dtype.name}{list(y.shape)}"
                    raise Invalid(f"task {i} {part} labels", found, "labels must be one whole number per input")
        shape = arrays[0][0].shape[1:]
        highest = max(int(y.max(initial=0)) for task in arrays for y in (task[1], task[3]))
        classes = highest + 1 if classes is None else check_positive("classes", classes)
        classes = min(classes, np.iinfo(np.int32).max)  # labels are handed out as such
        made = []
        for i, (train_x, train_y, test_x, test_y) in enumerate(arrays):
            for part, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
                _check_arrays(f"task {i} {part}", x, y, shape, classes)
            made.append(
                Task(
                    Examples(train_x, train_y, name=f"task {i} train"), Examples(test_x, test_y, name=f"task {i} test")
                )
            )
        return Stream(Spec(tuple(shape), classes, len(made)), made.__getitem__)

    def __len__(self) -> int:
        return self.spec.tasks

    def __getitem__(self, task: int) -> Task:
        if not 0 <= task < len(self):
            raise IndexError(task)
        return self.make(task)

    @property
    def phases(self) -> list[list[int]]:
        """The tasks that are learned together, in the order of learning."""
        every = list(range(len(self)))
        return [every] if self.joint else [[task] for task in every]

    def shuffled(self) -> "Stream":
        """The same tasks learned all at once, in random order: the ceiling of every continual learner."""
        return replace(self, joint=True)


def _native(array: np.ndarray) -> np.ndarray:
    """The array in this machine's byte order, the only one that JAX takes."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _check_arrays(name: str, x: np.ndarray, y: np.ndarray, shape: tuple[int, ...], classes: int) -> None:
    if x.dtype.kind not in "fiub" or x.dtype.itemsize > 8:
        raise Invalid(f"{name} inputs", x.dtype.name, "inputs must be numbers of at most 64 bits")
    if x.ndim == 0 or 0 in x.shape[1:]:
        raise Invalid(f"{name} inputs", x.shape, "give an array with at least one number per input")
    if x.shape[1:] != shape:
        raise Invalid(f"{name} inputs", x.shape[1:], f"every task's inputs must have the first task's shape, {shape}")
    if len(y) and not (0 <= y.min() and y.max() < classes):
        wrong = y[(y < 0) | (y >= classes)][0]
        raise Invalid(f"{name} labels", int(wrong), f"labels must be 0 to {classes - 1}")


def permuted(
    dataset: Dataset,
    tasks: int = 20,
    *,
    examples: int | None = None,
    test_examples: int | None = None,
    permute_first: bool = False,
    seed: int = 0,
) -> Stream:
    """Each task sees the pixels in its own fixed random order; the first as they are, unless `permute_first`."""

    def transform(task: int) -> Transform | None:
        if task == 0 and not permute_first:
            return None
        order = np.random.default_rng([seed, task]).permutation(dataset.train_x[0].size)
        return lambda x: np.take(x.reshape(len(x), -1), order, axis=1).reshape(x.shape)

    return transformed(dataset, tasks, transform, examples, test_examples, seed)


def rotated(
    dataset: Dataset,
    tasks: int = 20,
    *,
    step: float = 9.0,
    examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Stream:
    """Task i sees the images turned counter-clockwise by i times `step` degrees, with bilinear interpolation."""

    def transform(task: int) -> Transform | None:
        if task == 0:
            return None
        turn = rotation(dataset.train_x.shape[1:], task * step)
        return lambda x: (turn @ x.reshape(len(x), -1).T).T.reshape(x.shape)

    return transformed(dataset, tasks, transform, examples, test_examples, seed)


def rotation(shape: tuple[int, ...], degrees: float) -> scipy.sparse.csr_array:
    """The matrix that turns a flattened image about its centre; what comes from outside is 0."""
    height, width = shape
    angle = np.deg2rad(degrees)
    row, column = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    down, right = (row - (height - 1) / 2).ravel(), (column - (width - 1) / 2).ravel()
    # Where each pixel of the turned image comes from; rounded so that multiples of 90° are exact.
    source_row = np.round(down * np.cos(angle) + right * np.sin(angle) + (height - 1) / 2, 9)
    source_column = np.round(-down * np.sin(angle) + right * np.cos(angle) + (width - 1) / 2, 9)
    top, left = np.floor(source_row).astype(int), np.floor(source_column).astype(int)
    targets, sources, weights = [], [], []
    for below in (0, 1):
        for beside in (0, 1):
            weight = np.abs(1 - below - (source_row - top)) * np.abs(1 - beside - (source_column - left))
            inside = (0 <= top + below) & (top + below < height) & (0 <= left + beside) & (left + beside < width)
            keep = inside & (weight > 0)
            targets.append(np.flatnonzero(keep))
            sources.append(((top + below) * width + left + beside)[keep])
            weights.append(weight[keep])
    entries = (np.concatenate(weights), (np.concatenate(targets), np.concatenate(sources)))
    return scipy.sparse.csr_array(entries, shape=(height * width, height * width), dtype=np.float32)


def split(
    dataset: Dataset,
    tasks: int = 5,
    *,
    all_classes: bool = False,
    examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Stream:
    """Each task tells an equal share of the classes apart, in their natural order.

    Labels count from 0 in each task, unless `all_classes`: then they stay as they are.
    """
    share = share_of(dataset.classes, tasks)
    _check_examples(dataset, examples, test_examples)

    def make(task: int) -> Task:
        def part(x: np.ndarray, y: np.ndarray, limit: int | None, name: str) -> Examples:
            mine = np.flatnonzero(y // share == task)
            chosen = mine[_choice(len(mine), limit, [seed, task, name == "test"])]
            first = np.uint8(0 if all_classes else task * share)
            return Examples(x[chosen], y[chosen] - first, name=f"task {task} {name}")

        return Task(
            part(dataset.train_x, dataset.train_y, examples, "train"),
            part(dataset.test_x, dataset.test_y, test_examples, "test"),
        )

    return Stream(Spec(dataset.train_x.shape[1:], dataset.classes if all_classes else share, tasks), make)


def share_of(classes: int, tasks: int) -> int:
    """The classes of each task when they are split evenly."""
    if classes % check_positive("tasks", tasks):
        divisors = [n for n in range(1, classes + 1) if classes % n == 0]
        raise Invalid("tasks", tasks, f"{classes} classes split evenly into {divisors} tasks")
    return classes // tasks


def transformed(
    dataset: Dataset,
    tasks: int,
    transform: Callable[[int], Transform | None],
    examples: int | None,
    test_examples: int | None,
    seed: int,
) -> Stream:
    """Every task the whole data set, or its own random subset, seen through the task's transform."""
    check_positive("tasks", tasks)
    _check_examples(dataset, examples, test_examples)

    def make(task: int) -> Task:
        def part(x: np.ndarray, y: np.ndarray, limit: int | None, name: str) -> Examples:
            whole = Examples(x, y, transform(task), f"task {task} {name}")
            return whole if limit is None else whole.subset(_choice(len(x), limit, [seed, task, name == "test"]))

        return Task(
            part(dataset.train_x, dataset.train_y, examples, "train"),
            part(dataset.test_x, dataset.test_y, test_examples, "test"),
        )

    return Stream(Spec(dataset.train_x.shape[1:], dataset.classes, tasks), make)


def _check_examples(dataset: Dataset, examples: int | None, test_examples: int | None) -> None:
    for name, limit, most in (
        ("examples", examples, len(dataset.train_x)),
        ("test_examples", test_examples, len(dataset.test_x)),
    ):
        if limit is not None and check_positive(name, limit) > most:
            raise Invalid(name, limit, f"{dataset.name} has {most}")


def _choice(count: int, limit: int | None, seed: list[int]) -> np.ndarray:
    """At most `limit` of `count` indices, at random."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.random.default_rng([7, *seed]).permutation(count)[:limit]
