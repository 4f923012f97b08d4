"""Streams by name: from options and a seed to tasks.

A benchmark is called with a function that loads a data set by its name, and returns its stream as a function of a run's
seed. `spec` is the shape of its tasks where that is known before there is data, else None.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from cotrain.data.arrays import load_arrays
from cotrain.data.fetch import Dataset
from cotrain.data.stream import ANGLES, INTERPOLATIONS, Spec, Stream, permuted, rotated, share_of, split
from cotrain.errors import Invalid, check_name, check_positive

CLASSES, SHAPE = 10, (28, 28)  # of MNIST and its drop-ins

Load = Callable[[str], Dataset]


class Benchmark(Protocol):
    """Options that make a stream.

    Where more `tasks` leave the first ones as they are, it may say so with `grows = True`: then runs go on with more.
    """

    @property
    def spec(self) -> Spec | None: ...

    def __call__(self, load: Load) -> Callable[[int], Stream]: ...


@dataclass(frozen=True)
class Images(ABC):
    """tasks made of a data set of images"""

    tasks: int = 20
    """number of tasks"""
    examples: int | None = None
    """training examples per task; by default all"""
    test_examples: int | None = None
    """test examples per task; by default all"""
    validation: int | None = None
    """keep this many training images apart and test on those, for choosing options; by default test on the test set"""
    stream_seed: int | None = None
    """what makes the tasks; by default the run's seed, which is the same for every method"""
    dataset: ClassVar[str] = "mnist"

    def __post_init__(self):
        check_positive("tasks", self.tasks)
        for field in ("examples", "test_examples", "validation"):
            if getattr(self, field) is not None:
                check_positive(field, getattr(self, field))
        if self.stream_seed is not None:
            check_positive("stream_seed", self.stream_seed, least=0)

    @property
    def spec(self) -> Spec:
        return Spec(SHAPE, CLASSES, self.tasks)

    @property
    def grows(self) -> bool:
        """Whether the first tasks are the same, however many follow."""
        return True

    def __call__(self, load: Load) -> Callable[[int], Stream]:
        dataset = load(self.dataset)
        dataset = dataset if self.validation is None else held_out(dataset, self.validation)
        return lambda seed: self.stream(dataset, seed if self.stream_seed is None else self.stream_seed)

    @abstractmethod
    def stream(self, dataset: Dataset, seed: int) -> Stream:
        """The tasks that a seed makes of the data set."""

    @property
    def sizes(self) -> dict[str, Any]:
        """How many examples of each task."""
        return {"examples": self.examples, "test_examples": self.test_examples}


@dataclass(frozen=True)
class RotatedMnist(Images):
    """MNIST, each task turned a little further"""

    rotation_step: float = 9.0
    """degrees between one task and the next"""
    angles: str = "steps"
    """steps of so many degrees; bins, one angle from each of as many parts of 180 degrees as tasks; random, from all"""
    interpolation: str = "bilinear"
    """what a turned pixel is made of: bilinear, the four nearest ones; nearest, that one, as PIL does by default"""

    def __post_init__(self):
        super().__post_init__()
        if not math.isfinite(self.rotation_step):
            raise Invalid("rotation_step", self.rotation_step, "choose a number of degrees")
        check_name("angles", self.angles, ANGLES)
        check_name("interpolation", self.interpolation, INTERPOLATIONS)
        if self.angles != "steps" and self.rotation_step != type(self).rotation_step:
            raise Invalid("rotation_step", self.rotation_step, f"it is for angles in steps, and not {self.angles}")

    @property
    def grows(self) -> bool:
        return self.angles != "bins"  # which are as many as tasks, and so move where there are more

    def stream(self, dataset: Dataset, seed: int) -> Stream:
        how = {"step": self.rotation_step, "angles": self.angles, "interpolation": self.interpolation}
        return rotated(dataset, self.tasks, **how, **self.sizes, seed=seed)


@dataclass(frozen=True)
class PermutedMnist(Images):
    """MNIST, each task with its pixels in an order of its own"""

    permute_first: bool = False
    """permute the first task too"""

    def stream(self, dataset: Dataset, seed: int) -> Stream:
        return permuted(dataset, self.tasks, permute_first=self.permute_first, **self.sizes, seed=seed)


@dataclass(frozen=True)
class SplitMnist(Images):
    """MNIST, each task with some of its classes"""

    tasks: int = 5
    """number of tasks, each with as many of the classes"""
    all_classes: bool = False
    """labels tell all classes apart, and not those of a task alone: with one head, learning by classes"""

    @property
    def spec(self) -> Spec:
        return Spec(SHAPE, CLASSES if self.all_classes else share_of(CLASSES, self.tasks), self.tasks)

    @property
    def grows(self) -> bool:
        return False

    def stream(self, dataset: Dataset, seed: int) -> Stream:
        return split(dataset, self.tasks, all_classes=self.all_classes, **self.sizes, seed=seed)


@dataclass(frozen=True)
class RotatedFashionMnist(RotatedMnist):
    """Fashion-MNIST, each task turned a little further"""

    dataset: ClassVar[str] = "fashion-mnist"


@dataclass(frozen=True)
class PermutedFashionMnist(PermutedMnist):
    """Fashion-MNIST, each task with its pixels in an order of its own"""

    dataset: ClassVar[str] = "fashion-mnist"


@dataclass(frozen=True)
class SplitFashionMnist(SplitMnist):
    """Fashion-MNIST, each task with some of its classes"""

    dataset: ClassVar[str] = "fashion-mnist"


@dataclass(frozen=True)
class Arrays:
    """your own tasks, from a file"""

    arrays: str
    """an .npz file with train_x_0, train_y_0, test_x_0, test_y_0, train_x_1, …"""
    spec: ClassVar[None] = None

    def __call__(self, load: Load) -> Callable[[int], Stream]:
        stream = load_arrays(Path(self.arrays))
        return lambda seed: stream


def held_out(dataset: Dataset, count: int) -> Dataset:
    """The data set with its last training images in the place of the test images."""
    size = len(dataset.train_x)
    if count >= size:
        raise Invalid("validation", count, f"choose fewer than the {size} training images")
    (train_x, test_x), (train_y, test_y) = (np.split(a, [size - count]) for a in (dataset.train_x, dataset.train_y))
    return dataset._replace(train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
