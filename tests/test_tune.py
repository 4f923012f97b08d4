"""The search: equal budgets, what it never sees, and that it goes on where it was."""

import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from cotrain.data.fetch import Dataset
from cotrain.errors import Invalid
from cotrain.experiments import search as searching
from cotrain.experiments import tune as tuning
from cotrain.experiments.config import Config
from cotrain.experiments.paper import GRID, SCALES, preset
from cotrain.experiments.search import Budget, Climb, Search, space
from cotrain.experiments.sweep import read_sweep
from cotrain.experiments.tune import save, tune

WHERE, WHAT = "permuted-mnist", ["shared bottom", "MoE + replay + co-training"]
BUDGET = Budget(trials=4, examples=None, finalists=2, steps=3, validation=None)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Searches on two tasks of random points, in the place of a benchmark of the paper."""
    sizes = {"hidden": (8,), "layers": 1, "experts": 4, "k": 2, "memory": 20, "memory_batch": 3}

    def smaller(benchmark, method):
        config = preset(benchmark, method)
        fitting = {name: size for name, size in sizes.items() if name in config.flat}
        return config.but(benchmark="sample:Points", **fitting)

    monkeypatch.setattr(searching, "preset", smaller)


def test_every_method_gets_the_same_budget_and_the_best_is_found(tmp_path):
    found = tune([WHERE], WHAT, tmp_path, BUDGET, workers=1)
    for method in WHAT:
        best = found["found"][WHERE][method]
        assert len(best["trials"]) == BUDGET.trials
        assert len(best["full_size"]) == BUDGET.finalists + BUDGET.steps
        assert set(best["options"]) == set(space(method)) == set(found["space"][method])
        assert len(best["more_seeds"]) == BUDGET.last
        assert all(len(tried["accs"]) == 1 + len(BUDGET.last_seeds) for tried in best["more_seeds"])
        assert {tried["accs"][0] for tried in best["more_seeds"]} <= {tried["acc"] for tried in best["full_size"]}
        decided = max(best["more_seeds"], key=lambda tried: tried["acc"])
        assert best["validation_acc"] == pytest.approx(np.mean(decided["accs"]), abs=1e-4)
        assert best["options"].items() <= decided.items()
        assert [trial["lr"] for trial in best["trials"][:3]] == [0.1, 0.03, 0.01]
    assert found["budget"]["trials"] == 4

    for method in WHAT:  # one after the other, into the same file
        part = {**found, "space": {method: found["space"][method]}}
        save({**part, "found": {WHERE: {method: found["found"][WHERE][method]}}}, tmp_path / "tuned.json")
    assert json.loads((tmp_path / "tuned.json").read_text()) == json.loads(json.dumps(found))
    other = {**found, "budget": {"trials": 1}, "found": {}}
    save(other, tmp_path / "tuned.json")
    assert json.loads((tmp_path / "tuned.json").read_text()) == json.loads(json.dumps(other))


def test_an_interrupted_search_goes_on_where_it_was(tmp_path, monkeypatch):
    execute, runs = tuning.execute, []

    def interrupted(*arguments, **options):
        for i, run in enumerate(execute(*arguments, **options)):
            if i == 2 and len(runs) < 3:
                raise KeyboardInterrupt
            runs.append(run)
            yield run

    monkeypatch.setattr(tuning, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune([WHERE], WHAT, tmp_path, BUDGET, workers=1)
    found = tune([WHERE], WHAT, tmp_path, BUDGET, workers=1)
    assert all(len(found["found"][WHERE][method]["trials"]) == BUDGET.trials for method in WHAT)
    tried = [job for job, _ in runs if job.seed == BUDGET.seed]
    assert len(tried) == len(WHAT) * BUDGET.trials
    assert tune([WHERE], WHAT, tmp_path, BUDGET, workers=1) == found
    assert len([job for job, _ in runs if job.seed == BUDGET.seed]) == len(tried)


def test_a_rate_that_diverges_is_no_finalist(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "FIRST", (1e30, 0.1, 0.05))
    monkeypatch.setitem(searching.RATES, "lr", searching.FloatDistribution(0.003, 1e30, log=True))
    found = tune([WHERE], WHAT[:1], tmp_path, replace(BUDGET, trials=3), workers=1)
    best = found["found"][WHERE][WHAT[0]]
    assert sorted(trial["acc"] for trial in best["trials"])[0] == 0
    assert best["options"]["lr"] < 1


def test_a_trial_without_sampling_takes_no_noise(tmp_path):
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "journal.log")))
    search = Search(WHERE, "MoE", replace(BUDGET, validation=10), storage)
    options = {"lr": 0.03, "router_lr": 0.2, "noise": 0.123456, "gates": "all"}
    some = search.config(options | {"sampling": "gumbel"}, 20).flat
    none = search.config(options | {"sampling": "none"}, 20).flat
    assert (some.pop("sampling"), some.pop("noise")) == ("gumbel", 0.123)
    assert none.pop("sampling") == "none"
    assert some == none
    assert (none["examples"], none["validation"], none["gates"]) == (20, 10, "all")


class Hill:
    """A search, and a store, of which every run is known: the best is 0.02, 0.2 and no sampling."""

    budget, root = replace(BUDGET, steps=16), None
    known = searching.RATES | searching.ROUTING
    space = MappingProxyType({"lr": known["lr"], "memory_lr": known["memory_lr"], "sampling": known["sampling"]})

    def finalists(self):
        return [{"lr": 0.1, "memory_lr": 0.1, "sampling": "gumbel"}, {"lr": 0.4, "memory_lr": 0.1, "sampling": "none"}]

    def config(self, options, examples):
        return Config(**options, examples=examples)

    def read(self, config, seed):
        known = config.flat
        off = np.log([known["lr"] / 0.02, known["memory_lr"] / 0.2])
        return {"acc": 1 - 0.01 * float(off @ off) - 0.01 * (known["sampling"] != "none")}


def test_a_climb_leads_from_the_best_finalist_to_better_options():
    climb = Climb(cast(Any, Hill()), cast(Any, Hill()))
    assert climb.next is None
    assert len(climb.tried) == 2 + 16
    assert len({tuple(options.values()) for _, options in climb.tried}) == 2 + 16
    acc, best = climb.best
    assert acc > climb.tried[0][0]
    assert best["sampling"] == "none"
    assert 0.014 < best["lr"] < 0.028
    assert 0.14 < best["memory_lr"] < 0.28
    assert climb.tried[2][1] == {"lr": 0.05, "memory_lr": 0.05, "sampling": "gumbel"}  # all rates together, first


def test_the_search_sees_neither_the_test_images_nor_a_reported_seed():
    shape = (28, 28)
    train_x = np.arange(30, dtype=np.uint8)[:, None, None] * np.ones(shape, np.uint8)
    test_x = np.full((5, *shape), 200, np.uint8)
    dataset = Dataset("toy", train_x, np.arange(30, dtype=np.uint8) % 10, test_x, np.zeros(5, np.uint8))
    stream = Config(benchmark="permuted-mnist", tasks=2, validation=8).benchmark(lambda name: dataset)(0)
    train, test = (sorted(np.unique(part.x[:, 0, 0]).tolist()) for part in stream[1])
    assert train == list(range(22))
    assert test == list(range(22, 30))
    with pytest.raises(Invalid, match=r"^validation: 30 is not valid; choose fewer than the 30 training images$"):
        Config(validation=30).benchmark(lambda name: dataset)

    reported = set(range(max(scale.seeds for scale in SCALES.values())))
    assert not reported & {Budget().seed, Budget().final_seed, *Budget().last_seeds}
    assert {cell.config.flat["validation"] for cell in read_sweep(GRID).cells} == {None}
