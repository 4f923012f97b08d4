"""With nothing stored OGD is fine-tuning; what it stores, and where."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import STREAM, distance, filled, first_batch, identical, routed

from cotrain.methods.descent import begin
from cotrain.methods.finetune import FinetuneState, finetune
from cotrain.methods.ogd import ogd
from cotrain.networks.experts import dense
from cotrain.networks.shared_bottom import shared_bottom

SPEC, KEY = STREAM.spec, jax.random.key(0)
NETWORKS = {
    "shared bottom": shared_bottom(SPEC, (7, 5)),
    "routing network": routed(SPEC, dense(4, jnp.tanh), experts=6, k=2, noise=1.0),
}
RATES = {"lr": 0.1, "router_lr": 0.3}
every_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=[*NETWORKS])


@eqx.filter_jit
def update(method, state, batch, noise):
    return method.update(state, batch, noise)


@eqx.filter_jit
def end(method, state, batch):
    return method.consolidate(state, batch, KEY)


def begun(method):
    return method.init(KEY)._replace(learner=filled(begin, method.network, method.optimizer, KEY))


def trained(method, state, task, steps=3):
    for i in range(steps):
        batch = first_batch(STREAM, task)
        state, _ = update(method, state, batch, method.draw(jax.random.key(i), batch))
    return state


def stored(state):
    """Which places hold a vector."""
    return np.stack([np.asarray(a != 0).any(axis=tuple(range(2, a.ndim))) for a in jax.tree.leaves(state.basis)]).any(0)


@every_network
def test_with_nothing_stored_it_is_finetuning_to_the_bit(network):
    method, tuning = ogd(network, basis=3, **RATES), finetune(network, **RATES)
    state, tuned = begun(method), FinetuneState(begun(method).learner)
    for i, task in enumerate((0, 1, 1, 2)):
        batch = first_batch(STREAM, task)
        noise = method.draw(jax.random.key(i), batch)
        state, info = update(method, state, batch, noise)
        tuned, wanted = update(tuning, tuned, batch, noise)
        state = end(method, state, first_batch(STREAM, task, size=3)._replace(weight=jnp.zeros(3)))
        assert info.loss == wanted.loss
        assert info.scalars["kept"] == 1
    assert identical(state.learner, tuned.learner)
    assert distance(state.learner, begun(method).learner) > 1e-2
    assert not stored(state).any()


@every_network
def test_what_is_stored_changes_the_next_steps(network):
    method, tuning = ogd(network, basis=3, **RATES), finetune(network, **RATES)
    state = end(method, trained(method, begun(method), 0), first_batch(STREAM, 0, size=3))
    np.testing.assert_array_equal(stored(state), [[True] * 3, [False] * 3, [False] * 3])
    after, tuned = trained(method, state, 1), trained(tuning, FinetuneState(state.learner), 1)
    assert distance(after.learner, tuned.learner) > 1e-4


@every_network
def test_a_gradient_that_is_stored_is_not_stored_again(network):
    method = ogd(network, basis=4, **RATES)
    same = jax.tree.map(lambda a: a[jnp.array([0, 0, 1, 0])] if a.ndim else a, first_batch(STREAM, 1))
    state = end(method, trained(method, begun(method), 1), same)
    np.testing.assert_array_equal(stored(state), [[False] * 4, [True, False, True, False], [False] * 4])


def test_padding_is_not_stored():
    method = ogd(NETWORKS["shared bottom"], basis=3, **RATES)
    some = first_batch(STREAM, 2, size=3)._replace(weight=jnp.array([1.0, 0, 1]))
    np.testing.assert_array_equal(stored(end(method, begun(method), some))[2], [True, False, True])


@every_network
def test_a_task_that_is_learned_again_replaces_what_was_stored_of_it(network):
    method = ogd(network, basis=3, **RATES)
    state = end(method, begun(method), first_batch(STREAM, 0, size=3))
    fresh = end(
        method, begun(method)._replace(learner=trained(method, state, 0).learner), first_batch(STREAM, 0, size=3)
    )
    again = end(method, trained(method, state, 0), first_batch(STREAM, 0, size=3))
    assert distance(again.basis, fresh.basis) < 1e-6
    assert distance(again.basis, state.basis) > 1e-3
    assert again.end == 1


def test_hyperparameters_are_arguments_of_the_compiled_program():
    network = NETWORKS["routing network"]
    method = ogd(network, basis=2, **RATES)
    for name in RATES:
        other = ogd(network, basis=2, **RATES | {name: 0.2})
        assert jax.tree.structure(other) == jax.tree.structure(method)
        assert not identical(trained(other, begun(other), 0).learner, trained(method, begun(method), 0).learner)
