"""EWC and online EWC agree with their equations in NumPy; Fisher information by hand."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from agreement import NOISE, SPEC, agree, double_precision, examples_for, listed
from conftest import distance, leaves, moved, toy

from cotrain.data.batch import Batch
from cotrain.data.stream import Spec
from cotrain.engine import learn
from cotrain.errors import Invalid
from cotrain.methods.cotraining import cotraining
from cotrain.methods.ewc import EWCOptions, OnlineEWCOptions, ewc, fisher_information
from cotrain.networks.experts import dense
from cotrain.networks.routers.sampling import gaussian
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

_double_precision = double_precision

RATES = {"lr": 0.3, "router_lr": 1.5}
SETTINGS = RATES | {"noise": NOISE, "strength": 5.0, "cotraining_lr": 0.15, "cotrain_heads": False}
NETWORKS = {
    "shared bottom": shared_bottom(SPEC, hidden=(7, 5)),
    "routing network": routing_network(SPEC, dense(5), router=task_matrix(gaussian(NOISE)), layers=2, experts=6, k=2),
}


# The reference: L(θ) = L_t(θ) + λ/2 Σ_{i<t} Σ_j F_ij (θ_j − θ*_ij)², task by task


def update(state, batch, noise, settings):
    routes = reference.sampled(state, batch, noise, settings)
    loss, slopes = reference.whole_gradient(state, reference.examples_of(batch), routes)
    theta, masks = reference.parameters(state), reference.taking_part(state, routes)
    for fisher, anchor in state.setdefault("springs", []):
        for slope, mask, f, now, then in zip(slopes, masks, fisher, theta, anchor, strict=True):
            slope += mask * settings["strength"] * f * (now - then)
    reference.step(state, slopes, settings["lr"], settings["router_lr"])
    return loss


def consolidate(state, batch, key, settings):
    task, theta = int(batch["task"]), reference.parameters(state)
    route = reference.route_of(state, task, settings)
    if not settings["empirical"]:
        logits = [reference.forward(state, x, task, route)[0] for x in batch["x"]]
        batch = batch | {"y": np.asarray(jax.random.categorical(key, jnp.array(logits)))}
    examples = reference.examples_of(batch)
    fisher = [np.zeros_like(parameter) for parameter in theta]
    for example in examples:
        for f, slope in zip(fisher, reference.whole_gradient(state, [example], {task: route})[1], strict=True):
            f += slope**2 / len(examples)
    if settings["decay"] is not None and state["springs"]:
        [(before, _)] = state.pop("springs")
        fisher = [settings["decay"] * old + new for old, new in zip(before, fisher, strict=True)]
    state.setdefault("springs", []).append((fisher, [parameter.copy() for parameter in theta]))


def springs(state, expected):
    """Their strengths, and their pulls at θ = 0."""
    state = getattr(state, "inner", state)
    fisher, anchor, nothing = (
        listed(state.fisher),
        listed(state.anchor),
        [0 * p for p in reference.parameters(expected)],
    )
    strengths = [sum(of) for of in zip(nothing, *(f for f, _ in expected["springs"]), strict=True)]
    pulls = [[f * a for f, a in zip(*pair, strict=True)] for pair in expected["springs"]]
    pulls = [sum(of) for of in zip(nothing, *pulls, strict=True)]
    yield from zip(fisher, strengths, strict=True)
    yield from ((f * a, pull) for f, a, pull in zip(fisher, anchor, pulls, strict=True))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    ("decay", "empirical", "cotrained"),
    [(None, False, False), (None, True, True), (0.7, False, True)],
    ids=["ewc", "ewc, true labels, co-trained", "online, co-trained"],
)
def test_every_step_agrees(network, decay, empirical, cotrained):
    options = {"strength": SETTINGS["strength"], "decay": decay, "empirical": empirical, "fisher_examples": 8}
    method = ewc(NETWORKS[network], **RATES, **options)
    update_of, settings = update, SETTINGS | {"k": (2, 2), "decay": decay, "empirical": empirical}
    if cotrained:
        method, update_of = cotraining(method, lr=0.15), functools.partial(reference.cotraining, inner=update)
    end = agree(method, update_of, settings, consolidate=consolidate, also=springs)
    assert len(end["springs"]) == (SPEC.tasks if decay is None else 1)
    assert max(f.max() for fisher, _ in end["springs"] for f in fisher) > 0.1


# Fisher information


SMALL = shared_bottom(Spec(shape=(2,), classes=2, tasks=1), (2,))


def by_hand():
    """A network whose hidden units are its inputs, and which finds class 0 three times as probable as class 1."""
    parameters = SMALL.init(jax.random.key(0))
    return eqx.tree_at(
        lambda p: (p.experts[0].weight, p.heads.weight, p.heads.bias),
        parameters,
        (jnp.eye(2)[None], jnp.zeros(parameters.heads.weight.shape), jnp.array([[math.log(3), 0]])),
    )


def test_it_is_the_mean_square_of_each_examples_gradient():
    x, weight = jnp.array([[1.0, 2.0], [3.0, 0.0], [50.0, 70.0]]), jnp.array([1.0, 1.0, 0.0])
    found, _ = fisher_information(SMALL, by_hand(), Batch(x, jnp.array([0, 1, 0]), jnp.array(0), weight))
    squares = [1 / 16, 9 / 16]  # of 1 − 3/4 and 3/4, the first example's slopes in both logits and the second's
    wanted = [(squares[0] * 1 + squares[1] * 9) / 2, (squares[0] * 4 + squares[1] * 0) / 2]
    [weights] = found.heads.weight.swapaxes(1, 2) if found.heads.alone else found.heads.weight
    np.testing.assert_allclose(weights, [wanted, wanted], rtol=1e-12)
    np.testing.assert_allclose(found.heads.bias, [[5 / 16, 5 / 16]], rtol=1e-12)
    assert not found.experts[0].weight.any()  # where the head's weights are 0, nothing reaches the hidden units


def test_labels_are_the_networks_own_unless_the_true_ones_are_wanted():
    count = 3000
    examples = Batch(jnp.ones((count, 2)), jnp.zeros(count, int), jnp.array(0), jnp.ones(count))
    found = {}
    for empirical in (False, True):
        method = ewc(SMALL, fisher_examples=count, empirical=empirical)
        state = method.init(jax.random.key(0))
        state = state._replace(learner=state.learner._replace(parameters=by_hand()))
        found[empirical] = method.consolidate(state, examples, jax.random.key(1)).fisher.heads.bias[0]
    np.testing.assert_allclose(found[True], 1 / 16, rtol=1e-12)
    spread = math.sqrt((3 / 4 * 1 + 1 / 4 * 81) / 256 - (3 / 16) ** 2)  # of 1/16 and 9/16
    assert np.abs(found[False] - 3 / 16).max() < 4 * spread / math.sqrt(count)  # p (1 − p)


def one_task(method, task=0):
    """The state before the end of a task in which nothing was learned, and after it."""
    before = eqx.filter_jit(method.init)(jax.random.key(3))
    examples = examples_for(method.examples, task)
    return before, eqx.filter_jit(method.consolidate)(before, examples, jax.random.key(4))


def test_it_is_exactly_0_of_what_a_task_never_used():
    network = NETWORKS["routing network"]
    method = ewc(network, fisher_examples=20)
    before, after = one_task(method, task=1)
    used = network.used(before.learner.parameters, jnp.array(1))
    for fisher, taken in zip(after.fisher.experts, used, strict=True):
        np.testing.assert_array_equal(moved(jax.tree.map(jnp.zeros_like, fisher), fisher), taken)
        assert min(leaf.min() for leaf in leaves(fisher)) == 0
    for fisher, taken in zip(after.fisher.router, used, strict=True):
        np.testing.assert_array_equal(fisher.logits != 0, (np.arange(SPEC.tasks) == 1)[:, None] & taken[None])
    np.testing.assert_array_equal((after.fisher.heads.bias != 0).all(axis=1), np.arange(SPEC.tasks) == 1)


def test_what_cotraining_moves_is_never_held():
    network = routing_network(SPEC, dense(5), layers=2, experts=8, k=2)
    for snapshot in learn(cotraining(ewc(network, fisher_examples=10)), [toy(shape=(3, 4))], [0], batch=6):
        state = snapshot.state
        for fisher, used in zip(state.inner.fisher.experts, state.used, strict=True):
            held = np.asarray(fisher.bias[0] != 0).any(axis=1)
            assert held.any() == (snapshot.phase > 0)
            assert not (held & ~np.asarray(used[0]).any(axis=0)).any()


def test_after_one_task_the_last_anchor_is_the_only_one():
    network = NETWORKS["routing network"]
    (_, one), (_, other) = (one_task(ewc(network, fisher_examples=20, decay=decay)) for decay in (None, 0.5))
    assert distance(one.fisher, other.fisher) == 0
    assert distance(one.anchor, other.anchor) < 1e-15


# Options


def test_options_make_the_methods():
    network, options = NETWORKS["shared bottom"], {"lr": 0.2, "strength": 3.0, "fisher_examples": 7, "empirical": True}
    assert eqx.tree_equal(EWCOptions(**options)(network), ewc(network, **options))
    assert eqx.tree_equal(OnlineEWCOptions(**options, decay=0.5)(network), ewc(network, **options, decay=0.5))
    assert OnlineEWCOptions()(network).decay == 1


@pytest.mark.parametrize(("option", "value"), [("strength", -1.0), ("decay", float("nan")), ("fisher_examples", 0)])
def test_options_that_make_no_sense_are_refused(option, value):
    for refused in (lambda: OnlineEWCOptions(**{option: value}), lambda: ewc(SMALL, **{option: value})):
        with pytest.raises(Invalid, match=f"^{option}: {value}"):
            refused()
