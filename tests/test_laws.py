"""Limits in which a method equals a simpler one, and what a step leaves alone."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import CASES, OPTIONS, STREAM, distance, first_batch, identical, leaves, make, mixed_batch, run, streamed

from cotrain.data.stream import Spec
from cotrain.engine import learn
from cotrain.memory import reservoir
from cotrain.methods.cotraining import cotraining
from cotrain.methods.descent import Learner, Rates, begin, descend
from cotrain.methods.finetune import finetune
from cotrain.methods.replay import replay
from cotrain.metrics import backward_transfer
from cotrain.networks.experts import dense
from cotrain.networks.routing import routing_network

SPEC, MEMORY = STREAM.spec, reservoir(20, 5)
EXPERTS, K = 8, 2
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
KEYS = jax.random.split(jax.random.key(5), 4)

every_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=[*BATCHES])


def small(**options):
    """A network whose experts all have gradients: tanh never dies."""
    options = {"experts": EXPERTS, "k": K, "noise": 1.0} | options
    return routing_network(SPEC, dense(4, jnp.tanh), **options)


NETWORK = small()


@eqx.filter_jit
def start(method):
    return method.init(jax.random.key(0))


@eqx.filter_jit
def updates(method, state, batches, key):
    """The method's state after some minibatches."""
    for i, batch in enumerate(batches):
        state, _ = method.update(state, batch, method.draw(jax.random.fold_in(key, i), batch))
    return state


@eqx.filter_jit
def step(network, optimizer, learner, batch, noise, rates):
    path = network.sample(learner.parameters, batch.task, batch.weight, noise)
    return descend(network, optimizer, learner, batch, path, rates)[0]


@functools.cache
def drawn(rows):
    return NETWORK.draw(KEYS[0], rows)


@functools.cache
def learner(optimizer):
    """A learner whose optimizer has something to remember."""
    fresh = eqx.filter_jit(begin)(NETWORK, OPTIMIZERS[optimizer], KEYS[1])
    counts = jax.tree.map(lambda a: a + 3 if a.dtype == jnp.int32 else a + 0.5, fresh.moments)
    return Learner(fresh.parameters, counts)


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
        logits = np.asarray(router.logits)[tasks] + float(network.noise) * np.asarray(draws)[row]
        mask = np.zeros(logits.shape, bool)
        np.put_along_axis(mask, np.argsort(-logits, axis=1)[:, : layer.k], True, axis=1)
        masks.append(mask)
    return masks


def entries(tree, index):
    return jax.tree.map(lambda a: np.asarray(a)[index], tree)


def moved(before, after, count):
    """Which of `count` entries of a stack have changed."""
    return np.array([not identical(entries(before, i), entries(after, i)) for i in range(count)])


# What a step leaves alone


@every_batch
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_only_what_takes_part_moves(optimizer, batch):
    noise = drawn(batch.task.size)
    before = learner(optimizer)
    after = step(NETWORK, OPTIMIZERS[optimizer], before, batch, noise, Rates(*[jnp.array(0.1)] * 3))
    tasks = np.isin(np.arange(SPEC.tasks), rows(batch)[2])
    real = np.asarray(batch.weight) > 0
    for layer, mask in enumerate(chosen(NETWORK, before.parameters, batch, noise)):
        part = mask[real].any(axis=0)
        assert not part.all()
        for old, new in ((before.parameters, after.parameters), (before.moments, after.moments)):
            if leaves(old):  # plain SGD keeps none
                np.testing.assert_array_equal(moved(old.experts[layer], new.experts[layer], EXPERTS), part)
                np.testing.assert_array_equal(moved(old.router[layer], new.router[layer], SPEC.tasks), tasks)
    assert bool(leaves(before.moments)) == (optimizer != "sgd")
    np.testing.assert_array_equal(moved(before.parameters.heads, after.parameters.heads, SPEC.tasks), tasks)


def test_a_rate_of_none_leaves_a_part_alone():
    before, batch = learner("adam"), BATCHES["one task"]
    for rates, still in (
        (Rates(None, jnp.array(0.1), jnp.array(0.1)), "experts"),
        (Rates(jnp.array(0.1), None, jnp.array(0.1)), "heads"),
        (Rates(jnp.array(0.1), jnp.array(0.1), None), "router"),
    ):
        after = step(NETWORK, optax.adam, before, batch, drawn(1), rates)
        for part in ("experts", "heads", "router"):
            for old, new in ((before.parameters, after.parameters), (before.moments, after.moments)):
                assert identical(getattr(old, part), getattr(new, part)) == (part == still)


# Narrowed steps and dense ones


def dense_loss(parameters, network, batch, masks, noise):
    """The loss of the whole network, every expert on every example, with gates that are zero off the route."""
    tasks, row, _ = rows(batch)
    x = batch.x.reshape(len(batch.y), -1)
    for layer, stack, router, mask, draws in zip(
        network.layers, parameters.experts, parameters.router, masks, noise, strict=True
    ):
        logits = router.logits[tasks]
        if network.noisy_gates:
            spread = network.noise if router.spread is None else jnp.log1p(jnp.exp(router.spread[tasks]))
            logits = logits + spread * draws[row]
        exponential = jnp.exp(logits)
        shares = exponential * mask if network.gates == "chosen" else exponential
        gates = mask * exponential / shares.sum(axis=1, keepdims=True)
        outputs = jnp.tanh(jnp.einsum("eui,bi->beu", stack.weight, x) + stack.bias[None])
        if network.aggregation == "sum":
            x = jnp.einsum("be,beu->bu", gates, outputs)
        else:
            order = np.stack([np.flatnonzero(line) for line in mask])  # by index
            weighted = gates[..., None] * outputs
            x = jnp.take_along_axis(weighted, order[..., None], axis=1).reshape(len(batch.y), layer.k * 4)
    logits = jnp.einsum("bcu,bu->bc", parameters.heads.weight[tasks], x) + parameters.heads.bias[tasks]
    right = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.y[:, None], axis=1)[:, 0]
    return -(batch.weight * right).sum() / max(batch.weight.sum(), 1)


@every_batch
@pytest.mark.parametrize(
    "options",
    [{}, {"gates": "all", "noisy_gates": True}, {"sampling": "noisy-top-k"}, {"aggregation": "concatenate"}],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
def test_narrowed_steps_agree_with_dense_ones(options, batch):
    network, noise = small(**options), drawn(batch.task.size)
    before = eqx.filter_jit(begin)(network, optax.sgd, KEYS[2])
    rates = (0.3, 0.2, 0.9)
    after = step(network, optax.sgd, before, batch, noise, Rates(*map(jnp.array, rates)))

    masks = chosen(network, before.parameters, batch, noise)
    gradients = jax.jit(jax.grad(lambda p: dense_loss(p, network, batch, masks, noise)))(before.parameters)
    by_hand = before.parameters
    for part, rate in zip(("experts", "heads", "router"), rates, strict=True):
        stepped = jax.tree.map(lambda p, g, rate=rate: p - rate * g, getattr(by_hand, part), getattr(gradients, part))
        by_hand = eqx.tree_at(lambda p, part=part: getattr(p, part), by_hand, stepped)
    assert distance(after.parameters, by_hand) < 1e-6
    largest = distance(after.parameters, before.parameters)
    assert largest == 0 if batch is BATCHES["nothing"] else largest > 1e-3


# Co-training


@functools.cache
def practised(heads=False, **rates):
    """A co-training method, and its state after a minibatch of each of the first two tasks."""
    method = cotraining(NETWORK, MEMORY, cotrain_heads=heads, **{"lr": 0.1} | rates)
    return method, updates(
        cotraining(NETWORK, MEMORY, lr=0.1), start(method), [first_batch(STREAM, 0), first_batch(STREAM, 1)], KEYS[1]
    )


def with_unused(state, counts):
    """The state, as if task 0 used all experts but `counts` of each layer, which task 1 uses none of."""
    used = []
    for layer, count in enumerate(counts):
        best = np.argsort(-np.asarray(state.learner.parameters.router[layer].logits)[1])
        row = np.ones(EXPERTS, bool)
        row[best[EXPERTS - count :]] = False
        used.append(jnp.asarray(np.stack([row, np.zeros(EXPERTS, bool), np.zeros(EXPERTS, bool)])))
    return state._replace(used=tuple(used))


@pytest.mark.parametrize("heads", [False, True])
def test_a_cotraining_step_moves_unused_experts_alone(heads):
    method, state = practised(heads, lr=0.0, memory_lr=0.0, router_lr=0.0, cotraining_lr=0.1)
    state = with_unused(state, (3, 5))
    after = updates(method, state, [first_batch(STREAM, 1)], KEYS[2])
    old, new = state.learner.parameters, after.learner.parameters
    for layer in range(2):
        unused = ~np.asarray(after.used[layer]).any(axis=0)
        assert unused.sum() == (3, 5)[layer]
        np.testing.assert_array_equal(moved(old.experts[layer], new.experts[layer], EXPERTS), unused)
    assert identical(old.router, new.router)
    replayed = np.asarray(state.memory.next.task)
    expected = np.isin(np.arange(SPEC.tasks), [1, *replayed]) if heads else np.zeros(SPEC.tasks, bool)
    np.testing.assert_array_equal(moved(old.heads, new.heads, SPEC.tasks), expected)


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 3), (1, 2), (2, 6), (5, 4), (6, 6)])
def test_every_unused_expert_is_trained(counts):
    method, state = practised(lr=0.0, memory_lr=0.0, router_lr=0.0, cotraining_lr=0.1)
    state = with_unused(state, counts)
    after = updates(method, state, [first_batch(STREAM, 1)], KEYS[2])
    for layer, count in enumerate(counts):
        unused = ~np.asarray(after.used[layer]).any(axis=0)
        assert unused.sum() == count
        old, new = state.learner.parameters.experts[layer], after.learner.parameters.experts[layer]
        np.testing.assert_array_equal(moved(old, new, EXPERTS), unused)


def test_cotraining_takes_the_mean_of_the_unused_experts_on_current_and_replayed_examples():
    method, state = practised(lr=0.0, memory_lr=0.0, router_lr=0.0, cotraining_lr=0.1)
    state = with_unused(state, (3, 5))
    batch = first_batch(STREAM, 1)
    after = updates(method, state, [batch], KEYS[2])
    both = batch.union(state.memory.next)
    masks = [np.tile(~np.asarray(used).any(axis=0), (len(both.y), 1)) for used in after.used]
    parameters = state.learner.parameters
    flat = eqx.tree_at(
        lambda p: [router.logits for router in p.router], parameters, [jnp.zeros((SPEC.tasks, EXPERTS))] * 2
    )
    gradients = jax.grad(lambda p: dense_loss(p, NETWORK, both, masks, drawn(1)))(flat)
    by_hand = jax.tree.map(lambda p, g: p - 0.1 * g, parameters.experts, gradients.experts)
    assert distance(after.learner.parameters.experts, by_hand) < 1e-6
    assert distance(after.learner.parameters.experts, parameters.experts) > 1e-4


def test_the_experts_that_a_task_uses_are_those_of_its_largest_logits():
    _, state = practised()
    for used, router in zip(state.used, state.learner.parameters.router, strict=True):
        best = np.argsort(-np.asarray(router.logits), axis=1)[:, :K]
        expected = np.zeros((SPEC.tasks, EXPERTS), bool)
        expected[1, best[1]] = True
        np.testing.assert_array_equal(np.asarray(used)[1:], expected[1:])
        assert np.asarray(used)[0].sum() == K


def test_cotraining_with_nothing_left_to_train_is_replay():
    method, state = practised()
    state = with_unused(state, (0, 0))
    batches = [first_batch(STREAM, 1), first_batch(STREAM, 2)]
    cotrained = updates(method, state, batches, KEYS[3])
    replayed = updates(method.replay, state._replace(used=()), batches, KEYS[3])
    assert identical(cotrained._replace(used=()), replayed)
    left = updates(method, with_unused(state, (1, 1)), batches, KEYS[3])
    assert not identical(left._replace(used=()), replayed)


def test_cotraining_with_rate_zero_is_replay():
    method, state = practised(cotraining_lr=0.0)
    batches = [first_batch(STREAM, 1), first_batch(STREAM, 2)]
    cotrained = updates(method, state, batches, KEYS[3])
    replayed = updates(method.replay, state._replace(used=()), batches, KEYS[3])
    assert distance(cotrained.learner, replayed.learner) == 0
    assert identical(cotrained.memory, replayed.memory)


def test_cotraining_on_a_shared_bottom_is_replay():
    ends = [run(learn(make((name, "shared_bottom")), [STREAM], [0], **OPTIONS)) for name in ("cotraining", "replay")]
    cotrained, replayed = (end.state for end in ends)
    assert identical(cotrained._replace(used=()), replayed)
    np.testing.assert_array_equal(ends[0].accuracy, ends[1].accuracy)


# Replay, private experts


def test_replay_that_learns_nothing_from_memory_is_finetuning():
    rehearsing = replay(NETWORK, MEMORY, lr=0.1, memory_lr=0.0, router_lr=0.0)
    tuning = finetune(NETWORK, lr=0.1, router_lr=0.0)

    @eqx.filter_jit
    def both(rehearsing, tuning):
        rehearsed, tuned = rehearsing.init(KEYS[0]), tuning.init(KEYS[0])
        for task in (0, 1):
            batch = first_batch(STREAM, task)
            noise = rehearsing.draw(KEYS[task], batch)
            rehearsed, _ = rehearsing.update(rehearsed, batch, noise)
            tuned, _ = tuning.update(tuned, batch, noise.current)
        return rehearsed.learner, tuned.learner

    rehearsed, tuned = both(rehearsing, tuning)
    assert distance(rehearsed, tuned) == 0
    rehearsed, tuned = both(replay(NETWORK, MEMORY, lr=0.1, memory_lr=0.01, router_lr=0.0), tuning)
    assert distance(rehearsed, tuned) > 1e-4


def test_private_experts_never_forget():
    end = run(learn(make(("private", "routing_network")), [STREAM], [0], **OPTIONS))
    accuracy = end.accuracy[0]
    for task in range(SPEC.tasks):
        assert len(set(accuracy[task:, task])) == 1
    assert backward_transfer(accuracy) == 0
    shared = run(learn(make(("finetune", "shared_bottom")), [STREAM], [0], **OPTIONS)).accuracy[0]
    assert backward_transfer(shared) < 0, "the stream is one on which others do forget"


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


@pytest.mark.parametrize("chunk", [1, 7, 50])  # a task has 42 minibatches
def test_the_size_of_chunks_does_not_matter(chunk):
    other = run(learn(make(COTRAINING), [STREAM], [0], **OPTIONS | {"chunk": chunk}))
    assert identical(numbers(other), numbers(learned(COTRAINING)))


@pytest.mark.parametrize("evaluate_all", [False, True])
def test_a_run_goes_on_from_any_snapshot(evaluate_all):
    options = OPTIONS | {"evaluate_all": evaluate_all}
    snapshots = list(learn(make(COTRAINING), [STREAM], [0], **options))
    assert {snapshot.event for snapshot in snapshots} == {"compiled", "trained", "evaluated"}
    assert len(snapshots) == 1 + evaluate_all + SPEC.tasks * (3 + 1)
    different = [
        (i, snapshot.event)
        for i, snapshot in enumerate(snapshots)
        if not identical(
            numbers(run(learn(make(COTRAINING), [STREAM], [0], start=snapshot, **options))), numbers(snapshots[-1])
        )
    ]
    assert different == []


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[1] == "routing_network" or case[0] == "joint"], ids="-".join
)
def test_seeds_at_once_agree_with_one_at_a_time(case):
    seeds = [0, 1, 2]
    together = run(learn(make(case), [streamed(case)] * 3, seeds, **OPTIONS))
    for i, seed in enumerate(seeds):
        alone = learned(case, seed)
        assert distance(jax.tree.map(lambda a, i=i: a[i : i + 1], together.state), alone.state) < 1e-5
        np.testing.assert_array_equal(together.accuracy[i], alone.accuracy[0])
        assert distance([a[i] for a in together.logits], [a[0] for a in alone.logits]) < 1e-5


def test_hyperparameters_and_state_are_arguments_of_the_compiled_program():
    method, state = practised()
    batches = [first_batch(STREAM, 1)]
    before = updates(method, state, batches, KEYS[3])
    others = [
        cotraining(NETWORK, MEMORY, **{"lr": 0.1} | change)
        for change in ({"lr": 0.2}, {"router_lr": 0.2}, {"memory_lr": 0.2}, {"cotraining_lr": 0.2})
    ]
    others.append(cotraining(small(noise=3.0), MEMORY, lr=0.1))
    for other in others:
        assert jax.tree.structure(other) == jax.tree.structure(method)
        assert not identical(updates(other, state, batches, KEYS[3]).learner, before.learner)
    scaled = jax.tree.map(lambda a: 1.5 * a, state.learner.parameters.experts)
    changed = eqx.tree_at(lambda s: s.learner.parameters.experts, state, scaled)
    assert not identical(updates(method, changed, batches, KEYS[3]).learner, before.learner)


def test_a_network_of_one_expert_a_layer_has_no_router():
    parameters = routing_network(Spec((2,), 2, 2), dense(3), experts=1, k=1).init(KEYS[0])
    assert parameters.router == (None, None)
