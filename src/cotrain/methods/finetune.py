"""Fine-tuning: plain gradient descent on whatever comes. The paper's *shared bottom* and *MoE* without replay."""

import equinox as eqx
import optax
from jaxtyping import Array, Int, PRNGKeyArray, Shaped

from cotrain.data.batch import Batch
from cotrain.methods.descent import Optimizer, Rates, begin, descend, rate
from cotrain.methods.method import Info, State
from cotrain.networks.routing import Network


class Finetune(eqx.Module):
    """See `finetune`."""

    network: Network
    rates: Rates
    optimizer: Optimizer = eqx.field(static=True)

    def init(self, key: PRNGKeyArray) -> State:
        return State(begin(self.network, self.optimizer, key))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> tuple[Shaped[Array, "D E"] | None, ...]:
        return self.network.draw(key, batch.task.size)

    def update(self, state: State, batch: Batch, noise: tuple[Array | None, ...]) -> tuple[State, Info]:
        path = self.network.sample(state.learner.parameters, batch.task, batch.weight, noise)  # R̂ ← sample(R)
        learner, loss = descend(self.network, self.optimizer, state.learner, batch, path, self.rates)
        return state._replace(learner=learner), Info(loss)

    def consolidate(self, state: State, task: Int[Array, ""]) -> State:
        del task
        return state


def finetune(
    network: Network, *, lr: float = 0.1, router_lr: float | None = None, optimizer: Optimizer = optax.sgd
) -> Finetune:
    """One step on each minibatch, and nothing against forgetting.

    `lr` is for the experts and heads, `router_lr` (by default the same) for the router.
    """
    return Finetune(network, weight_and_router(network, lr, router_lr), optimizer)


def weight_and_router(network: Network, lr: float, router_lr: float | None, field: str = "lr") -> Rates:
    """The rates of a step on experts, heads and, where it learns, the router."""
    weights = rate(field, lr)
    router = rate("router_lr", lr if router_lr is None else router_lr)
    return Rates(weights, weights, None if network.private else router)
