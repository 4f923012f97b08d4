"""Task streams: the tasks of a continual learner, each made when it is reached.

A stream depends on its own seed alone, never on a method's, so that every method sees the same tasks.
Inputs are handed out as floats of 32 bits (bytes are scaled to [0, 1]) in the shape the user gave them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from cotrain.data.examples import Examples, Transform, check_arrays, native
from cotrain.data.fetch import Dataset
from cotrain.data.sources import Source, peeked, source_of
from cotrain.errors import Invalid, check_name, check_positive

ANGLES = ("steps", "bins", "random")
INTERPOLATIONS = ("bilinear", "nearest")


class Spec(NamedTuple):
    """What a network must know of a stream."""

    shape: tuple[int, ...]  # of one input
    classes: int  # outputs of each task's head; of the widest, where they differ
    tasks: int
    widths: tuple[int, ...] = ()  # each task's own number of classes, where they differ

    def classes_of(self, task: int) -> int:
        """The classes of a task."""
        return self.widths[task] if self.widths else self.classes


class Task(NamedTuple):
    """What one task trains and is tested on."""

    train: Source
    test: Source


@dataclass(frozen=True)
class Stream:
    """A sequence of tasks: `stream[i]` makes task i.

    `phases` says which tasks are learned together: one after another, unless the stream is joint.
    """

    spec: Spec
    make: Callable[[int], Task]
    joint: bool = False

    @staticmethod
    def from_arrays(tasks: Sequence[Sequence[Any]], classes: int | Sequence[int] | None = None) -> "Stream":
        """Your own tasks, each as `(train_x, train_y, test_x, test_y)`; labels count from 0 in every task.

        `classes` is the number of classes, by default one more than the highest label of all tasks, or each task's own.
        """
        arrays = [tuple(native(np.asanyarray(a)) for a in task) for task in _some(tasks)]
        for i, task in enumerate(arrays):
            if len(task) != 4:
                raise Invalid(f"task {i}", f"{len(task)} arrays", "give (train_x, train_y, test_x, test_y)")
        if classes is None:
            labels = (y for task in arrays for y in (task[1], task[3]))
            classes = 1 + max((int(y.max(initial=0)) for y in labels if y.dtype.kind in "iu"), default=0)
        spec = _spec(arrays[0][0].shape[1:], classes, len(arrays))
        made = []
        for i, (train_x, train_y, test_x, test_y) in enumerate(arrays):
            for part, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
                check_arrays(f"task {i} {part}", x, y, spec.shape, spec.classes_of(i))
            train, test = (train_x, train_y), (test_x, test_y)
            made.append(Task(Examples(*train, name=f"task {i} train"), Examples(*test, name=f"task {i} test")))
        return Stream(spec, made.__getitem__)

    @staticmethod
    def from_tasks(
        tasks: Sequence[tuple[Any, Any]], classes: int | Sequence[int], shape: tuple[int, ...] | None = None
    ) -> "Stream":
        """Your own tasks of any size, each as `(train, test)`, of which no more than a few chunks are in memory.

        Either is a pair of arrays (memory-mapped too), a data set of PyTorch or Hugging Face, or gives batches: a
        function that returns an iterator of pairs `(x, y)` of any sizes, a generator, or a PyTorch `DataLoader`. What
        can be indexed is shuffled by seed; batches are learned in the order in which they come, and need not say how
        many they are. A generator can be read only once, and so can no test be. `classes` is their number, or each
        task's own; `shape` that of an input, by default the first one's.
        """
        tasks = list(_some(tasks))
        for i, task in enumerate(tasks):
            if not isinstance(task, tuple | list) or len(task) != 2:
                raise Invalid(f"task {i}", type(task).__name__, "give (train, test)")
        if shape is None:
            train, test = tasks[0]
            shape, train = peeked(train, "task 0 train")
            tasks[0] = train, test
        spec = _spec(shape, classes, len(tasks))
        made = []
        for i, (train, test) in enumerate(tasks):
            options = spec.shape, spec.classes_of(i)
            first = source_of(train, *options, f"task {i} train")
            made.append(Task(first, source_of(test, *options, f"task {i} test", again=True)))
        return Stream(spec, made.__getitem__)

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


def _some(tasks: Sequence[Any]) -> Sequence[Any]:
    if len(tasks) == 0:
        raise Invalid("tasks", "an empty list", "give at least one task")
    return tasks


def _spec(shape: tuple[int, ...], classes: int | Sequence[int], tasks: int) -> Spec:
    """What tasks of equal or of different numbers of classes are like."""
    most = int(np.iinfo(np.int32).max)  # labels are handed out as such
    if not isinstance(classes, Sequence):
        return Spec(tuple(shape), min(check_positive("classes", classes), most), tasks)
    widths = tuple(check_positive("classes", one) for one in classes)
    if len(widths) != tasks:
        raise Invalid("classes", list(widths), f"give one number, or one for each of the {tasks} tasks")
    return Spec(tuple(shape), max(widths), tasks, widths if len(set(widths)) > 1 else ())


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
    angles: str = "steps",
    interpolation: str = "bilinear",
    examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Stream:
    """Each task sees the images turned counter-clockwise by an angle of its own.

    `angles` are "steps", i times `step` degrees for task i; "bins", one drawn from each of as many parts of [0°, 180°)
    as there are tasks, ascending; or "random", each from all of it. `interpolation` is "bilinear" or "nearest".
    """
    check_name("angles", angles, ANGLES)
    check_name("interpolation", interpolation, INTERPOLATIONS)

    def angle(task: int) -> float:
        if angles == "steps":
            return task * step
        share = np.random.default_rng([11, seed, task]).random()
        return 180 * ((task + share) / tasks if angles == "bins" else share)

    def transform(task: int) -> Transform | None:
        degrees = angle(task)
        if degrees == 0:
            return None
        turn = rotation(dataset.train_x.shape[1:], degrees, interpolation)
        return lambda x: (turn @ x.reshape(len(x), -1).T).T.reshape(x.shape)

    return transformed(dataset, tasks, transform, examples, test_examples, seed)


def rotation(shape: tuple[int, ...], degrees: float, interpolation: str = "bilinear") -> scipy.sparse.csr_array:
    """The matrix that turns a flattened image about its centre; what comes from outside is 0."""
    height, width = shape
    angle = np.deg2rad(degrees)
    row, column = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    down, right = (row - (height - 1) / 2).ravel(), (column - (width - 1) / 2).ravel()
    # Where each pixel of the turned image comes from; rounded so that multiples of 90° are exact.
    source_row = np.round(down * np.cos(angle) + right * np.sin(angle) + (height - 1) / 2, 9)
    source_column = np.round(-down * np.sin(angle) + right * np.cos(angle) + (width - 1) / 2, 9)
    if interpolation == "nearest":
        source_row, source_column = np.floor(source_row + 0.5), np.floor(source_column + 0.5)
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
