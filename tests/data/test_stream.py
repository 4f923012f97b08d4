"""Task streams: what each task sees, and what cannot be a task."""

import importlib

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cotrain.data.examples import Examples
from cotrain.data.fetch import Dataset
from cotrain.data.stream import Spec, Stream, permuted, rotated, rotation, split
from cotrain.errors import Invalid

streams = importlib.import_module("cotrain.data.stream")

DRAWS = np.random.default_rng(0)
SIDE, TRAIN, TEST = 8, 60, 30


def images(count):
    return DRAWS.integers(0, 256, (count, SIDE, SIDE), np.uint8)


def labels(count):
    return (np.arange(count) % 6).astype(np.uint8)


DATASET = Dataset("tiny", images(TRAIN), labels(TRAIN), images(TEST), labels(TEST), classes=6)
SCALED = DATASET.train_x.astype(np.float32) / 255


def everything(examples):
    return examples.take(np.arange(len(examples)))


# Permuted


def test_the_first_task_is_not_permuted_unless_asked_for():
    x, y = everything(permuted(DATASET, 3)[0].train)
    np.testing.assert_array_equal(x, SCALED)
    np.testing.assert_array_equal(y, DATASET.train_y)
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    assert not np.array_equal(everything(permuted(DATASET, 3, permute_first=True)[0].train)[0], SCALED)


@pytest.mark.parametrize("task", [0, 1, 2])
def test_a_permutation_is_a_bijection_of_the_pixels_and_the_same_for_all_images(task):
    stream = permuted(DATASET, 3, permute_first=True)
    numbered = np.tile(np.arange(SIDE * SIDE, dtype=np.float32).reshape(1, SIDE, SIDE), (3, 1, 1))
    seen = stream[task].train.transform(numbered)
    assert seen.shape == numbered.shape
    np.testing.assert_array_equal(seen[0], seen[1])
    order = seen[0].ravel().astype(int)
    np.testing.assert_array_equal(np.sort(order), np.arange(SIDE * SIDE))
    for part, raw in ((stream[task].train, DATASET.train_x), (stream[task].test, DATASET.test_x)):
        x, _ = everything(part)
        expected = raw.astype(np.float32) / 255
        np.testing.assert_array_equal(x.reshape(len(x), -1), expected.reshape(len(x), -1)[:, order])


def test_a_seed_gives_the_same_tasks_whatever_their_number_and_another_gives_others():
    def pixels(stream, task):
        return everything(stream[task].train)[0]

    one = permuted(DATASET, 4, seed=5)
    np.testing.assert_array_equal(pixels(one, 3), pixels(permuted(DATASET, 9, seed=5), 3))
    assert not np.array_equal(pixels(one, 3), pixels(permuted(DATASET, 4, seed=6), 3))
    seen = [pixels(one, task) for task in range(4)]
    assert not any(np.array_equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


# Rotated


def test_no_turn_is_the_identity():
    np.testing.assert_array_equal(rotation((5, 7), 0).toarray(), np.eye(35))
    np.testing.assert_array_equal(everything(rotated(DATASET, 2)[0].train)[0], SCALED)


@pytest.mark.parametrize("quarters", [1, 2, 3, 4])
def test_quarter_turns_are_exact_and_counter_clockwise(quarters):
    x, _ = everything(rotated(DATASET, 5, step=90.0)[quarters].train)
    np.testing.assert_array_equal(x, np.rot90(SCALED, quarters, axes=(1, 2)))
    assert x.dtype == np.float32


def test_half_a_turn_is_exact_for_any_shape():
    image = DRAWS.normal(size=(5, 8)).astype(np.float32)
    np.testing.assert_array_equal((rotation((5, 8), 180) @ image.ravel()).reshape(5, 8), np.rot90(image, 2))


@pytest.mark.parametrize("degrees", [9, 45, 81, 171])
def test_other_turns_agree_with_scipy_in_the_interior(degrees):
    side = 28
    image = DRAWS.random((side, side)).astype(np.float32)
    turned = (rotation((side, side), degrees) @ image.ravel()).reshape(side, side)
    expected = scipy.ndimage.rotate(image, degrees, reshape=False, order=1)
    row, column = np.mgrid[:side, :side] - (side - 1) / 2
    interior = np.hypot(row, column) < side / 2 - 1
    np.testing.assert_allclose(turned[interior], expected[interior], rtol=0, atol=1e-5)
    corner = np.hypot(row, column) > (side + 1) / 2 * np.sqrt(2) - 2
    assert degrees % 90 == 0 or np.abs(turned[corner]).max() == 0, "what comes from outside is 0"


def test_a_turn_weighs_each_pixel_once_at_most():
    total = rotation((28, 28), 33).sum(axis=1)
    assert total.max() == pytest.approx(1, abs=1e-6)
    assert total.min() == 0


def test_twenty_tasks_turn_from_0_to_171_degrees(monkeypatch):
    asked = []
    monkeypatch.setattr(
        streams, "rotation", lambda shape, degrees, *how: asked.append(degrees) or rotation(shape, degrees)
    )
    stream = rotated(DATASET)
    assert len(stream) == 20
    for task in range(20):
        everything(stream[task].test)
    assert sorted(set(asked)) == [9.0 * i for i in range(1, 20)]


@pytest.fixture
def angles_of(monkeypatch):
    """The degrees by which a stream turns its tasks."""

    def degrees(tasks, **options):
        asked = []
        with monkeypatch.context() as patch:
            patch.setattr(streams, "rotation", lambda shape, degrees, how: asked.append(degrees))
            stream = rotated(DATASET, tasks, **options)
            for task in range(tasks):
                _ = stream[task]
        assert asked[::2] == asked[1::2], "tests are turned as training examples are"
        return np.array(asked[::2])

    return degrees


@pytest.mark.parametrize("tasks", [1, 2, 20])
def test_bins_have_an_angle_each_in_ascending_order(angles_of, tasks):
    shares = np.concatenate(
        [angles_of(tasks, angles="bins", seed=seed) / 180 * tasks - range(tasks) for seed in range(40)]
    )
    assert ((shares >= 0) & (shares < 1)).all()
    assert scipy.stats.kstest(shares, "uniform").pvalue > 1e-4
    assert len({*shares}) == len(shares)


def test_random_angles_are_uniform_and_in_no_order(angles_of):
    angles = angles_of(500, angles="random", seed=4)
    assert ((angles >= 0) & (angles < 180)).all()
    assert scipy.stats.kstest(angles / 180, "uniform").pvalue > 1e-4
    assert scipy.stats.spearmanr(angles, range(500)).pvalue > 1e-4
    np.testing.assert_array_equal(angles_of(20, angles="random", seed=4), angles[:20])


@pytest.mark.parametrize("angles", ["bins", "random"])
def test_angles_depend_on_the_streams_seed_alone(angles_of, angles):
    one = angles_of(20, angles=angles, seed=5)
    np.testing.assert_array_equal(one, angles_of(20, angles=angles, seed=5, examples=7, interpolation="nearest"))
    assert not np.isin(one, angles_of(20, angles=angles, seed=6)).any()


@pytest.mark.parametrize(("field", "near"), [("angles", "bins"), ("interpolation", "nearest")])
def test_what_no_rotation_has_is_refused(field, near):
    with pytest.raises(Invalid, match=f"^{field}: '{near}s' is not valid; did you mean '{near}'"):
        rotated(DATASET, 2, **{field: f"{near}s"})


@pytest.mark.parametrize("quarters", [0, 1, 2, 3, 4])
def test_the_nearest_pixels_of_quarter_turns_are_those_of_pil(quarters):
    image = DRAWS.integers(0, 256, (28, 28), np.uint8)
    turned = (rotation((28, 28), 90 * quarters, "nearest") @ image.ravel()).reshape(28, 28)
    np.testing.assert_array_equal(turned, np.asarray(Image.fromarray(image).rotate(90 * quarters)))


def test_the_nearest_pixels_are_those_of_pil_but_for_ties():
    # Pillow counts in 2^-16 of a pixel; where two pixels are as near as that, it may take the other one.
    image = DRAWS.integers(1, 256, (28, 28), np.uint8)
    down, right = np.mgrid[:28, :28] - 13.5
    unlike = 0
    for degrees in DRAWS.uniform(0, 180, 100):
        turned = (rotation((28, 28), degrees, "nearest") @ image.ravel()).reshape(28, 28)
        cosine, sine = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
        sources = np.stack([down * cosine + right * sine, right * cosine - down * sine])
        from_tie = np.abs(sources - np.round(sources)).min(axis=0)  # two pixels are equally far where it is 0
        differs = turned != np.asarray(Image.fromarray(image).rotate(degrees))
        assert (from_tie[differs] < 1e-3).all()
        unlike += differs.sum()
    assert unlike < 100, "of 78,400 pixels"


# Split


def test_a_split_gives_each_task_its_own_classes_numbered_from_0():
    stream = split(DATASET, 3)
    assert stream.spec == Spec((SIDE, SIDE), classes=2, tasks=3)
    met = []
    for task in range(3):
        for part, raw_x, raw_y in (
            (stream[task].train, DATASET.train_x, DATASET.train_y),
            (stream[task].test, DATASET.test_x, DATASET.test_y),
        ):
            mine = np.isin(raw_y, [2 * task, 2 * task + 1])
            x, y = everything(part)
            np.testing.assert_array_equal(x, raw_x[mine].astype(np.float32) / 255)
            np.testing.assert_array_equal(y, raw_y[mine] - 2 * task)
            assert set(y) == {0, 1}
        met.append(len(stream[task].train))
    assert sum(met) == TRAIN


def test_a_split_must_be_even():
    with pytest.raises(Invalid, match=r"tasks: 4 is not valid; 6 classes split evenly into \[1, 2, 3, 6\]"):
        split(DATASET, 4)


# Subsets


@pytest.mark.parametrize("make", [permuted, rotated, split])
def test_fewer_examples_are_a_subset_of_their_own_for_each_task(make):
    whole, few = make(DATASET, 3), make(DATASET, 3, examples=7, test_examples=5)
    kept = []
    for task in range(3):
        for all_examples, some, size in (
            (whole[task].train, few[task].train, 7),
            (whole[task].test, few[task].test, 5),
        ):
            assert len(some) == size
            x, y = everything(some)
            table = {a.tobytes(): int(b) for a, b in zip(*everything(all_examples), strict=True)}
            assert [table[a.tobytes()] for a in x] == y.tolist()
            assert len({a.tobytes() for a in x}) == size
        kept.append(few[task].train.x.tobytes())
        again = make(DATASET, 3, examples=7)[task].train
        np.testing.assert_array_equal(again.x, few[task].train.x)
    assert len(set(kept)) == 3


@pytest.mark.parametrize(("field", "most"), [("examples", TRAIN), ("test_examples", TEST)])
@pytest.mark.parametrize("make", [permuted, rotated, split])
def test_there_are_only_so_many_examples(make, field, most):
    assert len(make(DATASET, 3, **{field: most})) == 3
    for wrong in (0, most + 1):
        with pytest.raises(Invalid, match=f"^{field}: {wrong} is not valid"):
            make(DATASET, 3, **{field: wrong})


@pytest.mark.parametrize("make", [permuted, rotated, split])
def test_a_stream_has_at_least_one_task(make):
    with pytest.raises(Invalid, match=r"^tasks: 0 is not valid"):
        make(DATASET, 0)


# Tasks are made when they are reached


@pytest.mark.parametrize("make", [permuted, rotated])
def test_a_task_is_a_view_of_the_data_until_it_is_taken(make):
    stream = make(DATASET, 3)
    for task in range(3):
        assert stream[task].train.x is DATASET.train_x
        assert stream[task].test.y is DATASET.test_y


def test_nothing_is_transformed_before_it_is_taken(monkeypatch):
    turned = []

    class Turn:
        def __init__(self, shape, degrees, how):
            self.matrix = rotation(shape, degrees)

        def __matmul__(self, columns):
            turned.append(columns.shape[1])
            return self.matrix @ columns

    monkeypatch.setattr(streams, "rotation", Turn)
    stream = rotated(DATASET, 1000)
    task = stream[999]
    assert turned == []
    task.train.take(np.array([3, 1]))
    task.test.take(np.array([0]))
    assert turned == [2, 1]


def test_a_task_is_made_only_when_asked_for():
    made = []
    stream = Stream(permuted(DATASET, 3).spec, lambda task: made.append(task) or permuted(DATASET, 3)[task])
    assert len(stream) == 3
    assert stream.shuffled().phases == [[0, 1, 2]]
    assert made == []
    assert len(stream[2].test) == TEST
    assert made == [2]


def test_phases_are_the_tasks_in_turn_or_all_at_once():
    stream = permuted(DATASET, 3)
    assert stream.phases == [[0], [1], [2]]
    assert stream.shuffled().phases == [[0, 1, 2]]
    assert stream.phases == [[0], [1], [2]]
    for task in (-1, 3):
        with pytest.raises(IndexError):
            stream[task]
    assert len(list(stream)) == 3


@given(st.lists(st.integers(0, TRAIN - 1), min_size=1, max_size=20), st.integers(0, 3))
def test_labels_go_with_their_inputs(indices, task):
    for stream in (permuted(DATASET, 4), rotated(DATASET, 4)):
        examples = stream[task].train
        x, y = examples.take(np.array(indices))
        whole_x, whole_y = everything(examples)
        assert y.tolist() == DATASET.train_y[indices].tolist() == whole_y[indices].tolist()
        np.testing.assert_array_equal(x, whole_x[indices])


# Your own arrays


def own(**changes):
    """Two tasks of five training and three test examples, of which the second may be changed."""
    train, test = (np.ones((5, 2)), np.arange(5) % 3), (np.zeros((3, 2)), np.arange(3))
    parts = dict(zip(("train_x", "train_y", "test_x", "test_y"), train + test, strict=True))
    return [tuple(parts.values()), tuple((parts | changes).values())]


def test_your_own_arrays_make_a_stream():
    stream = Stream.from_arrays(
        [
            ([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], [0, 1, 2], [[6.0, 7.0]], [1]),
            (np.zeros((4, 2), np.uint8) + 255, np.array([1, 0, 0, 1]), np.zeros((2, 2)), [0, 1]),
        ]
    )
    assert stream.spec == Spec((2,), classes=3, tasks=2)
    x, y = stream[0].train.take(np.array([2, 0]))
    np.testing.assert_array_equal(x, [[4, 5], [0, 1]])
    assert y.tolist() == [2, 0]
    np.testing.assert_array_equal(everything(stream[1].train)[0], np.ones((4, 2)))  # bytes are scaled
    assert [len(task.test) for task in stream] == [1, 2]


def test_there_may_be_more_classes_than_are_seen():
    assert Stream.from_arrays(own(), classes=7).spec.classes == 7


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.int8, np.uint16, np.uint8, bool])
def test_inputs_are_handed_out_as_floats_of_32_bits_unless_they_have_64(dtype):
    x, _ = everything(Stream.from_arrays(own(train_x=np.ones((5, 2), dtype)))[1].train)
    assert x.dtype == (np.float64 if dtype == np.float64 else np.float32)
    np.testing.assert_allclose(x, 1 / 255 if dtype == np.uint8 else 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_y": np.arange(4) % 3}, "task 1 train: '5 inputs and 4 labels' is not valid; give one label per input"),
        ({"test_x": np.zeros((2, 2))}, "task 1 test: '2 inputs and 3 labels' is not valid"),
        ({"train_x": np.array([[1, 1]] * 4 + [[1, np.nan]])}, "task 1 train, example 4: nan is not valid"),
        ({"test_x": np.array([[1, 1], [np.inf, 1], [1, 1]])}, "task 1 test, example 1: inf is not valid"),
        ({"train_y": np.array([0, 1, 2, 3, 0])}, "task 1 train labels: 3 is not valid; labels must be 0 to 2"),
        ({"test_y": np.array([0, -1, 2])}, "task 1 test labels: -1 is not valid; labels must be 0 to 2"),
        ({"train_y": np.ones(5)}, "task 1 train labels: 'float64[5]' is not valid"),
        ({"train_y": np.full(5, np.nan)}, "task 1 train labels: 'float64[5]' is not valid"),
        ({"train_y": np.ones((5, 3), int)}, "task 1 train labels: 'int64[5, 3]' is not valid"),
        ({"test_y": np.array(["cat", "dog", "eel"])}, "task 1 test labels: "),
        ({"train_x": np.ones((5, 3))}, "task 1 train inputs: (3,) is not valid"),
        ({"test_x": np.ones((3, 2, 1))}, "task 1 test inputs: (2, 1) is not valid"),
        ({"train_x": np.full((5, 2), "a")}, "task 1 train inputs: 'str32' is not valid; inputs must be numbers"),
        ({"train_x": np.ones((5, 2), complex)}, "task 1 train inputs: 'complex128' is not valid"),
        ({"train_x": np.ones((0, 2)), "train_y": np.ones(0, int)}, "task 1 train: 'no examples' is not valid"),
        ({"test_x": np.ones((0, 2)), "test_y": np.ones(0, int)}, "task 1 test: 'no examples' is not valid"),
    ],
)
def test_arrays_that_cannot_be_a_task(changes, message):
    with pytest.raises(Invalid) as error:
        Stream.from_arrays(own(**changes), classes=3)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_tasks_have_four_arrays_each_and_there_is_one_at_least():
    with pytest.raises(Invalid, match=r"^tasks: 'an empty list' is not valid"):
        Stream.from_arrays([])
    with pytest.raises(Invalid, match=r"^task 1: '3 arrays' is not valid"):
        Stream.from_arrays([own()[0], own()[1][:3]])
    with pytest.raises(Invalid, match=r"^classes: 0 is not valid"):
        Stream.from_arrays(own(), classes=0)


def test_examples_are_as_many_as_their_labels():
    with pytest.raises(Invalid, match=r"^examples: '3 inputs and 2 labels'"):
        Examples(np.zeros((3, 1)), np.zeros(2, int))
