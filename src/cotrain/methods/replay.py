"""Replay: after each minibatch, another from a small memory of earlier examples (Chaudhry et al. 2019)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import optax
from jaxtyping import PRNGKeyArray

from cotrain.choice import Choice, option
from cotrain.data.batch import Batch
from cotrain.errors import check_positive
from cotrain.memory import BATCH, CAPACITY, Buffer, Memory
from cotrain.methods import BUFFERS
from cotrain.methods.descent import Learned, Optimizer, Rates, begin, descend, rates_of
from cotrain.methods.finetune import RoutedOptions
from cotrain.methods.method import Info
from cotrain.networks.network import Draws, Network


class ReplayState(NamedTuple):
    """What was learned, and what is remembered."""

    learner: Learned
    memory: Memory


class Noise(NamedTuple):
    """The random numbers of one update."""

    current: Draws  # for the routes of the current batch
    replayed: Draws  # for those of the replayed batch
    memory: Any  # for the memory's update


class Replay(eqx.Module):
    """See `replay`."""

    network: Network
    memory: Buffer
    rates: Rates
    memory_rates: Rates
    optimizer: Optimizer = eqx.field(static=True)
    examples: ClassVar[int] = 0

    def init(self, key: PRNGKeyArray) -> ReplayState:
        return ReplayState(begin(self.network, self.optimizer, key), self.memory.init(self.network.spec))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Noise:
        return noise_of(self.network, self.memory, key, batch)

    def update(self, state: ReplayState, batch: Batch, noise: Noise) -> tuple[ReplayState, Info]:
        network, learner = self.network, state.learner
        path = network.sample(learner.parameters, batch.task, batch.weight, noise.current)  # R̂ ← sample(R)
        learner, loss = descend(network, self.optimizer, learner, batch, path, self.rates)

        old = self.memory.sample(state.memory)  # (x_M, y_M) = sample_batch(M)
        path = network.sample(learner.parameters, old.task, old.weight, noise.replayed)  # R̂ ← sample(R)
        learner, _ = descend(network, self.optimizer, learner, old, path, self.memory_rates)

        memory = self.memory.add(state.memory, batch, noise.memory)  # M ← M ∪ (x, y)
        return ReplayState(learner, memory), Info(loss, replayed=old)

    def consolidate(self, state: ReplayState, batch: Batch, key: PRNGKeyArray) -> ReplayState:
        del batch, key
        return state


def noise_of(network: Network, memory: Buffer, key: PRNGKeyArray, batch: Batch) -> Noise:
    """The random numbers of an update by a minibatch and a batch from memory."""
    for_current, for_replayed, for_memory = jax.random.split(key, 3)
    return Noise(
        current=network.draw(for_current, batch.task.size, len(batch.y)),
        replayed=network.draw(for_replayed, memory.batch),
        memory=memory.draw(for_memory, len(batch.y)),
    )


def replay(
    network: Network,
    memory: Buffer,
    *,
    lr: float = 0.1,
    router_lr: float | None = None,
    memory_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
) -> Replay:
    """One step on each minibatch, then one on a batch from memory.

    `lr` is for the experts and heads, `router_lr` for the router, `memory_lr` for the experts and heads in the step
    on replayed examples; both are `lr` by default.
    """
    memory_lr, router_lr = (lr if given is None else given for given in (memory_lr, router_lr))
    return Replay(
        network,
        memory,
        rates_of(lr, router_lr),
        rates_of(memory_lr, router_lr, field="memory_lr"),
        optimizer,
    )


@dataclass(frozen=True)
class MemoryOptions(RoutedOptions):
    """what every method with a memory can be told"""

    memory: int = CAPACITY
    """examples that the replay memory holds"""
    memory_batch: int = BATCH
    """examples replayed after each minibatch"""
    buffer: Choice = option(BUFFERS, "reservoir")
    """how the memory is kept"""

    def __post_init__(self):
        super().__post_init__()
        check_positive("memory", self.memory)
        check_positive("memory_batch", self.memory_batch)


@dataclass(frozen=True)
class ReplayOptions(MemoryOptions):
    """each minibatch, then one from a memory of earlier examples"""

    memory_lr: float | None = None
    """learning rate in the step on replayed examples; by default lr"""

    def __call__(self, network: Network) -> Replay:
        return replay(
            network,
            self.buffer(network.spec, self.memory, self.memory_batch),
            lr=self.lr,
            router_lr=self.router_lr,
            memory_lr=self.memory_lr,
            optimizer=self.optimizer(),
        )
