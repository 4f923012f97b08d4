"""Records of the first version: every one that there is says the same as ever, and is found where it is."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from cotrain.choice import NoOption
from cotrain.errors import Invalid
from cotrain.experiments.check import check
from cotrain.experiments.config import Config
from cotrain.experiments.files import read_record, write_record
from cotrain.experiments.migration import USUAL, is_old
from cotrain.experiments.paper import GRID
from cotrain.experiments.result import NUMERICS
from cotrain.experiments.sound import result_of
from cotrain.experiments.store import Store, key_of
from cotrain.experiments.sweep import read_sweep

RESULTS = Path(__file__).parents[1] / "results"
STORES = {"paper": RESULTS / "paper" / "records", "tuning": RESULTS / "tuning" / "records"}


@pytest.fixture(scope="module")
def records():
    """The records of the first version that are kept, by their places."""
    found = {path.parent: read_record(path) for path in sorted(RESULTS.rglob("result.json"))}
    return {place: record for place, record in found.items() if is_old(record["config"])}


def plain(value):
    return list(value) if isinstance(value, tuple) else value


def test_every_record_is_read_and_says_what_it_said(records):
    assert len(records) == 807
    accuracies = {}
    for record in records.values():
        old, config = record["config"], Config.read(record["config"])
        flat = config.flat
        assert old.keys() == USUAL.keys()
        for name in flat.keys() & old.keys():
            usual = 5 if flat["benchmark"] == "split-mnist" else 20
            assert plain(flat[name]) == (usual if name == "tasks" and old[name] is None else old[name]), name
        assert Config.read(json.loads(json.dumps(config.record()))) == config
        assert result_of(record).config == config
        accuracies.setdefault((config, record["seed"]), set()).add(json.dumps(record["accuracy"]))
    assert len(accuracies) < len(records)  # some say the same in other words
    assert all(len(different) == 1 for different in accuracies.values())


@pytest.mark.parametrize("name", STORES)
def test_a_store_names_its_runs_as_ever_and_finds_them_by_what_they_are(records, name):
    root = STORES[name]
    here = {place: record for place, record in records.items() if place.is_relative_to(root)}
    assert len(here) == {"paper": 420, "tuning": 351}[name]
    store = Store(root)
    for place, record in here.items():
        config = Config.read(record["config"])
        assert store.home(record["config"], record["seed"]) == place
        found = store.read(config, record["seed"])
        assert found is not None
        assert found["acc"] == record["acc"]
        assert Config.read(found["config"]) == config


def test_the_papers_grid_is_all_there(records):
    sweep, store = read_sweep(GRID), Store(STORES["paper"])
    assert (len(sweep.cells), len(sweep.seeds)) == (28, 15)
    places = {store.place(cell.config, seed) for cell in sweep.cells for seed in sweep.seeds}
    assert places == {place for place in records if place.is_relative_to(STORES["paper"])}
    listed = read_record(RESULTS / "paper" / "grid.json")["tables"]
    cells = {(cell.table, cell.benchmark, cell.method): cell.config for cell in sweep.cells}
    for table, rows in listed.items():
        for row in rows:
            config = cells.pop((table, row["benchmark"], row["method"]))
            assert Config.read(row["options"]) == config
            wanted = {store.place(config, seed).relative_to(RESULTS / "paper").as_posix() for seed in sweep.seeds}
            assert set(row["runs"]) == wanted
    assert not cells


def test_what_was_kept_is_sound(records):
    count = 0
    for name in ("ablations", "paper", "tuning"):
        checked = check(RESULTS / name)
        assert checked.problems == []
        count += checked.counts["result"]
    assert count == len(records)


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({}, {}),
        ({"method": "finetune", "memory": 5, "memory_batch": 3, "memory_lr": 0.5}, {"method": "finetune"}),
        ({"method": "replay", "cotraining_lr": 0.5, "cotrain_heads": True}, {"method": "replay"}),
        ({"method": "private", "router_lr": 0.5, "memory": 5, "lr": 0.2}, {"method": "private", "lr": 0.2}),
        ({"method": "joint", "memory": 5}, {"method": "joint"}),
        ({"sampling": "none", "noise": 0.3}, {"sampling": "none"}),
        ({"sampling": "gumbel", "noise": 0.3}, {"sampling": "gumbel", "noise": 0.3}),
        (
            {"network": "shared-bottom", "k": 2, "experts": 3, "layers": 7, "units": 9, "noise": 0.2, "gates": "all"},
            {"network": "shared-bottom"},
        ),
        ({"network": "shared-bottom", "hidden": [8, 8]}, {"network": "shared-bottom", "hidden": (8, 8)}),
        ({"benchmark": "permuted-mnist", "rotation_step": 3.0}, {"benchmark": "permuted-mnist"}),
        ({"permute_first": True, "rotation_step": 3}, {"rotation_step": 3.0}),
        ({"tasks": None, "benchmark": "split-mnist"}, {"benchmark": "split-mnist", "tasks": 5}),
        ({"tasks": None}, {"tasks": 20}),
        ({"arrays": "a:b.npz", "rotation_step": 3.0, "stream_seed": 7}, {"arrays": "a:b.npz"}),
        ({"arrays": "mine.npz", "benchmark": "split-mnist"}, {"arrays": "mine.npz"}),
        ({"units": 7, "examples": 100, "validation": 9}, {"units": 7, "examples": 100, "validation": 9}),
        ({"router_lr": 0.5, "memory_lr": None}, {"router_lr": 0.5}),
        ({"evaluate_all": True, "batch": 3, "epochs": 2}, {"evaluate_all": True, "batch": 3, "epochs": 2}),
    ],
)
def test_what_did_not_apply_is_left_out_and_the_rest_is_as_it_was(old, now):
    assert Config.read(old) == Config.read(USUAL | old) == Config(**now)
    assert Config.read(dict(reversed((USUAL | old).items()))) == Config(**now)


@pytest.mark.parametrize(
    ("old", "field"),
    [
        ({"router": "task-matrix"}, "router"),
        ({"inner": "replay"}, "inner"),
        ({"one_head": False}, "one_head"),
        ({"momentum": 0.9, "optimizer": "momentum"}, "momentum"),
        ({"colour": "red"}, "colour"),
        ({"": 1}, ""),
    ],
)
def test_an_option_that_the_first_version_did_not_have_is_refused(old, field):
    for record in (old, USUAL | old):
        with pytest.raises(NoOption, match=f"^{field}: [^\n]* the first version had no such option$"):
            Config.read(record)


@pytest.mark.parametrize("field", ["benchmark", "network", "method", "sampling", "optimizer"])
@pytest.mark.parametrize("value", ["os:system", ":", "cotrain.methods.replay:ReplayOptions", ["os:system"]])
def test_a_reference_as_a_name_is_refused(field, value):
    for record in ({field: value}, USUAL | {field: value}):
        with pytest.raises(Invalid, match=f"^{field}: [^\n]* the first version had no references$"):
            Config.read(record)


@pytest.mark.parametrize(
    ("old", "field"),
    [
        ({"method": "magic"}, "method"),
        ({"optimizer": None}, "optimizer"),
        ({"arrays": 5}, "arrays"),
        ({"lr": "0.1"}, "lr"),
        ({"lr": None}, "lr"),
        ({"k": 21}, "k"),
        ({"tasks": 0}, "tasks"),
        ({"hidden": []}, "hidden"),
        ({"hidden": [8, None]}, "hidden"),
        ({"evaluate_all": 1}, "evaluate_all"),
        ({"batch": None}, "batch"),
        ({"gates": "some"}, "gates"),
        ({"sampling": "noisy-top-k", "noise": 0.0}, "noise"),
    ],
)
def test_an_old_configuration_that_cannot_be_true_is_refused(old, field):
    for record in (old, USUAL | old):
        with pytest.raises(Invalid, match=f"^{field}: [^\n]*$"):
            Config.read(record)


@pytest.mark.parametrize("record", [None, 5, [], "replay", True])
def test_what_is_no_table_is_no_configuration(record):
    with pytest.raises(Invalid, match=r"^config: "):
        Config.read(record)


# In a store


@pytest.fixture
def old_run(records, tmp_path):
    """A store with a run of the first version whose name tells of an option that did not apply."""
    place = next(place for place, record in records.items() if record["config"]["method"] == "finetune")
    record = records[place] | {"config": records[place]["config"] | {"memory": 5}}
    store = Store(tmp_path)
    home = store.home(record["config"], record["seed"])
    shutil.copytree(place, home)
    write_record(home / "result.json", {name: value for name, value in record.items() if name != "sha256"})
    return store, home, record


def test_a_run_is_found_under_the_name_that_it_was_given(old_run):
    store, home, record = old_run
    config = Config.read(record["config"])
    changed = {name: value for name, value in record["config"].items() if value != USUAL[name]}
    assert changed["memory"] == 5
    content = json.dumps({"numerics": NUMERICS, **changed}, sort_keys=True)
    assert home.parent.name == hashlib.sha256(content.encode()).hexdigest()[:12] != key_of(config)
    assert store.place(config, record["seed"]) == home
    assert store.read(config, record["seed"])["acc"] == record["acc"]
    other = store.place(config, record["seed"] + 1)
    assert (other.parent.name, other.exists()) == (key_of(config), False)
    assert store.read(config.but(lr=0.7), record["seed"]) is None


def test_a_run_under_its_own_name_goes_before(old_run):
    store, home, record = old_run
    config = Config.read(record["config"])
    own = home.parents[1] / key_of(config) / home.name
    shutil.copytree(home, own)
    assert Store(store.root).place(config, record["seed"]) == store.place(config, record["seed"]) == own


def test_one_that_is_damaged_is_passed_over(old_run):
    store, home, record = old_run
    config = Config.read(record["config"])
    (home / "result.json").write_bytes((home / "result.json").read_bytes()[:-5])
    assert store.read(config, record["seed"]) is None
    assert store.place(config, record["seed"]).parent.name == key_of(config)


def test_one_of_other_numbers_is_passed_over(old_run):
    store, home, record = old_run
    write_record(home / "result.json", record | {"numerics": NUMERICS + 1})
    assert store.read(Config.read(record["config"]), record["seed"]) is None
