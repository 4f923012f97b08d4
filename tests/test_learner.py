"""A learner is the engine, fed by hand: to the bit, in whatever pieces, and with more tasks than it was begun with."""

import copy
import functools
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CASES, METHODS, MORE_CASES, MORE_METHODS, NETWORKS, SAMPLINGS, STREAM, identical, routed, streamed
from hypothesis import given, settings
from hypothesis import strategies as st

import cotrain
from cotrain.data.feed import Feed
from cotrain.errors import Diverged, Invalid
from cotrain.experiments import learner as module
from cotrain.experiments.saved import encode
from cotrain.methods.finetune import Finetune, finetune
from cotrain.networks.experts import dense
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import own_method
import own_router

SPEC, BATCH, EPOCHS = STREAM.spec, 6, 30  # 7 minibatches an epoch, of which the last is not full
OPTIONS = {"batch": BATCH, "epochs": EPOCHS, "chunk": 200, "progress": False}  # a task has 210, in two chunks
ONCE = [case for case in MORE_CASES if case[0] not in MORE_METHODS or case[1] == "routing_network"]  # is enough here
CASES_OF_ONE_TASK_AT_A_TIME = [case for case in CASES + ONCE if case[0] != "joint"]
JOINT = [case for case in CASES + MORE_CASES if case[0] == "joint"]
EWC, PROTOTYPES, COTRAINING = ("own", "routing_network"), ("replay", "prototypes"), ("cotraining", "routing_network")
EVERY = [*CASES_OF_ONE_TASK_AT_A_TIME, EWC, PROTOTYPES]
SOME = [("finetune", "shared_bottom"), COTRAINING, PROTOTYPES, EWC]
every_case, some_cases = (pytest.mark.parametrize("case", cases, ids="-".join) for cases in (EVERY, SOME))


@functools.cache
def method_of(case, spec=SPEC):
    """A method on a network; the examples have those of one's own."""
    method, network = case
    if network == "prototypes":
        router = own_router.Options()()
        made = routing_network(spec, dense(12), layers=1, experts=4, k=2, router=router, one_head=True)
    else:
        made = NETWORKS[network](spec)
    return own_method.Options(lr=0.2)(made) if method == "own" else METHODS[method](made, 0.2)


def new(case, spec=SPEC):
    return cotrain.Learner(method_of(case, spec), batch=BATCH)


def examples(task, epochs=1, first=0):
    """The examples of each epoch, in the order in which the engine's run of seed 0 has them."""
    feed = Feed([STREAM[task].train], [task], 0, task, BATCH, EPOCHS)
    for epoch in range(first, first + epochs):
        yield STREAM[task].train.take(np.array([i for i in feed.order(epoch).ravel() if i >= 0]))


def questions(task):
    return STREAM[task].test.take(np.arange(len(STREAM[task].test)))


def every_answer(learner, tasks=range(SPEC.tasks)):
    """All that it can say of tasks, to the bit."""
    parts = [
        (learner.predict(questions(task)[0], task), learner.probabilities(questions(task)[0], task)) for task in tasks
    ]
    return b"".join(part.tobytes() for both in parts for part in both)


class Losses(cotrain.Callback):
    """Writes down the loss of each step."""

    def __init__(self):
        self.seen = []

    def after_chunk(self, watch):
        self.seen.append(watch.scalars["loss"][0])


@functools.cache
def ran(case):
    """The engine's run, and the loss of each step."""
    losses = Losses()
    [result] = cotrain.run(method_of(case), streamed(case), callbacks=[losses], **OPTIONS)
    return result, np.concatenate(losses.seen)


@functools.cache
def fed(case):
    """A learner that was fed the same, an epoch at a time, and the loss of each step."""
    learner, losses = new(case), []
    for task in range(SPEC.tasks):
        for x, y in examples(task, EPOCHS):
            learner.observe(x, y, task)
            losses.append(learner.scalars["loss"])
        learner.finish(task)
    return learner, np.concatenate(losses)


@functools.cache
def practised(case, spec=SPEC):
    """One that is in its second task."""
    learner = new(case, spec)
    for x, y in examples(0, 3):
        learner.observe(x, y, 0)
    learner.finish(0)
    for x, y in examples(1, 2):
        learner.observe(x, y, 1)
    return learner


def go_on(learner, task=2):
    """Ends the task that it is in, and begins another."""
    learner.finish(1)
    for x, y in examples(2):
        learner.observe(x, y, task)
    return learner


# The engine, fed by hand


@every_case
def test_it_is_the_engine_to_the_bit(case):
    (result, losses), (learner, found) = ran(case), fed(case)
    assert found.tobytes() == losses.tobytes()
    assert identical(learner.state, result.learner.state)
    assert encode(learner) == encode(result.learner)
    for task, accuracy in enumerate(result.accuracy[-1]):
        x, y = questions(task)
        assert (learner.predict(x, task) == y).mean() == learner.evaluate(x, y, task) == accuracy
    routes = [gates[-1].tobytes() for gates in result.gates] if learner.network.by_task else []
    assert [route.tobytes() for route in learner.routes] == routes


@every_case
def test_what_a_run_leaves_goes_on_as_one_that_was_fed(case):
    learners = [copy.deepcopy(learner) for learner in (ran(case)[0].learner, fed(case)[0])]
    before = every_answer(learners[0])
    for learner in learners:
        for x, y in examples(1, 2):
            learner.observe(x, y, 1)
    assert encode(learners[0]) == encode(learners[1])
    assert every_answer(learners[0]) == every_answer(learners[1]) != before


@pytest.mark.parametrize("case", JOINT, ids="-".join)
def test_a_joint_run_leaves_one_that_predicts_and_goes_on(case):
    learner = copy.deepcopy(ran(case)[0].learner)
    accuracy = ran(case)[0].accuracy[-1].tolist()
    assert [learner.evaluate(*questions(task), task) for task in range(SPEC.tasks)] == accuracy
    assert (learner.finished, learner.step) == (1, 0)
    other = cotrain.Learner(learner.method, batch=BATCH, state=jax.tree.map(jnp.copy, learner.state), finished=1)
    for one in (learner, other):
        for x, y in examples(1, 2):
            one.observe(x, y, 1)
    assert encode(learner) == encode(other)


@some_cases
def test_probabilities_are_the_softmax_of_what_the_network_says(case):
    learner = practised(case)
    parameters = jax.tree.map(lambda a: a[0], learner.state.learner.parameters)
    for task in range(SPEC.tasks):
        x, _ = questions(task)
        logits = learner.network.predict(parameters, jnp.array(task), jnp.asarray(x))
        np.testing.assert_allclose(learner.probabilities(x, task), jax.nn.softmax(logits), atol=1e-6)
        np.testing.assert_array_equal(learner.predict(x, task), logits.argmax(axis=1))


# Pieces

WHOLE = 15  # minibatches, and one more that is not full
PIECES = [np.resize(part, (WHOLE * BATCH + 4, *part.shape[1:])) for part in next(examples(0))]


def fed_in(case, cuts):
    """What a learner has that was fed the same examples, cut between some minibatches, and the loss of each step."""
    learner, losses = new(case), []
    for start, end in pairwise([0, *(BATCH * cut for cut in sorted(cuts)), len(PIECES[1])]):
        learner.observe(PIECES[0][start:end], PIECES[1][start:end], 0)
        losses.append(learner.scalars["loss"])
    middle = encode(learner)
    learner.finish(0)
    return middle, encode(learner), np.concatenate(losses).tobytes()


@functools.cache
def fed_at_once(case):
    return fed_in(case, ())


@some_cases
@settings(max_examples=8)
@given(cuts=st.sets(st.integers(1, WHOLE)))
def test_any_pieces_of_whole_minibatches_give_the_same_bytes(case, cuts):
    assert fed_in(case, cuts) == fed_at_once(case)


@pytest.mark.parametrize("case", [COTRAINING, EWC], ids="-".join)
def test_more_than_is_learned_in_one_call_of_the_program(case):
    x, y = (np.resize(part, (405 * BATCH, *part.shape[1:])) for part in PIECES)
    whole, parts = new(case), new(case)
    whole.observe(x, y, 0)
    for start in range(0, len(y), 135 * BATCH):
        parts.observe(x[start : start + 135 * BATCH], y[start : start + 135 * BATCH], 0)
    assert encode(whole) == encode(parts)
    assert len(whole.scalars["loss"]) == whole.step == 405


def test_the_loss_is_the_mean_over_examples_of_each_before_its_step():
    learner = new(SOME[0])
    returned = learner.observe(*PIECES, 0)
    losses = learner.scalars["loss"]
    assert len(losses) == WHOLE + 1
    expected = (losses[:-1].astype(float).sum() * BATCH + losses[-1] * 4) / (WHOLE * BATCH + 4)
    assert returned == pytest.approx(expected, rel=1e-6)
    still = new(SOME[0])
    chances = still.probabilities(PIECES[0][:BATCH], 0)[np.arange(BATCH), PIECES[1][:BATCH]]
    assert losses[0] == pytest.approx(-np.log(chances).mean(), rel=1e-5)


@pytest.mark.parametrize("form", [np.float64, np.float16, ">f4", list], ids=["f8", "f2", "big-endian", "list"])
def test_inputs_of_any_form(form):
    x, y = PIECES[0].astype(np.float16).astype(np.float32), PIECES[1]
    plain, other = new(EWC), new(EWC)
    plain.observe(x, y, 0)
    other.observe(x.tolist() if form is list else x.astype(form), y.astype(np.uint8), 0)
    assert encode(plain) == encode(other)


def test_bytes_are_scaled_as_in_a_stream():
    x = np.random.default_rng(0).integers(0, 256, (20, *SPEC.shape), np.uint8)
    one, other = new(EWC), new(EWC)
    one.observe(x, PIECES[1][:20], 0)
    other.observe(x.astype(np.float32) / np.float32(255), PIECES[1][:20], 0)
    assert encode(one) == encode(other)
    assert one.probabilities(x, 0).tobytes() == other.probabilities(x.astype(np.float32) / np.float32(255), 0).tobytes()


# More tasks


def wider(tasks, widths=()):
    return SPEC._replace(tasks=SPEC.tasks + tasks, widths=widths)


@every_case
def test_more_tasks_change_no_prediction_and_are_as_from_the_start(case):
    learner, spec = copy.deepcopy(practised(case)), wider(1)
    before, routes = every_answer(learner), learner.routes
    learner.add_tasks(1)
    assert every_answer(learner) == before
    assert learner.tasks == spec.tasks
    assert all(new[: SPEC.tasks].tobytes() == old.tobytes() for new, old in zip(learner.routes, routes, strict=True))
    assert learner.predict(questions(0)[0], SPEC.tasks).shape == (len(questions(0)[1]),)
    fresh = new(case)
    fresh.add_tasks(1)
    assert fresh.network.spec == spec
    assert encode(fresh) == encode(new(case, spec))


@some_cases
def test_one_with_more_tasks_from_the_start_is_the_same_and_goes_on_the_same(case):
    grown, spec = copy.deepcopy(practised(case)), wider(1)
    grown.add_tasks(1)
    assert encode(grown) == encode(practised(case, spec))
    assert encode(go_on(grown, task=3)) == encode(go_on(copy.deepcopy(practised(case, spec)), task=3))


@pytest.mark.parametrize("case", [SOME[0], COTRAINING], ids="-".join)
@settings(max_examples=5)
@given(counts=st.lists(st.integers(1, 2), min_size=1, max_size=3).filter(lambda counts: sum(counts) <= 3))
def test_tasks_may_be_added_in_one_go_or_in_several(case, counts):
    learner, at_once = (copy.deepcopy(practised(case)) for _ in range(2))
    for count in counts:
        learner.add_tasks(count)
    at_once.add_tasks(sum(counts))
    assert encode(learner) == encode(at_once)
    assert every_answer(learner) == every_answer(practised(case))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_sampling_of_routes_grows(sampling):
    options = {"sampling": sampling, "layers": 2, "experts": [5, 4], "k": [2, 1]}
    small, large = (finetune(routed(spec, dense(8), **options)) for spec in (SPEC, wider(2)))
    learner = cotrain.Learner(small, 7)
    learner.add_tasks(2)
    assert encode(learner) == encode(cotrain.Learner(large, 7))


def test_tasks_with_fewer_classes():
    learner = new(SOME[0])
    learner.observe(*PIECES, 0)
    before = every_answer(learner)
    learner.add_tasks(2, classes=2)
    assert learner.network.spec == wider(2, (3, 3, 3, 2, 2))
    assert every_answer(learner) == before
    found = learner.probabilities(questions(0)[0], 4)
    assert found.shape == (len(questions(0)[1]), 2)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
    assert set(learner.predict(questions(0)[0], 4)) <= {0, 1}
    with pytest.raises(Invalid, match="labels must be 0 to 1"):
        learner.observe(*PIECES, 4)
    learner.observe(PIECES[0], PIECES[1] % 2, 4)
    learner.add_tasks(1, classes=3)
    assert learner.network.spec == wider(3, (3, 3, 3, 2, 2, 3))
    with pytest.raises(Invalid, match="classes: 4 is not valid; the network's heads have 3 outputs"):
        learner.add_tasks(1, classes=4)


class Shrinking(NamedTuple):
    learner: cotrain.Learned
    left: jax.Array


class Shrinks(Finetune):
    """Keeps a number for each task that is still to come."""

    def init(self, key):
        return Shrinking(super().init(key).learner, jnp.zeros(9 - self.network.spec.tasks))


class Built(NamedTuple):
    learner: cotrain.Learned
    each: tuple


class Builds(Finetune):
    """Keeps an array for each task."""

    def init(self, key):
        return Built(super().init(key).learner, (jnp.zeros(2),) * self.network.spec.tasks)


class NoTree:
    """A method that hides its network from JAX."""

    def __init__(self, method):
        self.method = method

    def __getattr__(self, name):
        return getattr(self.__dict__["method"], name)


FINETUNE = method_of(("finetune", "shared_bottom"))


@pytest.mark.parametrize(
    ("method", "count", "reason"),
    [
        (method_of(("private", "routing_network")), 2, "experts: 4 is not valid; a private expert per task takes 5"),
        (Shrinks(FINETUNE.network, FINETUNE.rates, FINETUNE.optimizer), 1, r"'Shrinks'.*its \.left of shape \(1, 6\)"),
        (Builds(FINETUNE.network, FINETUNE.rates, FINETUNE.optimizer), 1, "'Builds'.*its state is built otherwise"),
        (NoTree(FINETUNE), 1, "'NoTree' is not valid; it is no pytree"),
        (FINETUNE, 0, "count: 0 is not valid"),
        (FINETUNE, True, "count: True is not valid"),
    ],
)
def test_what_cannot_grow_is_refused_by_name_and_stays_as_it_is(method, count, reason):
    learner = cotrain.Learner(method)
    before, state = every_answer(learner), learner.state
    with pytest.raises(Invalid, match=reason):
        learner.add_tasks(count)
    assert (learner.method, learner.state) == (method, state)
    assert every_answer(learner) == before


# What is refused, and what may happen


@pytest.mark.parametrize(
    ("x", "y", "task", "reason"),
    [
        (PIECES[0], PIECES[1], 3, "task: 3 is not valid; there are 3, from 0; add_tasks makes room for more"),
        (PIECES[0], PIECES[1], -1, "task: -1 is not valid"),
        (PIECES[0], PIECES[1], True, "task: True is not valid"),
        (PIECES[0], PIECES[1], 0.0, "task: 0.0 is not valid"),
        (PIECES[0], PIECES[1] + 1, 0, "labels: 3 is not valid; labels must be 0 to 2"),
        (PIECES[0], PIECES[1].astype(float), 0, "labels must be one whole number per input"),
        (PIECES[0], PIECES[1][1:], 0, "give one label per input"),
        (PIECES[0][:, :1], PIECES[1], 0, r"must have the first task's shape, \(2, 3\)"),
        (PIECES[0] * np.nan, PIECES[1], 0, "inputs must be finite"),
        (PIECES[0].astype(str), PIECES[1], 0, "inputs must be numbers"),
        (PIECES[0][:0], PIECES[1][:0], 0, "no examples"),
    ],
)
def test_examples_that_are_none_are_refused_and_change_nothing(x, y, task, reason):
    learner = new(SOME[0])
    for call in (learner.observe, learner.evaluate):
        with pytest.raises(Invalid, match=reason):
            call(x, y, task)
    assert encode(learner) == encode(new(SOME[0]))


@pytest.mark.parametrize("options", [{"seed": -1}, {"seed": 0.5}, {"batch": 0}, {"batch": True}])
def test_a_learner_is_made_of_whole_numbers(options):
    with pytest.raises(Invalid, match=f"^{next(iter(options))}: "):
        cotrain.Learner(FINETUNE, **options)


def test_no_inputs_have_no_predictions():
    learner = new(SOME[0])
    assert learner.predict(PIECES[0][:0], 0).shape == (0,)
    assert learner.probabilities(PIECES[0][:0], 0).shape == (0, 3)
    with pytest.raises(Invalid, match="x inputs: "):
        learner.predict(PIECES[0][:0, :1], 0)


def test_seeds_and_positions_have_their_own_random_numbers():
    one, other, later = (
        cotrain.Learner(method_of(COTRAINING), 1),
        cotrain.Learner(method_of(COTRAINING), 2),
        new(COTRAINING),
    )
    assert not identical(one.state.learner, other.state.learner)
    later.finish(0)
    first = new(COTRAINING)
    for learner in (first, later):
        learner.observe(*PIECES, 0)
    assert not identical(first.state.inner.memory, later.state.inner.memory)


def test_one_that_has_diverged_says_so_whatever_it_is_asked():
    learner = cotrain.Learner(finetune(shared_bottom(SPEC, (12,)), lr=1e38), batch=BATCH)
    with pytest.raises(Diverged, match="task 1, step"):
        learner.observe(*PIECES, 0)
    x, y = questions(0)
    asked = [lambda: learner.predict(x, 0), lambda: learner.probabilities(x, 0), lambda: learner.evaluate(x, y, 0)]
    asked += [lambda: learner.observe(x, y, 0), lambda: learner.finish(0), lambda: learner.add_tasks(1)]
    asked += [lambda: learner.routes, lambda: learner.save("nowhere"), lambda: copy.deepcopy(learner)]
    for ask in asked:
        with pytest.raises(Invalid, match=r"^learner: .* it diverged, or was interrupted .*; load it anew$"):
            ask()


def test_what_was_learned_before_an_interruption_stays(monkeypatch):
    x, y = (np.resize(part, (405 * BATCH, *part.shape[1:])) for part in PIECES)
    learner, advance = new(EWC), module.advance

    def interrupted(chunk, *rest):
        if chunk.first == 200:
            raise KeyboardInterrupt
        return advance(chunk, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(module, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learner.observe(x, y, 0)
    assert learner.step == 200
    learner.observe(x[200 * BATCH :], y[200 * BATCH :], 0)
    whole = new(EWC)
    whole.observe(x, y, 0)
    assert encode(learner) == encode(whole)


def test_the_memory_that_inputs_are_laid_out_in_is_not_kept():
    learner, other = new(COTRAINING), new(COTRAINING)
    for one in (learner, other):
        one.observe(*PIECES, 0)
    before = encode(learner)
    learner.predict(1e3 + PIECES[0], 0)  # which is laid out where the minibatches were
    assert encode(learner) == before
    assert every_answer(learner) == every_answer(other)
