"""The episodic memory: a reservoir that holds every example seen so far with the same probability (Vitter 1985).

Beside each example it can hold further columns that a method names, as the logits that its network gave.

Axes: N places, B examples of a batch.
"""

from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped, UInt32

from cotrain.data.batch import Batch
from cotrain.data.stream import Spec
from cotrain.errors import check_positive


class Memory(NamedTuple):
    """What a reservoir holds."""

    x: Float[Array, "N ..."]
    y: Int[Array, " N"]
    task: Int[Array, " N"]
    seen: Int[Array, ""]  # examples offered so far; the first min(seen, N) places are filled
    next: Batch  # what will be replayed next, with weight 0 while there is nothing
    columns: dict[str, Shaped[Array, "N ..."]]  # what else is held of each example
    next_columns: dict[str, Shaped[Array, "B ..."]]


class Reservoir(eqx.Module):
    """A memory of `capacity` examples from which `batch` are drawn at a time."""

    capacity: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)

    def init(self, spec: Spec, **columns: tuple[int, ...]) -> Memory:
        """An empty memory: M ← {}; `columns` are the shapes of what else it holds of an example."""

        def blank(size: int) -> tuple[Array, Array, Array]:
            return jnp.zeros((size, *spec.shape)), jnp.zeros(size, jnp.int32), jnp.zeros(size, jnp.int32)

        nothing = Batch(*blank(self.batch), weight=jnp.zeros(self.batch))
        held, drawn = (
            {name: jnp.zeros((size, *shape)) for name, shape in columns.items()} for size in (self.capacity, self.batch)
        )
        return Memory(*blank(self.capacity), jnp.zeros((), jnp.int32), nothing, held, drawn)

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
        place = jnp.where(real, place, self.capacity)  # past the end: not kept
        again = jnp.triu(place[:, None] == place[None, :], k=1).any(axis=1)  # a later example takes the same place
        place = jnp.where(again, self.capacity, place)
        x = memory.x.at[place].set(batch.x, mode="drop")
        y = memory.y.at[place].set(batch.y, mode="drop")
        task = memory.task.at[place].set(batch.tasks, mode="drop")
        held = {name: old.at[place].set((columns or {})[name], mode="drop") for name, old in memory.columns.items()}

        filled = jnp.minimum(seen[-1], self.capacity)
        picked = below(jnp.broadcast_to(filled, self.batch), bits[1])
        weight = jnp.broadcast_to(filled > 0, self.batch).astype(x.dtype)
        drawn = {name: column[picked] for name, column in held.items()}
        return Memory(x, y, task, seen[-1], Batch(x[picked], y[picked], task[picked], weight), held, drawn)


CAPACITY, BATCH = 1000, 10


def reservoir(capacity: int = CAPACITY, batch: int = BATCH) -> Reservoir:
    """A memory of `capacity` examples, kept by reservoir sampling, from which `batch` are replayed at a time."""
    return Reservoir(check_positive("memory", capacity), check_positive("memory_batch", batch))


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
