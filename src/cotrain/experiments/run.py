"""Runs methods on streams over seeds, in this process or on all cores."""

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cotrain.data.stream import Stream
from cotrain.engine import Snapshot, learn, steps_of
from cotrain.errors import Invalid, check_positive
from cotrain.experiments.build import build
from cotrain.experiments.cache import shape_of, share_compiled, turn_to_compile
from cotrain.experiments.config import Config
from cotrain.experiments.pool import Job, execute, worker_count
from cotrain.experiments.progress import Display, Done
from cotrain.experiments.result import Result, Results, save
from cotrain.methods.method import Method
from cotrain.networks.routing import parameter_count

EVENTS = {"compiled": "compiling", "trained": "training", "evaluated": "evaluating"}


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
    groups = _groups(seeds, at_once)
    with Display(map(_name, groups), sys.stderr.isatty() if progress is None else progress) as display:
        for group in groups:
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
    *,
    progress: bool | None = None,
    **options: Any,
) -> Results:
    """Runs a configuration and writes each seed's record under `out` as soon as there is one.

    The options are those of `run_jobs`. The first error ends all of it.
    """
    wanted, results = _listed(seeds), Results()
    jobs = {Job(config, seed): _name([seed]) for seed in wanted}
    with Display(jobs.values(), sys.stderr.isatty() if progress is None else progress) as display:
        runs = run_jobs(
            list(jobs), data_dir, report, on_progress=lambda job, done: display.show(jobs[job], done), **options
        )
        with closing(runs):
            for job, result in runs:
                if isinstance(result, Exception):
                    raise result
                results.append(result)
                if out is not None:
                    save(result, out / f"seed-{result.seed}", config)
                display.end(jobs[job])
    return Results(sorted(results, key=lambda result: wanted.index(result.seed)))


def run_jobs(
    jobs: Sequence[Job],
    data_dir: Path | None = None,
    report: Callable[[str], None] | None = None,
    *,
    chunk: int = 500,
    at_once: bool | None = None,
    workers: int | None = None,
    on_progress: Callable[[Job, Done], None] = lambda job, done: None,
) -> Generator[tuple[Job, Result | Exception], None, None]:
    """Runs jobs, and yields each with its result, or with the error that ended it, as it comes.

    On a CPU, `workers` processes share the jobs, by default one per core and at most one per job; with one worker, or
    with `at_once` (see `run`), all happens in this process. Configurations and data are tried before anything runs,
    where an error is raised.
    """
    workers = _workers(workers, len(jobs), at_once)
    configs = dict.fromkeys(job.config for job in jobs)
    for config in configs:
        config.check()
    share_compiled()

    def try_out() -> None:
        for i, config in enumerate(configs):
            build(config, data_dir, None if i else report)[1](jobs[0].seed)

    if workers > 1:
        options = {"workers": workers, "data_dir": data_dir, "chunk": chunk}
        yield from execute(jobs, **options, on_progress=on_progress, meanwhile=try_out)
        return
    for config in configs:
        method, stream = build(config, data_dir, report)
        for group in _groups([job.seed for job in jobs if job.config == config], at_once):
            together = [Job(config, seed) for seed in group]
            try:
                outcomes = run_seeds(config, method, stream, group, chunk, partial(_tell, on_progress, together))
            except Exception as error:  # the caller says what is to become of the others
                outcomes = [error] * len(group)
            yield from zip(together, outcomes, strict=True)


def _tell(on_progress: Callable[[Job, Done], None], jobs: Sequence[Job], done: Done) -> None:
    for job in jobs:
        on_progress(job, done)


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


def _note(snapshot: Snapshot, phases: int) -> str:
    """The present task and the accuracy so far, for the progress bar."""
    task = f"task {min(snapshot.phase + 1, phases)}/{phases}"
    if snapshot.phase == 0:
        return task
    return f"{task}, accuracy {np.nanmean(snapshot.accuracy[:, snapshot.phase - 1]):.3f}"
