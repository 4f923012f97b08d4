"""Searches the options of each method of the paper's grid, all with the same budget.

Nothing here sees what is reported: the seeds serve no reported run, and the accuracy that counts is on training images
that are kept apart. A search with few examples picks finalists, which run again at full size; steps lead on from the
best of them; and the best of all these run with more seeds, which decide.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from cotrain.experiments.build import build
from cotrain.experiments.files import write_text
from cotrain.experiments.keep import Keep
from cotrain.experiments.pool import Job, execute, worker_count
from cotrain.experiments.progress import Display
from cotrain.experiments.search import Budget, Climb, Search, rounded, short, space
from cotrain.experiments.store import Store


class Asked(NamedTuple):
    """A trial that is running."""

    search: Search
    trial: optuna.trial.Trial


def tune(
    benchmarks: Sequence[str],
    methods: Sequence[str],
    directory: Path,
    budget: Budget,
    *,
    workers: int | None = None,
    data_dir: Path | None = None,
    bars: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Searches each method on each benchmark, on all cores; an interrupted search goes on where it was.

    Returns what was searched, with which budget, and what was found.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directory.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(directory / "journal.log")))
    searches = [Search(benchmark, method, budget, storage) for benchmark in benchmarks for method in methods]
    store = Store(directory / "records")
    first = searches[0].config({}, budget.examples)
    options = {
        "data_dir": data_dir,
        "meanwhile": lambda: build(first, data_dir, report),  # fetches the data once
        "keep": Keep(store.place),
    }
    work = Work(workers, bars, options)
    _search(searches, work)
    climbs = [Climb(search, store) for search in searches]
    _climb(climbs, work)
    _decide(climbs, work)
    return {
        "budget": {**asdict(budget), "last_seeds": list(budget.last_seeds)},
        "space": {method: {name: _plain(known) for name, known in space(method).items()} for method in methods},
        "found": {
            benchmark: {c.search.method: _found(c) for c in climbs if c.search.benchmark == benchmark}
            for benchmark in benchmarks
        },
    }


class Work:
    """Runs jobs on all cores, shows how far they are, and tells what came of them."""

    def __init__(self, workers: int | None, bars: bool, options: dict[str, Any]):
        self.workers, self.bars, self.options = workers, bars, options

    def __call__(
        self,
        total: Sequence[str],
        jobs: Iterator[Job],
        names: Mapping[Job, str],
        tell: Callable[[Job, float], dict[str, Any]],
        most: int | None = None,
    ) -> None:
        """`total` are the names of all there will be, `most` how many there can be at a time; `tell` gives options."""
        if not total:
            return
        with Display(total, self.bars, ends=True) as display:
            runs = execute(
                jobs,
                workers=worker_count(self.workers, most or len(total)),
                on_progress=lambda job, done: display.show(names[job], done),
                say=display.say,
                **self.options,
            )
            with closing(runs):
                for job, outcome in runs:
                    acc = 0.0 if isinstance(outcome, Exception) else outcome.acc  # what diverges learns nothing
                    name = names[job]
                    display.end(name, f"{acc:.4f} with {short(tell(job, acc))}")


def _search(searches: Sequence[Search], work: Work) -> None:
    """Runs all trials that are left, in turns, and tells the studies what came of them."""
    left = {search: max(search.left, 0) for search in searches}
    asked, names = dict[Job, list[Asked]](), dict[Job, str]()

    def name(search: Search, turn: int) -> str:
        number = search.budget.trials - left[search] + turn + 1
        return f"{search.benchmark}, {search.method}, trial {number} of {search.budget.trials}"

    total = [name(search, turn) for search in searches for turn in range(left[search])]

    def jobs() -> Iterator[Job]:
        for turn in range(max(left.values(), default=0)):
            for search in searches:
                if turn < left[search]:
                    trial, config = search.ask()
                    job = Job(config, search.budget.seed)
                    asked.setdefault(job, []).append(Asked(search, trial))
                    names[job] = name(search, turn)
                    yield job

    def tell(job: Job, acc: float) -> dict[str, Any]:
        search, trial = asked[job].pop(0)
        search.study.tell(trial, acc)
        return trial.params

    work(total, jobs(), names, tell)


def _climb(climbs: Sequence[Climb], work: Work) -> None:
    """Makes all climbs at once, each a run at a time."""
    running, names = dict[Job, Climb](), dict[Job, str]()

    def name(climb: Climb, number: int) -> str:
        return f"{climb.search.benchmark}, {climb.search.method}, full size {number}"

    total = [name(climb, len(climb.tried) + i + 1) for climb in climbs for i in range(climb.left)]

    class Jobs(Iterator[Job]):
        """The next run of the climb that is least far; none while all are running, and then some again."""

        def __next__(self) -> Job:
            ready = [climb for climb in climbs if climb.next is not None and climb not in running.values()]
            if not ready:
                raise StopIteration
            climb = min(ready, key=lambda climb: len(climb.tried))
            assert climb.next is not None
            job = climb.job(climb.next)
            running[job], names[job] = climb, name(climb, len(climb.tried) + 1)
            return job

    def tell(job: Job, acc: float) -> dict[str, Any]:
        climb = running.pop(job)
        options = climb.next or {}
        climb.tell(acc)
        return options

    work(total, Jobs(), names, tell, most=len(climbs))


def _decide(climbs: Sequence[Climb], work: Work) -> None:
    """Runs the best of each climb with more seeds."""
    names, tried = dict[Job, str](), dict[Job, dict[str, Any]]()
    for climb in climbs:
        for place, (_, options) in enumerate(climb.leaders, 1):
            for seed in climb.search.budget.last_seeds:
                job = climb.job(options, seed)
                if climb.store.read(*job) is None:
                    names[job] = f"{climb.search.benchmark}, {climb.search.method}, number {place}, seed {seed}"
                    tried[job] = options
    work(list(names.values()), iter(list(names)), names, lambda job, _: tried[job])


def _found(climb: Climb) -> dict[str, Any]:
    """The best options, and all that was tried."""
    last = []
    for acc, options in climb.leaders:
        records = [climb.store.read(*climb.job(options, seed)) for seed in climb.search.budget.last_seeds]
        accs = [acc, *(0.0 if record is None else round(record["acc"], 4) for record in records)]
        last.append({"acc": round(statistics.mean(accs), 4), "accs": accs, **options})
    best = max(last, key=lambda tried: tried["acc"])
    trials = climb.search.study.get_trials(states=[TrialState.COMPLETE])
    return {
        "options": {name: best[name] for name in climb.search.space},
        "validation_acc": best["acc"],
        "more_seeds": last,
        "full_size": [{"acc": acc, **options} for acc, options in climb.tried],
        "trials": [{"acc": round(trial.value or 0, 4), **rounded(trial.params)} for trial in trials],
    }


def save(found: dict[str, Any], path: Path) -> None:
    """Writes what was found, which paper.toml has too; what else the file has of the same budget stays."""
    old = json.loads(path.read_text()) if path.exists() else {}
    if old.get("budget") == found["budget"]:
        merged = {
            name: old["found"].get(name, {}) | found["found"].get(name, {}) for name in old["found"] | found["found"]
        }
        found = {**found, "space": old["space"] | found["space"], "found": merged}
    write_text(path, re.sub(r"\{[^{}]*\}", lambda flat: " ".join(flat[0].split()), json.dumps(found, indent=1)))


def _plain(known: BaseDistribution) -> Any:
    if isinstance(known, FloatDistribution):
        return {"from": known.low, "to": known.high, "log": known.log}
    assert isinstance(known, CategoricalDistribution)
    return list(known.choices)
