"""Measures cotrain beside PyTorch, Avalanche and BLAS, in one run, and puts the numbers into a table and a figure.

Every contestant is a process of its own with one thread on one core. All are warmed up first, several at a time; then
they take turns, one pass each a round, so that a noisy machine shows as spread and not as a difference.
"""

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from benchmarks.workload import Workload, permuted_mnist
from cotrain.methods import METHODS

TORCH, AVALANCHE = "benchmarks.peers.torch_eager", "benchmarks.peers.avalanche_naive"
OURS, LIMIT, STEP = "benchmarks.ours", "benchmarks.limit", "benchmarks.methods"
# A program that several processes need is compiled once in a run, as it is in a sweep.
COMPILED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


class Contestant(NamedTuple):
    """Who runs what; those with the same `subject` are compared."""

    subject: str
    name: str
    module: str
    function: str
    changes: Mapping[str, Any] = {}  # to the workload
    quick: bool = True  # also in a quick run


ONE_CORE = [
    Contestant("algorithm 1", "cotrain", OURS, "algorithm1"),
    Contestant("algorithm 1", "PyTorch eager", TORCH, "algorithm1"),
    Contestant("algorithm 1", "PyTorch eager, vectorised", TORCH, "algorithm1_vectorised", quick=False),
    Contestant("algorithm 1", "PyTorch eager, experts stacked by hand", TORCH, "algorithm1_stacked", quick=False),
    Contestant("algorithm 1", "PyTorch compiled", TORCH, "algorithm1_compiled"),
    Contestant("shared bottom + replay", "cotrain", OURS, "replay"),
    Contestant("shared bottom + replay", "PyTorch eager", TORCH, "replay"),
    Contestant("shared bottom + replay", "PyTorch compiled", TORCH, "replay_compiled", quick=False),
    Contestant("shared bottom + replay", "Avalanche", AVALANCHE, "replay"),
    Contestant("shared bottom + replay", "Avalanche, measuring nothing", AVALANCHE, "replay_bare", quick=False),
    Contestant("shared bottom", "cotrain", OURS, "finetune"),
    Contestant("shared bottom", "PyTorch eager", TORCH, "finetune"),
    Contestant("shared bottom", "PyTorch compiled", TORCH, "finetune_compiled", quick=False),
    Contestant("shared bottom", "Avalanche", AVALANCHE, "finetune"),
    Contestant("shared bottom", "Avalanche, measuring nothing", AVALANCHE, "finetune_bare", quick=False),
    Contestant("shared bottom", "its matrix products in BLAS", LIMIT, "shared_bottom_products"),
]
MACHINE = [
    contestant
    for contestant in ONE_CORE
    if contestant.subject != "shared bottom" and contestant.name in ("cotrain", "PyTorch eager", "Avalanche")
]
EXPERTS, TASKS = (20, 80, 320, 1280), (20, 200)
GROWTH = [
    *[Contestant("current batch", f"{n} experts", OURS, "routed_finetune", {"experts": n}) for n in EXPERTS],
    *[Contestant("with replay", f"{n} experts", OURS, "routed_replay", {"experts": n}) for n in EXPERTS],
    Contestant("with replay", "memory of 100000", OURS, "routed_replay", {"memory": 100_000}),
    *[Contestant("algorithm 1", f"{n} tasks", OURS, "algorithm1", {"tasks": n}) for n in TASKS],
]
NAMES = [
    name for name in METHODS if name not in ("private", "progressive", "expert-gate", "joint")
]  # on dense networks
STEPS = [Contestant("a step", name, STEP, "step", {"method": name}) for name in NAMES]
TASK, QUICK_TASK = 60_000, 10_000  # examples: growth is measured in tasks as long as the paper's
PEAK = Contestant("peak", "BLAS", LIMIT, "peak")
RESIDENT = Contestant("resident memory", "cotrain", OURS, "resident")
LEARNER = Contestant("learner", "cotrain", "benchmarks.learner", "learner")
STREAM = Contestant("stream of 50 GB", "cotrain", "benchmarks.learner", "stream")


@dataclass
class Measured:
    """What came of a contestant."""

    contestant: Contestant
    ready: float | None = None  # seconds to import, compile and run a first pass
    error: str | None = None
    microseconds: list[float] = field(default_factory=list)  # an iteration, in each round

    @property
    def median(self) -> float | None:
        return statistics.median(self.microseconds) if self.microseconds else None

    def record(self) -> dict[str, Any]:
        subject, name, *_ = self.contestant
        figures = {"median": self.median, "rounds": self.microseconds, "ready_seconds": self.ready, "error": self.error}
        return {"subject": subject, "name": name, "microseconds": figures}


class Process:
    """A contestant's process; see `benchmarks.worker`."""

    def __init__(self, contestant: Contestant, core: int, workload: Workload, directory: Path):
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            pickle.dump(_changed(workload, contestant.changes), file)
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks.worker", str(core), contestant.module, contestant.function]
        self.process = subprocess.Popen(
            [*command, file.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path} | COMPILED | {"JAX_COMPILATION_CACHE_DIR": f"{directory}/compiled"},
        )
        self.first = self.answer()
        Path(file.name).unlink()  # it has been read

    def ask(self, core: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{core}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": f"the process ended with code {self.process.wait()}"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Crowd(NamedTuple):
    """A contestant's processes, one for each core."""

    contestant: Contestant
    processes: list[Process]


def bench(quick: bool = False) -> dict[str, Any]:
    """Every figure measured, and the ratios."""
    rounds = 3  # a process may take longer for its first, where it is handed out memory
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    workload = Workload(permuted_mnist(tasks=20, examples=500 if quick else 1000))
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        start = _Start(workload, Path(directory), cores, stack)
        contestants = [contestant for contestant in ONE_CORE if contestant.quick or not quick]
        say(f"warming up {len(contestants)} contestants")
        alone = start(contestants)
        say(f"one core: {rounds} rounds")
        _take_turns(alone, rounds, cores[0])
        say(f"{len(cores)} cores: {rounds} rounds")
        crowds = _crowds(start, alone, cores)
        machine = _all_cores(crowds, 1 if quick else rounds, cores)
        for process in [p for p, _ in alone] + [p for crowd in crowds for p in crowd.processes]:
            process.close()
        say("a step of each method")
        steps = _in_turns(start, STEPS, rounds, cores[0])
        say("growth")
        begin = _Start(_growth_workload(workload, QUICK_TASK if quick else TASK), Path(directory), cores, stack)
        growth = _in_turns(begin, GROWTH, rounds, cores[0])
        figures = {}
        for single in (PEAK, RESIDENT, LEARNER, STREAM):
            say(single.subject)
            [(process, _)] = start([single])
            process.ask(cores[0])
            figures[single.subject] = process.answer()["value"]
            process.close()
        say("done")
    one_core = [m for _, m in alone]
    return {
        "quick": quick,
        "cores": len(cores),
        "iterations_per_pass": sum(-(-len(y) // workload.batch) for _, y in workload.tasks),
        "one_core": [m.record() for m in one_core],
        "machine": machine,
        "steps": [m.record() for m in steps],
        "growth": [m.record() for m in growth],
        "blas_peak_gflops": figures["peak"],
        "resident_megabytes": [{"tasks": n, "megabytes": size} for n, size in figures["resident memory"]],
        "learner": figures["learner"],
        "stream": figures["stream of 50 GB"],
        "ratios": _ratios(one_core, growth, machine)
        | _step_ratios(steps)
        | _learner_ratios(figures["learner"], figures["stream of 50 GB"]),
        "seconds": time.monotonic() - started,
    }


def _step_ratios(steps: list[Measured]) -> dict[str, float | None]:
    """The medians over the rounds of a step's time over that of plain replay."""
    found = {m.contestant.name: m.microseconds for m in steps}
    plain = found.pop("replay", [])
    return {f"step_{name.replace('-', '_')}_over_replay": _over(times, plain) for name, times in found.items()}


def _learner_ratios(learner: dict[str, Any], stream: dict[str, float]) -> dict[str, float]:
    """The largest over the methods of what feeding by hand costs; and how well reading ahead hides what it takes."""
    names = ("at_once_over_engine", "one_by_one_more_ms", "predict_over_evaluation")
    worst = {name: max(figures[name] for figures in learner.values()) for name in names}
    return {**worst, "reading_hidden": stream["hidden"], "stream_resident_megabytes": stream["resident_megabytes"]}


def _growth_workload(workload: Workload, examples: int) -> Workload:
    """The first two tasks alone, longer: what the engine does once a chunk or once a task counts as in a real run."""
    long = permuted_mnist(tasks=2, examples=examples)
    rest = [(x[: workload.batch], y[: workload.batch]) for x, y in workload.tasks[2:]]
    return replace(workload, tasks=long + rest, limit=2)


class _Start:
    """Starts contestants, as many at a time as there are cores, and returns those that are ready."""

    def __init__(self, workload: Workload, directory: Path, cores: Sequence[int], stack: ExitStack):
        self.workload, self.directory, self.cores, self.stack = workload, directory, cores, stack

    def __call__(self, contestants: Iterable[Contestant]) -> list[tuple[Process, Measured]]:
        free: SimpleQueue[int] = SimpleQueue()
        for core in self.cores:
            free.put(core)

        def one(contestant: Contestant) -> tuple[Process, Measured]:
            core = free.get()
            try:
                process = Process(contestant, core, self.workload, self.directory)
            finally:
                free.put(core)
            self.stack.callback(process.close)
            return process, Measured(contestant, process.first.get("ready"), process.first.get("error"))

        with ThreadPoolExecutor(len(self.cores)) as pool:
            return list(pool.map(one, contestants))


def _take_turns(running: list[tuple[Process, Measured]], rounds: int, core: int) -> None:
    for _ in range(rounds):
        for process, measured in running:
            if measured.error is None:
                process.ask(core)
                answer = process.answer()
                measured.microseconds.append(answer["seconds"] / answer["iterations"] * 1e6)


def _in_turns(start: _Start, contestants: Iterable[Contestant], rounds: int, core: int) -> list[Measured]:
    """Those of one subject take turns; then they make room for the next, since all at once take too much memory."""
    measured = []
    for _, alike in groupby(contestants, lambda contestant: contestant.subject):
        running = start(alike)
        _take_turns(running, rounds, core)
        measured += [m for _, m in running]
        for process, _ in running:
            process.close()
    return measured


def _crowds(start: _Start, alone: list[tuple[Process, Measured]], cores: Sequence[int]) -> list[Crowd]:
    """For each contestant of the whole machine, a process per core: the one that it has, and new ones."""
    able = [(process, m.contestant) for process, m in alone if m.error is None and m.contestant in MACHINE]
    more = iter(start(contestant for _, contestant in able for _ in cores[1:]))
    return [Crowd(contestant, [process] + [next(more)[0] for _ in cores[1:]]) for process, contestant in able]


def _all_cores(crowds: list[Crowd], rounds: int, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Iterations a second of all cores together."""
    rates: list[list[float]] = [[] for _ in crowds]
    for _ in range(rounds):
        for crowd, measured in zip(crowds, rates, strict=True):
            for process, core in zip(crowd.processes, cores, strict=True):
                process.ask(core)
            answers = [process.answer() for process in crowd.processes]
            measured.append(sum(answer["iterations"] / answer["seconds"] for answer in answers))
    return [
        {
            "subject": crowd.contestant.subject,
            "name": crowd.contestant.name,
            "iterations_per_second": {"median": statistics.median(measured), "rounds": measured},
        }
        for crowd, measured in zip(crowds, rates, strict=True)
    ]


def _changed(workload: Workload, changes: Mapping[str, Any]) -> Workload:
    """The workload with other sizes; a number of tasks repeats the tasks that there are."""
    if "tasks" in changes:
        count = changes["tasks"]
        changes = {**changes, "tasks": [workload.tasks[i % len(workload.tasks)] for i in range(count)]}
    return replace(workload, **changes)


def _over(a: list[float], b: list[float]) -> float | None:
    """The median over the rounds of one time over another; None where one is missing."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True)) if a and b else None


def _ratios(one_core: list[Measured], growth: list[Measured], machine: list[dict[str, Any]]) -> dict[str, float | None]:
    """Medians over the rounds of one contestant's time over another's in the same round; None where one is missing."""

    def time_of(measured: list[Measured], subject: str, name: str) -> list[float]:
        return next((m.microseconds for m in measured if m.contestant[:2] == (subject, name)), [])

    def against(subject: str, peer: str) -> float | None:
        return _over(time_of(one_core, subject, peer), time_of(one_core, subject, "cotrain"))

    def grown(subject: str, large: str, small: str) -> float | None:
        return _over(time_of(growth, subject, large), time_of(growth, subject, small))

    def everywhere(subject: str, name: str) -> list[float]:
        found = [m["iterations_per_second"]["rounds"] for m in machine if (m["subject"], m["name"]) == (subject, name)]
        return found[0] if found else []

    bottom = "shared bottom"
    return {
        "algorithm1_vs_torch_one_core": against("algorithm 1", "PyTorch eager"),
        "algorithm1_vs_torch_machine": _over(
            everywhere("algorithm 1", "cotrain"), everywhere("algorithm 1", "PyTorch eager")
        ),
        "algorithm1_vs_torch_vectorised": against("algorithm 1", "PyTorch eager, vectorised"),
        "algorithm1_vs_torch_stacked": against("algorithm 1", "PyTorch eager, experts stacked by hand"),
        "algorithm1_vs_torch_compiled": against("algorithm 1", "PyTorch compiled"),
        "shared_bottom_vs_torch": against(bottom, "PyTorch eager"),
        "shared_bottom_vs_torch_compiled": against(bottom, "PyTorch compiled"),
        "finetune_vs_avalanche": against(bottom, "Avalanche"),
        "finetune_vs_avalanche_measuring_nothing": against(bottom, "Avalanche, measuring nothing"),
        "replay_vs_torch": against(f"{bottom} + replay", "PyTorch eager"),
        "replay_vs_avalanche": against(f"{bottom} + replay", "Avalanche"),
        "replay_vs_avalanche_measuring_nothing": against(f"{bottom} + replay", "Avalanche, measuring nothing"),
        "shared_bottom_step_over_blas": _over(
            time_of(one_core, bottom, "cotrain"), time_of(one_core, bottom, "its matrix products in BLAS")
        ),
        "experts_1280_over_20_current": grown("current batch", "1280 experts", "20 experts"),
        "experts_1280_over_20_replay": grown("with replay", "1280 experts", "20 experts"),
        "tasks_200_over_20": grown("algorithm 1", "200 tasks", "20 tasks"),
        "memory_100000_over_1000": grown("with replay", "memory of 100000", "20 experts"),
    }
