"""The engine: what it feeds to a method, what it measures, and how it fails."""

import contextlib
import functools
import re
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OPTIONS, STREAM, identical, make, run, toy

from cotrain import engine, evaluation, steps
from cotrain.data.stream import Spec, Stream
from cotrain.engine import learn, steps_of
from cotrain.errors import Diverged, Invalid
from cotrain.evaluation import TEST_BATCH
from cotrain.memory import reservoir
from cotrain.methods.cotraining import cotraining
from cotrain.methods.descent import Learned
from cotrain.methods.finetune import finetune
from cotrain.methods.method import Info
from cotrain.methods.replay import replay
from cotrain.networks.experts import dense
from cotrain.networks.network import Network
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

CLASSES = 3
POISON = -1.0
EXAMPLE, LABEL, TASK, WEIGHT = range(4)


class TallyState(NamedTuple):
    """What a tally has been given so far."""

    learner: Learned
    given: jax.Array  # a row an example
    count: jax.Array  # the rows that are filled
    ended: jax.Array  # the last tasks that have ended, the latest first
    some: jax.Array  # what it was shown of the last one
    key: jax.Array  # what it was given then to draw numbers


class Tally(eqx.Module):
    """A method that learns nothing: it keeps a list of what it is given, and of the tasks that have ended.

    Its network's parameters are all 0, so that it always answers class 0.
    """

    network: Network
    room: int = eqx.field(static=True)
    examples: int = eqx.field(static=True, default=15)

    def init(self, key):
        shapes = jax.eval_shape(self.network.init, key)
        parameters = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        ended = jnp.full(self.network.spec.tasks + 1, -1)
        given, some = (jnp.zeros((size, 4)) for size in (self.room, self.examples))
        return TallyState(Learned(parameters, None), given, jnp.array(0), ended, some, jnp.zeros(2, jnp.uint32))

    def draw(self, key, batch):
        return ()

    def update(self, state, batch, noise):
        rows = self.rows(batch)
        given = jax.lax.dynamic_update_slice(state.given, rows, (state.count, 0))
        loss = jnp.where((rows[:, EXAMPLE] == POISON).any(), jnp.nan, 0.0)
        scalars = {"first": rows[0, EXAMPLE], "count": state.count}
        return state._replace(given=given, count=state.count + len(batch.y)), Info(loss, scalars)

    def consolidate(self, state, batch, key):
        ended = jnp.roll(state.ended, 1).at[0].set(batch.tasks.max())
        return state._replace(ended=ended, some=self.rows(batch), key=jax.random.key_data(key))

    def rows(self, batch):
        columns = batch.x.reshape(len(batch.y), -1)[:, 0], batch.y, batch.tasks, batch.weight
        return jnp.stack(columns, axis=1, dtype=float)


def numbered(sizes, tests=(4, 4, 4), start=0) -> Stream:
    """Tasks whose training examples are numbered through, with their number as input."""
    ends = np.cumsum([start, *sizes])
    tasks = []
    for low, high, test in zip(ends[:-1], ends[1:], tests, strict=False):
        numbers, labels = np.arange(low, high), np.arange(test) % CLASSES
        tasks.append((numbers[:, None].astype(np.float32), numbers % CLASSES, np.zeros((test, 1)), labels))
    return Stream.from_arrays(tasks, CLASSES)


def tally(stream, room=200, examples=15):
    return Tally(shared_bottom(stream.spec, (2,)), room, examples)


def given(snapshot, seed=0):
    """All that was given to a tally, in the order of giving."""
    table, count = (np.asarray(part)[seed] for part in (snapshot.state.given, snapshot.state.count))
    assert count <= len(table)
    return table[:count]


def check_examples(table):
    np.testing.assert_array_equal(table[:, LABEL], table[:, EXAMPLE] % CLASSES)


# What a method is given


@pytest.mark.parametrize(
    ("batch", "minibatches", "chunk"), [(4, (3, 2), 2), (5, (3, 2), 500), (20, (1, 1), 2), (1, (11, 8), 500)]
)
def test_every_example_is_given_once_an_epoch(batch, minibatches, chunk):
    stream, epochs = numbered((11, 8)), 3
    table = given(run(learn(tally(stream), [stream], [0], batch=batch, epochs=epochs, chunk=chunk)))
    assert len(table) == batch * epochs * sum(minibatches)
    check_examples(table[table[:, WEIGHT] > 0])
    per_epoch = np.split(table, np.cumsum([batch * count for count in minibatches for _ in range(epochs)])[:-1])
    orders = []
    for i, epoch in enumerate(per_epoch):
        task = i // epochs
        assert set(epoch[:, TASK]) == {task}
        assert set(epoch[:, WEIGHT]) <= {0, 1}
        assert not np.diff(epoch[:, WEIGHT]).max(initial=-1) > 0, "padding comes last"
        real = epoch[epoch[:, WEIGHT] > 0][:, EXAMPLE]
        np.testing.assert_array_equal(np.sort(real), np.arange(11) if task == 0 else np.arange(11, 19))
        orders.append(tuple(real))
    assert len(set(orders)) == len(orders), "each epoch has its own order"


@pytest.mark.parametrize("batch", [4, 7])
def test_a_joint_stream_gives_all_tasks_at_once(batch):
    stream, epochs = numbered((11, 8, 3)).shuffled(), 2
    table = given(run(learn(tally(stream), [stream], [0], batch=batch, epochs=epochs, chunk=3)))
    assert len(table) == epochs * -(-22 // batch) * batch
    for epoch in np.split(table, epochs):
        real = epoch[epoch[:, WEIGHT] > 0]
        check_examples(real)
        np.testing.assert_array_equal(np.sort(real[:, EXAMPLE]), np.arange(22))
        np.testing.assert_array_equal(real[:, TASK], np.searchsorted([11, 19], real[:, EXAMPLE], side="right"))
        assert len(set(real[:11, TASK])) == 3, "they are mixed"


def test_tasks_of_a_joint_stream_may_differ_in_type():
    stream = Stream.from_arrays(
        [(np.full((4, 1), 2), np.zeros(4, int)) * 2, (np.full((4, 1), 0.5), np.zeros(4, int)) * 2], CLASSES
    )
    table = given(run(learn(tally(stream), [stream.shuffled()], [0], batch=8)))
    np.testing.assert_array_equal(table[:, EXAMPLE], np.where(table[:, TASK] == 0, 2.0, 0.5))


def test_each_seed_has_its_own_order_and_its_own_stream():
    streams = [numbered((9, 9)), numbered((9, 9), start=50), numbered((9, 9))]
    together = run(learn(tally(streams[0]), streams, [3, 4, 4], batch=4, chunk=5))
    for i, seed in enumerate((3, 4, 4)):
        alone = run(learn(tally(streams[0]), [streams[i]], [seed], batch=4, chunk=5))
        np.testing.assert_array_equal(given(together, i), given(alone))
    np.testing.assert_array_equal(given(together, 1)[:, EXAMPLE] % 50, given(together, 2)[:, EXAMPLE])
    assert not np.array_equal(given(together, 0), given(together, 2))


def test_seeds_at_once_may_differ_in_examples_but_not_in_minibatches():
    streams = [numbered((8, 5)), numbered((7, 6))]
    end = run(learn(tally(streams[0]), streams, [0, 0], batch=4, chunk=5))
    for i, total in enumerate((13, 13)):
        table = given(end, i)
        np.testing.assert_array_equal(np.sort(table[table[:, WEIGHT] > 0][:, EXAMPLE]), np.arange(total))
    with pytest.raises(Invalid, match=r"^streams: \[2, 3\] is not valid"):
        run(learn(tally(streams[0]), [numbered((8, 5)), numbered((9, 6))], [0, 0], batch=4, chunk=5))


def test_steps_are_counted_ahead():
    stream = numbered((11, 8))
    assert steps_of(stream, 4, 3) == [9, 6]
    assert steps_of(stream.shuffled(), 4, 3) == [15]


def test_a_method_is_told_when_a_task_has_ended():
    stream = numbered((5, 5, 5))
    ended = [s.state.ended[0].tolist() for s in learn(tally(stream), [stream], [0], batch=5)]
    assert ended[-1] == [2, 1, 0, -1]
    assert ended[2] == [0, -1, -1, -1]
    assert run(learn(tally(stream), [stream.shuffled()], [0], batch=5)).state.ended[0].tolist() == [2, -1, -1, -1]


def shown(stream, examples, seeds=(0,), **options):
    """What a tally was shown at the end of each phase, and its keys."""
    streams = [stream] * len(seeds)
    snapshots = learn(tally(stream, examples=examples), streams, seeds, batch=4, **options)
    ends = [(np.array(s.state.some), np.array(s.state.key)) for s in snapshots if s.event == "evaluated"]
    return [np.stack(parts, axis=1) for parts in zip(*ends, strict=True)]


def test_a_method_is_shown_examples_of_the_task_that_has_ended():
    stream = numbered((11, 3, 8))
    ((*tables,),), _ = shown(stream, examples=5)
    for task, (table, low, high) in enumerate(zip(tables, (0, 11, 14), (11, 14, 22), strict=True)):
        count = min(5, high - low)
        np.testing.assert_array_equal(table[:, WEIGHT], np.arange(5) < count)
        np.testing.assert_array_equal(table[:, TASK], task)
        real = table[:count]
        check_examples(real)
        assert len(set(real[:, EXAMPLE])) == count, "without replacement"
        assert low <= real[:, EXAMPLE].min() <= real[:, EXAMPLE].max() < high


def test_a_method_is_shown_examples_of_all_tasks_of_a_joint_stream():
    ((table,),), _ = shown(numbered((11, 3, 8)).shuffled(), examples=30)
    real = table[:22]
    np.testing.assert_array_equal(table[:, WEIGHT], np.arange(30) < 22)
    np.testing.assert_array_equal(np.sort(real[:, EXAMPLE]), np.arange(22))
    np.testing.assert_array_equal(real[:, TASK], np.searchsorted([11, 14], real[:, EXAMPLE], side="right"))
    check_examples(real)


def test_what_a_method_is_shown_depends_on_the_seed_alone():
    stream = numbered((11, 3, 8))
    alone = [shown(stream, 5, [seed]) for seed in (0, 1)]
    assert identical(shown(stream, 5, chunk=1), alone[0])
    assert identical(shown(stream, 5, chunk=1, epochs=2), shown(stream, 5, epochs=2))
    assert identical(shown(stream, 5, [0, 1]), [np.concatenate(parts) for parts in zip(*alone, strict=True)])
    assert not identical(alone[0][0], alone[1][0])
    keys = np.concatenate([key[0] for _, key in alone])
    assert len({tuple(key) for key in keys.tolist()}) == 6, "each end has a key of its own"
    *_, middle, _, _, _ = (s.kept() for s in learn(tally(stream), [stream], [0], batch=4, chunk=1))
    assert (middle.phase, middle.event) == (2, "evaluated")
    resumed, whole = (run(learn(tally(stream), [stream], [0], batch=4, start=start)) for start in (middle, None))
    assert identical(resumed.state, whole.state)


# What is measured


def test_what_a_step_says_of_itself_is_handed_out_chunk_by_chunk():
    stream = numbered((10, 5))
    snapshots = list(learn(tally(stream), [stream] * 2, [0, 1], batch=2, chunk=3))
    assert snapshots[0].scalars == {}
    chunks = [snapshot.scalars for snapshot in snapshots if snapshot.event == "trained"]
    for scalars, size in zip(chunks, (3, 2, 3), strict=True):
        assert {name: values.shape for name, values in scalars.items()} == dict.fromkeys(
            ("loss", "first", "count"), (2, size)
        )
        assert not scalars["loss"].any()
    assert snapshots[-1].scalars is chunks[-1]
    first, count = (np.concatenate([scalars[name] for scalars in chunks], axis=1) for name in ("first", "count"))
    assert np.issubdtype(count.dtype, np.integer)
    for seed in range(2):
        np.testing.assert_array_equal(first[seed], given(snapshots[-1], seed)[::2, EXAMPLE])
        np.testing.assert_array_equal(count[seed], 2 * np.arange(8))


def test_snapshots_come_after_each_chunk_and_each_evaluation():
    stream = numbered((10, 5))
    seen = [(s.event, s.phase, s.step) for s in learn(tally(stream), [stream], [0], batch=2, chunk=3)]
    assert seen == [
        ("compiled", 0, 0),
        ("trained", 0, 3),
        ("trained", 0, 5),
        ("evaluated", 1, 0),
        ("trained", 1, 3),
        ("evaluated", 2, 0),
    ]


@pytest.mark.parametrize("evaluate_all", [False, True])
def test_accuracy_counts_each_test_example_once(evaluate_all):
    sizes = (4, TEST_BATCH + 500, TEST_BATCH)
    share = [len(range(0, size, CLASSES)) / size for size in sizes]  # always class 0
    stream = numbered((4, 4, 4), tests=sizes)
    snapshots = list(learn(tally(stream), [stream], [0], batch=4, evaluate_all=evaluate_all))
    expected = np.tile(share, (3, 1))
    np.testing.assert_array_equal(
        snapshots[-1].accuracy[0], expected if evaluate_all else np.where(np.tri(3), expected, np.nan)
    )
    np.testing.assert_array_equal(snapshots[-1].initial[0], share if evaluate_all else np.full(3, np.nan))
    assert np.isnan(snapshots[0].accuracy).all(), "what was handed out is not changed later"
    joint = run(learn(tally(stream), [stream.shuffled()], [0], batch=4, evaluate_all=evaluate_all))
    np.testing.assert_array_equal(joint.accuracy, [[share]])


def test_seeds_at_once_are_each_tested_on_their_own_examples():
    few, many = numbered((4,), tests=(3,)), numbered((4,), tests=(8,))
    for streams in ([few, many], [many, few]):
        with contextlib.suppress(Invalid):  # to refuse them would be right as well
            end = run(learn(tally(few), streams, [0, 1], batch=4))
            share = [len(range(0, size, CLASSES)) / size for size in (len(s[0].test) for s in streams)]
            np.testing.assert_array_equal(end.accuracy[:, 0, 0], share)


def test_routing_is_recorded_after_each_phase():
    spec = Spec((2, 3), 3, 3)
    network = routing_network(spec, dense(4), experts=[5, 1], k=[2, 1])
    end = run(learn(Tally(network, 200), [STREAM], [0], batch=20))
    assert [logits.shape for logits in end.logits] == [(1, 3, 3, 5)]  # where there is one expert, nothing is routed
    assert not end.logits[0].any()
    np.testing.assert_allclose(end.gates[0].sum(axis=-1), 1, rtol=1e-6)
    assert ((end.gates[0] > 0).sum(axis=-1) == 2).all()
    start = next(learn(Tally(network, 200), [STREAM], [0], batch=20))
    assert np.isnan(start.logits[0]).all()


@pytest.mark.parametrize(("inputs", "minibatches", "tested"), [(0, 1, 1), (1, 1, 1), (25, 2, 25), (10**6, 16, 32)])
def test_large_inputs_are_laid_out_a_few_at_a_time(inputs, minibatches, tested, monkeypatch):
    method, sizes, correct = make(("finetune", "shared_bottom")), set(), evaluation._correct
    whole = run(learn(method, [STREAM], [0], **OPTIONS))
    monkeypatch.setattr(evaluation, "ROOM", inputs * 6 * 4)  # an input has 6 numbers
    monkeypatch.setattr(evaluation, "_correct", lambda *given: sizes.add(given[-1].size) or correct(*given))
    snapshots = list(learn(method, [STREAM], [0], **OPTIONS))
    assert next(s.step for s in snapshots if s.event == "trained") == minibatches
    assert sizes == {tested}
    np.testing.assert_array_equal(snapshots[-1].accuracy, whole.accuracy)
    assert identical(snapshots[-1].state, whole.state)


# What it compiles


KINDS = {
    "finetune": finetune,
    "replay": lambda network: replay(network, reservoir(29, 5)),
    "cotraining": lambda network: cotraining(replay(network, reservoir(29, 5))),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("network", ["dense", "routed"])
def test_no_step_copies_weights_or_memory(kind, network, monkeypatch):
    """The shapes below are nothing else's."""
    stream = toy(tasks=4, classes=3, shape=(13,))
    if network == "dense":
        made = shared_bottom(stream.spec, (17, 19, 23))
        shapes = {"1,13,17", "1,17,19", "1,19,23", "4,3,23"}
    else:
        made = routing_network(stream.spec, [dense(17), dense(19)], experts=11, k=2)
        shapes = {"11,17,13", "11,19,17", "4,3,19"}
    texts, advance = [], steps.compiled()

    def look(chunk, state):
        texts.append(advance.lower(chunk, state).compile().compiled.as_text())
        return advance(chunk, state)

    monkeypatch.setattr(engine, "compiled", lambda: look)
    next(learn(kind(made), [stream], [0], batch=4))
    assert {shape for shape in shapes if f"f32[{shape}]" in texts[0]} == shapes
    copied = set(re.findall(r"= f32\[([\d,]+)\]\S* copy\(", texts[0]))
    assert not copied & (shapes | {"29,13"})


@pytest.mark.parametrize(("known", "taken"), [(True, {"compiler_options": steps.WIDE}), (False, {})])
def test_the_compiler_is_given_the_options_that_it_knows(known, taken, monkeypatch):
    given, real = [], eqx.filter_jit
    monkeypatch.setattr(eqx, "filter_jit", lambda f, donate, **options: given.append(options) or real(f, donate=donate))
    if not known:
        monkeypatch.setattr(steps, "WIDE", {"xla_cpu_no_such_option": 512})
    fresh = functools.cache(steps.compiled.__wrapped__)
    for module in (engine, steps):
        monkeypatch.setattr(module, "compiled", fresh)
    stream = toy()
    *_, last = learn(finetune(shared_bottom(stream.spec)), [stream], [0])
    assert given == [taken]
    assert last.phase == len(stream)


# How it fails


def test_a_run_that_diverges_says_where():
    with pytest.raises(Diverged) as error:
        run(learn(make(("finetune", "shared_bottom"), lr=1e30), [STREAM], [0], **OPTIONS))
    assert (error.value.seed, error.value.task) == (0, 0)
    assert 1 <= error.value.step <= 3
    assert not np.isfinite(error.value.loss)
    assert f"task 1, step {error.value.step + 1} (seed 0)" in str(error.value)


def test_the_first_loss_that_is_no_number_is_found():
    healthy, poisoned = numbered((6, 9)), numbered((6, 9))
    poisoned[1].train.x[4] = POISON
    order = given(run(learn(tally(healthy), [healthy], [8], batch=2, chunk=3)))[6:, EXAMPLE]
    with pytest.raises(Diverged) as error:
        run(learn(tally(healthy), [healthy, poisoned], [7, 8], batch=2, chunk=3))
    step = list(order).index(6 + 4) // 2
    assert (error.value.seed, error.value.task, error.value.step) == (8, 1, step)
    assert f"task 2, step {step + 1} (seed 8)" in str(error.value)


@pytest.mark.parametrize("field", ["batch", "epochs", "chunk"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_sizes_are_whole_numbers_of_at_least_one(field, value):
    stream = numbered((4,))
    with pytest.raises(Invalid, match=f"^{field}: {value} is not valid"):
        run(learn(tally(stream), [stream], [0], **{field: value}))


def test_there_is_a_seed_for_each_stream():
    stream = numbered((4,))
    for streams, seeds in (([stream], [0, 1]), ([stream, stream], [0]), ([], [])):
        with pytest.raises(Invalid, match=r"^seeds: "):
            run(learn(tally(stream), streams, seeds))


@pytest.mark.parametrize("other", [toy(tasks=2), toy(classes=4), toy(shape=(3, 2))], ids=["tasks", "classes", "shape"])
def test_a_stream_must_be_what_the_network_was_made_for(other):
    method = Tally(shared_bottom(STREAM.spec, (2,)), 10)
    for streams in ([other], [STREAM, other]):
        with pytest.raises(Invalid, match=r"^stream: ") as error:
            run(learn(method, streams, range(len(streams))))
        assert error.value.value == other.spec


def test_streams_at_once_are_joint_or_not():
    stream = numbered((4, 4))
    with pytest.raises(Invalid):
        run(learn(tally(stream), [stream, stream.shuffled()], [0, 1], batch=4))


def test_a_step_that_breaks_the_parameters_is_noticed_even_if_it_is_the_last():
    x, y = np.full((10, 4), 1e3, np.float32), np.arange(10) % 2
    stream = Stream.from_arrays([(x, y, x, y)])
    method = finetune(shared_bottom(stream.spec, (16,)), lr=3e38)
    with pytest.raises(Diverged, match="task 1, step 1"):
        run(learn(method, [stream], [0], batch=10))
