"""The store and the grid: what is found again, what is run, what is told, and what an interruption costs."""

import hashlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from conftest import arrays_file

from cotrain.data.fetch import SHA256
from cotrain.experiments import provenance, store
from cotrain.experiments.config import Config
from cotrain.experiments.files import write_record
from cotrain.experiments.grid import run_grid
from cotrain.experiments.paper import GRID, METHODS, SCALES
from cotrain.experiments.store import Store, key_of
from cotrain.experiments.sweep import Cell, read_sweep
from cotrain.methods import cotraining


@pytest.fixture
def small(tmp_path) -> list[Cell]:
    """Two methods on two tasks."""
    arrays = arrays_file(tmp_path / "tasks.npz", examples=60)
    config = Config(arrays=arrays, network="shared-bottom", method="finetune", hidden=(8,))
    replay = config.but(method="replay", memory=20)
    return [
        Cell("as-the-paper", "toy", "shared bottom", config),
        Cell("as-the-paper", "toy", "shared bottom + replay", replay),
        Cell("tuned", "toy", "shared bottom", config.but(lr=0.05)),
        Cell("tuned", "toy", "shared bottom + replay", replay),
    ]


@pytest.fixture(autouse=True)
def compiled(tmp_path_factory):
    """What is compiled is shared between the processes of a test."""
    before = {name: jax.config.values[name] for name in ("jax_enable_compilation_cache", "jax_compilation_cache_dir")}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.getbasetemp() / "compiled"))
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def files(directory: Path) -> dict[str, bytes]:
    """All files, without what differs from run to run: the times, and what was being written when it was killed."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    kept = [path for path in found if path.name != "times.json" and not path.name.startswith(".")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in kept}


# The store


def test_a_run_is_found_by_its_content(monkeypatch):
    keys = [key_of(config) for config in (Config(), Config(lr=0.2), Config(lr=0.2, k=2), Config(examples=100))]
    assert len(set(keys)) == 4
    assert key_of(Config(lr=0.1, k=4)) == keys[0]
    monkeypatch.setattr(store, "NUMERICS", store.NUMERICS + 1)
    assert key_of(Config()) != keys[0]


def test_an_option_that_comes_later_leaves_the_names_of_runs_alone(monkeypatch):
    @dataclass(frozen=True)
    class Later(cotraining.CotrainingOptions):
        new: float | None = None

    before = key_of(Config(lr=0.2))
    monkeypatch.setattr(cotraining, "CotrainingOptions", Later)
    assert key_of(Config(lr=0.2)) == key_of(Config(lr=0.2, new=None)) == before
    assert key_of(Config(lr=0.2, new=1.0)) != before


def test_what_is_not_finished_is_not_there(tmp_path):
    kept = Store(tmp_path)
    assert kept.read(Config(), 3) is None
    place = kept.place(Config(), 3)
    place.mkdir(parents=True)
    (place / ".result.json.x.part").write_text("{")  # what a crash leaves
    assert kept.read(Config(), 3) is None
    write_record(place / "result.json", {"acc": 1, "files": {}})
    assert kept.read(Config(), 3) == {"acc": 1, "files": {}}
    assert kept.read(Config(), 4) is None


def test_a_damaged_record_counts_as_none_and_is_told(tmp_path):
    kept, said = Store(tmp_path), []
    path = kept.place(Config(), 3) / "result.json"
    write_record(path, {"acc": 1, "files": {}})
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    assert kept.read(Config(), 3, said.append) is None
    assert said == [f"{path} is damaged: its checksum does not agree with its content; the run counts as not finished"]


def test_a_record_says_what_made_it(small, tmp_path):
    run_grid(small[:1], [3], tmp_path, workers=1)
    record = Store(tmp_path / "records").read(small[0].config, 3)
    assert record is not None
    assert record["software"]["jax"] == jax.__version__
    assert set(record["software"]) >= {"commit", "cotrain", "python", "numpy", "on"}
    digest = hashlib.sha256(Path(small[0].config.flat["arrays"]).read_bytes()).hexdigest()
    assert record["data"] == {"name": "tasks.npz", "sha256": [digest]}
    assert provenance.data(Config())["sha256"] == list(SHA256["mnist"])


def test_a_commit_is_named_in_a_clone_alone(tmp_path):
    assert provenance._commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    clean = provenance._commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "src" / "a.py").write_text("2")
    assert provenance._commit(tmp_path) == f"{clean}+"


# The paper's grid


def test_a_table_has_all_cells_of_the_paper_and_the_controls():
    grid = read_sweep(GRID, examples=SCALES["paper"].examples).cells
    here = [(cell.benchmark, cell.method) for cell in grid if cell.table == "as-the-paper"]
    assert len(here) == len(set(here)) == 2 * 7
    for cell in grid:
        assert (cell.config.network.name, cell.config.method.name) == METHODS[cell.method]
        assert cell.config.benchmark.name == cell.benchmark
        assert cell.config.flat["validation"] is None
        if cell.table == "as-the-paper":
            assert set(cell.config.options) <= {"benchmark", "network", "method"}
    quick = read_sweep(GRID, examples=SCALES["quick"].examples).cells
    assert {cell.config.flat["examples"] for cell in quick} == {6000}


# Running it


def test_a_grid_runs_once_and_says_which_runs_make_up_which_cell(small, tmp_path):
    said = []
    assert run_grid(small, [0, 1], tmp_path, workers=1, report=said.append) == []
    assert said[0].startswith("0 of 6 runs")
    first = files(tmp_path)
    assert sum(name.endswith("result.json") for name in first) == 6  # replay is the same in both tables
    manifest = json.loads((tmp_path / "grid.json").read_text())
    for table, rows in manifest["tables"].items():
        for row in rows:
            assert len(row["runs"]) == 2
            for run, seed in zip(row["runs"], (0, 1), strict=True):
                record = json.loads((tmp_path / run / "result.json").read_text())
                assert record["seed"] == seed
                tuned = (table, row["method"]) == ("tuned", "shared bottom")
                assert record["config"]["method"]["lr"] == (0.05 if tuned else 0.1)

    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert run_grid(small, [0, 1], tmp_path, workers=1, report=said.append) == []
    assert said[-1].startswith("6 of 6 runs")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == times


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_run_is_told_and_stops_no_other(small, tmp_path, capsys, workers):
    bad = small[0]._replace(table="tuned", method="MoE", config=small[0].config.but(lr=1e30))
    [failure] = run_grid([bad, *small[:2]], [0], tmp_path, workers=workers)
    assert failure["run"].startswith("toy, MoE, seed 0")
    assert "the loss became" in failure["error"]
    manifest = json.loads((tmp_path / "grid.json").read_text())
    assert manifest["failed"] == [failure]
    assert [len(row["runs"]) for rows in manifest["tables"].values() for row in rows] == [0, 1, 1]
    told = capsys.readouterr().err
    assert "toy, MoE, seed 0: failed: lr: the loss became" in told
    assert told.count("ACC") == 2


PROGRAM = """
import pickle, sys
from pathlib import Path
from cotrain.experiments.grid import run_grid
cells, seeds, directory = pickle.loads(bytes.fromhex(sys.argv[1]))
raise SystemExit(len(run_grid(cells, seeds, Path(directory), workers=2)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_grid_ends_as_an_undisturbed_one(small, tmp_path):
    longer = [cell._replace(config=cell.config.but(epochs=400)) for cell in small]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "1"}
    environment["JAX_COMPILATION_CACHE_DIR"] = jax.config.values["jax_compilation_cache_dir"]

    def start(directory):
        arguments = pickle.dumps((longer, [0, 1], str(directory))).hex()
        return subprocess.Popen([sys.executable, "-c", PROGRAM, arguments], env=environment, stderr=subprocess.DEVNULL)

    assert start(whole).wait() == 0
    draws = random.Random(0)
    for attempt in range(4):  # once it has kept some more runs, at any moment of the next
        process = start(killed)
        while len(list(killed.rglob("result.json"))) <= attempt:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(draws.uniform(0, 0.3))
        tasks = Path(f"/proc/{process.pid}/task")
        workers = [int(pid) for path in tasks.glob("*/children") for pid in path.read_text().split()]
        victim = draws.choice(workers) if attempt % 2 and workers else process.pid
        os.kill(victim, signal.SIGKILL)
        assert process.wait() != 0  # a run is missing, or the grid itself was killed
    assert start(killed).wait() == 0
    assert files(killed) == files(whole)
