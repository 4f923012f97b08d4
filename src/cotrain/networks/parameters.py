"""All that a network learns, in stacks, and the parts of stacks that a step touches.

`narrow` gathers the chosen entries of a stack, `widen` writes them back.

Axes: M chosen entries.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Parameters(eqx.Module):
    """All that a network learns, in stacks: the leading axis counts experts or tasks, or has one entry for all."""

    experts: tuple[Any, ...]  # a stack of E modules per layer
    heads: Any  # a stack of T modules, or of one
    router: tuple[Any, ...]  # what the router learns for each layer; None where there is only one expert

    @property
    def stacks(self) -> list[Any]:
        """The stacks in a row: each layer's experts, the heads, each layer's router."""
        return [*self.experts, self.heads, *self.router]

    @staticmethod
    def of(stacks: Sequence[Any]) -> "Parameters":
        """The parameters with these stacks."""
        layers = len(stacks) // 2
        return Parameters(tuple(stacks[:layers]), stacks[layers], tuple(stacks[layers + 1 :]))


class Entries(NamedTuple):
    """The entries of a stack that take part in a step; None stands for all."""

    at: Int[Array, " M"] | None = None
    active: Bool[Array, " M"] | None = None  # those that may learn
    repeat: bool = False  # the same entry may be there several times
    still: bool = False  # none may learn


def narrow(stack: Any, index: Int[Array, " M"] | None) -> Any:
    """The chosen entries of a stack; padding gives any of them."""
    return stack if index is None else jax.tree.map(lambda a: a.at[index].get(mode="clip"), stack)


def widen(
    stack: Any, index: Int[Array, " M"] | None, active: Bool[Array, " M"] | None, entries: Any, *, add: bool = False
) -> Any:
    """The stack with its active entries replaced, or added to."""

    def write(old: Array, new: Array) -> Array:
        if index is None:
            new = old + new if add else new
            return new if active is None else jnp.where(active.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)
        place = old.at[index if active is None else jnp.where(active, index, len(old))]
        return place.add(new, mode="drop") if add else place.set(new, mode="drop")

    return jax.tree.map(write, stack, entries)
