"""A step of gradient descent: its loss, what can be changed about its gradient, and the part that it moves."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import STREAM, distance, filled, first_batch, identical, leaves, mixed_batch, moved, routed

from cotrain.methods.descent import Rates, begin, cross_entropy, descend, move, slope
from cotrain.networks.experts import dense
from cotrain.networks.path import part_of
from cotrain.networks.routers.by_input import by_input
from cotrain.networks.routers.fixed import fixed
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

SPEC, KEY = STREAM.spec, jax.random.key(0)
RATES = Rates(experts=jnp.array(0.3), heads=jnp.array(0.2), router=jnp.array(0.9))
NETWORKS = {
    "shared bottom": shared_bottom(SPEC, (4, 3)),
    "sum": routed(SPEC, dense(4, jnp.tanh), experts=[8, 5], k=2, noise=1.0),
    "concatenate": routed(
        SPEC,
        dense(4, jnp.tanh),
        layers=1,
        experts=8,
        k=2,
        aggregation="concatenate",
        sampling="noisy-top-k",
        gates="all",
        noise=1.0,
    ),
    "all experts": routed(SPEC, dense(4, jnp.tanh), layers=1, experts=3, k=3, noisy_gates=True, noise=1.0),
    "one head": routing_network(SPEC, dense(4, jnp.tanh), layers=1, experts=8, k=2, one_head=True),
    "by input": routing_network(SPEC, dense(4, jnp.tanh), layers=1, experts=5, k=2, router=by_input(balance=0.3)),
    "fixed": routing_network(SPEC, dense(4, jnp.tanh), layers=1, experts=3, k=2, router=fixed()),
}
BATCHES = {
    "one task": first_batch(STREAM, 1),
    "some": mixed_batch(STREAM, [2, 0, 2], [1, 1, 1]),  # each with its own experts
    "many": mixed_batch(STREAM, [0, 2, 0, 2, 2], [1, 1, 1, 1, 0]),  # all experts run on all
    "nothing": mixed_batch(STREAM, [0, 0, 0], [0, 0, 0]),
}
every_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=[*NETWORKS])


def normal(network, count, seed=0):
    """Noise for some routes, where a router takes any."""
    draws = np.random.default_rng(seed)
    shapes = [None if drawn is None else drawn.shape for drawn in network.draw(KEY, count)]
    return tuple(None if shape is None else jnp.asarray(draws.normal(size=shape), jnp.float32) for shape in shapes)


def practised(network, optimizer=optax.sgd):
    """A learner whose optimizer, if it remembers anything, has something to remember."""
    learner = filled(begin, network, optimizer, KEY)
    return learner._replace(moments=jax.tree.map(jnp.abs, learner.moments))


def noise_of(network, batch):
    return normal(network, batch.task.size if network.by_task else len(batch.y))


@eqx.filter_jit
def step(network, learner, batch, noise, rates=RATES, *, optimizer=optax.sgd, whole=False, **options):
    path = network.sample(learner.parameters, batch.task, batch.weight, noise, whole)
    return descend(network, optimizer, learner, batch, path, rates, **options)


def rates_of(network):
    """Each stack's rate; that of a router that does not learn is 0."""
    learns = network.router is not None and network.router.learns
    return [0.3] * len(network.layers) + [0.2] + [0.9 * learns] * len(network.layers)


# Its halves


@every_network
@pytest.mark.parametrize("name", ["one task", "some"])
def test_a_step_is_a_slope_and_a_move(network, name):
    before, batch = practised(network, optax.adam), BATCHES[name]
    noise = noise_of(network, batch)

    @eqx.filter_jit
    def halves(learner, batch, noise):
        path = network.sample(learner.parameters, batch.task, batch.weight, noise)
        there = slope(network, learner.parameters, batch, path, rates=RATES)
        after = move(network, optax.adam, learner, there.gradient, there.part, RATES)
        return after, there.value, cross_entropy(there.logits, batch)

    after, value, again = halves(before, batch, noise)
    wanted, loss = step(network, before, batch, noise, optimizer=optax.adam)
    assert identical((after, value), (wanted, loss))
    if network.router is None or network.by_task:  # no penalty is added to it
        assert value == again


def test_amounts_are_added_to_what_a_step_moves():
    network, batch = NETWORKS["sum"], BATCHES["one task"]
    before = practised(network)
    path = network.sample(before.parameters, batch.task, batch.weight, noise_of(network, batch))
    part = slope(network, before.parameters, batch, path).part
    ones = jax.tree.map(jnp.ones_like, part.parameters)
    counts = part.add(jax.tree.map(jnp.zeros_like, before.parameters), ones)
    for layer, route, count in zip(network.layers, path.routes, counts.experts, strict=True):
        wanted = np.isin(np.arange(layer.experts), route.members)
        for leaf in leaves(count):
            np.testing.assert_array_equal(leaf, np.broadcast_to(wanted.reshape(-1, *[1] * (leaf.ndim - 1)), leaf.shape))
    assert identical(part.take(counts), ones)
    assert np.asarray(counts.heads.bias).sum(axis=1).tolist() == [0, SPEC.classes, 0]


# Whole paths


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *[(name, batch) for name in NETWORKS for batch in ("one task", "some")],
        *[(name, batch) for name in ("sum", "by input") for batch in ("many", "nothing")],
        ("concatenate", "many"),
    ],
)
def test_a_whole_path_gives_the_same_step_as_a_narrow_one(name, batch):
    network, batch = NETWORKS[name], BATCHES[batch]
    before, noise = practised(network), noise_of(network, batch)
    (narrow, loss), (whole, same) = (step(network, before, batch, noise, whole=whole) for whole in (False, True))
    assert distance(narrow, whole) < 1e-6
    np.testing.assert_allclose(loss, same, rtol=1e-6)
    assert distance(narrow, before) == 0 if batch is BATCHES["nothing"] else distance(narrow, before) > 1e-3


@every_network
def test_the_slope_of_a_whole_path_is_that_of_all_parameters(network):
    before, batch = practised(network), BATCHES["many"]
    noise = noise_of(network, batch)
    whole = eqx.filter_jit(network.sample)(before.parameters, batch.task, batch.weight, noise, True)
    loss, gradient, *_ = eqx.filter_jit(slope)(network, before.parameters, batch, whole)
    assert [leaf.shape for leaf in leaves(gradient)] == [leaf.shape for leaf in leaves(before.parameters)]
    after, same = step(network, before, batch, noise)
    np.testing.assert_allclose(loss, same, rtol=1e-6)
    stacks = zip(before.parameters.stacks, gradient.stacks, rates_of(network), strict=True)
    by_hand = [jax.tree.map(lambda p, g, rate=rate: p - rate * g, *stack) for *stack, rate in stacks]
    assert distance(after.parameters.stacks, by_hand) < 1e-6


# A change of the gradient


@pytest.mark.parametrize("whole", [False, True], ids=["narrow", "whole"])
@pytest.mark.parametrize("optimizer", [optax.sgd, optax.adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("batch", ["one task", "some"])
def test_a_change_that_changes_nothing_is_none(batch, optimizer, whole):
    network, batch = NETWORKS["sum"], BATCHES[batch]
    before, noise = practised(network, optimizer), normal(network, batch.task.size)
    plain = step(network, before, batch, noise, optimizer=optimizer, whole=whole)
    same = step(network, before, batch, noise, optimizer=optimizer, whole=whole, change=lambda gradient, part: gradient)
    assert identical(same, plain)
    assert distance(plain[0].parameters, before.parameters) > 1e-3


@every_network
@pytest.mark.parametrize("whole", [False, True], ids=["narrow", "whole"])
def test_a_gradient_that_is_changed_to_zero_leaves_all_parameters_as_they_are(network, whole):
    batch, before = BATCHES["one task"], practised(network)

    def nothing(gradient, part):
        return jax.tree.map(jnp.zeros_like, gradient)

    after, loss = step(network, before, batch, noise_of(network, batch), whole=whole, change=nothing)
    assert distance(after, before) == 0
    assert loss > 0.1


@eqx.filter_jit
def seen(network, learner, batch, noise, rates):
    """The gradient and the part that a change of it sees, and the same part taken of all parameters."""
    path, found = network.sample(learner.parameters, batch.task, batch.weight, noise), []
    descend(network, optax.sgd, learner, batch, path, rates, change=lambda *given: found.append(given) or given[0])
    ((gradient, part),) = found
    return gradient, part.parameters, part.take(learner.parameters), part_of(learner.parameters, path)


def test_a_part_with_an_entry_several_times_is_not_taken():
    """A penalty would count it as often."""
    network, batch = NETWORKS["sum"], BATCHES["some"]
    with pytest.raises(ValueError, match="take a whole path"):
        seen(network, practised(network), batch, noise_of(network, batch), RATES)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_change_sees_the_part_that_moves(name):
    network, batch = NETWORKS[name], BATCHES["one task"]
    before, noise = practised(network), noise_of(network, batch)
    gradient, part, taken, on_path = seen(network, before, batch, noise, RATES._replace(heads=None))
    still = [rate == 0 or i == len(network.layers) for i, rate in enumerate(rates_of(network))]
    expected = [None if stays else stack for stays, stack in zip(still, on_path.stacks, strict=True)]
    assert identical(part.stacks, expected)
    assert identical(taken, part)
    assert [leaf.shape for leaf in leaves(gradient)] == [leaf.shape for leaf in leaves(part)]


# A-GEM (Chaudhry et al. 2019), as a method would have it


def product(one, other):
    """Of two gradients, g · g_ref."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(jnp.vdot(a, b) for a, b in pairs)


@eqx.filter_jit
def agem(network, learner, batch, old, noise):
    """A step on a batch, with the gradient projected so that the loss on old examples does not rise; and g̃ · g_ref."""
    products = []
    path = network.sample(learner.parameters, old.task, old.weight, noise[1], whole=True)
    old_gradient = slope(network, learner.parameters, old, path).gradient  # g_ref

    def project(gradient, part):
        reference = part.take(old_gradient)
        along, square = product(gradient, reference), product(reference, reference)
        share = jnp.where(along < 0, along / jnp.maximum(square, 1e-30), 0)
        projected = jax.tree.map(lambda g, r: jnp.where(along < 0, g - share * r, g), gradient, reference)
        products.extend([along, product(projected, reference), square])
        return projected

    path = network.sample(learner.parameters, batch.task, batch.weight, noise[0], whole=True)
    return descend(network, optax.sgd, learner, batch, path, RATES, change=project)[0], products


@pytest.mark.parametrize("name", ["shared bottom", "sum"])
def test_agem_does_not_raise_the_loss_on_old_examples(name):
    network, against = NETWORKS[name], []
    for seed in range(6):
        learner, batch = filled(begin, network, optax.sgd, KEY, seed=seed), first_batch(STREAM, seed % 3)
        old = mixed_batch(STREAM, [(seed + 1) % 3] * 4, [1] * 4)
        noise = normal(network, 1, seed), normal(network, 4, seed + 1)
        after, (along, left, square) = agem(network, learner, batch, old, noise)
        tuned, _ = step(network, learner, batch, noise[0], whole=True)
        against.append(bool(along < 0))
        if along < 0:
            assert abs(left) < 1e-5 * square
            assert distance(after, tuned) > 1e-5
        else:
            assert left == along
            assert identical(after, tuned)
    assert 0 < sum(against), "some gradient is against the old one"


@pytest.mark.parametrize("name", ["shared bottom", "sum"])
@pytest.mark.parametrize("task", range(SPEC.tasks))
def test_agem_with_an_empty_memory_is_finetuning(name, task):
    network, batch = NETWORKS[name], first_batch(STREAM, task)
    learner, noise = practised(network), (normal(network, 1), normal(network, 3))
    after, (*_, square) = agem(network, learner, batch, BATCHES["nothing"], noise)
    assert square == 0
    assert identical(after, step(network, learner, batch, noise[0], whole=True)[0])
    assert distance(after, step(network, learner, batch, noise[0])[0]) < 1e-6


# A loss of one's own


ANCHOR = 3.0  # weight of the pull


def pull(parameters, anchor):
    """Half the squared distance from an anchor, for what is not None."""
    pairs = zip(jax.tree.leaves(parameters), jax.tree.leaves(anchor), strict=True)
    return ANCHOR / 2 * sum(((a - b) ** 2).sum() for a, b in pairs)


@pytest.mark.parametrize("whole", [False, True], ids=["narrow", "whole"])
@pytest.mark.parametrize("name", ["shared bottom", "sum", "fixed"])
def test_a_loss_may_pull_the_part_that_moves_towards_an_anchor(name, whole):
    network, batch = NETWORKS[name], BATCHES["one task"]
    before, noise, anchor = practised(network), normal(network, 1), filled(network.init, KEY, seed=5)
    parameters = before.parameters

    def anchored(logits, batch, part):
        return cross_entropy(logits, batch) + pull(part.parameters, part.take(anchor))

    after, loss = step(network, before, batch, noise, whole=whole, loss=anchored)

    def by_hand(parameters):
        """The mean cross-entropy of the whole network."""
        path = network.sample(before.parameters, batch.task, batch.weight, noise, True)
        logits = network.run(parameters, path, batch.x, batch.weight).logits
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch.y[:, None], axis=1).mean()

    expected, gradient = jax.jit(jax.value_and_grad(by_hand))(parameters)
    entries = eqx.filter_jit(network.sample)(parameters, batch.task, batch.weight, noise, whole).entries
    stacks = zip(parameters.stacks, after.parameters.stacks, gradient.stacks, anchor.stacks, strict=True)
    for arrays, known, rate in zip(stacks, entries, rates_of(network), strict=True):
        for old, new, g, to in zip(*map(leaves, arrays), strict=True):
            here = np.isin(np.arange(len(old)), np.arange(len(old)) if known.at is None else known.at)
            distance = (rate > 0) * here.reshape(-1, *[1] * (old.ndim - 1)) * (old - to)
            np.testing.assert_allclose(new, old - rate * (g + ANCHOR * distance), rtol=0, atol=1e-5)
            expected = expected + ANCHOR / 2 * (distance**2).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    heads = moved(parameters.heads, after.parameters.heads)
    np.testing.assert_array_equal(heads, [True] * 3 if whole else [False, True, False])


def test_a_loss_without_a_gradient_moves_nothing():
    network, batch = NETWORKS["sum"], BATCHES["some"]
    before = practised(network)
    after, loss = step(network, before, batch, normal(network, 3), loss=lambda logits, batch, part: jnp.array(2.5))
    assert distance(after, before) == 0
    assert loss == 2.5
