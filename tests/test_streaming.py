"""Streams whose examples come in batches: the engine learns the same from them, and reads no more than it needs."""

import itertools
import re
import runpy
import threading
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import STREAM, identical, leaves, make, run, toy
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from test_engine import EXAMPLE, WEIGHT, given, numbered, tally

import cotrain
from cotrain import engine
from cotrain.data.feed import Feed, Room
from cotrain.data.stream import Stream
from cotrain.engine import learn, steps_of
from cotrain.errors import Invalid
from cotrain.evaluation import TEST_BATCH

BATCH = 6
COTRAINING, REPLAY = ("cotraining", "routing_network"), ("replay", "shared_bottom")


class Told:
    """A function that returns examples in batches of these sizes, over and over, in another order at each call."""

    def __init__(self, examples, orders, sizes):
        self.examples, self.orders, self.sizes, self.calls = examples, orders, sizes, 0

    def __call__(self):
        order = self.orders[self.calls % len(self.orders)]
        self.calls += 1
        return self.cut(order)

    def cut(self, order):
        start = 0
        for size in itertools.cycle(self.sizes):
            if start < len(order):
                yield self.examples.take(order[start : start + size])
                start += size
            else:
                return


def told(stream, seed, sizes, epochs=1, batch=BATCH):
    """The same tasks as functions, which return the examples in the order in which arrays are learned."""
    tasks = []
    for task, (train, test) in enumerate(stream):
        feed = Feed([train], [task], seed, task, batch, epochs)
        orders = [feed.order(epoch)[feed.order(epoch) >= 0] for epoch in range(epochs)]
        tasks.append((Told(train, orders, sizes), Told(test, [np.arange(len(test))], sizes)))
    return Stream.from_tasks(tasks, stream.spec.widths or stream.spec.classes, stream.spec.shape)


def seen(snapshots):
    """All that is handed out on the way; the last has the state too."""
    found = []
    for now in snapshots:
        measured = (now.scalars, now.accuracy, now.initial, now.logits, now.gates, now.sample)
        found.append(((now.event, now.phase, now.step), measured))
    return found, now.state


def check_equal(one, other):
    (found, state), (expected, whole) = seen(one), seen(other)
    assert [where for where, _ in found] == [where for where, _ in expected]
    assert identical([what for _, what in found], [what for _, what in expected])
    assert identical(state, whole)


def readers():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reader")]


# The same is learned


@settings(max_examples=12)
@drawn(
    st.sampled_from([COTRAINING, REPLAY]),
    st.lists(st.integers(0, 25), min_size=1, max_size=5).filter(any),
    st.sampled_from([1, 3]),
    st.integers(1, 20),
    st.integers(0, 5),
)
def test_batches_of_any_sizes_are_learned_as_arrays_are(case, sizes, epochs, chunk, seed):
    method, options = make(case), {"batch": BATCH, "epochs": epochs, "chunk": chunk}
    check_equal(
        learn(method, [told(STREAM, seed, sizes, epochs)], [seed], **options),
        learn(method, [STREAM], [seed], **options),
    )


def test_several_seeds_learn_from_batches_at_once():
    method, seeds, options = make(COTRAINING), [3, 5], {"batch": BATCH, "epochs": 3, "chunk": 9}
    streams = [told(STREAM, seed, sizes, epochs=3) for seed, sizes in zip(seeds, ([7], [1, 30]), strict=True)]
    check_equal(
        learn(method, streams, seeds, evaluate_all=True, **options),
        learn(method, [STREAM] * 2, seeds, evaluate_all=True, **options),
    )
    assert readers() == []


def test_a_chunk_is_as_large_as_a_whole_phase_where_that_is_not_known():
    method = make(REPLAY)
    stream = told(STREAM, 0, [11])
    assert steps_of(stream, BATCH, 1) == [None] * 3
    check_equal(learn(method, [stream], [0], batch=BATCH), learn(method, [STREAM], [0], batch=BATCH))


def test_a_run_goes_on_from_wherever_it_was():
    method, options = make(COTRAINING), {"batch": BATCH, "epochs": 3, "chunk": 8}
    starts = [now.kept() for now in learn(method, [told(STREAM, 2, [5, 9], 3)], [2], **options)]
    assert [now.event for now in starts].count("trained") == 9
    for start in starts:
        end = run(learn(method, [told(STREAM, 2, [13], 3)], [2], start=start, **options))
        assert identical((end.state, end.accuracy), (starts[-1].state, starts[-1].accuracy))


def told_of(snapshot):
    """What a tally of two seeds was given, and what it was shown at the end of tasks; padding may be anything."""
    tables = [given(snapshot, seed) for seed in range(2)]
    return [table[table[:, WEIGHT] > 0] for table in tables], snapshot.state.some, snapshot.state.key


def test_what_is_kept_for_the_end_of_a_task_is_the_same_after_going_on():
    stream, options = numbered((11, 3, 8)), {"batch": 4, "epochs": 2}
    method = tally(stream, examples=5)
    whole = run(learn(method, [stream] * 2, [3, 4], chunk=2, **options))
    for start in [now.kept() for now in learn(method, [stream] * 2, [3, 4], chunk=1, **options)]:
        streams = [told(stream, seed, [5], epochs=2, batch=4) for seed in (3, 4)]
        end = run(learn(method, streams, [3, 4], start=start, chunk=3, **options))
        assert identical(told_of(end), told_of(whole))
    assert start.phase == 3


def test_a_run_does_not_go_on_from_where_there_is_nothing():
    method, options, short = make(REPLAY), {"batch": BATCH, "chunk": 4}, toy(examples=9)
    start = next(now.kept() for now in learn(method, [STREAM], [0], **options) if now.step == 4)
    for stream in (short, told(short, 0, [7])):
        with pytest.raises(
            Invalid, match=r"^stream: '2 minibatches' is not valid; the run that goes on here has had 4"
        ):
            run(learn(method, [stream], [0], start=start, **options))
    assert readers() == []


# No more is read than is needed


def test_one_chunk_is_read_ahead_and_no_more():
    examples, batch, chunk = 7, 5, 3
    step, read, changed = chunk * batch, [0], threading.Condition()

    def begin():
        for start in range(0, 20 * examples, examples):
            with changed:
                read[0] += examples
                changed.notify()
            numbers = np.arange(start, start + examples)
            yield numbers[:, None].astype(np.float32), numbers % 3

    tests = np.zeros((4, 1)), np.zeros(4, int)
    stream = Stream.from_tasks([(begin, tests)], 3, (1,))
    snapshots = learn(tally(stream), [stream], [0], batch=batch, chunk=chunk)
    assert next(snapshots).event == "compiled"
    assert read == [0]
    for now in snapshots:
        learned = now.step * batch
        if now.event == "trained":
            with changed:
                ahead = min(learned + step, 20 * examples)
                assert changed.wait_for(lambda least=ahead: read[0] >= least, timeout=60)
        assert read[0] <= learned + step + examples or now.event == "evaluated"
    assert read == [20 * examples]
    table = given(now)
    np.testing.assert_array_equal(table[table[:, WEIGHT] > 0][:, EXAMPLE], np.arange(20 * examples))


def test_no_more_than_two_chunks_are_in_memory(monkeypatch):
    rooms = []

    class Counted(Room):
        def __init__(self):
            super().__init__()
            rooms.append(self)

    monkeypatch.setattr(engine, "Room", Counted)
    stream = numbered((400, 300))
    run(learn(tally(stream, room=900), [told(stream, 0, [9], batch=5)], [0], batch=5, chunk=20))
    sizes = sorted(len(room.bytes) for room in rooms)
    assert len(sizes) == 3
    assert sizes[:2] == [20 * 5 * 4 + 64] * 2, "one is learned while the other is laid out"


def test_a_run_that_is_left_early_leaves_nothing_behind():
    closed = []

    def begin():
        try:
            for start in range(0, 1000, 5):
                yield np.full((5, 1), start, np.float32), np.arange(5) % 3
        finally:
            closed.append(0)

    stream = Stream.from_tasks([(begin, (np.zeros((4, 1)), np.zeros(4, int)))], 3, (1,))
    snapshots = learn(tally(stream), [stream], [0], batch=5, chunk=2)
    assert [next(snapshots).event for _ in range(3)] == ["compiled", "trained", "trained"]
    assert len(readers()) == 1
    snapshots.close()
    assert readers() == []
    assert closed == [0]


# What goes wrong on the way


def steady(count):
    """Batches of which nothing is wrong."""
    return [(np.full((4, 1), number, np.float32), np.arange(4) % 3) for number in range(count)]


def fails():
    yield from steady(5)
    raise OSError("the disk is gone")


def ends():
    yield from steady(5)
    next(iter(()))


X, Y = steady(1)[0]
BROKEN = {
    "a generator that fails": (fails, OSError, "the disk is gone"),
    "a generator that ends by mistake": (ends, RuntimeError, "StopIteration"),
    "no examples": (list, Invalid, "task 1 train: 'no examples' is not valid"),
    "another shape": (lambda: [*steady(5), (X[:, :, None], Y)], Invalid, "task 1 train, batch 5 inputs: (1, 1) is not"),
    "a wrong label": (lambda: [*steady(5), (X, Y + 1)], Invalid, "task 1 train, batch 5 labels: 3 is not valid"),
    "no label": (lambda: [*steady(5), (X, Y / 2)], Invalid, "task 1 train, batch 5 labels: 'float64[4]' is not valid"),
    "no numbers": (lambda: [*steady(5), (X.astype(str), Y)], Invalid, "task 1 train, batch 5 inputs: 'str1024' is not"),
    "not finite": (lambda: [*steady(5), (X / 0, Y)], Invalid, "task 1 train, batch 5, example 0: nan is not valid"),
    "no pair": (lambda: [*steady(5), X], Invalid, "task 1 train, batch 5: 'ndarray' is not valid; give pairs"),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
@pytest.mark.parametrize(("train", "error", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_a_stream_is_raised_where_it_is_learned(train, error, message):
    stream = Stream.from_tasks([(lambda: steady(3), (X, Y)), (train, (X, Y))], 3, (1,))
    snapshots, events = learn(tally(stream), [stream], [0], batch=4, chunk=2), []
    with pytest.raises(error) as raised:
        events.extend((now.event, now.phase, now.step) for now in snapshots)
    assert message in str(raised.value)
    assert isinstance(raised.value, Invalid) or raised.value.__notes__ == ["task 1 train: this came after 5 batches"]
    assert readers() == []
    assert events[:4] == [("compiled", 0, 0), ("trained", 0, 2), ("trained", 0, 3), ("evaluated", 1, 0)]
    assert events[4:] in ([], [("trained", 1, 2), ("trained", 1, 4)]), "what came before was learned"


def test_what_is_wrong_with_a_test_is_raised_too():
    for test, error in ((list, Invalid), (lambda: [(X, Y + 1)], Invalid), (fails, OSError)):
        stream = Stream.from_tasks([(lambda: steady(3), test)], 3, (1,))
        with pytest.raises(error):
            run(learn(tally(stream), [stream], [0], batch=4))
        assert readers() == []


def test_a_generator_is_learned_once():
    def stream(seed):
        return Stream.from_tasks([(iter(steady(9)), (X, Y))], 3)

    method = cotrain.finetune(cotrain.shared_bottom(stream(0).spec, (2,)))
    assert len(cotrain.run(method, stream, seeds=2, batch=4)) == 2
    with pytest.raises(Invalid, match=r"^task 0 train: 'an iterator' is not valid; it can be read only once"):
        cotrain.run(method, stream(0), seeds=2, batch=4)
    with pytest.raises(Invalid, match=r"^task 0 train: 'an iterator' is not valid; it can be read only once"):
        cotrain.run(method, stream, epochs=2, batch=4)


def test_seeds_at_once_must_have_equally_many_minibatches():
    streams = [told(numbered((count,)), 0, [5], batch=4) for count in (20, 21)]
    with pytest.raises(Invalid, match=r"^streams: \[None, 5\] is not valid|^streams: \[5, None\] is not valid"):
        run(learn(tally(streams[0]), streams, [0, 0], batch=4, chunk=1))


# Tests


@pytest.mark.parametrize("sizes", [(4, TEST_BATCH + 500, TEST_BATCH), (1, 2, 3)])
def test_tests_may_be_functions(sizes):
    share = [len(range(0, size, 3)) / size for size in sizes]  # always class 0
    stream = numbered((4, 4, 4), tests=sizes)
    end = run(learn(tally(stream), [told(stream, 0, [700, 3], batch=4)], [0], batch=4, evaluate_all=True))
    np.testing.assert_array_equal(end.accuracy[0], np.tile(share, (3, 1)))
    np.testing.assert_array_equal(end.initial[0], share)


def test_tests_of_seeds_at_once_may_be_functions_of_different_sizes():
    some = [numbered((4,), tests=(size,)) for size in (5, TEST_BATCH + 1, 8)]
    streams = [some[0], *(told(stream, 0, [600], batch=4) for stream in some[1:])]
    streams[0] = Stream.from_tasks([(streams[1][0].train.open, some[0][0].test.take(np.arange(5)))], 3, (1,))
    end = run(learn(tally(streams[0]), streams, [0, 1, 2], batch=4))
    np.testing.assert_array_equal(end.accuracy[:, 0, 0], [2 / 5, 667 / (TEST_BATCH + 1), 3 / 8])


def test_gates_of_a_router_that_reads_its_input_are_those_of_the_first_examples():
    method = make(("replay", "by_input"))
    whole, end = (
        run(learn(method, [stream], [0], batch=BATCH, chunk=20)) for stream in (STREAM, told(STREAM, 0, [7, 50]))
    )
    assert not np.isnan(whole.gates[0][:, -1]).any()
    assert identical((end.gates, end.accuracy, end.state), (whole.gates, whole.accuracy, whole.state))


# Tasks with different numbers of classes


def arrays_of(stream, task):
    return tuple(a for part in stream[task] for a in part.take(np.arange(len(part))))


def with_heads(parameters, change):
    """The same parameters with other heads."""
    return eqx.tree_at(lambda parameters: parameters.heads, parameters, jax.tree.map(change, parameters.heads))


def test_a_task_learns_as_with_a_head_of_its_own_width():
    first, second = arrays_of(toy(classes=2, seed=1), 0), arrays_of(toy(classes=5, seed=2), 0)
    both = Stream.from_arrays([first, second], classes=[2, 5])
    exact = Stream.from_arrays([first, first], classes=2)
    options, kept, losses = {"batch": BATCH, "epochs": 3, "chunk": 20}, [], []
    start = None
    for stream in (both, exact):
        method = cotrain.finetune(cotrain.shared_bottom(stream.spec, (8,)), lr=0.2)
        snapshots = learn(method, [stream], [0], **options)
        now = next(snapshots).kept()
        if start is None:
            start = now.state.learner.parameters
        else:  # it begins with as much of the same heads as it has
            learner = now.state.learner._replace(parameters=with_heads(start, lambda a: a[:, :, :2] + 0))
            now = replace(now, state=now.state._replace(learner=learner))
        snapshots = learn(method, [stream], [0], start=now, **options)
        taken = [now.kept() for now in itertools.takewhile(lambda now: now.phase < 1 or now.step == 0, snapshots)]
        losses.append(np.concatenate([now.scalars["loss"] for now in taken if now.event == "trained"], axis=1))
        kept.append(taken[-1])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][0, -1] < losses[0][0, 0] / 2
    assert kept[0].accuracy[0, 0, 0] == kept[1].accuracy[0, 0, 0] > 0.9
    wide, narrow = (now.state.learner.parameters for now in kept)
    for one, other in zip(leaves(with_heads(wide, lambda a: a[:, :, :2])), leaves(narrow), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    unused = [with_heads(parameters, lambda a: a[:, 0, 2:]).heads for parameters in (start, wide)]
    assert identical(*unused), "of classes that there are not, nothing is learned"


def test_predictions_are_among_a_tasks_classes():
    tasks = [arrays_of(toy(classes=classes, seed=classes), 0) for classes in (2, 3, 5)]
    stream = Stream.from_arrays(tasks, classes=[2, 3, 5])
    network = cotrain.routing_network(stream.spec, cotrain.dense(12), layers=1, experts=4, k=2)
    learner = cotrain.Learner(cotrain.finetune(network, lr=0.2))
    bias = learner.state.learner.parameters.heads.bias
    tempting = bias.at[:, 0, 2:].set(100.0).at[:, 1, 3:].set(100.0)  # classes that there are not
    learner.state = eqx.tree_at(lambda state: state.learner.parameters.heads.bias, learner.state, tempting)
    for task, classes in enumerate((2, 3, 5)):
        x = tasks[task][2]
        found = learner.probabilities(x, task)
        assert found.shape == (len(x), classes)
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
        np.testing.assert_array_equal(learner.predict(x, task), found.argmax(axis=1))
    options = {"batch": BATCH, "epochs": 5, "evaluate_all": True}
    end, whole = (run(learn(learner.method, [some], [0], **options)) for some in (told(stream, 0, [7], 5), stream))
    assert (np.diagonal(end.accuracy[0]) > 0.9).all()
    assert identical((end.state, end.accuracy, end.initial), (whole.state, whole.accuracy, whole.initial))


# Images


def test_images_with_channels_are_learned_by_convolutions():
    draws = np.random.default_rng(0)

    def images(size):
        """The brightest of three channels is the label."""
        x, y = draws.integers(0, 100, (size, 6, 5, 3), np.uint8), np.arange(size) % 3
        x[np.arange(size), :, :, y] += 120
        return x, y

    tasks = [(images(60), images(30)) for _ in range(2)]
    arrays = Stream.from_tasks(tasks, 3)
    assert arrays.spec.shape == (6, 5, 3)
    experts = [cotrain.convolution(channels=8), cotrain.dense(8)]
    network = cotrain.routing_network(arrays.spec, experts, experts=3, k=2)
    method, options = cotrain.finetune(network, lr=0.1), {"batch": BATCH, "epochs": 5}
    end = run(learn(method, [arrays], [0], **options))
    assert end.accuracy[0, 1, 1] > 0.9
    assert identical(end.state, run(learn(method, [told(arrays, 0, [16], 5)], [0], **options)).state)


# All together


def test_a_stream_of_functions_is_run_as_any_other(tmp_path):
    method, out = make(REPLAY).method, tmp_path / "run"
    options = {"batch": BATCH, "epochs": 3, "chunk": 8, "seeds": [1, 2]}
    results = cotrain.run(method, lambda seed: told(STREAM, seed, [10], 3), out=out, **options)
    for result, expected in zip(results, cotrain.run(method, STREAM, **options), strict=True):
        np.testing.assert_array_equal(result.accuracy, expected.accuracy)
    assert sorted(path.name for path in out.iterdir()) == ["seed-1", "seed-2"]


def test_the_example_of_functions_runs(capsys):
    runpy.run_path(str(Path(__file__).parent.parent / "examples" / "own_stream.py"))
    accuracy = re.search(r"acc (\d\.\d+)", capsys.readouterr().out)
    assert accuracy is not None
    assert 0.85 < float(accuracy[1]) <= 1
