"""The command line, as a user types it: what it prints, writes and refuses."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from cotrain import cli
from cotrain.data.fetch import Dataset
from cotrain.experiments.config import Config
from cotrain.experiments.files import read_record
from cotrain.report.table import rows

SMALL = ["--tasks", "2", "--examples", "40", "--hidden", "8", "8", "--experts", "4", "--k", "2", "--memory", "20"]
HERE = ["--workers", "1"]  # worker processes would not have the stand-in for MNIST


@pytest.fixture
def images(monkeypatch):
    """A stand-in for MNIST: each class is a bright row of pixels."""

    def load(name, data_dir=None, report=None):
        generator = np.random.default_rng(0)

        def part(count):
            y = np.arange(count, dtype=np.uint8) % 10
            x = generator.integers(0, 60, size=(count, 28, 28), dtype=np.uint8)
            x[np.arange(count), 4 + 2 * y] = 255
            return x, y

        return Dataset(name, *part(100), *part(50))

    monkeypatch.setattr("cotrain.experiments.build.load", load)


@pytest.fixture
def refused(capsys, tmp_path):
    """Runs a command that must be refused; returns its one line of complaint."""

    def run(*arguments):
        out = tmp_path / "out"
        try:
            code = cli.main([*arguments, "--out", str(out)])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        lines = printed.err.strip().splitlines()
        assert code == 2
        assert printed.out == ""
        assert len(lines) == 1
        assert lines[0].startswith("cotrain: error: ")
        assert not list(out.rglob("*.*"))
        return lines[0]

    return run


@pytest.mark.parametrize("method", ["finetune", "replay", "cotraining", "private", "joint"])
def test_run_prints_a_table_and_writes_the_records(images, capsys, tmp_path, method):
    assert cli.main(["run", "--method", method, "--seeds", "2", "--out", str(tmp_path), *SMALL, *HERE]) == 0
    table = capsys.readouterr().out
    assert "rotated-mnist" in table
    assert method in table
    for seed in (0, 1):
        record = json.loads((tmp_path / f"seed-{seed}" / "result.json").read_text())
        assert record["seed"] == seed
        assert record["config"]["method"] == method
        assert 0 <= record["acc"] <= 1
        assert record["acc"] == pytest.approx(np.mean(record["accuracy"][-1]))
        times = read_record(tmp_path / f"seed-{seed}" / "times.json")
        assert set(times) == {"compiling", "training", "evaluating"}
        assert record["parameters"] > 0
        assert record["accuracy"][0][1] is None
        if method == "joint":
            assert record["bwt"] is None
        else:
            first, last = record["accuracy"][0][0], record["accuracy"][1][0]
            assert record["bwt"] == pytest.approx(last - first)
        with np.load(tmp_path / f"seed-{seed}" / "routing.npz") as routing:
            phases = 1 if method == "joint" else 2
            assert routing["gates_0"].shape == (phases, 2, 4)
            assert routing["used_1"].shape == (phases, 4)
            np.testing.assert_allclose(routing["gates_1"].sum(axis=-1), 1, rtol=1e-6)
    assert not list(tmp_path.rglob(".*"))


def test_a_shared_bottom_has_no_routing_history(images, tmp_path):
    assert cli.main(["run", "--method", "replay", "--network", "shared-bottom", "--out", str(tmp_path), *SMALL]) == 0
    assert not (tmp_path / "seed-0" / "routing.npz").exists()


def test_evaluating_all_tasks_gives_forward_transfer(images, tmp_path):
    assert cli.main(["run", "--method", "finetune", "--evaluate-all", "--out", str(tmp_path), *SMALL]) == 0
    record = json.loads((tmp_path / "seed-0" / "result.json").read_text())
    accuracy = np.array(record["accuracy"], float)
    assert np.isfinite(accuracy).all()
    assert record["forward_transfer"] == pytest.approx(accuracy[0, 1] - record["initial_accuracy"][1])


def test_table_reads_the_records_back(images, capsys, tmp_path):
    cli.main(["run", "--method", "finetune", "--seeds", "2", "--out", str(tmp_path), *SMALL, *HERE])
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("result.json")]
    capsys.readouterr()
    assert cli.main(["table", str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    mean = np.mean([record["acc"] for record in records])
    std = np.std([record["acc"] for record in records], ddof=1)
    assert f"| rotated-mnist | routing-network | finetune | 2 | {mean:.3f} ± {std:.3f} |" in row


def test_the_paper_stands_beside_its_own_configuration_alone():
    numbers = {"acc": 0.9, "bwt": -0.1, "learning_accuracy": 1.0}
    usual, other = ({"config": Config(lr=lr).record(), **numbers} for lr in (0.1, 0.2))
    assert [row.cells[-3:] for row in rows([usual, other])] == [("0.929", "-0.034", ""), ("", "", "lr 0.2")]


def test_list_names_everything(capsys):
    assert cli.main(["list"]) == 0
    printed = capsys.readouterr().out
    for name in ("rotated-mnist", "split-fashion-mnist", "cotraining", "joint", "shared-bottom"):
        assert name in printed


def test_quiet_when_not_a_terminal(images, capsys):
    cli.main(["run", "--method", "finetune", *SMALL])
    assert "seed" not in capsys.readouterr().err


def test_the_command_has_one_thread_of_xla_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cotrain", "list"])
    for before, after in (("", "1"), ("3", "3")):
        monkeypatch.setenv("PJRT_NPROC", before)
        if not before:
            monkeypatch.delenv("PJRT_NPROC")
        assert cli.main() == 0
        assert os.environ["PJRT_NPROC"] == after


def test_the_installed_command():
    program = [sys.executable, "-c", "from cotrain.cli import main; raise SystemExit(main())"]
    done = subprocess.run([*program, "run", "--method", "reply"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "did you mean 'replay'?" in done.stderr


def test_help_imports_nothing_heavy():
    look = "import atexit, sys; atexit.register(lambda: print(bool({'jax', 'numpy', 'equinox'} & {*sys.modules})))"
    code = f"{look}\nfrom cotrain.cli import main\nmain(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--method", "cotraning"], ["--method", "'cotraning'", "did you mean 'cotraining'?"]),
        (["--benchmark", "rotated-mnst"], ["--benchmark", "'rotated-mnst'", "did you mean 'rotated-mnist'?"]),
        (["--network", "shared_bottom"], ["--network", "'shared_bottom'", "did you mean 'shared-bottom'?"]),
        (["--optimizer", "sdg"], ["--optimizer", "'sdg'", "did you mean 'sgd'?"]),
        (["--sampling", "gausian"], ["--sampling", "'gausian'", "did you mean 'gaussian'?"]),
        (["--gates", "some"], ["--gates", "'some'", "choose from chosen, all"]),
        (["--aggregation", "summ"], ["--aggregation", "'summ'", "did you mean 'sum'?"]),
        (["--k", "30"], ["--k", "30", "choose 1 to 20"]),
        (["--k", "0"], ["--k", "0", "at least 1"]),
        (["--experts", "-2"], ["--experts", "-2", "at least 1"]),
        (["--layers", "0"], ["--layers", "0", "at least 1"]),
        (["--units", "0"], ["--units", "0", "at least 1"]),
        (["--hidden", "256", "0"], ["--hidden", "0", "at least 1"]),
        (["--tasks", "0"], ["--tasks", "0", "at least 1"]),
        (["--examples", "-5"], ["--examples", "-5", "at least 1"]),
        (["--examples", "101"], ["--examples", "101", "mnist has 100"]),
        (["--test-examples", "51"], ["--test-examples", "51", "mnist has 50"]),
        (["--epochs", "0"], ["--epochs", "0", "at least 1"]),
        (["--batch", "0"], ["--batch", "0", "at least 1"]),
        (["--memory", "0"], ["--memory", "0", "at least 1"]),
        (["--memory-batch", "-1"], ["--memory-batch", "-1", "at least 1"]),
        (["--seeds", "0"], ["--seeds", "0", "at least 1"]),
        (["--first-seed", "-1"], ["--first-seed", "-1", "at least 0"]),
        (["--stream-seed", "-1"], ["--stream-seed", "-1", "at least 0"]),
        (["--chunk", "0"], ["--chunk", "0", "at least 1"]),
        (["--workers", "0"], ["--workers", "0", "at least 1"]),
        (["--workers", "2", "--at-once", "True"], ["--workers", "2", "leave it out"]),
        (["--hidden", "4"], ["budget", "parameters"]),
        (["--lr", "nan"], ["--lr", "nan", "at least 0"]),
        (["--lr", "-0.1"], ["--lr", "-0.1", "at least 0"]),
        (["--router-lr", "inf"], ["--router-lr", "inf", "at least 0"]),
        (["--memory-lr", "-1"], ["--memory-lr", "-1", "at least 0"]),
        (["--cotraining-lr", "-1"], ["--cotraining-lr", "-1", "at least 0"]),
        (["--noise", "-1"], ["--noise", "-1"]),
        (["--benchmark", "split-mnist", "--tasks", "3"], ["--tasks", "3", "[1, 2, 5, 10]"]),
        (["--method", "private", "--network", "shared-bottom"], ["--network", "'shared-bottom'", "routing-network"]),
        (["--method", "private", "--experts", "10"], ["--experts", "10", "20 or more"]),
        (["--tasks", "many"], ["--tasks", "many", "INT"]),
        (["--tsks", "3"], ["--tsks", "did you mean --tasks?"]),
    ],
)
def test_bad_input_is_refused_in_one_line(images, refused, arguments, expected):
    message = refused("run", *arguments)
    for part in expected:
        assert part in message


@pytest.mark.parametrize("method", ["finetune", "replay", "cotraining", "private", "joint"])
def test_a_learning_rate_that_diverges_stops_the_run(images, refused, method):
    message = refused("run", "--method", method, "--lr", "1e20", "--units", "16", *SMALL)
    assert re.search(r"lr: the loss became (nan|inf) at task 1, step [2-4] \(seed 0\); choose a smaller one", message)


def arrays(**changes):
    generator = np.random.default_rng(0)
    tasks = {}
    for task in range(2):
        tasks[f"train_x_{task}"] = generator.normal(size=(30, 6)).astype(np.float32)
        tasks[f"train_y_{task}"] = np.arange(30) % 3
        tasks[f"test_x_{task}"] = generator.normal(size=(9, 6)).astype(np.float32)
        tasks[f"test_y_{task}"] = np.arange(9) % 3
    return tasks | changes


def test_own_arrays(capsys, tmp_path):
    np.savez(tmp_path / "tasks.npz", **arrays())
    options = ["--experts", "4", "--k", "2", "--hidden", "8"]
    out = tmp_path / "out"
    assert cli.main(["run", "--arrays", str(tmp_path / "tasks.npz"), "--out", str(out), *options]) == 0
    record = json.loads((out / "seed-0" / "result.json").read_text())
    assert np.array(record["accuracy"]).shape == (2, 2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_y_1": np.full(30, -1)}, ["task 1 train labels", "-1", "0 to 2"]),
        ({"train_y_0": np.arange(29) % 3}, ["task 0 train", "30 inputs and 29 labels", "one label per input"]),
        ({"test_x_1": np.full((9, 6), np.nan, np.float32)}, ["task 1 test", "nan", "finite"]),
        ({"train_x_1": np.zeros((30, 7), np.float32)}, ["task 1 train inputs", "(7,)", "(6,)"]),
        ({"train_y_0": np.zeros(30)}, ["task 0 train labels", "float64", "whole number"]),
        ({"train_x_0": np.zeros((0, 6)), "train_y_0": np.zeros(0, int)}, ["task 0 train", "no examples"]),
        ({"train_x_0": np.array([{}] * 30)}, ["arrays", "tasks.npz", "train_x_0"]),
    ],
)
def test_bad_arrays_are_refused_in_one_line(refused, tmp_path, changes, expected):
    np.savez(tmp_path / "tasks.npz", **arrays(**changes))
    message = refused("run", "--arrays", str(tmp_path / "tasks.npz"))
    for part in expected:
        assert part in message


@pytest.mark.parametrize("content", [None, b"", b"not an archive", b"PK\x03\x04 broken"])
def test_a_file_that_is_no_archive_is_refused(refused, tmp_path, content):
    path = tmp_path / "tasks.npz"
    if content is not None:
        path.write_bytes(content)
    assert "--arrays" in refused("run", "--arrays", str(path))


def test_labels_beyond_the_classes_are_refused():
    import cotrain

    good = arrays()
    task = [good[f"{part}_0"] for part in ("train_x", "train_y", "test_x", "test_y")]
    with pytest.raises(cotrain.Invalid, match="labels must be 0 to 1"):
        cotrain.Stream.from_arrays([task], classes=2)


def test_tuning_without_its_library_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["tune"]) == 1
    assert capsys.readouterr().err == "cotrain: error: cotrain tune needs Optuna: pip install 'cotrain[tune]'\n"
