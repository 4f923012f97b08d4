"""A-GEM: a step must not raise the mean loss on earlier tasks (Chaudhry et al. 2019, "Efficient lifelong learning")."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from cotrain.choice import Choice, option
from cotrain.data.batch import Batch
from cotrain.errors import Invalid, check_positive
from cotrain.memory import Buffer, Memory
from cotrain.methods import BUFFERS
from cotrain.methods.descent import Learned, Optimizer, Part, Rates, begin, move, rates_of, slope
from cotrain.methods.finetune import RoutedOptions
from cotrain.methods.method import Info
from cotrain.networks.network import Draws, Network
from cotrain.networks.parameters import Entries, Parameters


class AgemState(NamedTuple):
    """What was learned, and what is remembered."""

    learner: Learned
    memory: Memory


class Noise(NamedTuple):
    """The random numbers of one update."""

    current: Draws  # for the routes of the current batch
    memory: Any  # for the memory's update


class Agem(eqx.Module):
    """See `agem`."""

    network: Network
    memory: Buffer
    rates: Rates
    optimizer: Optimizer = eqx.field(static=True)
    examples: ClassVar[int] = 0

    def init(self, key: PRNGKeyArray) -> AgemState:
        return AgemState(begin(self.network, self.optimizer, key), self.memory.init(self.network.spec))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Noise:
        current, memory = jax.random.split(key)
        return Noise(
            current=self.network.draw(current, batch.task.size, len(batch.y)),
            memory=self.memory.draw(memory, len(batch.y)),
        )

    def update(self, state: AgemState, batch: Batch, noise: Noise) -> tuple[AgemState, Info]:
        if batch.task.ndim:
            raise Invalid("stream", "joint", "A-GEM learns one task after another")
        network, parameters = self.network, state.learner.parameters
        path = network.sample(parameters, batch.task, batch.weight, noise.current)  # R̂ ← sample(R)
        there = slope(network, parameters, batch, path, rates=self.rates)  # g

        memory = self.memory.add(state.memory, batch, noise.memory)  # M ← M ∪ (x, y)
        old = self.memory.sample(memory)  # (x_ref, y_ref) ∼ M, without those of the current task
        old = old._replace(weight=old.weight * (old.task != batch.task))
        best = network.sample(parameters, old.task, old.weight, (None,) * len(network.layers), whole=True)
        reference = slope(network, parameters, old, best, rates=self.rates).gradient  # g_ref

        product = inner(there.gradient, there.part.take(reference))  # gᵀ g_ref
        square = inner(reference, reference)  # g_refᵀ g_ref
        violated = (product < 0) & (square > 0)
        share = jnp.where(violated, product / jnp.where(violated, square, 1), 0)
        away = jax.tree.map(lambda g: -share * g, reference)
        projected = there.part.add(away, there.gradient)  # g̃ = g − (gᵀg_ref / g_refᵀg_ref) g_ref
        learner = move(network, self.optimizer, state.learner, projected, whole(parameters), self.rates)
        return AgemState(learner, memory), Info(there.value, {"projected": violated.astype(float)}, old)

    def consolidate(self, state: AgemState, batch: Batch, key: PRNGKeyArray) -> AgemState:
        del batch, key
        return state


def inner(one: Parameters, other: Parameters) -> Float[Array, ""]:
    """The inner product of two gradients."""
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, one, other)), jnp.zeros(()))


def whole(parameters: Parameters) -> Part:
    """All that there is, as the part that moves."""
    return Part(parameters, (Entries(),) * len(parameters.stacks))


def agem(
    network: Network,
    memory: Buffer,
    *,
    lr: float = 0.1,
    router_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
) -> Agem:
    """One step on each minibatch, without that part of it which would raise the loss on a batch from memory.

    `lr` is for the experts and heads, `router_lr` (by default the same) for the router.
    """
    return Agem(network, memory, rates_of(lr, router_lr), optimizer)


@dataclass(frozen=True)
class AgemOptions(RoutedOptions):
    """a step must not raise the mean loss on earlier tasks (A-GEM)"""

    memory: int = 5000
    """examples that the memory holds"""
    memory_batch: int = 256
    """examples on which the earlier tasks' gradient is taken"""
    buffer: Choice = option(BUFFERS, "ring")
    """how the memory is kept"""

    def __post_init__(self):
        super().__post_init__()
        check_positive("memory", self.memory)
        check_positive("memory_batch", self.memory_batch)

    def __call__(self, network: Network) -> Agem:
        memory = self.buffer(network.spec, self.memory, self.memory_batch)
        return agem(network, memory, lr=self.lr, router_lr=self.router_lr, optimizer=self.optimizer())
