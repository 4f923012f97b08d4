"""Episodic memories: a reservoir, which holds every example seen so far with the same probability (Vitter 1985), and
rings, which hold the last of each task (Lopez-Paz and Ranzato 2017).

Beside each example they can hold further columns that a method names, as the logits that its network gave.

Axes: N places, B examples of a batch, T tasks, R rings of a task.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped, UInt32

from cotrain.data.batch import Batch
from cotrain.data.stream import Spec
from cotrain.errors import Invalid, check_positive


class Memory(NamedTuple):
    """What a memory holds."""

    x: Float[Array, "N ..."]  # of rings, these have axes T and N
    y: Int[Array, " N"]
    task: Int[Array, " N"]
    seen: Int[Array, ""] | Int[Array, "T R"]  # examples offered so far; of each ring, where there are some
    next: Batch  # what will be replayed next, with weight 0 while there is nothing
    columns: dict[str, Shaped[Array, "N ..."]]  # what else is held of each example
    next_columns: dict[str, Shaped[Array, "B ..."]]


class Buffer(Protocol):
    """What a method asks of a memory: `batch` examples are drawn from it at a time."""

    @property
    def batch(self) -> int: ...

    def init(self, spec: Spec, **columns: tuple[int, ...]) -> Memory: ...

    def draw(self, key: PRNGKeyArray, size: int) -> Any: ...

    def sample(self, memory: Memory) -> Batch: ...

    def columns(self, memory: Memory) -> dict[str, Shaped[Array, "B ..."]]: ...

    def add(self, memory: Memory, batch: Batch, bits: Any, columns: Mapping[str, Array] | None = None) -> Memory: ...


class Reservoir(eqx.Module):
    """A memory of `capacity` examples from which `batch` are drawn at a time."""

    capacity: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)

    def init(self, spec: Spec, **columns: tuple[int, ...]) -> Memory:
        """An empty memory: M ← {}; `columns` are the shapes of what else it holds of an example."""
        return _empty(spec, self.capacity, self.batch, jnp.zeros((), jnp.int32), columns)

    def draw(self, key: PRNGKeyArray, size: int) -> tuple[UInt32[Array, "size 2"], UInt32[Array, "B 2"]]:
        """The random bits that adding `size` examples takes: to place them, and to pick the next batch."""
        place, pick = jax.random.split(key)
        return jax.random.bits(place, (size, 2), jnp.uint32), jax.random.bits(pick, (self.batch, 2), jnp.uint32)

    def sample(self, memory: Memory) -> Batch:
        """A batch of stored examples, each drawn uniformly: (x_M, y_M) = sample_batch(M).

        It was drawn when the memory last changed: a loop that wrote to the memory after reading from it would copy
        the whole memory in every step.
        """
        return memory.next

    def columns(self, memory: Memory) -> dict[str, Shaped[Array, "B ..."]]:
        """What else is held of the examples of `sample`."""
        return memory.next_columns

    def add(
        self, memory: Memory, batch: Batch, bits: tuple[Array, Array], columns: Mapping[str, Array] | None = None
    ) -> Memory:
        """Offers a batch to the memory, as if its examples came one by one: M ← M ∪ (x, y).

        `columns` has what the memory is to hold of each example besides, by the names that `init` was given.
        """
        real = batch.weight > 0
        seen = memory.seen + jnp.cumsum(real, dtype=memory.seen.dtype)  # with each example
        place = jnp.where(seen <= self.capacity, seen - 1, below(seen, bits[0]))
        memory = _written(memory, batch, jnp.where(real, place, self.capacity), columns or {})
        filled = jnp.minimum(seen[-1], self.capacity)
        picked = below(jnp.broadcast_to(filled, self.batch), bits[1])
        return _drawn(memory._replace(seen=seen[-1]), picked, filled)


class Ring(eqx.Module):
    """A memory of the last `places` examples of each task, or of each class of each task (`by_class`).

    `batch` are drawn at a time, from all that it holds of other tasks than the current one.
    """

    places: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    by_class: bool = eqx.field(static=True)

    def init(self, spec: Spec, **columns: tuple[int, ...]) -> Memory:
        """An empty memory: M ← {}; each task has places of its own, so that more tasks can follow."""
        seen = jnp.zeros((spec.tasks, spec.classes if self.by_class else 1), jnp.int32)
        return _folded(_empty(spec, seen.size * self.places, self.batch, seen, columns), spec.tasks, -1)

    def draw(self, key: PRNGKeyArray, size: int) -> UInt32[Array, "B 2"]:
        """The random bits that adding examples takes: to pick the next batch."""
        del size
        return jax.random.bits(key, (self.batch, 2), jnp.uint32)

    def sample(self, memory: Memory) -> Batch:
        """A batch of stored examples, each drawn uniformly from those of other tasks, when the memory last changed."""
        return memory.next

    def columns(self, memory: Memory) -> dict[str, Shaped[Array, "B ..."]]:
        """What else is held of the examples of `sample`."""
        return memory.next_columns

    def add(self, memory: Memory, batch: Batch, bits: Array, columns: Mapping[str, Array] | None = None) -> Memory:
        """Offers a batch to the memory: each example takes the place of the oldest of its ring, M_t ← M_t ∪ (x, y)."""
        memory, real = _folded(memory, -1), batch.weight > 0
        ring = batch.tasks * memory.seen.shape[1] + (batch.y if self.by_class else 0)
        before = jnp.tril((ring[:, None] == ring[None, :]) & real[None, :], k=-1).sum(axis=1)  # of the same ring
        place = ring * self.places + (memory.seen.ravel()[ring] + before) % self.places
        memory = _written(memory, batch, jnp.where(real, place, len(memory.y)), columns or {})
        seen = memory.seen.ravel().at[ring].add(real).reshape(memory.seen.shape)

        stored = jnp.minimum(seen, self.places)
        if batch.task.ndim == 0:
            stored = stored.at[batch.task].set(0)
        stored = stored.reshape(1, -1)
        memory = _drawn(memory._replace(seen=seen), self._at(stored, bits[None])[0], stored.sum())
        return _folded(memory, len(seen), -1)

    def of_each(self, memory: Memory, bits: UInt32[Array, "T B 2"] | None = None) -> Batch:
        """Stored examples of each task, uniformly drawn, or all: a batch with an axis T in front.

        It reads the whole memory, so it must come after `add`, never before it in the same step.
        """
        stored, tasks = jnp.minimum(memory.seen, self.places), jnp.arange(len(memory.seen), dtype=jnp.int32)
        if bits is None:
            x, y = memory.x, memory.y
            there = (jnp.arange(self.places)[None, None, :] < stored[:, :, None]).reshape(y.shape)
        else:
            at = tasks[:, None], self._at(stored, bits)
            x, y = memory.x[at], memory.y[at]
            there = jnp.broadcast_to(stored.sum(axis=1, keepdims=True) > 0, y.shape)
        return Batch(x, y, tasks, there.astype(x.dtype))

    def _at(self, stored: Int[Array, "D G"], bits: UInt32[Array, "D B 2"]) -> Int[Array, "D B"]:
        """Places drawn from the filled ones of some rings that follow each other, for each of D rows."""
        ends = jnp.cumsum(stored, axis=1)
        number = below(jnp.broadcast_to(ends[:, -1:], bits.shape[:2]), bits)  # among the filled ones
        ring = (ends[:, None, :] <= number[:, :, None]).sum(axis=2)
        ring = jnp.minimum(ring, stored.shape[1] - 1)  # where nothing is filled
        return ring * self.places + number - jnp.take_along_axis(ends - stored, ring, axis=1)


def _empty(spec: Spec, size: int, batch: int, seen: Array, columns: Mapping[str, tuple[int, ...]]) -> Memory:
    """A memory of so many places."""

    def blank(size: int) -> tuple[Array, Array, Array]:
        return jnp.zeros((size, *spec.shape)), jnp.zeros(size, jnp.int32), jnp.zeros(size, jnp.int32)

    nothing = Batch(*blank(batch), weight=jnp.zeros(batch))
    held, drawn = ({name: jnp.zeros((n, *shape)) for name, shape in columns.items()} for n in (size, batch))
    return Memory(*blank(size), seen, nothing, held, drawn)


def _folded(memory: Memory, *places: int) -> Memory:
    """The memory with its places in these axes."""

    def fold(a: Array) -> Array:
        return a.reshape(*places, *a.shape[memory.y.ndim :])

    x, y, task, columns = jax.tree.map(fold, (memory.x, memory.y, memory.task, memory.columns))
    return memory._replace(x=x, y=y, task=task, columns=columns)


def _written(memory: Memory, batch: Batch, place: Int[Array, " B"], columns: Mapping[str, Array]) -> Memory:
    """The memory with the examples of a batch at these places, of which those past the end are not kept."""
    again = jnp.triu(place[:, None] == place[None, :], k=1).any(axis=1)  # a later example takes the same place
    place = jnp.where(again, len(memory.y), place)
    x = memory.x.at[place].set(batch.x, mode="drop")
    y = memory.y.at[place].set(batch.y, mode="drop")
    task = memory.task.at[place].set(batch.tasks, mode="drop")
    held = {name: old.at[place].set(columns[name], mode="drop") for name, old in memory.columns.items()}
    return memory._replace(x=x, y=y, task=task, columns=held)


def _drawn(memory: Memory, picked: Int[Array, " B"], filled: Int[Array, ""]) -> Memory:
    """The memory with what is at these places to be replayed next, unless there is nothing."""
    weight = jnp.broadcast_to(filled > 0, picked.shape).astype(memory.x.dtype)
    following = Batch(memory.x[picked], memory.y[picked], memory.task[picked], weight)
    return memory._replace(next=following, next_columns={name: c[picked] for name, c in memory.columns.items()})


CAPACITY, BATCH = 1000, 10


def reservoir(capacity: int = CAPACITY, batch: int = BATCH) -> Reservoir:
    """A memory of `capacity` examples, kept by reservoir sampling, from which `batch` are replayed at a time."""
    return Reservoir(check_positive("memory", capacity), check_positive("memory_batch", batch))


def ring(spec: Spec, capacity: int, batch: int = BATCH, *, by_class: bool = False) -> Ring:
    """A memory of the last examples of each task, or of each class of each task, which share `capacity` evenly.

    `batch` are replayed at a time, of other tasks than the current one; 0 is for who reads them by `of_each`.
    """
    rings = spec.tasks * (spec.classes if by_class else 1)
    if check_positive("memory", capacity) < rings:
        raise Invalid("memory", capacity, f"give at least {rings}, one for each {'class of a ' * by_class}task")
    return Ring(capacity // rings, check_positive("memory_batch", batch, least=0), by_class)


@dataclass(frozen=True)
class ReservoirOptions:
    """holds every example so far with the same probability"""

    def __call__(self, spec: Spec, capacity: int, batch: int) -> Reservoir:
        del spec
        return reservoir(capacity, batch)


@dataclass(frozen=True)
class RingOptions:
    """holds the last examples of each task"""

    by_class: bool = True
    """hold as many of each class of a task"""

    def __call__(self, spec: Spec, capacity: int, batch: int) -> Ring:
        return ring(spec, capacity, batch, by_class=self.by_class)


def below(bound: Int[Array, "*shape"], bits: UInt32[Array, "*shape 2"]) -> Int[Array, "*shape"]:
    """Whole numbers in [0, bound), uniform to one part in 2**64 / bound: ⌊bound · bits / 2**64⌋ (0 if bound is 0)."""
    bound = bound.astype(jnp.uint32)
    high, low = _product(bound, bits[..., 0])
    carried = low + _product(bound, bits[..., 1])[0]
    return (high + (carried < low)).astype(jnp.int32)


def _product(a: UInt32[Array, "*shape"], b: UInt32[Array, "*shape"]) -> tuple[Array, Array]:
    """The high and the low 32 bits of a product, from 16-bit halves."""
    half = jnp.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> 16, a & half, b >> 16, b & half
    middle = a_high * b_low + (a_low * b_low >> 16)
    other = a_low * b_high + (middle & half)
    return a_high * b_high + (middle >> 16) + (other >> 16), a * b
