"""Loops instead of branches, and an order of steps: what keeps XLA from copying the arrays that a step changes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int


def plain_once(condition: Bool[Array, ""], step: Callable[[Array, Any], Any], carry: Any) -> Any:
    """`step(0, carry)` where the condition holds, else what was carried."""
    return jax.lax.cond(condition, lambda carry: step(jnp.array(0), carry), lambda carry: carry, carry)


def once(condition: Bool[Array, ""], step: Callable[[Array, Any], Any], carry: Any) -> Any:
    """As `plain_once`, in a loop that runs once or not at all: the branches of a conditional copy what they change.

    What does not seem to depend on the loop's counter, XLA does ahead of the loop, whether it runs or not: `step` makes
    what it takes depend on its first argument, which is 0.
    """
    return jax.lax.fori_loop(0, condition.astype(int), step, carry)


def plain_after(gradient: Any, rate: Float[Array, ""]) -> Float[Array, ""]:
    """A layer's learning rate."""
    del gradient
    return rate


def after(gradient: Any, rate: Float[Array, "..."]) -> Float[Array, "..."]:
    """As `plain_after`, but not to be had before the gradient of the layer below.

    That gradient takes the layer's weights as they were. Where nothing says that it comes first, XLA updates a copy
    of them; and so it shall look as if the rate could turn out to be NaN.
    """
    some = jax.tree.leaves(gradient)[-1].ravel()[0]
    return jnp.where(jnp.isnan(some), some.astype(rate.dtype), rate)


def plain_each(
    optimizer: optax.GradientTransformation, stack: Any, moments: Any, gradient: Any, index: Int[Array, " N"]
) -> tuple[Any, Any]:
    """A stack and its moments after a step of the entries at `index`, of which each is there once."""
    parameters, kept = jax.tree.map(lambda a: a[index], (stack, moments))
    updates, kept = jax.vmap(optimizer.update)(gradient, kept, parameters)
    new = optax.apply_updates(parameters, updates), kept
    return jax.tree.map(lambda a, entries: a.at[index].set(entries), (stack, moments), new)


def each(
    optimizer: optax.GradientTransformation, stack: Any, moments: Any, gradient: Any, index: Int[Array, " N"]
) -> tuple[Any, Any]:
    """As `plain_each`: one entry after another in place, without an array of all updates.

    The moments are written when the parameters have been: XLA computes these of the old moments, and would copy those.
    """

    def step(i: Array, both: tuple[Any, Any]) -> tuple[Any, Any]:
        def write(a: Array, entry: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(a, entry, index[i], 0)

        parameters, kept = jax.tree.map(lambda a: a[index[i]], both)
        updates, kept = optimizer.update(jax.tree.map(lambda a: a[i], gradient), kept, parameters)
        stack = jax.tree.map(write, both[0], optax.apply_updates(parameters, updates))
        for leaf in jax.tree.leaves(stack):
            some = leaf[index[i]]
            kept = jax.tree.map(
                lambda a, some=some: after(some, a) if jnp.isdtype(a.dtype, "real floating") else a, kept
            )
        return stack, jax.tree.map(write, both[1], kept)

    return jax.lax.fori_loop(0, len(index), step, (stack, moments))
