"""Limits in which MER is fine-tuning, or nothing; what a minibatch of it is, and what it leaves alone."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import STREAM, distance, filled, first_batch, identical, moved, routed

from cotrain.memory import Reservoir
from cotrain.methods.descent import begin
from cotrain.methods.finetune import FinetuneState, finetune
from cotrain.methods.mer import MERState, mer
from cotrain.networks.experts import dense
from cotrain.networks.shared_bottom import shared_bottom

SPEC, KEY = STREAM.spec, jax.random.key(0)
NETWORKS = {
    "shared bottom": shared_bottom(SPEC, (7, 5)),
    "routing network": routed(SPEC, dense(4, jnp.tanh), experts=6, k=2, noise=1.0),
}
MOMENTUM = functools.partial(optax.sgd, momentum=0.9)
MEMORY = Reservoir(20, 3)
every_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=[*NETWORKS])


def made(network, *, memory=MEMORY, **options):
    return mer(network, memory, **{"lr": 0.1, "router_lr": 0.3, "beta": 0.5, "gamma": 0.5} | options)


def begun(method):
    return MERState(filled(begin, method.network, method.optimizer, KEY), method.memory.init(SPEC))


@eqx.filter_jit
def update(method, state, batch, noise):
    return method.update(state, batch, noise)


def after(method, state, batch, seed=1):
    return update(method, state, batch, method.draw(jax.random.key(seed), batch))


def practised(method, tasks=(0, 1)):
    """A state in which there is something to replay."""
    state = begun(method)
    for task in tasks:
        state, _ = after(method, state, first_batch(STREAM, task))
    return state


@every_network
@pytest.mark.parametrize("optimizer", [optax.sgd, MOMENTUM], ids=["sgd", "momentum"])
def test_all_the_way_and_without_replay_it_is_finetuning_with_batches_of_one(network, optimizer):
    method = made(network, memory=Reservoir(20, 0), beta=1, gamma=1, optimizer=optimizer)
    tuning = finetune(network, lr=0.1, router_lr=0.3, optimizer=optimizer)
    state = begun(method)
    tuned = FinetuneState(state.learner)
    for i, task in enumerate((0, 1, 1, 2)):
        batch = first_batch(STREAM, task, size=1)
        noise = method.draw(jax.random.key(i), batch)
        state, info = update(method, state, batch, noise)
        tuned, wanted = update(tuning, tuned, batch, jax.tree.map(lambda a: a[0], noise.routes))
        assert float(info.loss) == pytest.approx(float(wanted.loss), abs=1e-6)
    assert distance(state.learner, tuned.learner) < 1e-6  # for a + (b − a) is b but to rounding
    assert distance(state.learner, begun(method).learner) > 1e-2


@every_network
@pytest.mark.parametrize("share", ["beta", "gamma"])
def test_no_part_of_the_way_is_nothing(network, share):
    method = made(network, **{share: 0.0})
    assert identical(practised(method).learner.parameters, begun(method).learner.parameters)
    assert not identical(practised(made(network)).learner.parameters, begun(method).learner.parameters)


def test_moments_go_all_the_way():
    method = made(NETWORKS["shared bottom"], beta=0.0, optimizer=MOMENTUM)
    state = practised(method, tasks=[0])
    assert distance(state.learner.moments, begun(method).learner.moments) > 1e-2


@every_network
def test_a_minibatch_is_its_examples_one_by_one(network):
    method = made(network, batches=2)
    batch, state = first_batch(STREAM, 2, size=4), practised(method)
    noise = method.draw(KEY, batch)
    together, info = update(method, state, batch, noise)
    losses, replayed = [], []
    for i in range(4):
        one = batch._replace(x=batch.x[i : i + 1], y=batch.y[i : i + 1], weight=batch.weight[i : i + 1])
        state, found = update(method, state, one, jax.tree.map(lambda a, i=i: a[i : i + 1], noise))
        losses.append(float(found.loss))
        replayed.append(found.replayed)
    assert distance(together, state) < 1e-6
    assert float(info.loss) == pytest.approx(np.mean(losses), abs=1e-6)
    assert identical(info.replayed, jax.tree.map(lambda *parts: jnp.concatenate(parts), *replayed))


@every_network
@pytest.mark.parametrize("optimizer", [optax.sgd, optax.adam], ids=["sgd", "adam"])
def test_padding_is_skipped(network, optimizer):
    method = made(network, optimizer=optimizer)
    batch, state = first_batch(STREAM, 2), practised(method)
    nothing, info = after(method, state, batch._replace(weight=jnp.zeros(6)))
    assert identical(nothing.learner, state.learner)
    assert identical(nothing.memory._replace(next=None), state.memory._replace(next=None))
    assert not info.replayed.weight.any()
    weight = jnp.array([0.0, 1, 1, 0, 1, 0])
    some, info = after(method, state, batch._replace(weight=weight))
    other = jnp.where(weight[:, None, None] > 0, batch.x, jnp.nan)
    assert identical(after(method, state, batch._replace(x=other, weight=weight))[0], some)
    np.testing.assert_array_equal(info.replayed.weight.reshape(6, 3), np.broadcast_to(weight[:, None], (6, 3)))


def test_no_more_is_replayed_than_the_memory_holds():
    method = made(NETWORKS["shared bottom"], batches=2)
    _, info = after(method, begun(method), first_batch(STREAM, 0))
    counts = info.replayed.weight.reshape(6, 2, 3).sum(axis=2)
    np.testing.assert_array_equal(counts, [[0, 0], [1, 1], [2, 2], [3, 3], [3, 3], [3, 3]])


def test_only_what_takes_part_moves():
    method = made(NETWORKS["routing network"], optimizer=MOMENTUM)
    state = practised(method, tasks=[])
    new, _ = after(method, state, first_batch(STREAM, 1, size=2))
    before, now = state.learner, new.learner
    for old, changed in ((before.parameters, now.parameters), (before.moments, now.moments)):
        np.testing.assert_array_equal(moved(old.heads, changed.heads), [False, True, False])
        for layer in range(2):
            assert 2 <= moved(old.experts[layer], changed.experts[layer]).sum() < 6
            np.testing.assert_array_equal(moved(old.router[layer], changed.router[layer]), [False, True, False])


def test_hyperparameters_are_arguments_of_the_compiled_program():
    method = made(NETWORKS["routing network"])
    for name in ("lr", "router_lr", "beta", "gamma"):
        other = made(NETWORKS["routing network"], **{name: 0.2})
        assert jax.tree.structure(other) == jax.tree.structure(method)
        assert not identical(practised(other).learner, practised(method).learner)
