"""Co-training: the paper's method (Collier et al. 2020) around any other. Algorithm 1 is `cotraining(replay(…))`.

After each step of the other method, the experts that no task uses are trained on the same examples, so that a new task
finds them well initialised. On a network without unused experts it is the other method.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray

from cotrain.choice import Choice, option
from cotrain.data.batch import Batch
from cotrain.errors import Invalid, check_rate
from cotrain.methods import METHODS
from cotrain.methods.descent import Learned, Optimizer, Rates, descend, rate
from cotrain.methods.method import Info, Method
from cotrain.networks.network import Network
from cotrain.networks.unused import Bucket, buckets, unused_path
from cotrain.speed.loops import once


class CotrainingState(NamedTuple):
    """The other method's state, and which experts are in use."""

    inner: Any
    used: tuple[Bool[Array, "T E"], ...]  # E in Algorithm 1: the experts that each task uses, per layer

    @property
    def learner(self) -> Learned:
        """What was learned."""
        return self.inner.learner


class Cotraining(eqx.Module):
    """See `cotraining`."""

    inner: Method
    cotraining_rates: Rates

    @property
    def network(self) -> Network:
        return self.inner.network

    @property
    def rates(self) -> Rates:
        return self.inner.rates

    @property
    def optimizer(self) -> Optimizer:
        return self.inner.optimizer

    @property
    def examples(self) -> int:
        return self.inner.examples

    def init(self, key: PRNGKeyArray) -> CotrainingState:
        tasks = self.network.spec.tasks
        nothing = tuple(jnp.zeros((tasks, layer.experts), bool) for layer in self.network.layers)
        return CotrainingState(self.inner.init(key), nothing)  # E[l,t,e] ← False

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Any:
        return self.inner.draw(key, batch)

    def update(self, state: CotrainingState, batch: Batch, noise: Any) -> tuple[CotrainingState, Info]:
        if batch.task.ndim:
            raise Invalid("stream", "joint", "co-training learns one task after another")
        inner, info = self.inner.update(state.inner, batch, noise)

        now = self.network.used(inner.learner.parameters, batch.task)
        used = tuple(e.at[batch.task].set(row) for e, row in zip(state.used, now, strict=True))
        # E[l,t,e] ← e ∈ argtop-k R[l,t,:]

        both = batch if info.replayed is None else batch.union(info.replayed)  # x ∪ x_M, y ∪ y_M

        def cotrain(bucket: Bucket, zero: Array, learner: Learned) -> Learned:
            taken, task = tuple(e & (zero == 0) for e in used), batch.task + zero
            path = unused_path(self.network, learner.parameters, taken, task, both, bucket)  # θ ⊙ (1 − E)
            return descend(self.network, self.optimizer, learner, both, path, self.cotraining_rates)[0]

        learner = inner.learner
        unused = jnp.stack([(~e.any(axis=0)).sum() for e in used])
        for bucket in buckets(self.network):
            learner = once(bucket.fits(unused), partial(cotrain, bucket), learner)
        return CotrainingState(eqx.tree_at(lambda inner: inner.learner, inner, learner), used), info

    def consolidate(self, state: CotrainingState, batch: Batch, key: PRNGKeyArray) -> CotrainingState:
        return state._replace(inner=self.inner.consolidate(state.inner, batch, key))


def cotraining(inner: Method, *, lr: float | None = None, cotrain_heads: bool = False) -> Cotraining:
    """After each step of another method, one of the experts that no task uses, on the same examples.

    Those are the current ones and what the other method says that it replayed. `lr` (α_c) is for the experts, by
    default the other method's; the heads move with them only if `cotrain_heads`, and the router never does.
    """
    if not inner.network.by_task:
        raise Invalid("router", "input", "co-training must know the experts that a task uses; choose a router by task")
    cotrain = inner.rates.experts if lr is None else rate("cotraining_lr", lr)
    return Cotraining(inner, Rates(experts=cotrain, heads=cotrain if cotrain_heads else None, router=None))


@dataclass(frozen=True)
class CotrainingOptions:
    """another method (by default replay), then a step of the experts that no task uses (the paper's method)"""

    inner: Choice = option(METHODS, "replay")
    """the other method"""
    cotraining_lr: float | None = None
    """learning rate in the co-training step; by default lr"""
    cotrain_heads: bool = False
    """let the co-training step move the heads too"""

    def __post_init__(self):
        if self.cotraining_lr is not None:
            check_rate("cotraining_lr", self.cotraining_lr)

    def __call__(self, network: Network) -> Cotraining:
        return cotraining(self.inner(network), lr=self.cotraining_lr, cotrain_heads=self.cotrain_heads)
