"""Synaptic intelligence agrees with its equations in NumPy; what ω adds up to."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from agreement import NOISE, SPEC, agree, double_precision, examples_for, listed
from conftest import leaves

from cotrain.errors import Invalid
from cotrain.methods.cotraining import cotraining
from cotrain.methods.si import SIOptions, si
from cotrain.networks.experts import dense
from cotrain.networks.routers.sampling import gaussian
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

_double_precision = double_precision

RATES, STRENGTH, DAMPING = {"lr": 0.3, "router_lr": 1.5}, 0.4, 0.2
SETTINGS = RATES | {"k": (2, 2), "noise": NOISE, "cotraining_lr": 0.15, "cotrain_heads": False}
NETWORKS = {
    "shared bottom": shared_bottom(SPEC, hidden=(7, 5)),
    "routing network": routing_network(SPEC, dense(5), router=task_matrix(gaussian(NOISE)), layers=2, experts=6, k=2),
}


# The reference: L(θ) + c Σ_k Ω_k (θ̃_k − θ_k)², task by task


def copies(state):
    return [parameter.copy() for parameter in reference.parameters(state)]


def begun(state):
    """The state, with what the method keeps, if it is at its start."""
    if "anchor" not in state:
        nothing = [0 * parameter for parameter in copies(state)]
        state |= {"gain": nothing, "importance": nothing, "anchor": copies(state)}
    return state


def update(state, batch, noise, settings):
    begun(state)
    routes = reference.sampled(state, batch, noise, settings)
    loss, slopes = reference.whole_gradient(state, reference.examples_of(batch), routes)
    before, masks = copies(state), reference.taking_part(state, routes)
    pulls = [
        mask * 2 * STRENGTH * importance * (theta - anchor)
        for mask, importance, theta, anchor in zip(masks, state["importance"], before, state["anchor"], strict=True)
    ]
    total = [slope + pull for slope, pull in zip(slopes, pulls, strict=True)]
    reference.step(state, total, settings["lr"], settings["router_lr"])
    state["gain"] = [
        gain - slope * (new - old)
        for gain, slope, new, old in zip(state["gain"], slopes, copies(state), before, strict=True)
    ]
    return loss


def consolidate(state, batch, key, settings):
    del batch, key, settings
    kept = zip(state["importance"], state["gain"], copies(state), state["anchor"], strict=True)
    state["importance"] = [
        importance + np.maximum(gain, 0) / ((new - old) ** 2 + DAMPING) for importance, gain, new, old in kept
    ]
    state["gain"], state["anchor"] = [0 * gain for gain in state["gain"]], copies(state)


def kept(state, expected):
    state = getattr(state, "inner", state)
    for name in ("gain", "importance", "anchor"):
        yield from zip(listed(getattr(state, name)), expected[name], strict=True)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("cotrained", [False, True], ids=["alone", "co-trained"])
def test_every_step_agrees(network, cotrained):
    method = si(NETWORKS[network], **RATES, strength=STRENGTH, damping=DAMPING)
    update_of = update
    if cotrained:
        method, update_of = cotraining(method, lr=0.15), functools.partial(reference.cotraining, inner=update)
    end = agree(method, update_of, SETTINGS, consolidate=consolidate, also=kept)
    assert max(importance.max() for importance in end["importance"]) > 0.1


# What the numbers are


@pytest.mark.parametrize("optimizer", [optax.sgd, optax.adam])
def test_gains_add_up_to_what_the_loss_lost(optimizer):
    """A path integral: over small steps on the same examples, Σ_k ω_k is the difference of the loss."""
    network, batch = NETWORKS["shared bottom"], examples_for(20, task=0)
    method = si(network, lr=1e-3, optimizer=optimizer)
    state, update_of = method.init(jax.random.key(1)), eqx.filter_jit(method.update)
    noise, losses = method.draw(jax.random.key(2), batch), []
    for _ in range(100):
        now = sum(leaf.sum() for leaf in leaves(state.gain))
        state, info = update_of(state, batch, noise)
        losses.append(float(info.loss))
    assert losses[0] - losses[-1] > 0.01
    assert now == pytest.approx(losses[0] - losses[-1], rel=0.02)


def test_what_lost_is_not_important_and_takes_no_importance_away():
    method = si(NETWORKS["shared bottom"], damping=0.5)
    state = method.init(jax.random.key(1))
    ones = jax.tree.map(jnp.ones_like, state.gain)
    state = state._replace(
        gain=jax.tree.map(lambda one: -one, ones),
        importance=jax.tree.map(lambda one: 3 * one, ones),
    )
    after = method.consolidate(state, examples_for(0, task=0), jax.random.key(2))
    assert all((leaf == 3).all() for leaf in leaves(after.importance))
    after = method.consolidate(state._replace(gain=ones), examples_for(0, task=0), jax.random.key(2))
    assert all((leaf == 5).all() for leaf in leaves(after.importance))  # 3 + 1 / (0 + ξ)
    assert not any(leaf.any() for leaf in leaves(after.gain))


# Options


def test_options_make_the_method():
    network, options = NETWORKS["shared bottom"], {"lr": 0.2, "strength": 3.0, "damping": 0.7}
    assert eqx.tree_equal(SIOptions(**options)(network), si(network, **options))


@pytest.mark.parametrize(("option", "value"), [("strength", -1.0), ("damping", -0.1), ("damping", 0.0)])
def test_options_that_make_no_sense_are_refused(option, value):
    for refused in (lambda: SIOptions(**{option: value}), lambda: si(NETWORKS["shared bottom"], **{option: value})):
        with pytest.raises(Invalid, match=f"^{option}: {value}"):
            refused()
