"""What users have their examples in: the same examples come out of all of it, and what is wrong is named."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from cotrain.data.arrays import PARTS, load_arrays
from cotrain.data.examples import Batches
from cotrain.data.stream import Spec, Stream
from cotrain.errors import Invalid

CLASSES, SIDES, COUNT = 3, (4, 5, 3), 11  # rows, columns, channels
DRAWS = np.random.default_rng(0)
NUMBERS = np.arange(COUNT)
X, Y = DRAWS.integers(0, 256, (COUNT, *SIDES), np.uint8), NUMBERS % CLASSES
TEST = X[:2], Y[:2]
PLACES = np.array([3, 10, 0, 3])


def train(given, shape=None):
    """The training examples of a stream of one task, whose tests are never read."""
    return Stream.from_tasks([(given, list)], CLASSES, shape)[0].train


def everything(source):
    """All examples of a source, however it has them."""
    if not isinstance(source, Batches):
        return source.take(np.arange(len(source)))
    return tuple(np.concatenate(parts) for parts in zip(*source, strict=True))


def batches(x=X, y=Y, sizes=(4, 1, 6)):
    """Inputs and labels as batches of these sizes."""
    ends = np.cumsum(sizes)[:-1]
    return list(zip(np.split(x, ends), np.split(y, ends), strict=True))


def pictures(x=X):
    return [Image.fromarray(one) for one in x]


def check(source, x=X, y=Y):
    """Whether a source has these examples, with bytes scaled."""
    found_x, found_y = everything(source)
    np.testing.assert_array_equal(found_x, x.astype(np.float32) / 255 if x.dtype == np.uint8 else x)
    np.testing.assert_array_equal(found_y, y)
    assert (found_x.dtype, found_y.dtype) == (np.float32, np.int32)
    if not isinstance(source, Batches):
        assert len(source) == len(y)
        np.testing.assert_array_equal(source.take(PLACES)[0], found_x[PLACES])
        np.testing.assert_array_equal(source.take(PLACES)[1], found_y[PLACES])


# What needs no library


class Rows:
    """A data set in PyTorch's manner, without PyTorch."""

    def __init__(self, rows):
        self.rows, self.taken = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        self.taken.append(place)
        return self.rows[place]


OWN = {
    "arrays": lambda: (X, Y),
    "lists": lambda: [pictures(), Y.tolist()],
    "a function": lambda: lambda: iter(batches()),
    "a generator function": lambda: lambda: (batch for batch in batches(sizes=(1,) * COUNT)),
    "a generator": lambda: (batch for batch in batches()),
    "a list of batches": lambda: batches(),
    "batches of lists": lambda: lambda: [[pictures(x), y.tolist()] for x, y in batches()],
    "batches with names": lambda: lambda: [{"img": x, "fine_label": y, "coarse_label": 0} for x, y in batches()],
    "empty batches": lambda: lambda: [([], []), *batches()[:1], (X[:0], Y[:0]), *batches()[1:], ([], [])],
    "pictures by number": lambda: Rows(list(zip(pictures(), Y.tolist(), strict=True))),
    "rows with names": lambda: Rows([{"target": y, "pixel_values": x, "id": 7} for x, y in zip(X, Y, strict=True)]),
    "another name": lambda: Rows([{"scan": x, "label": y} for x, y in zip(X, Y, strict=True)]),
}


@pytest.mark.parametrize("given", OWN.values(), ids=OWN)
def test_the_same_examples_come_out_of_whatever_they_are_in(given):
    check(train(given()))
    check(train(given(), shape=SIDES))


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", "<f2", "u1", "<i8", ">i2", "?"])
def test_batches_of_any_numbers_are_floats_of_32_bits(kind):
    x = DRAWS.integers(0, 2, (COUNT, 2)).astype(kind)
    expected = x / np.float32(255) if kind == "u1" else x.astype(np.float32)
    check(train(lambda: batches(x, Y.astype(">u2"))), expected)
    check(train(Rows(list(zip(x, Y, strict=True)))), expected)


def test_a_shape_is_that_of_the_first_input_unless_it_is_given():
    def never():
        raise AssertionError("nothing is read")
        yield

    made = [Stream.from_tasks([(given(), TEST)], CLASSES).spec for given in OWN.values()]
    assert made == [Spec(SIDES, CLASSES, 1)] * len(OWN)
    assert Stream.from_tasks([(never, never)] * 2, CLASSES, SIDES).spec == Spec(SIDES, CLASSES, 2)
    assert Stream.from_tasks([(lambda: [(np.zeros(3), np.zeros(3, int))], list)], CLASSES).spec.shape == ()


def test_examples_are_made_only_when_they_are_taken():
    rows = Rows(list(zip(X, Y, strict=True)))
    source = train(rows, shape=SIDES)
    assert rows.taken == []
    source.take(PLACES)
    assert rows.taken == PLACES.tolist()


def test_examples_are_taken_all_at_once_where_that_can_be():
    rows, asked = Rows(list(zip(X, Y, strict=True))), []
    rows.__getitems__ = lambda places: asked.append(places) or [rows.rows[place] for place in places]
    x, _ = train(rows, shape=SIDES).take(np.arange(600) % COUNT)
    assert [len(places) for places in asked] == [256, 256, 88]
    assert rows.taken == []
    np.testing.assert_array_equal(x, (X / np.float32(255))[np.arange(600) % COUNT])


@pytest.mark.parametrize("kind", ["<f4", ">f8", "u1"])
def test_a_file_that_is_mapped_is_not_read_before_examples_are_taken(tmp_path, kind):
    x = DRAWS.integers(0, 256, (COUNT, 2)).astype(kind)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", Y.astype(">i8"))
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r+") for name in "xy"]
    for stream in (Stream.from_tasks([(mapped, mapped)], CLASSES), Stream.from_arrays([mapped * 2], CLASSES)):
        source = stream[0].train
        mapped[0][:] = x
        check_x, check_y = everything(source)
        np.testing.assert_array_equal(check_x, x / np.float32(255) if kind == "u1" else x)
        np.testing.assert_array_equal(check_y, Y)
        if kind == "u1":
            continue
        mapped[0][7] = np.nan  # what is written after the stream was made is seen, and checked
        source.take(np.array([6, 8]))
        with pytest.raises(Invalid, match=r"^task 0 train, example 7: nan is not valid"):
            source.take(np.array([8, 7]))


def test_a_generator_is_read_only_once():
    stream = Stream.from_tasks([((batch for batch in batches()), TEST)], CLASSES)
    first, *_ = stream[0].train
    np.testing.assert_array_equal(first[1], Y[:4])
    with pytest.raises(
        Invalid, match=r"^task 0 train: 'an iterator' is not valid; it can be read only once; give a fun"
    ):
        list(stream[0].train)
    with pytest.raises(Invalid, match=r"^task 1 test: 'an iterator' is not valid; it can be read only once"):
        Stream.from_tasks([(TEST, TEST), (TEST, (batch for batch in batches()))], CLASSES)


def test_a_function_is_called_for_each_pass():
    calls = []
    source = train(lambda: calls.append(0) or batches(), shape=SIDES)
    assert calls == []
    for passes in (1, 2):
        check(source)
        assert len(calls) == passes


# What is wrong


def after(*bad):
    """A function that gives a good batch and then this."""
    return lambda: [*batches()[:1], *bad]


HALF = np.full((2, *SIDES), np.nan, np.float32)
WRONG = {
    "a text": ("tasks.npz", "'str' is not valid; give a pair of arrays, a function"),
    "a number": (7, "'int' is not valid; give a pair of arrays"),
    "an array alone": (X, "'ndarray' is not valid; give a pair of arrays"),
    "a dict": ({"train": batches()}, "'dict' is not valid; give a pair of arrays"),
    "no rows": (Rows([]), "'no examples' is not valid"),
    "no pair": (after(X[:2]), ", batch 1: 'ndarray' is not valid; give pairs of inputs and labels"),
    "three parts": (after((X, Y, Y)), ", batch 1: 'tuple' is not valid; give pairs"),
    "unknown names": (after({"scan": X, "kind": Y}), r", batch 1 columns: ['scan', 'kind'] is not valid; rename"),
    "labels alone": (after({"label": Y}), r", batch 1 columns: ['label'] is not valid; rename"),
    "another shape": (after((X[:2, :2], Y[:2])), ", batch 1 inputs: (2, 5, 3) is not valid; every task's inputs"),
    "no images": (after((np.array(["a", "b"]), Y[:2])), ", batch 1 inputs: 'str32' is not valid; inputs must be numb"),
    "too many labels": (after((X[:2], Y[:3])), ", batch 1: '2 inputs and 3 labels' is not valid"),
    "one label": (after((X[:2], 1)), ", batch 1 labels: 'int64[]' is not valid"),
    "a label too large": (after((X[:2], [0, 3])), ", batch 1 labels: 3 is not valid; labels must be 0 to 2"),
    "a label too small": (after((X[:2], [-1, 0])), ", batch 1 labels: -1 is not valid"),
    "labels that are no numbers": (after((X[:2], [0.0, 1.0])), ", batch 1 labels: 'float64[2]' is not valid"),
    "no finite number": (after((HALF, Y[:2])), ", batch 1, example 0: nan is not valid"),
    "rows that are no pairs": (Rows([X[0]]), ": 'ndarray' is not valid; give pairs of inputs and labels"),
    "rows of other shapes": (Rows([(X[0], 0), (X[0, 1:], 1)]), " inputs: (3, 5, 3) is not valid; every task's"),
    "rows that are not finite": (Rows([(X[0], 0)] * 300 + [(HALF[0], 1)]), ", example 300: nan is not valid"),
    "a row's label": (Rows([(X[0], 0), (X[1], 4)]), " labels: 4 is not valid; labels must be 0 to 2"),
}


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(part, given, message):
    tasks = [(TEST, TEST), (given, TEST) if part == "train" else (TEST, given)]
    with pytest.raises(Invalid) as error:
        everything(getattr(Stream.from_tasks(tasks, CLASSES)[1], part))
    assert str(error.value).startswith(f"task 1 {part}")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [list, lambda: [(X[:0], Y[:0]), ([], [])], Rows([])])
def test_there_is_no_first_input_where_there_is_none(given):
    with pytest.raises(Invalid, match=r"^task 0 train: 'no examples' is not valid; give at least one"):
        train(given)


def test_what_a_function_raises_says_where_it_came_from():
    def broken():
        yield from batches()[:2]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as error:
        everything(train(broken))
    assert error.value.__notes__ == ["task 0 train: this came after 2 batches"]


def test_a_task_is_a_pair():
    for task in (TEST * 2, [TEST], (batch for batch in batches()), Rows([])):
        with pytest.raises(Invalid, match=r"^task 1: .* is not valid; give \(train, test\)"):
            Stream.from_tasks([(TEST, TEST), task], CLASSES)
    with pytest.raises(Invalid, match=r"^tasks: 'an empty list' is not valid"):
        Stream.from_tasks([], CLASSES)


# Tasks with different numbers of classes


def test_each_task_has_its_own_labels():
    tasks = [(X, y, X, y) for y in (NUMBERS % 2, NUMBERS % 3, NUMBERS % 5)]
    stream = Stream.from_arrays(tasks, classes=[2, 3, 5])
    assert stream.spec == Spec(SIDES, 5, 3, (2, 3, 5))
    assert [stream.spec.classes_of(task) for task in range(3)] == [2, 3, 5]
    pairs = [((x, y), (lambda x=x, y=y: [(x, y)])) for x, y, _, _ in tasks]
    assert Stream.from_tasks(pairs, [2, 3, 5]).spec == stream.spec
    assert Stream.from_tasks(pairs, [5, 5, 5]).spec == Spec(SIDES, 5, 3)
    with pytest.raises(Invalid, match=r"^task 1 train labels: 2 is not valid; labels must be 0 to 1"):
        Stream.from_arrays(tasks, classes=[2, 2, 5])
    with pytest.raises(Invalid, match=r"^task 1 train labels: 2 is not valid; labels must be 0 to 1"):
        Stream.from_tasks(pairs, classes=[2, 2, 5])
    with pytest.raises(Invalid, match=r"^task 2 test, batch 0 labels: 4 is not valid; labels must be 0 to 3"):
        everything(Stream.from_tasks([*pairs[:2], ((X, NUMBERS % 4), pairs[2][1])], classes=[2, 3, 4])[2].test)


@pytest.mark.parametrize("classes", [[2, 3], [2, 3, 5, 5], [2, 0, 5], [2, 2.5, 5], [2, True, 5], []])
def test_there_is_a_number_of_classes_for_each_task(classes):
    with pytest.raises(Invalid, match=r"^classes: "):
        Stream.from_arrays([(X, Y % 2, X, Y % 2)] * 3, classes)


@pytest.mark.parametrize(("classes", "widths"), [(None, ()), (4, ()), ([3, 7], (3, 7)), ([4, 4], ())])
def test_a_file_may_have_the_numbers_of_classes(tmp_path, classes, widths):
    arrays = {f"{part}_{task}": a for task in range(2) for part, a in zip(PARTS, (X, Y, X, Y), strict=True)}
    np.savez(tmp_path / "tasks.npz", **arrays, **({} if classes is None else {"classes": classes}))
    spec = load_arrays(tmp_path / "tasks.npz").spec
    assert spec == Spec(SIDES, 3 if classes is None else np.max(classes), 2, widths)


@pytest.mark.parametrize("classes", [[3], [3, 3, 3], [3, 2], [3.0, 3.0], [[3, 3]], [True, True], [], 0])
def test_a_file_has_a_number_of_classes_for_each_task_if_any(tmp_path, classes):
    arrays = {f"{part}_{task}": a for task in range(2) for part, a in zip(PARTS, (X, Y, X, Y), strict=True)}
    np.savez(tmp_path / "tasks.npz", **arrays, classes=classes)
    with pytest.raises(Invalid) as error:
        load_arrays(tmp_path / "tasks.npz")
    assert error.value.field in ("classes", "task 1 train labels")


# PyTorch


def tensors(torch):
    return torch.from_numpy(X), torch.from_numpy(Y)


def torch_rows(torch, rows):
    """An iterable data set of PyTorch, which may have a length."""

    class Some(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows)

        def __len__(self):
            return len(rows)

    return Some()


TORCH = {
    "tensors": tensors,
    "a list of tensors": lambda torch: [list(tensors(torch)[0]), list(tensors(torch)[1])],
    "a data set": lambda torch: torch.utils.data.TensorDataset(*tensors(torch)),
    "a part of one": lambda torch: torch.utils.data.Subset(
        torch.utils.data.TensorDataset(*(torch.cat([a, a]) for a in tensors(torch))), range(COUNT, 2 * COUNT)
    ),
    "two data sets": lambda torch: torch.utils.data.ConcatDataset(
        [torch.utils.data.TensorDataset(*(a[part] for a in tensors(torch))) for part in (slice(4), slice(4, None))]
    ),
    "an iterable data set": lambda torch: torch_rows(torch, list(zip(*tensors(torch), strict=True))),
    "pictures one by one": lambda torch: torch_rows(torch, list(zip(pictures(), Y.tolist(), strict=True))),
    "a loader": lambda torch: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*tensors(torch)), batch_size=4
    ),
    "a loader's iterator": lambda torch: iter(TORCH["a loader"](torch)),
    "a loader of names": lambda torch: torch.utils.data.DataLoader(
        [{"image": x, "label": y} for x, y in zip(*tensors(torch), strict=True)], batch_size=3
    ),
    "a function that makes a loader": lambda torch: lambda: TORCH["a loader"](torch),
}


@pytest.mark.parametrize("given", TORCH.values(), ids=TORCH)
def test_the_same_examples_come_out_of_what_pytorch_has(given):
    torch = pytest.importorskip("torch")
    check(train(given(torch)))
    check(train(given(torch), shape=SIDES))


def test_rows_of_pytorch_are_read_again_for_each_pass():
    torch = pytest.importorskip("torch")
    for name in ("an iterable data set", "a loader"):
        source = train(TORCH[name](torch))
        assert isinstance(source, Batches)
        check(source)
        check(source)
    rows = list(zip(X, Y, strict=True))
    many = train(torch_rows(torch, [rows[i % COUNT] for i in range(600)]))
    assert [len(y) for _, y in many] == [256, 256, 88]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(X[0], 0), (X[0, 1:], 1)], "task 0 train inputs: (3, 5, 3) is not valid"),
        ([(X[0], 0), X[0]], "task 0 train: 'ndarray' is not valid; give pairs"),
        ([(X[0], 0), (X[0], 3)], "task 0 train, batch 0 labels: 3 is not valid"),
        ([], "task 0 train: 'no examples' is not valid"),
    ],
)
def test_what_is_wrong_with_rows_is_named(rows, message):
    torch = pytest.importorskip("torch")
    with pytest.raises(Invalid) as error:
        everything(train(torch_rows(torch, rows)))
    assert str(error.value).startswith(message)


# Hugging Face


def hugging(datasets, kind=None):
    """A data set of pictures, or of lists of numbers."""
    image = datasets.Image() if kind is None else datasets.Array3D(SIDES, kind)
    features = datasets.Features(
        {"id": datasets.Value("string"), "image": image, "label": datasets.ClassLabel(CLASSES)}
    )
    columns = {"id": list(map(str, Y)), "image": pictures() if kind is None else list(X.astype(kind)), "label": Y}
    return datasets.Dataset.from_dict(columns, features)


HUGGING = {
    "pictures": hugging,
    "as arrays": lambda datasets: hugging(datasets).with_format("numpy"),
    "one by one": lambda datasets: hugging(datasets).to_iterable_dataset(),
    "some of them": lambda datasets: hugging(datasets).select(range(COUNT)[::-1]).select(range(COUNT)[::-1]),
    "with a function": lambda datasets: hugging(datasets).map(lambda row: row, keep_in_memory=True),
    "one by one, with a function": lambda datasets: hugging(datasets).to_iterable_dataset().map(lambda row: row),
    "batch by batch": lambda datasets: lambda: hugging(datasets).iter(batch_size=4),
    "as tensors": lambda datasets: hugging(datasets).with_format("torch"),
    "one by one, as tensors": lambda datasets: hugging(datasets).to_iterable_dataset().with_format("torch"),
}


@pytest.mark.parametrize(("name", "given"), HUGGING.items(), ids=HUGGING)
def test_the_same_examples_come_out_of_what_hugging_face_has(name, given):
    datasets = pytest.importorskip("datasets")
    if "tensors" not in name:
        check(train(given(datasets)))
        check(train(given(datasets), shape=SIDES))
        return
    pytest.importorskip("torch")
    x, y = everything(train(given(datasets)))
    np.testing.assert_array_equal(np.moveaxis(x, 1, 3), X / np.float32(255))  # their tensors have the channels first
    np.testing.assert_array_equal(y, Y)


@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_numbers_of_hugging_face_are_taken_as_they_are(kind):
    datasets = pytest.importorskip("datasets")
    check(train(hugging(datasets, kind)), X.astype(np.float32))
    check(train(hugging(datasets, kind).to_iterable_dataset()), X.astype(np.float32))


def test_several_data_sets_by_name_are_no_task():
    datasets = pytest.importorskip("datasets")
    with pytest.raises(Invalid, match=r"^task 0 train: 'DatasetDict' is not valid; give a pair of arrays"):
        train(datasets.DatasetDict(train=hugging(datasets)))


def test_no_other_library_is_imported():
    code = """
import sys
import numpy as np
import cotrain

x, y = np.eye(4, dtype=np.float32), np.arange(4) % 2
stream = cotrain.Stream.from_tasks([(lambda: [(x, y)], (x, y))], 2)
method = cotrain.finetune(cotrain.shared_bottom(stream.spec, (2,)))
assert len(list(cotrain.learn(method, [stream], [0]))) == 3
print({"torch", "datasets", "PIL", "pandas"} & {name.partition(".")[0] for name in sys.modules})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
