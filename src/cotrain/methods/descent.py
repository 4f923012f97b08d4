"""One step of gradient descent on a part of a network: SGD(x, y, α, θ ⊙ R̂, R) in the paper's Algorithm 1.

What methods change about it are arguments: the loss, and what becomes of its gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import check_rate
from cotrain.networks.network import Network
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


Loss = Callable[[Float[Array, "B classes"], Batch, Part], Float[Array, ""]]
Change = Callable[[Parameters, Part], Parameters]  # of a gradient


def cross_entropy(logits: Float[Array, "B classes"], batch: Batch, part: Part | None = None) -> Float[Array, ""]:
    """The mean cross-entropy over the examples that count."""
    del part
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch.y, logits.shape[1], dtype=logits.dtype))
    return (batch.weight * losses).sum() / jnp.maximum(batch.weight.sum(), 1)


def begin(network: Network, optimizer: Optimizer, key: PRNGKeyArray) -> Learned:
    """A network that has learned nothing."""
    parameters = network.init(key)
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
    layers = len(network.layers)
    learns = network.router is not None and network.router.learns
    sizes = [rates.experts] * layers + [rates.heads] + [rates.router if learns else None] * layers
    still = [size is None or entries.still for size, entries in zip(sizes, path.entries, strict=True)]
    value, gradient, part = _slope(network, learner.parameters, batch, path, loss, still)
    gradient = gradient if change is None else change(gradient, part)
    return _step(optimizer, learner, gradient.stacks, part.entries, sizes), value


def slope(
    network: Network, parameters: Parameters, batch: Batch, path: Path, loss: Loss = cross_entropy
) -> tuple[Float[Array, ""], Parameters]:
    """The batch's loss, and its gradient in the part of the network on the path."""
    return _slope(network, parameters, batch, path, loss, [False] * len(path.entries))[:2]


def _slope(
    network: Network, parameters: Parameters, batch: Batch, path: Path, loss: Loss, still: list[bool]
) -> tuple[Float[Array, ""], Parameters, Part]:
    """The loss, its gradient in what is not still, and that part, with the entries that may learn."""
    stacks, entries = part_of(parameters, path).stacks, tuple(path.entries)
    moving = [None if stays else stack for stays, stack in zip(still, stacks, strict=True)]

    def total(moving: list[Any]) -> tuple[Float[Array, ""], tuple[Float[Array, "B E"] | None, ...]]:
        whole = Parameters.of([stack if moved is None else moved for moved, stack in zip(moving, stacks, strict=True)])
        ran = network.run(whole, path, batch.x, batch.weight)
        value = loss(ran.logits, batch, Part(Parameters.of(moving), entries))
        return value if ran.penalty is None else value + ran.penalty, ran.gates

    (value, gates), gradient = jax.value_and_grad(total, has_aux=True)(moving)
    for i, taken in enumerate(gates):
        if taken is not None:  # only now it shows which experts the examples took
            active = ((taken > 0) & (batch.weight > 0)[:, None]).any(axis=0)
            entries = (*entries[:i], entries[i]._replace(active=active), *entries[i + 1 :])
    return value, Parameters.of(gradient), Part(Parameters.of(moving), entries)


def _step(
    optimizer: Optimizer, learner: Learned, gradients: list[Any], entries: Sequence[Entries], sizes: list[Any]
) -> Learned:
    """What has a gradient moves, the layers in the order in which their weights are no longer needed."""
    stacks, moments = learner.parameters.stacks, learner.moments.stacks
    layers = len(stacks) // 2
    for i, (index, active, repeat, _) in enumerate(entries):
        gradient, size = gradients[i], sizes[i]
        if gradient is None or size is None:
            continue
        if index is None and 0 < i < layers and gradients[i - 1] is not None:
            size = after(gradients[i - 1], size)
        if repeat and optimizer is not optax.sgd:  # plain descent can take the terms of a sum one by one
            assert index is not None
            assert active is not None
            gradient, active = _summed(gradient, index, active)
        if index is not None and active is None:
            stacks[i], moments[i] = each(optimizer(size), stacks[i], moments[i], gradient, index)
            continue
        part = narrow(stacks[i], index)
        updates, kept = jax.vmap(optimizer(size).update)(gradient, narrow(moments[i], index), part)
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
