"""The benchmark measures what it says, and the documents say what it measured."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench, learner, limit, methods, ours, show
from benchmarks.bench import GROWTH, LIMIT, ONE_CORE, OURS, STEPS, Contestant, Measured, Process
from benchmarks.workload import Workload
from cotrain.report.table import insert

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "results" / "bench.json"
KEYS = {
    "algorithm1_vs_torch_one_core",
    "algorithm1_vs_torch_machine",
    "shared_bottom_vs_torch",
    "finetune_vs_avalanche",
    "replay_vs_avalanche",
    "shared_bottom_step_over_blas",
    "experts_1280_over_20_current",
    "experts_1280_over_20_replay",
    "tasks_200_over_20",
}
LEARNER_KEYS = {
    "at_once_over_engine",
    "one_by_one_more_ms",
    "predict_over_evaluation",
    "reading_hidden",
    "stream_resident_megabytes",
}


def small(**changes) -> Workload:
    random = np.random.default_rng(0)
    tasks = [(random.random((24, 6), np.float32), random.integers(0, 3, 24)) for _ in range(3)]
    return Workload(tasks, classes=3, hidden=(5,), experts=6, k=2, units=4, memory=20, **changes)


def test_ratios_are_medians_of_the_rounds_and_none_where_something_is_missing():
    def measured(contestants, rounds):
        return [Measured(c, microseconds=list(rounds.get(c[:2], []))) for c in contestants]

    one_core = measured(
        ONE_CORE,
        {
            ("algorithm 1", "cotrain"): [1.0, 2.0, 4.0],
            ("algorithm 1", "PyTorch eager"): [10.0, 10.0, 10.0],  # 10, 5 and 2.5 times as long
            ("shared bottom", "cotrain"): [3.0, 3.0, 3.0],
            ("shared bottom", "its matrix products in BLAS"): [2.0, 2.0, 1.0],
        },
    )
    growth = measured(GROWTH, {("with replay", "20 experts"): [1.0], ("with replay", "1280 experts"): [7.0]})
    rates = {"cotrain": [90.0], "PyTorch eager": [10.0]}
    machine = [{"subject": "algorithm 1", "name": n, "iterations_per_second": {"rounds": r}} for n, r in rates.items()]
    ratios = bench._ratios(one_core, growth, machine)
    assert set(ratios) >= KEYS
    assert ratios["algorithm1_vs_torch_one_core"] == 5
    assert ratios["algorithm1_vs_torch_machine"] == 9
    assert ratios["shared_bottom_step_over_blas"] == 1.5
    assert ratios["experts_1280_over_20_replay"] == 7
    assert ratios["finetune_vs_avalanche"] is None
    assert ratios["tasks_200_over_20"] is None


@pytest.mark.parametrize("function", ["finetune", "replay", "algorithm1", "routed_finetune", "routed_replay"])
def test_a_pass_of_ours_learns_every_task_once(function):
    done = getattr(ours, function)(small())()
    assert done.iterations == 3 * 3  # 24 examples in batches of 10
    assert done.seconds > 0
    assert done.model.phase == 3
    assert getattr(ours, function)(small(limit=2))().iterations == 2 * 3


def test_a_step_of_each_method_is_measured():
    passes = {one.name: methods.step(small(**one.changes)) for one in STEPS}
    assert len(passes) > 10
    done = passes["gem"]()
    assert (done.iterations, done.model.phase) == (9, 3)


def test_the_limit_has_every_product_of_a_step(monkeypatch):
    counted = []
    monkeypatch.setattr(limit.np, "dot", lambda a, b, out: counted.append((a.shape, b.shape, out.shape)))
    assert limit.shared_bottom_products(small())().iterations == 9
    step = [  # a hidden layer of 5 units and a head of 3: forward, weights, inputs
        ((10, 6), (6, 5), (10, 5)),
        ((6, 10), (10, 5), (6, 5)),
        ((10, 5), (5, 3), (10, 3)),
        ((5, 10), (10, 3), (5, 3)),
        ((10, 3), (3, 5), (10, 5)),
    ]
    assert counted == 9 * step


def test_a_process_reports_its_passes_and_its_failures(tmp_path):
    process = Process(Contestant("s", "n", LIMIT, "shared_bottom_products"), 0, small(), tmp_path)
    try:
        assert process.first["ready"] > 0
        process.ask(0)
        assert process.answer()["iterations"] == 9
    finally:
        process.close()
    for module, message in (("benchmarks.nowhere", "ModuleNotFoundError"), (OURS, "AttributeError")):
        failed = Process(Contestant("s", "n", module, "nothing"), 0, small(), tmp_path)
        failed.close()
        assert failed.first["error"].startswith(message)


def test_a_learner_is_measured_beside_the_engine(monkeypatch):
    monkeypatch.setattr(learner, "FED", 3)
    monkeypatch.setattr(learner, "TESTED", 30)
    monkeypatch.setattr(learner, "ROUNDS", 2)
    monkeypatch.setattr(ours, "methods", lambda workload: {"shared bottom": ours.finetuned(workload)})
    one_pass = learner.learner(small())
    assert {len(times) for times in one_pass()["shared bottom"]["microseconds"].values()} == {1}  # which compiles
    [found] = one_pass().values()
    assert set(found["microseconds"]) == {"engine", "at once", "one by one", "evaluation", "predict"}
    assert all(len(times) == 2 and min(times) > 0 for times in found["microseconds"].values())
    one, more = found["microseconds"]["engine"], found["microseconds"]["one by one"]
    assert found["one_by_one_more_ms"] == pytest.approx((sum(more) - sum(one)) / 2 / 1000)


def test_a_stream_is_read_no_further_than_it_is_learned(monkeypatch):
    monkeypatch.setattr(learner, "LEARNED", 6 * 4 * 5000)
    monkeypatch.setattr(ours, "methods", lambda workload: {"algorithm 1": ours.finetuned(workload)})
    one_pass = learner.stream(small())
    one_pass()
    found = one_pass()
    assert found["gigabytes"] >= learner.LEARNED / 1e9
    assert 0 < found["gigabytes"] < 1e-2
    assert 0 <= found["waiting_seconds"]
    assert found["hidden"] == 1 - found["waiting_seconds"] / found["reading_seconds"]
    assert 50 < found["resident_megabytes"] < 20_000


def test_a_bench_has_every_figure(monkeypatch, tmp_path):
    """With contestants that do nothing, and the recorded figures of a learner and a stream."""
    recorded = json.loads(RECORDED.read_text())
    values = {"peak": 100.0, "resident": [(20, 500.0)], "learner": recorded["learner"], "stream": recorded["stream"]}
    functions = [f"def {name}(workload):\n    return lambda: {value!r}\n" for name, value in values.items()]
    (tmp_path / "idle.py").write_text("".join(functions) + "def learns(workload):\n    return lambda: (9, 0.5)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(bench, "permuted_mnist", lambda tasks, examples: small().tasks)
    for name, one in {"ONE_CORE": ONE_CORE[:2], "GROWTH": GROWTH[:1], "STEPS": STEPS[:2]}.items():
        monkeypatch.setattr(bench, name, [each._replace(module="idle", function="learns") for each in one])
    monkeypatch.setattr(bench, "MACHINE", bench.ONE_CORE)
    for name, function in {"PEAK": "peak", "RESIDENT": "resident", "LEARNER": "learner", "STREAM": "stream"}.items():
        monkeypatch.setattr(bench, name, getattr(bench, name)._replace(module="idle", function=function))
    figures = bench.bench(quick=True)
    assert set(figures) == set(recorded)
    steps = {f"step_{one.name.replace('-', '_')}_over_replay" for one in STEPS if one.name != "replay"}
    assert set(figures["ratios"]) | steps == set(recorded["ratios"]) >= KEYS | LEARNER_KEYS
    assert figures["ratios"]["step_finetune_over_replay"] == 1
    assert (figures["ratios"]["algorithm1_vs_torch_one_core"], figures["blas_peak_gflops"]) == (1, 100)
    assert show.markdown(figures).count("**") == 2 * 7


def test_other_sizes_keep_the_rest_of_the_workload():
    workload = bench._changed(small(), {"tasks": 7, "experts": 9})
    assert len(workload.tasks) == 7
    assert workload.tasks[0][0] is workload.tasks[3][0]
    assert (workload.experts, workload.units) == (9, 4)
    assert len(pickle.loads(pickle.dumps(workload)).tasks) == 7


def test_the_documents_have_the_recorded_figures(tmp_path):
    figures = json.loads(RECORDED.read_text())
    assert set(figures["ratios"]) >= KEYS | LEARNER_KEYS
    text = (ROOT / "docs" / "performance.md").read_text()
    assert insert(text, show.markdown(figures)) == text
    readme = (ROOT / "README.md").read_text()
    assert len(re.findall(r"×<!-- \w+ -->", readme)) >= 3
    assert show.claims(readme, figures) == readme
    assert (
        show.claims("0.0×<!-- shared_bottom_vs_torch -->", {"ratios": {"shared_bottom_vs_torch": 3.14}})[:4] == "3.1×"
    )
    show.draw(figures, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_missing_peer_is_said_to_be_missing():
    figures = json.loads(RECORDED.read_text())
    figures["one_core"][1]["microseconds"] = {
        "median": None,
        "rounds": [],
        "ready_seconds": None,
        "error": "ModuleNotFoundError: No module named 'torch'",
    }
    figures["ratios"]["algorithm1_vs_torch_one_core"] = None
    text = show.markdown(figures)
    assert "| algorithm 1: PyTorch eager | not installed |" in text
    assert "| algorithm1_vs_torch_one_core | not measured |" in text
