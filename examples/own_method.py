"""A method of your own: elastic weight consolidation (Kirkpatrick et al. 2017), on any network, from the shell too."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

import cotrain


class State(NamedTuple):
    learner: cotrain.Learned
    fisher: cotrain.Parameters  # Σ_i F_i over the tasks so far
    pull: cotrain.Parameters  # Σ_i F_i θ*_i


class EWC(cotrain.Finetune):  # which has a network, rates, an optimizer, and draws the noise for routes
    strength: jax.Array
    examples = 200  # of each task, for `consolidate` to see

    def init(self, key):
        learner = cotrain.begin(self.network, self.optimizer, key)
        return State(learner, *[jax.tree.map(jnp.zeros_like, learner.parameters)] * 2)

    def update(self, state, batch, noise):
        def loss(logits, batch, part):  # L_t(θ) + λ/2 · Σ_i Σ_j F_ij (θ_j − θ*_ij)², but for a constant
            terms = [part.take(state.fisher), part.take(state.pull), part.parameters]
            each = jax.tree.map(lambda f, pull, theta: (f * theta**2 - 2 * pull * theta).sum(), *terms)
            return cotrain.cross_entropy(logits, batch) + self.strength / 2 * sum(jax.tree.leaves(each))

        path = self.network.sample(state.learner.parameters, batch.task, batch.weight, noise)
        new, value = cotrain.descend(self.network, self.optimizer, state.learner, batch, path, self.rates, loss=loss)
        return state._replace(learner=new), cotrain.Info(value)

    def consolidate(self, state, batch, key):  # F_j = E (∂ log p(y|x) / ∂θ_j)² for y ∼ p(·|x), example by example
        theta = state.learner.parameters
        labels = jax.random.categorical(key, self.network.predict(theta, batch.task, batch.x))

        def add(state, example):
            one, path = cotrain.Batch(*(a[None] for a in example)), self.network.best(theta, batch.task, whole=True)
            new = jax.tree.map(lambda g: g**2 / len(labels), cotrain.slope(self.network, theta, one, path)[1])
            pull = jax.tree.map(lambda pull, f, p: pull + f * p, state.pull, new, theta)
            return State(state.learner, jax.tree.map(jnp.add, state.fisher, new), pull), None

        return jax.lax.scan(add, state, (batch.x, labels, batch.tasks, batch.weight))[0]


@dataclass(frozen=True)
class Options(cotrain.RoutedOptions):
    """elastic weight consolidation"""

    strength: float = 100.0
    """λ: how strongly what mattered to earlier tasks is kept"""

    def __call__(self, network):
        rates = cotrain.rates_of(self.lr, self.router_lr)
        return EWC(network, rates, self.optimizer(), jnp.asarray(self.strength))
