"""Replay: after each minibatch, another from a small memory of earlier examples (Chaudhry et al. 2019)."""

from typing import NamedTuple

import equinox as eqx
import jax
import optax
from jaxtyping import Array, Int, PRNGKeyArray, Shaped, UInt32

from cotrain.data.batch import Batch
from cotrain.memory import Reservoir
from cotrain.methods.descent import Optimizer, Rates, begin, descend
from cotrain.methods.finetune import weight_and_router
from cotrain.methods.method import Info, State
from cotrain.networks.routing import Network


class Noise(NamedTuple):
    """The random numbers of one update."""

    current: tuple[Shaped[Array, "1 E"] | None, ...]  # for the routes of the current batch
    replayed: tuple[Shaped[Array, "B E"] | None, ...]  # for those of the replayed batch
    memory: tuple[UInt32[Array, "B 2"], UInt32[Array, "B 2"]]  # for the memory's update


class Replay(eqx.Module):
    """See `replay`."""

    network: Network
    memory: Reservoir
    rates: Rates
    memory_rates: Rates
    optimizer: Optimizer = eqx.field(static=True)

    def init(self, key: PRNGKeyArray) -> State:
        return State(begin(self.network, self.optimizer, key), self.memory.init(self.network.spec))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Noise:
        current, replayed, memory = jax.random.split(key, 3)
        return Noise(
            current=self.network.draw(current, batch.task.size),
            replayed=self.network.draw(replayed, self.memory.batch),
            memory=self.memory.draw(memory, len(batch.y)),
        )

    def update(self, state: State, batch: Batch, noise: Noise) -> tuple[State, Info]:
        state, _, info = self.step(state, batch, noise)
        return state, info

    def step(self, state: State, batch: Batch, noise: Noise) -> tuple[State, Batch, Info]:
        """The lines of Algorithm 1 up to the memory's update; returns also what was replayed."""
        network, learner = self.network, state.learner
        assert state.memory is not None
        path = network.sample(learner.parameters, batch.task, batch.weight, noise.current)  # R̂ ← sample(R)
        learner, loss = descend(network, self.optimizer, learner, batch, path, self.rates)

        old = self.memory.sample(state.memory)  # (x_M, y_M) = sample_batch(M)
        path = network.sample(learner.parameters, old.task, old.weight, noise.replayed)  # R̂ ← sample(R)
        learner, _ = descend(network, self.optimizer, learner, old, path, self.memory_rates)

        memory = self.memory.add(state.memory, batch, noise.memory)  # M ← M ∪ (x, y)
        return state._replace(learner=learner, memory=memory), old, Info(loss)

    def consolidate(self, state: State, task: Int[Array, ""]) -> State:
        del task
        return state


def replay(
    network: Network,
    memory: Reservoir,
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
        weight_and_router(network, lr, router_lr),
        weight_and_router(network, memory_lr, router_lr, field="memory_lr"),
        optimizer,
    )
