"""Learning without forgetting beside a plain reference, and what it comes down to."""

import copy
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from agreement import NOISE, SPEC, agree, double_precision
from conftest import STREAM, distance, filled, first_batch, identical, leaves, moved, routed

from cotrain.errors import Invalid
from cotrain.methods.cotraining import cotraining
from cotrain.methods.descent import begin
from cotrain.methods.finetune import FinetuneState, finetune
from cotrain.methods.lwf import LwfOptions, LwfState, lwf
from cotrain.networks.experts import dense
from cotrain.networks.routers.by_input import by_input
from cotrain.networks.routers.fixed import fixed
from cotrain.networks.routers.sampling import gaussian
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

_double_precision = double_precision
KEY = jax.random.key(0)
SETTINGS = {
    "lr": 0.3,
    "router_lr": 1.5,
    "cotraining_lr": 0.15,
    "cotrain_heads": False,
    "noise": NOISE,
    "k": (2, 2),
    "strength": 0.7,
    "temperature": 1.6,
}


# The reference


def distillation(recorded, count, settings):
    """An example's share of λ_o L_old, of probabilities that are raised to 1/T, and its gradient in the logits."""
    power = 1 / settings["temperature"]

    def modified(logits):
        powers = reference.softmax(logits) ** power
        return powers / powers.sum()

    wanted = modified(recorded)

    def loss(logits, example):
        found, share = modified(logits), settings["strength"] / count
        return -share * wanted @ np.log(found), share * power * (found - wanted)

    return loss


def update(state, batch, noise, settings):
    """One minibatch of LwF: each example once with its label, and once as each task that ended."""
    ended, current = state.setdefault("ended", []), reference.examples_of(batch)
    routes = reference.sampled(state, batch, noise, settings)
    examples, losses = list(current), [functools.partial(reference.cross_entropy, count=len(current))] * len(current)
    for task in ended:
        routes[task] = reference.route_of(state, task, settings)
        route = reference.route_of(state["teacher"], task, settings)
        for example in current:
            recorded, _, _ = reference.forward(state["teacher"], example.x, task, route)
            examples.append(example._replace(task=task))
            losses.append(distillation(recorded, len(current), settings))
    _, slopes = reference.whole_gradient(state, examples, routes, losses)
    loss, _ = reference.whole_gradient(state, current, routes)
    reference.step(state, slopes, settings["lr"], settings["router_lr"])
    return loss


def consolidate(state, batch, key, settings):
    state["teacher"] = copy.deepcopy({part: state[part] for part in ("experts", "heads", "router")})
    state["ended"].append(int(batch["task"]))


def networks(hidden=(7, 5)):
    return {
        "shared bottom": shared_bottom(SPEC, hidden),
        "routing network": routing_network(SPEC, dense(5), experts=6, k=2, router=task_matrix(gaussian(NOISE))),
    }


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("cotrained", [False, True], ids=["alone", "cotrained"])
def test_every_step_agrees(name, cotrained):
    method = lwf(networks()[name], strength=0.7, temperature=1.6, lr=0.3, router_lr=1.5)
    if not cotrained:
        expected = agree(method, update, SETTINGS, consolidate=consolidate)
    else:
        method = cotraining(method, lr=SETTINGS["cotraining_lr"])
        inner = functools.partial(reference.cotraining, inner=update)
        expected = agree(method, inner, SETTINGS, consolidate=consolidate)
    assert expected["ended"] == [0, 1, 2]


# Laws


@eqx.filter_jit
def step(method, state, batch, noise):
    return method.update(state, batch, noise)


@eqx.filter_jit
def end(method, state, batch):
    return method.consolidate(state, batch, KEY)


SMALL = {  # made in a test, in its precision
    "shared bottom": lambda: shared_bottom(STREAM.spec, (4, 3)),
    "routed": lambda: routed(STREAM.spec, dense(4, jnp.tanh), experts=6, k=2, noise=1.0),
    "concatenate": lambda: routed(
        STREAM.spec, dense(4, jnp.tanh), layers=1, experts=5, k=2, aggregation="concatenate", sampling="noisy-top-k"
    ),
    "fixed": lambda: routing_network(STREAM.spec, dense(4, jnp.tanh), layers=1, experts=3, k=2, router=fixed()),
    "one head": lambda: shared_bottom(STREAM.spec, (4, 3), one_head=True),
    "one head, routed": lambda: routing_network(
        STREAM.spec, dense(4, jnp.tanh), layers=1, experts=6, k=2, one_head=True
    ),
    "by input": lambda: routing_network(STREAM.spec, dense(4, jnp.tanh), layers=1, experts=5, k=2, router=by_input()),
    "by input, one head": lambda: routing_network(
        STREAM.spec, dense(4, jnp.tanh), layers=1, experts=5, k=2, router=by_input(balance=0.3), one_head=True
    ),
}
every_network = pytest.mark.parametrize("name", SMALL)


def practised(network, optimizer=optax.sgd, ended=(True, False, False)):
    """A state after some tasks, with another teacher."""
    learner = filled(begin, network, optimizer, KEY)
    learner = learner._replace(moments=jax.tree.map(jnp.abs, learner.moments))
    return LwfState(learner, filled(network.init, KEY, seed=1), jnp.array(ended))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *((name, optax.sgd) for name in ("fixed", "one head", "by input")),
        *((name, optax.adam) for name in ("shared bottom", "routed")),
    ],
)
def test_while_no_task_ended_it_is_finetuning(name, optimizer):
    network, batch = SMALL[name](), first_batch(STREAM, 1)
    state = practised(network, optimizer, ended=(False,) * 3)
    method, tuning = lwf(network, optimizer=optimizer), finetune(network, optimizer=optimizer)
    noise = method.draw(KEY, batch)
    after, _ = step(method, state, batch, noise)
    tuned, _ = step(tuning, FinetuneState(state.learner), batch, noise)
    assert distance(after.learner, tuned.learner) < 1e-12
    assert distance(tuned.learner, state.learner) > 1e-3


@pytest.mark.parametrize("name", ["routed", "concatenate", "one head, routed", "by input, one head"])
def test_with_strength_zero_it_is_finetuning(name):
    network, batch = SMALL[name](), first_batch(STREAM, 1)
    state, method = practised(network), lwf(network, strength=0.0)
    noise = method.draw(KEY, batch)
    after, _ = step(method, state, batch, noise)
    tuned, _ = step(finetune(network), FinetuneState(state.learner), batch, noise)
    assert distance(after.learner, tuned.learner) < 1e-12
    assert distance(step(lwf(network), state, batch, noise)[0].learner, tuned.learner) > 1e-4


@every_network
def test_a_step_goes_down_the_gradient_of_both_losses(name):
    """By hand, on predictions: of each task that ended, or of all at once where they are the same."""
    network, batch, rate = SMALL[name](), first_batch(STREAM, 2), 1e-6
    state = practised(network, ended=(True, True, False))
    method, tuning = lwf(network, strength=0.7, lr=rate), finetune(network, lr=rate)
    noise = method.draw(KEY, batch)
    after, _ = step(method, state, batch, noise)
    tuned, _ = step(tuning, FinetuneState(state.learner), batch, noise)

    def kept(parameters):
        total = 0.0
        for task in (0,) if name in ("one head", "by input, one head") else (0, 1):
            wanted, found = (
                jax.nn.softmax(network.predict(theta, jnp.array(task), batch.x) / 2)
                for theta in (state.teacher, parameters)
            )
            total += -(wanted * jnp.log(found)).sum(axis=1).mean()
        return total

    gradient = jax.jit(jax.grad(kept))(state.learner.parameters)
    if network.router is not None and not network.router.learns:
        gradient = eqx.tree_at(lambda g: g.router, gradient, jax.tree.map(jnp.zeros_like, gradient.router))
    by_hand = jax.tree.map(lambda p, g: p - rate * 0.7 * g, tuned.learner.parameters, gradient)
    assert distance(after.learner.parameters, by_hand) < 1e-13
    assert distance(tuned.learner.parameters, by_hand) > 1e-9


def test_the_teacher_is_the_network_as_it_was_when_the_last_task_ended():
    network = SMALL["routed"]()
    method, state = lwf(network), practised(network)
    for task in (1, 2):
        batch = first_batch(STREAM, task)
        after, _ = step(method, state, batch, method.draw(KEY, batch))
        assert identical(after.teacher, state.teacher)
        assert identical(after.ended, state.ended)
        state = end(method, after, batch)
        assert identical(state.teacher, after.learner.parameters)
        assert identical(state.learner, after.learner)
        np.testing.assert_array_equal(state.ended, np.arange(3) <= task)


@pytest.mark.parametrize(
    "optimizer", [optax.adamw, functools.partial(optax.sgd, momentum=0.9)], ids=["adamw", "momentum"]
)
def test_what_neither_the_task_nor_one_that_ended_uses_keeps_its_parameters_and_moments(optimizer):
    network, batch = routed(STREAM.spec, dense(4, jnp.tanh), experts=8, k=2, noise=1.0), first_batch(STREAM, 1)
    state, method = practised(network, optimizer), lwf(network, optimizer=optimizer)
    noise = method.draw(KEY, batch)
    after, _ = step(method, state, batch, noise)
    path = network.sample(state.learner.parameters, batch.task, batch.weight, noise)
    old = network.best(state.learner.parameters, jnp.array(0))
    for before, now in zip(state.learner, after.learner, strict=True):
        for layer in range(2):
            used = np.isin(np.arange(8), np.append(path.routes[layer].members, old.routes[layer].members))
            assert not used.all()
            np.testing.assert_array_equal(moved(before.experts[layer], now.experts[layer]), used)
            np.testing.assert_array_equal(moved(before.router[layer], now.router[layer]), [True, True, False])
        np.testing.assert_array_equal(moved(before.heads, now.heads), [True, True, False])


def test_padding_and_classes_that_tasks_do_not_have_count_for_nothing():
    spec = STREAM.spec._replace(widths=(2, 3, 2))
    network = routing_network(spec, dense(4), layers=1, experts=4, k=2)
    method, state, batch = lwf(network), practised(network), first_batch(STREAM, 1)
    noise, weight = method.draw(KEY, batch), jnp.array([1.0, 1, 0, 0, 1, 1])
    padded = batch._replace(weight=weight)
    other = padded._replace(x=jnp.where(weight[:, None, None] > 0, batch.x, 7.0))
    states = [step(method, state, some, noise) for some in (padded, other, batch)]
    assert all(np.isfinite(leaf).all() for leaf in leaves(states))
    assert distance(states[0], states[1]) == 0
    assert distance(states[0], states[2]) > 1e-4
    nothing, info = step(method, state, batch._replace(weight=jnp.zeros(6)), noise)
    assert distance(nothing.learner, state.learner) == info.loss == info.scalars["distillation"] == 0


def test_the_distillation_is_told():
    network, batch = SMALL["shared bottom"](), first_batch(STREAM, 1)
    method, state = lwf(network, strength=3.0), practised(network)
    state = state._replace(teacher=state.learner.parameters)
    _, info = step(method, state, batch, method.draw(KEY, batch))
    share = jax.nn.softmax(network.predict(state.teacher, jnp.array(0), batch.x) / 2)
    np.testing.assert_allclose(info.scalars["distillation"], -3 * (share * jnp.log(share)).sum(axis=1).mean())
    wanted = finetune(network).update(FinetuneState(state.learner), batch, method.draw(KEY, batch))[1].loss
    np.testing.assert_allclose(info.loss, wanted)


@pytest.mark.parametrize(
    "make", [lambda **o: lwf(SMALL["shared bottom"](), **o), LwfOptions], ids=["function", "options"]
)
@pytest.mark.parametrize("options", [{"strength": -1.0}, {"temperature": 0.0}, {"temperature": -2.0}])
def test_what_makes_no_sense_is_refused(make, options):
    with pytest.raises(Invalid, match="|".join(options)):
        make(**options)


def test_options_make_the_method():
    made = LwfOptions(strength=0.5, temperature=3.0, lr=0.2, router_lr=0.4)(SMALL["routed"]())
    wanted = lwf(SMALL["routed"](), strength=0.5, temperature=3.0, lr=0.2, router_lr=0.4)
    assert eqx.tree_equal(made, wanted)
    assert eqx.tree_equal(LwfOptions()(SMALL["routed"]()), lwf(SMALL["routed"]()))
