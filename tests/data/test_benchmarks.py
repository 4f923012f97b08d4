"""Streams by name: what each makes of a seed."""

import numpy as np
import pytest

from cotrain.choice import choose
from cotrain.data import BENCHMARKS
from cotrain.data.fetch import Dataset
from cotrain.errors import Invalid

SIZES = {"tasks": 5, "examples": 10, "test_examples": 5}
OPTIONS = {  # a row for each
    "rotated-mnist": SIZES,
    "permuted-mnist": SIZES,
    "split-mnist": SIZES,
    "rotated-fashion-mnist": SIZES,
    "permuted-fashion-mnist": SIZES,
    "split-fashion-mnist": SIZES,
    "arrays": {},
}
TASKS = 2  # of the file


def images(name: str, training: int = 80, tests: int = 40) -> Dataset:
    """A stand-in for a data set: no two of its images are alike."""
    draws = np.random.default_rng(len(name))

    def part(count):
        return draws.integers(1, 255, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 10

    return Dataset(name, *part(training), *part(tests))


@pytest.fixture(params=BENCHMARKS)
def made(request, tmp_path):
    """A benchmark, and its stream as a function of the seed."""
    options = dict(OPTIONS[request.param])
    if request.param == "arrays":
        parts = {}
        for task in range(TASKS):
            for part, (x, y) in zip(("train", "test"), _halves(images(str(task), 10, 5)), strict=True):
                parts |= {f"{part}_x_{task}": x.astype(np.float32), f"{part}_y_{task}": y}
        np.savez(tmp_path / "tasks.npz", **parts)
        options["arrays"] = str(tmp_path / "tasks.npz")
    choice = choose("benchmark", request.param, BENCHMARKS, options)
    assert options == {}
    return choice, choice(images)


def _halves(data):
    return (data.train_x, data.train_y), (data.test_x, data.test_y)


def taken(stream):
    """All inputs and labels of a stream: training and test, task by task."""
    return [part.take(np.arange(len(part))) for task in range(len(stream)) for part in stream[task]]


def test_it_says_its_shape_before_there_is_data(made):
    choice, stream = made
    known = choice.options.spec
    assert known in (None, stream(0).spec)
    assert (known is None) == (choice.name == "arrays")


def test_the_same_seed_gives_the_same_tasks(made):
    choice, stream = made
    for one, other in zip(taken(stream(3)), taken(stream(3)), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
    alike = all(np.array_equal(a[0], b[0]) for a, b in zip(taken(stream(3)), taken(stream(4)), strict=True))
    assert alike == (choice.name == "arrays")


def test_training_and_test_examples_stay_apart(made):
    _, stream = made
    for task in range(len(stream(0))):
        train, test = ({x.tobytes() for x in part.take(np.arange(len(part)))[0]} for part in stream(0)[task])
        assert (len(train), len(test)) == (10, 5)
        assert not train & test


@pytest.mark.parametrize(("angles", "grows"), [("steps", True), ("bins", False), ("random", True)])
def test_the_first_tasks_stay_where_more_follow_unless_bins_get_narrower(angles, grows):
    few, more = (
        choose("benchmark", "rotated-mnist", BENCHMARKS, {**SIZES, "tasks": tasks, "angles": angles})
        for tasks in (3, 4)
    )
    assert few.options.grows == grows
    pairs = zip(taken(few(images)(0)), taken(more(images)(0)), strict=False)
    assert all(np.array_equal(one[0], other[0]) for one, other in pairs) == grows


def test_with_all_classes_labels_stay_as_they_are():
    options = {**SIZES, "all_classes": True}
    choice = choose("benchmark", "split-mnist", BENCHMARKS, options)
    stream = choice(images)(0)
    assert stream.spec == choice.options.spec
    assert stream.spec.classes == 10
    for task in range(5):
        assert set(taken(stream)[2 * task][1]) == {2 * task, 2 * task + 1}


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("rotated-mnist", {"tasks": 0}, "tasks"),
        ("rotated-mnist", {"rotation_step": float("inf")}, "rotation_step"),
        ("rotated-mnist", {"angles": "none"}, "angles"),
        ("rotated-mnist", {"interpolation": "cubic"}, "interpolation"),
        ("rotated-mnist", {"angles": "bins", "rotation_step": 3.0}, "rotation_step"),
        ("permuted-mnist", {"examples": -1}, "examples"),
        ("split-mnist", {"stream_seed": -1}, "stream_seed"),
        ("arrays", {}, "benchmark"),
    ],
)
def test_what_cannot_be_is_refused(name, options, field):
    with pytest.raises(Invalid, match=f"^{field}: "):
        choose("benchmark", name, BENCHMARKS, dict(options))
