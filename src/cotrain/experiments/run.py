"""Runs methods on streams over seeds, in this process or on all cores."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax

from cotrain.data.stream import Stream
from cotrain.errors import Invalid, check_positive
from cotrain.experiments.build import build
from cotrain.experiments.cache import share_compiled
from cotrain.experiments.config import Config
from cotrain.experiments.continued import continued
from cotrain.experiments.files import leftovers, write_bytes
from cotrain.experiments.keep import Keep
from cotrain.experiments.loggers import check_logs
from cotrain.experiments.pool import Job, execute, worker_count
from cotrain.experiments.progress import Display, Done
from cotrain.experiments.result import Result, Results
from cotrain.experiments.seeds import run_at_once
from cotrain.experiments.toml import toml
from cotrain.experiments.watch import Callback
from cotrain.methods.method import Method


def run(
    method: Method,
    stream: Stream | Callable[[int], Stream],
    seeds: int | Sequence[int] = 1,
    *,
    batch: int = 10,
    epochs: int = 1,
    evaluate_all: bool = False,
    chunk: int | None = None,
    at_once: bool | None = None,
    progress: bool | None = None,
    on_result: Callable[[Result], None] | None = None,
    callbacks: Sequence[Callback] = (),
    log: Sequence[str] = ("csv",),
    keep_learner: bool = True,
    out: Path | str | None = None,
    resume: bool = False,
    every: float = 60.0,
) -> Results:
    """Learns a stream with a method, once for each seed.

    `seeds` is their number or a list of them; `stream` may be a function of the seed. With `at_once` all seeds run in
    one program, which is the default on accelerators; on a CPU one after another is faster. `progress` shows a bar, by
    default in a terminal or a notebook. `on_result` is called with each result as it comes. All of it happens in this
    process, since methods and streams can be anything; `run_config` uses all cores.

    `callbacks` are told after each chunk and each task, and may ask to stop (see `cotrain.Callback`); of a run that was
    stopped so, the results have NaN for what was not tested.

    Below `out`, each seed's directory keeps its result, what was learned (`keep_learner`; see `cotrain.load_learner`),
    the logs that are named in `log` (csv, tensorboard, wandb) and its last two checkpoints: one after each task, and
    one when the last is `every` seconds old. With `resume`, a run goes on from there, to the bit, also one that had
    fewer tasks; that method and stream are the same as before is checked as far as their shapes and rates go.
    """
    seeds = _listed(seeds)
    kept = {"forget": False, "learner": keep_learner, "log": check_logs(log)}
    keep = None if out is None else Keep(partial(seed_directory, Path(out)), resume, every, **kept)
    make = stream if callable(stream) else lambda seed: stream
    options = {"batch": batch, "epochs": epochs, "evaluate_all": evaluate_all, "chunk": chunk}
    results = Results()
    groups = _groups(seeds, at_once)
    with Display(map(_name, groups), progress) as display:
        for group in groups:
            name = _name(group)
            show = partial(display.show, name)
            for result in run_at_once(method, make, group, options, show, display.say, keep, callbacks=callbacks):
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
    log: Sequence[str] = ("csv",),
    keep_learner: bool = True,
    resume: bool = False,
    every: float = 60.0,
    **options: Any,
) -> Results:
    """Runs a configuration, and keeps each seed's checkpoints and result in a directory below `out` (see `run`).

    `out`/config.toml is the configuration, for `cotrain run` to read.

    The other options are those of `run_jobs`. The first error ends all of it.
    """
    wanted, results = _listed(seeds), Results()
    kept = {"forget": False, "learner": keep_learner, "log": check_logs(log)}
    keep = None if out is None else Keep(partial(seed_directory, out), resume, every, **kept)
    if keep is not None and resume:
        config = continued(config, (keep.place(config, seed) for seed in wanted))
    jobs = {Job(config, seed): _name([seed]) for seed in wanted}
    note = cache(partial(_note_config, config, out))  # when a run has begun: one that is refused is another's
    with Display(jobs.values(), progress) as display:

        def show(job: Job, done: Done) -> None:
            note()
            display.show(jobs[job], done)

        runs = run_jobs(
            list(jobs),
            data_dir,
            report,
            keep=keep,
            on_progress=show,
            say=display.say,
            learners=True,
            **options,
        )
        with closing(runs):
            for job, result in runs:
                if isinstance(result, Exception):
                    raise result
                note()
                results.append(result)
                display.end(jobs[job])
    return Results(sorted(results, key=lambda result: wanted.index(result.seed)))


def _note_config(config: Config, out: Path | None) -> None:
    """Writes a configuration beside its runs, if it is not there."""
    if out is None:
        return
    path, text = out / "config.toml", f"{toml(config.record())}\n".encode(errors="surrogateescape")
    for part in leftovers(out):
        part.unlink(missing_ok=True)
    if not (path.is_file() and path.read_bytes() == text):
        with suppress(FileNotFoundError):  # a process at other seeds has tidied up just now, and writes the same
            write_bytes(path, text)


def seed_directory(out: Path, config: Config | None, seed: int) -> Path:
    """Where a seed's files are, of runs that are kept together."""
    return out / f"seed-{seed}"


def run_jobs(
    jobs: Sequence[Job],
    data_dir: Path | None = None,
    report: Callable[[str], None] | None = None,
    *,
    keep: Keep | None = None,
    chunk: int | None = None,
    at_once: bool | None = None,
    workers: int | None = None,
    learners: bool = False,
    on_progress: Callable[[Job, Done], None] = lambda job, done: None,
    say: Callable[[str], None] = lambda line: None,
) -> Generator[tuple[Job, Result | Exception], None, None]:
    """Runs jobs, and yields each with its result, or with the error that ended it, as it comes.

    `keep` says where, and how; without it, nothing is written. `say` is told what happens to files on the way. Results
    have their learners only if `learners` are wanted.

    On a CPU, `workers` processes share the jobs, by default one per core and at most one per job; with one worker, or
    with `at_once` (see `run`), all happens in this process. Configurations and data are tried before anything runs,
    where an error is raised.
    """
    workers = _workers(workers, len(jobs), at_once)
    configs = dict.fromkeys(job.config for job in jobs)
    share_compiled()

    def try_out() -> None:
        for i, config in enumerate(configs):
            build(config, data_dir, None if i else report)[1](jobs[0].seed)

    if workers > 1:
        options = {"workers": workers, "data_dir": data_dir, "chunk": chunk, "keep": keep, "learners": learners}
        yield from execute(jobs, **options, on_progress=on_progress, say=say, meanwhile=try_out)
        return
    for config in configs:
        method, stream = build(config, data_dir, report)
        for group in _groups([job.seed for job in jobs if job.config == config], at_once):
            together = [Job(config, seed) for seed in group]
            try:
                show = partial(_tell, on_progress, together)
                outcomes = run_seeds(config, method, stream, group, chunk, show, say, keep, learners)
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
    chunk: int | None,
    show: Callable[[Done], None],
    say: Callable[[str], None] = lambda line: None,
    keep: Keep | None = None,
    learners: bool = False,
) -> list[Result]:
    """Seeds of a configuration at once, in this process, with what `build` made of it."""
    options = {**vars(config.schedule), "chunk": chunk}
    results = run_at_once(method, stream, seeds, options, show, say, keep, config)
    return results if learners else [replace(result, learner=None) for result in results]


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
