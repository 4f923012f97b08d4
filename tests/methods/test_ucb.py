"""UCB agrees with its equations in NumPy; what becomes of deviations and rates."""

import copy
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from agreement import NOISE, SPEC, agree, double_precision, examples_for, listed, reference_noise
from conftest import identical, leaves

from cotrain.errors import Invalid
from cotrain.methods.cotraining import cotraining
from cotrain.methods.ucb import UCBOptions, deviation, ucb
from cotrain.networks.experts import dense
from cotrain.networks.routers.sampling import gaussian
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom
from cotrain.speed.randomness import normal

_double_precision = double_precision

RATES, RHO, KL, PRIOR, SAMPLES = {"lr": 0.3, "router_lr": 1.5, "rho_lr": 0.7}, -1.5, 0.02, (0.3, 0.8, 0.1), 2
START = math.log(1 + math.exp(RHO))
SETTINGS = RATES | {"k": (2, 2), "noise": NOISE, "cotraining_lr": 0.15, "cotrain_heads": False}
OPTIONS = {"rho": RHO, "kl": KL, "prior": PRIOR, "samples": SAMPLES}
NETWORKS = {
    "shared bottom": shared_bottom(SPEC, hidden=(7, 5)),
    "routing network": routing_network(SPEC, dense(5), router=task_matrix(gaussian(NOISE)), layers=2, experts=6, k=2),
}
BOTTOM = NETWORKS["shared bottom"]


# The reference: Algorithm 1 of the paper, with the gradients of Blundell et al. (2015), equations 3 and 4


def begun(state, settings):
    """The state, with what the method keeps, if it is at its start."""
    if "rho" not in state:
        routers = sum(logits is not None for logits in state["router"])
        weights = reference.parameters(state)[: len(reference.parameters(state)) - routers]
        state["rho"] = [np.full_like(weight, RHO) for weight in weights]
        state["rate"] = [settings["lr"]] * len(weights)
    return state


def epsilons(state, drawn, route, task):
    """The random numbers of each array of weights, of which a stack has a slot for each that takes part."""
    slots = [{e: slot for slot, e in enumerate(sorted(gates))} for gates in route] + [{task: 0}]
    for stack, modules, slot in zip(drawn, [*state["experts"], state["heads"]], slots, strict=True):
        for place, module in enumerate(modules):
            for name in ("weight", "bias"):
                yield stack[name][slot[place]] if place in slot else np.zeros_like(module[name])


def density(x, sigma):
    return np.exp(-(x**2) / (2 * sigma**2)) / (math.sqrt(2 * math.pi) * sigma)


def divergence_slopes(w, mu, sigma):
    """Of log q(w|θ) − log p(w): in w, in μ and in σ."""
    share, wide, narrow = PRIOR
    first, second = share * density(w, wide), (1 - share) * density(w, narrow)
    of_prior = -w * (first / wide**2 + second / narrow**2) / (first + second)
    return -(w - mu) / sigma**2 - of_prior, (w - mu) / sigma**2, (w - mu) ** 2 / sigma**3 - 1 / sigma


def update(state, batch, noise, settings):
    begun(state, settings)
    routes = reference.sampled(state, batch, noise["routes"], settings)
    [(task, route)] = routes.items()
    mus, rhos = reference.parameters(state), state["rho"]
    losses, slopes, rho_slopes = [], [np.zeros_like(mu) for mu in mus], [np.zeros_like(rho) for rho in rhos]
    for drawn in noise["weights"]:
        epsilon, other = list(epsilons(state, drawn, route, task)), copy.deepcopy(state)
        for w, rho, e in zip(reference.parameters(other), rhos, epsilon, strict=False):
            w += np.log(1 + np.exp(rho)) * e
        loss, found = reference.whole_gradient(other, reference.examples_of(batch), routes)
        losses.append(loss)
        for i, slope in enumerate(found):
            if i >= len(rhos):  # the router
                slopes[i] += slope / SAMPLES
                continue
            sigma, w = np.log(1 + np.exp(rhos[i])), reference.parameters(other)[i]
            of_w, of_mu, of_sigma = divergence_slopes(w, mus[i], sigma)
            of_w = slope + KL * of_w
            slopes[i] += (of_w + KL * of_mu) / SAMPLES
            rho_slopes[i] += (of_w * epsilon[i] + KL * of_sigma) / (1 + np.exp(-rhos[i])) / SAMPLES
    for i, mask in enumerate(reference.taking_part(state, routes)):
        if i >= len(rhos):
            mus[i] -= settings["router_lr"] * slopes[i]
        elif mask:
            mus[i] -= state["rate"][i] * slopes[i]
            rhos[i] -= settings["rho_lr"] * rho_slopes[i]
    return sum(losses) / SAMPLES


def consolidate(state, batch, key, settings):
    del batch, key
    state["rate"] = [settings["lr"] / settings["importance"](np.log(1 + np.exp(rho))) for rho in state["rho"]]


def noise_of(noise):
    def parts(stack, sample):
        weight, bias = (np.asarray(normal(bits))[sample] for bits in (stack.weight, stack.bias))
        return {"weight": weight.swapaxes(1, 2) if stack.alone else weight, "bias": bias}

    experts, heads = noise.weights
    weights = [[parts(stack, sample) for stack in (*experts, heads)] for sample in range(SAMPLES)]
    return {"routes": reference_noise(noise.routes), "weights": weights}


def kept(state, expected):
    state = getattr(state, "inner", state)
    return zip(listed(state.spread.parameters), expected["rho"], strict=True)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", ["relative", "the paper's", "co-trained"])
def test_every_step_agrees(network, case):
    later, importance = (RATES["lr"] * START, lambda sigma: 1 / sigma) if case == "the paper's" else (None, None)
    method = ucb(NETWORKS[network], **RATES, **OPTIONS, later_lr=later)
    settings, update_of = SETTINGS | {"importance": importance or (lambda sigma: START / sigma)}, update
    if case == "co-trained":
        method, update_of = cotraining(method, lr=0.15), functools.partial(reference.cotraining, inner=update)
    end = agree(method, update_of, settings, consolidate=consolidate, also=kept, noise_of=noise_of)
    assert max(abs(rho - RHO).max() for rho in end["rho"]) > 0.1


# What becomes of deviations


def learned(method, batches, seed=1):
    """The state after some batches, each with its own noise."""
    state, update_of = method.init(jax.random.key(seed)), eqx.filter_jit(method.update)
    for step, batch in enumerate(batches):
        state, _ = update_of(state, batch, method.draw(jax.random.fold_in(jax.random.key(seed), step), batch))
    return state


def test_what_matters_becomes_sure_and_what_does_not_stays_unsure():
    batch = examples_for(40, task=0)
    batch = batch._replace(x=batch.x.at[:, 1:].set(0), weight=jnp.ones(40))  # of 12 inputs, 8 are always 0
    state = learned(ucb(BOTTOM, lr=0.1, rho_lr=20.0, rho=RHO, kl=0.0), [batch] * 200)
    sigma = np.asarray(deviation(state.spread.parameters.experts[0].weight))[0]  # [inputs, units]
    assert sigma[:4].mean() < 0.9 * START
    assert (state.spread.parameters.experts[0].weight[0, 4:] == RHO).all()
    head = np.asarray(deviation(state.spread.parameters.heads.weight))
    assert head[0].mean() < 0.9 * START
    assert (state.spread.parameters.heads.weight[1:] == RHO).all()


def test_without_data_weights_become_as_the_prior():
    """KL(q‖p) is least where q is p: with σ1 = σ2 a normal distribution of that deviation, around 0."""
    batch = examples_for(5, task=0)
    batch = batch._replace(weight=jnp.zeros(5))
    state = learned(ucb(BOTTOM, lr=0.02, rho=0.0, kl=1.0, prior=(0.5, 0.5, 0.5)), [batch] * 1500)
    sigma = np.concatenate([leaf.ravel() for leaf in leaves(deviation_of(state.spread.parameters.experts))])
    mu = np.concatenate([leaf.ravel() for leaf in leaves(state.learner.parameters.experts)])
    assert sigma.mean() == pytest.approx(0.5, rel=0.03)
    assert abs(mu).mean() < 0.1


def deviation_of(tree):
    return jax.tree.map(deviation, tree)


# What becomes of rates


def test_a_tasks_end_makes_rates_proportional_to_deviations():
    method = ucb(NETWORKS["routing network"], rho=RHO)
    state = method.init(jax.random.key(0))
    assert all((leaf == 1).all() for leaf in leaves(state.factors))
    spread = state.spread._replace(parameters=jax.tree.map(lambda rho: rho + 1, state.spread.parameters))
    after = method.consolidate(state._replace(spread=spread), examples_for(0, task=0), jax.random.key(1))
    wanted = math.log(1 + math.exp(RHO + 1)) / START
    for leaf in leaves((after.factors.experts, after.factors.heads)):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-12)
    assert identical(after.factors.router, state.factors.router)
    assert identical(after.learner, state.learner)
    assert bool(state.first)
    assert not bool(after.first)


@pytest.mark.parametrize("optimizer", [optax.sgd, optax.adam, functools.partial(optax.sgd, momentum=0.9)])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_factor_scales_the_step_of_any_optimizer(network, optimizer):
    method, batch = ucb(NETWORKS[network], rho=RHO, optimizer=optimizer), examples_for(5, task=1)
    state, noise = method.init(jax.random.key(0)), method.draw(jax.random.key(1), batch)
    scale = jax.tree.map(lambda a: jnp.full_like(a, 0.25), state.factors)
    full, less = (
        eqx.filter_jit(method.update)(each, batch, noise)[0] for each in (state, state._replace(factors=scale))
    )
    steps = [jax.tree.map(jnp.subtract, after.learner.parameters, state.learner.parameters) for after in (full, less)]
    for one, other in zip(*map(leaves, steps), strict=True):
        np.testing.assert_allclose(other, 0.25 * one, atol=1e-15)
    assert max(abs(leaf).max() for leaf in leaves(steps[0])) > 1e-3
    assert identical(full.spread, less.spread)


def test_after_the_first_task_later_lr_is_the_rate():
    batch = examples_for(5, task=1)
    moved = []
    for rates, first in (
        ({"lr": 0.2, "later_lr": 0.05}, True),
        ({"lr": 0.2, "later_lr": 0.05}, False),
        ({"lr": 0.05}, True),
    ):
        method = ucb(BOTTOM, rho=RHO, rho_lr=0.1, **rates)
        state = method.init(jax.random.key(0))._replace(first=jnp.array(first))
        moved.append(eqx.filter_jit(method.update)(state, batch, method.draw(jax.random.key(1), batch))[0].learner)
    assert identical(moved[1], moved[2])
    assert not identical(moved[0], moved[1])


# Options


def test_options_make_the_method():
    options = {"lr": 0.2, "later_lr": 0.1, "rho_lr": 3.0, "samples": 3, "rho": -2.0, "kl": 1e-3}
    prior = {"prior_share": 0.4, "prior_wide": 2.0, "prior_narrow": 0.1}
    assert eqx.tree_equal(UCBOptions(**options, **prior)(BOTTOM), ucb(BOTTOM, **options, prior=tuple(prior.values())))
    assert eqx.tree_equal(UCBOptions()(BOTTOM), ucb(BOTTOM))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("samples", 0),
        ("kl", -1.0),
        ("rho", -81.0),
        ("rho", math.nan),
        ("later_lr", -0.1),
        ("rho_lr", -0.1),
        ("prior_share", 0.0),
        ("prior_share", 1.0),
        ("prior_wide", 0.0),
        ("prior_narrow", -1.0),
    ],
)
def test_options_that_make_no_sense_are_refused(option, value):
    with pytest.raises(Invalid, match=f"^{option}: {value}"):
        UCBOptions(**{option: value})


def test_examples_of_several_tasks_are_refused():
    method, batch = ucb(BOTTOM), examples_for(3, task=0)
    batch = batch._replace(task=batch.tasks)
    with pytest.raises(Invalid, match="stream: 'joint'"):
        method.update(method.init(jax.random.key(0)), batch, method.draw(jax.random.key(1), batch))
