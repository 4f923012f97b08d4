"""A phase's minibatches, laid out in memory that is kept."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

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

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array in this memory, placed so that JAX uses it as it is, without a copy."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
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
        """The `count` minibatches from `start` on, and others up to `size`; past the phase's end, any."""
        del count
        assert self.steps is not None
        epoch, place = np.divmod(np.minimum(np.arange(start, start + size), self.steps - 1), self.per_epoch)
        index = np.concatenate([self.order(int(now))[place[epoch == now]] for now in np.unique(epoch)])
        return self._taken(index, empty)

    def like(self, size: int, empty: Empty) -> Batch:
        """Any minibatches, of the same types."""
        return self.minibatches(0, size, size, empty)

    def _taken(self, index: Int[np.ndarray, "minibatches B"], empty: Empty) -> Batch:
        """The examples at some places of the phase; -1 is padding."""
        flat = np.maximum(index, 0).ravel()
        part = np.searchsorted(self.starts, flat, side="right") - 1
        if len(self.parts) == 1:
            x, y = self.parts[0].take(flat, empty)
        else:
            pieces = {i: self.parts[i].take(flat[part == i] - self.starts[i]) for i in np.unique(part)}
            dtype = np.result_type(*(inputs for inputs, _ in pieces.values()))
            shape = next(iter(pieces.values()))[0].shape[1:]
            x, y = empty((len(flat), *shape), dtype), np.empty(len(flat), np.int32)
            for i, piece in pieces.items():
                x[part == i], y[part == i] = piece
        task = np.asarray(self.tasks, np.int32)
        tasks = np.broadcast_to(task[0], len(index)) if len(task) == 1 else task[part].reshape(index.shape)
        return laid_out(x, y, tasks, (index >= 0).astype(np.float32))


class Cut:
    """The minibatches of a phase whose examples come in batches of other sizes, in their order."""

    def __init__(self, source: Batches, task: int, batch: int, epochs: int):
        self.source, self.task, self.batch, self.epochs = source, task, batch, epochs
        self.steps: int | None = None  # not known before the end has been seen
        self.at, self.blocks, self.block = 0, None, ()  # nothing is read before it is needed

    def _begin(self) -> None:
        self.at = 0  # minibatches that are behind
        self.blocks = self._blocks()
        self.block = next(self.blocks)  # what is left of the present one; () at the end of all
        if self.block is None:
            raise Invalid(self.source.name, "no examples", "give at least one")

    def _blocks(self) -> Iterator[Any]:
        """The blocks of all passes, with None at the end of each."""
        for _ in range(self.epochs):
            yield from (block for block in self.source if len(block[1]))
            yield None

    def minibatches(self, start: int, count: int, size: int, empty: Empty) -> Batch:
        """The `count` minibatches from `start` on, and zeros up to `size`; past the phase's end, zeros."""
        if self.blocks is None or start < self.at:
            self._begin()
        while self.at < start and self.steps is None:  # as when a run is taken up again
            some = min(size, start - self.at)
            self._fill(self.like(some, np.empty), some)
        batch = self.like(size, empty)
        if self.steps is None:
            self._fill(batch, count)
        return batch

    def like(self, size: int, empty: Empty) -> Batch:
        """Minibatches of zeros."""
        x = empty((size * self.batch, *self.source.shape), np.float32)
        x[:] = 0
        weight = np.zeros((size, self.batch), np.float32)
        return laid_out(x, np.zeros(len(x), np.int32), np.full(size, self.task, np.int32), weight)

    def _fill(self, batch: Batch, count: int) -> None:
        """Puts the next examples into as many minibatches of zeros."""
        x, y, weight = (np.asarray(a).reshape(-1, *np.shape(a)[2:]) for a in (batch.x, batch.y, batch.weight))
        place, end = 0, count * self.batch
        while self.block and place < end:
            size = min(len(self.block[1]), end - place)
            x[place : place + size], y[place : place + size] = (part[:size] for part in self.block)
            weight[place : place + size] = 1
            place, self.block = place + size, tuple(part[size:] for part in self.block)
            if len(self.block[1]) == 0:
                self.block = next(self.blocks)
            while self.block is None:  # a pass has ended, and with it its last minibatch
                place, self.block = -(-place // self.batch) * self.batch, next(self.blocks, ())
        self.at += -(-place // self.batch)
        if self.block == ():
            self.steps = self.at


def feed(stream: Stream, phase: int, seed: int, batch: int, epochs: int) -> Feed | Cut:
    """The minibatches of a stream's phase, for one seed."""
    tasks = stream.phases[phase]
    parts = [stream[task].train for task in tasks]
    if not any(isinstance(part, Batches) for part in parts):
        return Feed(parts, tasks, seed, phase, batch, epochs)
    if stream.joint:
        raise Invalid("stream", "joint", "tasks that come as batches cannot be shuffled together")
    [task], [source] = tasks, parts
    return Cut(source, task, batch, epochs)


def laid_out(
    x: Float[np.ndarray, "N ..."], y: Int[np.ndarray, " N"], tasks: np.ndarray, weight: Float[np.ndarray, "C B"]
) -> Batch:
    """Minibatches with an axis for them, of examples in a row."""
    parts: Any = (x.reshape(*weight.shape, *x.shape[1:]), y.reshape(weight.shape), tasks, weight)
    return Batch(*parts)  # NumPy arrays here, JAX arrays in the compiled loop
