"""What is kept of a run: checkpoints, going on from them to the bit, and what happens when they are damaged."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CASES, OPTIONS, STREAM, arrays_file, identical, make, streamed, toy
from safetensors import safe_open

from cotrain import cli
from cotrain.engine import blank, learn
from cotrain.errors import Busy, Damaged, Diverged, Invalid, Stopped
from cotrain.experiments import checkpoint, files, stop
from cotrain.experiments.checkpoint import Checkpoints, decode, encode, load
from cotrain.experiments.files import read_record, write_record
from cotrain.experiments.keep import Kept
from cotrain.experiments.run import run

COTRAINING = ("cotraining", "routing_network")
KEPT = OPTIONS | {"every": 0, "progress": False}
CLI = [sys.executable, "-c", "from cotrain.cli import main; raise SystemExit(main())"]


class Pulled(Exception):
    """The plug, which was pulled."""


def contents(directory: Path) -> dict[str, bytes]:
    """All files but those with the times."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name != "times.json"]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def run_until(monkeypatch, moment: int, *arguments, **options) -> bool:
    """A run that ends, as if it were killed, after its `moment`-th snapshot was dealt with; whether it came so far."""
    shown, show = [], Kept.show

    def pull(self, snapshot):
        show(self, snapshot)
        shown.append(snapshot.event)
        if len(shown) == moment:
            raise Pulled

    with monkeypatch.context() as patch:
        patch.setattr(Kept, "show", pull)
        try:
            run(*arguments, **options)
        except Pulled:
            return True
    return False


def snapshot_of(case=COTRAINING, count=3):
    """The `count`-th snapshot of a run, and the shapes of its arrays."""
    snapshots = learn(make(case), [streamed(case)], [0], **OPTIONS)
    for _ in range(count):
        now = next(snapshots)
    return now.kept(), blank(make(case), streamed(case), 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("whole")
    run(make(COTRAINING), STREAM, out=directory, **KEPT)
    return directory


@pytest.fixture
def unfinished(monkeypatch, tmp_path):
    """A run that was killed in its second task; it has two checkpoints."""
    assert run_until(monkeypatch, 7, make(COTRAINING), STREAM, out=tmp_path, **KEPT)
    assert len(list((tmp_path / "seed-0").glob("checkpoint-*"))) == 2
    return tmp_path


@pytest.fixture
def on_interrupt():
    """Sets what SIGINT does; processes started then ignore it if this one does.

    Pytest itself may have been started with SIGINT ignored, as in the background of a script.
    """
    before = signal.getsignal(signal.SIGINT)
    yield partial(signal.signal, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def go_on(directory, capsys) -> str:
    """Goes on with a run; returns what was said."""
    run(make(COTRAINING), STREAM, out=directory, resume=True, **KEPT)
    return re.sub(r"\s+", " ", capsys.readouterr().err)


# Going on


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_method_goes_on_to_the_bit(monkeypatch, tmp_path, case):
    method, stream = make(case), streamed(case)
    run(method, stream, out=tmp_path / "whole", **KEPT)
    for moment in (2, 5):
        cut = tmp_path / str(moment)
        assert run_until(monkeypatch, moment, method, stream, out=cut, **KEPT)
        run(method, stream, out=cut, resume=True, **KEPT)
        assert contents(cut) == contents(tmp_path / "whole")


def test_a_run_can_be_killed_after_every_snapshot(monkeypatch, tmp_path, whole):
    method = make(COTRAINING)
    kills = 0
    while run_until(monkeypatch, 2, method, STREAM, out=tmp_path, resume=True, **KEPT):  # compiling, and one more
        kills += 1
    assert kills == STREAM.spec.tasks * (3 + 1)
    assert contents(tmp_path) == contents(whole)


def test_seeds_at_once_go_on_together(monkeypatch, tmp_path):
    method = make(COTRAINING)
    options = KEPT | {"seeds": [3, 1], "at_once": True}
    run(method, STREAM, out=tmp_path / "whole", **options)
    assert run_until(monkeypatch, 6, method, STREAM, out=tmp_path / "cut", **options)
    with pytest.raises(Invalid, match=r"of another run \(seeds \[3, 1\], not \[3\]\)"):
        run(method, STREAM, out=tmp_path / "cut", resume=True, **KEPT | {"seeds": [3]})
    run(method, STREAM, out=tmp_path / "cut", resume=True, **options)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_finished_run_is_not_run_again(monkeypatch, tmp_path, whole):
    first = run(make(COTRAINING), STREAM, out=tmp_path, **KEPT)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr("cotrain.experiments.seeds.learn", lambda *_, **__: pytest.fail("it learns"))
    again = run(make(COTRAINING), STREAM, out=tmp_path, resume=True, **KEPT)
    np.testing.assert_array_equal(again[0].accuracy, first[0].accuracy)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path != tmp_path / "seed-0"} == {
        path: time_ for path, time_ in before.items() if path != tmp_path / "seed-0"
    }


def test_a_lost_result_is_made_from_the_last_checkpoint(monkeypatch, tmp_path, whole):
    run(make(COTRAINING), STREAM, out=tmp_path, **KEPT)
    (tmp_path / "seed-0" / "result.json").unlink()
    monkeypatch.setattr("cotrain.experiments.seeds.learn", lambda *_, **__: pytest.fail("it learns"))
    run(make(COTRAINING), STREAM, out=tmp_path, resume=True, **KEPT)
    assert contents(tmp_path) == contents(whole)


def test_an_unfinished_run_is_not_started_anew_by_mistake(unfinished):
    before = contents(unfinished)
    with pytest.raises(Invalid, match=r"unfinished run: go on with --resume"):
        run(make(COTRAINING), STREAM, out=unfinished, **KEPT)
    assert contents(unfinished) == before


def test_a_finished_run_is_started_anew_if_wanted(tmp_path, whole):
    run(make(COTRAINING, lr=0.1), STREAM, out=tmp_path, **KEPT)
    assert contents(tmp_path) != contents(whole)
    run(make(COTRAINING), STREAM, out=tmp_path, **KEPT)
    assert contents(tmp_path) == contents(whole)


def test_times_say_what_they_are_of(unfinished, capsys):
    go_on(unfinished, capsys)
    assert read_record(unfinished / "seed-0" / "times.json")["from_step"] == 42 + 32


# Checkpoints


def test_the_last_two_are_kept_and_nothing_else(monkeypatch, tmp_path):
    names = []
    save = Checkpoints.save

    def noted(self, snapshot):
        save(self, snapshot)
        there = {path.name for path in tmp_path.joinpath("seed-0").iterdir()}
        names.append(sorted(there - {".lock", "log.csv"}))

    monkeypatch.setattr(Checkpoints, "save", noted)
    run(make(COTRAINING), STREAM, out=tmp_path, **KEPT)
    assert len(names) == STREAM.spec.tasks * (3 + 1)
    assert [len(there) for there in names] == [1] + [2] * (len(names) - 1)
    assert all(before[-1] == after[0] for before, after in pairwise(names))
    assert not list(tmp_path.rglob(".*"))


def test_without_time_passing_they_are_at_the_ends_of_tasks(monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, snapshot: saved.append((snapshot.phase, snapshot.step)))
    run(make(COTRAINING), STREAM, out=tmp_path, **KEPT | {"every": 1e9})
    assert saved == [(1, 0), (2, 0), (3, 0)]


def test_a_checkpoint_is_due_by_a_clock_that_nobody_sets(monkeypatch, tmp_path):
    now, (snapshot, _) = [1000.0], snapshot_of()
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(checkpoint.time, "time", lambda: pytest.fail("the wall clock was looked at"))
    kept = Checkpoints(tmp_path, {}, every=60)
    assert not kept.due()
    now[0] += 59
    assert not kept.due()
    now[0] += 1
    assert kept.due()
    kept.save(snapshot)
    assert not kept.due()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_checkpoint_has_all_of_a_snapshot(tmp_path, case):
    snapshot, like = snapshot_of(case)
    path = tmp_path / "a"
    path.write_bytes(encode(snapshot, {"seeds": [0]}))
    again = load(path, like, {"seeds": [0]})
    assert (again.phase, again.step) == (snapshot.phase, snapshot.step)
    for name in ("state", "accuracy", "initial", "logits", "gates"):
        assert identical(getattr(again, name), getattr(snapshot, name)), name
    assert path.read_bytes() == encode(snapshot, {"seeds": [0]})


def test_random_keys_in_a_state_are_kept(tmp_path):
    snapshot, like = snapshot_of()
    key = jax.random.key(7)[None]
    snapshot = replace(snapshot, state=(snapshot.state, key))
    like = replace(like, state=(like.state, jax.eval_shape(lambda: key)))
    (tmp_path / "a").write_bytes(encode(snapshot, {}))
    again = load(tmp_path / "a", like).state[1]
    assert jax.random.uniform(again[0]) == jax.random.uniform(key[0])


def test_anything_that_reads_safetensors_reads_a_checkpoint(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode(snapshot_of()[0], {"seeds": [0]}))
    with safe_open(path, "numpy") as file:
        notes = json.loads(file.metadata()["cotrain"][64:])
        assert notes["seeds"] == [0]
        assert notes["format"] == checkpoint.FORMAT
        assert set(notes["software"]) >= {"cotrain", "jax", "commit"}
        assert file.get_tensor("accuracy").shape == (1, 3, 3)


# Damage


def test_every_flipped_bit_and_every_cut_of_a_checkpoint_is_found():
    data = encode(snapshot_of()[0], {"seeds": [0]})
    draws = np.random.default_rng(0)
    header = 8 + int.from_bytes(data[:8], "little")
    places = {*range(0, header, 7), *draws.integers(0, len(data), 300).tolist(), len(data) - 1}
    for place in places:
        broken = bytearray(data)
        broken[place] ^= 1 << int(draws.integers(8))
        with pytest.raises(Damaged):
            decode(bytes(broken), Path("a"))
    for length in {0, 1, 7, 8, 50, header, *draws.integers(0, len(data), 50).tolist()}:
        with pytest.raises(Damaged):
            decode(data[:length], Path("a"))
    for more in (b"\0", data):
        with pytest.raises(Damaged):
            decode(data + more, Path("a"))


def test_every_flipped_bit_of_a_record_is_found(tmp_path):
    path = tmp_path / "record.json"
    write_record(path, {"acc": 0.5, "accuracy": [[0.25, None]]})
    assert read_record(path) == {"acc": 0.5, "accuracy": [[0.25, None]]}
    data = path.read_bytes()
    for place in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            with pytest.raises(Damaged, match=r"record\.json is damaged"):
                read_record(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(Damaged):
            read_record(path)


@pytest.mark.parametrize("inside", ["[" * 100_000, '{"a": NaN', '{"a": 1e999, "b": Infinity', "3", ""])
def test_a_stranger_can_seal_anything_but_it_is_still_read_with_care(tmp_path, inside):
    path = tmp_path / "record.json"
    path.write_text(f'{inside}{files.SEAL}{files._digest(inside.encode())}"\n}}\n')
    with pytest.raises(Damaged, match="not a record"):
        read_record(path)


def test_a_directory_or_a_pipe_is_no_record(tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "b")
    for name in "ab":
        with pytest.raises(Damaged, match="not a file"):
            read_record(tmp_path / name)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(unfinished, whole, capsys):
    newest = max((unfinished / "seed-0").glob("checkpoint-*"))
    newest.write_bytes(newest.read_bytes()[:-100])
    said = go_on(unfinished, capsys)
    assert f"{newest} is damaged" in said
    assert "trying the one before" in said
    assert contents(unfinished) == contents(whole)


def test_when_all_are_damaged_a_run_starts_from_the_beginning_and_says_so(unfinished, whole, capsys):
    for path in (unfinished / "seed-0").glob("checkpoint-*"):
        path.write_bytes(b"")
    assert "no checkpoint that is whole: starting from the beginning" in go_on(unfinished, capsys)
    assert contents(unfinished) == contents(whole)


def test_a_checkpoint_of_another_run_is_refused(unfinished, monkeypatch):
    before = contents(unfinished)
    other = {"out": unfinished, "resume": True}
    with pytest.raises(Invalid, match="of another run"):
        run(make(COTRAINING, lr=0.1), STREAM, **KEPT, **other)
    with pytest.raises(Invalid, match=r"batch 6, not 5"):
        run(make(COTRAINING), STREAM, **KEPT | {"batch": 5}, **other)
    with pytest.raises(Invalid, match=r"is absent, and|, and absent is wanted|rates"):
        run(make(("replay", "shared_bottom")), STREAM, **KEPT, **other)
    with pytest.raises(Invalid, match="of another run"):
        run(make(COTRAINING), toy(tasks=3), **KEPT | {"epochs": 5}, **other)
    monkeypatch.setattr(checkpoint, "NUMERICS", checkpoint.NUMERICS + 1)
    with pytest.raises(Invalid, match="its numbers are of version 1, and this cotrain's of 2"):
        run(make(COTRAINING), STREAM, **KEPT, **other)
    assert contents(unfinished) == before


def test_a_checkpoint_of_a_newer_format_is_refused(unfinished, monkeypatch):
    newest = max((unfinished / "seed-0").glob("checkpoint-*"))
    snapshot, _ = snapshot_of()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 99)
        newest.write_bytes(encode(snapshot, {"seeds": [0]}))
    with pytest.raises(Invalid, match="its format is 99, of a newer cotrain"):
        run(make(COTRAINING), STREAM, out=unfinished, resume=True, **KEPT)


@pytest.mark.parametrize("notes", [{"phase": -1}, {"phase": 4}, {"step": -3}, {"step": "1"}, {"phase": None}])
def test_a_position_outside_the_run_is_refused(tmp_path, notes):
    snapshot, like = snapshot_of()
    (tmp_path / "a").write_bytes(encode(snapshot, notes))
    with pytest.raises(Damaged, match="it is at task"):
        load(tmp_path / "a", like)


def test_absurd_shapes_are_refused_before_memory_is_taken():
    data = encode(snapshot_of()[0], {})
    shape = b'"shape":[1,3,3]'
    assert shape in data
    for absurd in (b'"shape":[9,9,9]', b'"shape":[9999999999999,9999999999999]', b'"shape":[-1,-3,3]'):
        longer = data.replace(shape, absurd, 1)
        header = int.from_bytes(data[:8], "little") + len(absurd) - len(shape)
        resealed = _resealed(header.to_bytes(8, "little") + longer[8:])
        with pytest.raises(Damaged, match="not a checkpoint"):
            decode(resealed, Path("a"))


def _resealed(data: bytes) -> bytes:
    blank_ = data[: checkpoint.DIGEST.start] + b"0" * 64 + data[checkpoint.DIGEST.stop :]
    digest = files._digest(blank_).encode()
    return data[: checkpoint.DIGEST.start] + digest + data[checkpoint.DIGEST.stop :]


# Writing


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(monkeypatch, tmp_path):
    path = tmp_path / "a"
    files.write_bytes(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_bytes(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"old"}


def test_a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on(monkeypatch, tmp_path, whole, capsys):
    write, calls = checkpoint.write_bytes, []

    def sometimes(path, data):
        calls.append(path)
        if len(calls) % 2:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_bytes", sometimes)
    run(make(COTRAINING), STREAM, out=tmp_path, **KEPT)
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert said.count("(No space left on device); going on without it") == 6
    assert contents(tmp_path)["seed-0/result.json"] == contents(whole)["seed-0/result.json"]


def test_what_a_killed_write_left_is_removed(unfinished, whole, capsys):
    (unfinished / "seed-0" / ".checkpoint-00001-00000032.safetensors.abc.part").write_bytes(b"half")
    go_on(unfinished, capsys)
    assert contents(unfinished) == contents(whole)


def test_files_are_for_everyone_to_read(whole):
    assert {stat.S_IMODE(path.stat().st_mode) for path in (whole / "seed-0").iterdir()} == {0o644}


# Two processes, and signals


def test_two_processes_cannot_work_on_one_run(monkeypatch, unfinished, whole, capsys):
    lock = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    path = str(unfinished / "seed-0" / ".lock")
    with subprocess.Popen([sys.executable, "-c", lock, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        before = contents(unfinished)
        with pytest.raises(Busy, match="another process is at work on this run"):
            run(make(COTRAINING), STREAM, out=unfinished, resume=True, **KEPT)
        assert contents(unfinished) == before
        other.kill()
    go_on(unfinished, capsys)
    assert contents(unfinished) == contents(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(monkeypatch, tmp_path, whole, capsys, on_interrupt, number):
    on_interrupt(signal.default_int_handler)
    shown, show = [], Kept.show

    def signalled(self, snapshot):
        shown.append((snapshot.phase, snapshot.step))
        if len(shown) == 6:
            os.kill(os.getpid(), number)
        show(self, snapshot)

    before = signal.getsignal(number)
    monkeypatch.setattr(Kept, "show", signalled)
    with pytest.raises(Stopped) as stopped:
        run(make(COTRAINING), STREAM, out=tmp_path, **KEPT | {"every": 1e9})
    monkeypatch.setattr(Kept, "show", show)
    assert stopped.value.number == number
    assert signal.getsignal(number) is before
    assert stop.asked() is None
    phase, step = shown[-1]
    assert len(shown) == 6
    assert step > 0
    assert (tmp_path / "seed-0" / f"checkpoint-{phase:05}-{step:08}.safetensors").exists()
    go_on(tmp_path, capsys)
    assert contents(tmp_path) == contents(whole)


def test_a_second_signal_stops_at_once(on_interrupt):
    on_interrupt(signal.default_int_handler)
    with stop.gently():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked() == signal.SIGINT
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)
    assert stop.asked() is None


def test_where_sigint_is_ignored_sigterm_alone_is_heeded(on_interrupt):
    on_interrupt(signal.SIG_IGN)
    with stop.gently():
        signal.raise_signal(signal.SIGINT)
        assert stop.asked() is None
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.asked() == signal.SIGTERM
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
    assert stop.asked() is None


def test_signals_are_left_alone_in_other_threads_and_where_they_are_ignored(on_interrupt):
    on_interrupt(signal.default_int_handler)
    before, errors = signal.getsignal(signal.SIGINT), []

    def elsewhere():
        try:
            with stop.gently():
                assert signal.getsignal(signal.SIGINT) is before
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert errors == []
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stop.gently():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_command_line_stops_with_the_usual_code_and_goes_on(tmp_path, workers):
    arrays = arrays_file(tmp_path / "tasks.npz", examples=400)
    options = ["run", "--arrays", arrays, "--hidden", "8", "--network", "shared-bottom", "--method", "replay"]
    options += ["--epochs", "8", "--seeds", "2", "--chunk", "1", "--workers", str(workers)]
    cut = [*options, "--out", str(tmp_path / "cut")]
    with subprocess.Popen([*CLI, *cut], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob("cut/seed-*/checkpoint-*")) and process.poll() is None:
            time.sleep(0.02)  # until the first task of a seed has ended
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    assert process.returncode == 143, said
    assert "stopped; with --resume, the same command goes on from there" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("cut/*/result.json"))
    assert cli.main([*cut, "--resume", "--workers", "1"]) == 0
    assert cli.main([*options, "--out", str(tmp_path / "whole"), "--workers", "1"]) == 0
    results = [
        {name: data for name, data in contents(tmp_path / one).items() if "checkpoint" not in name}
        for one in ("cut", "whole")
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_started_with_sigint_ignored_stops_at_sigterm(tmp_path, on_interrupt, workers):
    options = ["run", "--arrays", arrays_file(tmp_path / "tasks.npz"), "--hidden", "8", "--network", "shared-bottom"]
    options += ["--method", "replay", "--epochs", "2000", "--seeds", "2", "--chunk", "1", "--save-every", "0"]
    options += ["--workers", str(workers), "--out", str(tmp_path)]

    def newest() -> str:
        return max((path.name for path in tmp_path.glob("seed-*/checkpoint-*")), default="")

    def wait_for_one_after(name: str) -> None:
        while newest() <= name and process.poll() is None:
            time.sleep(0.02)

    on_interrupt(signal.SIG_IGN)
    with subprocess.Popen([*CLI, *options], start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        wait_for_one_after("")
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: the workers too
        for _ in range(3):
            wait_for_one_after(newest())
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert said.count("stopping after this chunk") == 1
    assert "stopped; with --resume, the same command goes on from there" in said
    for path in tmp_path.glob("seed-*/checkpoint-*"):
        decode(path.read_bytes(), path)  # all of it is there
    assert newest()
    assert not list(tmp_path.glob("seed-*/result.json"))


# Numbers watched


def test_divergence_names_the_last_good_checkpoint(tmp_path):
    with pytest.raises(Diverged, match=r"the loss became \S+ at task 2, step") as diverged:
        run(make(COTRAINING, lr=0.2), _exploding(), out=tmp_path, **KEPT)
    last = diverged.value.checkpoint
    assert last is not None
    assert f"the last good checkpoint is {last}" in str(diverged.value)
    _, arrays = decode(last.read_bytes(), last)
    assert all(np.isfinite(array).all() for name, array in arrays.items() if name.startswith("state"))


def _exploding():
    """A stream whose second task is more than floats can hold."""
    easy = toy(tasks=3)
    task = easy.make

    def exploding(index):
        train, _ = task(index)
        return task(index)._replace(train=replace(train, x=train.x * np.float32(1e30 if index == 1 else 1)))

    return replace(easy, make=exploding)


def test_parameters_that_break_in_a_chunks_last_step_are_never_shown():
    snapshots = learn(make(("finetune", "shared_bottom"), lr=1e38), [STREAM], [0], **OPTIONS | {"chunk": 1})
    finite = []

    def look():
        for snapshot in snapshots:
            finite.append(all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(snapshot.state.learner)))

    with pytest.raises(Diverged):
        look()
    assert all(finite)
