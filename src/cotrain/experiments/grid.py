"""Runs all cells of a sweep over seeds, keeps each run in a store, and goes on where it was interrupted."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from cotrain.experiments.files import leftovers, write_record
from cotrain.experiments.keep import Keep, tidy
from cotrain.experiments.pool import Job
from cotrain.experiments.progress import Display
from cotrain.experiments.run import run_jobs
from cotrain.experiments.store import Store
from cotrain.experiments.sweep import Cell

COSTS = {"replay": 2.0, "cotraining": 3.0}  # in steps of gradient descent a minibatch; 1 for the others


def run_grid(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    directory: Path,
    *,
    scale: str | None = None,
    data_dir: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
    progress: bool | None = None,
    **options: Any,
) -> list[dict[str, str]]:
    """Runs what is not in `directory`/records yet, seed by seed, and returns the runs that failed, with their errors.

    `directory`/grid.json says which finished runs make up which cell, at which `scale`, from the start on. The options
    are those of `run_jobs`.
    """
    store = Store(directory / "records")
    names = {
        Job(cell.config, seed): f"{cell.benchmark}, {cell.method}, seed {seed}" for seed in seeds for cell in cells
    }
    jobs = [job for job in names if store.read(*job, report) is None]
    report(f"{len(names) - len(jobs)} of {len(names)} runs are in {store.root}")
    failed: list[dict[str, str]] = []
    for part in leftovers(directory):
        part.unlink(missing_ok=True)
    for job in names.keys() - set(jobs):
        tidy(store.place(*job))

    def note() -> None:
        tables = _tables(cells, seeds, store, directory)
        write_record(
            directory / "grid.json", {"scale": scale, "seeds": list(seeds), "tables": tables, "failed": failed}
        )

    note()
    if jobs:
        for failure in _run(jobs, names, store, data_dir, report, progress, options):
            failed += [] if failure is None else [failure]
            note()
    return failed


def _run(
    jobs: list[Job],
    names: dict[Job, str],
    store: Store,
    data_dir: Path | None,
    report: Callable[[str], None],
    progress: bool | None,
    options: dict[str, Any],
) -> Iterator[dict[str, str] | None]:
    """Runs jobs and keeps what comes of them; yields for each how it failed, or None."""
    unlike = _told_apart(names)
    costs = {unlike[job]: COSTS.get(job.config.method.name, 1.0) for job in jobs}
    bars = sys.stderr.isatty() if progress is None else progress
    with Display(costs, bars, ends=True) as display:
        runs = run_jobs(
            jobs,
            data_dir,
            report,
            keep=Keep(store.place),
            on_progress=lambda job, done: display.show(unlike[job], done),
            say=display.say,
            **options,
        )
        with closing(runs):
            for job, outcome in runs:
                if isinstance(outcome, Exception):
                    display.end(unlike[job], f"failed: {outcome}", failed=True)
                    yield {"run": unlike[job], "error": str(outcome)}
                else:
                    spent = sum(spent for part, spent in outcome.seconds.items() if part != "from_step")
                    note = "" if outcome.bwt != outcome.bwt else f", BWT {outcome.bwt:.3f}"
                    display.end(unlike[job], f"ACC {outcome.acc:.3f}{note} in {spent:.0f} s")
                    yield None


def _told_apart(names: dict[Job, str]) -> dict[Job, str]:
    """The names of jobs; one that another configuration has too is followed by the options."""
    shared = {name for name in names.values() if list(names.values()).count(name) > 1}
    hidden = {"benchmark", "network", "method"}

    def name(job: Job) -> str:
        options = (f"{key} {value}" for key, value in job.config.options.items() if key not in hidden)
        return f"{names[job]} ({', '.join(options)})" if names[job] in shared else names[job]

    return {job: name(job) for job in names}


def _tables(
    cells: Sequence[Cell], seeds: Sequence[int], store: Store, directory: Path
) -> dict[str, list[dict[str, Any]]]:
    """Which finished runs make up each cell of each table."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for table, benchmark, method, config in cells:
        places = [store.place(config, seed) for seed in seeds]
        runs = [place.relative_to(directory).as_posix() for place in places if (place / "result.json").exists()]
        row = {"benchmark": benchmark, "method": method, "options": config.options, "runs": runs}
        tables.setdefault(table, []).append(row)
    return tables
