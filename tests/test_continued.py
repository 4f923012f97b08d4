"""Runs that go on with more tasks: files as of a run that had them all from the start, and what is refused."""

import functools
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import METHODS, NETWORKS, OPTIONS, STREAM, arrays_file, identical, leaves

import cotrain
from cotrain import cli
from cotrain.data.fetch import Dataset
from cotrain.engine import blank
from cotrain.experiments.build import build, build_method
from cotrain.experiments.checkpoint import FORMAT, Smaller, load
from cotrain.experiments.config import Config
from cotrain.experiments.continued import continued
from cotrain.experiments.files import read_record
from cotrain.experiments.keep import Kept
from cotrain.experiments.saved import encode
from cotrain.experiments.sealed import seal

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import own_method

LAST = "checkpoint-00002-00000000.safetensors"  # of two tasks
ROUTED = ["--layers", "1", "--experts", "4", "--hidden", "12"]
BOTTOM = ["--method", "finetune", "--network", "shared-bottom", "--hidden", "12"]
MEMORY = ["--memory", "20", "--memory-batch", "5"]
KINDS = {
    "cotraining": [*ROUTED, "--k", "2", *MEMORY],
    "replay": [*ROUTED, "--k", "2", *MEMORY, "--method", "replay", "--optimizer", "adam", "--sampling", "gumbel"],
    "private": [*ROUTED, "--method", "private"],
    "finetune": BOTTOM,
    "replay on a shared bottom": [*BOTTOM, "--method", "replay", *MEMORY, "--optimizer", "adam"],
    "by input": [*ROUTED, "--k", "2", "--method", "finetune", "--router", "input"],
    "one's own": [*ROUTED, "--k", "2", "--method", "own_method:Options"],  # which sees a sample of each task at its end
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@dataclass(frozen=True)
class Points:
    """points around random centres"""

    tasks: int = 2
    """number of tasks"""
    spec, grows = None, True

    def __call__(self, load):
        def task(seed, i):
            draws, y = np.random.default_rng([seed, i]), np.arange(70) % 3
            x = (draws.normal(size=(3, 6))[y] + 0.3 * draws.normal(size=(70, 6))).astype(np.float32)
            return x[:40], y[:40], x[40:], y[40:]

        return lambda seed: cotrain.Stream.from_arrays([task(seed, i) for i in range(self.tasks)])


def run(out, tasks, *options, kind="finetune", workers=1):
    """Runs a command, with 4 minibatches of each task in chunks of 3; returns its exit code."""
    command = ["run", "--benchmark", "test_continued:Points", "--chunk", "3", *KINDS[kind], "--tasks", str(tasks)]
    return cli.main([*command, "--workers", str(workers), "--out", str(out), *options])


def interrupted(monkeypatch, moment, *arguments, **options):
    """A run that is interrupted at its `moment`-th snapshot: one is at the start, and three are of each task."""
    seen, show = [], Kept.show

    def pull(self, snapshot):
        show(self, snapshot)
        seen.append(snapshot.event)
        if len(seen) == moment:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Kept, "show", pull)
        assert run(*arguments, "--save-every", "0", **options) == 130


def contents(directory, but=()):
    """All files but those with the times."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name not in ("times.json", *but)]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs from the start, each of which is made once; from 3 tasks on, their experts are as large as with 2."""

    @functools.cache
    def make(kind, tasks, *options):
        out = tmp_path_factory.mktemp("made") / "out"
        sized = ["--budget-tasks", "2"] if tasks > 2 and "--experts" in KINDS[kind] else []
        assert run(out, tasks, *sized, *options, kind=kind) == 0
        return out

    return make


@pytest.fixture
def begun(made, tmp_path):
    """Makes a run of two tasks, for a test to go on with."""
    return lambda kind, *options: Path(shutil.copytree(made(kind, 2, *options), tmp_path / "begun"))


# As from the start


@every_kind
def test_a_finished_run_goes_on_as_if_it_had_had_all_tasks(made, begun, kind):
    out = begun(kind)
    assert run(out, 4, "--resume", kind=kind) == 0
    assert contents(out) == contents(made(kind, 4))
    assert len(list(out.glob("seed-0/checkpoint-*"))) == 2
    learner = cotrain.load_learner(out, own=[own_method])
    assert (learner.tasks, learner.finished, learner.step) == (4, 4, 0)


@pytest.mark.parametrize("kind", ["cotraining", "private", "one's own", "finetune"])
@pytest.mark.parametrize("moment", [5, 6])
def test_an_unfinished_run_goes_on_too(made, monkeypatch, tmp_path, kind, moment):
    """It was interrupted in the middle of its second task, or at its end, before that was tested."""
    interrupted(monkeypatch, moment, tmp_path, 2, kind=kind)
    assert (tmp_path / "seed-0" / f"checkpoint-00001-0000000{moment - 2}.safetensors").exists()
    assert run(tmp_path, 3, "--resume", kind=kind) == 0
    assert contents(tmp_path) == contents(made(kind, 3))


@pytest.mark.parametrize("kind", ["cotraining", "finetune"])
def test_a_task_at_a_time(made, begun, kind):
    out = begun(kind)
    for tasks in (3, 4):
        assert run(out, tasks, "--resume", kind=kind) == 0
        assert contents(out) == contents(made(kind, tasks))
    assert cli.main(["check", str(out)]) == 0


def test_one_that_is_interrupted_again_goes_on_with_yet_more(made, monkeypatch, tmp_path):
    interrupted(monkeypatch, 5, tmp_path, 2, kind="cotraining")
    interrupted(monkeypatch, 4, tmp_path, 3, "--resume", kind="cotraining")  # in the third task
    assert run(tmp_path, 4, "--resume", kind="cotraining") == 0
    assert contents(tmp_path) == contents(made("cotraining", 4))


@pytest.mark.parametrize(("kind", "options"), [("finetune", []), ("private", ["--at-once", "True"])])
def test_several_seeds_go_on_too(made, begun, kind, options):
    """In worker processes, or in one program."""
    options = ["--seeds", "2", *options]
    out = begun(kind, *options)
    assert run(out, 4, "--resume", *options, kind=kind, workers=1 if "--at-once" in options else 2) == 0
    assert contents(out) == contents(made(kind, 4, *options))


def images(name, data_dir=None, report=None):
    """In the place of MNIST."""
    draws, y = np.random.default_rng(0), np.arange(40, dtype=np.uint8) % 10
    x = draws.integers(0, 255, (40, 28, 28), np.uint8)
    return Dataset(name, x, y, x[:20], y[:20])


@pytest.mark.parametrize("benchmark", ["rotated-mnist", "permuted-mnist"])
def test_images_too(made, begun, monkeypatch, benchmark):
    monkeypatch.setattr("cotrain.experiments.build.load", images)
    out = begun("finetune", "--benchmark", benchmark)
    assert run(out, 4, "--resume", "--benchmark", benchmark) == 0
    assert contents(out) == contents(made("finetune", 4, "--benchmark", benchmark))


def die(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", [[], ["--no-keep-learner"]])
def test_what_was_learned_of_fewer_tasks_does_not_stay(made, begun, monkeypatch, options):
    """Also where the run is killed at the very end."""
    out, but = begun("finetune"), ["learner.safetensors"] if options else []
    with monkeypatch.context() as patch:
        patch.setattr(Kept, "finish", die)
        assert run(out, 4, "--resume", *options) == 130
    assert run(out, 4, "--resume", *options) == 0
    assert contents(out) == contents(made("finetune", 4), but)


def test_an_unfinished_run_of_more_tasks_is_one(begun, monkeypatch, capsys):
    out = begun("finetune")
    interrupted(monkeypatch, 3, out, 4, "--resume")
    assert cli.main(["check", str(out)]) == 0
    assert "unfinished, at task 3, step 4" in capsys.readouterr().out
    before = contents(out)
    assert run(out, 4) == 2
    assert "it holds an unfinished run" in capsys.readouterr().err
    assert contents(out) == before


# Streams


class Stops(cotrain.Callback):
    """Stops a run in its second task."""

    def after_chunk(self, watch):
        if (watch.task, watch.step) == (1, 16):
            watch.stop()


PARTS = [(*STREAM[i].train.take(np.arange(40)), *STREAM[i].test.take(np.arange(30))) for i in range(3)]
NARROW = [part % 2 if part.ndim == 1 else part for part in PARTS[2]]  # a task with fewer classes
NARROWER = cotrain.Stream.from_arrays([*PARTS[:2], NARROW], [3, 3, 2])
REPLAY, FINETUNE = ("replay", "routing_network"), ("finetune", "shared_bottom")


@pytest.mark.parametrize("stops", [[], [Stops()]], ids=["finished", "stopped"])
@pytest.mark.parametrize(("case", "stream"), [(REPLAY, STREAM), (FINETUNE, STREAM), (FINETUNE, NARROWER)])
def test_streams_go_on_too(tmp_path, case, stream, stops):
    fewer, options = cotrain.Stream.from_arrays(PARTS[:2]), OPTIONS | {"progress": False, "resume": True}
    small, large = (METHODS[case[0]](NETWORKS[case[1]](some.spec), 0.2) for some in (fewer, stream))
    [before] = cotrain.run(small, fewer, out=tmp_path / "out", callbacks=stops, **options)
    [result] = cotrain.run(large, stream, out=tmp_path / "out", **options)
    [whole] = cotrain.run(large, stream, out=tmp_path / "whole", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert (before.learner.tasks, result.learner.tasks) == (2, 3)
    assert encode(result.learner) == encode(whole.learner)
    assert identical([result.accuracy, *result.logits, *result.gates], [whole.accuracy, *whole.logits, *whole.gates])
    for task, accuracy in enumerate(result.accuracy[-1]):
        assert result.learner.evaluate(*stream[task].test.take(np.arange(30)), task) == accuracy
    left = contents(tmp_path)
    with pytest.raises(cotrain.Invalid, match=r"\(accuracy is float64\[1, 3, 3\], and float64\[1, 2, 2\] is wanted\)"):
        cotrain.run(small, fewer, out=tmp_path / "out", **options)
    assert contents(tmp_path) == left


def test_a_stream_killed_at_the_very_end(tmp_path, monkeypatch):
    fewer, options = cotrain.Stream.from_arrays(PARTS[:2]), {"out": tmp_path, "progress": False, "resume": True}
    small, large = (METHODS["finetune"](NETWORKS["shared_bottom"](some.spec), 0.2) for some in (fewer, STREAM))
    cotrain.run(small, fewer, **options)
    with monkeypatch.context() as patch:
        patch.setattr(Kept, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            cotrain.run(large, STREAM, **options)
    cotrain.run(large, STREAM, **options)
    accuracy = read_record(tmp_path / "seed-0" / "result.json")["accuracy"]
    assert len(accuracy) == cotrain.load_learner(tmp_path).tasks == 3


# What was learned stays


@every_kind
def test_predictions_stay_before_there_is_more_to_learn(made, kind):
    place, grown = made(kind, 2) / "seed-0", made(kind, 4)
    old, accuracy = cotrain.load_learner(place, [own_method]), read_record(place / "result.json")["accuracy"]
    method, streams = build(Config.read(read_record(grown / "seed-0" / "result.json")["config"]).but())
    stream = streams(0)
    now = load(place / LAST, blank(method, stream, 1), smaller=Smaller(method, stream, [0]))
    new = cotrain.Learner(method, state=now.state, finished=now.phase, step=now.step)
    assert (new.tasks, new.finished, new.step) == (4, 2, 0)
    for task in (0, 1):
        x, y = stream[task].test.take(np.arange(30))
        assert new.probabilities(x, task).tobytes() == old.probabilities(x, task).tobytes()
        assert new.evaluate(x, y, task) == accuracy[1][task] == now.accuracy[0, 1, task]
    for mine, theirs, first in zip(new.routes, old.routes, cotrain.Learner(method).routes, strict=True):
        assert mine.tobytes() == np.concatenate([theirs, first[2:]]).tobytes()
    assert np.isnan(now.accuracy).sum() == 4 * 4 - 3
    assert np.isfinite(new.probabilities(x, 3)).all()


# What is refused


def refused(out, capsys, *arguments, **options):
    """Goes on with a run, which must change nothing; returns its one line of complaint."""
    before = contents(out)
    capsys.readouterr()
    assert run(out, *arguments, "--resume", **options) == 2
    assert contents(out) == before
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("tasks", "options", "reason"),
    [
        (1, [], "tasks 2, not 1"),
        (3, ["--lr", "0.05"], "lr 0.1, not 0.05"),
        (3, ["--hidden", "13"], "hidden [12], not [13]"),
        (3, ["--optimizer", "adam"], "optimizer 'sgd', not 'adam'"),
        (3, ["--method", "replay"], "method 'finetune', not 'replay'"),
        (3, ["--epochs", "2"], "epochs 1, not 2"),
        (3, ["--evaluate-all"], "evaluate_all False, not True"),
        (3, ["--seeds", "2", "--at-once", "True"], "seeds [0], not [0, 1]"),
    ],
)
def test_what_differs_otherwise_is_refused_by_name(begun, capsys, tasks, options, reason):
    said = refused(begun("finetune"), capsys, tasks, *options)
    assert f"it is of another run ({reason}); choose another directory\n" in said


@pytest.mark.parametrize(
    ("kind", "options", "tasks", "reason"),
    [
        ("finetune", ["--method", "joint"], 3, "it is of another run (tasks 2, not 3)"),
        (
            "finetune",
            ["--evaluate-all"],
            3,
            "--tasks: 3 is not valid; with evaluate_all, all tasks are tested from the",
        ),
        ("private", [], 5, "--experts: 4 is not valid; a private expert per task takes 5 or more"),
    ],
)
def test_what_cannot_have_more_tasks_is_refused(begun, capsys, kind, options, tasks, reason):
    assert reason in refused(begun(kind, *options), capsys, tasks, *options, kind=kind)


@pytest.mark.parametrize("options", [["--all-classes"], ["--all-classes", "--one-head"], []])
def test_classes_that_are_split_otherwise_are_other_tasks(tmp_path, monkeypatch, capsys, options):
    monkeypatch.setattr("cotrain.experiments.build.load", images)
    options = ["--benchmark", "split-mnist", *options]
    assert run(tmp_path, 2, *options) == 0
    assert "(tasks 2, not 5)" in refused(tmp_path, capsys, 5, *options)


def test_a_file_with_more_tasks_is_another_file(tmp_path, capsys):
    file, command = arrays_file(tmp_path / "tasks.npz"), ["run", *BOTTOM, "--out", str(tmp_path / "out"), "--resume"]
    assert cli.main([*command, "--arrays", file]) == 0
    before, two = contents(tmp_path / "out"), dict(np.load(file))
    np.savez(file, **two, **{name[:-1] + "2": array for name, array in two.items() if name.endswith("1")})
    assert cli.main([*command, "--arrays", file]) == 2
    assert "it is of another run (tasks.npz is not the file that it was)" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before


# What is gone


def test_with_its_checkpoints_removed_a_run_starts_anew(begun, tmp_path):
    """Its experts are then as large as they are with all tasks from the start."""
    out, whole = begun("cotraining"), tmp_path / "whole"
    for path in out.glob("seed-0/checkpoint-*"):
        path.unlink()
    assert run(out, 4, "--resume", kind="cotraining") == 0
    assert run(whole, 4, kind="cotraining") == 0
    assert contents(out) == contents(whole)
    assert "budget_tasks" not in (out / "config.toml").read_text()


def test_seeds_have_experts_of_one_size_though_one_has_lost_its_checkpoints(made, begun):
    out = begun("private", "--seeds", "2")
    for path in out.glob("seed-0/checkpoint-*"):
        path.unlink()
    assert run(out, 4, "--resume", "--seeds", "2", kind="private") == 0
    assert contents(out) == contents(made("private", 4, "--seeds", "2"))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(made, begun, capsys):
    out = begun("private")
    (out / "seed-0" / LAST).write_bytes((out / "seed-0" / LAST).read_bytes()[:-1] + b"?")
    assert run(out, 3, "--resume", kind="private") == 0
    assert "its checksum does not agree with its content; trying the one before" in capsys.readouterr().err
    assert contents(out) == contents(made("private", 3))


# The size of experts


@pytest.mark.parametrize(
    ("known", "wanted", "budget_tasks"),
    [
        ({"tasks": 2}, {"tasks": 3}, 2),
        ({"tasks": 2}, {"tasks": 2}, None),
        ({"tasks": 3}, {"tasks": 2}, None),
        ({"tasks": 3, "budget_tasks": 2}, {"tasks": 3}, 2),
        ({"tasks": 3, "budget_tasks": 2}, {"tasks": 4}, 2),
        ({"tasks": 2, "budget_tasks": 3}, {"tasks": 3}, None),  # which are all
        ({"tasks": 2}, {"tasks": 3, "budget_tasks": 5}, 5),
        ({"tasks": 2}, {"tasks": 3, "units": 7}, None),
        ({"arrays": "tasks.npz"}, {"arrays": "tasks.npz"}, None),
        (None, {"tasks": 3}, None),
    ],
)
def test_experts_stay_as_large_as_they_are(tmp_path, known, wanted, budget_tasks):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / LAST).write_bytes(b"nothing")
    if known is not None:
        (tmp_path / LAST).write_bytes(seal({}, FORMAT, {"config": Config(**known).record()}))
    config = Config(**wanted)
    found = continued(config, [tmp_path / "none", tmp_path / "damaged", tmp_path])
    assert found == (config if budget_tasks is None else config.but(budget_tasks=budget_tasks))
    assert found.network.options.budget_tasks == budget_tasks


# Learners


def test_a_learner_is_kept_unless_it_is_not_wanted(made, tmp_path):
    wanted = made("finetune", 2)
    assert run(tmp_path, 2, "--no-keep-learner") == 0
    assert contents(tmp_path) == contents(wanted, ["learner.safetensors"])
    assert run(tmp_path, 2, "--resume", "--no-keep-learner") == 0
    assert contents(tmp_path) == contents(wanted, ["learner.safetensors"])
    assert run(tmp_path, 2, "--resume", "--keep-learner") == 0
    assert contents(tmp_path) == contents(wanted)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert run(tmp_path, 2, "--resume") == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == times


def test_at_the_papers_sizes_it_is_as_large_as_the_help_says(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    said = re.search(r"is (\S+) MB of parameters and (\S+) MB for a memory of 1,000 images", said).groups()
    learner = cotrain.Learner(build_method(Config(), Config().benchmark.options.spec))
    inner = learner.state.inner
    sizes = [sum(leaf.nbytes for leaf in leaves(part)) / 1e6 for part in (inner.learner.parameters, inner.memory.x)]
    assert sizes == pytest.approx(list(map(float, said)), abs=0.06)
    assert len(encode(learner)) / 1e6 == pytest.approx(sum(sizes), abs=0.06)
