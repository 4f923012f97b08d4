"""Elastic weight consolidation (Kirkpatrick et al. 2017), and online EWC (Schwarz et al. 2018).

What mattered to earlier tasks is held by springs: L(θ) = L_t(θ) + λ/2 Σ_{i<t} Σ_j F_ij (θ_j − θ*_ij)². But for a
constant, the springs of all tasks are one, of strength Σ_i F_i at the place Σ_i F_i θ*_i / Σ_i F_i. So two numbers a
parameter are all to keep, however many tasks there are, and nothing is approximated.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import Invalid, check_positive, check_rate
from cotrain.methods.descent import Learned, Optimizer, Part, Rates, begin, descend, rate, rates_of
from cotrain.methods.finetune import RoutedOptions
from cotrain.methods.method import Info
from cotrain.networks.network import Draws, Network
from cotrain.networks.parameters import Parameters
from cotrain.networks.path import part_of


class EWCState(NamedTuple):
    """What was learned, and what mattered to the tasks so far."""

    learner: Learned
    fisher: Parameters  # Σ_i F_i; online, F̃
    anchor: Parameters  # Σ_i F_i θ*_i / Σ_i F_i; online, θ* of the last task


class EWC(eqx.Module):
    """See `ewc`."""

    network: Network
    rates: Rates
    strength: Float[Array, ""]  # λ
    decay: Float[Array, ""] | None  # γ; None where each task has its own anchor
    examples: int = eqx.field(static=True)
    empirical: bool = eqx.field(static=True)
    optimizer: Optimizer = eqx.field(static=True)

    def init(self, key: PRNGKeyArray) -> EWCState:
        learner = begin(self.network, self.optimizer, key)
        return EWCState(learner, jax.tree.map(jnp.zeros_like, learner.parameters), learner.parameters)

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Draws:
        return self.network.draw(key, batch.task.size, len(batch.y))

    def update(self, state: EWCState, batch: Batch, noise: Draws) -> tuple[EWCState, Info]:
        if batch.task.ndim:
            raise Invalid("stream", "joint", "elastic weight consolidation learns one task after another")

        def pulled(gradient: Parameters, part: Part) -> Parameters:
            # Deviation: the penalty pulls at what takes part in the step, since nothing else moves.
            theta, fisher, anchor = part.parameters, part.take(state.fisher), part.take(state.anchor)
            pull = jax.tree.map(lambda f, theta, a: self.strength * f * (theta - a), fisher, theta, anchor)
            return jax.tree.map(jnp.add, gradient, pull)  # ∂L_t/∂θ_j + λ Σ_i F_ij (θ_j − θ*_ij)

        learner = state.learner
        path = self.network.sample(learner.parameters, batch.task, batch.weight, noise)  # R̂ ← sample(R)
        learner, loss = descend(self.network, self.optimizer, learner, batch, path, self.rates, change=pulled)
        return state._replace(learner=learner), Info(loss)

    def consolidate(self, state: EWCState, batch: Batch, key: PRNGKeyArray) -> EWCState:
        theta, labels = state.learner.parameters, batch.y
        if not self.empirical:
            labels = jax.random.categorical(key, self.network.predict(theta, batch.task, batch.x))  # y ∼ p(·|x, θ*_t)
        new, part = fisher_information(self.network, theta, batch._replace(y=labels))  # F_t
        if self.decay is not None:
            old = jax.tree.map(lambda f: self.decay * f, state.fisher)
            return EWCState(state.learner, part.add(old, new), theta)  # F̃_t = γ F̃_{t−1} + F_t, θ*_t

        fisher = part.add(state.fisher, new)
        share = jax.tree.map(lambda f, total: jnp.where(total > 0, f / total, 0), new, part.take(fisher))
        away = jax.tree.map(jnp.subtract, part.parameters, part.take(state.anchor))
        shift = jax.tree.map(jnp.multiply, share, away)  # the mean of the anchors, weighted by F_i, moves by so much
        return EWCState(state.learner, fisher, part.add(state.anchor, shift))


def fisher_information(network: Network, parameters: Parameters, batch: Batch) -> tuple[Parameters, Part]:
    """The mean square of ∂ log p(y|x, θ) / ∂θ_j over examples of a task, and the part of the network that it is of.

    That is the task's best route; the information about all else is exactly 0.
    """
    path = network.best(parameters, batch.task)
    part = Part(part_of(parameters, path), tuple(path.entries))

    def log_likelihood(theta: Parameters, x: Float[Array, "..."], y: Int[Array, ""]) -> Float[Array, ""]:
        return jax.nn.log_softmax(network.run(theta, path, x[None], jnp.ones(1)).logits[0])[y]

    def add(total: Parameters, example: tuple[Array, Array, Array]) -> tuple[Parameters, None]:
        x, y, weight = example
        gradient = jax.grad(log_likelihood)(part.parameters, x, y)
        return jax.tree.map(lambda f, g: f + weight * g**2, total, gradient), None

    nothing = jax.tree.map(jnp.zeros_like, part.parameters)
    total, _ = jax.lax.scan(add, nothing, (batch.x, batch.y, batch.weight))
    return jax.tree.map(lambda f: f / jnp.maximum(batch.weight.sum(), 1), total), part


def ewc(
    network: Network,
    *,
    lr: float = 0.1,
    router_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
    strength: float = 10.0,
    decay: float | None = None,
    fisher_examples: int = 1000,
    empirical: bool = False,
) -> EWC:
    """Fine-tuning with a penalty on moving what mattered to earlier tasks, of `strength` λ.

    What mattered is the mean square of the gradients on `fisher_examples` of a task, with labels that the network draws
    or, if `empirical`, the true ones. With a `decay` (γ) it is online EWC: one anchor, where the last task ended, and
    one sum of what mattered, of which that share is kept at a task's end.
    """
    return EWC(
        network,
        rates_of(lr, router_lr),
        rate("strength", strength),
        None if decay is None else rate("decay", decay),
        check_positive("fisher_examples", fisher_examples),
        empirical,
        optimizer,
    )


@dataclass(frozen=True)
class EWCOptions(RoutedOptions):
    """a penalty on moving what mattered to earlier tasks (Kirkpatrick et al. 2017)"""

    strength: float = 10.0
    """how strongly it is held, λ"""
    fisher_examples: int = 1000
    """examples of a task that say what mattered to it"""
    empirical: bool = False
    """take the true labels for that, instead of the network's own"""

    def __post_init__(self):
        super().__post_init__()
        check_rate("strength", self.strength)
        check_positive("fisher_examples", self.fisher_examples)

    def __call__(self, network: Network) -> EWC:
        return ewc(
            network,
            lr=self.lr,
            router_lr=self.router_lr,
            optimizer=self.optimizer(),
            strength=self.strength,
            fisher_examples=self.fisher_examples,
            empirical=self.empirical,
        )


@dataclass(frozen=True)
class OnlineEWCOptions(EWCOptions):
    """EWC with one anchor, at the last task's end (Schwarz et al. 2018)"""

    decay: float = 1.0
    """share of what mattered before that is kept at a task's end, γ"""

    def __post_init__(self):
        super().__post_init__()
        check_rate("decay", self.decay)

    def __call__(self, network: Network) -> EWC:
        return replace(super().__call__(network), decay=rate("decay", self.decay))
