"""The command line, as a user types it: what it prints, writes and refuses."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import arrays_file

from cotrain import cli
from cotrain.data.fetch import Dataset
from cotrain.experiments.config import Config
from cotrain.experiments.files import read_record
from cotrain.experiments.keep import Kept
from cotrain.report.table import rows

EXAMPLES = Path(__file__).parent.parent / "examples"
DENSE = ["--tasks", "2", "--examples", "40", "--hidden", "8", "8"]
SMALL = [*DENSE, "--experts", "4", "--k", "2"]
MEMORY = {"replay": ["--memory", "20"], "cotraining": ["--memory", "20"]}
HERE = ["--workers", "1"]  # worker processes would not have the stand-in for MNIST


def small(method: str) -> list[str]:
    """Options that make a run of a method small."""
    return [*SMALL, *MEMORY.get(method, [])]


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

    def run(*arguments, left=()):
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
        assert [path.name for path in out.rglob("*.*")] == list(left)
        return lines[0]

    return run


@pytest.mark.parametrize("method", ["finetune", "replay", "cotraining", "private", "joint"])
def test_run_prints_a_table_and_writes_the_records(images, capsys, tmp_path, method):
    assert cli.main(["run", "--method", method, "--seeds", "2", "--out", str(tmp_path), *small(method), *HERE]) == 0
    table = capsys.readouterr().out
    assert "rotated-mnist" in table
    assert method in table
    for seed in (0, 1):
        record = json.loads((tmp_path / f"seed-{seed}" / "result.json").read_text())
        assert record["seed"] == seed
        assert record["config"]["method"]["name"] == method
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
    options = ["--method", "replay", "--network", "shared-bottom", "--memory", "20", *DENSE]
    assert cli.main(["run", *options, "--out", str(tmp_path)]) == 0
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
        (["--lr", "nan"], ["--lr", "nan", "give a number"]),
        (["--lr", "-0.1"], ["--lr", "-0.1", "at least 0"]),
        (["--router-lr", "inf"], ["--router-lr", "inf", "give a number"]),
        (["--memory-lr", "-1"], ["--memory-lr", "-1", "at least 0"]),
        (["--cotraining-lr", "-1"], ["--cotraining-lr", "-1", "at least 0"]),
        (["--noise", "-1"], ["--noise", "-1"]),
        (["--benchmark", "split-mnist", "--tasks", "3"], ["--tasks", "3", "[1, 2, 5, 10]"]),
        (["--method", "private", "--network", "shared-bottom"], ["--network", "'shared-bottom'", "routing-network"]),
        (["--method", "private", "--experts", "10"], ["--experts", "10", "20 or more"]),
        (["--tasks", "many"], ["--tasks", "many", "INT"]),
        (["--tsks", "3"], ["--tsks", "did you mean --tasks?"]),
        (
            ["--method", "finetune", "--memory", "5"],
            ["--memory", "5", "method finetune", "one of method replay, method cotraining"],
        ),
        (
            ["--sampling", "none", "--noise", "0.1"],
            ["--noise", "0.1", "sampling none", "one of sampling gaussian, sampling noisy-top-k, sampling gumbel"],
        ),
        (
            ["--network", "shared-bottom", "--k", "2"],
            ["--k", "2", "network shared-bottom", "one of network routing-network"],
        ),
        (["--router", "input"], ["--router", "'input'", "choose a router by task"]),
        (["--benchmark", "arrays"], ["--arrays", "required"]),
        (["--method", "nowhere:Options"], ["--method", "'nowhere:Options'", "No module named", "package.module:Class"]),
        (
            ["--method", "json:Options"],
            ["--method", "'json:Options'", "no attribute 'Options'", "package.module:Class"],
        ),
        (["--router", "cotrain.experiments.config:Schedule"], ["--router", "Schedule'", "dataclass with __call__"]),
    ],
)
def test_bad_input_is_refused_in_one_line(images, refused, arguments, expected):
    message = refused("run", *arguments)
    for part in expected:
        assert part in message


@pytest.mark.parametrize("method", ["finetune", "replay", "cotraining", "private", "joint"])
def test_a_learning_rate_that_diverges_stops_the_run(images, refused, method):
    message = refused("run", "--method", method, "--lr", "1e20", "--units", "16", *small(method), left=["config.toml"])
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


# What applies


def shown(capsys, *arguments: str) -> set[str]:
    """The options that `cotrain run … --help` shows."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", *arguments, "--help"])
    assert not stop.value.code
    return set(re.findall(r"^[│ ] (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))


def test_help_shows_the_options_of_what_is_chosen(capsys, tmp_path):
    finetune, replay = shown(capsys, "--method", "finetune"), shown(capsys, "--method=replay")
    assert replay - finetune == {"--memory", "--memory-batch", "--memory-lr", "--buffer"}
    assert shown(capsys) - replay == {"--inner", "--cotraining-lr", "--cotrain-heads"}
    assert {
        "--seeds",
        "--benchmark",
        "--tasks",
        "--k",
        "--router",
        "--noise",
        "--lr",
        "--optimizer",
        "--batch",
    } <= finetune
    by_input = shown(capsys, "--method", "finetune", "--router", "input")
    assert by_input ^ finetune == {"--balance", "--noisy", "--sampling", "--noise", "--gates", "--noisy-gates"}
    (tmp_path / "a.toml").write_text('method = "replay"\nrouter = "input"')
    assert shown(capsys, str(tmp_path / "a.toml")) == by_input | replay - finetune


# Configurations in files


def config_of(*arguments: object) -> Config:
    """The configuration that `cotrain run` takes these to be."""
    return cli._parse(["run", *map(str, arguments)]).config


GROUPED = """
epochs = 2

[benchmark]
name = "split-mnist"

[network]
hidden = [8, 8]

[network.router]
name = "task-matrix"
gates = "all"

[network.router.sampling]
name = "gumbel"
noise = 0.2

[method]
name = "cotraining"
cotraining_lr = 0.3
inner = { name = "replay", lr = 0.05, memory = 20, optimizer = { name = "adam" } }
"""
FLAT = """
epochs = 2
benchmark = "split-mnist"
hidden = [8, 8]
gates = "all"
sampling = "gumbel"
noise = 0.2
cotraining_lr = 0.3
lr = 0.05
memory = 20
optimizer = "adam"
"""
FILED = {"epochs": 2, "benchmark": "split-mnist", "hidden": (8, 8), "gates": "all", "sampling": "gumbel", "noise": 0.2}
FILED |= {"lr": 0.05, "optimizer": "adam"}


@pytest.fixture(params=[GROUPED, FLAT], ids=["grouped", "flat"])
def file(request, tmp_path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(request.param)
    return path


def test_a_file_has_options_in_groups_or_not(file):
    assert config_of(file) == Config(**FILED, cotraining_lr=0.3, memory=20)


def test_what_is_typed_goes_before_the_file(file):
    typed = config_of(file, "--lr", "0.4", "--hidden", "7", "--noise=0.01", "--seeds", "2")
    assert typed == Config(**FILED, cotraining_lr=0.3, memory=20).but(lr=0.4, hidden=(7,), noise=0.01)


def test_a_typed_choice_drops_the_files_options_of_the_one_it_replaces(file):
    assert config_of(file, "--method", "finetune") == Config(**FILED, method="finetune")
    assert config_of(file, "--sampling", "none").flat.get("noise") is None
    dense = config_of(file, "--network", "shared-bottom").flat
    assert dense["hidden"] == (8, 8)
    assert "gates" not in dense


def test_typed_arrays_take_the_place_of_a_files_benchmark(file):
    config = config_of(file, "--arrays", "mine.npz")
    assert config.benchmark.name == "arrays"
    assert config.flat["arrays"] == "mine.npz"
    assert config.flat["lr"] == 0.05


@pytest.mark.parametrize(
    ("text", "typed", "expected"),
    [
        ("memry = 5", [], ["--memry", "5", "no such option"]),
        ('method = "finetune"\nmemory = 5', [], ["--memory", "5", "method finetune", "method replay"]),
        ("memry = 5", ["--method", "finetune"], ["--memry", "5", "no such option"]),
        ('tasks = "many"', [], ["--tasks", "'many'", "whole number"]),
        ("lr = 0.1\n[method]\nlr = 0.1", [], ["--lr", "0.1", "two parts"]),
        ("lr = ", [], ["file", "run.toml", "not TOML"]),
        (None, [], ["file", "run.toml", "no such file"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line(refused, tmp_path, text, typed, expected):
    if text is not None:
        (tmp_path / "run.toml").write_text(text)
    message = refused("run", str(tmp_path / "run.toml"), *typed)
    for part in expected:
        assert part in message


def contents(directory: Path) -> dict[str, bytes]:
    """All files but those with the times."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name != "times.json"]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def interrupt(monkeypatch, moment: int, *arguments: str) -> None:
    """Runs a command in this process, and interrupts it at its `moment`-th snapshot."""
    seen, show = [], Kept.show

    def pull(self, snapshot):
        show(self, snapshot)
        seen.append(snapshot.event)
        if len(seen) == moment:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Kept, "show", pull)
        assert cli.main([*arguments, *HERE]) == 130
    assert len(seen) == moment


def test_a_runs_own_file_gives_its_configuration_and_goes_on_with_it(images, monkeypatch, tmp_path, capsys):
    options = ["--sampling", "gumbel", "--lr", "0.05", "--stream-seed", "3", "--save-every", "0", *small("cotraining")]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli.main(["run", *options, "--out", str(whole)]) == 0
    again = config_of(whole / "config.toml")
    assert again == config_of(*options)
    assert again.record() == read_record(whole / "seed-0" / "result.json")["config"]
    interrupt(monkeypatch, 4, "run", *options, "--out", str(cut))
    assert list((cut / "seed-0").glob("checkpoint-*"))
    assert not (cut / "seed-0" / "result.json").exists()
    assert cli.main(["run", str(cut / "config.toml"), "--out", str(cut), "--resume", "--save-every", "0"]) == 0
    assert contents(cut) == contents(whole)
    other = ["run", str(cut / "config.toml"), "--lr", "0.06", "--out", str(cut), "--resume"]
    (cut / "seed-0" / "result.json").unlink()
    before = contents(cut)
    capsys.readouterr()
    assert cli.main(other) == 2
    assert "of another run (lr 0.05, not 0.06)" in capsys.readouterr().err
    assert contents(cut) == before


# One's own


OWN = {
    "method": ["--method", "own_method:Options", "--strength", "50", "--lr", "0.05"],
    "router": ["--router", "own_router:Options", "--one-head", "--method", "replay", "--memory", "20"],
}


@pytest.mark.parametrize("kind", OWN)
def test_ones_own_runs_goes_on_is_checked_and_reported(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("cotrain.report.write.figures", lambda table: {})
    options = ["--arrays", arrays_file(tmp_path / "toy.npz"), "--hidden", "8", "--experts", "4", "--k", "2", *OWN[kind]]
    command = ["run", *options, "--seeds", "2", "--save-every", "0", "--chunk", "2", "--out"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli.main([*command, str(whole), "--workers", "2"]) == 0
    assert OWN[kind][1] in capsys.readouterr().out.replace("\n", "")
    interrupt(monkeypatch, 5, *command, str(cut))
    assert list(cut.glob("seed-0/checkpoint-*"))
    assert cli.main([*command, str(cut), "--workers", "2", "--resume"]) == 0
    assert contents(cut) == contents(whole)

    config = config_of(*options)
    for seed in (0, 1):
        record = read_record(whole / f"seed-{seed}" / "result.json")
        assert record["config"] == json.loads(json.dumps(config.record()))
        assert 0 <= record["acc"] <= 1
        with np.load(whole / f"seed-{seed}" / "routing.npz") as routing:
            assert ("logits_0" in routing.files) is (kind == "method")
            assert routing["gates_0"].shape == (2, 2, 4)
    record = read_record(whole / "seed-0" / "result.json")["config"]
    own = record["method"] if kind == "method" else record["network"]["router"]
    assert own["name"] == OWN[kind][1]
    assert own["strength" if kind == "method" else "sharpness"] == (50 if kind == "method" else 10)
    assert config_of(whole / "config.toml") == config

    monkeypatch.setitem(sys.modules, OWN[kind][1].partition(":")[0], None)  # records are read without it
    capsys.readouterr()
    assert cli.main(["check", str(whole)]) == 0
    checked = capsys.readouterr().out
    assert "2 results, 2 routing histories, " in checked
    assert "problem" not in checked
    assert checked.endswith("all is well\n")
    assert cli.main(["report", str(whole)]) == 0
    label = {"method": "own_method:Options on routing-network", "router": "replay on routing-network"}[kind]
    [row] = json.loads((whole / "runs.json").read_text())
    assert (row["benchmark"], row["method"], row["seeds"]) == ("toy", label, 2)
    assert label in (whole / "index.html").read_text()


BENCHMARK = '''
from dataclasses import dataclass

import numpy as np

import cotrain


@dataclass(frozen=True)
class Lines:
    """which side of a line points are on"""

    lines: int = 2
    """number of lines, each a task"""
    spec = None

    def __call__(self, load):
        def make(seed):
            draws, tasks = np.random.default_rng(seed), []
            for _ in range(self.lines):
                x = draws.normal(size=(60, 4)).astype(np.float32)
                y = (x @ draws.normal(size=4) > 0).astype(int)
                tasks.append((x[:40], y[:40], x[40:], y[40:]))
            return cotrain.Stream.from_arrays(tasks)

        return make
'''


def test_a_benchmark_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_lines.py").write_text(BENCHMARK)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--benchmark", "own_lines:Lines", "--lines", "3", "--network", "shared-bottom", "--method", "finetune"]
    assert shown(capsys, *options) - shown(capsys, *options[4:]) == {"--lines"}
    out = tmp_path / "out"
    command = ["run", *options, "--hidden", "8", "--epochs", "20", "--seeds", "2", "--workers", "2", "--out", str(out)]
    assert cli.main(command) == 0
    records = [read_record(out / f"seed-{seed}" / "result.json") for seed in (0, 1)]
    assert [record["config"]["benchmark"] for record in records] == [{"name": "own_lines:Lines", "lines": 3}] * 2
    assert records[0]["accuracy"] != records[1]["accuracy"]
    assert all(np.diagonal(np.array(record["accuracy"], float)).mean() > 0.7 for record in records)  # chance is 0.5
    capsys.readouterr()
    assert cli.main(["check", str(out)]) == 0
    assert capsys.readouterr().out.endswith("all is well\n")
