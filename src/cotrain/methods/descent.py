"""One step of gradient descent on a part of a network: SGD(x, y, α, θ ⊙ R̂, R) in the paper's Algorithm 1.

What methods change about it are arguments: the loss, and what becomes of its gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import check_rate
from cotrain.networks.network import Network, Ran
from cotrain.networks.parameters import Entries, Parameters, narrow, widen
from cotrain.networks.path import Path, part_of
from cotrain.speed.loops import after, each

Optimizer = Callable[[Any], optax.GradientTransformation]  # from a learning rate


class Rates(NamedTuple):
    """A step's learning rates; None leaves those parameters alone."""

    experts: Float[Array, ""] | None
    heads: Float[Array, ""] | None
    router: Float[Array, ""] | None


class Learned(NamedTuple):
    """A network's parameters, and what the optimizer keeps for each expert, head and router row on its own."""

    parameters: Parameters
    moments: Parameters


class Part(NamedTuple):
    """The part of a network that a step moves, as a loss or a gradient's change sees it; None stands for what stays."""

    parameters: Parameters
    entries: tuple[Entries, ...]

    def take(self, other: Parameters) -> Parameters:
        """The same part of something else that has a number for each parameter."""
        if any(known.repeat for known in self.entries):
            raise ValueError("examples of several tasks have the same entry several times; take a whole path")
        stacks = zip(self.parameters.stacks, other.stacks, self.entries, strict=True)
        return Parameters.of([None if mine is None else narrow(theirs, known.at) for mine, theirs, known in stacks])

    def add(self, other: Parameters, amounts: Parameters) -> Parameters:
        """Something else that has a number for each parameter, with these amounts added to the same part of it."""
        stacks = zip(other.stacks, amounts.stacks, self.entries, strict=True)
        return Parameters.of(
            [
                theirs if more is None else widen(theirs, known.at, known.active, more, add=True)
                for theirs, more, known in stacks
            ]
        )


class Slope(NamedTuple):
    """A loss, and how it changes with the part of the network that moves."""

    value: Float[Array, ""]
    gradient: Parameters
    part: Part
    logits: Float[Array, "B classes"]


Loss = Callable[[Float[Array, "B classes"], Batch, Part], Float[Array, ""]]
Change = Callable[[Parameters, Part], Parameters]  # of a gradient


def cross_entropy(logits: Float[Array, "B classes"], batch: Batch, part: Part | None = None) -> Float[Array, ""]:
    """The mean cross-entropy over the examples that count."""
    del part
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch.y, logits.shape[1], dtype=logits.dtype))
    return (batch.weight * losses).sum() / jnp.maximum(batch.weight.sum(), 1)


def begin(network: Network, optimizer: Optimizer, key: PRNGKeyArray) -> Learned:
    """A network that has learned nothing."""
    return unlearned(optimizer, network.init(key))


def unlearned(optimizer: Optimizer, parameters: Parameters) -> Learned:
    """Parameters, or something else that has a number for each, before the optimizer's first step."""
    fresh = jax.vmap(optimizer(0.0).init)
    return Learned(parameters, Parameters.of([s if s is None else fresh(s) for s in parameters.stacks]))


def descend(
    network: Network,
    optimizer: Optimizer,
    learner: Learned,
    batch: Batch,
    path: Path,
    rates: Rates,
    *,
    loss: Loss = cross_entropy,
    change: Change | None = None,
) -> tuple[Learned, Float[Array, ""]]:
    """Moves the part of the network on the path down the gradient of the batch's loss, which it returns too.

    `loss` is of the network's logits and the batch; `change` makes another gradient of its gradient. Both see the part
    that moves. What is not on the path keeps its parameters and its moments to the bit, whatever the optimizer.
    """
    there = slope(network, learner.parameters, batch, path, loss, rates)
    gradient = there.gradient if change is None else change(there.gradient, there.part)
    return move(network, optimizer, learner, gradient, there.part, rates), there.value


def slope(
    network: Network,
    parameters: Parameters,
    batch: Batch,
    path: Path,
    loss: Loss = cross_entropy,
    rates: Rates | None = None,
) -> Slope:
    """The batch's loss, and its gradient in the part of the network on the path; in what moves, where rates are given.

    It is the first half of `descend`, and `move` the second.
    """
    path = network.beside(parameters, path, batch.x)
    return slope_at(network, part_of(parameters, path), batch, path, loss, rates)


def slope_at(
    network: Network,
    narrowed: Parameters,
    batch: Batch,
    path: Path,
    loss: Loss = cross_entropy,
    rates: Rates | None = None,
) -> Slope:
    """As `slope`, where the part of the network on the path has these parameters."""
    stacks, entries = narrowed.stacks, tuple(path.entries)
    sizes = [True] * len(stacks) if rates is None else _sizes(network, rates)
    moving = [
        None if size is None or (rates is not None and known.still) else stack
        for size, known, stack in zip(sizes, entries, stacks, strict=True)
    ]

    def total(moving: list[Any]) -> tuple[Float[Array, ""], Ran]:
        whole = Parameters.of([stack if moved is None else moved for moved, stack in zip(moving, stacks, strict=True)])
        ran = network.run(whole, path, batch.x, batch.weight)
        value = loss(ran.logits, batch, Part(Parameters.of(moving), entries))
        return value if ran.penalty is None else value + ran.penalty, ran

    (value, ran), gradient = jax.value_and_grad(total, has_aux=True)(moving)
    for i, taken in enumerate(ran.gates):
        if taken is not None:  # only now it shows which experts the examples took
            active = ((taken > 0) & (batch.weight > 0)[:, None]).any(axis=0)
            entries = (*entries[:i], entries[i]._replace(active=active), *entries[i + 1 :])
    return Slope(value, Parameters.of(gradient), Part(Parameters.of(moving), entries), ran.logits)


def _sizes(network: Network, rates: Rates) -> list[Float[Array, ""] | None]:
    """For each stack, its learning rate; None where it stays as it is."""
    layers = len(network.layers)
    learns = network.router is not None and network.router.learns
    return [rates.experts] * layers + [rates.heads] + [rates.router if learns else None] * layers


def move(
    network: Network, optimizer: Optimizer, learner: Learned, gradient: Parameters, part: Part, rates: Rates
) -> Learned:
    """A step of the optimizer down a gradient in a part of the network.

    The layers move in the order in which their weights are no longer needed.
    """
    gradients, sizes = gradient.stacks, _sizes(network, rates)
    stacks, moments = learner.parameters.stacks, learner.moments.stacks
    layers = len(stacks) // 2
    for i, (index, active, repeat, _) in enumerate(part.entries):
        slopes, size = gradients[i], sizes[i]
        if slopes is None or size is None:
            continue
        if index is None and 0 < i < layers and gradients[i - 1] is not None:
            size = after(gradients[i - 1], size)
        if repeat and optimizer is not optax.sgd:  # plain descent can take the terms of a sum one by one
            assert index is not None
            assert active is not None
            slopes, active = _summed(slopes, index, active)
        if index is not None and active is None:
            stacks[i], moments[i] = each(optimizer(size), stacks[i], moments[i], slopes, index)
            continue
        entries = narrow(stacks[i], index)
        updates, kept = jax.vmap(optimizer(size).update)(slopes, narrow(moments[i], index), entries)
        stacks[i] = widen(stacks[i], index, active, updates, add=True)
        moments[i] = widen(moments[i], index, active, kept)
    return Learned(Parameters.of(stacks), Parameters.of(moments))


def _summed(gradient: Any, index: Int[Array, " N"], active: Bool[Array, " N"]) -> tuple[Any, Bool[Array, " N"]]:
    """The gradients with those of an entry added up where it is first; and those places."""
    first = ((index[:, None] == index[None, :]) & active[None, :]).argmax(axis=1)
    summed = jax.tree.map(lambda g: jnp.zeros_like(g).at[first].add(g), gradient)
    return summed, active & (first == jnp.arange(len(index)))


def rate(field: str, value: float) -> Float[Array, ""]:
    """A learning rate as an array, so that a change of it needs no new compilation."""
    return jnp.asarray(check_rate(field, value), float)


def rates_of(lr: float, router_lr: float | None, field: str = "lr") -> Rates:
    """The rates of a step on experts, heads and router."""
    weights = rate(field, lr)
    return Rates(weights, weights, rate("router_lr", lr if router_lr is None else router_lr))
