"""Minibatches of a phase, however its examples come; samples of them; and what is made ahead in a thread."""

import threading

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from cotrain.data.ahead import ahead
from cotrain.data.examples import Batches, Examples
from cotrain.data.feed import Cut, Feed, Room, feed
from cotrain.data.sample import NEVER, Sample
from cotrain.data.sources import source_of
from cotrain.data.stream import Spec, Stream
from cotrain.errors import Invalid

CLASSES = 3


def numbered(count, start=0, kind=np.float32):
    """Examples whose inputs are their numbers."""
    numbers = np.arange(start, start + count)
    return np.stack([numbers, -numbers], axis=1).astype(kind), numbers % CLASSES


def batches(sizes, passes=None):
    """Numbered examples in batches of these sizes; `passes` counts how often they are begun."""

    def begin():
        if passes is not None:
            passes.append(len(passes))
        ends = np.cumsum([0, *sizes])
        return (numbered(size, start) for start, size in zip(ends, sizes, strict=False))

    return Batches(begin, (2,), CLASSES)


def rows(batch, count):
    """The first minibatches, as numbers of their examples, with None for padding."""
    x, y, _, weight = (np.asarray(part)[:count] for part in batch)
    assert np.isin(weight, (0, 1)).all()
    real = weight > 0
    np.testing.assert_array_equal(x[real][:, 1], -x[real][:, 0])
    np.testing.assert_array_equal(y[real], x[real][:, 0] % CLASSES)
    return [[int(n) if w else None for n, w in zip(*part, strict=True)] for part in zip(x[..., 0], weight, strict=True)]


def walked(made, chunks, size):
    """All minibatches, so many at a time, and when it was known how many there are."""
    found, known, room = [], [], Room()
    for chunk in chunks:
        batch = made.minibatches(len(found), chunk, size, room)
        assert batch.weight.shape == (size, np.shape(batch.y)[1])
        assert not np.asarray(batch.weight)[chunk:].any()
        found += rows(batch, min(chunk, (made.steps or len(found) + chunk) - len(found)))
        known.append(made.steps)
        if made.steps is not None and len(found) >= made.steps:
            break
    return found, known


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)
chunks = st.lists(st.integers(1, 6), min_size=1, max_size=5)


# Examples that come in batches of other sizes


@given(sizes, st.integers(1, 7), st.integers(1, 3), chunks)
def test_minibatches_are_cut_from_batches_of_any_sizes(sizes, batch, epochs, chunks):
    total, passes = sum(sizes), []
    numbers = [*range(total), *[None] * (-total % batch)]
    expected = [numbers[i : i + batch] for i in range(0, len(numbers), batch)] * epochs
    found, known = walked(Cut(batches(sizes, passes), 0, batch, epochs), chunks * len(expected), 6)
    assert found == expected
    assert known == [None] * (len(known) - 1) + [len(expected)], "the last ones are known to be so"
    assert passes == list(range(epochs))


@given(sizes, st.integers(1, 7), st.integers(1, 3), st.integers(1, 6), st.data())
def test_minibatches_are_the_same_when_the_first_are_left_out(sizes, batch, epochs, chunk, data):
    found, _ = walked(Cut(batches(sizes), 0, batch, epochs), [chunk] * 100, 6)
    start = data.draw(st.integers(0, len(found)))
    cut = Cut(batches(sizes), 0, batch, epochs)
    some = rows(cut.minibatches(start, chunk, 6, Room()), chunk)
    left = found[start : start + chunk]
    assert some[: len(left)] == left
    assert (cut.steps is None) == (start + chunk < len(found))
    assert cut.steps in (None, len(found))


def test_nothing_is_read_before_it_is_needed():
    passes, read = [], []

    def begin():
        passes.append(0)
        for start in range(0, 40, 4):
            read.append(start)
            yield numbered(4, start)

    cut = Cut(Batches(begin, (2,), CLASSES), 0, 3, 2)
    assert cut.like(5, Room()).x.shape == (5, 3, 2)
    assert not np.any(cut.like(5, np.empty).weight)
    assert passes == []
    cut.minibatches(0, 1, 5, Room())
    assert read == [0]
    cut.minibatches(1, 4, 5, Room())  # 15 examples
    assert read == [0, 4, 8, 12]
    cut.minibatches(5, 8, 8, Room())
    assert passes == [0], "the last one of a pass is not full, so that the next is not needed"
    cut.minibatches(13, 1, 5, Room())
    assert passes == [0, 0]


def test_a_batch_may_be_written_over_when_the_next_is_asked_for():
    def begin():
        x, y = numbered(4)
        for start in (0, 4, 8):
            x[:], y[:] = numbered(4, start)
            yield x, y
            x[:], y[:] = -7, 0

    found, _ = walked(Cut(Batches(begin, (2,), CLASSES), 0, 5, 1), [2] * 9, 2)
    assert [n for minibatch in found for n in minibatch] == [*range(12), None, None, None]
    source = Stream.from_tasks([(begin(), list)], CLASSES)[0].train
    found, _ = walked(Cut(source, 0, 5, 1), [2] * 9, 2)
    assert [n for minibatch in found for n in minibatch] == [*range(12), None, None, None]


def test_every_pass_has_examples():
    once = iter([numbered(4)])
    for source in (batches([]), batches([0, 0]), Batches(lambda: once, (2,), CLASSES)):
        with pytest.raises(Invalid, match=r"^batches: 'no examples' is not valid; give at least one"):
            walked(Cut(source, 0, 3, 2), [1] * 9, 1)


# Examples that can be indexed


class Asked:
    """A data set that notes what it is asked for."""

    def __init__(self, count):
        self.x, self.y = numbered(count)
        self.asked = []

    def __len__(self):
        return len(self.y)

    def __getitem__(self, place):
        self.asked.append(place)
        return self.x[place], self.y[place]


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 3), chunks)
def test_every_example_comes_once_an_epoch(count, batch, epochs, chunks):
    made = Feed([Examples(*numbered(count))], [0], 5, 0, batch, epochs)
    found, known = walked(made, chunks * made.steps, 6)
    assert set(known) == {len(found)} == {epochs * -(-count // batch)}
    flat = [n for minibatch in found for n in minibatch]
    for epoch in np.split(np.array(flat, object), epochs):
        assert sorted(n for n in epoch if n is not None) == list(range(count))
        assert all(n is None for n in epoch[count:]), "padding comes last"


def test_only_what_is_learned_is_read():
    items = Asked(40)
    made = Feed([source_of(items, (2,), CLASSES, "items")], [0], 0, 0, 4, 2)
    made.minibatches(0, 3, 20, Room())
    assert len(items.asked) == 12
    made.like(20, Room())
    assert len(items.asked) == 16, "to know what they are like, a minibatch will do"
    walked(made, [7, 7, 6], 20)
    assert len(items.asked) == 16 + 80


def test_joint_tasks_may_come_one_by_one_but_not_in_batches():
    shape, tests = (2,), numbered(4)
    items, arrays = Asked(7), numbered(4, start=7)
    stream = Stream.from_tasks([(items, tests), (arrays, tests)], CLASSES, shape)
    found, _ = walked(feed(stream.shuffled(), 0, 0, 3, 1), [2, 2], 2)
    assert sorted(n for minibatch in found for n in minibatch if n is not None) == list(range(11))
    made = feed(stream.shuffled(), 0, 0, 11, 1).minibatches(0, 1, 20, Room())
    assert np.shape(made.task) == (20, 11)
    np.testing.assert_array_equal(made.task[0], np.asarray(made.x)[0, :, 0] >= 7)
    mixed = Stream.from_tasks([(arrays, tests), (lambda: [arrays], tests)], CLASSES, shape)
    assert [type(feed(mixed, phase, 0, 3, 1)) for phase in (0, 1)] == [Feed, Cut]
    with pytest.raises(Invalid, match=r"^stream: 'joint' is not valid; tasks that come as batches cannot be shuffled"):
        feed(mixed.shuffled(), 0, 0, 3, 1)


def test_rooms_are_filled_again_and_their_arrays_are_aligned():
    room = Room()
    first = room((4, 3), np.float32)
    first[:] = 1
    second = room((2, 2), np.float64)
    assert np.shares_memory(first, second)
    for array in (first, second, room((5, 7), np.uint8)):
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous


# Samples


def sampled(made, seed, size, chunks, phase=0, kind=np.float32):
    """The sample of a phase, of the chunks that there are."""
    sample, first = Sample.empty(Spec((2,), CLASSES, 1), 1, size), 0
    while made.steps is None or first < made.steps:
        count = chunks[first % len(chunks)]
        batch = made.minibatches(first, count, max(chunks), Room())
        count = count if made.steps is None else min(count, made.steps - first)
        sample = sample.fed([batch], count, [seed], phase, first)
        first += count
    assert [part.dtype for part in sample] == [np.float32, np.int32, np.int32, np.float64]
    return sample


@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 2), st.integers(1, 9), chunks, st.integers(0, 9))
def test_a_sample_depends_on_places_alone(count, batch, epochs, size, chunks, seed):
    made = Feed([Examples(*numbered(count, kind=np.float64))], [0], seed, 0, batch, epochs)
    order = np.concatenate([made.order(epoch)[made.order(epoch) >= 0] for epoch in range(epochs)])
    passes = iter(np.split(order, epochs) * 2)

    def begin():
        now = next(passes)
        return (numbered(1, n) for n in now)

    sample = sampled(made, seed, size, chunks)
    cut = sampled(Cut(Batches(begin, (2,), CLASSES), 0, batch, epochs), seed, size, [3])
    for one, other in zip(sample, cut, strict=True):
        np.testing.assert_array_equal(one, other)
    there = sample.priority[0] < NEVER
    np.testing.assert_array_equal(there, np.arange(size) < count * epochs)
    assert (np.diff(sample.priority[0]) >= 0).all()
    kept = sample.x[0, there, 0].astype(int)
    assert np.unique(kept, return_counts=True)[1].max() <= epochs, "a place is there once at most"
    np.testing.assert_array_equal(sample.y[0, there], kept % CLASSES)
    np.testing.assert_array_equal(sample.batch(None).weight[0], there)


def test_seeds_at_once_have_the_samples_that_each_has_alone():
    feeds = [Feed([Examples(*numbered(9))], [0], seed, 0, 4, 1) for seed in (3, 4)]
    spec = Spec((2,), CLASSES, 1)
    parts = [made.minibatches(0, 3, 3, Room()) for made in feeds]
    both = Sample.empty(spec, 2, 4).fed(parts, 3, [3, 4], 1, 0)
    for i, (part, seed) in enumerate(zip(parts, (3, 4), strict=True)):
        alone = Sample.empty(spec, 1, 4).fed([part], 3, [seed], 1, 0)
        for one, other in zip(both, alone, strict=True):
            np.testing.assert_array_equal(one[i], other[0])
    assert not np.array_equal(both.priority[0], both.priority[1])
    later = Sample.empty(spec, 1, 4).fed(parts[:1], 3, [3], 2, 0)
    assert not np.array_equal(both.priority[0], later.priority[0]), "each phase has its own"


def test_each_example_is_sampled_as_often():
    runs, count, size = 3000, 9, 4
    made = Cut(batches([5, 4]), 0, 4, 1).minibatches(0, 3, 3, Room())  # in the same order for every seed
    kept = []
    for seed in range(runs):
        sample = Sample.empty(Spec((2,), CLASSES, 1), 1, size)
        for first, step in ((0, 2), (2, 1)):
            some = type(made)(*(np.asarray(part)[first : first + step] for part in made))
            sample = sample.fed([some], step, [seed], 0, first)
        kept.append(sample.x[0, :, 0])
    kept = np.array(kept, int)
    counts, share = np.bincount(kept.ravel(), minlength=count), size / count
    variance = runs * share * (1 - share) * count / (count - 1)  # drawn without replacement
    assert scipy.stats.chi2.sf(((counts - runs * share) ** 2).sum() / variance, count - 1) > 1e-4
    firsts = np.bincount(kept[:, 0], minlength=count)
    assert scipy.stats.chisquare(firsts).pvalue > 1e-4, "the first one is any of them"


def test_a_sample_of_nothing_is_empty():
    made = Feed([Examples(*numbered(9))], [0], 0, 0, 4, 1)
    sample = sampled(made, 0, 0, [2])
    assert [np.shape(part) for part in sample.batch(0)] == [(1, 0, 2), (1, 0), (1,), (1, 0)]
    assert np.shape(sample.batch(None).task) == (1, 0)


# Ahead


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def test_the_next_item_is_made_while_the_present_one_is_worked_on():
    begun = [threading.Event() for _ in range(5)]
    threads = set()

    def items():
        for number, event in enumerate(begun[:4]):
            event.set()
            threads.add(threading.current_thread().name)
            yield number

    coming = ahead(items())
    assert not any(event.is_set() for event in begun), "nothing is made before it is asked for"
    for number, item in enumerate(coming):
        assert item == number
        assert number == 3 or begun[number + 1].wait(60)
        assert not any(event.is_set() for event in begun[number + 2 :]), "one ahead, and no more"
    assert len(threads) == 1
    assert threading.current_thread().name not in threads
    assert readers() == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_goes_wrong_is_raised_in_its_turn(count):
    closed = []

    def items():
        try:
            yield from range(count)
            raise KeyError("broken")
        finally:
            closed.append(threading.current_thread().name)

    coming = ahead(items())
    assert [next(coming) for _ in range(count)] == list(range(count))
    with pytest.raises(KeyError, match="broken"):
        next(coming)
    assert len(closed) == 1
    assert readers() == []


def test_whoever_stops_early_leaves_nothing_behind():
    closed = []

    def items():
        try:
            yield from range(9)
        finally:
            closed.append(0)

    coming = ahead(items())
    assert next(coming) == 0
    assert len(readers()) == 1
    coming.close()
    assert closed == [0]
    assert readers() == []
