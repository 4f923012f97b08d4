"""A phase's minibatches, laid out in memory that is kept."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from cotrain.data.batch import Batch
from cotrain.data.examples import Batches, Empty
from cotrain.data.sources import Source
from cotrain.data.stream import Stream
from cotrain.errors import Invalid

ALIGNED = 64  # bytes, of which arrays start at a multiple


class Room:
    """Memory that is filled again and again: the system takes longer to hand out as much anew.

    What was there before must not be needed any more: a chunk is laid out when the one before has been learned.
    """

    def __init__(self):
        self.bytes = np.empty(0, np.uint8)
        self.widest = np.dtype(jnp.result_type(float))  # in which JAX computes

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array in this memory, placed so that JAX uses it as it is, without a copy."""
        dtype = self.widest if dtype == np.float64 else np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if len(self.bytes) < size + ALIGNED:
            self.bytes = np.empty(size + ALIGNED, np.uint8)
        start = -self.bytes.ctypes.data % ALIGNED
        return self.bytes[start : start + size].view(dtype).reshape(shape)


class Feed:
    """The minibatches of a phase, for one seed: every example once an epoch, in random order."""

    def __init__(self, parts: Sequence[Source], tasks: Sequence[int], seed: int, phase: int, batch: int, epochs: int):
        self.parts: Any = parts
        self.tasks, self.seed, self.phase, self.batch = tasks, seed, phase, batch
        self.starts = np.cumsum([0, *(len(part) for part in self.parts)])
        self.per_epoch = -(-int(self.starts[-1]) // batch)
        self.steps: int | None = self.per_epoch * epochs
        self.epoch, self.epoch_order = -1, np.empty(0, int)

    def order(self, epoch: int) -> Int[np.ndarray, "minibatches B"]:
        """The examples of an epoch's minibatches; -1 fills up the last one."""
        if epoch != self.epoch:
            total = int(self.starts[-1])
            order = np.random.default_rng([11, self.seed, self.phase, epoch]).permutation(total)
            padding = np.full(self.per_epoch * self.batch - total, -1)
            self.epoch = epoch
            self.epoch_order = np.concatenate([order, padding]).reshape(self.per_epoch, self.batch)
        return self.epoch_order

    def minibatches(self, start: int, count: int, size: int, empty: Empty) -> Batch:
        """The `count` minibatches from `start` on, in room for `size`, which has anything behind them."""
        assert self.steps is not None
        places = np.minimum(np.arange(start, start + max(count, 1)), self.steps - 1)
        epoch, place = np.divmod(places, self.per_epoch)
        index = np.concatenate([self.order(int(now))[place[epoch == now]] for now in np.unique(epoch)])
        return self._taken(index, size, empty)

    def like(self, size: int, empty: Empty) -> Batch:
        """Room for minibatches, of the same types."""
        return self.minibatches(0, 1, size, empty)

    def _taken(self, index: Int[np.ndarray, "minibatches B"], size: int, empty: Empty) -> Batch:
        """The examples at some places of the phase; -1 is padding."""
        flat, front = np.maximum(index, 0).ravel(), Front(empty, size * self.batch)
        part = np.searchsorted(self.starts, flat, side="right") - 1
        if len(self.parts) == 1:
            _, labels = self.parts[0].take(flat, front)
        else:
            pieces = {i: self.parts[i].take(flat[part == i] - self.starts[i]) for i in np.unique(part)}
            inputs = [x for x, _ in pieces.values()]
            x, labels = front((len(flat), *inputs[0].shape[1:]), np.result_type(*inputs)), np.empty(len(flat), np.int32)
            for i, piece in pieces.items():
                x[part == i], labels[part == i] = piece
        task, weight = np.asarray(self.tasks, np.int32), np.zeros((size, self.batch), np.float32)
        tasks, y = np.full(weight.shape if len(task) > 1 else size, task[0]), np.zeros(weight.size, np.int32)
        weight[: len(index)], y[: len(flat)] = index >= 0, labels
        if len(task) > 1:
            tasks[: len(index)] = task[part].reshape(index.shape)
        return laid_out(front.whole, y, tasks, weight)


class Front:
    """Makes an array as the first rows of a longer one, which it keeps."""

    def __init__(self, empty: Empty, rows: int):
        self.empty, self.rows, self.whole = empty, rows, np.empty(0)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self.whole = self.empty((self.rows, *shape[1:]), dtype)
        return self.whole[: shape[0]]


class Cut:
    """The minibatches of a phase whose examples come in batches of other sizes, in their order."""

    def __init__(self, source: Batches, task: int, batch: int, epochs: int):
        self.source, self.task, self.batch = source, task, batch
        self.steps: int | None = None  # not known before the end has been seen
        self.at = 0  # minibatches that are behind
        self.blocks, self.block = _passes(source, epochs), None  # what is left of the present one, if one has been read

    def minibatches(self, start: int, count: int, size: int, empty: Empty) -> Batch:
        """As those of `Feed`, but `start` is never before where they ended the last time."""
        while self.at < start and self.steps is None:  # as when a run is taken up again
            some = min(size, start - self.at)
            self._fill(self.like(some, np.empty), some)
        batch = self.like(size, empty)
        if self.steps is None:
            self._fill(batch, count)
        return batch

    def like(self, size: int, empty: Empty) -> Batch:
        """Room for minibatches: of weight 0, with anything in it."""
        x, weight = empty((size * self.batch, *self.source.shape), np.float32), np.zeros((size, self.batch), np.float32)
        return laid_out(x, np.zeros(len(x), np.int32), np.full(size, self.task, np.int32), weight)

    def _fill(self, batch: Batch, count: int) -> None:
        """Puts the next examples into as many minibatches."""
        x, y, weight = (np.asarray(a).reshape(-1, *np.shape(a)[2:]) for a in (batch.x, batch.y, batch.weight))
        place, end = 0, count * self.batch
        x[:end] = 0
        self.block = next(self.blocks) if self.block is None else self.block
        while self.block is not None and place < end:
            inputs, labels = self.block
            size = min(len(labels), end - place)
            part = slice(place, place + size)
            x[part], y[part], weight[part] = inputs[:size], labels[:size], 1
            place, self.block = place + size, (inputs[size:], labels[size:])
            if size == len(labels):
                self.block = next(self.blocks)
            if self.block is None:  # a pass has ended, and with it its last minibatch
                place, self.block = -(-place // self.batch) * self.batch, next(self.blocks, None)
        self.at += -(-place // self.batch)
        if self.block is None:
            self.steps = self.at


def _passes(source: Batches, epochs: int) -> Iterator[Any]:
    """The batches of all passes, with None at the end of each."""
    for _ in range(epochs):
        block = None
        for block in source:
            yield block
        if block is None:
            raise Invalid(source.name, "no examples", "give at least one")
        yield None


def feed(stream: Stream, phase: int, seed: int, batch: int, epochs: int) -> Feed | Cut:
    """The minibatches of a stream's phase, for one seed."""
    tasks = stream.phases[phase]
    parts = [stream[task].train for task in tasks]
    if not any(isinstance(part, Batches) for part in parts):
        return Feed(parts, tasks, seed, phase, batch, epochs)
    if stream.joint or not isinstance(parts[0], Batches):
        raise Invalid("stream", "joint", "tasks that come as batches cannot be shuffled together")
    return Cut(parts[0], tasks[0], batch, epochs)


def laid_out(
    x: Float[np.ndarray, "N ..."], y: Int[np.ndarray, " N"], tasks: np.ndarray, weight: Float[np.ndarray, "C B"]
) -> Batch:
    """Minibatches with an axis for them, of examples in a row."""
    parts: Any = (x.reshape(*weight.shape, *x.shape[1:]), y.reshape(weight.shape), tasks, weight)
    return Batch(*parts)  # NumPy arrays here, JAX arrays in the compiled loop
