"""The reservoir, and rings: what they keep, what they forget, and with what probability."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import scipy.stats
from conftest import identical
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import Rings, compared

from cotrain import memory as memory_module
from cotrain.data.batch import Batch
from cotrain.data.stream import Spec
from cotrain.errors import Invalid
from cotrain.memory import Ring, below, reservoir, ring

SPEC = Spec(shape=(2,), classes=7, tasks=5)
RUNS = 20000
words = st.integers(0, 2**32 - 1)


def batch_of(numbers, weight=None):
    """A batch whose every part tells which examples it holds: number n has label n mod 7 and task n mod 5."""
    n = jnp.asarray(numbers, jnp.int32)
    x = jnp.stack([n, -n], axis=1).astype(jnp.float32)
    return Batch(x, n % 7, n % 5, jnp.ones(len(n)) if weight is None else jnp.asarray(weight, jnp.float32))


def held(memory, capacity):
    """The numbers of the examples that a memory holds, having made sure that their parts are still together."""
    size = min(int(memory.seen), capacity)
    return whole(memory.x[:size], memory.y[:size], memory.task[:size])


def whole(x, y, task):
    numbers = np.asarray(x[:, 0]).astype(int)
    np.testing.assert_array_equal(x[:, 1], -numbers)
    np.testing.assert_array_equal(y, numbers % 7)
    np.testing.assert_array_equal(task, numbers % 5)
    return numbers.tolist()


def bits_for(numbers, seed=0, picks=3):
    draws = np.random.default_rng(seed)
    place = draws.integers(0, 2**32, (len(numbers), 2), np.uint32)
    return jnp.asarray(place), jnp.asarray(draws.integers(0, 2**32, (picks, 2), np.uint32))


@functools.cache
def adding(capacity, picks):
    return jax.jit(reservoir(capacity, picks).add)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), words, words), min_size=8, max_size=8))
def test_below_is_the_product_in_whole_numbers(cases):
    bounds, high, low = zip(*cases, strict=True)
    bits = jnp.asarray(np.array([high, low], np.uint32).T)
    found = below(jnp.asarray(np.array(bounds, np.int32)), bits)
    assert found.dtype == jnp.int32
    assert found.tolist() == [(bound * ((a << 32) + b)) >> 64 for bound, a, b in cases]


def test_below_at_the_edges():
    top, bound = 2**32 - 1, 2**31 - 1
    bits = jnp.asarray(np.array([[0, 0], [top, top], [top, top], [0, top], [2**31, 0], [top, top]], np.uint32))
    bounds = jnp.asarray(np.array([5, 5, bound, bound, 10, 0], np.int32))
    assert below(bounds, bits).tolist() == [0, 4, bound - 1, 0, 5, 0]


def test_an_empty_memory_gives_nothing():
    memory = reservoir(4, 3).init(SPEC)
    assert memory.seen == 0
    assert reservoir(4, 3).sample(memory).weight.tolist() == [0, 0, 0]
    added = adding(4, 3)(memory, batch_of([1, 2], weight=[0, 0]), bits_for([1, 2]))
    assert added.seen == 0
    assert reservoir(4, 3).sample(added).weight.tolist() == [0, 0, 0]


def test_all_is_kept_until_the_memory_is_full():
    memory = reservoir(7, 3).init(SPEC)
    for start in (0, 3, 6):
        numbers = range(10 + start, 13 + start)
        memory = adding(7, 3)(memory, batch_of(numbers), bits_for(numbers, seed=start))
        if start < 6:
            assert held(memory, 7) == list(range(10, 13 + start))
            assert memory.next.weight.tolist() == [1, 1, 1]
    assert memory.seen == 9
    assert len(held(memory, 7)) == 7


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 20), st.integers(0, 2**31))
def test_a_batch_is_added_as_if_one_by_one(real, before, seed):
    capacity, numbers = 4, np.arange(100, 106)
    memory = reservoir(capacity, 3).init(SPEC)
    memory = memory._replace(x=batch_of(range(4)).x, y=jnp.arange(4), task=jnp.arange(4), seen=jnp.array(before))
    bits, picks = bits_for(numbers, seed)
    at_once = adding(capacity, 3)(memory, batch_of(numbers, real), (bits, picks))
    one_by_one = memory
    for i in range(6):
        one = batch_of(numbers[i : i + 1], real[i : i + 1])
        one_by_one = adding(capacity, 3)(one_by_one, one, (bits[i : i + 1], picks))
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(one_by_one), strict=True):
        np.testing.assert_array_equal(a, b)
    assert at_once.seen == before + sum(real)


@given(st.lists(st.booleans(), min_size=5, max_size=5), st.integers(0, 2**31))
def test_padding_is_neither_stored_nor_counted(real, seed):
    capacity, numbers = 3, np.arange(20, 25)
    memory = adding(capacity, 4)(
        reservoir(capacity, 4).init(SPEC), batch_of(numbers, real), bits_for(numbers, seed, picks=4)
    )
    kept = [int(n) for n, r in zip(numbers, real, strict=True) if r]
    assert memory.seen == len(kept)
    assert set(held(memory, capacity)) <= set(kept)
    assert len(set(held(memory, capacity))) == min(capacity, len(kept))
    assert not np.asarray(memory.x[len(kept) :]).any()
    if kept:
        assert set(whole(memory.next.x, memory.next.y, memory.next.task)) <= set(kept)
        assert memory.next.weight.tolist() == [1] * 4


def test_of_two_examples_for_one_place_the_later_stays():
    memory = reservoir(3, 3).init(SPEC)
    memory = adding(3, 3)(memory, batch_of([1, 2, 3]), bits_for([1, 2, 3]))
    first = jnp.zeros((4, 2), jnp.uint32)  # the smallest draw: place 0
    later = adding(3, 3)(memory, batch_of([4, 5, 6, 7]), (first, bits_for([0])[1]))
    assert held(later, 3) == [7, 2, 3]
    padded = adding(3, 3)(memory, batch_of([4, 5, 6, 7], [1, 1, 0, 0]), (first, bits_for([0])[1]))
    assert held(padded, 3) == [5, 2, 3]
    last = jnp.full((4, 2), 2**32 - 1, jnp.uint32)  # the largest: past the end, so not kept
    assert held(adding(3, 3)(memory, batch_of([4, 5, 6, 7]), (last, bits_for([0])[1])), 3) == [1, 2, 3]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 2**31))
def test_what_belongs_together_stays_together(sizes, seed):
    memory = reservoir(5, 4).init(SPEC)
    start = 0
    for i, size in enumerate(sizes):
        numbers = np.arange(start, start + 4)
        weight = np.arange(4) < size
        memory = adding(5, 4)(memory, batch_of(numbers, weight), bits_for(numbers, seed + i, picks=4))
        start += 4
        assert set(whole(memory.next.x, memory.next.y, memory.next.task)) <= set(held(memory, 5))
    assert len(set(held(memory, 5))) == min(sum(sizes), 5)


def code(numbers):
    """Two columns that tell which examples they belong to."""
    n = np.asarray(numbers, int)
    return {"hash": np.float32(np.stack([n * 7919 % 101, n * 31 % 17], axis=1)), "square": np.float32(n * n)}


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 2**31))
def test_columns_stay_with_their_example(sizes, seed):
    rule = reservoir(5, 4)
    memory, plain = rule.init(SPEC, hash=(2,), square=()), rule.init(SPEC)
    assert {name: column.shape for name, column in rule.columns(memory).items()} == {"hash": (4, 2), "square": (4,)}
    for i, size in enumerate(sizes):
        numbers = np.arange(4 * i, 4 * i + 4)
        given_now = batch_of(numbers, np.arange(4) < size), bits_for(numbers, seed + i, picks=4)
        memory, plain = adding(5, 4)(memory, *given_now, code(numbers)), adding(5, 4)(plain, *given_now)
        filled = min(int(memory.seen), 5)
        for name, expected in code(held(memory, 5)).items():
            np.testing.assert_array_equal(memory.columns[name][:filled], expected)
        for name, expected in code(rule.sample(memory).x[:, 0]).items():
            np.testing.assert_array_equal(rule.columns(memory)[name], expected)
    assert identical(memory._replace(columns={}, next_columns={}), plain)
    assert rule.columns(plain) == {}


def inclusion(capacity, length, size):
    """How often each of `length` examples, given in batches of `size`, is in the memory at the end, over many runs."""
    rule = reservoir(capacity, 1)

    def final(bits):
        memory = rule.init(SPEC)
        for start in range(0, length, size):
            batch = batch_of(range(start, start + size))
            memory = rule.add(memory, batch, (bits[start : start + size], bits[:1]))
        return memory.x[:, 0].astype(jnp.int32)

    bits = np.random.default_rng(3).integers(0, 2**32, (RUNS, length, 2), np.uint32)
    return np.bincount(np.asarray(jax.jit(jax.vmap(final))(bits)).ravel(), minlength=length)


def uniformity(counts, capacity):
    """The probability of counts at least as uneven, if each set of `capacity` examples is equally likely."""
    length, share = len(counts), capacity / len(counts)
    variance = RUNS * share * (1 - share) * length / (length - 1)  # drawn without replacement
    return scipy.stats.chi2.sf(((counts - RUNS * share) ** 2).sum() / variance, length - 1)


@pytest.mark.parametrize(("capacity", "length", "size"), [(5, 20, 4), (3, 24, 8), (1, 6, 1)])
def test_every_example_is_held_with_the_same_probability(capacity, length, size):
    counts = inclusion(capacity, length, size)
    assert counts.sum() == RUNS * capacity
    assert uniformity(counts, capacity) > 1e-4


@pytest.mark.parametrize(
    "biased",
    [
        lambda bound, bits: below(bound + 1, bits),  # off by one
        lambda bound, bits: below(jnp.broadcast_to(bound.max(), bound.shape), bits),  # as if all came at once
    ],
    ids=["off by one", "a batch at once"],
)
def test_the_statistic_finds_a_bias(monkeypatch, biased):
    monkeypatch.setattr(memory_module, "below", biased)
    assert uniformity(inclusion(5, 20, 4), 5) < 1e-6


@jax.jit
def redrawn(memory, bits):
    """The batches that follow, if nothing is added."""
    nothing, unused = batch_of([0], weight=[0]), jnp.zeros((1, 2), jnp.uint32)
    return jax.vmap(lambda bits: reservoir(5, 4).add(memory, nothing, (unused, bits)).next)(bits)


@pytest.mark.parametrize("seen", [1, 3, 5, 9])
def test_batches_are_drawn_uniformly_from_the_filled_places(seen):
    size = min(seen, 5)
    memory = reservoir(5, 4).init(SPEC)
    memory = adding(5, 4)(memory, batch_of(range(seen)), bits_for(range(seen), picks=4))
    bits = np.random.default_rng(4).integers(0, 2**32, (RUNS // 4, 4, 2), np.uint32)
    drawn = redrawn(memory, bits).x[..., 0].ravel()
    counts = np.array([(drawn == number).sum() for number in held(memory, 5)])
    assert counts.sum() == RUNS
    assert size == 1 or scipy.stats.chisquare(counts).pvalue > 1e-4


def test_the_bits_are_drawn_for_every_example():
    rule = reservoir(5, 3)
    place, pick = rule.draw(jax.random.key(0), 4)
    assert (place.shape, pick.shape) == ((4, 2), (3, 2))
    assert place.dtype == pick.dtype == jnp.uint32
    assert len(np.unique(np.concatenate([place, pick]))) == 14


@pytest.mark.parametrize(("capacity", "batch", "field"), [(0, 3, "memory"), (-1, 3, "memory"), (5, 0, "memory_batch")])
def test_sizes_of_at_least_one(capacity, batch, field):
    with pytest.raises(Invalid, match=f"^{field}: "):
        reservoir(capacity, batch)


# Rings


@functools.cache
def ringing(places, by_class, picks=3):
    return jax.jit(Ring(places, picks, by_class).add)


def fill(rule, seed, sizes, tasks=None):
    """A ring memory and the plain one after batches of four, of which so many are real; a task each, or mixed."""
    memory, rings = rule.init(SPEC), Rings(rule.places, rule.by_class)
    draws = np.random.default_rng(seed)
    for i, size in enumerate(sizes):
        numbers = draws.integers(0, 200, 4)
        batch = batch_of(numbers, np.arange(4) < size)
        if tasks is not None:
            batch = batch._replace(task=jnp.array(tasks[i], jnp.int32))
        rings.add(reference.examples_of({name: np.asarray(part) for name, part in batch._asdict().items()}))
        memory = ringing(rule.places, rule.by_class, rule.batch)(memory, batch, rule.draw(jax.random.key(i), 4))
    return memory, rings


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9),
    st.sampled_from([(1, False), (3, False), (2, True), (7, True)]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_a_ring_holds_the_last_of_each(batches, kind, mixed, seed):
    sizes, tasks = zip(*batches, strict=True)
    memory, rings = fill(Ring(kind[0], 3, kind[1]), seed, sizes, None if mixed else tasks)
    for found, wanted in compared(memory, rings):
        np.testing.assert_array_equal(found, np.asarray(wanted))
    others = rings.of([task for task in range(SPEC.tasks) if mixed or task != tasks[-1]])
    drawn = set(zip(memory.next.x[:, 0].tolist(), memory.next.y.tolist(), memory.next.task.tolist(), strict=True))
    assert memory.next.weight.tolist() == [float(bool(others))] * 3
    assert not others or drawn <= {(float(e.x[0]), e.y, e.task) for e in others}


@pytest.mark.parametrize("by_class", [False, True])
def test_rings_give_every_example_of_the_other_tasks_alike(by_class):
    rule = Ring(2 if by_class else 5, 4, by_class)
    memory, rings = fill(rule, 7, [4, 4, 3, 1, 4, 4], [0, 1, 1, 2, 3, 0])
    bits = np.random.default_rng(4).integers(0, 2**32, (RUNS // 4, 4, 2), np.uint32)
    for current in (0, 1, 4):
        nothing = batch_of([0], weight=[0])._replace(task=jnp.array(current, jnp.int32))
        drawn = jax.jit(jax.vmap(lambda bits, nothing=nothing: rule.add(memory, nothing, bits).next))(bits)
        held = rings.of([task for task in range(5) if task != current])
        kinds = {(float(e.x[0]), e.y, e.task) for e in held}
        places = [(float(e.x[0]), e.y, e.task) for e in held]
        counted = list(map(tuple, np.stack([drawn.x[..., 0], drawn.y, drawn.task], axis=-1).reshape(-1, 3).tolist()))
        counts = np.array([counted.count(kind) for kind in sorted(kinds)])
        shares = np.array([places.count(kind) for kind in sorted(kinds)]) / len(places)
        assert counts.sum() == RUNS
        assert scipy.stats.chisquare(counts, shares * RUNS).pvalue > 1e-4


@pytest.mark.parametrize("by_class", [False, True])
def test_rings_give_examples_of_each_task(by_class):
    rule = Ring(2 if by_class else 5, 1, by_class)
    memory, rings = fill(rule, 8, [4, 4, 3, 1, 4, 4], [0, 1, 1, 2, 3, 0])
    bits = np.random.default_rng(5).integers(0, 2**32, (5, 50, 2), np.uint32)
    drawn, whole = rule.of_each(memory, jnp.asarray(bits)), rule.of_each(memory)
    assert drawn.task.tolist() == whole.task.tolist() == list(range(5))
    for task in range(5):
        held = rings.of([task])
        there = np.asarray(whole.weight[task]) > 0
        np.testing.assert_array_equal(whole.x[task][there], np.array([e.x for e in held]).reshape(-1, 2))
        np.testing.assert_array_equal(whole.y[task][there], [e.y for e in held])
        assert drawn.weight[task].tolist() == [float(bool(held))] * 50
        if held:
            wanted = rings.drawn([task], bits[task])
            np.testing.assert_array_equal(drawn.x[task], [e.x for e in wanted])
            np.testing.assert_array_equal(drawn.y[task], [e.y for e in wanted])


def test_columns_stay_with_their_example_in_rings():
    rule = Ring(2, 4, by_class=True)
    memory = rule.init(SPEC, hash=(2,), square=())
    for i in range(6):
        numbers = np.arange(4 * i, 4 * i + 4)
        memory = rule.add(memory, batch_of(numbers, np.arange(4) < 3), rule.draw(jax.random.key(i), 4), code(numbers))
        filled = np.asarray(memory.x[..., 1]) != 0
        for name, expected in code(memory.x[filled, 0]).items():
            np.testing.assert_array_equal(memory.columns[name][filled], expected)
        if memory.next.weight.all():
            for name, expected in code(rule.sample(memory).x[:, 0]).items():
                np.testing.assert_array_equal(rule.columns(memory)[name], expected)
    assert memory.next.weight.all()


def test_more_tasks_leave_the_rings_of_the_first_where_they_are():
    rule = Ring(3, 2, by_class=True)
    memory, _ = fill(rule, 1, [4, 4, 4])
    larger = rule.init(Spec(SPEC.shape, SPEC.classes, SPEC.tasks + 2))
    grown = jax.tree.map(lambda new, old: new.at[tuple(map(slice, old.shape))].set(old), larger, memory)
    drawn, bits = batch_of([3, 4]), rule.draw(jax.random.key(1), 2)
    after, before = rule.add(grown, drawn, bits), rule.add(memory, drawn, bits)
    assert identical(after.next, before.next)
    np.testing.assert_array_equal(after.x[: len(before.x)], before.x)


def test_rings_share_a_capacity():
    assert ring(SPEC, 10, 4) == Ring(2, 4, False)
    assert ring(SPEC, 109, 4, by_class=True) == Ring(3, 4, True)
    for capacity, by_class, least in ((4, False, 5), (34, True, 35)):
        with pytest.raises(Invalid, match=f"^memory: {capacity} is not valid; give at least {least}"):
            ring(SPEC, capacity, 4, by_class=by_class)
    with pytest.raises(Invalid, match=r"^memory_batch: "):
        ring(SPEC, 10, -1)
