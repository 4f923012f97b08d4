"""Learning without forgetting: what earlier tasks' heads say of new examples stays as it was (Li and Hoiem 2016).

Axes: O old tasks, B examples, T tasks.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import Invalid, check_rate
from cotrain.methods.descent import Learned, Optimizer, Part, Rates, begin, cross_entropy, move, rate, rates_of, slope
from cotrain.methods.finetune import RoutedOptions
from cotrain.methods.method import Info
from cotrain.networks.network import Draws, Network
from cotrain.networks.parameters import Entries, Parameters
from cotrain.networks.path import Path, part_of


class LwfState(NamedTuple):
    """What was learned, what had been before the present task, and the tasks that were over by then."""

    learner: Learned
    teacher: Parameters
    ended: Bool[Array, " T"]


class Lwf(eqx.Module):
    """See `lwf`."""

    network: Network
    strength: Float[Array, ""]
    temperature: Float[Array, ""]
    rates: Rates
    optimizer: Optimizer = eqx.field(static=True)
    examples: ClassVar[int] = 0

    def init(self, key: PRNGKeyArray) -> LwfState:
        learner = begin(self.network, self.optimizer, key)
        return LwfState(learner, learner.parameters, jnp.zeros(self.network.spec.tasks, bool))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Draws:
        return self.network.draw(key, batch.task.size, len(batch.y))

    def update(self, state: LwfState, batch: Batch, noise: Draws) -> tuple[LwfState, Info]:
        network, learner = self.network, state.learner
        old, counts = jnp.arange(len(state.ended)), state.ended
        if network.one_head and (network.router is None or not network.by_task):  # all tasks have the same answers
            old, counts = old[:1], counts.any(keepdims=True)
        # Deviation: no warm-up, in which the new head learns alone until it converges; a stream is seen but once.
        recorded = self._answers(state.teacher, old, batch)  # Y_o ← CNN(X_n, θ_s, θ_o)

        def loss(logits: Float[Array, "B classes"], batch: Batch, part: Part) -> Float[Array, ""]:
            parameters = eqx.combine(part.parameters, learner.parameters)  # with what does not move
            kept = self._distillation(recorded, self._answers(parameters, old, batch), batch)
            return cross_entropy(logits, batch) + self.strength * (counts * kept).sum()  # L_new + λ_o Σ L_old

        path = network.sample(learner.parameters, batch.task, batch.weight, noise, whole=True)  # R̂ ← sample(R)
        there = slope(network, learner.parameters, batch, path, loss, self.rates)
        part = there.part._replace(entries=self._entries(learner.parameters, path, state.ended, batch.task))
        learner = move(network, self.optimizer, learner, there.gradient, part, self.rates)
        new = cross_entropy(there.logits, batch)
        return state._replace(learner=learner), Info(new, {"distillation": there.value - new})

    def consolidate(self, state: LwfState, batch: Batch, key: PRNGKeyArray) -> LwfState:
        del key
        return LwfState(state.learner, state.learner.parameters, state.ended.at[batch.task].set(True))

    def _answers(self, parameters: Parameters, tasks: Int[Array, " O"], batch: Batch) -> Float[Array, "O B classes"]:
        """The logits of some tasks, by their best routes, through what they share only once."""

        def answer(task: Int[Array, ""]) -> Float[Array, "B classes"]:
            path, whole = (self.network.best(parameters, task, whole) for whole in (False, True))
            path = path._replace(routes=(whole.routes[0], *path.routes[1:]))  # the first layer runs once for all
            return self.network.run(part_of(parameters, path), path, batch.x, batch.weight).logits

        return jax.vmap(answer)(tasks)

    def _distillation(
        self, recorded: Float[Array, "O B classes"], now: Float[Array, "O B classes"], batch: Batch
    ) -> Float[Array, " O"]:
        """L_old of each task: the mean cross-entropy of its modified probabilities."""
        wanted = jax.nn.softmax(recorded / self.temperature)  # y'_o ∝ y_o^(1/T)
        found = jax.nn.log_softmax(now / self.temperature)  # log ŷ'_o
        losses = -(wanted * found).sum(axis=2)  # −Σ_i y'_o⁽ⁱ⁾ log ŷ'_o⁽ⁱ⁾
        return losses @ batch.weight / jnp.maximum(batch.weight.sum(), 1)

    def _entries(
        self, parameters: Parameters, path: Path, ended: Bool[Array, " T"], task: Int[Array, "..."]
    ) -> tuple[Entries, ...]:
        """What takes part in a step: what the present task and those that ended use; the rest keeps its moments."""
        layers, every = len(path.routes), jnp.arange(len(ended))
        before = self.network.sample(parameters, every, ended.astype(float), (None,) * layers, whole=True)
        experts = [
            None if now.chosen is None or then.active is None else now.chosen.any(axis=0) | then.active
            for now, then in zip(path.routes, before.routes, strict=True)
        ]
        tasks = ended.at[task].set(True)
        heads, rows = None if path.one_head else tasks, tasks if path.by_task else None
        return tuple(Entries(active=active) for active in [*experts, heads, *[rows] * layers])


def lwf(
    network: Network,
    *,
    strength: float = 1.0,
    temperature: float = 2.0,
    lr: float = 0.1,
    router_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
) -> Lwf:
    """One step on each minibatch, which also keeps what the network at the task's start said of it as earlier tasks.

    `strength` (λ_o) weighs the sum over the earlier tasks; their probabilities are compared at a `temperature` (T).
    """
    return Lwf(
        network,
        rate("strength", strength),
        rate("temperature", _check_temperature(temperature)),
        rates_of(lr, router_lr),
        optimizer,
    )


def _check_temperature(value: float) -> float:
    if check_rate("temperature", value) == 0:
        raise Invalid("temperature", value, "choose a number above 0")
    return value


@dataclass(frozen=True)
class LwfOptions(RoutedOptions):
    """learning without forgetting: earlier tasks' answers to new examples stay as they were"""

    strength: float = 1.0
    """how much keeping the answers of each earlier task counts"""
    temperature: float = 2.0
    """the higher, the more the less likely classes count in that"""

    def __post_init__(self):
        super().__post_init__()
        check_rate("strength", self.strength)
        _check_temperature(self.temperature)

    def __call__(self, network: Network) -> Lwf:
        return lwf(
            network,
            strength=self.strength,
            temperature=self.temperature,
            lr=self.lr,
            router_lr=self.router_lr,
            optimizer=self.optimizer(),
        )
