"""What holds for any input: configurations, IDX files, task streams, the memory and the metrics."""

import contextlib
import io
import json
import math
import struct
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cotrain import cli
from cotrain.choice import NoOption, entry_of, flattened, options_of
from cotrain.commands import Run
from cotrain.data import idx
from cotrain.data.batch import Batch
from cotrain.data.examples import Examples
from cotrain.data.fetch import Dataset
from cotrain.data.stream import Spec, Stream, permuted, rotated, rotation, split
from cotrain.errors import Invalid
from cotrain.experiments.config import TABLES, Config, Schedule, all_options, every_name, known_names
from cotrain.experiments.toml import toml
from cotrain.memory import reservoir
from cotrain.methods import BUFFERS, METHODS
from cotrain.metrics import (
    average_accuracy,
    backward_transfer,
    expert_overlap,
    forgetting,
    forward_transfer,
    learning_accuracy,
    summarise,
    task_similarity,
    used_experts,
)


def near(value):
    return pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True)


# Configurations

CHOICES = TABLES | {"inner": METHODS}
INNER = [name for name in METHODS if name != "cotraining"]  # which goes around another method, and not around itself
ABOVE = {"router": {"network": "routing-network"}, "inner": {"method": "cotraining"}}  # where there is such a choice
ABOVE["sampling"] = {"router": "task-matrix", **ABOVE["router"]}
ABOVE["buffer"] = {"method": "replay"}

DEPENDENT = {"k", "experts", "angles", "rotation_step"}  # of which not every value goes with every other's

counts = st.integers(1, 10**6)
rates = st.floats(0, 1e6)
numbers = st.floats(-1e6, 1e6)
values = {
    **{kind: st.sampled_from(list(table)) for kind, table in CHOICES.items()},
    "inner": st.sampled_from(INNER),
    "gates": st.sampled_from(["chosen", "all"]),
    "aggregation": st.sampled_from(["sum", "concatenate"]),
    "angles": st.sampled_from(["steps", "bins", "random"]),
    "interpolation": st.sampled_from(["bilinear", "nearest"]),
    "arrays": st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])).filter(lambda x: x != "None"),
    **{field: st.none() | counts for field in ("examples", "test_examples", "validation", "units", "budget_tasks")},
    **dict.fromkeys(("tasks", "epochs", "batch", "layers", "experts", "k", "memory", "memory_batch"), counts),
    **dict.fromkeys(("fisher_examples", "samples", "code"), counts),
    "rho": st.floats(-80, 80),
    "prior_share": st.floats(1e-6, 1 - 1e-6),
    **dict.fromkeys(("prior_wide", "prior_narrow"), st.floats(1e-6, 1e6)),
    "stream_seed": st.none() | st.integers(0, 2**40),
    "hidden": st.lists(counts, min_size=1, max_size=3).map(tuple),
    "noise": st.floats(1e-6, 1e6),
    **dict.fromkeys(("basis", "batches"), counts),
    **dict.fromkeys(
        ("lr", "gate_lr", "balance", "kl", "strength", "decay", "alpha", "beta", "gamma", "margin", "ridge"), rates
    ),
    **dict.fromkeys(("damping", "temperature"), st.floats(1e-6, 1e6)),
    "buffer": st.sampled_from([*BUFFERS]),
    **{field: st.none() | rates for field in ("router_lr", "memory_lr", "cotraining_lr", "later_lr", "rho_lr")},
    **dict.fromkeys(("rotation_step", "momentum", "b1", "b2", "weight_decay"), numbers),
    **{
        field: st.booleans()
        for field in (
            *("permute_first", "all_classes", "noisy_gates", "noisy", "activate_after", "one_head", "cotrain_heads"),
            *("evaluate_all", "empirical", "by_class", "related"),
        )
    },
}


def owners(field):
    """The choices of which an option is."""
    schedule = [{}] if field in vars(Schedule()) else []
    return schedule + [
        {kind: name} | ABOVE.get(kind, {})
        for kind, table in TABLES.items()
        for name in table
        if field in (kind, *(option.name for option in options_of(entry_of(kind, name, table))))
    ]


@st.composite
def configs(draw, field=None):
    """A configuration that is valid as far as can be told without data; one that has this option, if any."""
    chosen = {kind: draw(values[kind]) for kind in CHOICES}
    if field == "inner":
        chosen |= ABOVE["inner"]
    elif field is not None:
        chosen |= draw(st.sampled_from(owners(field)))
    known = known_names(chosen)
    optional = {name: values[name] for name in known - chosen.keys() - {"arrays"}}
    given = {"arrays": values["arrays"]} if "arrays" in known else {}
    options = {name: chosen[name] for name in known & chosen.keys()}
    options |= draw(st.fixed_dictionaries(given, optional=optional))
    if "k" in known:
        options["k"] = min(options.get("k", 4), options.get("experts", 20))
    if options.get("angles", "steps") != "steps":
        options.pop("rotation_step", None)
    return Config(**options)


def typed(config):
    """A configuration as one types it, with every option."""
    words = []
    for field, value in config.flat.items():
        flag = field.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            words += [f"--{flag}", *map(str, value)]
        else:
            words.append(f"--{flag}={value}")
    return words


def plain(value):
    return list(value) if isinstance(value, tuple) else value


def test_there_is_a_strategy_for_every_option():
    assert set(values) == every_name()


@given(configs())
def test_a_configuration_survives_the_command_line(config):
    parsed = cli._parse(["run", *typed(config)])
    assert parsed.config == config
    assert parsed.command == Run()


@given(configs())
def test_a_configuration_survives_its_record(config):
    record = json.loads(json.dumps(config.record(), allow_nan=False))
    read = Config.read(record)
    assert read == config
    assert hash(read) == hash(config)
    assert read.record() == record


@given(configs())
def test_a_configuration_survives_toml(config):
    tables = tomllib.loads(toml(config.record()))
    assert Config(**flattened(tables)) == config


@given(configs())
def test_options_are_what_differs(config):
    assert Config(**config.options) == config
    usual = {option.name: option.default for _, option in all_options(config.flat)}
    differ = {name: plain(value) for name, value in config.flat.items() if value != usual[name]}
    assert json.loads(json.dumps(config.options)) == differ
    assert config.flat == usual | {name: config.flat[name] for name in differ}


@given(configs(), st.data())
def test_another_option_is_all_that_is_other(config, data):
    field = data.draw(st.sampled_from(sorted(config.flat.keys() - CHOICES.keys() - DEPENDENT)))
    value = data.draw(values[field])
    assert config.but(**{field: value}).flat == config.flat | {field: value}


def answer(arguments):
    """The exit code and what is printed; in place of a run, which nothing here may start, an error with code 1."""
    out, err = io.StringIO(), io.StringIO()

    def accepted(config, *_, **__):
        assert Config(**config.options) == config
        raise RuntimeError("accepted")

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr("cotrain.experiments.run.run_config", accepted)
        try:
            code = cli.main(["run", *arguments])
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def refused(arguments):
    """The one line with which a command is refused."""
    code, out, err = answer(arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), (arguments, err)
    assert err.startswith("cotrain: error: ")
    return err


whole = ["epochs", "batch", "memory", "memory_batch", "tasks", "examples", "test_examples", "validation", "units"]
whole += ["layers", "experts", "k"]
floats = ["lr", "noise", "rotation_step", "router_lr", "memory_lr", "cotraining_lr", "momentum", "balance"]
words = st.text(st.characters(categories=["L", "P"]), min_size=1, max_size=8).filter(lambda word: word[0] != "-")


def is_number(word):
    try:
        float(word)
    except ValueError:
        return False
    return True


no_numbers = words.filter(lambda word: word != "None" and not is_number(word))
no_finite = no_numbers | st.sampled_from([math.nan, math.inf, -math.inf])
bad_values = {
    **dict.fromkeys(whole, st.integers(max_value=0) | st.floats() | no_numbers),
    **dict.fromkeys(floats, no_finite),
    **dict.fromkeys(("seeds", "chunk"), st.integers(max_value=0) | no_numbers),
    "stream_seed": st.integers(max_value=-1) | no_numbers,
    **{kind: words.filter(lambda word, table=table: word not in table) for kind, table in CHOICES.items()},
}


@pytest.mark.parametrize("field", bad_values)
@settings(max_examples=10)
@given(st.data())
def test_a_bad_option_is_refused_in_a_line_that_names_it(field, data):
    config = data.draw(configs(None if field in vars(Run()) else field))
    flag = f"--{field.replace('_', '-')}"
    message = refused([*typed(config), f"{flag}={data.draw(bad_values[field])}"])
    assert flag in message
    assert "no such option" not in message


@given(configs(), st.sampled_from(sorted(values)), st.data())
def test_an_option_that_nothing_has_is_refused_by_its_name(config, field, data):
    if field not in config.flat:
        value = data.draw(values[field].filter(lambda value: value is not None))
        with pytest.raises(NoOption, match=f"^{field}: [^\n]* no such option [^\n]*; it is one of [^\n]*$"):
            Config(**config.flat, **{field: value})
        flag = f"--{field.replace('_', '-')}"
        assert refused([*typed(config), f"{flag}={value}"]).startswith(f"cotrain: error: {flag}: ")


@settings(max_examples=30)  # the parser looks for similar options, which takes its time
@given(st.from_regex(r"--[a-z]{1,4}x[a-z-]{0,8}", fullmatch=True), words, st.integers(0, 2))
def test_an_unknown_option_is_refused_in_a_line(option, word, form):
    assume(option not in FLAGS)
    refused([[option], [option, word], [f"{option}={word}"]][form])


FLAGS = [f"--{name.replace('_', '-')}" for name in sorted(every_name() | vars(Run()).keys())]
tokens = st.one_of(
    st.sampled_from([flag for flag in FLAGS if flag != "--out"]),
    st.text(max_size=6),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from([name for table in CHOICES.values() for name in table]),
    st.sampled_from(["None", "True", "--", "-", "=", ":", "a:b", ".a:b", "--no-", "run", "-x", "\x1b[J"]),
)


@given(st.lists(tokens, max_size=5))
def test_whatever_is_typed_has_one_line_for_an_answer(arguments):
    code, out, err = answer(arguments)
    if code == 0:
        assert {"-h", "--help"} & set(arguments)
    else:
        assert code in (1, 2)
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("cotrain: error: ")
        assert (err == "cotrain: error: accepted\n") == (code == 1)


junk = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.integers()))
in_files = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6)
in_files |= st.sampled_from([name for table in CHOICES.values() for name in table])
in_files |= st.lists(in_files, max_size=3)
tables = st.dictionaries(st.sampled_from([*sorted(every_name()), "name", "seeds", "schedule"]), in_files, max_size=4)
trees = st.recursive(tables, lambda inner: st.dictionaries(st.sampled_from([*CHOICES, "x"]), in_files | inner))


@settings(max_examples=50)
@given(trees, st.lists(tokens, max_size=2))
def test_whatever_is_in_a_file_has_one_line_for_an_answer(tmp_path_factory, tree, more):
    path = tmp_path_factory.mktemp("file") / "run.toml"
    path.write_text(toml(tree))
    code, _, err = answer([str(path), *more])
    if code:
        assert (code in (1, 2), err.count("\n"), err.startswith("cotrain: error: ")) == (True, 1, True), err
        assert (err == "cotrain: error: accepted\n") == (code == 1)
    else:
        assert {"-h", "--help"} & set(more)


@given(st.sampled_from([*CHOICES, "stream_seed", *whole]), junk)
def test_an_option_of_another_type_is_refused(field, value):
    if field not in CHOICES and isinstance(value, int | None) and not isinstance(value, bool):
        with contextlib.suppress(Invalid):  # it may be a number that is fine
            Config(**{field: value})
    elif field not in CHOICES or value not in list(CHOICES[field]):
        with pytest.raises(Invalid, match=f"^{field}: [^\n]*$"):
            Config(**{field: value})


# IDX files


@st.composite
def idx_files(draw):
    """A file that is valid, or nearly so."""
    kind, rank = draw(st.sampled_from([8, 8, 8, 7, 9, 0])), draw(st.sampled_from([1, 1, 3, 3, 0, 2, 4, 255]))
    shape = draw(st.lists(st.integers(0, 4), min_size=min(rank, 4), max_size=min(rank, 4)))
    pixels = draw(st.randoms()).randbytes(math.prod(shape))
    data = bytearray(struct.pack(f">HBB{len(shape)}I", 0, kind, rank, *shape) + pixels)
    match draw(st.sampled_from(["as it is", "byte", "field", "cut", "longer"])):
        case "byte":
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        case "field":
            place = 4 * draw(st.integers(0, len(shape)))
            number = draw(st.sampled_from([0, 1, 2, 3, 12, 0x801, 0x803, 2**31, 2**32 - 1]))
            data[place : place + 4] = number.to_bytes(4, "big")
        case "cut":
            del data[draw(st.integers(0, len(data))) :]
        case "longer":
            data += bytes(draw(st.integers(1, 5)))
    return bytes(data)


def plain_idx(data):
    """The nested lists that a file holds, or nothing if it is no such file, one byte at a time."""
    left = list(data)

    def number():
        value = 0
        for _ in range(4):
            value = 256 * value + left.pop(0)
        return value

    def block(shape):
        return [block(shape[1:]) for _ in range(shape[0])] if shape else left.pop(0)

    try:
        magic = number()
        shape = [number() for _ in range({0x801: 1, 0x803: 3}.get(magic, -1))]
        if not shape or 0 in shape or math.prod(shape) != len(left):
            return None
    except IndexError:
        return None
    return block(shape)


@settings(max_examples=500)
@given(idx_files())
def test_an_idx_file_is_read_as_a_plain_parser_reads_it_or_refused(data):
    expected = plain_idx(data)
    if expected is None:
        with pytest.raises(Invalid, match=r"^IDX [^\n]*$"):
            idx.read(data)
    else:
        found = idx.read(data)
        assert found.tolist() == expected
        assert found.dtype == np.uint8


labels_or_images = hnp.arrays(np.uint8, st.tuples(st.integers(1, 99)) | st.tuples(*[st.integers(1, 9)] * 3))


@given(labels_or_images)
def test_any_labels_and_images_survive_an_idx_file(array):
    file = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    np.testing.assert_array_equal(idx.read(file), array)
    assert plain_idx(file) == array.tolist()


# Task streams


@st.composite
def datasets(draw, square=False):
    """A small data set in which every class is there, both to train and to test; the first image counts its pixels."""
    height = draw(st.integers(1, 5))
    width = height if square else draw(st.integers(1, 5))
    classes = draw(st.integers(1, 6))
    draws = np.random.default_rng(draw(st.integers(0, 2**32)))

    def part(count):
        x = draws.integers(0, 256, (count, height, width), np.uint8)
        x[0] = np.arange(height * width).reshape(height, width)
        return x, draws.permutation(np.arange(count) % classes).astype(np.uint8)

    sizes = [draw(st.integers(classes, 20)) for _ in range(2)]
    return Dataset("tiny", *part(sizes[0]), *part(sizes[1]), classes)


def everything(examples):
    return examples.take(np.arange(len(examples)))


def parts_of(dataset, task):
    """The examples of a task beside the data they are made of."""
    return (task.train, dataset.train_x, dataset.train_y), (task.test, dataset.test_x, dataset.test_y)


def scaled(pixels):
    return pixels.astype(np.float32) / np.float32(255)


seeds = st.integers(0, 2**32)


@given(datasets(), seeds, st.integers(1, 4), st.booleans())
def test_a_permuted_task_moves_each_pixel_to_a_place_of_its_own(dataset, seed, tasks, permute_first):
    stream = permuted(dataset, tasks, permute_first=permute_first, seed=seed)
    for i, task in enumerate(stream):
        order = np.rint(everything(task.train)[0][0].ravel() * 255).astype(int)
        assert sorted(order) == list(range(order.size))
        if i == 0 and not permute_first:
            assert order.tolist() == list(range(order.size))
        for examples, raw_x, raw_y in parts_of(dataset, task):
            x, y = everything(examples)
            np.testing.assert_array_equal(x.reshape(len(x), -1), scaled(raw_x).reshape(len(x), -1)[:, order])
            np.testing.assert_array_equal(y, raw_y)


streams = st.sampled_from([permuted, rotated, split])


def cut(make, dataset, draw):
    """A number of tasks that a stream can have."""
    divisors = [n for n in range(1, dataset.classes + 1) if dataset.classes % n == 0]
    return draw(st.sampled_from(divisors) if make is split else st.integers(1, 4))


@given(streams, datasets(), seeds, st.data())
def test_a_seed_makes_the_same_tasks_in_any_order(make, dataset, seed, data):
    tasks = cut(make, dataset, data.draw)
    limits = {"examples": data.draw(st.none() | st.integers(1, len(dataset.train_x))), "seed": seed}
    one, other = make(dataset, tasks, **limits), make(dataset, tasks, **limits)
    backwards = {task: everything(other[task].train) for task in reversed(range(tasks))}
    for task in range(tasks):
        for a, b in zip(everything(one[task].train), backwards[task], strict=True):
            assert a.tobytes() == b.tobytes()


@given(streams, datasets(), seeds, st.data())
def test_every_task_is_as_the_spec_says(make, dataset, seed, data):
    tasks = cut(make, dataset, data.draw)
    stream = make(dataset, tasks, seed=seed)
    assert len(stream) == len(list(stream)) == tasks
    for task in stream:
        for examples in task:
            x, y = everything(examples)
            assert x.shape == (len(examples), *stream.spec.shape)
            assert (x.dtype, y.dtype) == (np.float32, np.int32)
            assert ((0 <= y) & (y < stream.spec.classes)).all()
            assert ((0 <= x) & (x <= 1 + 1e-6)).all()


@given(datasets(), seeds, st.data())
def test_a_split_gives_away_every_example_once(dataset, seed, data):
    stream = split(dataset, cut(split, dataset, data.draw), seed=seed)
    for part, (raw_x, raw_y) in enumerate(((dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y))):
        given_away = []
        for i, task in enumerate(stream):
            x, y = everything(task[part])
            labels = y + i * stream.spec.classes
            given_away += [(label, image.tobytes()) for label, image in zip(labels.tolist(), x, strict=True)]
        assert sorted(given_away) == sorted(zip(raw_y.tolist(), map(np.ndarray.tobytes, scaled(raw_x)), strict=True))


@given(streams, datasets(), seeds, st.data())
def test_a_limit_takes_that_many_different_examples(make, dataset, seed, data):
    tasks = cut(make, dataset, data.draw)
    limits = [data.draw(st.integers(1, len(x))) for x in (dataset.train_x, dataset.test_x)]
    whole = make(dataset, tasks, seed=seed)
    few = make(dataset, tasks, examples=limits[0], test_examples=limits[1], seed=seed)
    for all_of_it, some in zip(whole, few, strict=True):
        for big, small, limit in zip(all_of_it, some, limits, strict=True):
            assert len(small) == min(limit, len(big))
            left = [(image.tobytes(), label) for image, label in zip(*everything(big), strict=True)]
            for image, label in zip(*everything(small), strict=True):
                left.remove((image.tobytes(), label))


@given(datasets(square=True), st.integers(-8, 8))
def test_quarter_turns_only_move_pixels(dataset, quarters):
    stream = rotated(dataset, 3, step=90.0 * quarters)
    for i, task in enumerate(stream):
        for examples, raw_x, raw_y in parts_of(dataset, task):
            x, y = everything(examples)
            np.testing.assert_array_equal(x, np.rot90(scaled(raw_x), i * quarters, axes=(1, 2)))
            np.testing.assert_array_equal(y, raw_y)


@given(datasets(), st.integers(-3, 3))
def test_half_and_whole_turns_only_move_pixels(dataset, halves):
    for examples, raw_x, _ in parts_of(dataset, rotated(dataset, 2, step=180.0 * halves)[1]):
        np.testing.assert_array_equal(everything(examples)[0], np.rot90(scaled(raw_x), 2 * halves, axes=(1, 2)))


@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.floats(-720, 720))
def test_any_turn_mixes_neighbours_and_turns_back_in_a_mirror(shape, degrees):
    turn = rotation(shape, degrees).toarray()
    assert turn.min() >= 0
    assert turn.sum(axis=1).max() <= 1 + 1e-6
    assert (turn > 0).sum(axis=1).max() <= 4
    np.testing.assert_allclose(rotation(shape, degrees + 360).toarray(), turn, rtol=0, atol=1e-6)
    mirror = np.arange(turn.shape[0]).reshape(shape)[:, ::-1].ravel()
    np.testing.assert_allclose(rotation(shape, -degrees).toarray(), turn[mirror][:, mirror], rtol=0, atol=1e-6)


@given(streams, datasets(), seeds, st.data())
def test_a_joint_stream_has_the_same_tasks(make, dataset, seed, data):
    stream = make(dataset, cut(make, dataset, data.draw), seed=seed)
    joint = stream.shuffled()
    assert joint.spec == stream.spec
    assert joint.shuffled().phases == joint.phases == [list(range(len(stream)))]
    assert stream.phases == [[task] for task in range(len(stream))]
    for one, other in zip(stream, joint, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(everything(a)[0], everything(b)[0])
            np.testing.assert_array_equal(everything(a)[1], everything(b)[1])


@given(st.integers(1, 300), st.integers(1, 400), seeds)
def test_examples_are_taken_one_by_one_or_all_at_once(count, taken, seed):
    draws = np.random.default_rng(seed)
    x, y = draws.integers(0, 256, (count, 3), np.uint8), draws.integers(0, 9, count)
    indices = draws.integers(0, count, taken)
    found = Examples(x, y, lambda pixels: pixels[:, ::-1]).take(indices)
    np.testing.assert_array_equal(found[0], scaled(x)[indices][:, ::-1])
    np.testing.assert_array_equal(found[1], y[indices])


@st.composite
def own_tasks(draw):
    """Tasks of one's own that can be used, with the number of classes."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=3))
    classes = draw(st.integers(1, 5))
    number = draw(st.sampled_from(["<f4", ">f4", "<f8", ">f8", "<f2", "u1", "<i8", ">i2", "?"]))
    label = draw(st.sampled_from(["<i8", ">i4", "u1", "<u8", "i1"]))
    draws = np.random.default_rng(draw(seeds))

    def part():
        count = draw(st.integers(1, 5))
        x = np.asarray(draws.integers(0, 2, (count, *shape)) + draws.normal(size=(count, *shape)))
        return [np.abs(x).astype(number), draws.integers(0, classes, count).astype(label)]

    return [[*part(), *part()] for _ in range(draw(st.integers(1, 3)))], classes


@given(own_tasks(), st.booleans())
def test_tasks_of_ones_own_are_handed_out_as_they_are(own, given_classes):
    tasks, classes = own
    stream = Stream.from_arrays(tasks, classes if given_classes else None)
    highest = max(int(y.max()) for task in tasks for y in (task[1], task[3]))
    assert stream.spec == Spec(tasks[0][0].shape[1:], classes if given_classes else highest + 1, len(tasks))
    for task, (train_x, train_y, test_x, test_y) in zip(stream, tasks, strict=True):
        for examples, raw_x, raw_y in ((task.train, train_x, train_y), (task.test, test_x, test_y)):
            x, y = everything(examples)
            kind = np.float64 if raw_x.dtype.newbyteorder("=") == np.float64 else np.float32
            np.testing.assert_array_equal(x, scaled(raw_x) if raw_x.dtype == np.uint8 else raw_x.astype(kind))
            np.testing.assert_array_equal(y, raw_y)
            assert (x.dtype, y.dtype) == (kind, np.int32)


NOT_FINITE = (np.nan, np.inf, -np.inf, 1e39, -1e300)
WRONG_LABEL_TYPES = (np.float32, np.float64, complex, bool, "U3", "S3", object, "M8[s]")
WRONG_INPUT_TYPES = (complex, "U3", "S3", object, "M8[s]", np.longdouble)


SPOILERS = {  # what makes of inputs, labels and the number of classes something that cannot be used
    "number": lambda x, y, classes, draw: (changed(x, draw, float, draw(st.sampled_from(NOT_FINITE))), y),
    "negative label": lambda x, y, classes, draw: (x, changed(y, draw, np.int64, draw(st.integers(-(2**63), -1)))),
    "large label": lambda x, y, classes, draw: (x, changed(y, draw, np.uint64, draw(st.integers(classes, 2**64 - 1)))),
    "next label": lambda x, y, classes, draw: (x, changed(y, draw, np.int64, classes)),
    "label type": lambda x, y, classes, draw: (x, y.astype(draw(st.sampled_from(WRONG_LABEL_TYPES)))),
    "input type": lambda x, y, classes, draw: (x.astype(float).astype(draw(st.sampled_from(WRONG_INPUT_TYPES))), y),
    "label too many": lambda x, y, classes, draw: (x, np.concatenate([y, y[:1]])),
    "label too few": lambda x, y, classes, draw: (x, y[:-1]),
    "rank": lambda x, y, classes, draw: (x[..., None], y),
    "rank of labels": lambda x, y, classes, draw: (x, y[:, None]),
    "one label": lambda x, y, classes, draw: (x, y[0]),
    "one input": lambda x, y, classes, draw: (x[0], y),
    "no numbers": lambda x, y, classes, draw: (np.zeros((len(x), 0)), y),
    "no examples": lambda x, y, classes, draw: (x[:0], y[:0]),
}


def changed(array, draw, dtype, value):
    """The array with another value somewhere."""
    array = array.astype(dtype)
    array[np.unravel_index(draw(st.integers(0, array.size - 1)), array.shape)] = value
    return array


@given(st.integers(2**31 - 1, 2**64 - 1))
def test_labels_that_are_no_32_bit_numbers_are_refused(label):
    task = (np.ones((1, 2)), np.array([label], np.uint64), np.ones((1, 2)), np.array([0]))
    for classes in (None, label + 1):
        with pytest.raises(Invalid, match=rf"^task 0 train labels: {label} "):
            Stream.from_arrays([task], classes)


@pytest.mark.parametrize("kind", SPOILERS)
@settings(max_examples=30)
@given(own_tasks(), st.data())
def test_tasks_that_cannot_be_used_are_refused_by_name(kind, own, data):
    tasks, classes = own
    task, part = data.draw(st.integers(0, len(tasks) - 1)), data.draw(st.sampled_from([0, 2]))
    tasks[task][part : part + 2] = SPOILERS[kind](*tasks[task][part : part + 2], classes, data.draw)
    with pytest.raises(Invalid, match=r"^[^\n]*$") as error:
        Stream.from_arrays(tasks, classes)
    if task > 0:  # the first task is what the others are compared with
        assert str(error.value).startswith(f"task {task} {'test' if part else 'train'}")


@pytest.mark.parametrize("spoil", [lambda x: np.zeros((len(x), 0)), lambda x: x[0].ravel()[0]], ids=["empty", "scalar"])
@given(own_tasks())
def test_inputs_without_numbers_or_without_examples_are_refused(spoil, own):
    tasks, classes = own
    with pytest.raises(Invalid, match=r"^task 0 train inputs: "):
        Stream.from_arrays([(spoil(a), b, spoil(c), d) for a, b, c, d in tasks], classes)


# The memory

CAPACITY, SIZE, OFFERED = 5, 4, 14
SPEC = Spec(shape=(1,), classes=7, tasks=3)
RESERVOIR = reservoir(CAPACITY, 3)
add = jax.jit(RESERVOIR.add)


def offered(numbers):
    """A batch of examples with these numbers, and padding; number n has label n mod 7 and task n mod 3."""
    n = np.array([*numbers, *[99] * (SIZE - len(numbers))], np.int32)
    weight = (np.arange(SIZE) < len(numbers)).astype(np.float32)
    return Batch(jnp.asarray(n[:, None], jnp.float32), jnp.asarray(n % 7), jnp.asarray(n % 3), jnp.asarray(weight))


def remembered(cuts, place, pick):
    """The memory after each batch of the sequence 0, 1, …, cut into batches of these sizes."""
    memory, start = RESERVOIR.init(SPEC), 0
    for cut in cuts:
        bits = np.zeros((SIZE, 2), np.uint32)
        bits[:cut] = place[start : start + cut]
        memory = add(memory, offered(range(start, start + cut)), (jnp.asarray(bits), jnp.asarray(pick)))
        start += cut
        yield start, memory


cuts = st.lists(st.integers(0, SIZE), max_size=OFFERED).map(
    lambda sizes: [size for i, size in enumerate(sizes) if sum(sizes[: i + 1]) <= OFFERED]
)
bits = hnp.arrays(np.uint32, (OFFERED, 2), elements=st.integers(0, 2**32 - 1), fill=st.nothing())


def algorithm_r(count, place):
    """Vitter's Algorithm R on the sequence 0, 1, …, in whole numbers."""
    held = []
    for i in range(count):
        where = i if i < CAPACITY else (i + 1) * ((int(place[i][0]) << 32) + int(place[i][1])) >> 64
        if where < CAPACITY:
            held[where : where + 1] = [i]
    return held


@given(cuts, bits, st.integers(0, 2**32 - 1))
def test_the_memory_is_that_of_algorithm_r_after_every_batch(cuts, place, pick):
    pick = np.random.default_rng(pick).integers(0, 2**32, (3, 2), np.uint32)
    for count, memory in remembered(cuts, place, pick):
        size = min(count, CAPACITY)
        held = np.asarray(memory.x[:size, 0]).astype(int).tolist()
        assert memory.seen == count
        assert held == algorithm_r(count, place)
        assert set(held) <= set(range(count))
        assert len(set(held)) == size
        np.testing.assert_array_equal(memory.y[:size], np.array(held, int) % 7)
        np.testing.assert_array_equal(memory.task[:size], np.array(held, int) % 3)
        assert not np.asarray(memory.x[size:]).any()
        batch = RESERVOIR.sample(memory)
        assert batch.weight.tolist() == [float(count > 0)] * 3
        if count:
            drawn = [held[(size * ((int(a) << 32) + int(b))) >> 64] for a, b in pick]
            assert np.asarray(batch.x[:, 0]).astype(int).tolist() == drawn
            assert batch.y.tolist() == [n % 7 for n in drawn]
            assert batch.task.tolist() == [n % 3 for n in drawn]


@given(cuts, bits)
def test_a_sequence_leaves_the_same_however_it_is_cut(cuts, place):
    pick = np.zeros((3, 2), np.uint32)
    total = sum(cuts)
    assume(total)
    *_, (_, one) = remembered(cuts, place, pick)
    *_, (_, other) = remembered([SIZE] * (total // SIZE) + [total % SIZE], place, pick)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


# Metrics

shares = st.integers(0, 1000).map(lambda n: n / 1000)
matrices = st.integers(2, 6).flatmap(lambda tasks: hnp.arrays(float, (tasks, tasks), elements=shares))
METRICS = (average_accuracy, backward_transfer, forgetting, learning_accuracy)


def shuffled_but_for_the_last(accuracy, data):
    """The matrix of the same tasks in another order, with the last still the last."""
    last = len(accuracy) - 1
    order = [*data.draw(st.permutations(range(last))), last]
    return accuracy[order][:, order]


@given(matrices, st.data())
def test_the_order_of_the_earlier_tasks_does_not_matter(accuracy, data):
    other = shuffled_but_for_the_last(accuracy, data)
    for metric in METRICS:
        assert metric(other) == near(metric(accuracy))


@given(matrices)
def test_metrics_are_within_bounds(accuracy):
    assert accuracy[-1].min() <= average_accuracy(accuracy) + 1e-12
    assert average_accuracy(accuracy) - 1e-12 <= accuracy[-1].max()
    assert 0 <= learning_accuracy(accuracy) <= 1
    for metric in (backward_transfer, forgetting):
        assert -1 <= metric(accuracy) <= 1
    assert -1 <= forward_transfer(accuracy, accuracy[0]) <= 1


@given(matrices)
def test_tasks_to_come_matter_to_forward_transfer_alone(accuracy):
    seen = np.where(np.tri(len(accuracy)), accuracy, np.nan)
    poor = np.where(np.tri(len(accuracy)), accuracy, 0)
    for metric in METRICS:
        assert metric(seen) == near(metric(poor))
        assert math.isfinite(metric(seen))
    assert math.isnan(forward_transfer(seen, accuracy[0]))


@given(matrices, st.data())
def test_what_a_metric_needs_and_has_not_makes_it_nan(accuracy, data):
    tasks = len(accuracy)
    after, task = (data.draw(st.integers(0, tasks - 1)) for _ in range(2))
    spoilt = accuracy.copy()
    spoilt[after, task] = np.nan
    needed = {
        average_accuracy: after == tasks - 1,
        learning_accuracy: after == task,
        backward_transfer: task < tasks - 1 and after in (task, tasks - 1),
        forgetting: task < tasks - 1 and (after == tasks - 1 or tasks == 2),
        lambda accuracy: forward_transfer(accuracy, np.zeros(tasks)): task == after + 1,
    }
    for metric, is_needed in needed.items():
        assert math.isnan(metric(spoilt)) == is_needed
        if not is_needed and metric is not forgetting:  # which looks for the best of what there is
            assert metric(spoilt) == metric(accuracy)


samples = hnp.arrays(float, st.integers(1, 9), elements=st.floats(-10, 10))


@given(samples, st.floats(-5, 5), st.floats(0.01, 5), st.data())
def test_a_summary_moves_and_grows_with_its_numbers(values, shift, scale, data):
    summary = summarise(values)
    other = summarise(np.array(data.draw(st.permutations(values.tolist()))) * scale + shift)
    assert other.seeds == summary.seeds == len(values)
    assert other.std == near(summary.std * scale)
    for field in ("mean", "low", "high"):
        assert getattr(other, field) == near(getattr(summary, field) * scale + shift)
    assert len(values) == 1 or summary.low <= summary.mean <= summary.high
    narrow = summarise(values, confidence=0.5)
    assert len(values) == 1 or narrow.high - narrow.low <= summary.high - summary.low + 1e-12


@st.composite
def histories(draw):
    """Gates after each task: of each task positive for some experts, 0 for the others, and 1 together."""
    tasks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    weights = draw(hnp.arrays(float, (tasks, tasks, experts), elements=st.integers(0, 5)))
    chosen = draw(hnp.arrays(int, (tasks, tasks), elements=st.integers(0, experts - 1)))
    weights += np.eye(experts)[chosen]
    return weights / weights.sum(axis=-1, keepdims=True)


gates = histories().map(lambda history: history[-1])


@given(gates)
def test_similarity_is_symmetric_and_a_share(routes):
    similar = task_similarity(routes)
    np.testing.assert_allclose(similar, similar.T, rtol=0, atol=1e-15)
    assert similar.min() >= 0
    assert similar.max() <= 1 + 1e-12
    own = np.diagonal(similar)
    assert (own >= 1 / routes.shape[1] - 1e-12).all()
    assert (similar**2 <= own[:, None] * own[None, :] + 1e-12).all()
    np.testing.assert_array_equal(own > 1 - 1e-12, (routes > 0).sum(axis=1) == 1)


@given(gates, st.data())
def test_the_experts_names_do_not_matter(routes, data):
    other = routes[:, data.draw(st.permutations(range(routes.shape[1])))]
    np.testing.assert_allclose(task_similarity(other), task_similarity(routes), rtol=0, atol=1e-12)
    np.testing.assert_allclose(expert_overlap(other), expert_overlap(routes), rtol=0, atol=1e-12)


@given(gates)
def test_overlap_counts_the_experts_in_common(routes):
    overlap = expert_overlap(routes)
    experts = [set(np.flatnonzero(route)) for route in routes]
    for i, mine in enumerate(experts):
        for j, other in enumerate(experts):
            assert overlap[i, j] == near(len(mine & other) / len(mine))
    np.testing.assert_array_equal(overlap > 0, task_similarity(routes) > 0)
    np.testing.assert_array_equal(np.diagonal(overlap), 1)


@given(histories(), st.booleans())
def test_used_experts_are_those_of_the_tasks_learned_so_far(routes, joint):
    routes = routes[-1:] if joint else routes
    used = used_experts(routes)
    assert used.dtype == bool
    for phase, after in enumerate(routes):
        learned = after if joint else after[: phase + 1]
        assert set(np.flatnonzero(used[phase])) == {expert for route in learned for expert in np.flatnonzero(route)}
