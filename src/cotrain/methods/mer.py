"""MER: meta-experience replay, examples one by one with replayed ones, and Reptile around them (Riemer et al. 2019).

Axes: B examples of a minibatch, s batches for each of them (B_1, …, B_s), k examples of such a batch.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from cotrain.data.batch import Batch
from cotrain.errors import check_positive, check_rate
from cotrain.memory import BATCH, CAPACITY, Memory, Reservoir
from cotrain.methods.descent import Learned, Optimizer, Rates, begin, descend, rate, rates_of
from cotrain.methods.finetune import RoutedOptions
from cotrain.methods.method import Info
from cotrain.networks.network import Draws, Network

BATCHES, BETA, GAMMA = 1, 0.03, 1.0


class MERState(NamedTuple):
    """What was learned, and what is remembered."""

    learner: Learned
    memory: Memory


class Noise(NamedTuple):
    """The random numbers of one update, for each of its examples."""

    routes: Draws  # for the routes of its s·k steps
    memory: tuple[UInt32[Array, "B 1 2"], UInt32[Array, "B N 2"]]  # for the memory's update


class MER(eqx.Module):
    """See `mer`."""

    network: Network
    memory: Reservoir  # which draws all s·(k − 1) examples at once
    rates: Rates
    beta: Float[Array, ""]
    gamma: Float[Array, ""]
    batches: int = eqx.field(static=True)  # s
    optimizer: Optimizer = eqx.field(static=True)
    examples: ClassVar[int] = 0

    def init(self, key: PRNGKeyArray) -> MERState:
        return MERState(begin(self.network, self.optimizer, key), self.memory.init(self.network.spec))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Noise:
        def one(key: PRNGKeyArray) -> Noise:
            routes, memory = jax.random.split(key)
            steps = self.batches + self.memory.batch  # s·k
            return Noise(self.network.draw(routes, steps), self.memory.draw(memory, 1))

        return jax.vmap(one)(jax.random.split(key, len(batch.y)))

    def update(self, state: MERState, batch: Batch, noise: Noise) -> tuple[MERState, Info]:
        examples = jax.tree.map(lambda a: a[:, None], batch._replace(task=batch.tasks))
        each = (examples, noise)
        state, (losses, replayed) = jax.lax.scan(lambda state, one: self._learn(state, *one), state, each)
        loss = (batch.weight * losses).sum() / jnp.maximum(batch.weight.sum(), 1)
        return state, Info(loss, replayed=jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), replayed))

    def _learn(self, state: MERState, example: Batch, noise: Noise) -> tuple[MERState, tuple[Float[Array, ""], Batch]]:
        """Learns from one example; returns its loss before that and the examples that were replayed with it."""
        s, others = self.batches, self.memory.batch // self.batches
        old = self.memory.sample(state.memory)
        there = jnp.tile(jnp.arange(others) < state.memory.seen, s)  # no more are replayed than it holds
        old = old._replace(weight=old.weight * there * example.weight)
        batches, routes = jax.tree.map(lambda a: a.reshape(s, len(a) // s, *a.shape[1:]), (old, noise.routes))
        batches = jax.tree.map(
            lambda x, olds: jnp.concatenate([jnp.broadcast_to(x, (s, *x.shape)), olds], axis=1), example, batches
        )  # B_1, …, B_s ← sample(x, y, s, k, M)
        each = (batches, routes)
        learner, losses = jax.lax.scan(lambda learner, one: self._batch(learner, *one), state.learner, each)
        learner = _part_way(state.learner, learner, self.gamma)  # θ ← θ^A_0 + γ (θ^A_s − θ^A_0)
        memory = self.memory.add(state.memory, example, noise.memory)  # M ← M ∪ (x, y)
        return MERState(learner, memory), (losses[0], old)

    def _batch(self, learner: Learned, batch: Batch, routes: Draws) -> tuple[Learned, Float[Array, ""]]:
        """Learns from a batch B_i, one example after another; returns the loss of the first before that."""

        def step(j: Array, carry: tuple[Learned, Array]) -> tuple[Learned, Array]:
            learner, first = carry
            x, y, task, weight = (a[j] for a in batch)
            one, draws = Batch(x[None], y[None], task, weight[None]), jax.tree.map(lambda a: a[j][None], routes)
            path = self.network.sample(learner.parameters, task, one.weight, draws)  # R̂ ← sample(R)
            learner, loss = descend(self.network, self.optimizer, learner, one, path, self.rates)
            return learner, jnp.where(j == 0, loss, first)  # θ^W_{i,j} ← SGD(x_c, y_c, θ^W_{i,j−1}, α)

        count = (batch.weight > 0).sum()  # they come first; padding has none
        after, loss = jax.lax.fori_loop(0, count, step, (learner, jnp.zeros(())))
        return _part_way(learner, after, self.beta), loss  # θ ← θ^W_{i,0} + β (θ^W_{i,k} − θ^W_{i,0})

    def consolidate(self, state: MERState, batch: Batch, key: PRNGKeyArray) -> MERState:
        del batch, key
        return state


def _part_way(start: Learned, end: Learned, share: Float[Array, ""]) -> Learned:
    """Reptile's step: the parameters a part of the way from a start to an end, which has the moments."""
    way = jax.tree.map(lambda a, b: a + share * (b - a), start.parameters, end.parameters)
    return Learned(way, end.moments)


def mer(
    network: Network,
    memory: Reservoir,
    *,
    batches: int = BATCHES,
    beta: float = BETA,
    gamma: float = GAMMA,
    lr: float = 0.1,
    router_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
) -> MER:
    """With each example, `batches` times, steps on it and as many replayed as `memory` draws, one example a step.

    Of the way that such a batch moves the parameters, they keep the share `beta`, and of that of all `batches` the
    share `gamma`. `lr` is for the experts and heads, `router_lr` (by default the same) for the router.
    """
    several = Reservoir(memory.capacity, check_positive("batches", batches) * memory.batch)
    shares = rate("beta", beta), rate("gamma", gamma)
    return MER(network, several, rates_of(lr, router_lr), *shares, batches, optimizer)


@dataclass(frozen=True)
class MEROptions(RoutedOptions):
    """each example with replayed ones, step by step, and a part of the way that they go (Riemer et al. 2019)"""

    beta: float = BETA
    """share of the way that a batch goes"""
    gamma: float = GAMMA
    """share of the way that all batches of an example go"""
    batches: int = BATCHES
    """batches made of each example and replayed ones"""
    memory: int = CAPACITY
    """examples that the replay memory holds"""
    memory_batch: int = BATCH
    """examples replayed in each batch"""

    def __post_init__(self):
        super().__post_init__()
        check_rate("beta", self.beta)
        check_rate("gamma", self.gamma)
        check_positive("batches", self.batches)
        check_positive("memory", self.memory)
        check_positive("memory_batch", self.memory_batch, least=0)

    def __call__(self, network: Network) -> MER:
        return mer(
            network,
            Reservoir(self.memory, self.memory_batch),
            batches=self.batches,
            beta=self.beta,
            gamma=self.gamma,
            lr=self.lr,
            router_lr=self.router_lr,
            optimizer=self.optimizer(),
        )
