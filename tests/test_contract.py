"""What holds for every method on every network."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import first_batch, identical, run, toy

from cotrain.engine import learn
from cotrain.errors import Invalid
from cotrain.memory import reservoir
from cotrain.methods.cotraining import cotraining
from cotrain.methods.finetune import finetune, private
from cotrain.methods.replay import replay
from cotrain.networks.experts import dense
from cotrain.networks.routing import routing_network, shared_bottom

TASKS, CLASSES = 3, 3
STREAM = toy(tasks=TASKS, classes=CLASSES)

NETWORKS = {
    "shared_bottom": lambda spec: shared_bottom(spec, (16, 16)),
    "routing_network": lambda spec: routing_network(spec, dense(12), experts=6, k=2),
}
METHODS = {
    "finetune": lambda network, lr: finetune(network, lr=lr),
    "replay": lambda network, lr: replay(network, reservoir(20, 5), lr=lr),
    "cotraining": lambda network, lr: cotraining(network, reservoir(20, 5), lr=lr),
    "private": lambda network, lr: private(network, lr=lr),
    "joint": lambda network, lr: finetune(network, lr=lr),
}
CASES = [
    (method, network) for method in METHODS for network in NETWORKS if (method, network) != ("private", "shared_bottom")
]
OPTIONS = {"batch": 6, "epochs": 5, "chunk": 16}  # 40 examples: the last minibatch of an epoch has 4

every_case = pytest.mark.parametrize("case", CASES, ids="-".join)


class Counted(eqx.Module):
    """A method that counts how often its update is traced."""

    method: eqx.Module
    traces: list = eqx.field(static=True)

    @property
    def network(self):
        return self.method.network

    def init(self, key):
        return self.method.init(key)

    def draw(self, key, batch):
        return self.method.draw(key, batch)

    def update(self, state, batch, noise):
        self.traces.append(1)
        return self.method.update(state, batch, noise)

    def consolidate(self, state, task):
        return self.method.consolidate(state, task)


class Traces(list):
    """A list that can be told from others, as static fields must."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def make(case, lr=0.1):
    method, network = case
    return METHODS[method](NETWORKS[network](STREAM.spec), lr)


def streamed(case, stream=STREAM):
    return stream.shuffled() if case[0] == "joint" else stream


@functools.cache
def learned(case):
    return run(learn(make(case), [streamed(case)], [0], **OPTIONS))


@every_case
def test_accuracies_are_shares_and_are_there_for_the_tasks_learned_so_far(case):
    accuracy = learned(case).accuracy[0]
    assert accuracy.shape == ((1, TASKS) if case[0] == "joint" else (TASKS, TASKS))
    there = np.ones((1, TASKS), bool) if case[0] == "joint" else np.tri(TASKS, dtype=bool)
    np.testing.assert_array_equal(~np.isnan(accuracy), there)
    assert ((0 <= accuracy[there]) & (accuracy[there] <= 1)).all()
    shares = accuracy[there] * len(STREAM[0].test)
    np.testing.assert_allclose(shares, np.round(shares), atol=1e-9)
    assert np.isnan(learned(case).initial).all()


@every_case
def test_it_learns_an_easy_task(case):
    accuracy = learned(case).accuracy[0]
    right_after = accuracy[0] if case[0] == "joint" else np.diagonal(accuracy)
    assert right_after.min() > 0.8, f"chance is {1 / CLASSES:.2f}"


@every_case
def test_without_a_learning_rate_it_learns_nothing(case):
    method = make(case, lr=0.0)
    end = run(learn(method, [streamed(case)], [0], **OPTIONS))
    key = jax.random.key(0)
    for now, before in zip(
        jax.tree.leaves(end.state.learner.parameters), jax.tree.leaves(method.network.init(key)), strict=True
    ):
        np.testing.assert_allclose(now[0], before, rtol=1e-6, atol=1e-7)


@every_case
def test_state_keeps_its_structure_and_types(case):
    method = make(case)
    batch = first_batch(STREAM, 1)
    if case[0] == "joint":
        batch = batch._replace(task=batch.tasks)
    state = jax.eval_shape(method.init, jax.random.key(0))
    noise = jax.eval_shape(method.draw, jax.random.key(1), batch)
    after, info = jax.eval_shape(method.update, state, batch, noise)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    described = [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(state)]
    assert described == [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(after)]
    assert info.loss.shape == ()
    consolidated = jax.eval_shape(method.consolidate, state, jnp.array(1))
    assert jax.tree.structure(consolidated) == jax.tree.structure(state)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))


@every_case
def test_it_is_traced_once_for_any_data_rate_and_seed(case):
    traces = Traces()
    ends, counts = [], []
    for lr, seed in ((0.1, 0), (0.02, 1), (0.05, 2)):
        stream = streamed(case, toy(tasks=TASKS, classes=CLASSES, seed=seed))
        ends.append(run(learn(Counted(make(case, lr), traces), [stream], [seed], **OPTIONS)))
        counts.append(len(traces))
    assert counts[0] > 0
    assert counts == [counts[0]] * 3
    parameters = [end.state.learner.parameters for end in ends]
    assert not identical(parameters[0], parameters[1])
    assert not identical(parameters[1], parameters[2])


def test_a_private_expert_per_task_needs_as_many_experts():
    with pytest.raises(Invalid, match="experts: 1 is not valid.*3 or more"):
        private(shared_bottom(STREAM.spec))
    with pytest.raises(Invalid, match="experts: 2 is not valid.*3 or more"):
        private(routing_network(STREAM.spec, experts=2, k=1))
