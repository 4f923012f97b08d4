"""The search of one method's options on one benchmark: trials with few examples, then steps at full size."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages import JournalStorage
from optuna.trial import TrialState

from cotrain.experiments.config import Config
from cotrain.experiments.paper import METHODS, preset
from cotrain.experiments.pool import Job
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
        usual = Config().flat
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
        apply = rounded(options)
        if apply.get("sampling") == "none":  # which takes no noise
            apply.pop("noise")
        config = preset(self.benchmark, self.method)
        return config.but(**apply, examples=examples, validation=self.budget.validation)

    def finalists(self) -> list[dict[str, Any]]:
        """The options of the best trials."""
        done = self.study.get_trials(states=[TrialState.COMPLETE])
        best = sorted(done, key=lambda trial: -(trial.value or 0))
        unlike = list({short(trial.params): rounded(trial.params) for trial in best}.values())
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
                for options in map(rounded, move):
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


def rounded(options: dict[str, Any]) -> dict[str, Any]:
    """Options with three digits."""
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in options.items()}


def short(options: dict[str, Any]) -> str:
    """Options in a line."""
    return ", ".join(f"{name} {value}" for name, value in rounded(options).items())
