"""Logs of runs: what is in them, also when a run was killed and went on, and what the libraries read back."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import METHODS, NETWORKS, OPTIONS, STREAM, arrays_file, make, streamed

import cotrain
from cotrain import cli
from cotrain.errors import Invalid
from cotrain.experiments import loggers
from cotrain.experiments.files import write_bytes
from cotrain.experiments.keep import Kept
from cotrain.experiments.loggers import check_logs, logger

COTRAINING = ("cotraining", "routing_network")
LOGGED = OPTIONS | {"progress": False, "every": 0}
COLUMNS = ["task", "step", "loss", "accuracy", "accuracy/0", "accuracy/1", "accuracy/2", "experts/0", "entropy/0"]


class Pulled(Exception):
    """The plug, which was pulled."""


class Noted(cotrain.Callback):
    """Notes the measures, as a log has them."""

    def __init__(self):
        self.rows = []

    def after_chunk(self, watch):
        self.rows += [{"task": watch.task, "step": watch.step or None, **measures} for measures in watch.measures]

    after_task = after_chunk


def rows_of(place):
    """The lines of a CSV log, with numbers where there are some."""
    with (place / "log.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def run_until(monkeypatch, moment, *arguments, **options):
    """A run that ends, as if it were killed, when its `moment`-th snapshot was logged and is to be saved."""
    shown, show = [], Kept.show

    def pull(self, snapshot):
        shown.append(snapshot.event)
        if len(shown) == moment:
            raise Pulled
        show(self, snapshot)

    with monkeypatch.context() as patch:
        patch.setattr(Kept, "show", pull)
        with pytest.raises(Pulled):
            cotrain.run(*arguments, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The log of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    cotrain.run(make(COTRAINING), STREAM, out=out, **LOGGED)
    return (out / "seed-0" / "log.csv").read_bytes()


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path_factory):
    """Nothing of this machine's settings for Weights & Biases."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path_factory.getbasetemp() / "wandb-config"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@pytest.fixture(scope="module", autouse=True)
def no_service():
    """The process that the library for Weights & Biases leaves behind is ended."""
    yield
    if library := sys.modules.get("wandb"):
        library.teardown()


# CSV


def test_a_log_has_what_callbacks_are_told(tmp_path):
    noted = Noted()
    cotrain.run(make(COTRAINING), STREAM, out=tmp_path, callbacks=[noted], **LOGGED)
    found = rows_of(tmp_path / "seed-0")
    assert found == [{name: value for name, value in row.items() if value is not None} for row in noted.rows]
    assert len(found) == 3 * (3 + 1)
    text = (tmp_path / "seed-0" / "log.csv").read_text()
    assert text.splitlines()[0].split(",") == COLUMNS
    assert {line.count(",") for line in text.splitlines()} == {len(COLUMNS) - 1}
    assert text.endswith("\n")


def test_seeds_at_once_have_a_log_each(tmp_path):
    noted = Noted()
    options = LOGGED | {"seeds": [3, 1], "at_once": True}
    cotrain.run(make(COTRAINING), STREAM, out=tmp_path, callbacks=[noted], **options)
    logs = rows_of(tmp_path / "seed-3"), rows_of(tmp_path / "seed-1")
    assert [log[0]["loss"] for log in logs] == [row["loss"] for row in noted.rows[:2]]
    assert logs[0][0]["loss"] != logs[1][0]["loss"]


@pytest.mark.parametrize("case", [("joint", "routing_network"), ("replay", "by_input"), ("finetune", "shared_bottom")])
def test_the_columns_are_those_of_what_learns(tmp_path, case):
    cotrain.run(make(case), streamed(case), out=tmp_path, **LOGGED)
    header, *lines = (tmp_path / "seed-0" / "log.csv").read_text().splitlines()
    routed = [] if case[1] == "shared_bottom" else ["experts/0", "entropy/0"]
    own = ["balance/0"] if "balance/0" in header else []
    assert [name for name in header.split(",") if name not in own] == COLUMNS[:7] + routed
    assert len(lines) == (8 + 1 if case[0] == "joint" else 12)
    assert lines[-1].startswith("2,,")


def test_no_log_is_written_where_none_is_wanted(tmp_path):
    cotrain.run(make(COTRAINING), STREAM, out=tmp_path, log=(), **LOGGED)
    assert not list(tmp_path.rglob("log.csv"))


@pytest.mark.parametrize("moment", range(2, 14))
def test_a_run_killed_at_any_moment_has_the_log_of_one_that_was_not(monkeypatch, tmp_path, whole, moment):
    """It was killed after a line was written, before the checkpoint that goes with it."""
    path = tmp_path / "seed-0" / "log.csv"
    run_until(monkeypatch, moment, make(COTRAINING), STREAM, out=tmp_path, **LOGGED)
    assert len(path.read_text().splitlines()) == moment  # with the names of the columns
    path.write_bytes(path.read_bytes()[: -(moment % 4) or None])  # some without a proper end
    cotrain.run(make(COTRAINING), STREAM, out=tmp_path, resume=True, **LOGGED)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("moment", [3, 7, 8])
@pytest.mark.parametrize("case", [COTRAINING, ("joint", "routing_network")], ids="-".join)
def test_what_was_logged_past_the_last_checkpoint_is_dropped(monkeypatch, tmp_path, moment, case):
    """Checkpoints are at the ends of tasks; lines that are cut at any place are dropped too."""
    options = LOGGED | {"every": 1e9}
    cotrain.run(make(case), streamed(case), out=tmp_path / "whole", **options)
    wanted = (tmp_path / "whole" / "seed-0" / "log.csv").read_bytes()
    out = tmp_path / "cut"
    run_until(monkeypatch, moment, make(case), streamed(case), out=out, **options)
    path = out / "seed-0" / "log.csv"
    logged, kept = path.read_bytes(), {file: file.read_bytes() for file in (out / "seed-0").iterdir()}
    assert len(logged.splitlines()) == moment
    for cut in (0, 1, 2, 9, len(logged.splitlines()[-1])):
        for file in out.rglob("*.*"):
            file.unlink()
        for file, data in kept.items():
            file.write_bytes(data)
        path.write_bytes(logged[: len(logged) - cut])
        cotrain.run(make(case), streamed(case), out=out, resume=True, **options)
        assert path.read_bytes() == wanted


def test_a_run_that_goes_on_with_more_tasks_has_the_log_of_one_that_had_them(tmp_path, whole):
    parts = [(*task.train.take(np.arange(40)), *task.test.take(np.arange(30))) for task in map(STREAM.make, range(2))]
    fewer = cotrain.Stream.from_arrays(parts, 3)
    cotrain.run(METHODS[COTRAINING[0]](NETWORKS[COTRAINING[1]](fewer.spec), 0.2), fewer, out=tmp_path, **LOGGED)
    path = tmp_path / "seed-0" / "log.csv"
    assert path.read_text().splitlines()[0].split(",") == [name for name in COLUMNS if name != "accuracy/2"]
    more = make(COTRAINING).method
    cotrain.run(more, STREAM, out=tmp_path, resume=True, **LOGGED)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [b"", b"\0\xff\n" * 9, b"task,step\n1,x\n\n,\n1\n", b'"' + b"x" * 200_000 + b"\n"])
def test_what_is_no_log_is_replaced(tmp_path, whole, content):
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "log.csv").write_bytes(content)
    cotrain.run(make(COTRAINING), STREAM, out=tmp_path, **LOGGED)
    assert (tmp_path / "seed-0" / "log.csv").read_bytes() == whole


def test_a_finished_run_that_is_started_anew_has_a_new_log_and_one_that_goes_on_the_old(tmp_path, whole):
    cotrain.run(make(COTRAINING, lr=0.1), STREAM, out=tmp_path, **LOGGED)
    path = tmp_path / "seed-0" / "log.csv"
    assert path.read_bytes() != whole
    cotrain.run(make(COTRAINING), STREAM, out=tmp_path, **LOGGED)
    assert path.read_bytes() == whole
    before = path.stat().st_mtime_ns
    cotrain.run(make(COTRAINING), STREAM, out=tmp_path, resume=True, **LOGGED)
    assert path.stat().st_mtime_ns == before


def test_a_log_that_cannot_be_written_is_an_error_that_names_it(monkeypatch, tmp_path):
    def full(path, *arguments, **options):
        if path.name == "log.csv" and arguments == ("a",):
            raise OSError(28, "No space left on device")
        return opened(path, *arguments, **options)

    opened = Path.open
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*log\.csv'"):
        cotrain.run(make(COTRAINING), STREAM, out=tmp_path, **LOGGED)


# Names


def test_any_log_goes_with_the_one_that_it_follows():
    assert check_logs([]) == ()
    assert check_logs(["csv"]) == ("csv",)
    assert check_logs(("tensorboard", "csv", "tensorboard")) == ("csv", "tensorboard")


def test_a_name_that_is_none_is_refused_with_the_near_one(tmp_path):
    with pytest.raises(Invalid, match=r"log: 'tensorbord' is not valid; did you mean 'tensorboard'\?"):
        cotrain.run(make(COTRAINING), STREAM, out=tmp_path, log=("csv", "tensorbord"), **LOGGED)
    with pytest.raises(Invalid, match=r"give a list of names, as \['csv'\]"):
        cotrain.run(make(COTRAINING), STREAM, out=tmp_path, log="csv", **LOGGED)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_without_its_library_a_log_says_how_to_get_it(monkeypatch, tmp_path, name):
    for spec in (None, SimpleNamespace(origin=None)):  # the latter as of a directory of that name
        monkeypatch.setattr(loggers, "find_spec", lambda library, spec=spec: spec if library == name else None)
        with pytest.raises(RuntimeError, match=rf"pip install 'cotrain\[{name}\]'"):
            cotrain.run(make(COTRAINING), STREAM, out=tmp_path, log=(name,), **LOGGED)
    assert not list(tmp_path.iterdir())


def on_the_shell(tmp_path, *options):
    """A run as it is typed; returns its exit code and its files."""
    data = arrays_file(tmp_path / "tasks.npz")
    typed = ["run", "--arrays", data, "--network", "shared-bottom", "--method", "finetune", "--hidden", "8"]
    code = cli.main([*typed, "--out", str(tmp_path / "out"), "--workers", "1", *options])
    return code, {path.name.split(".out.")[0] for path in tmp_path.glob("out/seed-0/**/*") if path.is_file()}


def test_logs_are_named_on_the_command_line(tmp_path, capsys):
    assert on_the_shell(tmp_path)[1] >= {"log.csv", "result.json"}
    (tmp_path / "out" / "seed-0" / "log.csv").unlink()
    code, files = on_the_shell(tmp_path, "--log", "none")
    assert code == 0
    assert "log.csv" not in files
    assert on_the_shell(tmp_path, "--log", "csv,wanbd")[0] == 2
    assert "--log: 'wanbd' is not valid; did you mean 'wandb'?" in capsys.readouterr().err


# TensorBoard


def events_of(place):
    """What TensorBoard itself reads from the events of a run: each scalar's steps and values."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(place / "tensorboard"), {"scalars": 0}).Reload()
    found = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert len(list((place / "tensorboard").iterdir())) == 1
    return found


def columns_of(rows, dtype=np.float64):
    """What another log should have of the lines: for each name, the minibatches of all tasks so far, and the number."""
    found, before, step = {}, 0, 0
    for row in rows:
        before, step = (before, row["step"]) if "step" in row else (before + step, 0)
        for name, value in row.items():
            if name != "step":
                found.setdefault(name, []).append((before + step, float(dtype(value))))
    return found


def test_tensorboard_reads_what_the_csv_log_has(tmp_path):
    options = LOGGED | {"seeds": [3, 1], "at_once": True}
    cotrain.run(make(COTRAINING), STREAM, out=tmp_path, log=("tensorboard",), **options)
    for seed in (3, 1):
        place = tmp_path / f"seed-{seed}"
        found = events_of(place)
        assert found == columns_of(rows_of(place), np.float32)
        assert [step for step, _ in found["loss"]] == [16, 32, 42, 58, 74, 84, 100, 116, 126]
        assert [step for step, _ in found["accuracy"]] == [42, 84, 126]


@pytest.mark.parametrize("moment", [3, 8, 12])
def test_where_a_run_goes_on_tensorboard_reads_it_as_one(monkeypatch, tmp_path, whole, moment):
    options = LOGGED | {"every": 1e9, "log": ("tensorboard",)}
    run_until(monkeypatch, moment, make(COTRAINING), STREAM, out=tmp_path, **options)
    place = tmp_path / "seed-0"
    assert len(events_of(place)["task"]) == moment - 1
    cotrain.run(make(COTRAINING), STREAM, out=tmp_path, resume=True, **options)
    assert (place / "log.csv").read_bytes() == whole
    assert events_of(place) == columns_of(rows_of(place), np.float32)


def test_from_the_command_line_tensorboard_has_its_file(tmp_path):
    pytest.importorskip("tensorboard")
    assert {"events", "log.csv"} <= on_the_shell(tmp_path, "--log", "tensorboard,csv")[1]
    place = tmp_path / "out" / "seed-0"
    assert events_of(place) == columns_of(rows_of(place), np.float32)


def test_without_the_library_nothing_else_needs_it():
    code = "import sys, cotrain.experiments.run; sys.exit(bool({'tensorboard', 'wandb', 'IPython'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Weights & Biases


def history_of(place):
    """What the library's own reader finds in the one offline run: its configuration, and its history."""
    [path] = (place / "wandb").glob("offline-run-*/*.wandb")
    read = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    lines = subprocess.run(read, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    [run] = [record["run"] for record in records if record["type"] == "run"]
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    return run, [{name: value for name, value in item.items() if not name.startswith("_")} for item in items]


def as_columns(items):
    found = {}
    for item in items:
        for name, value in item.items():
            if name != "minibatches":
                found.setdefault(name, []).append((item["minibatches"], value))
    return found


def test_an_offline_run_has_what_the_csv_log_has_also_where_it_goes_on(monkeypatch, tmp_path, whole):
    pytest.importorskip("wandb")
    options = LOGGED | {"every": 1e9, "log": ("wandb",), "seeds": [0, 1], "at_once": True}
    write_bytes(tmp_path / "config.toml", b"[method]\nlr = 0.2\n")
    run_until(monkeypatch, 8, make(COTRAINING), STREAM, out=tmp_path, **options)
    before = history_of(tmp_path / "seed-0")[1]
    assert len(before) == 7
    cotrain.run(make(COTRAINING), STREAM, out=tmp_path, resume=True, **options)
    for seed in (0, 1):
        place = tmp_path / f"seed-{seed}"
        run, items = history_of(place)
        assert as_columns(items) == columns_of(rows_of(place))
        assert run["project"] == "cotrain"
        assert run["display_name"] == f"{tmp_path.name}/seed-{seed}"
        assert run["config"]["update"]["seed"] == seed
        assert run["config"]["update"]["method"] == {"lr": 0.2}
    assert items[:7] != before  # those of the other seed


class Library(SimpleNamespace):
    """In the place of the library: notes how runs are begun."""

    def __init__(self):
        super().__init__(begun=[], finished=[], Settings=dict)

    def init(self, **options):
        self.begun.append(options)
        return SimpleNamespace(
            define_metric=lambda *_, **__: None, log=lambda row: None, finish=lambda: self.finished.append(1)
        )


@pytest.mark.parametrize(("mode", "wanted"), [(None, "offline"), ("online", "online"), ("disabled", "disabled")])
def test_the_network_is_used_only_where_the_environment_says_so(monkeypatch, tmp_path, mode, wanted):
    library = Library()
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    places = [tmp_path / "a", tmp_path / "b"]
    for name in ("offline-run-1", "offline-run-2", "run-3"):
        (places[0] / "wandb" / name).mkdir(parents=True)
    (places[0] / "wandb" / "offline-run-2" / "run-2.wandb.synced").touch()
    log = logger("wandb", places, (0, 0))
    log.begin(SimpleNamespace(seeds=[4, 5]))
    assert [options["mode"] for options in library.begun] == [wanted, wanted]
    assert [options["config"] for options in library.begun] == [{"seed": 4}, {"seed": 5}]
    assert [options["dir"] for options in library.begun] == list(map(str, places))
    assert os.environ.get("WANDB_ERROR_REPORTING") == (None if wanted == "online" else "false")
    assert sorted(path.name for path in (places[0] / "wandb").iterdir()) == ["offline-run-2", "run-3"]  # kept elsewhere
    log.close()
    assert len(library.finished) == 2
    os.environ.pop("WANDB_ERROR_REPORTING", None)
