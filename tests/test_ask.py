"""What is asked of a learner from the shell: what is printed, written and refused."""

import csv
import importlib
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import run as last_of
from conftest import toy
from PIL import Image

import cotrain
from cotrain import cli
from cotrain.experiments import cache

STREAM = toy()
X, Y = zip(*(task.test.take(np.arange(30)) for task in STREAM), strict=True)


def learner(stream=STREAM, **options):
    """A learner that has learned nothing: it takes no time."""
    network = cotrain.routing_network(stream.spec, cotrain.dense(8), layers=1, experts=4, k=2, **options)
    return cotrain.Learner(cotrain.finetune(network, lr=0.2))


@pytest.fixture(scope="module")
def learned():
    made = learner()
    for task, (train, _) in enumerate(STREAM):
        made.observe(*train.take(np.arange(240) % 40), task)
        made.finish(task)
    return made


@pytest.fixture
def here(tmp_path, monkeypatch, learned):
    """A working directory with a learner and its examples."""
    monkeypatch.chdir(tmp_path)
    learned.save("learner.safetensors")
    np.save("x.npy", X[1])
    return tmp_path


@pytest.fixture
def asked(capsys):
    """Runs a command that does what it is asked; returns what it prints."""

    def run(*arguments):
        assert cli.main(list(arguments)) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused; returns its one line of complaint."""

    def run(*arguments, code=2):
        try:
            found = cli.main(list(arguments))
        except SystemExit as stop:
            found = stop.code
        printed = capsys.readouterr()
        assert found == code
        assert printed.out == ""
        assert printed.err.startswith("cotrain: error: ")
        assert printed.err.count("\n") == 1
        return printed.err.strip().removeprefix("cotrain: error: ")

    return run


def rows(text):
    """The heading and the lines of a table."""
    heading, *lines = csv.reader(io.StringIO(text))
    return heading, lines


# Predictions


def test_predictions_are_those_of_the_learner(here, asked, learned):
    heading, lines = rows(asked("predict", "learner.safetensors", "--task", "1", "x.npy"))
    probabilities = learned.probabilities(X[1], 1)
    assert heading == ["example", "label", "probability"]
    assert {len(line) for line in lines} == {3}
    assert [line[0] for line in lines] == [str(i) for i in range(30)]
    assert [int(line[1]) for line in lines] == learned.predict(X[1], 1).tolist()
    np.testing.assert_allclose([float(line[2]) for line in lines], probabilities.max(axis=1), rtol=1e-5)
    assert np.mean(Y[1] == [int(line[1]) for line in lines]) > 0.9
    assert asked("predict", "learner.safetensors", "--task", "0", "x.npy") != asked(
        "predict", "learner.safetensors", "--task", "1", "x.npy"
    )


def test_all_probabilities_on_demand(here, asked, learned):
    heading, lines = rows(asked("predict", "learner.safetensors", "x.npy", "--task", "1", "--probabilities"))
    assert heading == ["example", "label", "probability", "p0", "p1", "p2"]
    found = np.array(lines, float)
    np.testing.assert_allclose(found[:, 3:], learned.probabilities(X[1], 1), rtol=1e-5)
    np.testing.assert_array_equal(found[:, 2], found[:, 3:].max(axis=1))


def test_a_task_with_fewer_classes_has_fewer_probabilities(here, asked):
    spec = STREAM.spec._replace(widths=(3, 2, 3))
    network = cotrain.routing_network(spec, cotrain.dense(8), layers=1, experts=4, k=2)
    cotrain.Learner(cotrain.finetune(network)).save("other")
    for task, classes in enumerate(spec.widths):
        heading, lines = rows(asked("predict", "other", "x.npy", "--task", str(task), "--probabilities"))
        assert heading[3:] == [f"p{i}" for i in range(classes)]
        np.testing.assert_allclose(np.array(lines, float)[:, 3:].sum(axis=1), 1, rtol=1e-5)


def test_the_same_examples_in_whatever_file_are_given_the_same_labels(here, asked, monkeypatch):
    expected = asked("predict", "learner.safetensors", "--task", "1", "x.npy")
    np.save("flat.npy", X[1].reshape(30, 6))
    np.savez("x.npz", x=X[1], y=Y[1])
    np.savetxt("x.csv", X[1].reshape(30, 6), fmt="%.9g", delimiter=",", header="a,b,c,d,e,f", comments="")
    np.savetxt("scaled.csv", X[1].reshape(30, 6) * 4, fmt="%.9g", delimiter=",")
    for options in (["flat.npy"], ["x.npz"], ["x.csv"], ["scaled.csv", "--scale", "4"]):
        assert asked("predict", "learner.safetensors", "--task", "1", *options) == expected
    for file, *options in (["x.npy"], ["x.csv"], ["scaled.csv", "--scale", "4"]):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO((here / file).read_bytes())))
        assert asked("predict", "learner.safetensors", "--task", "1", *options, "-") == expected


def test_examples_of_several_files_are_called_after_them(here, asked):
    np.save("y.npy", X[1][:4])
    _, lines = rows(asked("predict", "learner.safetensors", "--task", "1", "x.npy", "y.npy"))
    assert [line[0] for line in lines] == [f"x.npy:{i}" for i in range(30)] + [f"y.npy:{i}" for i in range(4)]
    assert [line[1:] for line in lines[30:]] == [line[1:] for line in lines[:4]]


def test_many_examples_are_predicted_as_few_are(here, asked, learned):
    np.save("many.npy", np.resize(X[1], (20_007, 2, 3)))  # more than are worked on at a time
    _, lines = rows(asked("predict", "learner.safetensors", "--task", "1", "many.npy"))
    assert len(lines) == 20_007
    assert [line[0] for line in lines] == [str(i) for i in range(20_007)]
    assert [int(line[1]) for line in lines] == np.resize(learned.predict(X[1], 1), 20_007).tolist()


def test_images_are_called_by_their_names(here, asked):
    stream = toy(shape=(4, 5), tasks=2)
    made = learner(stream)
    made.save("images")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 5), dtype=np.uint8)
    (here / "some").mkdir()
    names = ["some/a.png", "some/b, c.png", os.fsdecode(b"some/\xff.png")]
    for name, image in zip(names, pixels, strict=True):
        Image.fromarray(image).save(name)
    _, lines = rows(asked("predict", "images", "--task", "1", *names))
    assert [line[0] for line in lines] == ["some/a.png", "some/b, c.png", "some/\\udcff.png"]
    asked("predict", "images", "--task", "1", *names, "--out", "labels.csv")
    assert rows((here / "labels.csv").read_text())[1] == lines
    probabilities = made.probabilities(pixels, 1)
    assert [int(line[1]) for line in lines] == probabilities.argmax(axis=1).tolist()
    np.testing.assert_allclose([float(line[2]) for line in lines], probabilities.max(axis=1), rtol=1e-5)


def test_a_file_is_written_instead(here, asked):
    text = asked("predict", "learner.safetensors", "--task", "1", "x.npy")
    for _ in range(2):  # over the one that is there, too
        arguments = ["predict", "learner.safetensors", "--task", "1", "x.npy", "--out", "new/labels.csv"]
        assert asked(*arguments) == ""
        assert (here / "new" / "labels.csv").read_text() == text
    assert [path.name for path in (here / "new").iterdir()] == ["labels.csv"]


def test_a_runs_directory_is_as_good_as_its_learner(here, asked, refused):
    expected = asked("predict", "learner.safetensors", "--task", "1", "x.npy")
    for seed in (0, 1):
        (here / "run" / f"seed-{seed}").mkdir(parents=True)
    (here / "run" / "seed-0" / "learner.safetensors").write_bytes((here / "learner.safetensors").read_bytes())
    assert asked("predict", "run", "--task", "1", "x.npy") == expected
    assert asked("predict", "run/seed-0", "--task", "1", "x.npy") == expected
    assert "it has no learner" in refused("predict", "run/seed-1", "--task", "1", "x.npy")
    (here / "run" / "seed-1" / "learner.safetensors").write_bytes((here / "learner.safetensors").read_bytes())
    assert "it has seed-0, seed-1" in refused("predict", "run", "--task", "1", "x.npy")


def test_what_is_compiled_is_kept(here, asked, monkeypatch):
    called = []
    monkeypatch.setattr(cache, "share_compiled", lambda: called.append(1))
    asked("predict", "learner.safetensors", "--task", "1", "x.npy")
    np.savez("tests.npz", x=X[1], y=Y[1])
    asked("evaluate", "learner.safetensors", "--task", "1", "tests.npz")
    assert len(called) == 2


def test_a_reader_that_stops_reading_is_no_mistake(here):
    program = [sys.executable, "-c", "from cotrain.cli import main; raise SystemExit(main())"]
    command = [*program, "predict", "learner.safetensors", "--task", "1", "x.npy"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


# Tasks


def test_the_task_may_be_left_out_where_there_is_one(here, asked):
    learner(toy(tasks=1)).save("one")
    expected = asked("predict", "one", "--task", "0", "x.npy")
    assert asked("predict", "one", "x.npy") == expected
    np.savez("tests.npz", x=X[1], y=Y[1])
    assert asked("evaluate", "one", "tests.npz") == asked("evaluate", "one", "--task", "0", "tests.npz")


@pytest.mark.parametrize("network", ["by_input", "shared_bottom"])
def test_the_task_may_be_left_out_where_it_makes_no_difference(here, asked, network):
    if network == "by_input":
        made = learner(one_head=True, router=cotrain.by_input())
    else:
        made = cotrain.Learner(cotrain.finetune(cotrain.shared_bottom(STREAM.spec, (8,), one_head=True)))
    made.save("free")
    expected = asked("predict", "free", "x.npy", "--probabilities")
    assert all(
        asked("predict", "free", "x.npy", "--probabilities", "--task", task) == expected for task in ("0", "1", "2")
    )
    np.savez("tests.npz", x=X[1], y=Y[1])
    assert "any" in asked("evaluate", "free", "tests.npz", "--json", "found.json")
    found = json.loads((here / "found.json").read_text())
    assert found["tasks"] == [{"task": None, "examples": 30, "accuracy": made.evaluate(X[1], Y[1], 2)}]


def test_without_a_task_there_are_all_classes(here, asked):
    spec = STREAM.spec._replace(widths=(2, 3, 2))
    cotrain.Learner(cotrain.finetune(cotrain.shared_bottom(spec, (8,), one_head=True))).save("free")
    assert rows(asked("predict", "free", "x.npy", "--probabilities"))[0][3:] == ["p0", "p1", "p2"]


@pytest.mark.parametrize("options", [{}, {"one_head": True}, {"router": cotrain.by_input()}])
def test_otherwise_it_may_not(here, refused, options):
    learner(**options).save("other")
    np.savez("tests.npz", x=X[1], y=Y[1])
    for command, file in (("predict", "x.npy"), ("evaluate", "tests.npz")):
        expected = "--task: None is not valid; say of which task the examples are, from 0 to 2"
        assert refused(command, "other", file) == expected


@pytest.mark.parametrize("task", ["3", "-1", "1000000"])
def test_a_task_that_there_is_not_is_refused(here, refused, task):
    np.savez("tests.npz", x=X[1], y=Y[1])
    for command, file in (("predict", "x.npy"), ("evaluate", "tests.npz")):
        expected = f"task: {task} is not valid; the learner has 3, from 0 to 2"
        assert refused(command, "learner.safetensors", file, "--task", task) == expected


# Accuracies


def numbers(table):
    """The cells of a table in the terminal."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]


def test_every_form_of_tests_gives_the_accuracies_of_the_tasks(here, asked, learned):
    sizes = (30, 20, 10)
    accuracies = [learned.evaluate(X[task][:size], Y[task][:size], task) for task, size in enumerate(sizes)]
    assert min(accuracies) > 0.9
    parts = {f"test_{part}_{t}": a[t][:size] for t, size in enumerate(sizes) for part, a in (("x", X), ("y", Y))}
    np.savez("arrays.npz", **parts, train_x_0=X[0], train_y_0=Y[0])
    x, y = (np.concatenate([part[t][:size] for t, size in enumerate(sizes)]) for part in (X, Y))
    order = np.random.default_rng(0).permutation(60)
    task = np.repeat(np.arange(3), sizes)
    np.savez("mixed.npz", x=x[order].reshape(60, 6), y=y[order], task=task[order].astype(np.uint8))
    expected = [[str(t), str(size), f"{a:.4f}"] for t, (size, a) in enumerate(zip(sizes, accuracies, strict=True))]
    mean = ["mean", "60", f"{np.mean(accuracies):.4f}"]
    for file in ("arrays.npz", "mixed.npz"):
        assert numbers(asked("evaluate", "learner.safetensors", file, "--json", "found.json")) == [*expected, mean]
        found = json.loads((here / "found.json").read_text())
        assert [row["accuracy"] for row in found["tasks"]] == accuracies
        assert found["mean"] == pytest.approx(np.mean(accuracies))
        one = numbers(asked("evaluate", "learner.safetensors", file, "--task", "1"))
        assert one == [expected[1], ["mean", *expected[1][1:]]]
    np.savez("one.npz", x=X[1][:20], y=Y[1][:20])
    assert numbers(asked("evaluate", "learner.safetensors", "one.npz", "--task", "1")) == one


def test_wrong_labels_count_as_such(here, asked):
    np.savez("tests.npz", x=X[1], y=np.where(np.arange(30) < 15, Y[1], (Y[1] + 1) % 3))
    [[_, _, accuracy], _] = numbers(asked("evaluate", "learner.safetensors", "tests.npz", "--task", "1"))
    assert 0.4 <= float(accuracy) <= 0.6


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": X[0]}, "y is missing"),
        ({"x": X[0], "y": Y[0], "task": np.full(30, 3)}, "task: 3 is not valid; the learner has 3"),
        ({"x": X[0], "y": Y[0], "task": np.full(30, -1)}, "task: -1 is not valid; the learner has 3"),
        ({"test_x_7": X[0], "test_y_7": Y[0]}, "task: 7 is not valid; the learner has 3"),
        ({"x": X[0], "y": Y[0] + 2, "task": np.zeros(30, int)}, "labels must be 0 to 2"),
        ({"test_x_0": X[0][:, :1], "test_y_0": Y[0]}, "the network takes (examples, 2, 3) or (examples, 6)"),
        ({"test_x_0": X[0], "test_y_0": Y[0][:9]}, "give one label per input"),
        ({"test_x_0": X[0] * np.nan, "test_y_0": Y[0]}, "tests.npz: test_x_0, example 0: nan is not valid"),
        ({"test_x_0": X[0][:0], "test_y_0": Y[0][:0]}, "give at least one example"),
        ({"test_x_0": np.array([{}] * 30), "test_y_0": Y[0]}, "not a plain array of numbers"),
    ],
)
def test_bad_tests_are_refused_in_one_line(here, refused, arrays, expected):
    np.savez("tests.npz", **arrays)
    assert expected in refused("evaluate", "learner.safetensors", "tests.npz", "--json", "found.json")
    assert not (here / "found.json").exists()


def test_a_task_of_which_there_are_no_tests_is_refused(here, refused):
    np.savez("tests.npz", test_x_0=X[0], test_y_0=Y[0], test_x_2=X[2], test_y_2=Y[2])
    expected = "--task: 1 is not valid; tests.npz has tests of 0, 2"
    assert refused("evaluate", "learner.safetensors", "tests.npz", "--task", "1") == expected


# Mistakes


def write_mistakes(directory):
    """Files in which something is wrong."""
    contents = {
        "short.npy": (directory / "x.npy").read_bytes()[:-1],
        "empty.npy": b"",
        "text.png": b"hello",
        "nan.csv": b"1,2,3,4,5,nan\n",
        "empty.csv": b"",
        "letters.csv": b"1,2,3,4,5,6\n1,2,3,4,5,x\n",
        "text.npz": b"hello",
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    np.save(directory / "none.npy", X[0][:0])
    np.save(directory / "wide.npy", np.zeros((2, 7)))
    np.save(directory / "objects.npy", np.array([{}] * 6, object))
    np.savez(directory / "two.npz", one=X[0], two=X[0])


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("nothing.npy", "No such file"),
        ("short.npy", "720 bytes, and 719 are there"),
        ("empty.npy", "not an .npy file"),
        ("none.npy", "give at least one example"),
        ("wide.npy", "wide.npy: (2, 7) is not valid; the network takes (examples, 2, 3) or (examples, 6)"),
        ("objects.npy", "not a plain array of numbers"),
        ("two.npz", "none is called x"),
        ("text.npz", "not a NumPy archive"),
        ("text.png", "it is no PNG image"),
        ("nan.csv", "nan.csv, example 0: nan is not valid"),
        ("empty.csv", "there are no numbers in it"),
        ("letters.csv", "line 2: 'x' is no number"),
        ("learner.safetensors", "give .npy, .npz, .csv or .png"),
        (".", "it is not a plain file"),
    ],
)
def test_bad_inputs_are_refused_in_one_line(here, refused, file, expected):
    write_mistakes(here)
    before = sorted(here.iterdir())
    assert expected in refused("predict", "learner.safetensors", "--task", "1", "x.npy", file, "--out", "labels.csv")
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["learner.safetensors", "--task", "1"], 2, "files: [] is not valid; name at least one"),
        (["learner.safetensors", "--task", "one", "x.npy"], 2, "--task"),
        (["nothing", "x.npy"], 1, "No such file or directory: 'nothing'"),
        ([".", "x.npy", "--task", "5"], 2, "task: 5 is not valid"),
        (["empty", "x.npy"], 2, "it has no learner"),
        (["x.npy", "x.npy"], 1, "x.npy is damaged"),
        (
            ["learner.safetensors", "x.npy", "--task", "1", "--out", "empty"],
            2,
            "--out: 'empty' is not valid; name a file",
        ),
        (
            ["learner.safetensors", "x.npy", "--task", "1", "--out", "pipe"],
            2,
            "--out: 'pipe' is not valid; name a file",
        ),
        (["learner.safetensors", "x.npy", "--task", "1", "--out", "./x.npy"], 2, "name another file than what is read"),
        (["learner.safetensors", "x.npy", "--task", "1", "--out", "x.npy/labels.csv"], 1, "x.npy"),
        (["learner.safetensors", "x.npy", "--task", "1", "--scale", "0"], 2, "scale: 0.0 is not valid"),
        (["learner.safetensors", "x.npy", "--task", "1", "--scale", "255"], 2, "there is no CSV"),
        (["learner.safetensors", "x.npy", "--tsk", "1"], 2, "--task"),
        (
            ["learner.safetensors", "x.npy", "--own", "nowhere"],
            2,
            "--own: 'nowhere' is not valid; it cannot be imported",
        ),
        (["learner.safetensors", "x.npy", "--own", "json:Nothing"], 2, "no attribute 'Nothing'"),
        (["learner.safetensors", "x.npy", "--own", ""], 2, "--own: '' is not valid"),
        (["learner.safetensors", "x.npy", "--own", "string:digits"], 2, "give a module, or a class or function of one"),
    ],
)
def test_other_mistakes_are_told_in_one_line(here, refused, arguments, code, expected):
    (here / "empty").mkdir()
    os.mkfifo(here / "pipe")
    before = (here / "x.npy").read_bytes()
    assert expected in refused("predict", *arguments, code=code)
    assert (here / "x.npy").read_bytes() == before
    assert (here / "pipe").is_fifo()


def test_a_file_of_tests_is_not_written_over(here, refused):
    np.savez("tests.npz", x=X[1], y=Y[1])
    before = (here / "tests.npz").read_bytes()
    message = refused("evaluate", "learner.safetensors", "tests.npz", "--task", "1", "--json", "tests.npz")
    assert "name another file than what is read" in message
    assert (here / "tests.npz").read_bytes() == before


# One's own


def test_what_is_ones_own_is_handed_in(here, asked, refused, monkeypatch):
    (here / "mine_to_ask.py").write_text("import jax\n\n\ndef bent(x):\n    return jax.numpy.tanh(x) * 2\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.syspath_prepend(here)
    bent = importlib.import_module("mine_to_ask").bent
    assert float(bent(jnp.array(0.0))) == 0
    network = cotrain.routing_network(STREAM.spec, cotrain.dense(8, bent), layers=1, experts=4, k=2)
    made = cotrain.Learner(cotrain.finetune(network))
    made.save("own")
    monkeypatch.delitem(sys.modules, "mine_to_ask")
    sys.path.remove(str(here))
    message = refused("predict", "own", "x.npy", "--task", "1")
    assert message.startswith("--own: 'mine_to_ask:bent' is not valid; the learner is made of it")
    assert "mine_to_ask" not in sys.modules
    for own in (["mine_to_ask"], ["mine_to_ask:bent"], ["json", "--own", "mine_to_ask:bent"]):
        _, lines = rows(asked("predict", "own", "x.npy", "--task", "1", "--own", *own))
        assert [int(line[1]) for line in lines] == made.predict(X[1], 1).tolist()
    (here / "broken_to_ask.py").write_text("raise KeyError('no\\nway')")
    assert "cannot be imported ('no\\nway')" in refused("predict", "own", "x.npy", "--own", "broken_to_ask")


def test_a_learner_of_a_run_answers(here, asked):
    """What the engine learns and what is predicted is one thing."""
    network = cotrain.shared_bottom(STREAM.spec, (12,))
    snapshot = last_of(cotrain.learn(cotrain.finetune(network, lr=0.2), [STREAM], seeds=[0], batch=6, epochs=6))
    made = cotrain.Learner(cotrain.finetune(network, lr=0.2), state=snapshot.state)
    made.save("engine")
    parts = {f"test_{part}_{t}": a[t] for t in range(3) for part, a in (("x", X), ("y", Y))}
    np.savez("tests.npz", **parts)
    table = numbers(asked("evaluate", "engine", "tests.npz"))
    assert [row[2] for row in table[:-1]] == [f"{a:.4f}" for a in snapshot.accuracy[0, -1]]
