"""Watching a run: what callbacks are told, stopping one, and that looking changes nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import OPTIONS, STREAM, identical, leaves, make, streamed

import cotrain
from cotrain import Callback, Watch
from cotrain.engine import blank

COTRAINING = ("cotraining", "routing_network")
STEPS = [16, 32, 42]  # of a task, at the ends of its chunks
WATCHED = OPTIONS | {"progress": False}


class Noted(Callback):
    """Notes all that it is told; may end the run, in one way or the other, at a task and step."""

    def __init__(self, end=None, how=Watch.stop):
        self.end, self.how, self.closed = end, how, 0
        self.chunks, self.tasks, self.order = [], [], []

    def after_chunk(self, watch):
        scalars = {name: values.copy() for name, values in watch.scalars.items()}
        self.chunks.append((watch.task, watch.step, scalars, watch.measures))
        self._told(watch)

    def after_task(self, watch):
        assert watch.scalars == {}
        self.tasks.append((watch.task, watch.step, watch.measures))
        self._told(watch)

    def _told(self, watch):
        self.order.append((tuple(watch.seeds), watch.task, watch.step))
        if (watch.task, watch.step) == self.end:
            self.how(watch)

    def close(self):
        self.closed += 1


def refuse(_watch):
    raise ZeroDivisionError("of its own")


def interrupt(_watch):
    raise KeyboardInterrupt


def entropy(gates):
    return -sum(gate * math.log(gate) for gate in gates if gate > 0)


def contents(directory):
    """All files but those with the times."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name != "times.json"]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def plain():
    """A run that nobody watched."""
    return cotrain.run(make(COTRAINING), STREAM, **WATCHED)[0]


# What is told


def test_it_is_told_after_each_chunk_and_each_task(plain):
    noted = Noted()
    [result] = cotrain.run(make(COTRAINING), STREAM, callbacks=[noted], **WATCHED)
    assert noted.order == [((0,), task, step) for task in range(3) for step in (*STEPS, 0)]
    assert noted.closed == 1
    for task, step, scalars, [measures] in noted.chunks:
        assert scalars["loss"].shape == (1, 10 if step == 42 else 16)
        assert measures["loss"] == pytest.approx(scalars["loss"].mean())
        assert set(measures) == {*scalars, "experts/0", "entropy/0"}, task
    for task, _, [measures] in noted.tasks:
        gates = result.gates[0][task]
        assert set(measures) == {"accuracy", *(f"accuracy/{i}" for i in range(task + 1)), "experts/0", "entropy/0"}
        assert [measures[f"accuracy/{i}"] for i in range(task + 1)] == result.accuracy[task, : task + 1].tolist()
        assert measures["accuracy"] == pytest.approx(result.accuracy[task, : task + 1].mean())
        assert measures["experts/0"] == len({expert for row in gates[: task + 1] for expert in np.flatnonzero(row)})
        assert measures["entropy/0"] == pytest.approx(entropy(gates[task].tolist()), rel=1e-5)


def test_measures_by_hand():
    """Of gates and accuracies that are easy to reckon with, in a task's middle and at its end, and of two seeds."""
    method = make(COTRAINING)
    nothing = blank(method, STREAM, 2)
    gates = np.full((2, 3, 3, 4), np.nan, np.float32)
    gates[:, 1] = [[0.5, 0.5, 0, 0], [0.25, 0, 0.75, 0], [0, 0, 0, 1]]  # task 2, to come, has the last to itself
    gates[1, 1, 1] = [1, 0, 0, 0]
    accuracy = np.full((2, 3, 3), np.nan)
    accuracy[:, 1] = [[0.5, 0.75, 0.25], [1, 0, 0.25]]  # task 2 was tested too
    now = replace(nothing, phase=2, accuracy=accuracy, gates=(gates,), event="evaluated")
    watch = Watch(method, [5, 7], now)
    assert (watch.task, watch.step) == (1, 0)
    one, other = watch.measures
    assert one == {
        "accuracy": 0.625,
        "accuracy/0": 0.5,
        "accuracy/1": 0.75,
        "accuracy/2": 0.25,
        "experts/0": 3,
        "entropy/0": pytest.approx(2 * math.log(2) - 0.75 * math.log(3)),
    }
    assert (other["accuracy"], other["experts/0"], other["entropy/0"]) == (0.5, 2, 0)
    losses = np.array([[1, 2, 6], [0, 0, 3]], np.float32)
    trained = replace(now, step=3, event="trained", scalars={"loss": losses}, state=started(method, 2))
    watch = Watch(method, [5, 7], trained)
    assert (watch.task, watch.step) == (2, 3)
    assert [measures["loss"] for measures in watch.measures] == [3, 1]


def started(method, seeds):
    """The state with which a run begins."""
    snapshots = cotrain.learn(method, [STREAM] * seeds, list(range(seeds)), **OPTIONS)
    state = next(snapshots).kept().state
    snapshots.close()
    return state


def test_fixed_routes_have_the_measures_that_one_expects():
    noted = Noted()
    cotrain.run(make(("cotraining", "fixed")), STREAM, callbacks=[noted], **WATCHED)
    for task, *_, [measures] in [*noted.chunks, *noted.tasks]:
        assert measures["experts/0"] == task + 2  # task t has experts t and t + 1, alike
        assert measures["entropy/0"] == pytest.approx(math.log(2), rel=1e-5)


def test_in_the_middle_of_a_task_the_measures_are_of_the_routes_at_that_moment():
    noted = Noted(end=(1, 32))
    [result] = cotrain.run(make(COTRAINING), STREAM, callbacks=[noted], **WATCHED)
    _, _, _, [measures] = noted.chunks[-1]
    [gates] = result.learner.routes
    assert measures["entropy/0"] == pytest.approx(entropy(gates[1].tolist()), rel=1e-5)
    assert measures["experts/0"] == (gates[:2] > 0).any(axis=0).sum()


def test_several_seeds_at_once_have_their_own_measures():
    noted = Noted()
    options = WATCHED | {"seeds": [3, 1], "at_once": True}
    results = cotrain.run(make(COTRAINING), STREAM, callbacks=[noted], **options)
    assert noted.order == [((3, 1), task, step) for task in range(3) for step in (*STEPS, 0)]
    for task, _, measures in noted.tasks:
        for result, mine in zip(results, measures, strict=True):
            assert mine["accuracy/0"] == result.accuracy[task, 0]
            assert mine["entropy/0"] == pytest.approx(entropy(result.gates[0][task, task].tolist()), rel=1e-5)
    _, _, scalars, measures = noted.chunks[0]
    assert scalars["loss"].shape == (2, 16)
    assert measures[0]["loss"] == pytest.approx(scalars["loss"][0].mean())
    assert measures[1]["loss"] == pytest.approx(scalars["loss"][1].mean())
    assert measures[0]["loss"] != measures[1]["loss"]


def test_seeds_one_after_another_are_told_of_one_after_another():
    noted = Noted()
    cotrain.run(make(COTRAINING), STREAM, callbacks=[noted], **WATCHED | {"seeds": [3, 1], "at_once": False})
    assert [seeds for seeds, *_ in noted.order] == [(3,)] * 12 + [(1,)] * 12
    assert noted.closed == 2


def test_tasks_that_are_learned_together_count_as_their_last():
    case, noted = ("joint", "routing_network"), Noted()
    [result] = cotrain.run(make(case), streamed(case), callbacks=[noted], **WATCHED)
    assert {task for _, task, _ in noted.order} == {2}
    assert [step for *_, step in noted.order][-3:] == [112, 120, 0]
    [(_, _, [measures])] = noted.tasks
    [gates] = result.gates[0]
    assert measures["accuracy"] == pytest.approx(result.accuracy[0].mean())
    assert [measures[f"accuracy/{i}"] for i in range(3)] == result.accuracy[0].tolist()
    assert measures["experts/0"] == (gates > 0).any(axis=0).sum()
    assert measures["entropy/0"] == pytest.approx(np.mean([entropy(row.tolist()) for row in gates]), rel=1e-5)
    _, _, _, [last] = noted.chunks[-1]  # nothing was learned in between
    assert {name: last[name] for name in ("experts/0", "entropy/0")} == {
        name: measures[name] for name in ("experts/0", "entropy/0")
    }


@pytest.mark.parametrize("case", [("replay", "by_input"), ("joint", "by_input")], ids="-".join)
def test_routers_that_read_their_input_have_gates_after_a_task_alone(case):
    noted = Noted()
    [result] = cotrain.run(make(case), streamed(case), callbacks=[noted], **WATCHED)
    assert all(not name.startswith(("experts", "entropy")) for *_, [measures] in noted.chunks for name in measures)
    for (task, _, [measures]), gates in zip(noted.tasks, result.gates[0], strict=True):
        assert measures["experts/0"] == (gates[: task + 1] > 0).any(axis=0).sum()
        present = gates if case[0] == "joint" else gates[task : task + 1]
        assert measures["entropy/0"] == pytest.approx(np.mean([entropy(row.tolist()) for row in present]), rel=1e-5)


def test_with_all_tasks_tested_the_mean_is_still_of_those_so_far():
    noted = Noted()
    [result] = cotrain.run(make(COTRAINING), STREAM, callbacks=[noted], evaluate_all=True, **WATCHED)
    assert [task for task, *_ in noted.tasks] == [0, 1, 2]  # and not before the first
    for task, _, [measures] in noted.tasks:
        assert measures["accuracy"] == pytest.approx(result.accuracy[task, : task + 1].mean())
        assert measures["accuracy/2"] == result.accuracy[task, 2]


# Stopping


@pytest.mark.parametrize("end", [(1, 16), (1, 42), (1, 0)])
def test_a_run_stops_and_goes_on_to_the_bit(tmp_path, end):
    method, options = make(COTRAINING), WATCHED | {"every": 1e9}
    cotrain.run(method, STREAM, out=tmp_path / "whole", **options)
    noted, out = Noted(end), tmp_path / "out"
    [result] = cotrain.run(method, STREAM, out=out, callbacks=[noted], **options)
    assert noted.order[-1] == ((0,), *end)
    assert noted.closed == 1
    phase, step = end if end[1] else (2, 0)
    assert (result.learner.finished, result.learner.step) == (phase, step)
    assert np.isfinite(result.accuracy).any(axis=1).tolist() == [row < phase for row in range(3)]
    assert math.isnan(result.acc)
    assert (out / "seed-0" / f"checkpoint-{phase:05}-{step:08}.safetensors").exists()
    assert not (out / "seed-0" / "result.json").exists()
    cotrain.run(method, STREAM, out=out, resume=True, **options)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_run_that_is_stopped_is_where_it_says(plain):
    [result] = cotrain.run(make(COTRAINING), STREAM, callbacks=[Noted((1, 0))], **WATCHED)
    np.testing.assert_array_equal(result.accuracy[:2], plain.accuracy[:2])
    x, y = STREAM[0].test.take(np.arange(30))
    assert result.learner.evaluate(x, y, 0) == plain.accuracy[1, 0]


def test_after_the_last_task_there_is_nothing_to_stop(tmp_path, plain):
    [result] = cotrain.run(make(COTRAINING), STREAM, out=tmp_path, callbacks=[Noted((2, 0))], **WATCHED)
    np.testing.assert_array_equal(result.accuracy, plain.accuracy)
    assert (tmp_path / "seed-0" / "result.json").exists()


# Errors, and what is left alone


@pytest.mark.parametrize(("how", "error"), [(refuse, ZeroDivisionError), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("end", [(1, 16), (1, 0)])
def test_what_a_callback_raises_ends_the_run(tmp_path, how, error, end):
    noted, other = Noted(end, how), Noted()
    with pytest.raises(error):
        cotrain.run(make(COTRAINING), STREAM, out=tmp_path, callbacks=[other, noted], **WATCHED)
    assert (noted.closed, other.closed) == (1, 1)
    assert noted.order == other.order
    assert noted.order[-1][1:] == end
    assert not (tmp_path / "seed-0" / "result.json").exists()
    assert not list(tmp_path.rglob(".*"))


def test_callbacks_are_closed_when_a_run_diverges():
    noted = Noted()
    with pytest.raises(cotrain.Diverged):
        cotrain.run(make(COTRAINING, lr=1e30), STREAM, callbacks=[noted], **WATCHED)
    assert noted.closed == 1


@pytest.mark.parametrize("callback", [Callback, Noted])
def test_looking_changes_no_number(plain, callback):
    [result] = cotrain.run(make(COTRAINING), STREAM, callbacks=[callback()], **WATCHED)
    assert identical(result.learner.state, plain.learner.state)
    assert identical([result.accuracy, *result.gates, *result.logits], [plain.accuracy, *plain.gates, *plain.logits])
    assert len(leaves(result.learner.state)) > 3
