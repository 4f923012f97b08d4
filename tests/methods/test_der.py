"""Dark experience replay beside a plain reference, and what it comes down to."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from agreement import NOISE, SPEC, agree, double_precision
from conftest import STREAM, distance, filled, first_batch, leaves, mixed_batch, routed

from cotrain.data.batch import Batch
from cotrain.errors import Invalid
from cotrain.memory import reservoir
from cotrain.methods.cotraining import cotraining
from cotrain.methods.der import DerOptions, DerPlusPlusOptions, DerState, der, der_plus_plus, squares
from cotrain.methods.descent import begin
from cotrain.methods.finetune import FinetuneState, finetune
from cotrain.networks.experts import dense
from cotrain.networks.network import NEVER
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
    "alpha": 0.4,
    "beta": 0.7,
    "draws": 4,
    "capacity": 20,
}


# The reference


def dark(stored, count, settings):
    """An example's share of α ‖z' − h(x')‖², a mean over examples and classes, and its gradient in the logits."""

    def loss(logits, example):
        share = settings["alpha"] / (count * len(stored))
        return share * ((logits - stored) ** 2).sum(), 2 * share * (logits - stored)

    return loss


def labelled(weight, count):
    """An example's share of β ℓ(y'', f(x''))."""

    def loss(logits, example):
        value, slope = reference.cross_entropy(logits, example, count)
        return weight * value, weight * slope

    return loss


def update(state, batch, noise, settings):
    """One minibatch of DER, or of DER++ where twice as many are drawn: one step on the sum of its losses."""
    old, draws = state["memory"]["next"], settings["draws"]
    current, past = reference.examples_of(batch), reference.examples_of(old)
    first, second = past[:draws], past[draws:]
    losses = [labelled(1, len(current))] * len(current)
    losses += [dark(kept["logits"], len(first), settings) for kept in old["columns"][:draws]]
    losses += [labelled(settings["beta"], len(second))] * len(second)

    size = len(batch["y"])
    tasks = np.concatenate([np.broadcast_to(batch["task"], size), old["task"]])
    both = {"task": tasks, "weight": np.concatenate([batch["weight"], old["weight"]])}
    drawn = [
        None if now is None else np.concatenate([np.broadcast_to(now, (size, now.shape[1])), then])
        for now, then in zip(noise["current"], noise["replayed"], strict=True)
    ]
    routes = reference.sampled(state, both, drawn, settings)
    route = routes[int(batch["task"])]
    logits = [reference.forward(state, x, int(batch["task"]), route)[0] for x in batch["x"]]
    loss, _ = reference.whole_gradient(state, current, routes)
    _, slopes = reference.whole_gradient(state, current + past, routes, losses)
    reference.step(state, slopes, settings["lr"], settings["router_lr"])
    reference.remember(state["memory"], batch, *noise["memory"], settings["capacity"], {"logits": logits})
    return loss


def make(name, network, capacity=20, **options):
    """DER or DER++ with the settings of the reference."""
    options = {"alpha": 0.4, "lr": 0.3, "router_lr": 1.5} | options
    if name == "der":
        return der(network, reservoir(capacity, 4), **options)
    return der_plus_plus(network, reservoir(capacity, 4), **{"beta": 0.7} | options)


def networks():
    return {
        "shared bottom": shared_bottom(SPEC, (7, 5)),
        "routing network": routing_network(SPEC, dense(5), experts=6, k=2, router=task_matrix(gaussian(NOISE))),
        "wide": routing_network(SPEC, dense(5), experts=48, k=2, router=task_matrix(gaussian(NOISE))),
    }


@pytest.mark.parametrize(
    ("name", "network", "capacity"),
    [
        *[(name, network, 20) for name in ("der", "der++") for network in ("shared bottom", "routing network")],
        ("der++", "wide", 3),  # each example has its own experts; the memory is smaller than a batch
    ],
)
def test_every_step_agrees(name, network, capacity):
    expected = agree(make(name, networks()[network], capacity), update, SETTINGS | {"capacity": capacity})
    assert len(expected["memory"]["next"]["y"]) == (4 if name == "der" else 8)


@pytest.mark.parametrize("name", ["der", "der++"])
def test_every_step_agrees_under_cotraining(name):
    method = cotraining(make(name, networks()["routing network"]), lr=SETTINGS["cotraining_lr"])
    agree(method, functools.partial(reference.cotraining, inner=update), SETTINGS)


# Laws


@eqx.filter_jit
def step(method, state, batch, noise):
    return method.update(state, batch, noise)


SMALL = {  # made in a test, in its precision
    "shared bottom": lambda: shared_bottom(STREAM.spec, (4, 3)),
    "routed": lambda: routed(STREAM.spec, dense(4, jnp.tanh), experts=6, k=2, noise=1.0),
    "concatenate": lambda: routed(
        STREAM.spec, dense(4, jnp.tanh), layers=1, experts=5, k=2, aggregation="concatenate", sampling="noisy-top-k"
    ),
    "fixed": lambda: routing_network(STREAM.spec, dense(4, jnp.tanh), layers=1, experts=3, k=2, router=fixed()),
    "one head": lambda: shared_bottom(STREAM.spec, (4, 3), one_head=True),
    "by input": lambda: routing_network(STREAM.spec, dense(4, jnp.tanh), layers=1, experts=5, k=2, router=by_input()),
}
every_network = pytest.mark.parametrize("name", SMALL)
every_method = pytest.mark.parametrize("kind", ["der", "der++"])
PAST = mixed_batch(STREAM, [0, 2, 1, 0, 2, 2, 1, 0], [1] * 8)


def practised(method, past=PAST):
    """A state in which these are the examples to be replayed next."""
    memory, size = method.memory.init(STREAM.spec, logits=(3,)), method.memory.batch
    stored = np.random.default_rng(5).normal(size=(8, 3))[:size]
    following = Batch(*(a[:size] for a in past))
    memory = memory._replace(next=following, next_columns={"logits": jnp.asarray(stored)})
    return DerState(filled(begin, method.network, method.optimizer, KEY), memory)


def tuned(network, state, batch, noise, **options):
    return step(finetune(network, **options), FinetuneState(state.learner), batch, noise)


@every_network
@every_method
def test_that_gives_memory_no_weight_is_finetuning(kind, name):
    network, batch = SMALL[name](), first_batch(STREAM, 1)
    method = make(kind, network, alpha=0.0, **({"beta": 0.0} if kind == "der++" else {}))
    state, noise = practised(method), method.draw(KEY, batch)
    (after, info), (wanted, plain) = (
        step(method, state, batch, noise),
        tuned(network, state, batch, noise.current, lr=0.3, router_lr=1.5),
    )
    assert distance(after.learner, wanted.learner) < 1e-12
    np.testing.assert_allclose(info.loss, plain.loss, rtol=1e-12)
    other, _ = step(make(kind, network), state, batch, noise)
    assert distance(other.learner, wanted.learner) > 1e-3


@pytest.mark.parametrize("name", ["shared bottom", "routed", "by input"])
@every_method
@pytest.mark.parametrize("optimizer", [optax.sgd, optax.adam], ids=["sgd", "adam"])
def test_with_an_empty_memory_it_is_finetuning(kind, name, optimizer):
    network, batch = SMALL[name](), first_batch(STREAM, 1)
    method = make(kind, network, optimizer=optimizer)
    state = method.init(KEY)
    assert not np.any(state.memory.next.weight)
    noise = method.draw(KEY, batch)
    after, _ = step(method, state, batch, noise)
    wanted, _ = tuned(network, state, batch, noise.current, lr=0.3, router_lr=1.5, optimizer=optimizer)
    assert distance(after.learner, wanted.learner) < 1e-8
    assert distance(after.learner, state.learner) > 1e-3


@pytest.mark.parametrize("name", ["shared bottom", "routed", "fixed", "one head"])
def test_labels_alone_are_a_joint_step(name):
    """The mean of two batches of one size has half the slope of the sum of their means."""
    network, batch = SMALL[name](), first_batch(STREAM, 1, size=4)
    method = make("der++", network, alpha=0.0, beta=1.0)
    state, noise = practised(method), method.draw(KEY, batch)
    after, _ = step(method, state, batch, noise)
    second = Batch(*(a[4:] for a in PAST))
    first_of_their_task = jnp.array([1, 1, 2, 0])  # of all that were drawn, whose noise decides
    drawn = jax.tree.map(
        lambda now, then: jnp.concatenate([jnp.repeat(now, 4, axis=0), then[first_of_their_task]]),
        noise.current,
        noise.replayed,
    )
    both = batch.union(second)
    wanted, _ = tuned(network, state, both, drawn, lr=0.6, router_lr=3.0)
    assert distance(after.learner, wanted.learner) < 1e-12


@every_method
def test_examples_of_the_current_task_take_its_route(kind):
    """With the noise that fine-tuning would take; so whatever is drawn for replayed ones, they follow."""
    network, batch = SMALL["routed"](), first_batch(STREAM, 1)
    method = make(kind, network)
    state, noise = practised(method, mixed_batch(STREAM, [1] * 8, [1] * 8)), method.draw(KEY, batch)
    other = noise._replace(replayed=method.draw(jax.random.key(9), batch).replayed)
    assert distance(step(method, state, batch, noise)[0], step(method, state, batch, other)[0]) == 0
    other = noise._replace(current=method.draw(jax.random.key(9), batch).current)
    assert distance(step(method, state, batch, noise)[0], step(method, state, batch, other)[0]) > 1e-4


@every_method
def test_the_logits_that_are_stored_are_those_of_the_step(kind):
    network = SMALL["shared bottom"]()
    method = make(kind, network)
    state, wanted = method.init(KEY), []
    for task in range(3):
        batch = first_batch(STREAM, task)
        wanted.append(network.predict(state.learner.parameters, batch.task, batch.x))
        state, info = step(method, state, batch, method.draw(jax.random.key(task), batch))
        assert len(info.replayed.y) == method.memory.batch
    np.testing.assert_allclose(state.memory.columns["logits"][:18], np.concatenate(wanted), rtol=1e-12)


def test_the_two_draws_are_independent():
    """Of 8 examples in 20 places, drawn twice as many: that a pair agrees has a chance of one in 20."""
    method = make("der++", SMALL["shared bottom"]())
    batch, agree = first_batch(STREAM, 0, size=20), []
    memory = method.memory.init(STREAM.spec, logits=(3,))
    for i in range(300):
        bits = method.memory.draw(jax.random.key(i), 20)
        drawn = add(method.memory, memory, batch._replace(y=jnp.arange(20, dtype=jnp.int32)), bits).next.y
        agree += list(np.asarray(drawn[:4] == drawn[4:]))
    assert abs(np.mean(agree) - 1 / 20) < 4 * (0.05 * 0.95 / len(agree)) ** 0.5


@eqx.filter_jit
def add(kind, memory, batch, bits):
    return kind.add(memory, batch, bits, {"logits": jnp.zeros((20, 3))})


@every_method
def test_padding_counts_for_nothing(kind):
    network = routing_network(STREAM.spec._replace(widths=(2, 3, 2)), dense(4), layers=1, experts=4, k=2)
    method = make(kind, network)
    state = method.init(KEY)
    for task in (1, 2, 0):
        batch = first_batch(STREAM, task)._replace(weight=jnp.array([1.0, 1, 0, 0, 1, 1]))
        other = batch._replace(x=jnp.where(batch.weight[:, None, None] > 0, batch.x, 7.0))
        noise = method.draw(jax.random.key(task), batch)
        state, same = (step(method, state, some, noise)[0] for some in (batch, other))
        assert all(np.isfinite(leaf).all() for leaf in leaves(state))
        assert distance(state, same) == 0
    assert int(state.memory.seen) == 12


def test_the_mean_square_by_hand():
    """A logit that stands for no class is so large that its square is infinite in single precision."""
    with jax.enable_x64(False):
        logits, stored = (
            jnp.array([[1.0, 2, NEVER], [0, -1, 3], [5, 5, NEVER]]),
            jnp.array([[0.0, 4, NEVER], [1, 0, 1], [0, 0, 0]]),
        )
        batch = mixed_batch(STREAM, [0, 1, 0], [1, 1, 0])
        np.testing.assert_allclose(squares(logits, stored, batch), (5 / 3 + 6 / 3) / 2, rtol=1e-6)
        assert squares(logits, stored, batch._replace(weight=jnp.zeros(3))) == 0


@pytest.mark.parametrize("options", [{"alpha": -1.0}, {"beta": -0.1}, {"memory": 0}, {"memory_batch": 0}])
def test_what_makes_no_sense_is_refused(options):
    for entry in (DerOptions, DerPlusPlusOptions) if "beta" not in options else (DerPlusPlusOptions,):
        with pytest.raises(Invalid, match="|".join(options)):
            entry(**options)


def test_options_make_the_methods():
    network, given = SMALL["routed"](), {"alpha": 0.3, "lr": 0.2, "router_lr": 0.4}
    memory = {"memory": 50, "memory_batch": 7}
    assert eqx.tree_equal(DerOptions(**given, **memory)(network), der(network, reservoir(50, 7), **given))
    made = DerPlusPlusOptions(**given, **memory, beta=0.9)(network)
    assert eqx.tree_equal(made, der_plus_plus(network, reservoir(50, 7), **given, beta=0.9))
    assert (made.memory.capacity, made.memory.batch) == (50, 14)
    assert eqx.tree_equal(DerOptions()(network), der(network, reservoir()))
    assert eqx.tree_equal(DerPlusPlusOptions()(network), der_plus_plus(network, reservoir()))
