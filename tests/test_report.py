"""The report says what the records say, by hand-worked numbers; what is missing is said; what is hostile is text."""

import csv
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from sample import BENCHMARKS, write_routing, write_sample

from cotrain.errors import Damaged, Invalid
from cotrain.experiments.config import Config
from cotrain.experiments.files import digest_of, read_record, write_record
from cotrain.report import documents, figure, page, payload, sheets, views, write
from cotrain.report import study as studies
from cotrain.report.claims import CLAIMS, run_tests
from cotrain.report.findings import findings
from cotrain.report.palette import LOOKS, looks
from cotrain.report.routes import drops, orders, shares, sharings
from cotrain.report.statistics import holm, partial_spearman, sign_flip, spearman
from cotrain.report.study import Cell, Run, Study, Table, is_full, read_study
from cotrain.report.verdict import verdict
from cotrain.report.write import write_report

COTRAINING = "MoE + replay + co-training"
MATRICES = ("routing", "similarity", "router")
HOSTILE = """<script>alert(1)</script><img src=x onerror="alert(2)">'$data $_{\\x}|&`*"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A small grid, with its report but for the figures, which take their time."""
    root = tmp_path_factory.mktemp("sample")
    write_sample(root, tasks=5, experts=6, k=2, seeds=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "figures", lambda table: {})
        write_report(root)
    return root


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A smaller grid with all of its report, in a directory of its own, and the paths that were returned."""
    root = tmp_path_factory.mktemp("drawn")
    write_sample(root, tasks=3, experts=4, k=2, layers=1, seeds=2, tables=("tuned",))
    return write_report(root, root / "out"), root / "out"


def run_of(seed, acc=0.9, bwt=-0.1, config=None, final=(), used=(), accuracy=None):
    numbers = {"acc": acc, "bwt": bwt, "learning_accuracy": acc - bwt}
    matrix = np.array([[acc - bwt, np.nan], [acc, acc]]) if accuracy is None else accuracy
    return Run(None, seed, Config() if config is None else config, matrix, numbers, final, used)


def cell_of(method, accs, bwts=None, benchmark="rotated-mnist", **options):
    bwts = [-0.1] * len(accs) if bwts is None else bwts
    runs = [run_of(seed, acc, bwt) for seed, (acc, bwt) in enumerate(zip(accs, bwts, strict=True))]
    return Cell(benchmark, method, "", tuple(runs), **options)


def table_with(*cells, **options):
    return Table("tuned", cells, **options)


def copied(directory, tmp_path, **changes):
    """The sample's manifest in another directory, changed, with the same records."""
    manifest = read_record(directory / "grid.json") | changes
    (tmp_path / "records").symlink_to(directory / "records")
    write_record(tmp_path / "grid.json", manifest)
    return manifest


def resealed(run):
    """Makes a run's record agree with its changed routing.npz."""
    record = read_record(run / "result.json")
    write_record(run / "result.json", record | {"files": {"routing.npz": digest_of(run / "routing.npz")}})


# Statistics


def test_sign_flips_are_counted_by_hand():
    # Sums of ±1 ±2 ±3: ±6 once each, of 8; so 2 of 8 are as far from 0 as 1 + 2 + 3.
    assert sign_flip(np.array([1.0, 2.0, 3.0])) == 2 / 8
    # 1 + 2 - 3 = 0: every sum is as far.
    assert sign_flip(np.array([1.0, 2.0, -3.0])) == 1
    # 3 + 2 - 1 = 4: ±6 and ±4 are as far, 4 of 8.
    assert sign_flip(np.array([3.0, 2.0, -1.0])) == 4 / 8
    assert sign_flip(np.array([0.5, 0.5])) == 2 / 4
    assert sign_flip(np.zeros(4)) == 1


def test_sign_flips_see_ties_through_rounding():
    # 0.1 + 0.2 - 0.3 is 5.6e-17 in floating point, and 0 in truth.
    assert sign_flip(np.array([0.1, 0.2, -0.3])) == 1
    assert sign_flip(np.full(15, 0.1)) == 2 / 2**15


def test_many_sign_flips_are_drawn_alike_every_time_and_never_give_nothing():
    differences = np.full(21, 0.01)
    p = sign_flip(differences)
    assert p == sign_flip(differences)
    assert p == pytest.approx(1 / 100_000, abs=2e-5)
    balanced = np.tile([1.0, -1.0], 15)
    assert sign_flip(balanced) == 1
    draws = np.random.default_rng(3).normal(0.3, 1, 20)
    assert sign_flip(np.append(draws, 0.0)) == pytest.approx(sign_flip(draws), abs=0.01)  # drawn, and counted


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04, times 4, 3, 2, 1, and never decreasing.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([0.01, 0.01]) == pytest.approx([0.02, 0.02])
    assert holm([]) == []


def test_spearman_by_hand():
    # Ranks 1 2 3 4 and 1 3 2 4: 1 - 6·(0 + 1 + 1 + 0) / (4·15) = 0.8.
    assert spearman(np.array([1, 2, 3, 4]), np.array([10.0, 30.0, 20.0, 999.0])) == pytest.approx(0.8)
    assert spearman(np.array([1, 2, 3]), np.array([3, 2, 1])) == pytest.approx(-1)
    # Ties share their mean rank: 1.5 1.5 3 against 1 2 3.
    assert spearman(np.array([5, 5, 9]), np.array([1, 2, 3])) == pytest.approx(np.sqrt(3) / 2)
    assert np.isnan(spearman(np.array([1, 1, 1]), np.array([1, 2, 3])))


def test_what_a_third_rank_explains_is_taken_out():
    # Of four ranks, x and y correlate with z by 0.8 each, and with each other by 0.4: (0.4 - 0.64) / (1 - 0.64).
    x, y, z = np.array([1, 3, 2, 4]), np.array([2, 1, 3, 4]), np.array([1, 2, 3, 4])
    assert [spearman(x, y), spearman(x, z), spearman(y, z)] == pytest.approx([0.4, 0.8, 0.8])
    assert partial_spearman(x, y, z) == pytest.approx(-2 / 3)
    assert np.isnan(partial_spearman(x, y, x))


# Claims


def test_a_claim_holds_is_contradicted_or_stays_open():
    seeds = 12
    low, high = 0.90 + 0.001 * np.arange(seeds), 0.92 + 0.001 * np.arange(seeds)
    bwts = np.where(np.arange(seeds) % 2, -0.04, -0.05)
    table = table_with(
        cell_of("MoE + replay", low, np.roll(bwts, 1)),
        cell_of(COTRAINING, high, bwts),
        cell_of("shared bottom + replay", high + 0.01),
        cell_of("private", high - 0.01),
    )
    tests = {(test.metric, test.worse): test for test in run_tests(table)}
    assert {key: test.holds for key, test in tests.items()} == {
        ("acc", "MoE + replay"): "yes",
        ("bwt", "MoE + replay"): "undecided",
        ("acc", "shared bottom + replay"): "no: the opposite",
        ("acc", "private"): "yes",
    }
    first = tests["acc", "MoE + replay"]
    assert first.difference == pytest.approx(0.02)
    assert (first.p, first.seeds) == (2 / 2**12, 12)
    assert first.p_holm == pytest.approx(4 * 2 / 2**12)  # the smallest of four, three of which are equal
    assert tests["bwt", "MoE + replay"].p_holm == tests["bwt", "MoE + replay"].p == 1
    assert first.paper == pytest.approx(0.929 - 0.923)


def test_only_seeds_that_both_have_are_compared():
    better, worse = cell_of(COTRAINING, [0.9, 0.8, 0.7]), cell_of("MoE + replay", [0.1, 0.6, 0.4, 0.9])
    worse = Cell(worse.benchmark, worse.method, "", worse.runs[1:])
    test = run_tests(table_with(better, worse))[0]
    assert test.seeds == 2
    assert test.difference == pytest.approx((0.2 + 0.3) / 2)


def test_one_seed_gives_no_test_and_does_not_count_in_the_correction():
    one = [cell_of(COTRAINING, [0.9]), cell_of("MoE + replay", [0.8])]
    many = [cell_of("MoE", [0.9] * 3), cell_of("shared bottom", [0.8] * 3)]
    tests = run_tests(table_with(*one, *many))
    assert [test.holds for test in tests] == ["one seed: no test", "one seed: no test", "undecided"]
    assert np.isnan(tests[0].p)
    assert tests[0].record()["p"] is None
    assert tests[0].record()["low"] is None
    assert tests[-1].p_holm == tests[-1].p == 2 / 8


def test_no_common_seed_gives_no_test():
    worse = Cell("rotated-mnist", "MoE + replay", "", (run_of(7),))
    assert run_tests(table_with(cell_of(COTRAINING, [0.9]), worse)) == []


def test_own_runs_are_compared_under_the_same_options_alone():
    cells = [
        cell_of(method, [acc] * 2, setting=setting)
        for setting, gain in (("lr 0.1", 0.1), ("lr 0.2", 0.3))
        for method, acc in ((COTRAINING, 0.5 + gain), ("MoE + replay", 0.5))
    ]
    tests = [test for test in run_tests(table_with(*cells)) if test.metric == "acc"]
    assert [round(test.difference, 6) for test in tests] == [0.1, 0.3]
    assert [test.claim[-8:] for test in tests] == ["(lr 0.1)", "(lr 0.2)"]


# Verdicts


@pytest.mark.parametrize(
    ("accs", "bwts", "word"),
    [  # the paper has 0.929 and -0.034
        ([0.929] * 3, [-0.034] * 3, "yes"),
        ([0.919] * 3, [-0.044] * 3, "yes"),
        ([0.9189] * 3, [-0.034] * 3, "no"),
        ([0.929] * 3, [-0.0441] * 3, "no"),
        ([0.930, 0.931, 0.9305], [-0.034] * 3, "better"),
        ([0.930, 0.931, 0.9305], [-0.035] * 3, "yes"),
        ([0.920, 0.950, 0.935], [-0.03] * 3, "yes"),  # the interval of ACC reaches below the paper's
        ([0.96], [0.0], "yes"),  # one seed has no interval
        ([0.90], [0.0], "no"),
    ],
)
def test_what_counts_as_reproduced(accs, bwts, word):
    cell = cell_of(COTRAINING, accs, bwts)
    assert verdict(table_with(cell), cell) == word


def test_there_is_no_verdict_without_the_papers_number_or_its_size():
    private, cell = cell_of("private", [0.9] * 2), cell_of(COTRAINING, [0.93] * 2)
    assert verdict(table_with(private), private) == "–"
    assert verdict(table_with(cell, scale="quick"), cell) == "–"
    assert verdict(table_with(cell, scale="paper"), cell) == verdict(table_with(cell, scale="single"), cell) != "–"
    small = Cell("rotated-mnist", COTRAINING, "", (run_of(0, config=Config(examples=6000)),))
    assert verdict(table_with(small), small) == "–"
    assert any("full size" in note for note in sheets.results(table_with(small)).notes)
    empty = Cell("rotated-mnist", COTRAINING, "", ())
    assert verdict(table_with(empty), empty) == "–"


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({}, True),
        ({"lr": 0.03, "optimizer": "adam", "noise": 0.5, "epochs": 2}, True),
        ({"tasks": 20, "examples": 60000}, True),
        ({"tasks": 10}, False),
        ({"examples": 6000}, False),
        ({"validation": 5000}, False),
        ({"memory": 500}, False),
        ({"hidden": (64, 64)}, False),
        ({"experts": 40}, False),
    ],
)
def test_full_size_is_the_papers(changes, full):
    assert is_full(Config(**changes)) is full


# Routes


def test_how_much_later_tasks_share_by_hand():
    gates = np.array([[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1.0]])
    accuracy = np.array([[0.9, np.nan, np.nan], [0.8, 0.9, np.nan], [0.6, 0.85, 0.9]])
    run = run_of(0, final=(gates,), accuracy=accuracy)
    # Task 1 has two experts, of which task 2 uses one and task 3 none: (1/2 + 0) / 2. Task 2 shares none with task 3.
    np.testing.assert_allclose(shares(run), [0.25, 0])
    np.testing.assert_allclose(drops(run), [0.3, 0.05, 0])


def test_near_tasks_that_share_experts_correlate_negatively():
    near = np.array([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]) / 2
    far = near[[0, 2, 1, 3]]
    runs = tuple(run_of(seed, final=(gates, near)) for seed, gates in enumerate((near, near, far)))
    table = table_with(Cell("rotated-mnist", COTRAINING, "", runs))
    first, second = orders(table)
    # Distances 1 1 1 2 2 3 against similarities 1/4 1/4 1/4 0 0 0: ranks 2 2 2 4.5 4.5 6 and 5 5 5 2 2 2.
    expected = -1.5 * (1.5 * 3 + 1 * 2 + 2.5) / np.sqrt((1.5**2 * 3 + 2 + 2.5**2) * 1.5**2 * 6)
    assert second.each == pytest.approx([expected] * 3)
    assert (first.layer, second.layer) == (1, 2)
    assert first.each[2] > 0 > first.each[0]
    assert first.rho.low < first.rho.mean < first.rho.high


def test_routes_that_are_all_alike_have_no_correlation():
    same = np.full((4, 5), 0.2)
    table = table_with(Cell("rotated-mnist", COTRAINING, "", (run_of(0, final=(same,)), run_of(1, final=(same,)))))
    (order,) = orders(table)
    assert order.rho.seeds == 0
    assert sheets.routes_order(table, [order]).lines[0][-2:] == ("–", "–")


def test_experts_are_ordered_by_their_first_task():
    used = np.array([[0, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    gates = np.array([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]], float)
    run = run_of(0, final=(gates,), used=(used,))
    assert views.claim_order(run, 0).tolist() == [2, 0, 3, 1]


# Files


def test_all_files_are_there_and_named(directory, drawn):
    names = {path.name for path in directory.iterdir()}
    expected = {
        "tables.md",
        "tables.csv",
        "tables.tex",
        "as-the-paper.json",
        "table.json",
        "tests.json",
        "routing.json",
    }
    assert expected | {"index.html", "figures", "grid.json", "records"} == names
    paths, out = drawn
    assert {path for path in out.rglob("*") if path.is_file()} == set(paths)
    assert all(path.stat().st_size > 0 for path in paths)
    kinds = ("accuracy", "drop", "used", "sharing", *(f"{kind}-{name}" for kind in MATRICES for name in BENCHMARKS))
    figures = {f"tuned-{kind}.{ending}" for kind in kinds for ending in ("png", "svg")}
    assert {path.name for path in (out / "figures").iterdir()} == figures | {"README.md"}


def test_every_figure_of_the_paper_has_its_counterpart(drawn):
    figures = drawn[1] / "figures"
    text = (figures / "README.md").read_text()
    assert all(f"the paper: Figure {number}" in text for number in range(1, 6))
    assert {path.name for path in figures.glob("*.png")} == set(re.findall(r"\]\((.*?)\)", text))


def test_the_table_as_json(directory):
    for name in ("as-the-paper.json", "table.json"):
        table = json.loads((directory / name).read_text())
        assert len(table) == 14
        for row in table:
            keys = [
                "benchmark",
                "method",
                "seeds",
                "acc_mean",
                "acc_std",
                "bwt_mean",
                "bwt_std",
                "acc_paper",
                "bwt_paper",
            ]
            assert list(row) == keys
    row = next(row for row in table if (row["benchmark"], row["method"]) == ("permuted-mnist", "MoE"))
    records = read_record(directory / "grid.json")["tables"]["tuned"]
    runs = next(r["runs"] for r in records if (r["benchmark"], r["method"]) == ("permuted-mnist", "MoE"))
    accs = [json.loads((directory / run / "result.json").read_text())["acc"] for run in runs]
    assert row["seeds"] == 3
    assert row["acc_mean"] == pytest.approx(np.mean(accs))
    assert row["acc_std"] == pytest.approx(np.std(accs, ddof=1))
    assert (row["acc_paper"], row["bwt_paper"]) == (0.839, -0.122)
    joint = next(row for row in table if row["method"] == "joint")
    assert joint["bwt_mean"] is None
    assert joint["acc_paper"] is None


def test_the_tests_as_json(directory):
    tests = json.loads((directory / "tests.json").read_text())
    keys = "table benchmark claim metric better worse seeds difference low high p p_holm holds"
    assert len(tests) == 2 * 2 * len(CLAIMS)
    assert all(list(test) == keys.split() for test in tests)
    assert {test["holds"] for test in tests} == {"undecided"}  # three seeds cannot decide
    assert all(test["low"] <= test["difference"] <= test["high"] for test in tests)
    assert min(test["p"] for test in tests) == 2 / 2**3


def test_the_routing_as_json(directory):
    routing = json.loads((directory / "routing.json").read_text())
    distance = routing["distance_and_similarity"]
    assert len(distance) == 2 * 2 * 3 * 2  # tables, benchmarks, methods, layers
    assert {row["method"] for row in distance} == {"MoE", "MoE + replay", COTRAINING}
    assert all(len(row["rho_each"]) == row["seeds"] <= 3 for row in distance)
    assert len(routing["sharing_and_drop"]) == 2 * 2 * 3


def test_the_csv_has_a_number_a_field(directory):
    rows = list(csv.DictReader((directory / "tables.csv").read_text().splitlines()))
    assert len(rows) == 28
    one = next(row for row in rows if row["method"] == COTRAINING)
    assert float(one["acc_low"]) < float(one["acc_mean"]) < float(one["acc_high"])
    assert one["reproduced"] in ("yes", "no", "better")


def test_markdown_and_latex_have_a_line_a_cell(directory):
    text = (directory / "tables.md").read_text()
    assert len(re.findall(r"^\| (?:permuted|rotated)-mnist \| MoE \| (?:lr 0.05 \| )?3 \|", text, re.MULTILINE)) == 4
    assert "| reproduced? |" in text
    latex = (directory / "tables.tex").read_text()
    for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert latex.count(rule) == latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 8
    bodies = re.findall(r"\\begin\{tabular\}\{(l+)\}(.*?)\\end\{tabular\}", latex, re.DOTALL)
    for columns, body in bodies:
        lines = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {len(columns) - 1}


def test_no_number_is_written_that_json_does_not_know(directory):
    for path in directory.glob("*.json"):
        json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in a JSON file"))
    data = re.search(r'id="data">(.*?)</script>', (directory / "index.html").read_text(), re.DOTALL)
    assert data is not None
    json.loads(data[1], parse_constant=lambda name: pytest.fail(f"{name} in the page"))


def test_the_same_records_give_the_same_files(directory, tmp_path):
    study = read_study(directory)
    written = (directory / "index.html").read_text()
    assert written.startswith(page.as_page(study).rstrip())
    assert write.is_fresh(directory)
    (directory / "index.html").write_text(written[:-100])  # as if it had been cut short
    assert not write.is_fresh(directory)
    (directory / "index.html").write_text(written)
    assert documents.as_markdown(study) == (directory / "tables.md").read_text()
    for name in "ab":
        figure.save(figure.draw_table(study.tables[0], figure.drop), tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


# What is missing


def test_missing_runs_are_said_plainly(directory, tmp_path):
    manifest = copied(directory, tmp_path)
    rows = manifest["tables"]["tuned"]
    rows[0]["runs"] = rows[0]["runs"][:1]
    rows[1]["runs"] = []
    rows[2]["runs"][1] = "records/nowhere/seed-1"
    del rows[3]
    manifest["failed"] = [{"run": "rotated-mnist, MoE, seed 3", "error": "the loss became nan"}]
    write_record(tmp_path / "grid.json", manifest)
    study = read_study(tmp_path)
    table = study.tables[1]
    assert [len(cell.runs) for cell in table.cells[:3]] == [1, 0, 2]
    notes = "\n".join(table.notes)
    assert "permuted-mnist, shared bottom: 1 of 3 seeds; seeds 1, 2 missing." in notes
    assert "permuted-mnist, shared bottom + replay: no runs yet." in notes
    assert "records/nowhere/seed-1/result.json is missing" in notes
    assert "permuted-mnist, MoE + replay: in the paper's table, not in this one." in notes
    for text in (documents.as_markdown(study), page.as_page(study)):
        assert "the loss became nan" in text
        assert "no runs yet" in text
    row = json.loads(documents.as_json(study)["table.json"])[0]
    assert (row["seeds"], row["acc_std"]) == (1, None)
    assert json.loads(documents.as_json(study)["table.json"])[1]["acc_mean"] is None


def test_many_missing_seeds_are_said_shortly():
    notes = studies._gaps([cell_of("MoE", [0.9, 0.8])], [*range(2), 4, 5, 6], None)
    assert notes == ["rotated-mnist, MoE: 2 of 5 seeds; seeds 4 to 6 missing."]


def test_a_sweep_that_is_not_the_papers_misses_none_of_its_cells(directory, tmp_path):
    rows = read_record(directory / "grid.json")["tables"]["tuned"][:2]
    for scale, missing in ((None, 0), ("single", 10 - 2)):
        manifest = copied(directory, tmp_path, scale=scale, tables={"mine": rows}, seeds=[0, 1, 2])
        (table,) = read_study(tmp_path).tables
        assert [cell.method for cell in table.cells] == ["shared bottom", "shared bottom + replay"]
        assert manifest["scale"] == table.scale == scale
        assert (
            len(table.notes) == sum("in the paper's table, not in this one" in note for note in table.notes) == missing
        )
        (tmp_path / "records").unlink()


def test_wanted_seeds_of_the_manifest_count_as_missing(directory, tmp_path):
    copied(directory, tmp_path, seeds=[0, 1, 2, 3])
    notes = read_study(tmp_path).tables[0].notes
    assert len(notes) == 14
    assert all(note.endswith("3 of 4 seeds; seed 3 missing.") for note in notes)


def test_a_grid_without_any_run_still_gives_a_report(tmp_path):
    rows = [{"benchmark": "rotated-mnist", "method": method, "options": {}, "runs": []} for method in LOOKS]
    write_record(tmp_path / "grid.json", {"scale": "paper", "tables": {"tuned": rows}, "failed": []})
    write_report(tmp_path)
    assert json.loads((tmp_path / "tests.json").read_text()) == []
    assert list((tmp_path / "figures").glob("*.png")) == []
    assert "No cell can be compared" in (tmp_path / "tables.md").read_text()


def test_one_seed_has_no_spread_and_no_test(tmp_path):
    write_sample(tmp_path, tasks=4, experts=6, k=2, layers=1, seeds=1, tables=("tuned",))
    study = read_study(tmp_path)
    lines = sheets.results(study.tables[0])
    assert not any("±" in text for line in lines.lines for text in line)
    assert any("One seed in every cell" in note for note in lines.notes)
    assert {test.holds for test in run_tests(study.tables[0])} == {"one seed: no test"}
    assert any(
        "one seed, which proves nothing" in said for said in findings(study.tables[0], run_tests(study.tables[0]))
    )
    assert all(one.rho.std != one.rho.std for one in sharings(study.tables[0]))
    page.as_page(study)


def test_files_that_cannot_be_read_are_noted(tmp_path):
    manifest = write_sample(tmp_path, tasks=3, experts=4, k=2, layers=1, seeds=2, tables=("tuned",))
    runs = {row["method"]: row["runs"] for row in manifest["tables"]["tuned"] if row["benchmark"] == "rotated-mnist"}
    (tmp_path / runs["MoE"][0] / "routing.npz").write_bytes(b"PK\x03\x04 cut short")
    (tmp_path / runs["MoE"][1] / "result.json").write_text('{"seed": 1')
    write_record(tmp_path / runs[COTRAINING][0] / "result.json", {"seed": 0, "accuracy": [1, 2]})
    pickled = np.full((3, 3, 4), 0.25, dtype=object)
    np.savez(tmp_path / runs[COTRAINING][1] / "routing.npz", gates_0=pickled)
    resealed(tmp_path / runs[COTRAINING][1])
    table = read_study(tmp_path).tables[0]
    cells = {cell.method: cell for cell in table.of("rotated-mnist")}
    assert [run.seed for run in cells["MoE"].runs] == [0]
    assert cells["MoE"].runs[0].final == ()
    assert [run.seed for run in cells[COTRAINING].runs] == [1]
    assert cells[COTRAINING].runs[0].final == ()
    assert sum("cannot be read" in note for note in table.notes) == 2
    assert sum("is damaged: " in note for note in table.notes) == 2


@pytest.mark.parametrize("content", [{}, {"tables": 3}, {"tables": {"tuned": [{"benchmark": "x"}]}}])
def test_a_manifest_that_is_none_is_refused(tmp_path, content):
    write_record(tmp_path / "grid.json", content)
    with pytest.raises(Invalid, match=r"grid\.json"):
        read_study(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tables": {}}'])
def test_a_manifest_without_its_checksum_is_damaged(tmp_path, text):
    (tmp_path / "grid.json").write_text(text)
    with pytest.raises(Damaged, match=r"grid\.json is damaged"):
        read_study(tmp_path)


# Own runs, without a manifest


def test_without_a_manifest_all_records_below_make_a_table(directory, tmp_path):
    shutil.copytree(directory / "records" / "rotated-mnist", tmp_path / "mine")
    source = directory / "records" / "rotated-mnist" / "routing-network-cotraining" / "tuned" / "seed-0" / "result.json"
    own = read_record(source)
    for name, config in (
        ("split", Config(benchmark="split-mnist", method="joint").record()),
        ("small", Config(examples=500, lr=0.2).record()),
        ("none", None),
    ):
        (tmp_path / name / "seed-4").mkdir(parents=True)
        write_record(tmp_path / name / "seed-4" / "result.json", own | {"config": config, "seed": 4})
    (table,) = read_study(tmp_path).tables
    assert table.name == "runs"
    named = {(cell.benchmark, cell.name, len(cell.runs)) for cell in table.cells}
    assert ("split-mnist", "joint on routing-network", 1) in named
    assert ("rotated-mnist", f"{COTRAINING} (examples 500, lr 0.2)", 1) in named
    assert ("rotated-mnist", f"{COTRAINING} (lr 0.05)", 3) in named
    assert ("own tasks", "none", 1) in named
    files = documents.as_json(read_study(tmp_path))
    assert len(json.loads(files["runs.json"])) == len(table.cells) == 14 + 3
    tests = run_tests(table)
    assert len(tests) == 2 * len(CLAIMS)  # with the defaults, and with lr 0.05
    assert all(style == LOOKS[name] for name, style in looks(table.cells).items() if name in LOOKS)


def test_a_router_that_reads_its_input_is_reported_with_its_routes(directory, tmp_path):
    """Such a run has no logits, and gates of the tasks that were learned alone."""
    source = directory / "records" / "rotated-mnist" / "routing-network-replay" / "tuned"
    shutil.copytree(source, tmp_path / "mine")
    config = Config(method="replay", router="input", one_head=True)
    history = []
    for path in (tmp_path / "mine").iterdir():
        with np.load(path / "routing.npz") as file:
            gates = [file[f"gates_{layer}"] * np.tri(5)[:, :, None].astype(np.float32) for layer in range(2)]
        write_routing(path, gates, by_task=False)
        history.append(gates)
        write_record(path / "result.json", read_record(path / "result.json") | {"config": config.record()})
        resealed(path)
    study = read_study(tmp_path)
    (cell,) = study.tables[0].cells
    assert study.tables[0].notes == ()
    assert (cell.method, len(cell.runs)) == ("replay on routing-network", 3)
    for run in cell.runs:
        with np.load(run.path / "routing.npz") as file:
            assert sorted(file.files) == ["gates_0", "gates_1", "used_0", "used_1"]
            np.testing.assert_array_equal(run.final[1], file["gates_1"][-1])
    assert views.with_routes(study.tables[0]) == [cell]
    assert {order.method for order in orders(study.tables[0])} == {cell.method}
    for name in ("used", "sharing", *(f"{kind}-rotated-mnist" for kind in MATRICES)):
        assert figure.draw_table(study.tables[0], figure.figures(study.tables[0])[name]) is not None, name
    (drawn,) = payload.payload(study)["tables"][0]["benchmarks"][0]["cells"]
    assert [routes["seed"] for routes in drawn["routes"]] == [0, 1, 2]
    assert all(rows for rows in drawn["routes"][0]["layers"][0]["phases"][-1])
    assert cell.method in page.as_page(study)


def test_a_directory_without_records_is_refused(tmp_path):
    with pytest.raises(Invalid, match="directory"):
        write_report(tmp_path)


def test_records_of_old_are_read(tmp_path):
    write_sample(tmp_path, tasks=3, experts=4, k=2, layers=1, seeds=1, tables=("tuned",))
    path = next(tmp_path.rglob("routing.npz"))
    with np.load(path) as file:
        gates = file["gates_0"]
    np.savez(path, gates_0=gates, logits_0=np.zeros_like(gates))  # logits after each task, no used experts
    resealed(path.parent)
    run = next(run for cell in read_study(tmp_path).tables[0].cells for run in cell.runs if run.path == path.parent)
    np.testing.assert_array_equal(run.final[0], gates[-1])
    assert run.used[0].sum(axis=1).tolist() == [len(set(np.nonzero(g[: i + 1])[1])) for i, g in enumerate(gates)]


# What is hostile


class Page(HTMLParser):
    """What a browser would make of a page: its elements, and what they point to."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]


def test_a_hostile_label_stays_text(directory, tmp_path, monkeypatch):
    manifest = copied(directory, tmp_path, failed=[{"run": HOSTILE, "error": HOSTILE}])
    rows = manifest["tables"]["tuned"]
    rows[0] |= {"method": HOSTILE, "benchmark": HOSTILE, "options": {HOSTILE: HOSTILE}}
    rows[1] |= {"method": HOSTILE}
    rows[4] |= {"benchmark": HOSTILE}  # one with routes
    manifest["tables"] = {"../" + HOSTILE: rows, "grid": rows, "Grid!": rows}
    write_record(tmp_path / "grid.json", manifest)
    names = ("accuracy", "router-" + HOSTILE)
    monkeypatch.setattr(write, "figures", lambda table: {name: figure.figures(table)[name] for name in names})
    paths = write_report(tmp_path, tmp_path / "out")
    assert all(path.parent in (tmp_path / "out", tmp_path / "out" / "figures") for path in paths)
    assert len({path for path in paths if path.suffix == ".svg"}) == 6
    assert {"grid-table.json", "grid-table-table.json"} <= {path.name for path in paths}

    text = (tmp_path / "out" / "index.html").read_text()
    parsed = Page(text)
    assert parsed.elements.count("script") == 3
    assert "img" not in parsed.elements
    assert not [attribute for attribute in parsed.attributes if attribute[1].startswith("on")]
    assert "&lt;script&gt;alert(1)" in text
    assert r"\u003cscript>alert(1)" in text  # in the numbers that the page draws
    markdown = (tmp_path / "out" / "tables.md").read_text()
    assert "<script" not in markdown
    assert "<img" not in markdown
    latex = (tmp_path / "out" / "tables.tex").read_text()
    assert r"\$data \$\_\{\textbackslash{}x\}" in latex


def test_the_page_asks_nothing_of_the_network(directory):
    text = (directory / "index.html").read_text()
    parsed = Page(text)
    pointing = [value for _, name, value in parsed.attributes if name in ("src", "href", "action", "srcset", "data")]
    assert all(value.startswith(("#", "data:")) for value in pointing)
    assert "default-src 'none'" in text
    assert text.count("plotly.js v") == 1
    assert len(text) < 10_000_000


# Figures and the page's numbers


def test_the_routes_that_travel_are_the_recorded_ones(directory):
    cell = next(cell for cell in read_study(directory).tables[0].cells if cell.method == COTRAINING)
    run = cell.runs[0]
    made = payload.run_routes(run)
    for layer, gates in enumerate(run.history()):
        order = views.claim_order(run, layer)
        for phase, rows in enumerate(made["layers"][layer]["phases"]):
            assert len(rows) == phase + 1  # tasks to come do not travel
            for task, row in enumerate(rows):
                shown = np.zeros(gates.shape[2])
                shown[order[row[::2]]] = np.array(row[1::2]) / 1000
                np.testing.assert_allclose(shown, gates[phase, task], atol=6e-4)


def test_routes_travel_as_far_as_they_fit(directory, monkeypatch):
    def seeds():
        tables = payload.payload(read_study(directory))["tables"]
        return [len(cell["routes"]) for t in tables for benchmark in t["benchmarks"] for cell in benchmark["cells"]]

    assert sum(seeds()) == 2 * 2 * 4 * 3  # tables, benchmarks, methods with a router, seeds
    monkeypatch.setattr(payload, "SEEDS", 2)
    assert max(seeds()) == 2
    monkeypatch.setattr(payload, "BUDGET", 4000)
    assert 0 < sum(seeds()) < 16
    assert max(seeds()) == 1


def test_tasks_learned_at_once_have_one_phase(tmp_path):
    write_sample(tmp_path, tasks=3, experts=4, k=2, layers=1, seeds=1, tables=("tuned",))
    place = tmp_path / "records" / "rotated-mnist" / "shared-bottom-joint" / "tuned" / "seed-0"
    write_routing(place, [np.full((1, 3, 4), 0.25)])
    study = read_study(tmp_path)
    joint = next(cell for cell in study.tables[0].of("rotated-mnist") if cell.method == "joint")
    made = payload.run_routes(joint.runs[0])
    assert [len(rows) for rows in made["layers"][0]["phases"]] == [3]
    page.as_page(study)


def test_the_readmes_figure_is_drawn_from_records(directory):
    records = [json.loads(path.read_text()) for path in (directory / "records").rglob("as-the-paper/*/result.json")]
    table = read_study(directory).tables[0]
    assert {len(cell.runs) for cell in table.cells} == {3}
    drawn = figure.draw_table(table, figure.accuracy)
    lines = {line.get_label(): line for line in drawn.axes[0].lines}
    assert list(lines) == ["shared bottom + replay", "MoE + replay", COTRAINING, "private"]
    named = {"benchmark": "permuted-mnist", "method": "cotraining"}
    chosen = [r for r in records if all(r["config"][kind]["name"] == name for kind, name in named.items())]
    expected = np.mean([np.array(record["accuracy"], float)[:, 0] for record in chosen], axis=0)
    np.testing.assert_allclose(lines[COTRAINING].get_ydata(), expected)


def test_sentences_follow_the_numbers():
    def said(gain):
        accs = 0.9 + 0.001 * np.arange(10)
        cells = cell_of("MoE + replay", accs), cell_of(COTRAINING, accs + gain), cell_of("private", accs + 0.01)
        table = table_with(*cells)
        return "\n".join(findings(table, run_tests(table)))

    assert "co-training raises ACC over MoE + replay: +0.0200" in said(0.02)
    assert "co-training beats the private control" in said(0.02)
    assert "co-training lowers ACC over MoE + replay: -0.0200" in said(-0.02)
    assert "co-training does worse than the private control" in said(-0.02)
    assert "it stays open whether co-training raises ACC" in said(0.0)


def test_experts_in_use_are_counted_from_the_records():
    used = [np.array([[1, 0, 0], [1, 1, 0]], bool), np.array([[1, 0, 0], [1, 1, 1]], bool)]
    runs = tuple(run_of(seed, final=(np.eye(2, 3),), used=(one,)) for seed, one in enumerate(used))
    said = findings(table_with(Cell("rotated-mnist", "MoE", "", runs)), [])
    assert any("of 3 in the layers: MoE 2.5." in sentence for sentence in said)


def test_methods_keep_their_colours_and_others_take_none_of_theirs():
    cells = [cell_of(name, [0.9]) for name in (COTRAINING, "private", *(f"own {i}" for i in range(5)))]
    style = looks(cells)
    assert style[COTRAINING] == LOOKS[COTRAINING]
    assert len({style[cell.name].colour for cell in cells}) == 7


def test_an_empty_study_has_an_empty_page():
    assert "<h1>" in page.as_page(Study(()))
