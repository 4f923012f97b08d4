"""What users have their examples in, as what the engine learns from: arrays, functions, data sets of other libraries.

No other library is imported: a data set is known by what it can do.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cotrain.data.examples import Batches, Empty, Examples, check_arrays, check_inputs, checked, native, pair
from cotrain.errors import Invalid

BATCH = 256  # examples taken at a time from what has them one by one
WANTED = (
    "give a pair of arrays, a function that returns an iterator of pairs (x, y), an iterator of such pairs, or a data "
    "set of PyTorch or Hugging Face"
)


@dataclass(frozen=True, eq=False)
class Items:
    """Examples that are made when they are taken, by something that has a length and can be indexed."""

    items: Any
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
            places = indices[part].tolist()
            found = _stacked(_rows(self.items, places), self.shape, self.name)
            x[part], y[part] = checked(*found, self.shape, self.classes, self.name, places)
        return x, y


Source = Examples | Items | Batches


def source_of(given: Any, shape: tuple[int, ...], classes: int, name: str, *, again: bool = False) -> Source:
    """The examples of a task; if they are read `again` and again, they must not come but once."""
    if _is_pair(given):
        x, y = (native(np.asanyarray(part)) for part in given)
        check_arrays(name, x, y, shape, classes)
        return Examples(x, y, name=name)
    if _is_indexed(given):
        if len(given) == 0:
            raise Invalid(name, "no examples", "give at least one")
        return Items(given, shape, classes, name)
    if again and hasattr(given, "__next__"):
        raise _read_once(name)
    opened = _opened(given, name)
    if _is_of_rows(given):
        return Batches(lambda: _batched(opened(), shape, name), shape, classes, name)
    return Batches(opened, shape, classes, name)


def peeked(given: Any, name: str) -> tuple[tuple[int, ...], Any]:
    """The shape of an input, and the same examples again."""
    if _is_pair(given):
        return np.shape(given[0])[1:], given
    indexed = _is_indexed(given)
    coming = iter(_rows(given, range(min(len(given), 1)))) if indexed else _opened(given, name)()
    read = []
    for some in coming:
        read.append(some)
        x, y = pair(some, name)
        if np.shape(y) != (0,):
            shape = np.shape(x) if indexed or _is_of_rows(given) else np.shape(x)[1:]
            return shape, itertools.chain(read, coming) if hasattr(given, "__next__") else given
    raise Invalid(name, "no examples", "give at least one")


def _is_pair(given: Any) -> bool:
    """Whether it is inputs and labels, and not a list of anything else."""
    return isinstance(given, tuple | list) and len(given) == 2 and all(map(_is_array, given))


def _is_array(given: Any) -> bool:
    return hasattr(given, "__array__") or (isinstance(given, list) and not any(isinstance(a, tuple) for a in given))


def _is_indexed(given: Any) -> bool:
    """Whether its examples can be had by their numbers, as those of a data set."""
    known = hasattr(given, "__getitem__") and hasattr(given, "__len__") and not callable(given)
    other = isinstance(given, list | tuple | str | Mapping) or _is_array(given) or _is_of_rows(given)
    return known and not other


def _is_of_rows(given: Any) -> bool:
    """Whether it gives its examples one by one: PyTorch and Hugging Face have the same name for that."""
    return any(kind.__name__ == "IterableDataset" for kind in type(given).__mro__)


def _opened(given: Any, name: str) -> Callable[[], Iterator[Any]]:
    """What begins a pass over what comes one after another."""
    if callable(given):
        begin: Callable[[], Any] = given
        return lambda: iter(begin())
    if hasattr(given, "__next__"):
        left = [given]

        def once() -> Iterator[Any]:
            if not left:
                raise _read_once(name)
            return left.pop()

        return once
    if isinstance(given, Iterable) and not (isinstance(given, str | Mapping) or hasattr(given, "__array__")):
        return lambda: iter(given)
    raise Invalid(name, type(given).__name__, WANTED)


def _read_once(name: str) -> Invalid:
    return Invalid(name, "an iterator", "it can be read only once; give a function that returns it")


def _batched(rows: Iterator[Any], shape: tuple[int, ...], name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of what comes one by one."""
    while some := list(itertools.islice(rows, BATCH)):
        yield _stacked(some, shape, name)


def _rows(items: Any, places: Sequence[int]) -> Sequence[Any]:
    """The examples at some places, all at once where that can be."""
    return items.__getitems__(places) if hasattr(items, "__getitems__") else [items[place] for place in places]


def _stacked(rows: Sequence[Any], shape: tuple[int, ...], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The inputs of some examples, all of one shape, and their labels."""
    x, y = zip(*(pair(row, name) for row in rows), strict=True)
    inputs = [np.asarray(one) for one in x]
    for one in inputs:
        check_inputs(name, one[None], shape)
    return np.stack(inputs), np.asarray(y)
