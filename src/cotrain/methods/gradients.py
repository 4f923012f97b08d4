"""The gradients of several tasks' losses, without an array of as many numbers as all of them have.

A dense layer's gradient is a sum of outer products, one for each example: of the loss's slope before the activation, δ,
and the input, x. That is enough for sums of gradients, and for inner products: ⟨Σ_b δ_b x_bᵀ, Σ_c δ_c x_cᵀ⟩ =
Σ_bc (δ_b · δ_c)(x_b · x_c).

Axes: T tasks, B examples of each, M experts of a stack, N of them.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cotrain.data.batch import Batch
from cotrain.methods.descent import Part, cross_entropy
from cotrain.networks.experts import Dense
from cotrain.networks.network import Network
from cotrain.networks.parameters import Parameters


class Products(NamedTuple):
    """The gradient of a stack of dense experts, for each task: Σ_b δ_b [x_b, 1]ᵀ."""

    slope: Float[Array, "T B M units"]  # δ
    input: Float[Array, "T B inputs"]  # x

    def gram(self) -> Float[Array, "T T"]:
        tasks, examples = self.slope.shape[:2]
        slope, x = (a.reshape(tasks * examples, -1) for a in self)
        pairs, weights = len(x) * (slope.shape[1] + x.shape[1]), slope.shape[1] * x.shape[1]
        if len(x) * pairs < (len(x) + tasks**2) * weights:  # fewer operations than with all gradients
            each = (slope @ slope.T) * (x @ x.T + 1)
            return each.reshape(tasks, examples, tasks, examples).sum(axis=(1, 3))
        slope = slope.reshape(tasks, examples, -1)
        weight = jnp.einsum("tbu,tbi->tui", slope, self.input).reshape(tasks, -1)
        bias = slope.sum(axis=1)
        return weight @ weight.T + bias @ bias.T

    def dot(self, stack: Dense, at: Int[Array, " N"] | None) -> Float[Array, " T"]:
        """The inner product of each with another, of these experts."""
        weight = stack.weight.swapaxes(1, 2) if stack.alone else stack.weight
        each = jnp.einsum("tbi,nui->tbnu", self.input, weight) + stack.bias[None, None]
        return (chosen(self.slope, at, axis=2) * each).sum(axis=(1, 2, 3))

    def weighted(self, weights: Float[Array, " T"], stack: Dense) -> Dense:
        """Their weighted sum."""
        slope = self.slope * weights[:, None, None, None]
        form = "tbmu,tbi->miu" if stack.alone else "tbmu,tbi->mui"
        made = jnp.einsum(form, slope, self.input), slope.sum(axis=(0, 1))
        return eqx.tree_at(lambda dense: (dense.weight, dense.bias), stack, made)


class Gradients(NamedTuple):
    """For each stack of the parameters, `Products`, or the gradients themselves with an axis T in front."""

    stacks: list[Any]

    def gram(self) -> Float[Array, "T T"]:
        """All inner products: G Gᵀ."""
        total = jnp.zeros(())
        for mine in self.stacks:
            if isinstance(mine, Products):
                total = total + mine.gram()
            else:
                for leaf in jax.tree.leaves(mine):
                    flat = leaf.reshape(len(leaf), -1)
                    total = total + flat @ flat.T
        return total

    def dot(self, gradient: Parameters, part: Part) -> Float[Array, " T"]:
        """The inner product of each with another, of a part of the network: G g."""
        total = jnp.zeros(())
        for mine, stack, entries in zip(self.stacks, gradient.stacks, part.entries, strict=True):
            if isinstance(mine, Products):
                total = total + mine.dot(stack, entries.at)
            else:
                for leaf, other in zip(jax.tree.leaves(mine), jax.tree.leaves(stack), strict=True):
                    leaf = chosen(leaf, entries.at, axis=1)
                    total = total + leaf.reshape(len(leaf), -1) @ other.ravel()
        return total

    def weighted(self, weights: Float[Array, " T"], like: Parameters) -> Parameters:
        """Their weighted sum, Gᵀ v."""
        return Parameters.of(
            [
                mine.weighted(weights, stack)
                if isinstance(mine, Products)
                else jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), mine)
                for mine, stack in zip(self.stacks, like.stacks, strict=True)
            ]
        )


def gradients(network: Network, parameters: Parameters, batch: Batch, moving: Parameters) -> Gradients:
    """The gradient of each task's mean cross-entropy, by its best route; in the stacks that are there in `moving`.

    The batch has an axis T in front. Experts that are not dense, and routers, take T times their numbers.
    """
    modules = [*(layer.module for layer in network.layers), network.head.module] + [None] * len(network.layers)
    moves = [stack is not None for stack in moving.stacks]
    dense = [isinstance(module, Dense) and there for module, there in zip(modules, moves, strict=True)]

    def of_task(batch: Batch) -> tuple[list[Any], tuple[Array, ...]]:
        path = network.best(parameters, batch.task, whole=True)

        def total(moved: list[Any]) -> tuple[Float[Array, ""], tuple[Array, ...]]:
            def one(moved: list[Any], x: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
                whole = [
                    with_bias(stack, new) if is_dense else new if there else stack
                    for stack, new, is_dense, there in zip(parameters.stacks, moved, dense, moves, strict=True)
                ]
                ran = network.run(Parameters.of(whole), path, x[None], weight[None])
                return ran.logits[0], tuple(x.ravel() for x in ran.inputs)

            axes = [0 if is_dense else None for is_dense in dense]
            logits, inputs = jax.vmap(one, (axes, 0, 0))(moved, batch.x, batch.weight)
            return cross_entropy(logits, batch), inputs

        copies = [  # a bias for each example, whose gradient is the slope δ
            jnp.broadcast_to(stack.bias, (len(batch.y), *stack.bias.shape)) if is_dense else stack if there else None
            for stack, is_dense, there in zip(parameters.stacks, dense, moves, strict=True)
        ]
        return jax.grad(total, has_aux=True)(copies)

    slopes, inputs = jax.vmap(of_task)(batch)
    inputs = [*inputs, *[None] * len(network.layers)]
    return Gradients([Products(slope, x) if d else slope for slope, x, d in zip(slopes, inputs, dense, strict=True)])


def chosen(array: Array, at: Int[Array, " N"] | None, axis: int) -> Array:
    """The entries of a stack that a part of the network has."""
    return array if at is None else jnp.take(array, at, axis=axis)


def with_bias(stack: Any, bias: Array) -> Any:
    """A stack of dense experts with other biases."""
    return eqx.tree_at(lambda stack: stack.bias, stack, bias)
