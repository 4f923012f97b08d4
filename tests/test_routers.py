"""Routers besides the paper's: the fixed one, and the one that reads its input; and one head for all tasks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from conftest import OPTIONS, STREAM, distance, filled, first_batch, identical, mixed_batch, moved, run

from cotrain.data.batch import Batch
from cotrain.data.stream import Spec
from cotrain.engine import learn
from cotrain.errors import Invalid
from cotrain.memory import reservoir
from cotrain.methods.cotraining import CotrainingState, cotraining
from cotrain.methods.descent import Rates, begin, descend
from cotrain.methods.finetune import FinetuneState, finetune
from cotrain.methods.replay import replay
from cotrain.networks.experts import dense
from cotrain.networks.path import part_of
from cotrain.networks.routers.by_input import LEAST, Maps, by_input
from cotrain.networks.routers.fixed import fixed
from cotrain.networks.routing_network import parameter_count, routing_network
from cotrain.networks.shared_bottom import shared_bottom

SPEC, MNIST = STREAM.spec, Spec(shape=(28, 28), classes=10, tasks=20)
EXPERTS, K, INPUTS = 5, 2, 6
KEY = jax.random.key(0)


def small(router, **options):
    options = {"layers": 1, "experts": EXPERTS, "k": K} | options
    return routing_network(SPEC, dense(4, jnp.tanh), router=router, **options)


def practised(network, optimizer=optax.sgd):
    """A learner whose optimizer, if it remembers anything, has something to remember."""
    learner = filled(begin, network, optimizer, KEY)
    return learner._replace(moments=jax.tree.map(jnp.abs, learner.moments))


@eqx.filter_jit
def step(network, optimizer, learner, batch, noise):
    path = network.sample(learner.parameters, batch.task, batch.weight, noise)
    return descend(network, optimizer, learner, batch, path, Rates(*[jnp.array(0.1)] * 3))[0]


# The fixed router


def matrices(network):
    """The gates of each layer of a new network."""
    return [np.asarray(gates) for _, gates in network.matrices(eqx.filter_jit(network.init)(KEY))]


def test_a_fixed_router_gives_each_task_an_expert_of_its_own():
    first, second = matrices(small(fixed(), layers=2, experts=[3, 5], k=1))
    np.testing.assert_array_equal(first, np.eye(3))
    np.testing.assert_array_equal(second, np.eye(3, 5))


def test_a_fixed_router_goes_around_the_end():
    (pairs,) = matrices(small(fixed(), experts=3, k=2))
    np.testing.assert_array_equal(pairs, [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]])
    (shared,) = matrices(small(fixed(), experts=2, k=1))
    np.testing.assert_array_equal(shared, [[1, 0], [0, 1], [1, 0]])


def test_a_fixed_router_learns_nothing_and_its_experts_do():
    network = small(fixed(), experts=3)
    assert network.draw(KEY, 3) == (None,)
    learner = eqx.filter_jit(begin)(network, optax.adamw, KEY)
    for batch in (first_batch(STREAM, 1), mixed_batch(STREAM, [2, 0, 2], [1, 0, 1])):
        after = step(network, optax.adamw, learner, batch, (None,))
        assert identical(after.parameters.router, learner.parameters.router)
        expected = [False, True, True] if batch.task.ndim == 0 else [True, False, True]
        np.testing.assert_array_equal(moved(learner.parameters.experts, after.parameters.experts), expected)


# The router that reads its input


def maps(noisy=True, scale=1.0):
    """A layer's maps, far from where they start."""
    draws = np.random.default_rng(1)
    weight, noise = (jnp.asarray(scale * draws.normal(size=(1, EXPERTS, INPUTS)), jnp.float32) for _ in range(2))
    return Maps(weight, noise if noisy else None)


def by_hand(maps, x, draws=None):
    """Clean logits, noisy ones, the noise's deviation, and gates, in double precision."""
    weight, x = np.asarray(maps.weight[0], float), np.asarray(x, float).reshape(len(x), -1)
    clean = x @ weight.T
    deviation = None if draws is None else np.logaddexp(0, x @ np.asarray(maps.noise[0], float).T) + LEAST
    noisy = clean if draws is None else clean + np.asarray(draws) * deviation
    gates = np.zeros_like(noisy)
    for row, logits in zip(gates, noisy, strict=True):
        best = np.argsort(-logits)[:K]
        row[best] = np.exp(logits[best]) / np.exp(logits[best]).sum()
    return clean, noisy, deviation, gates


def normal(count, seed=2):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, EXPERTS)), jnp.float32)


@pytest.mark.parametrize("noisy", [False, True])
def test_gates_are_a_softmax_over_the_largest_outputs_of_each_example(noisy):
    x = first_batch(STREAM, 0).x.reshape(6, -1)
    draws = normal(6) if noisy else None
    found = by_input(noisy=noisy).read(maps(noisy), draws, x, K, jnp.ones(6))
    gates = by_hand(maps(noisy), x, draws)[-1]
    np.testing.assert_allclose(found.gates, gates, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found.chosen, gates > 0)
    assert len({tuple(row) for row in (gates > 0)}) > 1
    assert found.penalty is None


@pytest.mark.parametrize(("aggregation", "one_head"), [("sum", False), ("concatenate", True)])
def test_the_outputs_of_an_examples_experts_are_put_together_by_hand(aggregation, one_head):
    network = small(by_input(), aggregation=aggregation, one_head=one_head)
    parameters = eqx.tree_at(lambda p: p.router[0], filled(network.init, KEY), maps())
    expert, head = parameters.experts[0], parameters.heads
    batch, noise = mixed_batch(STREAM, [2, 0, 1, 0], [1] * 4), (normal(4),)
    path = network.sample(parameters, batch.task, batch.weight, noise)
    ran = network.run(part_of(parameters, path), path, batch.x, batch.weight)
    gates = by_hand(maps(), batch.x, noise[0])[-1]
    np.testing.assert_allclose(ran.gates[0], gates, rtol=0, atol=1e-5)
    for i, task in enumerate(batch.task):
        x, used = np.asarray(batch.x[i]).ravel(), np.flatnonzero(gates[i])
        outputs = [gates[i, e] * np.tanh(expert.weight[e] @ x + expert.bias[e]) for e in used]
        hidden = sum(outputs) if aggregation == "sum" else np.concatenate(outputs)
        row = 0 if one_head else task
        np.testing.assert_allclose(ran.logits[i], head.weight[row] @ hidden + head.bias[row], rtol=0, atol=1e-5)


def test_predictions_take_the_clean_outputs():
    network, x = small(by_input()), first_batch(STREAM, 0).x
    parameters = eqx.tree_at(lambda p: p.router[0], filled(network.init, KEY), maps())
    (gates,) = network.taken(parameters, jnp.array(1), x)
    np.testing.assert_allclose(gates, by_hand(maps(), x)[-1], rtol=0, atol=1e-5)


def squared_variation(counts):
    return np.var(counts) / np.mean(counts) ** 2


def test_the_penalty_is_of_uneven_importance_and_load_by_hand():
    x, draws, weight = first_batch(STREAM, 0).x, normal(6), np.array([1.0, 1, 0, 1, 1, 0])
    clean, noisy, deviation, gates = by_hand(maps(), x, draws)
    load = np.zeros(EXPERTS)
    for i in np.flatnonzero(weight):
        for e in range(EXPERTS):
            others = np.sort(np.delete(noisy[i], e))[::-1]
            load[e] += scipy.stats.norm.cdf((clean[i, e] - others[K - 1]) / deviation[i, e])  # the k-th largest
    importance = weight @ gates
    router, x = by_input(balance=0.3), x.reshape(6, -1)
    found = router.read(maps(), draws, x, K, jnp.asarray(weight, jnp.float32)).penalty
    expected = 0.3 * (squared_variation(importance) + squared_variation(load))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    clean_gates = by_hand(maps(), x)[-1]
    found = router.read(maps(), None, x, K, jnp.asarray(weight, jnp.float32)).penalty
    np.testing.assert_allclose(found, 0.3 * squared_variation(weight @ clean_gates), rtol=1e-4)


def test_where_all_experts_are_taken_the_load_is_even():
    x, draws = first_batch(STREAM, 0).x.reshape(6, -1), normal(6)
    found = by_input(balance=0.3).read(maps(), draws, x, EXPERTS, jnp.ones(6))
    importance = np.asarray(found.gates, float).sum(axis=0)
    np.testing.assert_allclose(found.penalty, 0.3 * squared_variation(importance), rtol=1e-4)


def test_the_penalty_is_part_of_the_loss():
    losses = []
    for balance in (0.0, 0.3):
        network, batch, noise = small(by_input(balance=balance)), first_batch(STREAM, 0), (normal(6),)
        learner = practised(network)
        path = network.sample(learner.parameters, batch.task, batch.weight, noise)
        losses.append(descend(network, optax.sgd, learner, batch, path, Rates(*[jnp.array(0.1)] * 3))[1])
        penalty = network.run(part_of(learner.parameters, path), path, batch.x, batch.weight).penalty
    np.testing.assert_allclose(losses[1] - losses[0], penalty, rtol=1e-4)
    assert penalty > 1e-3


@pytest.mark.parametrize("joint", [False, True])
def test_an_expert_that_no_real_example_takes_keeps_everything_to_the_bit(joint):
    network = small(by_input(balance=0.3), one_head=joint)
    before = practised(network, optax.adam)
    before = eqx.tree_at(lambda learner: learner.parameters.router[0], before, maps())
    batch, noise = first_batch(STREAM, 1), (normal(6),)
    gates = by_hand(maps(), batch.x, noise[0])[-1]
    real = np.array([0, 1, 0, 0, 0, 1], bool)
    batch = batch._replace(weight=jnp.asarray(real, jnp.float32), task=batch.tasks if joint else batch.task)
    taken = (gates[real] > 0).any(axis=0)
    assert 0 < taken.sum() < (gates > 0).any(axis=0).sum(), "padding takes other experts"
    after = step(network, optax.adam, before, batch, noise)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(moved(old.experts, new.experts), taken)
        np.testing.assert_array_equal(moved(old.heads, new.heads), [True] if joint else [False, True, False])
        np.testing.assert_array_equal(moved(old.router, new.router), [True])


def test_padding_alone_moves_nothing():
    network = small(by_input(balance=0.3), one_head=True)
    before = practised(network, optax.adam)
    nothing = mixed_batch(STREAM, [0, 1, 0], [0, 0, 0])
    assert identical(step(network, optax.adam, before, nothing, (normal(3),)), before)


def test_padding_does_not_change_a_step():
    network, batch, noise = small(by_input(balance=0.3)), first_batch(STREAM, 1), normal(6)
    learner = practised(network, optax.adam)
    padded = step(network, optax.adam, learner, batch._replace(weight=jnp.array([1.0, 1, 1, 1, 0, 0])), (noise,))
    fewer = Batch(batch.x[:4], batch.y[:4], batch.task, jnp.ones(4))
    assert distance(padded, step(network, optax.adam, learner, fewer, (noise[:4],))) < 1e-5


def test_the_penalty_evens_out_use():
    x, y = (np.concatenate([getattr(STREAM[task].train, name) for task in range(SPEC.tasks)]) for name in "xy")
    x = np.concatenate([x.reshape(len(x), -1)[:, :-1], np.ones((len(x), 1))], axis=1).reshape(x.shape)  # a constant
    batch = Batch(jnp.asarray(x), jnp.asarray(y), jnp.array(0), jnp.ones(len(y)))
    uneven = jnp.zeros((1, EXPERTS, INPUTS)).at[0, :K, -1].set(1.5)  # the first K, for all examples
    variation = {}
    for balance in (0.0, 1.0):
        method = finetune(small(by_input(balance=balance), one_head=True), lr=0.1)
        state = method.init(KEY)
        start = eqx.tree_at(lambda state: state.learner.parameters.router[0].weight, state, uneven)
        importance = [use(method.network, s, x) for s in (start, after_steps(method, start, batch))]
        variation[balance] = [squared_variation(count) for count in importance]
    for start, _ in variation.values():
        assert start == pytest.approx(EXPERTS / K - 1, abs=0.01)
    assert variation[1.0][1] < 0.1 < 0.5 < variation[0.0][1]


def use(network, state, x):
    (gates,) = network.taken(state.learner.parameters, jnp.array(0), jnp.asarray(x, jnp.float32))
    return np.asarray(gates).sum(axis=0)


@eqx.filter_jit
def after_steps(method, state, batch, steps=150):
    def step(i, state):
        return method.update(state, batch, method.draw(jax.random.fold_in(KEY, i), batch))[0]

    return jax.lax.fori_loop(0, steps, step, state)


def test_it_learns_without_being_told_the_task():
    stream = STREAM.shuffled()
    network = routing_network(SPEC, dense(12), layers=1, experts=6, k=2, router=by_input(balance=0.01), one_head=True)
    end = run(learn(finetune(network, lr=0.2), [stream], [0], **OPTIONS))
    assert end.accuracy.min() > 0.8, "chance is 0.33"
    assert end.logits == ()
    (gates,) = end.gates
    np.testing.assert_allclose(gates.sum(axis=-1), 1, rtol=1e-5)
    assert gates.min() >= 0

    parameters = jax.tree.map(lambda a: a[0], end.state.learner.parameters)
    x = STREAM[1].test.x
    first, other = (network.predict(parameters, jnp.array(task), x) for task in (0, 2))
    assert identical(first, other)
    (taken,) = network.taken(parameters, jnp.array(0), x)
    np.testing.assert_allclose(gates[0, 0, 1], np.asarray(taken).mean(axis=0), rtol=0, atol=1e-6)


def test_gates_are_there_for_the_tasks_that_were_seen():
    network = small(by_input(), one_head=True)
    snapshots = list(learn(finetune(network, lr=0.0), [STREAM], [0], batch=20))
    (gates,) = snapshots[-1].gates
    assert gates.shape == (1, SPEC.tasks, SPEC.tasks, EXPERTS)
    seen = np.tri(SPEC.tasks, dtype=bool)
    np.testing.assert_allclose(gates[0].sum(axis=-1)[seen], 1, rtol=1e-5)
    assert not gates[0][~seen].any()
    assert np.isnan(snapshots[0].gates[0]).all()


def test_cotraining_must_know_which_experts_are_unused():
    network = small(by_input())
    for inner in (finetune(network), replay(network, reservoir(4, 2))):
        with pytest.raises(Invalid, match=r"^router: 'input' is not valid; co-training must know"):
            cotraining(inner)
    with pytest.raises(Invalid, match=r"^balance: -1 is not valid"):
        by_input(balance=-1)


# One head


def test_parameters_with_one_head_are_counted_as_by_hand():
    bottom, head = 784 * 256 + 256 + 256 * 256 + 256, 256 * 10 + 10
    assert parameter_count(shared_bottom(MNIST, one_head=True)) == bottom + head
    experts, head = 20 * (784 * 19 + 19) + 20 * (19 * 19 + 19), 19 * 10 + 10
    count = parameter_count(routing_network(MNIST, dense(19), one_head=True))
    assert count == experts + head + 2 * 20 * 20
    read = 20 * 784 + 20 * 19
    assert (
        parameter_count(routing_network(MNIST, dense(19), router=by_input(noisy=False))) == experts + 20 * head + read
    )
    assert parameter_count(routing_network(MNIST, dense(19), router=by_input(), one_head=True)) == (
        experts + head + 2 * read
    )


@pytest.mark.parametrize("make", [shared_bottom, routing_network], ids=lambda make: make.__name__)
def test_the_one_head_learns_from_every_task(make):
    options = {"hidden": (4,)} if make is shared_bottom else {"expert": dense(4, jnp.tanh), "experts": 3, "k": 2}
    network = make(SPEC, **options, one_head=True)
    learner, noise = practised(network, optax.adam), (None,) * len(network.layers)
    assert {len(leaf) for leaf in jax.tree.leaves(learner.parameters.heads)} == {1}
    mixed = mixed_batch(STREAM, [2, 0, 1], [1, 1, 0])
    for batch in (first_batch(STREAM, 0), first_batch(STREAM, 2), mixed):
        after = step(network, optax.adam, learner, batch, noise)
        assert moved(learner.parameters.heads, after.parameters.heads).all()
        assert moved(learner.moments.heads, after.moments.heads).all()
    nothing = step(network, optax.adam, learner, mixed._replace(weight=jnp.zeros(3)), noise)
    assert identical(nothing, learner)


@pytest.mark.parametrize("heads", [False, True])
def test_cotraining_moves_the_one_head_if_told_to(heads):
    network = small(None, one_head=True)
    method = cotraining(finetune(network, lr=0.0), lr=0.1, cotrain_heads=heads)
    nothing = (jnp.zeros((SPEC.tasks, EXPERTS), bool),)
    before = CotrainingState(FinetuneState(practised(network)), nothing)
    after, _ = eqx.filter_jit(method.update)(before, first_batch(STREAM, 1), (None,))
    old, new = before.learner.parameters, after.learner.parameters
    np.testing.assert_array_equal(moved(old.experts, new.experts), ~np.asarray(after.used[0][1]))
    np.testing.assert_array_equal(moved(old.heads, new.heads), [heads])
    assert identical(old.router, new.router)


def test_a_mixed_batch_of_one_task_is_the_same_step_with_one_head():
    network = small(None, one_head=True)
    learner, batch = practised(network), first_batch(STREAM, 1)
    alone = step(network, optax.sgd, learner, batch, (None,))
    mixed = step(network, optax.sgd, learner, batch._replace(task=batch.tasks), (None,))
    assert distance(alone, mixed) < 1e-6
    assert distance(alone, learner) > 1e-3
