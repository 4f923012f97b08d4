"""OGD: orthogonal gradient descent, steps that change no remembered output of earlier tasks (Farajtabar et al. 2020).

Axes: T tasks, n gradients stored of each.
"""

from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import check_positive
from cotrain.methods.descent import Learned, Optimizer, Part, Rates, begin, move, rates_of, slope
from cotrain.methods.finetune import RoutedOptions
from cotrain.methods.method import Info
from cotrain.networks.network import Draws, Network
from cotrain.networks.parameters import Entries, Parameters

BASIS = 10
REMAINDER = 1e-4  # of a gradient; where less of it is new, it is taken for a combination of those that are stored


class OGDState(NamedTuple):
    """What was learned, and what no step may go along."""

    learner: Learned
    basis: Parameters  # S, orthonormal: every leaf has axes T and n before its own; zeros where nothing is stored
    end: Int[Array, ""]  # of the tasks of which something is


class OGD(eqx.Module):
    """See `ogd`."""

    network: Network
    rates: Rates
    examples: int = eqx.field(static=True)  # n
    optimizer: Optimizer = eqx.field(static=True)

    def init(self, key: PRNGKeyArray) -> OGDState:
        learner, size = begin(self.network, self.optimizer, key), (self.network.spec.tasks, self.examples)
        basis = jax.tree.map(lambda a: jnp.zeros((*size, *a.shape), a.dtype), learner.parameters)  # S ← {}
        return OGDState(learner, basis, jnp.zeros((), jnp.int32))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Draws:
        return self.network.draw(key, batch.task.size, len(batch.y))

    def update(self, state: OGDState, batch: Batch, noise: Draws) -> tuple[OGDState, Info]:
        network, parameters = self.network, state.learner.parameters
        path = network.sample(parameters, batch.task, batch.weight, noise)  # R̂ ← sample(R)
        there = slope(network, parameters, batch, path, rates=self.rates)
        gradient = there.part.add(jax.tree.map(jnp.zeros_like, parameters), there.gradient)  # g, zero off the route
        projected = self._projected(state, gradient)  # g̃ = g − Σ_{v∈S} ⟨g, v⟩ v, which is not
        everything = Part(parameters, (Entries(),) * len(parameters.stacks))
        learner = move(network, self.optimizer, state.learner, projected, everything, self.rates)  # θ ← θ − η g̃
        return state._replace(learner=learner), Info(there.value, {"kept": self._share(projected, gradient)})

    def consolidate(self, state: OGDState, batch: Batch, key: PRNGKeyArray) -> OGDState:
        del key
        parameters, slot = state.learner.parameters, batch.tasks[0]  # in a joint run, whichever
        state = state._replace(basis=jax.tree.map(lambda a: a.at[slot].set(0), state.basis))  # if it was learned before

        def add(own: Parameters, given: tuple[Array, ...]) -> tuple[Parameters, None]:
            place, x, y, task, weight = given
            gradient = jax.grad(lambda parameters: self.network.predict(parameters, task, x[None])[0, y])(parameters)
            rest = gradient  # u ← ∇f_y(x; θ*) − Σ_{v∈S} proj_v(∇f_y(x; θ*))
            for _ in range(2):  # Deviation: twice, since what is left after once is orthogonal but to rounding
                rest = self._without(own, self._projected(state, rest))
            new = (weight > 0) & (self._share(rest, gradient) > REMAINDER)
            scale = jnp.where(new, 1 / self._length(rest), 0)
            return jax.tree.map(lambda a, u: a.at[place].set(scale * u), own, rest), None  # S ← S ∪ {u/‖u‖}

        own = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), state.basis)
        places = jnp.arange(self.examples)
        own, _ = jax.lax.scan(add, own, (places, batch.x, batch.y, batch.tasks, batch.weight))
        basis = jax.tree.map(lambda a, more: a.at[slot].set(more), state.basis, own)
        return state._replace(basis=basis, end=jnp.maximum(state.end, slot + 1))

    def _projected(self, state: OGDState, gradient: Parameters) -> Parameters:
        """A gradient without what it has in common with the gradients of earlier tasks."""

        def remove(task: Array, gradient: Parameters) -> Parameters:
            return self._without(jax.tree.map(lambda a: a[task], state.basis), gradient)

        return jax.lax.fori_loop(0, state.end, remove, gradient)

    def _without(self, vectors: Parameters, gradient: Parameters) -> Parameters:
        """A gradient without its share in each of n orthonormal vectors: g − Σ_v ⟨g, v⟩ v."""
        shares = self._inner(vectors, gradient)
        return jax.tree.map(lambda g, v: g - jnp.tensordot(shares, v, 1), gradient, vectors)

    def _inner(self, vectors: Parameters, other: Parameters) -> Float[Array, " n"]:
        """⟨v, g⟩ for n vectors.

        Deviation: parameters count by their learning rates, for it is the step, −η g̃, that is to be orthogonal to the
        stored gradients; which it then is where the router's rate is another. With one rate for all, nothing differs.
        """
        parts = zip(self.rates, *((some.experts, some.heads, some.router) for some in (vectors, other)), strict=True)
        found = [
            rate * (v.reshape(len(v), -1) @ g.ravel())
            for rate, vs, gs in parts
            if rate is not None
            for v, g in zip(jax.tree.leaves(vs), jax.tree.leaves(gs), strict=True)
        ]
        return jnp.stack(found).sum(axis=0)

    def _length(self, gradient: Parameters) -> Float[Array, ""]:
        return jnp.sqrt(self._inner(jax.tree.map(lambda g: g[None], gradient), gradient)[0])

    def _share(self, part: Parameters, gradient: Parameters) -> Float[Array, ""]:
        """How much is left of a gradient."""
        whole = self._length(gradient)
        return jnp.where(whole > 0, self._length(part) / whole, 0)


def ogd(
    network: Network,
    *,
    basis: int = BASIS,
    lr: float = 0.1,
    router_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
) -> OGD:
    """Steps that, to first order, change no logit of the true class of `basis` examples of each earlier task.

    It keeps so many gradients of each task, each as large as the network. `lr` is for the experts and heads,
    `router_lr` (by default the same) for the router. Only plain descent goes where the projected gradient says.
    """
    rates = rates_of(lr, router_lr)
    if network.router is None or not network.router.learns:
        rates = rates._replace(router=None)
    return OGD(network, rates, check_positive("basis", basis), optimizer)


@dataclass(frozen=True)
class OGDOptions(RoutedOptions):
    """steps orthogonal to gradients that were stored of earlier tasks (Farajtabar et al. 2020)"""

    basis: int = BASIS
    """gradients stored of each task; all together take tasks × basis × parameters numbers"""

    def __post_init__(self):
        super().__post_init__()
        check_positive("basis", self.basis)

    def __call__(self, network: Network) -> OGD:
        return ogd(network, basis=self.basis, lr=self.lr, router_lr=self.router_lr, optimizer=self.optimizer())
