"""UCB: a Bayesian network that changes what it is unsure of, and keeps what it is sure of (Ebrahimi et al. 2020).

Each weight is a normal distribution, learned by Bayes by Backprop (Blundell et al. 2015). The smaller its deviation at
a task's end, the more slowly its mean moves from there on.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.nn import sigmoid
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.errors import Invalid, check_positive, check_rate
from cotrain.methods.descent import Learned, Optimizer, Part, Rates, begin, move, rate, rates_of, slope_at, unlearned
from cotrain.methods.finetune import RoutedOptions
from cotrain.methods.method import Info
from cotrain.networks.network import Draws, Network
from cotrain.networks.parameters import Entries, Parameters
from cotrain.networks.path import part_of
from cotrain.speed.randomness import normal, normal_bits

SHARE, WIDE, NARROW = 0.25, 1.0, math.exp(-6)


class UCBState(NamedTuple):
    """A distribution of each weight of the experts and heads, and a number for each of the router's."""

    learner: Learned  # μ, by which predictions are made
    spread: Learned  # ρ, where σ = log(1 + e^ρ)
    factors: Parameters  # of each mean's learning rate
    first: Bool[Array, ""]  # no task has ended yet


class Noise(NamedTuple):
    """The random numbers of one update."""

    routes: Draws
    weights: Any  # the bits of ε for each sample of the experts and heads that take part


class Prior(eqx.Module):
    """p(w): a mixture of two normal distributions around 0."""

    share: Float[Array, ""]  # π
    wide: Float[Array, ""]  # σ1
    narrow: Float[Array, ""]  # σ2

    def slope(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """−∂ log p(w) / ∂w."""
        one, other = 1 / self.wide**2, 1 / self.narrow**2
        odds = jnp.log(self.share * self.narrow) - jnp.log((1 - self.share) * self.wide) + w**2 * (other - one) / 2
        first = sigmoid(odds)  # how likely w is of the first
        return w * (first * one + (1 - first) * other)


class UCB(eqx.Module):
    """See `ucb`."""

    network: Network
    rates: Rates
    later_rates: Rates
    rho_rates: Rates
    rho: Float[Array, ""]
    kl: Float[Array, ""]
    prior: Prior
    samples: int = eqx.field(static=True)
    optimizer: Optimizer = eqx.field(static=True)
    examples: ClassVar[int] = 0

    def init(self, key: PRNGKeyArray) -> UCBState:
        learner = begin(self.network, self.optimizer, key)
        rho = jax.tree.map(lambda a: jnp.full_like(a, self.rho), _uncertain(learner.parameters))
        factors = jax.tree.map(jnp.ones_like, learner.parameters)
        return UCBState(learner, unlearned(self.optimizer, _together(rho)), factors, jnp.array(True))

    def draw(self, key: PRNGKeyArray, batch: Batch) -> Noise:
        routes_key, weights_key = jax.random.split(key)
        routes = self.network.draw(routes_key, batch.task.size, len(batch.y))

        def taking_part(key: PRNGKeyArray) -> Any:
            parameters = self.network.init(key)
            return _uncertain(part_of(parameters, self.network.sample(parameters, batch.task, batch.weight, routes)))

        shapes, structure = jax.tree.flatten(jax.eval_shape(taking_part, key))
        keys = jax.random.split(weights_key, len(shapes))
        bits = [normal_bits(key, (self.samples, *leaf.shape)) for key, leaf in zip(keys, shapes, strict=True)]
        return Noise(routes, jax.tree.unflatten(structure, bits))

    def update(self, state: UCBState, batch: Batch, noise: Noise) -> tuple[UCBState, Info]:
        if batch.task.ndim:
            raise Invalid("stream", "joint", "UCB learns one task after another")
        network, learner, spread = self.network, state.learner, state.spread
        path = network.sample(learner.parameters, batch.task, batch.weight, noise.routes)  # R̂ ← sample(R)
        means, factors = part_of(learner.parameters, path), part_of(state.factors, path)
        mu, rho = _uncertain(means), _uncertain(part_of(spread.parameters, path))
        sigma = jax.tree.map(deviation, rho)

        def sample(bits: Any) -> Any:
            """One sample's loss, its slopes, and the entries that take part."""
            epsilon = jax.tree.map(normal, bits)  # ε ∼ N(0, I)
            w = jax.tree.map(lambda mu, sigma, e: mu + sigma * e, mu, sigma, epsilon)  # w = μ + σ ⊙ ε
            there = slope_at(network, _together(w, means.router), batch, path, rates=self.rates)
            # Of κ (log q(w|θ) − log p(w)) − log p(D|w), where log q(w|θ) is −log σ and what does not depend on θ.
            # Deviation: the sum is over the weights that take part, since nothing else moves; the router has none.
            of_mu = jax.tree.map(lambda g, w: g + self.kl * self.prior.slope(w), _uncertain(there.gradient), w)
            of_sigma = jax.tree.map(lambda g, e, sigma: g * e - self.kl / sigma, of_mu, epsilon, sigma)
            return there.value, there.gradient.router, of_mu, of_sigma, [each.active for each in there.part.entries]

        *found, active = jax.lax.map(sample, noise.weights)
        loss, router, of_mu, of_sigma = jax.tree.map(lambda a: a.mean(axis=0), found)
        of_rho = jax.tree.map(lambda g, rho: g * sigmoid(rho), of_sigma, rho)
        part = Part(means, _entries(path.entries, active))

        both = zip(factors.stacks, _together(of_mu, router).stacks, strict=True)
        pairs = Parameters.of([None if slope is None else (factor, slope) for factor, slope in both])
        rates = jax.tree.map(lambda first, later: jnp.where(state.first, first, later), self.rates, self.later_rates)
        learner = move(network, scaled(self.optimizer), learner, pairs, part, rates)  # μ ← μ − α_μ ∂L/∂μ
        spread = move(network, self.optimizer, spread, _together(of_rho), part, self.rho_rates)
        # ρ ← ρ − α_ρ ∂L/∂ρ

        deviations = jax.tree.leaves(sigma)
        mean = jnp.stack([leaf.sum() for leaf in deviations]).sum() / sum(leaf.size for leaf in deviations)
        return state._replace(learner=learner, spread=spread), Info(loss, {"deviation": mean})

    def consolidate(self, state: UCBState, batch: Batch, key: PRNGKeyArray) -> UCBState:
        del batch, key
        # Deviation: the paper's Ω = 1 / σ makes all later rates some 20 times smaller than the first task's, those of
        # weights that no task has used too. Relative to where σ starts, these keep theirs; `later_lr` is for the rest.
        start = deviation(self.rho)
        factors = jax.tree.map(lambda rho: deviation(rho) / start, _uncertain(state.spread.parameters))
        factors = _together(factors, state.factors.router)  # α_μ ← α_μ / Ω, Ω ∝ 1 / σ
        return state._replace(factors=factors, first=jnp.array(False))


def deviation(rho: Float[Array, "..."]) -> Float[Array, "..."]:
    """σ = log(1 + e^ρ)."""
    return jnp.log1p(jnp.exp(rho))


def scaled(optimizer: Optimizer) -> Optimizer:
    """The same optimizer, of pairs of factors and gradients: its steps are multiplied by the factors."""

    def at(rate: Any) -> optax.GradientTransformation:
        plain = optimizer(rate)

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            factors, gradient = updates
            steps, state = plain.update(gradient, state, params)
            return jax.tree.map(jnp.multiply, factors, steps), state

        return optax.GradientTransformation(plain.init, update)

    return at


def _uncertain(parameters: Parameters) -> tuple[tuple[Any, ...], Any]:
    """The experts and heads."""
    return parameters.experts, parameters.heads


def _together(uncertain: tuple[tuple[Any, ...], Any], router: tuple[Any, ...] | None = None) -> Parameters:
    experts, heads = uncertain
    return Parameters(experts, heads, (None,) * len(experts) if router is None else router)


def _entries(entries: list[Entries], active: list[Bool[Array, "samples M"] | None]) -> tuple[Entries, ...]:
    """Those that take part in any sample."""
    both = zip(entries, active, strict=True)
    return tuple(each if some is None else each._replace(active=some.any(axis=0)) for each, some in both)


def ucb(
    network: Network,
    *,
    lr: float = 0.1,
    later_lr: float | None = None,
    rho_lr: float | None = None,
    router_lr: float | None = None,
    optimizer: Optimizer = optax.sgd,
    samples: int = 1,
    rho: float = -3.0,
    kl: float = 1e-6,
    prior: tuple[float, float, float] = (SHARE, WIDE, NARROW),
) -> UCB:
    """Bayes by Backprop, where a mean's learning rate is in proportion to its deviation at the last task's end.

    `lr` is for the means of experts and heads; `later_lr` takes its place after the first task, for weights as
    uncertain as at the start (the paper's is lr · log(1 + e^rho)); `rho_lr` is for the spreads ρ, which start at `rho`.
    `kl` is the weight κ of KL(q‖p) beside the mean cross-entropy: one over a task's examples makes it the evidence
    lower bound. `prior` are π, σ1 and σ2.
    """
    rates, later = rates_of(lr, router_lr), rate("later_lr", lr if later_lr is None else later_lr)
    spreads = rate("rho_lr", lr if rho_lr is None else rho_lr)
    return UCB(
        network,
        rates,
        rates._replace(experts=later, heads=later),
        Rates(experts=spreads, heads=spreads, router=None),
        jnp.asarray(_check_rho(rho), float),
        rate("kl", kl),
        _prior(*prior),
        check_positive("samples", samples),
        optimizer,
    )


def _check_rho(rho: float) -> float:
    if not -80 <= rho <= 80:
        raise Invalid("rho", rho, "choose a number from -80 to 80")
    return rho


def _prior(share: float, wide: float, narrow: float) -> Prior:
    if not 0 < share < 1:
        raise Invalid("prior_share", share, "choose a number between 0 and 1")
    for name, value in (("prior_wide", wide), ("prior_narrow", narrow)):
        if check_rate(name, value) == 0:
            raise Invalid(name, value, "choose a number above 0")
    return Prior(*(jnp.asarray(value, float) for value in (share, wide, narrow)))


@dataclass(frozen=True)
class UCBOptions(RoutedOptions):
    """a Bayesian network that changes what it is unsure of (Ebrahimi et al. 2020)"""

    later_lr: float | None = None
    """learning rate of the means after the first task, in proportion to their deviations; by default lr"""
    rho_lr: float | None = None
    """learning rate of the deviations; by default lr"""
    samples: int = 1
    """samples of the weights in each step"""
    rho: float = -3.0
    """where deviations start: log(1 + e^rho)"""
    kl: float = 1e-6
    """weight of the divergence from the prior, κ"""
    prior_share: float = SHARE
    """share of the first of the prior's two normal distributions, π"""
    prior_wide: float = WIDE
    """its deviation, σ1"""
    prior_narrow: float = NARROW
    """deviation of the second, σ2"""

    def __post_init__(self):
        super().__post_init__()
        check_positive("samples", self.samples)
        check_rate("kl", self.kl)
        _check_rho(self.rho)
        _prior(self.prior_share, self.prior_wide, self.prior_narrow)

    def __call__(self, network: Network) -> UCB:
        return ucb(
            network,
            lr=self.lr,
            later_lr=self.later_lr,
            rho_lr=self.rho_lr,
            router_lr=self.router_lr,
            optimizer=self.optimizer(),
            samples=self.samples,
            rho=self.rho,
            kl=self.kl,
            prior=(self.prior_share, self.prior_wide, self.prior_narrow),
        )
