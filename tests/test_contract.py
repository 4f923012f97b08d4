"""What holds for every method on every network."""

import functools

import jax
import numpy as np
import pytest
from conftest import (
    CASES,
    MORE_CASES,
    OPTIONS,
    STREAM,
    TRACES,
    distance,
    first_batch,
    identical,
    make,
    run,
    streamed,
    toy,
)

from cotrain.engine import learn
from cotrain.errors import Invalid
from cotrain.methods.descent import begin
from cotrain.methods.private import private
from cotrain.networks.experts import dense
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

TASKS, CLASSES = STREAM.spec.tasks, STREAM.spec.classes
every_case = pytest.mark.parametrize("case", CASES + MORE_CASES, ids="-".join)


@functools.cache
def learned(case):
    return run(learn(make(case), [streamed(case)], [0], **OPTIONS))


@every_case
def test_accuracies_are_shares_and_are_there_for_the_tasks_learned_so_far(case):
    accuracy = learned(case).accuracy[0]
    there = np.ones((1, TASKS), bool) if case[0] == "joint" else np.tri(TASKS, dtype=bool)
    np.testing.assert_array_equal(~np.isnan(accuracy), there)
    right = accuracy[there] * len(STREAM[0].test)
    np.testing.assert_allclose(right, np.round(right), atol=1e-9)
    assert ((0 <= accuracy[there]) & (accuracy[there] <= 1)).all()
    assert np.isnan(learned(case).initial).all()


@every_case
def test_all_tasks_are_evaluated_on_demand(case):
    end = run(learn(make(case), [streamed(case)], [0], evaluate_all=True, **OPTIONS))
    assert ((0 <= end.accuracy) & (end.accuracy <= 1)).all()
    assert ((0 <= end.initial) & (end.initial <= 1)).all()
    measured = ~np.isnan(learned(case).accuracy)
    np.testing.assert_array_equal(end.accuracy[measured], learned(case).accuracy[measured])
    assert identical(end.state, learned(case).state)


@every_case
def test_it_learns_an_easy_task(case):
    accuracy = learned(case).accuracy[0]
    right_after = accuracy[0] if case[0] == "joint" else np.diagonal(accuracy)
    assert right_after.min() > 0.8, f"chance is {1 / CLASSES:.2f}"


@every_case
def test_without_a_learning_rate_it_learns_nothing(case):
    states = [s.kept().state.learner for s in learn(make(case, lr=0.0), [streamed(case)], [0], **OPTIONS)]
    first = next(learn(make(case, lr=0.2), [streamed(case)], [0], **OPTIONS)).state.learner
    assert [distance(state, first) for state in states] == [0] * len(states)


@every_case
def test_state_keeps_its_structure_and_types(case):
    method, batch = make(case), first_batch(STREAM, 1)
    batch = batch._replace(task=batch.tasks) if case[0] == "joint" else batch
    state = jax.eval_shape(method.init, jax.random.key(0))
    noise = jax.eval_shape(method.draw, jax.random.key(1), batch)
    after, info = jax.eval_shape(method.update, state, batch, noise)
    assert described(after) == described(state)
    some = first_batch(STREAM, 1, size=method.examples)
    some = some._replace(task=some.tasks) if case[0] == "joint" else some
    assert described(jax.eval_shape(method.consolidate, state, some, jax.random.key(2))) == described(state)
    fresh = jax.eval_shape(lambda key: begin(method.network, method.optimizer, key), jax.random.key(0))
    assert described(state.learner) == described(fresh)
    assert info.loss.shape == ()
    assert {value.shape for value in info.scalars.values()} <= {()}
    if info.replayed is not None:
        x, y, task, weight = info.replayed
        assert x.shape == (*y.shape, *STREAM.spec.shape)
        assert y.shape == task.shape == weight.shape
    assert all(rate is None or rate.shape == () for rate in method.rates)


def described(tree):
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


@every_case
def test_it_is_traced_once_for_any_data_rate_and_seed(case):
    ends = [learned(case)]
    assert TRACES[case]
    before = len(TRACES[case])
    for lr, seed in ((0.02, 1), (0.05, 2)):
        stream = streamed(case, toy(seed=seed))
        ends.append(run(learn(make(case, lr), [stream], [seed], **OPTIONS)))
    assert len(TRACES[case]) == before
    parameters = [end.state.learner.parameters for end in ends]
    assert not identical(parameters[0], parameters[1])
    assert not identical(parameters[1], parameters[2])


def test_a_private_expert_per_task_takes_as_many_experts():
    with pytest.raises(Invalid, match=r"network: 'shared-bottom' is not valid.*routing-network"):
        private(shared_bottom(STREAM.spec, (12,)))
    with pytest.raises(Invalid, match=r"experts: 2 is not valid.*3 or more"):
        private(routing_network(STREAM.spec, dense(12), experts=2, k=1))


def test_for_one_task_one_expert_is_enough():
    network = shared_bottom(toy(tasks=1).spec, (12,))
    assert private(network).network == network
