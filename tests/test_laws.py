"""Limits in which a method equals a simpler one, and what a step leaves alone."""

import functools
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    OPTIONS,
    STREAM,
    distance,
    filled,
    first_batch,
    identical,
    leaves,
    make,
    mixed_batch,
    moved,
    routed,
    run,
    streamed,
)

from cotrain.engine import learn
from cotrain.memory import reservoir
from cotrain.methods.cotraining import CotrainingState, cotraining
from cotrain.methods.descent import Rates, begin, descend
from cotrain.methods.finetune import FinetuneState, finetune
from cotrain.methods.replay import Noise, ReplayState, replay
from cotrain.metrics import backward_transfer
from cotrain.networks.experts import dense

SPEC, MEMORY = STREAM.spec, reservoir(20, 5)
EXPERTS, FEWER, K = 8, 6, 2
OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
    "adamw": optax.adamw,
}
BATCHES = {
    "one task": first_batch(STREAM, 1),
    "distinct experts": mixed_batch(STREAM, [2, 0, 2], [1, 1, 1]),  # 3 × K < EXPERTS
    "all experts": mixed_batch(STREAM, [0, 2, 0, 2, 2], [1, 1, 1, 1, 0]),  # 5 × K ≥ EXPERTS; the last is padding
    "nothing": mixed_batch(STREAM, [0, 0, 0], [0, 0, 0]),
}
KEY = jax.random.key(0)

every_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=[*BATCHES])


def small(**options):
    """A network whose experts all have gradients: tanh never dies."""
    return routed(SPEC, dense(4, jnp.tanh), **{"experts": EXPERTS, "k": K, "noise": 1.0} | options)


NETWORK, FLAT = small(experts=FEWER), small(layers=1)


def normal(network, rows, seed=0):
    """Noise for the routes of some rows."""
    draws = np.random.default_rng(seed)
    return tuple(jnp.asarray(draws.normal(size=(rows, layer.experts)), jnp.float32) for layer in network.layers)


def noise_for(seed):
    """The random numbers of an update by replay or co-training, for `first_batch`."""
    draws = np.random.default_rng(seed)
    bits = [jnp.asarray(draws.integers(0, 2**32, (size, 2), np.uint32)) for size in (6, MEMORY.batch)]
    return Noise(normal(NETWORK, 1, seed), normal(NETWORK, MEMORY.batch, seed + 1), tuple(bits))


@eqx.filter_jit
def update(method, state, batch, noise):
    return method.update(state, batch, noise)[0]


def updates(method, state, tasks, seed):
    """The method's state after a minibatch of each task."""
    for task in tasks:
        state = update(method, state, first_batch(STREAM, task), noise_for(seed + task))
    return state


@eqx.filter_jit
def step(network, optimizer, learner, batch, noise, rates):
    path = network.sample(learner.parameters, batch.task, batch.weight, noise)
    return descend(network, optimizer, learner, batch, path, rates)[0]


@functools.cache
def learner(optimizer):
    """A learner whose optimizer has something to remember."""
    return jax.tree.map(jnp.abs, filled(begin, FLAT, OPTIMIZERS[optimizer], KEY))


def rows(batch):
    """Each example's task, and the row of the noise that its task takes: that of its first example."""
    tasks = np.broadcast_to(batch.task, batch.y.shape)
    there = np.flatnonzero(np.asarray(batch.weight) > 0)
    first = {}
    for i in there:
        first.setdefault(int(tasks[i]), 0 if batch.task.ndim == 0 else i)
    return tasks, np.array([first.get(int(task), 0) for task in tasks]), sorted(first)


def chosen(network, parameters, batch, noise):
    """For each layer, the experts that each example of a batch takes, as a mask."""
    tasks, row, _ = rows(batch)
    masks = []
    for layer, router, draws in zip(network.layers, parameters.router, noise, strict=True):
        spread = network.router.sampling.scale if router.spread is None else np.logaddexp(0, router.spread)[tasks]
        logits = np.asarray(router.logits)[tasks] + spread * np.asarray(draws)[row]
        mask = np.zeros(logits.shape, bool)
        np.put_along_axis(mask, np.argsort(-logits, axis=1)[:, : layer.k], True, axis=1)
        masks.append(mask)
    return masks


# What a step leaves alone


@pytest.mark.parametrize(
    ("optimizer", "batch"),
    [
        *[("sgd", "one task"), ("momentum", "one task"), ("adamw", "one task"), ("adamw", "all experts")],
        *[(name, batch) for name in OPTIMIZERS for batch in ("distinct experts", "nothing")],
    ],
)
def test_only_what_takes_part_moves(optimizer, batch):
    batch = BATCHES[batch]
    noise = normal(FLAT, batch.task.size)
    before = learner(optimizer)
    after = step(FLAT, OPTIMIZERS[optimizer], before, batch, noise, Rates(*[jnp.array(0.1)] * 3))
    (mask,) = chosen(FLAT, before.parameters, batch, noise)
    experts = mask[np.asarray(batch.weight) > 0].any(axis=0)
    tasks = np.isin(np.arange(SPEC.tasks), rows(batch)[2])
    assert not experts.all()
    assert not tasks.all()
    assert bool(leaves(before.moments)) == (optimizer != "sgd")
    for old, new in ((before.parameters, after.parameters), (before.moments, after.moments)):
        if leaves(old):
            np.testing.assert_array_equal(moved(old.experts, new.experts), experts)
            np.testing.assert_array_equal(moved(old.router, new.router), tasks)
            np.testing.assert_array_equal(moved(old.heads, new.heads), tasks)


def test_a_rate_of_none_leaves_a_part_alone():
    before, batch = learner("momentum"), BATCHES["one task"]
    parts = ("experts", "heads", "router")
    for still in ("heads", "router"):
        rates = Rates(**{part: None if part == still else jnp.array(0.1) for part in parts})
        after = step(FLAT, OPTIMIZERS["momentum"], before, batch, normal(FLAT, 1), rates)
        for part in parts:
            for old, new in ((before.parameters, after.parameters), (before.moments, after.moments)):
                assert identical(getattr(old, part), getattr(new, part)) == (part == still)


# Narrowed steps and dense ones


@eqx.filter_jit
@eqx.filter_grad
def dense_gradient(parameters, network, batch, masks, noise, tasks, row):
    """The gradient of the whole network, every expert on every example, with gates that are zero off the route."""
    x = batch.x.reshape(len(batch.y), -1)
    for layer, stack, router, mask, draws in zip(
        network.layers, parameters.experts, parameters.router, masks, noise, strict=True
    ):
        logits = router.logits[tasks]
        if network.router.noisy_gates:
            spread = (
                network.router.sampling.scale if router.spread is None else jnp.log1p(jnp.exp(router.spread[tasks]))
            )
            logits = logits + spread * draws[row]
        exponential = jnp.exp(logits)
        shares = exponential * mask if network.router.kind == "chosen" else exponential
        gates = mask * exponential / shares.sum(axis=1, keepdims=True)
        outputs = jnp.tanh(jnp.einsum("eui,bi->beu", stack.weight, x) + stack.bias[None])
        x = gates[..., None] * outputs
        if network.aggregation == "sum":
            x = x.sum(axis=1)
        else:  # the K chosen, by index
            order = jnp.argsort(~mask, axis=1, stable=True)[:, : layer.k, None]
            x = jnp.take_along_axis(x, order, axis=1).reshape(len(x), -1)
    logits = jnp.einsum("bcu,bu->bc", parameters.heads.weight[tasks], x) + parameters.heads.bias[tasks]
    right = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.y[:, None], axis=1)[:, 0]
    return -(batch.weight * right).sum() / jnp.maximum(batch.weight.sum(), 1)


@every_batch
@pytest.mark.parametrize(
    "options",
    [{}, {"layers": 1, "sampling": "noisy-top-k", "gates": "all", "aggregation": "concatenate"}],
    ids=["default", "other"],
)
@pytest.mark.parametrize("optimizer", [optax.sgd, lambda lr: optax.sgd(lr)], ids=["term by term", "summed first"])
def test_narrowed_steps_agree_with_dense_ones(options, optimizer, batch):
    network, noise = small(**options), normal(small(**options), batch.task.size)
    before = filled(begin, network, optimizer, KEY)
    rates = {"experts": 0.3, "heads": 0.2, "router": 0.9}
    after = step(network, optimizer, before, batch, noise, Rates(**jax.tree.map(jnp.array, rates)))

    old = before.parameters
    masks = chosen(network, old, batch, noise)
    tasks, row, _ = rows(batch)
    gradient = dense_gradient(old, network, batch, masks, noise, tasks, row)
    for part, rate in rates.items():
        by_hand = jax.tree.map(lambda p, g, rate=rate: p - rate * g, getattr(old, part), getattr(gradient, part))
        assert distance(getattr(after.parameters, part), by_hand) < 1e-6
        largest = distance(by_hand, getattr(old, part))
        assert largest == 0 if batch is BATCHES["nothing"] else largest > 1e-3


# Co-training


STILL = {"lr": 0.0, "memory_lr": 0.0, "router_lr": 0.0, "cotraining_lr": 0.1}


def cotrained(network=NETWORK, *, cotraining_lr=None, cotrain_heads=False, **rates):
    """Co-training around replay: Algorithm 1."""
    return cotraining(replay(network, MEMORY, **rates), lr=cotraining_lr, cotrain_heads=cotrain_heads)


@functools.cache
def practised():
    """The state of co-training after a minibatch of each of the first two tasks."""
    method = cotrained(lr=0.1)
    nothing = tuple(jnp.zeros((SPEC.tasks, FEWER), bool) for _ in range(2))
    inner = ReplayState(filled(begin, NETWORK, optax.sgd, KEY), MEMORY.init(SPEC))
    state = CotrainingState(inner, nothing)
    return updates(method, state, (0, 1), seed=12)


def with_unused(counts):
    """The practised state, if task 0 used all experts but `counts` of each layer, none of which task 1 uses."""
    state = practised()
    used = []
    for router, count in zip(state.learner.parameters.router, counts, strict=True):
        row = np.ones(FEWER, bool)
        row[np.argsort(-np.asarray(router.logits)[1])[FEWER - count :]] = False
        used.append(jnp.asarray(np.stack([row, *np.zeros((2, FEWER), bool)])))
    return state._replace(used=tuple(used))


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 3), (1, 2), (2, 4), (3, 1), (4, 4)])
def test_a_cotraining_step_moves_every_unused_expert_and_nothing_else(counts):
    before = with_unused(counts)
    after = updates(cotrained(**STILL), before, [1], seed=20)
    old, new = before.learner.parameters, after.learner.parameters
    for layer, count in enumerate(counts):
        unused = ~np.asarray(after.used[layer]).any(axis=0)
        assert unused.sum() == count
        np.testing.assert_array_equal(moved(old.experts[layer], new.experts[layer]), unused)
    assert identical(old.router, new.router)
    assert identical(old.heads, new.heads)


def test_a_cotraining_step_moves_heads_if_told_to():
    before = with_unused((2, 3))
    after = updates(cotrained(cotrain_heads=True, **STILL), before, [1], seed=20)
    old, new = before.learner.parameters, after.learner.parameters
    assert identical(old.router, new.router)
    assert set(np.asarray(before.inner.memory.next.task)) == {0, 1}
    np.testing.assert_array_equal(moved(old.heads, new.heads), [True, True, False])
    for layer in range(2):
        unused = ~np.asarray(after.used[layer]).any(axis=0)
        np.testing.assert_array_equal(moved(old.experts[layer], new.experts[layer]), unused)


def test_a_cotraining_step_descends_on_the_mean_of_the_unused_experts_over_current_and_replayed_examples():
    before = with_unused((2, 3))
    after = updates(cotrained(**STILL), before, [1], seed=20)
    by_hand = unused_by_hand(before.learner, after.used, first_batch(STREAM, 1).union(before.inner.memory.next))
    assert distance(after.learner.parameters.experts, by_hand) < 1e-6
    assert distance(before.learner.parameters.experts, by_hand) > 1e-4


def unused_by_hand(learner, used, batch):
    """The experts after a step of those that no task uses, with equal gates, on the dense network."""
    masks = [np.tile(~np.asarray(taken).any(axis=0), (len(batch.y), 1)) for taken in used]
    parameters, tasks = learner.parameters, np.asarray(batch.tasks)
    level = eqx.tree_at(lambda p: p.router, parameters, jax.tree.map(jnp.zeros_like, parameters.router))
    row = np.zeros(len(batch.y), int)
    gradient = dense_gradient(level, NETWORK, batch, masks, normal(NETWORK, 1), tasks, row)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters.experts, gradient.experts)


def test_without_replayed_examples_a_cotraining_step_descends_on_the_current_ones_alone():
    learner, used = with_unused((2, 3)).learner, with_unused((2, 3)).used
    empty = CotrainingState(ReplayState(learner, MEMORY.init(SPEC)), used)
    replayed = updates(cotrained(**STILL), empty, [1], seed=20)
    tuning = cotraining(finetune(NETWORK, lr=0.0), lr=0.1)
    tuned = update(tuning, CotrainingState(FinetuneState(learner), used), first_batch(STREAM, 1), noise_for(21).current)
    by_hand = unused_by_hand(learner, tuned.used, first_batch(STREAM, 1))
    for state in (tuned, replayed):
        assert distance(state.learner.parameters.experts, by_hand) < 1e-6
    assert distance(learner.parameters.experts, by_hand) > 1e-4


def test_a_task_uses_the_experts_of_its_largest_logits():
    after = updates(cotrained(lr=0.1), practised(), [2], seed=30)
    for used, before, router in zip(after.used, practised().used, after.learner.parameters.router, strict=True):
        np.testing.assert_array_equal(used[:2], before[:2])
        best = np.argsort(-np.asarray(router.logits)[2])[:K]
        np.testing.assert_array_equal(np.flatnonzero(used[2]), np.sort(best))


def test_cotraining_with_nothing_left_to_train_is_replay():
    method, before = cotrained(lr=0.1), with_unused((0, 0))
    replayed = updates(method.inner, before.inner, (1, 2), seed=40)
    assert identical(updates(method, before, (1, 2), seed=40).inner, replayed)
    left = updates(method, with_unused((1, 1)), (1, 2), seed=40)
    assert not identical(left.learner, replayed.learner)


def test_cotraining_with_rate_zero_is_replay():
    method = cotrained(lr=0.1, cotraining_lr=0.0)
    before = with_unused((2, 3))
    replayed = updates(method.inner, before.inner, (1, 2), seed=40)
    assert identical(updates(method, before, (1, 2), seed=40).inner, replayed)


def test_cotraining_around_finetuning_with_rate_zero_is_finetuning():
    inner, before = finetune(NETWORK, lr=0.1), with_unused((2, 3))
    tuned = FinetuneState(before.learner)
    wrapped, trained = (CotrainingState(tuned, before.used),) * 2
    for task in (1, 2):
        given = first_batch(STREAM, task), noise_for(40 + task).current
        tuned = update(inner, tuned, *given)
        wrapped = update(cotraining(inner, lr=0.0), wrapped, *given)
        trained = update(cotraining(inner), trained, *given)
    assert identical(wrapped.inner, tuned)
    assert distance(trained.inner, tuned) > 1e-4


def test_cotraining_on_a_shared_bottom_is_replay():
    wrapped, replayed = (learned((name, "shared_bottom")) for name in ("cotraining", "replay"))
    assert identical(wrapped.state.inner, replayed.state)
    np.testing.assert_array_equal(wrapped.accuracy, replayed.accuracy)


# Replay, private experts


def test_replay_that_learns_nothing_from_memory_is_finetuning():
    tuning = finetune(NETWORK, lr=0.1, router_lr=0.0)
    tuned = FinetuneState(practised().learner)
    for task in (1, 2):
        tuned = update(tuning, tuned, first_batch(STREAM, task), noise_for(50 + task).current)
    before = practised().inner
    rates = {"lr": 0.1, "router_lr": 0.0}
    still = updates(replay(NETWORK, MEMORY, **rates, memory_lr=0.0), before, (1, 2), seed=50)
    assert distance(still.learner, tuned.learner) == 0
    moving = updates(replay(NETWORK, MEMORY, **rates, memory_lr=0.01), before, (1, 2), seed=50)
    assert distance(moving.learner, tuned.learner) > 1e-4


def test_private_experts_never_forget():
    snapshots = learn(make(("private", "routing_network")), [STREAM], [0], **OPTIONS)
    after = [snapshot.kept() for snapshot in snapshots if snapshot.event == "evaluated"]
    accuracy = after[-1].accuracy[0]
    for task, snapshot in enumerate(after):
        assert len(set(accuracy[task:, task])) == 1
        then, now = snapshot.state.learner.parameters, after[-1].state.learner.parameters
        for old, new in ((then.experts, now.experts), (then.heads, now.heads)):
            changed = moved(*(jax.tree.map(lambda a: a[0], stack) for stack in (old, new)))
            np.testing.assert_array_equal(changed[: SPEC.tasks], np.arange(SPEC.tasks) > task)
            assert not changed[SPEC.tasks :].any()
    assert backward_transfer(accuracy) == 0


# The engine


def numbers(snapshot):
    return snapshot.state, snapshot.accuracy, snapshot.initial, snapshot.logits, snapshot.gates


@functools.cache
def learned(case, seed=0):
    return run(learn(make(case), [streamed(case)], [seed], **OPTIONS))


COTRAINING = ("cotraining", "routing_network")


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    again = run(learn(make(COTRAINING), [STREAM], [0], **OPTIONS))
    assert identical(numbers(again), numbers(learned(COTRAINING)))
    assert not identical(again.state.learner, learned(COTRAINING, 1).state.learner)


@pytest.mark.parametrize(("method", "chunk"), [("finetune", 1), ("finetune", 7), ("replay", 50)])
def test_the_size_of_chunks_does_not_matter(method, chunk):
    case = (method, "routing_network")  # a task has 42 minibatches
    other = run(learn(make(case), [STREAM], [0], **OPTIONS | {"chunk": chunk}))
    assert identical(numbers(other), numbers(learned(case)))


@pytest.mark.parametrize("evaluate_all", [False, True])
def test_a_run_goes_on_from_any_snapshot(evaluate_all):
    options = OPTIONS | {"evaluate_all": evaluate_all}
    snapshots = [snapshot.kept() for snapshot in learn(make(COTRAINING), [STREAM], [0], **options)]
    assert {snapshot.event for snapshot in snapshots} == {"compiled", "trained", "evaluated"}
    assert len(snapshots) == 1 + evaluate_all + SPEC.tasks * (3 + 1)
    different = []
    for i, snapshot in enumerate(snapshots):
        resumed = run(learn(make(COTRAINING), [STREAM], [0], start=snapshot, **options))
        if not identical(numbers(resumed), numbers(snapshots[-1])):
            different.append((i, snapshot.event))
    assert different == []


AT_ONCE = [
    *[(method, "routing_network") for method in ("finetune", "cotraining", "private")],
    *[(method, "shared_bottom") for method in ("replay", "joint")],
]


@pytest.mark.parametrize("case", AT_ONCE, ids="-".join)
def test_seeds_at_once_agree_with_one_at_a_time(case):
    seeds, stream = [0, 1, 2], streamed(case)
    start = None if case[0] == "joint" else stacked(next(learn(make(case), [stream], [s], **OPTIONS)) for s in seeds)
    together = run(learn(make(case), [stream] * 3, seeds, start=start, **OPTIONS))
    for i, seed in enumerate(seeds):
        alone = learned(case, seed)
        assert distance(jax.tree.map(lambda a, i=i: a[i : i + 1], together.state), alone.state) < 1e-5
        np.testing.assert_array_equal(together.accuracy[i], alone.accuracy[0])
        assert distance([a[i] for a in together.logits], [a[0] for a in alone.logits]) < 1e-5
        assert distance([a[i] for a in together.gates], [a[0] for a in alone.gates]) < 1e-5


def stacked(snapshots):
    """One snapshot of several runs, so that nothing has to be compiled to start them at once."""
    snapshots = list(snapshots)
    arrays = jax.tree.map(lambda *parts: np.concatenate(parts), *map(numbers, snapshots))
    names = ("state", "accuracy", "initial", "logits", "gates")
    sample = jax.tree.map(lambda *parts: np.concatenate(parts), *(snapshot.sample for snapshot in snapshots))
    return replace(snapshots[0], sample=sample, **dict(zip(names, arrays, strict=True)))


def test_hyperparameters_and_state_are_arguments_of_the_compiled_program():
    method, before = cotrained(lr=0.1), practised()
    after = updates(method, before, [1], seed=60)
    rates = ({"lr": 0.2}, {"router_lr": 0.2}, {"memory_lr": 0.2}, {"cotraining_lr": 0.2})
    others = [cotrained(**{"lr": 0.1} | rate) for rate in rates]
    others.append(cotrained(small(experts=FEWER, noise=0.0), lr=0.1))
    for other in others:
        assert jax.tree.structure(other) == jax.tree.structure(method)
        assert not identical(updates(other, before, [1], seed=60).learner, after.learner)
    scaled = jax.tree.map(lambda a: 1.5 * a, before.learner.parameters.experts)
    changed = eqx.tree_at(lambda state: state.learner.parameters.experts, before, scaled)
    assert not identical(updates(method, changed, [1], seed=60).learner, after.learner)
    assert not identical(updates(method, before, [1], seed=61).learner, after.learner)
