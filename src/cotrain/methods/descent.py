"""One step of gradient descent on a part of a network: SGD(x, y, α, θ ⊙ R̂, R) in the paper's Algorithm 1."""

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import Invalid
from cotrain.networks.routing import Network, Parameters, Path, narrow, part_of, widen

Optimizer = Callable[[Any], optax.GradientTransformation]  # from a learning rate


class Rates(NamedTuple):
    """A step's learning rates; None leaves those parameters alone."""

    experts: Float[Array, ""] | None
    heads: Float[Array, ""] | None
    router: Float[Array, ""] | None


class Learner(NamedTuple):
    """A network's parameters, and what the optimizer keeps for each expert, head and router row on its own."""

    parameters: Parameters
    moments: Parameters


def begin(network: Network, optimizer: Optimizer, key: PRNGKeyArray) -> Learner:
    """A network that has learned nothing."""
    parameters = network.init(key)
    fresh = jax.vmap(optimizer(0.0).init)
    return Learner(parameters, Parameters.of([s if s is None else fresh(s) for s in parameters.stacks]))


def descend(
    network: Network, optimizer: Optimizer, learner: Learner, batch: Batch, path: Path, rates: Rates
) -> tuple[Learner, Float[Array, ""]]:
    """Moves the part of the network on the path down the gradient of the batch's loss, which it returns too.

    What is not on the path keeps its parameters and its moments to the bit, whatever the optimizer.
    """
    stacks, moments = learner.parameters.stacks, learner.moments.stacks
    part = part_of(learner.parameters, path).stacks
    layers = len(network.layers)
    stack_rates = [rates.experts] * layers + [rates.heads] + [rates.router] * layers

    def loss(moving: list[Any]) -> Float[Array, ""]:
        whole = [still if moved is None else moved for moved, still in zip(moving, part, strict=True)]
        return cross_entropy(network.apply(Parameters.of(whole), path, batch.x), batch)

    still = [rate is None or entries.still for rate, entries in zip(stack_rates, path.entries, strict=True)]
    moving = [None if stays else entries for stays, entries in zip(still, part, strict=True)]
    value, gradients = jax.value_and_grad(loss)(moving)
    for i, (index, active, repeat, _) in enumerate(path.entries):
        gradient, size = gradients[i], stack_rates[i]
        if moving[i] is None or size is None:
            continue
        if index is None and 0 < i < layers and moving[i - 1] is not None:
            size = _after(gradients[i - 1], size)
        if repeat and optimizer is not optax.sgd:  # plain descent can take the terms of a sum one by one
            assert index is not None
            assert active is not None
            gradient, active = _summed(gradient, index, active)
        if index is not None and active is None:
            stacks[i], moments[i] = _one_by_one(optimizer(size), stacks[i], moments[i], gradient, index)
            continue
        updates, kept = jax.vmap(optimizer(size).update)(gradient, narrow(moments[i], index), part[i])
        stacks[i] = widen(stacks[i], index, active, updates, add=True)
        moments[i] = widen(moments[i], index, active, kept)
    return Learner(Parameters.of(stacks), Parameters.of(moments)), value


def _after(gradient: Any, rate: Float[Array, ""]) -> Float[Array, ""]:
    """A layer's learning rate, not to be had before the gradient of the layer below it.

    That gradient takes the layer's weights as they were. Where nothing says that it comes first, XLA updates a copy
    of them; and so it shall look as if the rate could turn out to be NaN.
    """
    some = jax.tree.leaves(gradient)[-1].ravel()[0]
    return jnp.where(jnp.isnan(some), some, rate)


def _one_by_one(
    optimizer: optax.GradientTransformation, stack: Any, moments: Any, gradient: Any, index: Int[Array, " N"]
) -> tuple[Any, Any]:
    """The stack and its moments after a step of some entries: each in place, without an array of all updates."""

    def step(i: Array, both: tuple[Any, Any]) -> tuple[Any, Any]:
        parameters, kept = jax.tree.map(lambda a: a[index[i]], both)
        updates, kept = optimizer.update(jax.tree.map(lambda a: a[i], gradient), kept, parameters)
        new = optax.apply_updates(parameters, updates), kept
        return jax.tree.map(lambda a, entry: jax.lax.dynamic_update_index_in_dim(a, entry, index[i], 0), both, new)

    return jax.lax.fori_loop(0, len(index), step, (stack, moments))


def _summed(gradient: Any, index: Int[Array, " N"], active: Bool[Array, " N"]) -> tuple[Any, Bool[Array, " N"]]:
    """The gradients with those of an entry added up where it is first; and those places."""
    first = ((index[:, None] == index[None, :]) & active[None, :]).argmax(axis=1)
    summed = jax.tree.map(lambda g: jnp.zeros_like(g).at[first].add(g), gradient)
    return summed, active & (first == jnp.arange(len(index)))


def cross_entropy(logits: Float[Array, "B classes"], batch: Batch) -> Float[Array, ""]:
    """The mean cross-entropy over the examples that count."""
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch.y, logits.shape[1], dtype=logits.dtype))
    return (batch.weight * losses).sum() / jnp.maximum(batch.weight.sum(), 1)


def rate(field: str, value: float) -> Float[Array, ""]:
    """A learning rate as an array, so that a change of it needs no new compilation."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < float("inf"):
        raise Invalid(field, value, "choose a number of at least 0")
    return jnp.asarray(value, float)
