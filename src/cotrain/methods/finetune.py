"""Fine-tuning: plain gradient descent on whatever comes. The paper's *shared bottom* and *MoE* without replay."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import equinox as eqx
import optax
from jaxtyping import PRNGKeyArray

from cotrain.choice import Choice, option
from cotrain.data.batch import Batch
from cotrain.errors import check_rate
from cotrain.methods import OPTIMIZERS
from cotrain.methods.descent import Learned, Optimizer, Rates, begin, descend, rates_of
from cotrain.methods.method import Info
from cotrain.networks.network import Draws, Network


class FinetuneState(NamedTuple):
    """Nothing but what was learned."""

    learner: Learned


class Finetune(eqx.Module):
    """See `finetune`."""

    network: Network
    rates: Rates
    optimizer: Optimizer = eqx.field(static=True)
    examples: ClassVar[int] = 0

    def init(self, key: PRNGKeyArray) -> FinetuneState:
        return FinetuneState(begin(self.network, self.optimizer, key))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Draws:
        return self.network.draw(key, batch.task.size, len(batch.y))

    def update(self, state: FinetuneState, batch: Batch, noise: Draws) -> tuple[FinetuneState, Info]:
        path = self.network.sample(state.learner.parameters, batch.task, batch.weight, noise)  # R̂ ← sample(R)
        learner, loss = descend(self.network, self.optimizer, state.learner, batch, path, self.rates)
        return state._replace(learner=learner), Info(loss)

    def consolidate(self, state: FinetuneState, batch: Batch, key: PRNGKeyArray) -> FinetuneState:
        del batch, key
        return state


def finetune(
    network: Network, *, lr: float = 0.1, router_lr: float | None = None, optimizer: Optimizer = optax.sgd
) -> Finetune:
    """One step on each minibatch, and nothing against forgetting.

    `lr` is for the experts and heads, `router_lr` (by default the same) for the router.
    """
    return Finetune(network, rates_of(lr, router_lr), optimizer)


@dataclass(frozen=True)
class DescentOptions:
    """what every method that descends can be told"""

    lr: float = 0.1
    """learning rate of experts and heads"""
    optimizer: Choice = option(OPTIMIZERS, "sgd")
    """how gradients become steps"""

    def __post_init__(self):
        for field, value in vars(self).items():
            if field.endswith("lr") and value is not None:
                check_rate(field, value)


@dataclass(frozen=True)
class RoutedOptions(DescentOptions):
    """what every method that moves the router can be told"""

    router_lr: float | None = None
    """learning rate of the router; by default lr"""


@dataclass(frozen=True)
class FinetuneOptions(RoutedOptions):
    """plain gradient descent; nothing against forgetting"""

    def __call__(self, network: Network) -> Finetune:
        return finetune(network, lr=self.lr, router_lr=self.router_lr, optimizer=self.optimizer())


@dataclass(frozen=True)
class JointOptions(FinetuneOptions):
    """a control: all tasks shuffled together; the ceiling"""
