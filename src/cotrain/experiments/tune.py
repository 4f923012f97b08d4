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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from cotrain.experiments.build import build
from cotrain.experiments.config import Config
from cotrain.experiments.files import write_text
from cotrain.experiments.keep import Keep
from cotrain.experiments.paper import METHODS, preset
from cotrain.experiments.pool import Job, execute, worker_count
from cotrain.experiments.progress import Display
from cotrain.experiments.store import Store

RATES: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(0.003, 0.5, log=True),
    "memory_lr": FloatDistribution(0.003, 0.5, log=True),
    "cotraining_lr": FloatDistribution(0.003, 0.5, log=True),
    "router_lr": FloatDistribution(0.003, 3.0, log=True),
}
ROUTING: dict[str, BaseDistribution] = {
    "noise": FloatDistribution(0.005, 0.5, log=True),
    "sampling": CategoricalDistribution(["gaussian", "gumbel", "noisy-top-k", "none"]),
    "gates": CategoricalDistribution(["chosen", "all"]),
}
HEADS: dict[str, BaseDistribution] = {"cotrain_heads": CategoricalDistribution([False, True])}
FIRST = (0.1, 0.03, 0.01)  # rates tried before the search begins, for every method, with the other defaults


@dataclass(frozen=True)
class Budget:
    """What each method gets on each benchmark."""

    trials: int = 16
    examples: int | None = 10_000  # of a task, in a trial; None: all
    finalists: int = 3  # which run at full size
    steps: int = 16  # from the best of them, at full size
    validation: int | None = 5000  # training images kept apart
    seed: int = 1000  # of the search's runs
    final_seed: int = 1001
    last: int = 3  # the best at full size, which run with more seeds
    last_seeds: tuple[int, ...] = (1002, 1003)


def space(method: str) -> dict[str, BaseDistribution]:
    """The options that are searched for a method of the grid."""
    network, name = METHODS[method]
    wanted = ["lr"]
    if name in ("replay", "cotraining"):
        wanted.append("memory_lr")
    if name == "cotraining":
        wanted.append("cotraining_lr")
    if network != "routing-network" or name == "private":
        return {option: RATES[option] for option in wanted}
    options = {option: RATES[option] for option in [*wanted, "router_lr"]} | ROUTING
    return options | HEADS if name == "cotraining" else options


class Search:
    """The search for one method on one benchmark."""

    def __init__(self, benchmark: str, method: str, budget: Budget, storage: JournalStorage):
        self.benchmark, self.method, self.budget, self.space = benchmark, method, budget, space(method)
        self.study = optuna.create_study(
            study_name=f"{benchmark}, {method}, {key_of_budget(budget)}",
            storage=storage,
            direction="maximize",
            load_if_exists=True,
        )
        options = {"n_startup_trials": 8, "multivariate": True, "constant_liar": True}
        seed = len(self.study.trials)  # one that goes on does not draw again what it has drawn
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, **options)
        for trial in self.study.get_trials(states=[TrialState.RUNNING]):  # what an interrupted search left
            self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.enqueue_trial(trial.params)
        if not self.study.trials:
            for rate in FIRST:
                self.study.enqueue_trial({name: rate for name in self.space if name in RATES} | self._usual())

    def _usual(self) -> dict[str, Any]:
        usual = Config().record()
        return {name: usual[name] for name in self.space if name not in RATES}

    @property
    def left(self) -> int:
        """How many trials there are still to be."""
        return self.budget.trials - len(self.study.get_trials(states=[TrialState.COMPLETE, TrialState.RUNNING]))

    def ask(self) -> tuple[optuna.trial.Trial, Config]:
        """The next trial and its configuration."""
        trial = self.study.ask(self.space)
        return trial, self.config(trial.params, self.budget.examples)

    def config(self, options: dict[str, Any], examples: int | None) -> Config:
        """A configuration of the search, with options from its space."""
        config = preset(self.benchmark, self.method, "as-the-paper")
        return replace(config, **_rounded(options), examples=examples, validation=self.budget.validation)

    def finalists(self) -> list[dict[str, Any]]:
        """The options of the best trials."""
        done = self.study.get_trials(states=[TrialState.COMPLETE])
        best = sorted(done, key=lambda trial: -(trial.value or 0))
        unlike = list({_short(trial.params): _rounded(trial.params) for trial in best}.values())
        return unlike[: self.budget.finalists]


class Climb:
    """The runs of a search at full size: the finalists, and then steps from the best of them.

    A step halves or doubles the rates, all at once or one alone, or the noise, or makes another choice where there is
    one; what is better is the place to go on from. When none is, the steps become smaller.
    """

    def __init__(self, search: Search, store: Store):
        self.search, self.store = search, store
        self.tried: list[tuple[float, dict[str, Any]]] = []  # accuracy and options
        self.plan = self._plan()
        self.next: dict[str, Any] | None = None
        self._look_ahead()

    @property
    def best(self) -> tuple[float, dict[str, Any]]:
        """The best accuracy, and the options that gave it."""
        return max(self.tried, key=lambda tried: tried[0])

    @property
    def left(self) -> int:
        """How many runs there are still to be."""
        budget = self.search.budget
        return 0 if self.next is None else budget.finalists + budget.steps - len(self.tried)

    @property
    def leaders(self) -> list[tuple[float, dict[str, Any]]]:
        """The best few, which run with more seeds."""
        return sorted(self.tried, key=lambda tried: -tried[0])[: self.search.budget.last]

    def job(self, options: dict[str, Any], seed: int | None = None) -> Job:
        """The run with some options."""
        return Job(self.search.config(options, None), self.search.budget.final_seed if seed is None else seed)

    def tell(self, acc: float) -> None:
        """What the next one has given."""
        assert self.next is not None
        self.tried.append((round(acc, 4), self.next))
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Finds what to run next; what is in the store needs no run."""
        while (options := next(self.plan, None)) is not None:
            record = self.store.read(*self.job(options))
            if record is None:
                break
            self.tried.append((round(record["acc"], 4), options))
        self.next = options

    def _plan(self) -> Iterator[dict[str, Any]]:
        budget, factor = self.search.budget, 2.0
        yield from self.search.finalists()
        while factor > 1.01:
            before = self.best
            for move in self._moves(factor):
                for options in map(_rounded, move):
                    if any(options == known for _, known in self.tried):
                        continue
                    if len(self.tried) == budget.finalists + budget.steps:
                        return
                    yield options
                    if self.best[1] == options:
                        break
            if self.best == before:
                factor **= 0.5

    def _moves(self, factor: float) -> Iterator[list[dict[str, Any]]]:
        """What to try in turn, from the best so far, each until something is better."""
        space = self.search.space
        rates = [name for name in space if name in RATES]
        alone = [[name] for name, known in space.items() if isinstance(known, FloatDistribution)]
        for names in (rates, *alone):
            options = self.best[1]
            yield [options | {name: options[name] * by for name in names} for by in (1 / factor, factor)]
        for name, known in space.items():
            if isinstance(known, CategoricalDistribution):
                yield [self.best[1] | {name: choice} for choice in known.choices]


def key_of_budget(budget: Budget) -> str:
    """What a study is named after, so that another budget is another study."""
    return f"{budget.examples} examples, {budget.validation} apart, seed {budget.seed}"


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
                    display.end(name, f"{acc:.4f} with {_short(tell(job, acc))}")


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
        "trials": [{"acc": round(trial.value or 0, 4), **_rounded(trial.params)} for trial in trials],
    }


def save(found: dict[str, Any], path: Path) -> None:
    """Writes what was found, for `paper.preset` to read; what else the file has of the same budget stays."""
    old = json.loads(path.read_text()) if path.exists() else {}
    if old.get("budget") == found["budget"]:
        merged = {
            name: old["found"].get(name, {}) | found["found"].get(name, {}) for name in old["found"] | found["found"]
        }
        found = {**found, "space": old["space"] | found["space"], "found": merged}
    write_text(path, re.sub(r"\{[^{}]*\}", lambda flat: " ".join(flat[0].split()), json.dumps(found, indent=1)))


def _rounded(options: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in options.items()}


def _short(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in _rounded(options).items())


def _plain(known: BaseDistribution) -> Any:
    if isinstance(known, FloatDistribution):
        return {"from": known.low, "to": known.high, "log": known.log}
    assert isinstance(known, CategoricalDistribution)
    return list(known.choices)
