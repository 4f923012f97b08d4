"""What users have their examples in, as what the engine learns from: arrays, functions, data sets of other libraries.

No other library is imported: whoever has a data set of one has imported it.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cotrain.data.examples import Batches, Empty, Examples, check_arrays, check_finite, floats, native
from cotrain.errors import Invalid

BATCH = 256  # examples read at a time from what gives them one by one
INPUTS = ("image", "img", "x", "input", "inputs", "features", "pixel_values")  # columns, as they are mostly called
LABELS = ("label", "labels", "y", "target", "fine_label")
WANTED = (
    "give a pair of arrays, a function that returns an iterator of pairs (x, y), an iterator of such pairs, or a data "
    "set of PyTorch or Hugging Face"
)


@dataclass(frozen=True, eq=False)
class Items:
    """Examples that are made one by one when they are taken, by something that has a length and can be indexed."""

    items: Any
    pairs: Callable[[Any, Sequence[int]], tuple[Any, Any]]  # the inputs and labels at some places
    shape: tuple[int, ...]
    classes: int
    name: str

    def __len__(self) -> int:
        return len(self.items)

    def take(self, indices: np.ndarray, empty: Empty = np.empty) -> tuple[np.ndarray, np.ndarray]:
        """The inputs, as floats of 32 bits, in an array that `empty` makes, and labels at `indices`."""
        x, y = empty((len(indices), *self.shape), np.float32), np.empty(len(indices), np.int32)
        for start in range(0, len(indices), BATCH):
            part = slice(start, start + BATCH)
            inputs, labels = (native(np.asarray(a)) for a in self.pairs(self.items, indices[part].tolist()))
            check_arrays(self.name, inputs, labels, self.shape, self.classes)
            check_finite(inputs, self.name)
            x[part], y[part] = floats(inputs), labels
        return x, y


Source = Examples | Items | Batches


def source_of(given: Any, shape: tuple[int, ...], classes: int, name: str, *, again: bool = False) -> Source:
    """The examples of a task; if they are read `again` and again, they must not come but once."""
    options = shape, classes, name
    if isinstance(given, Examples | Batches | Items):
        return given
    if _is_pair(given):
        x, y = (native(np.asanyarray(part)) for part in given)
        check_arrays(name, x, y, shape, classes)
        return Examples(x, y, name=name)
    known = _known(given)
    if known in ("items", "rows"):
        if len(given) == 0:
            raise Invalid(name, "no examples", "give at least one")
        return Items(given, _columns if known == "rows" else _singly, *options)
    if known == "function":
        return Batches(given, *options)
    if known == "iterator":
        if again:
            raise Invalid(name, type(given).__name__, "it can be read only once; give a function that returns it")
        return Batches(_once(given, name), *options)
    if known == "singles":
        return Batches(lambda: _batched(iter(given)), *options)
    return Batches(lambda: map(_pair, given), *options)


def peeked(given: Any, name: str) -> tuple[tuple[int, ...], Any]:
    """The shape of an input, and the same examples again."""
    if isinstance(given, Batches | Items):
        return given.shape, given
    if isinstance(given, Examples):
        return given.take(np.zeros(1, int))[0].shape[1:], given
    if _is_pair(given):
        return np.shape(given[0])[1:], given
    known = _known(given)
    if known in ("items", "rows") and len(given) > 0:
        return np.shape((_columns if known == "rows" else _singly)(given, [0])[0])[1:], given
    batches = iter(given() if known == "function" else given)
    first = next(batches, None)
    if first is None:
        raise Invalid(name, "no examples", "give at least one")
    again = itertools.chain([first], batches) if known == "iterator" else given
    shape = np.shape(_pair(first)[0])
    return shape if known == "singles" else shape[1:], again


def _is_pair(given: Any) -> bool:
    """Whether it is inputs and labels, and not a list of anything else."""
    return isinstance(given, tuple | list) and len(given) == 2 and all(map(_is_array, given))


def _is_array(given: Any) -> bool:
    return hasattr(given, "__array__") or (isinstance(given, list) and not any(isinstance(a, tuple) for a in given))


def _known(given: Any) -> str:
    """How it gives its examples."""
    torch, datasets = sys.modules.get("torch.utils.data"), sys.modules.get("datasets")
    if torch is not None and isinstance(given, torch.IterableDataset):
        return "singles"
    if torch is not None and isinstance(given, torch.DataLoader):
        return "batches"
    if datasets is not None and isinstance(given, datasets.Dataset):
        return "rows"
    if datasets is not None and isinstance(given, datasets.IterableDataset):
        return "singles"
    if callable(given):
        return "function"
    if hasattr(given, "__next__"):
        return "iterator"
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, list | tuple | str | dict):
        return "items"
    if isinstance(given, Iterable) and not isinstance(given, str | dict):
        return "batches"
    raise Invalid("examples", type(given).__name__, WANTED)


def _once(given: Iterator[Any], name: str) -> Callable[[], Iterator[Any]]:
    """Opens an iterator; a second time, that is an error."""
    left = [given]

    def opened() -> Iterator[Any]:
        if not left:
            raise Invalid(name, "an iterator", "it can be read only once; give a function that returns it")
        return left.pop()

    return opened


def _batched(singles: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Batches of what comes one by one."""
    while some := list(itertools.islice(singles, BATCH)):
        inputs, labels = zip(*map(_pair, some), strict=True)
        yield np.stack([np.asarray(x) for x in inputs]), np.asarray(labels)


def _singly(items: Any, indices: Sequence[int]) -> tuple[Any, Any]:
    """Some items of something that is indexed by a number."""
    inputs, labels = zip(*(_pair(items[i]) for i in indices), strict=True)
    return np.stack([np.asarray(x) for x in inputs]), np.asarray(labels)


def _columns(dataset: Any, indices: Sequence[int]) -> tuple[Any, Any]:
    """Some rows of a Hugging Face data set."""
    inputs, labels = _pair(dataset[indices])
    return np.stack([np.asarray(x) for x in inputs]), np.asarray(labels)


def _pair(row: Any) -> tuple[Any, Any]:
    """Inputs and labels; of a row with names, those that are called so."""
    if not isinstance(row, dict):
        return row
    [y] = [name for name in LABELS if name in row][:1] or [None]
    [x] = [name for name in INPUTS if name in row][:1] or [name for name in row if name != y][:1] or [None]
    if x is None or y is None:
        known = f"{', '.join(INPUTS)} and {', '.join(LABELS)}"
        raise Invalid("columns", list(row), f"rename the columns of inputs and labels; known are {known}")
    return row[x], row[y]
