"""Synaptic intelligence (Zenke et al. 2017): the more a parameter did for earlier tasks, the more firmly it is held."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import Invalid, check_rate
from cotrain.methods.descent import Learned, Optimizer, Rates, begin, move, rate, rates_of, slope
from cotrain.methods.finetune import RoutedOptions
from cotrain.methods.method import Info
from cotrain.networks.network import Draws, Network
from cotrain.networks.parameters import Parameters


class SIState(NamedTuple):
    """What was learned, and what each parameter did for it."""

    learner: Learned
    gain: Parameters  # ω: how much of the loss it took away in the current task
    importance: Parameters  # Ω, of the tasks before
    anchor: Parameters  # θ̃: where the last task ended


class SI(eqx.Module):
    """See `si`."""

    network: Network
    rates: Rates
    strength: Float[Array, ""]  # c
    damping: Float[Array, ""]  # ξ
    optimizer: Optimizer = eqx.field(static=True)
    examples: ClassVar[int] = 0

    def init(self, key: PRNGKeyArray) -> SIState:
        learner = begin(self.network, self.optimizer, key)
        nothing = jax.tree.map(jnp.zeros_like, learner.parameters)
        return SIState(learner, nothing, nothing, learner.parameters)

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Draws:
        return self.network.draw(key, batch.task.size, len(batch.y))

    def update(self, state: SIState, batch: Batch, noise: Draws) -> tuple[SIState, Info]:
        if batch.task.ndim:
            raise Invalid("stream", "joint", "synaptic intelligence learns one task after another")
        network, learner = self.network, state.learner
        path = network.sample(learner.parameters, batch.task, batch.weight, noise)  # R̂ ← sample(R)
        loss, gradient, part, _ = slope(network, learner.parameters, batch, path, rates=self.rates)

        # Deviation: the penalty pulls at what takes part in the step, since nothing else moves.
        theta, importance, anchor = part.parameters, part.take(state.importance), part.take(state.anchor)
        pull = jax.tree.map(lambda o, theta, a: 2 * self.strength * o * (theta - a), importance, theta, anchor)
        pulled = jax.tree.map(jnp.add, gradient, pull)  # ∂/∂θ_k [L + c Σ_k Ω_k (θ̃_k − θ_k)²]
        learner = move(network, self.optimizer, learner, pulled, part, self.rates)

        moved = jax.tree.map(jnp.subtract, part.take(learner.parameters), theta)  # Δθ_k
        gained = jax.tree.map(lambda g, d: -g * d, gradient, moved)
        return state._replace(learner=learner, gain=part.add(state.gain, gained)), Info(loss)  # ω_k ← ω_k − g_k Δθ_k

    def consolidate(self, state: SIState, batch: Batch, key: PRNGKeyArray) -> SIState:
        del batch, key

        def importance(before: Array, gain: Array, theta: Array, anchor: Array) -> Array:
            # Deviation: the paper has no max; its code takes that of the sum, so that a task can undo what others hold.
            return before + jnp.maximum(gain, 0) / ((theta - anchor) ** 2 + self.damping)

        theta = state.learner.parameters
        found = jax.tree.map(importance, state.importance, state.gain, theta, state.anchor)
        return SIState(state.learner, jax.tree.map(jnp.zeros_like, theta), found, theta)  # ω ← 0, Ω, θ̃ ← θ


def si(
    network: Network,
    *,
    lr: float = 0.1,
    router_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
    strength: float = 0.1,
    damping: float = 0.1,
) -> SI:
    """Fine-tuning with a penalty on moving what took much of the loss away in earlier tasks.

    `strength` is c. `damping` is ξ, which bounds the importance of what hardly moved.
    """
    return SI(
        network, rates_of(lr, router_lr), rate("strength", strength), rate("damping", _above_0(damping)), optimizer
    )


def _above_0(damping: float) -> float:
    """What never moved has ω = 0 and θ = θ̃, and no importance; but 0 / 0 is none."""
    if check_rate("damping", damping) == 0:
        raise Invalid("damping", damping, "choose a number above 0")
    return damping


@dataclass(frozen=True)
class SIOptions(RoutedOptions):
    """a penalty on moving what took the loss of earlier tasks away (Zenke et al. 2017)"""

    strength: float = 0.1
    """how strongly it is held, c"""
    damping: float = 0.1
    """bound on the importance of what hardly moved, ξ"""

    def __post_init__(self):
        super().__post_init__()
        check_rate("strength", self.strength)
        _above_0(self.damping)

    def __call__(self, network: Network) -> SI:
        return si(
            network,
            lr=self.lr,
            router_lr=self.router_lr,
            optimizer=self.optimizer(),
            strength=self.strength,
            damping=self.damping,
        )
