"""A directory as `cotrain reproduce` leaves it, with invented numbers: accuracies, routes, and a manifest.

And a benchmark of one's own, which worker processes find here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from cotrain.data.stream import Spec, Stream
from cotrain.experiments.config import Config
from cotrain.experiments.files import digest_of, write_record
from cotrain.experiments.paper import METHODS

BENCHMARKS = ("permuted-mnist", "rotated-mnist")
FINAL = {  # ACC and the accuracy just after learning a task that a method has by design, rotated and permuted alike
    "shared bottom": (0.65, 0.973),
    "shared bottom + replay": (0.914, 0.973),
    "MoE": (0.75, 0.952),
    "MoE + replay": (0.909, 0.955),
    "MoE + replay + co-training": (0.920, 0.958),
    "private": (0.930, 0.930),
    "joint": (0.973, 0.973),
}
NEW = {"MoE": 0.3, "MoE + replay": 0.8, "MoE + replay + co-training": 2.2}  # experts that a task claims anew


@dataclass(frozen=True)
class Points:
    """two tasks of random points"""

    examples: int | None = None
    """training examples per task; by default 40"""
    validation: int | None = None
    """nothing"""
    spec: ClassVar[Spec] = Spec((6,), 3, 2)

    def __call__(self, load):
        draws, sizes = np.random.default_rng(0), (self.examples or 40, 30)
        parts = [[(draws.normal(size=(n, 6)).astype(np.float32), np.arange(n) % 3) for n in sizes] for _ in range(2)]
        stream = Stream.from_arrays([(*train, *test) for train, test in parts])
        return lambda seed: stream


def write_sample(
    directory: Path, tasks=20, experts=20, k=4, layers=2, seeds=15, tables=("as-the-paper", "tuned"), examples=None
) -> dict:
    """Writes records and grid.json; returns the manifest."""
    manifest = {"scale": "paper", "tables": {}, "failed": []}
    for place, table in enumerate(tables):
        rows = manifest["tables"][table] = []
        for benchmark in BENCHMARKS:
            for method, (network, name) in METHODS.items():
                options = {} if table == "as-the-paper" else {"lr": 0.05}
                config = Config(benchmark=benchmark, network=network, method=name, examples=examples, **options)
                runs = []
                for seed in range(seeds):
                    run = Path("records", benchmark, f"{network}-{name}", table, f"seed-{seed}")
                    draws = np.random.default_rng(
                        [place, BENCHMARKS.index(benchmark), list(METHODS).index(method), seed]
                    )
                    write_run(directory / run, config, seed, draws, method, tasks, experts, k, layers)
                    runs.append(run.as_posix())
                rows.append({"benchmark": benchmark, "method": method, "options": options, "runs": runs})
    write_record(directory / "grid.json", manifest)
    return manifest


def write_run(path: Path, config: Config, seed: int, draws, method: str, tasks, experts, k, layers) -> None:
    """Writes the record of an invented run."""
    path.mkdir(parents=True)
    accuracy = _accuracy(draws, *FINAL[method], tasks)
    if method == "joint":
        accuracy[:-1] = np.nan
    learned, last = np.diagonal(accuracy), accuracy[-1]
    record = {
        "config": config.record(),
        "seed": seed,
        "acc": last.mean(),
        "bwt": None if method == "joint" else (last - learned)[:-1].mean(),
        "learning_accuracy": None if method == "joint" else learned.mean(),
        "accuracy": [[None if np.isnan(x) else x for x in row] for row in accuracy],
        "parameters": 310700,
        "files": {},
    }
    if method in NEW or method == "private":
        write_routing(path, _routes(draws, method, config.benchmark.name, tasks, experts, k, layers))
        record["files"] = {"routing.npz": digest_of(path / "routing.npz")}
    write_record(path / "result.json", record)


def write_routing(path: Path, history: list[np.ndarray], by_task: bool = True) -> None:
    """Writes routing.npz from the routing matrices of the layers, after each phase; by task, with their logits."""
    arrays = {}
    for layer, gates in enumerate(history):
        learned = np.tril(np.ones(gates.shape[:2], bool))[:, :, None] if len(gates) > 1 else True
        used = ((gates > 0) & learned).any(axis=1)
        arrays |= {f"gates_{layer}": gates, f"used_{layer}": used}
        arrays |= {f"logits_{layer}": np.log(gates[-1] + 1e-3)} if by_task else {}
    np.savez_compressed(path / "routing.npz", **arrays)


def _accuracy(draws, final, learned, tasks):
    """Each task starts well and is forgotten, the earlier the more."""
    age = np.arange(tasks)[:, None] - np.arange(tasks)[None, :]
    worst = 2 * (learned - final)
    fall = worst * (np.maximum(age, 0) / max(tasks - 1, 1)) ** 0.8 * draws.uniform(0.6, 1.4, tasks)
    accuracy = learned - fall + draws.normal(0, 0.003, (tasks, tasks)) + draws.normal(0, 0.003)
    return np.where(age >= 0, np.clip(accuracy, 0, 1).round(4), np.nan)


def _routes(draws, method, benchmark, tasks, experts, k, layers):
    """Neighbours share experts where tasks have an order; `private` has one expert per task."""
    history = []
    for _ in range(layers):
        chosen, unclaimed = [], list(draws.permutation(experts))
        for task in range(tasks):
            if method == "private":
                chosen.append([task % experts])
                continue
            if task == 0:
                chosen.append([unclaimed.pop() for _ in range(k)])
                continue
            fresh = min(draws.poisson(NEW[method] / (1 + task / 4)), k, len(unclaimed))
            near = task - 1 if benchmark == "rotated-mnist" else draws.integers(task)
            pool = list(dict.fromkeys([*chosen[near], *draws.permutation([e for route in chosen for e in route])]))
            chosen.append([*pool[: k - fresh], *(unclaimed.pop() for _ in range(fresh))])
        gates = np.zeros((tasks, tasks, experts), np.float32)
        for phase in range(tasks):
            for task in range(tasks):
                route = chosen[task] if task <= phase else draws.permutation(experts)[: len(chosen[task])]
                logits = draws.normal(0, 0.6 if task <= phase else 0.001, len(route))
                gates[phase, task, route] = np.exp(logits) / np.exp(logits).sum()
        history.append(gates)
    return history
