"""Runs a method on a stream over seeds, and keeps what came out."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cotrain import metrics
from cotrain.data.stream import Stream
from cotrain.engine import Snapshot, learn, steps_of
from cotrain.errors import Invalid, check_positive
from cotrain.experiments.build import build
from cotrain.experiments.cache import shape_of, share_compiled, turn_to_compile
from cotrain.experiments.config import Config
from cotrain.experiments.pool import Job, execute, worker_count
from cotrain.experiments.progress import Display, Done
from cotrain.methods.method import Method
from cotrain.networks.routing import parameter_count

EVENTS = {"compiled": "compiling", "trained": "training", "evaluated": "evaluating"}
METRICS = ("acc", "bwt", "learning_accuracy", "forgetting", "forward_transfer")


@dataclass(frozen=True)
class Result:
    """One seed's run."""

    seed: int
    accuracy: np.ndarray  # [T, T]: on task i after learning task t; NaN where it was not evaluated; [1, T] if joint
    initial: np.ndarray  # [T]: before learning anything
    logits: tuple[np.ndarray, ...]  # [T, T, E] per layer with a router: after each task
    gates: tuple[np.ndarray, ...]  # the routing probabilities, 0 off the routes
    parameters: int
    seconds: dict[str, float]  # compiling, training, evaluating

    @property
    def acc(self) -> float:
        """The mean accuracy after the last task."""
        return metrics.average_accuracy(self.accuracy)

    @property
    def bwt(self) -> float:
        """Backward transfer."""
        return metrics.backward_transfer(self.accuracy)

    @property
    def learning_accuracy(self) -> float:
        """The mean accuracy right after each task."""
        return metrics.learning_accuracy(self.accuracy)

    @property
    def forgetting(self) -> float:
        """The mean drop from the best accuracy."""
        return metrics.forgetting(self.accuracy)

    @property
    def forward_transfer(self) -> float:
        """Forward transfer; NaN unless tasks to come were evaluated."""
        return metrics.forward_transfer(self.accuracy, self.initial)

    def record(self, config: Config | None) -> dict[str, Any]:
        """What goes into `result.json`."""
        numbers = {name: _json(getattr(self, name)) for name in METRICS}
        return {
            "version": version("cotrain"),
            "config": None if config is None else config.record(),
            "seed": self.seed,
            **numbers,
            "accuracy": _json(_square(self.accuracy)),
            "initial_accuracy": _json(self.initial),
            "parameters": self.parameters,
            "seconds": self.seconds,
        }

    def routing(self) -> dict[str, np.ndarray]:
        """What goes into `routing.npz`: logits, gates and used experts, after each task, per layer."""
        history = {}
        for layer, (logits, gates) in enumerate(zip(self.logits, self.gates, strict=True)):
            history |= {f"logits_{layer}": logits, f"gates_{layer}": gates}
            history[f"used_{layer}"] = metrics.used_experts(gates)
        return history


class Results(list[Result]):
    """The runs of several seeds."""

    def summary(self, metric: str = "acc") -> metrics.Summary:
        """A metric's mean, standard deviation and confidence interval over the seeds."""
        return metrics.summarise(np.array([getattr(result, metric) for result in self]))

    def __str__(self) -> str:
        parts = (f"{name} {_plus_minus(self.summary(name))}" for name in ("acc", "bwt", "learning_accuracy"))
        return ", ".join(parts) + f" ({len(self)} {'seed' if len(self) == 1 else 'seeds'})"


def run(
    method: Method,
    stream: Stream | Callable[[int], Stream],
    seeds: int | Sequence[int] = 1,
    *,
    batch: int = 10,
    epochs: int = 1,
    evaluate_all: bool = False,
    chunk: int = 500,
    at_once: bool | None = None,
    progress: bool | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> Results:
    """Learns a stream with a method, once for each seed.

    `seeds` is their number or a list of them; `stream` may be a function of the seed. With `at_once` all seeds run in
    one program, which is the default on accelerators; on a CPU one after another is faster. `progress` shows a bar, by
    default in a terminal. `on_result` is called with each result as it comes. All of it happens in this process, since
    methods and streams can be anything; `run_config` uses all cores.
    """
    seeds = _listed(seeds)
    make = stream if callable(stream) else lambda seed: stream
    options = {"batch": batch, "epochs": epochs, "evaluate_all": evaluate_all, "chunk": chunk}
    results = Results()
    with Display(sys.stderr.isatty() if progress is None else progress) as display:
        for group in _groups(seeds, at_once):
            name = _name(group)
            for result in _run_group(method, make, group, options, lambda done, name=name: display.show(name, done)):
                results.append(result)
                if on_result is not None:
                    on_result(result)
            display.end(name)
    return results


def run_config(
    config: Config,
    seeds: int | Sequence[int] = 1,
    out: Path | None = None,
    data_dir: Path | None = None,
    report: Callable[[str], None] | None = None,
    **options: Any,
) -> Results:
    """Runs a configuration and writes each seed's record under `out` as soon as there is one.

    The options are those of `run_configs`.
    """
    return run_configs([config], seeds, [out], data_dir, report, **options)[0]


def run_configs(
    configs: Sequence[Config],
    seeds: int | Sequence[int] = 1,
    outs: Sequence[Path | None] | None = None,
    data_dir: Path | None = None,
    report: Callable[[str], None] | None = None,
    *,
    chunk: int = 500,
    at_once: bool | None = None,
    workers: int | None = None,
    progress: bool | None = None,
) -> list[Results]:
    """Runs configurations over the same seeds, and writes each record under its configuration's `outs`.

    On a CPU, `workers` processes share the runs, by default one per core and at most one per run; with one worker, or
    with `at_once` (see `run`), all happens in this process.
    """
    wanted, outs = _listed(seeds), [None] * len(configs) if outs is None else outs
    jobs = [Job(config, seed) for config in configs for seed in wanted]
    workers = _workers(workers, len(jobs), at_once)
    for config in configs:
        config.check()
    share_compiled()
    results = [Results() for _ in configs]

    def keep(place: int, result: Result) -> None:
        results[place].append(result)
        if (out := outs[place]) is not None:
            save(result, out / f"seed-{result.seed}", configs[place])

    def name(seeds: list[int], config: Config) -> str:
        return _name(seeds) if len(configs) == 1 else f"{config.method} on {config.network}, {_name(seeds)}"

    with Display(sys.stderr.isatty() if progress is None else progress) as display:
        if workers == 1:
            for place, config in enumerate(configs):
                method, stream = build(config, data_dir, report)
                for group in _groups(wanted, at_once):
                    show = partial(display.show, name(group, config))
                    for result in run_seeds(config, method, stream, group, chunk, show):
                        keep(place, result)
                    display.end(name(group, config))
        else:
            places = {id(job): i // len(wanted) for i, job in enumerate(jobs)}

            def try_out() -> None:  # here, where data are fetched once and mistakes show before anything runs
                for config in configs:
                    build(config, data_dir, report)[1](wanted[0])

            def show_job(job: Job, done: Done) -> None:
                display.show(name([job.seed], job.config), done)

            options = {"workers": workers, "data_dir": data_dir, "chunk": chunk}
            with closing(execute(jobs, **options, on_progress=show_job, meanwhile=try_out)) as runs:
                for job, result in runs:
                    keep(places[id(job)], result)
                    display.end(name([job.seed], job.config))
    return [Results(sorted(some, key=lambda result: wanted.index(result.seed))) for some in results]


def run_seeds(
    config: Config,
    method: Method,
    stream: Callable[[int], Stream],
    seeds: list[int],
    chunk: int,
    show: Callable[[Done], None],
) -> list[Result]:
    """Seeds of a configuration at once, in this process, with what `build` made of it."""
    options = {"batch": config.batch, "epochs": config.epochs, "evaluate_all": config.evaluate_all, "chunk": chunk}
    return _run_group(method, stream, seeds, options, show, shape_of(config, chunk, len(seeds)))


def save(result: Result, directory: Path, config: Config | None = None) -> None:
    """Writes `result.json` and, where there is a router, `routing.npz`; each file appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    routing = result.routing()
    if routing:
        _write(directory / "routing.npz", lambda file: np.savez_compressed(file, allow_pickle=False, **routing))
    text = json.dumps(result.record(config), indent=1, allow_nan=False)
    _write(directory / "result.json", lambda file: file.write(text.encode() + b"\n"))


def _listed(seeds: int | Sequence[int]) -> list[int]:
    seeds = list(range(check_positive("seeds", seeds))) if isinstance(seeds, int) else list(seeds)
    if not seeds or min(seeds) < 0:
        raise Invalid("seeds", seeds, "give at least one whole number of at least 0")
    return seeds


def _groups(seeds: list[int], at_once: bool | None) -> list[list[int]]:
    """The seeds that run at once in this process."""
    at_once = jax.default_backend() != "cpu" if at_once is None else at_once
    return [seeds] if at_once else [[seed] for seed in seeds]


def _workers(wanted: int | None, jobs: int, at_once: bool | None) -> int:
    """The number of worker processes; one stands for this process."""
    if not at_once and jax.default_backend() == "cpu":
        return worker_count(wanted, jobs)
    if wanted is not None and check_positive("workers", wanted) > 1:
        raise Invalid("workers", wanted, "they are for CPUs, and for one seed at a time; leave it out")
    return 1


def _name(seeds: list[int]) -> str:
    return f"seed {', '.join(map(str, seeds))}"


def _run_group(
    method: Method,
    stream: Callable[[int], Stream],
    seeds: list[int],
    options: dict[str, Any],
    show: Callable[[Done], None],
    shape: str | None = None,
) -> list[Result]:
    """The seeds that run at once; where they have a shape, no other process compiles it at the same time."""
    streams, seconds = [stream(seed) for seed in seeds], dict.fromkeys(EVENTS.values(), 0.0)
    steps = steps_of(streams[0], options["batch"], options["epochs"])
    show(Done(0, sum(steps), "compiling"))
    with ExitStack() as turn:
        if shape is not None:
            turn.enter_context(turn_to_compile(shape))
        last, snapshot = time.monotonic(), None
        for snapshot in learn(method, streams, seeds, **options):
            now = time.monotonic()
            seconds[EVENTS[snapshot.event]] += now - last
            last = now
            if snapshot.event == "compiled":
                turn.close()
            show(Done(sum(steps[: snapshot.phase]) + snapshot.step, sum(steps), _note(snapshot, len(steps))))
    assert snapshot is not None
    per_seed = {event: round(spent / len(seeds), 3) for event, spent in seconds.items()}
    return [
        Result(
            seed,
            snapshot.accuracy[i],
            snapshot.initial[i],
            tuple(logits[i] for logits in snapshot.logits),
            tuple(gates[i] for gates in snapshot.gates),
            parameter_count(method.network),
            per_seed,
        )
        for i, seed in enumerate(seeds)
    ]


def _square(accuracy: np.ndarray) -> np.ndarray:
    """The accuracy matrix with a row per task; a joint run has only the last."""
    phases, tasks = accuracy.shape
    return np.concatenate([np.full((tasks - phases, tasks), np.nan), accuracy])


def _note(snapshot: Snapshot, phases: int) -> str:
    """The present task and the accuracy so far, for the progress bar."""
    task = f"task {min(snapshot.phase + 1, phases)}/{phases}"
    if snapshot.phase == 0:
        return task
    return f"{task}, accuracy {np.nanmean(snapshot.accuracy[:, snapshot.phase - 1]):.3f}"


def _plus_minus(summary: metrics.Summary) -> str:
    return f"{summary.mean:.3f}" if np.isnan(summary.std) else f"{summary.mean:.3f} ± {summary.std:.3f}"


def _json(value: Any) -> Any:
    """Numbers and arrays for JSON, with null for NaN."""
    if isinstance(value, np.ndarray):
        return [_json(item) for item in value.tolist()]
    if isinstance(value, list):
        return [_json(item) for item in value]
    return None if np.isnan(value) else value


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise
