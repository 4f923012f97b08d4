"""Expert Gate: an expert for each task, and an autoencoder that tells its inputs from others' (Aljundi et al. 2017).

Who is told the task has private experts. Who is not can ask the autoencoders: an input is of the task whose own
reconstructs it best.

Axes: T tasks, B examples.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import Invalid, check_positive
from cotrain.methods.descent import Learned, Optimizer, Rates, begin, descend, rate, rates_of
from cotrain.methods.finetune import DescentOptions
from cotrain.methods.method import Info
from cotrain.networks.experts import Chain, Dense
from cotrain.networks.network import Draws, Network
from cotrain.networks.parameters import narrow
from cotrain.speed.loops import each, once


class ExpertGateState(NamedTuple):
    """What was learned, and the gate."""

    learner: Learned
    autoencoders: Chain  # a stack of T
    moments: Any  # of their optimizer, for each
    seen: Bool[Array, " T"]  # the tasks that have begun


class ExpertGate(eqx.Module):
    """See `expert_gate`."""

    network: Network
    rates: Rates
    gate_lr: Float[Array, ""]
    optimizer: Optimizer = eqx.field(static=True)
    gate_optimizer: Optimizer = eqx.field(static=True)
    code: int = eqx.field(static=True)
    related: bool = eqx.field(static=True)
    examples: ClassVar[int] = 0

    def init(self, key: PRNGKeyArray) -> ExpertGateState:
        spec = self.network.spec
        keys = jax.random.split(jax.random.fold_in(key, 3), spec.tasks)  # beside the network's, which are 0 to 2
        stack = eqx.filter_vmap(self._autoencoder)(keys)
        moments = jax.vmap(self.gate_optimizer(0.0).init)(stack)
        return ExpertGateState(begin(self.network, self.optimizer, key), stack, moments, jnp.zeros(spec.tasks, bool))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Draws:
        return self.network.draw(key, batch.task.size, len(batch.y))

    def update(self, state: ExpertGateState, batch: Batch, noise: Draws) -> tuple[ExpertGateState, Info]:
        if batch.task.ndim:
            raise Invalid("stream", "joint", "Expert Gate learns one task after another")
        if self.related:
            fresh = state.seen.any() & ~state.seen[batch.task]
            state = once(fresh, lambda zero, state: self._inherited(state, batch, zero), state)
        learner, own = state.learner, batch.task[None]
        path = self.network.sample(learner.parameters, batch.task, batch.weight, noise)
        learner, loss = descend(self.network, self.optimizer, learner, batch, path, self.rates)

        def error(autoencoder: Chain) -> Float[Array, ""]:
            errors = jax.vmap(_error, (None, 0))(jax.tree.map(lambda a: a[0], autoencoder), batch.x)
            return (batch.weight * errors).sum() / jnp.maximum(batch.weight.sum(), 1)

        value, gradient = jax.value_and_grad(error)(narrow(state.autoencoders, own))
        gate = each(self.gate_optimizer(self.gate_lr), state.autoencoders, state.moments, gradient, own)
        seen = state.seen.at[batch.task].set(True)
        return ExpertGateState(learner, *gate, seen), Info(loss, {"reconstruction": value})

    def consolidate(self, state: ExpertGateState, batch: Batch, key: PRNGKeyArray) -> ExpertGateState:
        del batch, key
        return state

    def infer(self, state: ExpertGateState, x: Float[Array, "B ..."]) -> Int[Array, " B"]:
        """The task of each input: the one with the largest p = softmax(−er / τ), and so the smallest error."""
        return self._errors(state, x).argmin(axis=0)

    def _errors(self, state: ExpertGateState, x: Float[Array, "B ..."]) -> Float[Array, "T B"]:
        """er: how badly each autoencoder reconstructs each input."""
        errors = jax.vmap(jax.vmap(_error, (None, 0)), (0, None))(state.autoencoders, x)
        return jnp.where(state.seen[:, None], errors, jnp.inf)

    def _inherited(self, state: ExpertGateState, batch: Batch, zero: Array) -> ExpertGateState:
        """The state with the expert of the most related earlier task in the place of the current task's.

        Rel(k, a) = 1 − (Er_a − Er_k) / Er_k is largest where Er_a is smallest, whatever Er_k.
        """
        # Deviation: the original goes by all of a task's examples, with its autoencoder trained; here they come once.
        errors = jnp.where(batch.weight > 0, self._errors(state, batch.x + zero), 0).sum(axis=1)
        related = errors.argmin()  # argmax_a Rel(k, a)
        experts = jax.tree.map(lambda a: a.at[batch.task].set(a[related]), state.learner.parameters.experts)
        return eqx.tree_at(lambda state: state.learner.parameters.experts, state, experts)

    def _autoencoder(self, key: PRNGKeyArray) -> Chain:
        """One hidden layer: ReLU for the code, sigmoid for the reconstruction."""
        size, (encoder, decoder) = math.prod(self.network.spec.shape), jax.random.split(key)
        return Chain((Dense(size, self.code, jax.nn.relu, encoder), Dense(self.code, size, jax.nn.sigmoid, decoder)))


def _error(autoencoder: Chain, x: Float[Array, "..."]) -> Float[Array, ""]:
    """The squared error of a reconstruction."""
    return ((autoencoder(x) - x.ravel()) ** 2).sum()


def expert_gate(
    network: Network,
    *,
    code: int = 32,
    gate_lr: float = 0.01,
    related: bool = False,
    lr: float = 0.1,
    optimizer: Optimizer = optax.sgd,
    gate_optimizer: Optimizer = optax.adagrad,
) -> ExpertGate:
    """Task t fine-tunes expert t of each layer, alone, and an autoencoder of its inputs with a `code` of so many units.

    `related` starts a task from the expert whose autoencoder reconstructs its first minibatch best. `lr` is for the
    experts and heads, `gate_lr` for the autoencoders.
    """
    gate, size = rate("gate_lr", gate_lr), check_positive("code", code)
    return ExpertGate(network.reserved(), rates_of(lr, None), gate, optimizer, gate_optimizer, size, related)


@dataclass(frozen=True)
class ExpertGateOptions(DescentOptions):
    """an expert for each task, and autoencoders that tell which task an input is of"""

    code: int = 32
    """units of the autoencoders' code"""
    gate_lr: float = 0.01
    """learning rate of the autoencoders (Adagrad)"""
    related: bool = False
    """start a task from the expert of the most related one"""

    def __post_init__(self):
        super().__post_init__()
        check_positive("code", self.code)

    def __call__(self, network: Network) -> ExpertGate:
        return expert_gate(
            network,
            code=self.code,
            gate_lr=self.gate_lr,
            related=self.related,
            lr=self.lr,
            optimizer=self.optimizer(),
        )
