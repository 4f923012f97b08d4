"""Sweeps: what a file says is to be run, what is refused of it, and that the paper's grid is one."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import arrays_file

from cotrain import cli
from cotrain.errors import Invalid
from cotrain.experiments.config import Config
from cotrain.experiments.files import read_record
from cotrain.experiments.paper import GRID, METHODS, preset
from cotrain.experiments.store import Store
from cotrain.experiments.sweep import Cell, Sweep, read_sweep

RESULTS = Path(__file__).parent.parent / "results"


@pytest.fixture
def swept(tmp_path):
    """What a file with this text says."""

    def read(text: str, **options) -> Sweep:
        path = tmp_path / "rates.toml"
        path.write_text(text)
        return read_sweep(path, **options)

    return read


def labels(sweep: Sweep) -> list[str]:
    return [cell.method for cell in sweep.cells]


# What a file says


def test_an_empty_file_is_one_run_of_the_defaults(swept):
    label = "MoE + replay + co-training"
    assert swept("") == Sweep([Cell("rates", "rotated-mnist", label, Config())], [0])


def test_a_product_has_every_combination(swept):
    cells = swept('method = "replay"\n[product]\nlr = [0.03, 0.1]\nk = [2, 4, 8]\n').cells
    expected = [Config(method="replay", lr=lr, k=k) for lr in (0.03, 0.1) for k in (2, 4, 8)]
    assert [cell.config for cell in cells] == expected


def test_runs_come_in_every_combination_that_does_not_contradict_them(swept):
    text = """
        tasks = 5
        [product]
        lr = [0.1, 0.2]
        [[runs]]
        method = "finetune"
        [[runs]]
        method = "replay"
        lr = 0.2
        memory = 50
    """
    finetune, replay = Config(tasks=5, method="finetune"), Config(tasks=5, method="replay", lr=0.2, memory=50)
    assert [cell.config for cell in swept(text).cells] == [finetune, replay, finetune.but(lr=0.2)]


def test_tables_add_to_what_is_above_them(swept):
    text = """
        epochs = 2
        [network]
        k = 2
        [product]
        lr = [0.1, 0.2]
        [[runs]]
        method = "finetune"
        [[tables]]
        name = "small"
        k = 1
        [[tables]]
        name = "other"
        product = { lr = [0.3], experts = [4, 5] }
        [[tables.runs]]
        network = { name = "routing-network", router = { name = "task-matrix", gates = "all" } }
    """
    small = Config(epochs=2, k=1, method="finetune")
    other = Config(epochs=2, k=2, lr=0.3, gates="all", experts=4)
    expected = [("small", small), ("small", small.but(lr=0.2)), ("other", other), ("other", other.but(experts=5))]
    assert [(cell.table, cell.config) for cell in swept(text).cells] == expected


def test_what_the_command_wants_goes_before_the_file(swept):
    cells = swept("examples = 7\n[product]\nlr = [0.1, 0.2]", examples=9, lr=0.3).cells
    assert [cell.config for cell in cells] == [Config(examples=9, lr=0.3)]


def test_labels_tell_runs_apart_by_what_differs_and_by_nothing_else(swept):
    text = 'units = 8\n[product]\nmethod = ["finetune", "replay"]\nlr = [0.1, 0.2]'
    assert labels(swept(text)) == [f"MoE{more} (lr {lr})" for more in ("", " + replay") for lr in (0.1, 0.2)]
    assert labels(swept('units = 8\n[product]\nmethod = ["finetune", "replay"]')) == ["MoE", "MoE + replay"]
    assert labels(swept("[product]\nrotation_step = [3.0, 9.0]\nlr = [0.1, 0.2]")) == [
        f"MoE + replay + co-training (rotation_step {step}, lr {lr})" for step in (3.0, 9.0) for lr in (0.1, 0.2)
    ]


def test_labels_are_the_files_own_or_say_what_a_run_is(swept):
    runs = '[[runs]]\nlabel = "mine"\n[[runs]]\nlabel = "mine"\nrouter = "fixed"\n[[runs]]\nnetwork = "shared-bottom"'
    told = ["mine (router task-matrix)", "mine (router fixed)", "cotraining on shared-bottom"]
    assert labels(swept(runs)) == told
    assert labels(swept('[product]\nbenchmark = ["rotated-mnist", "permuted-mnist"]')) == [list(METHODS)[4]] * 2


def test_own_arrays_are_a_benchmark_by_the_names_of_their_files(swept):
    cells = swept('[product]\narrays = ["a/x.npz", "b/x.npz", "y.npz"]\nnetwork = ["shared-bottom"]').cells
    label = "cotraining on shared-bottom"
    expected = [("x", f"{label} (arrays a/x.npz)"), ("x", f"{label} (arrays b/x.npz)"), ("y", label)]
    assert [(cell.benchmark, cell.method) for cell in cells] == expected


@pytest.mark.parametrize(("text", "seeds"), [("", [0]), ("seeds = 3", [0, 1, 2]), ("seeds = [4, 2]", [4, 2])])
def test_seeds_are_a_number_or_a_list(swept, text, seeds):
    assert swept(text).seeds == seeds


# What is refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ["file", "rates.toml", "no such file"]),
        ("lr = ", ["file", "rates.toml", "not TOML"]),
        ("seeds = 0", ["--seeds", "0", "at least 1"]),
        ("seeds = true", ["--seeds", "True", "at least 1"]),
        ("seeds = []", ["--seeds", "[]", "a list"]),
        ("seeds = [1, -1]", ["--seeds", "-1", "at least 0"]),
        ("seeds = [1, 1]", ["--seeds", "[1, 1]", "unlike"]),
        ("product = 3", ["product", "3", "[product]"]),
        ("[product]\nlr = 0.1", ["--lr", "0.1", "a list of values"]),
        ("[product]\nlr = []", ["--lr", "[]", "a list of values"]),
        ("[runs]\nlr = 0.1", ["runs", "0.1", "[[runs]]"]),
        ("runs = []", ["runs", "[]", "[[runs]]"]),
        ("tables = [1]", ["tables", "[1]", "[[tables]]"]),
        ("lrr = 0.1", ["--lrr", "0.1", "no such option"]),
        ('lr = "fast"', ["--lr", "'fast'", "give a number"]),
        ('[[runs]]\nmethod = "reply"', ["--method", "'reply'", "did you mean 'replay'?"]),
        ('[product]\nmemory = [5]\n[[runs]]\nmethod = "finetune"', ["--memory", "5", "method replay"]),
        ("lr = 0.1\n[method]\nlr = 0.2", ["--lr", "0.2", "two parts"]),
        ('[method]\nname = "finetune"\n[[runs]]\nmemory = 5', ["--memory", "5", "method finetune", "method replay"]),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, capsys, text, expected):
    path, out = tmp_path / "rates.toml", tmp_path / "out"
    if text is not None:
        path.write_text(text)
    assert cli.main(["sweep", str(path), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith(f"cotrain: error: {expected[0]}: ")
    for part in expected:
        assert part in printed.err
    assert not out.exists()


# The command


def test_a_sweep_runs_once_and_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cotrain.report.write.figures", lambda table: {})
    path, out = tmp_path / "rates.toml", tmp_path / "out"
    arrays = arrays_file(tmp_path / "toy.npz")
    path.write_text(f"""
        seeds = [3, 1]
        network = {{ name = "shared-bottom", hidden = [8] }}
        benchmark = {{ name = "arrays", arrays = {json.dumps(arrays)} }}
        [product]
        method = ["finetune", "replay"]
        lr = [0.05, 0.1]
    """)
    command = ["sweep", str(path), "--out", str(out), "--workers", "1"]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    usual = Config(arrays=arrays, network="shared-bottom", hidden=(8,))
    cells = {
        f"shared bottom{more} (lr {lr})": usual.but(method=method, lr=lr)
        for method, more in (("finetune", ""), ("replay", " + replay"))
        for lr in (0.05, 0.1)
    }
    assert printed.out.count("│ toy ") == len(cells)
    assert "not in this one" not in printed.out  # of the paper's table

    grid = read_record(out / "grid.json")
    assert (grid["scale"], grid["seeds"], grid["failed"]) == (None, [3, 1], [])
    assert [(row["benchmark"], row["method"]) for row in grid["tables"]["rates"]] == [("toy", label) for label in cells]
    store, accs = Store(out / "records"), []
    for row, config in zip(grid["tables"]["rates"], cells.values(), strict=True):
        records = [store.read(config, seed) for seed in (3, 1)]
        assert [out / run for run in row["runs"]] == [store.place(config, seed) for seed in (3, 1)]
        assert all(record is not None and record["config"] == config.record() for record in records)
        accs.append(np.mean([record["acc"] for record in records if record is not None]))
    assert len(list(out.rglob("result.json"))) == 8
    table = json.loads((out / "rates.json").read_text())
    assert [row["method"] for row in table] == list(cells)
    assert [row["acc_mean"] for row in table] == pytest.approx(accs)
    assert {(row["seeds"], row["acc_paper"]) for row in table} == {(2, None)}
    page = (out / "index.html").read_text()
    assert all(label in page for label in cells)

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr("cotrain.experiments.seeds.learn", lambda *_, **__: pytest.fail("it learns"))
    assert cli.main(command) == 0
    assert "8 of 8 runs are in" in capsys.readouterr().err
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert {path for path in after if after[path] != before.get(path)} <= {out / "grid.json"}
    assert after.keys() == before.keys()
    assert cli.main(["check", str(out)]) == 0


# The paper's grid


def without_idle_noise(options: dict) -> dict:
    """The options of the first version, whose runs without sampling had a noise that they did not take."""
    return {name: v for name, v in options.items() if name != "noise" or options.get("sampling") != "none"}


def test_the_papers_grid_has_the_cells_that_are_in_the_results():
    sweep, grid = read_sweep(GRID), read_record(RESULTS / "paper" / "grid.json")
    assert sweep.seeds == grid["seeds"] == list(range(15))
    rows = [(table, row) for table, rows in grid["tables"].items() for row in rows]
    assert len(sweep.cells) == len(rows) == 28
    store = Store(RESULTS / "paper" / "records")
    for cell, (table, row) in zip(sweep.cells, rows, strict=True):
        assert cell[:3] == (table, row["benchmark"], row["method"])
        assert cell.config.options == without_idle_noise(row["options"])
        places = [store.place(cell.config, seed) for seed in sweep.seeds]
        assert places == [RESULTS / "paper" / run for run in row["runs"]]  # so they are not run again


def test_the_tuned_options_are_those_that_tuning_found():
    found = json.loads((RESULTS / "tuning" / "tuned.json").read_text())["found"]
    tuned = [cell for cell in read_sweep(GRID).cells if cell.table == "tuned"]
    assert [(cell.benchmark, cell.method) for cell in tuned] == [
        (b, m) for b, methods in found.items() for m in methods
    ]
    for cell in tuned:
        options = without_idle_noise(found[cell.benchmark][cell.method]["options"])
        assert cell.config == preset(cell.benchmark, cell.method).but(**options)


def test_an_option_of_the_command_is_refused_where_it_does_not_apply():
    with pytest.raises(Invalid, match=r"^memory: 5 is not valid; there is no such option with .* method finetune"):
        read_sweep(GRID, memory=5)
