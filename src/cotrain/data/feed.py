"""A phase's minibatches, laid out in memory that is kept."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from cotrain.data.batch import Batch
from cotrain.data.stream import Empty, Stream

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

    def __init__(
        self, stream: Stream, tasks: Sequence[int], seed: int, phase: int, batch: int, epochs: int, room: Room
    ):
        self.room = room
        self.joint, self.tasks, self.seed, self.phase, self.batch = stream.joint, tasks, seed, phase, batch
        self.parts = [stream[task].train for task in tasks]
        self.starts = np.cumsum([0, *(len(part) for part in self.parts)])
        self.per_epoch = -(-int(self.starts[-1]) // batch)
        self.steps = self.per_epoch * epochs
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

    def minibatches(self, start: int, count: int) -> Batch:
        """The `count` minibatches from `start` on; past the phase's end, any."""
        epoch, place = np.divmod(np.minimum(np.arange(start, start + count), self.steps - 1), self.per_epoch)
        index = np.concatenate([self.order(int(now))[place[epoch == now]] for now in np.unique(epoch)])
        return self._taken(index, self.room)

    def some(self, count: int) -> Batch:
        """So many of the phase's examples, drawn without replacement; where there are fewer, the rest is padding."""
        total = int(self.starts[-1])
        index = np.random.default_rng([13, self.seed, self.phase]).permutation(total)[:count]
        batch = self._taken(np.concatenate([index, np.full(count - len(index), -1, int)])[None], np.empty)
        return Batch(*(array[0] for array in batch))

    def _taken(self, index: Int[np.ndarray, "minibatches B"], empty: Empty) -> Batch:
        """The examples at some places of the phase; -1 is padding."""
        flat = np.maximum(index, 0).ravel()
        part = np.searchsorted(self.starts, flat, side="right") - 1
        if len(self.parts) == 1 or not len(flat):
            x, y = self.parts[0].take(flat, empty)
        else:
            pieces = {i: self.parts[i].take(flat[part == i] - self.starts[i]) for i in np.unique(part)}
            dtype = np.result_type(*(inputs for inputs, _ in pieces.values()))
            x, y = empty((len(flat), *self.parts[0].x.shape[1:]), dtype), np.empty(len(flat), np.int32)
            for i, piece in pieces.items():
                x[part == i], y[part == i] = piece
        task = np.asarray(self.tasks, np.int32)
        parts: Any = (  # NumPy arrays here, JAX arrays in the compiled loop
            x.reshape(*index.shape, *self.parts[0].x.shape[1:]),
            y.reshape(index.shape),
            task[part].reshape(index.shape) if self.joint else np.broadcast_to(task[0], len(index)),
            (index >= 0).astype(np.float32),
        )
        return Batch(*parts)
