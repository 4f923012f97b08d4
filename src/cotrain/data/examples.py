"""What a task's examples come from: arrays that can be indexed, or batches that come one after another."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from cotrain.errors import Invalid

Transform = Callable[[np.ndarray], np.ndarray]
Empty = Callable[[tuple[int, ...], Any], np.ndarray]  # from shape and type to an array to fill

BLOCK = 128  # examples transformed at a time: few enough to stay in the cache
LARGEST = np.finfo(np.float32).max  # what is larger would be infinite for JAX
INPUTS = ("image", "img", "x", "input", "inputs", "features", "pixel_values")  # columns, as they are mostly called
LABELS = ("label", "labels", "y", "target", "fine_label")


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs with labels, transformed when they are taken.

    A memory-mapped file is not read before that.
    """

    x: np.ndarray
    y: np.ndarray
    transform: Transform | None = None
    name: str = field(default="examples", repr=False)

    def __post_init__(self):
        if len(self.x) != len(self.y):
            raise Invalid(self.name, f"{len(self.x)} inputs and {len(self.y)} labels", "give one label per input")
        if len(self.x) == 0:
            raise Invalid(self.name, "no examples", "give at least one")
        if not isinstance(self.x, np.memmap):
            check_finite(self.x, self.name)

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: np.ndarray, empty: Empty = np.empty) -> tuple[np.ndarray, np.ndarray]:
        """The inputs, as floats, in an array that `empty` makes, and labels at `indices`."""
        labels, mapped = self.y[indices].astype(np.int32), isinstance(self.x, np.memmap)
        if self.transform is None and self.x.dtype == np.float32 and not mapped:
            x = empty((len(indices), *self.x.shape[1:]), np.float32)
            return np.take(self.x, indices, axis=0, out=x, mode="clip"), labels  # "raise" would copy twice
        x = np.empty(0)
        for start in range(0, len(indices), BLOCK):
            places = indices[start : start + BLOCK]
            part = native(np.asarray(self.x[places]))
            if mapped:
                check_finite(part, self.name, places)
            part = floats(part)
            part = part if self.transform is None else self.transform(part)
            x = x if start else empty((len(indices), *part.shape[1:]), wide(part))
            x[start : start + BLOCK] = part
        return x, labels

    def subset(self, indices: np.ndarray) -> "Examples":
        """Only the examples at `indices`."""
        return replace(self, x=self.x[indices], y=self.y[indices])


@dataclass(frozen=True, eq=False)
class Batches:
    """Inputs with labels that come in batches of any sizes, in the order in which they are learned.

    How many there are shows at the end. `open` is called for each pass over them.
    """

    open: Callable[[], Iterable[Any]]
    shape: tuple[int, ...]  # of one input
    classes: int
    name: str = field(default="batches", repr=False)

    def __iter__(self) -> Iterator[tuple[Float[np.ndarray, "N ..."], Int[np.ndarray, " N"]]]:
        """The batches that are not empty, with the inputs as floats of 32 bits."""
        number = -1
        try:
            for number, batch in enumerate(self.open()):
                name = f"{self.name}, batch {number}"
                x, y = (np.asarray(part) for part in pair(batch, name))
                if x.shape[:1] + y.shape[:1] != (0, 0):
                    yield checked(x, y, self.shape, self.classes, name)
        except Invalid:
            raise
        except Exception as error:
            error.add_note(f"{self.name}: this came after {number + 1} batches")
            raise


def pair(row: Any, name: str) -> tuple[Any, Any]:
    """Inputs and labels; where all has names, what is called so."""
    if isinstance(row, tuple | list) and len(row) == 2:
        return row[0], row[1]
    if not isinstance(row, Mapping):
        raise Invalid(name, type(row).__name__, "give pairs of inputs and labels")
    labels = [column for column in LABELS if column in row][:1]
    inputs = [column for column in INPUTS if column in row] or [column for column in row if column not in labels]
    if len(inputs[:1] + labels) < 2:
        known = f"{', '.join(INPUTS)} and {', '.join(LABELS)}"
        raise Invalid(f"{name} columns", list(row), f"rename those of inputs and labels; known are {known}")
    return row[inputs[0]], row[labels[0]]


def checked(
    x: np.ndarray, y: np.ndarray, shape: tuple[int, ...], classes: int, name: str, places: Sequence[int] | None = None
) -> tuple[Float[np.ndarray, "N ..."], Int[np.ndarray, " N"]]:
    """Inputs as floats of 32 bits, and labels, if they are those of a task."""
    check_arrays(name, x, y, shape, classes)
    x = native(x)
    check_finite(x, name, places)
    return floats(x).astype(np.float32, copy=False), y.astype(np.int32)


def wide(x: np.ndarray) -> np.dtype:
    """The type of inputs as floats: of 64 bits where they are so; rooms narrow it, unless JAX computes in 64."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def floats(x: np.ndarray) -> np.ndarray:
    """Inputs as floats; bytes are scaled to [0, 1]."""
    if np.issubdtype(x.dtype, np.floating):
        return x
    return x.astype(np.float32) / np.float32(255 if x.dtype == np.uint8 else 1)


def native(array: np.ndarray) -> np.ndarray:
    """The array in this machine's byte order, the only one that JAX takes; a memory-mapped file stays as it is."""
    return array if isinstance(array, np.memmap) else array.astype(array.dtype.newbyteorder("="), copy=False)


def check_finite(x: np.ndarray, name: str, places: Sequence[int] | np.ndarray | None = None) -> None:
    """Refuses inputs that are no numbers for JAX; `places` are what the examples are counted by."""
    if np.issubdtype(x.dtype, np.floating) and not (-LARGEST <= x.min(initial=0) and x.max(initial=0) <= LARGEST):
        bad = np.argwhere(~(np.abs(x) <= LARGEST))[0]
        example = bad[0] if places is None else places[bad[0]]
        raise Invalid(f"{name}, example {example}", float(x[tuple(bad)]), "inputs must be finite 32-bit numbers")


def check_arrays(name: str, x: np.ndarray, y: np.ndarray, shape: tuple[int, ...], classes: int) -> None:
    """Refuses inputs and labels that are not those of a task."""
    check_inputs(name, x, shape)
    if y.ndim != 1 or y.dtype.kind not in "iu":
        found = f"{y.dtype.name}{list(y.shape)}"
        raise Invalid(f"{name} labels", found, "labels must be one whole number per input")
    if len(x) != len(y):
        raise Invalid(name, f"{len(x)} inputs and {len(y)} labels", "give one label per input")
    if len(y) and not (0 <= y.min() and y.max() < classes):
        wrong = y[(y < 0) | (y >= classes)][0]
        raise Invalid(f"{name} labels", int(wrong), f"labels must be 0 to {classes - 1}")


def check_inputs(name: str, x: np.ndarray, shape: tuple[int, ...]) -> None:
    """Refuses inputs that are not of a shape."""
    if x.dtype.kind not in "fiub" or x.dtype.itemsize > 8:
        raise Invalid(f"{name} inputs", x.dtype.name, "inputs must be numbers of at most 64 bits")
    if x.ndim == 0 or 0 in x.shape[1:]:
        raise Invalid(f"{name} inputs", x.shape, "give an array with at least one number per input")
    if x.shape[1:] != shape:
        raise Invalid(f"{name} inputs", x.shape[1:], f"every task's inputs must have the first task's shape, {shape}")
