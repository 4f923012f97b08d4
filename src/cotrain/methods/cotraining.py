"""Co-training: the paper's method (Collier et al. 2020, Algorithm 1).

After each step, the experts that no task uses are trained on the same examples, so that a new task finds them well
initialised. On a network without unused experts it is replay.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import Invalid
from cotrain.memory import Reservoir
from cotrain.methods.descent import Learner, Optimizer, Rates, descend, rate
from cotrain.methods.method import Info, State
from cotrain.methods.replay import Noise, Replay, replay
from cotrain.networks.routing import Bucket, Network


class Cotraining(eqx.Module):
    """See `cotraining`."""

    replay: Replay
    cotraining_rates: Rates

    @property
    def network(self) -> Network:
        return self.replay.network

    def init(self, key: PRNGKeyArray) -> State:
        tasks = self.network.spec.tasks
        nothing = tuple(jnp.zeros((tasks, layer.experts), bool) for layer in self.network.layers)
        return self.replay.init(key)._replace(used=nothing)  # E[l,t,e] ← False

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Noise:
        return self.replay.draw(key, batch)

    def update(self, state: State, batch: Batch, noise: Noise) -> tuple[State, Info]:
        if batch.task.ndim:
            raise Invalid("stream", "joint", "co-training learns one task after another")
        state, old, info = self.replay.step(state, batch, noise)

        now = self.network.used(state.learner.parameters, batch.task)
        used = tuple(e.at[batch.task].set(row) for e, row in zip(state.used, now, strict=True))
        # E[l,t,e] ← e ∈ argtop-k R[l,t,:]

        both = batch.union(old)  # x ∪ x_M, y ∪ y_M

        def cotrain(bucket: Bucket, i: Array, learner: Learner) -> Learner:
            taken = tuple(e & (i == 0) for e in used)
            path = self.network.unused(learner.parameters, taken, batch.task + i, both, bucket)  # θ ⊙ (1 − E)
            return descend(self.network, self.replay.optimizer, learner, both, path, self.cotraining_rates)[0]

        # Loops that run once or not at all, since branches would copy the parameters. What does not seem to depend on
        # i, XLA would do ahead of the loop, for all buckets in every step.
        learner = state.learner
        unused = jnp.stack([(~e.any(axis=0)).sum() for e in used])
        for bucket in self.network.buckets:
            learner = jax.lax.fori_loop(0, bucket.fits(unused).astype(int), partial(cotrain, bucket), learner)
        return state._replace(learner=learner, used=used), info

    def consolidate(self, state: State, task: Int[Array, ""]) -> State:
        del task
        return state


def cotraining(
    network: Network,
    memory: Reservoir,
    *,
    lr: float = 0.1,
    router_lr: float | None = None,
    memory_lr: float | None = None,
    cotraining_lr: float | None = None,
    cotrain_heads: bool = False,
    optimizer: Optimizer = optax.sgd,
) -> Cotraining:
    """Replay, then a step of the experts that no task uses on current and replayed examples together.

    `cotraining_lr` (α_c) is for that step, by default `lr`; it moves the heads only if `cotrain_heads`, and never
    the router. The other rates are those of `replay`.
    """
    base = replay(network, memory, lr=lr, router_lr=router_lr, memory_lr=memory_lr, optimizer=optimizer)
    cotrain = rate("cotraining_lr", lr if cotraining_lr is None else cotraining_lr)
    return Cotraining(base, Rates(experts=cotrain, heads=cotrain if cotrain_heads else None, router=None))
