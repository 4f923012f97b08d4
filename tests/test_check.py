"""`cotrain check`: sound directories pass, every damage is told with its mending, and nothing ends in a traceback."""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import optax
import pytest
from conftest import arrays_file
from safetensors.numpy import save
from test_choice import guard

import cotrain
from cotrain import cli
from cotrain.choice import flattened
from cotrain.errors import Invalid
from cotrain.experiments import check as checking
from cotrain.experiments import checkpoint
from cotrain.experiments.check import check
from cotrain.experiments.config import Config
from cotrain.experiments.files import SEAL, digest_of, read_record, write_record
from cotrain.experiments.grid import run_grid
from cotrain.experiments.migration import USUAL
from cotrain.experiments.run import run_config
from cotrain.experiments.saved import encode
from cotrain.experiments.store import Store
from cotrain.experiments.sweep import Cell
from cotrain.report.table import read_records, rows

ROUTED = {"network": "routing-network", "experts": 4, "k": 2}
METHODS = {"cotraining": ROUTED | {"memory": 20}, "private": ROUTED, "joint": ROUTED}
METHODS |= {"finetune": {"network": "shared-bottom"}}
NASTY = [None, True, -1, 0.5, 1.2, 10**400, "", "\n\ud800", [], [[]], {}, {"a": None}, [None, 1], [[[]]], [{}]]
PLAIN = ("tasks.npz", "config.toml", "log.csv")  # which have no checksum
HOSTILE = ["1e999", "-1e999", "[" * 300 + "]" * 300, "9" * 4000, '"\\ud800"']  # as JSON has them


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A store with its grid, a run with its checkpoints, and a run of a method without a configuration."""
    directory = tmp_path_factory.mktemp("sound")
    small = {"arrays": arrays_file(directory / "tasks.npz"), "hidden": (8, 8)}
    configs = {method: Config(method=method, **small, **options) for method, options in METHODS.items()}
    cells = [Cell("table", "own", method, config) for method, config in configs.items()]
    assert run_grid(cells, [0], directory / "store", progress=False, workers=1) == []
    run_config(configs["cotraining"], [3], directory / "runs", progress=False, workers=1)
    return directory


@pytest.fixture
def here(sound, tmp_path):
    """A copy of it."""
    shutil.copytree(sound, tmp_path / "here")
    return tmp_path / "here"


def run_of(directory, method="cotraining"):
    [place] = (directory / "store" / "records").glob(f"tasks/*-{method}/*/seed-0")
    return place


def told(directory):
    """The problems as lines: one each, in words that somebody has thought of."""
    lines = [str(problem) for problem in check(directory).problems]
    assert not [line for line in lines if "\n" in line or "makes no sense" in line]
    return lines


def only(directory):
    [line] = told(directory)
    return line


def noted(directory):
    checked = check(directory)
    assert checked.problems == []
    return [str(note) for note in checked.notes]


def files_of(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def rewrite(path, **changes):
    """Changes entries of a record, with a checksum that agrees; ... deletes one."""
    record = {name: value for name, value in (read_record(path) | changes).items() if value is not ...}
    write_record(path, record)


def with_changes(config, changes):
    """A record's configuration with other entries; those of a part that has another name are all that it has."""
    whole = dict(config)
    for name, change in changes.items():
        part = isinstance(change, dict) and "name" not in change
        whole[name] = with_changes(config[name], change) if part else change
    return {name: value for name, value in whole.items() if value is not ...}


def places_in(node):
    """All entries of a nested record, each as what puts another value there."""
    for name, value in node.items():
        yield value, lambda other, name=name: node | {name: other}
        if isinstance(value, dict):
            for inner, put in places_in(value):
                yield inner, lambda other, name=name, put=put: node | {name: put(other)}


def old_config(config):
    """The same configuration as the first version wrote it."""
    return USUAL | {name: value for name, value in flattened(config).items() if name in USUAL}


def seal(path, text):
    """A record of any text, with a checksum that agrees."""
    path.write_text(f'{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')


def reroute(place, **changes):
    """Changes arrays of a routing history, and the checksum in the result."""
    with np.load(place / "routing.npz") as file:
        arrays = {name: array for name, array in ({**file} | changes).items() if array is not None}
    np.savez(place / "routing.npz", **arrays)
    rewrite(place / "result.json", files={"routing.npz": digest_of(place / "routing.npz")})


def history(place):
    with np.load(place / "routing.npz") as file:
        return {**file}


def recheckpoint(path, notes=None, **arrays):
    """Changes a checkpoint, with a checksum that agrees."""
    old_notes, old_arrays = checkpoint.decode(path.read_bytes(), path)
    text = json.dumps({name: value for name, value in (old_notes | (notes or {})).items() if value is not ...})
    data = save(
        {name.replace("__", "."): array for name, array in (old_arrays | arrays).items()}, {"cotrain": "0" * 64 + text}
    )
    digest = hashlib.sha256(data).hexdigest().encode()
    path.write_bytes(data[: checkpoint.DIGEST.start] + digest + data[checkpoint.DIGEST.stop :])


def test_a_sound_directory_is_well_and_stays_as_it_is(here):
    before = {path: (data, path.stat().st_mtime_ns) for path, data in files_of(here).items()}
    checked = check(here)
    assert (checked.problems, checked.notes) == ([], [])
    assert str(checked) == "checked 5 results, 4 routing histories, 2 checkpoints, 1 learner, 1 grid: all is well"
    assert {path: (data, path.stat().st_mtime_ns) for path, data in files_of(here).items()} == before


@pytest.mark.parametrize("part", ["store", "store/records", "runs", "runs/seed-3"])
def test_a_part_of_it_is_well_too(sound, part, monkeypatch):
    assert noted(sound / part) == []
    monkeypatch.chdir(sound / part)
    assert noted(Path()) == []
    assert noted(Path("..") / Path(part).name) == []


def test_nothing_to_check_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    for place, reason in (
        (tmp_path, "nothing to check"),
        (tmp_path / "none", "name one"),
        (tmp_path / "notes.txt", "name one"),
    ):
        with pytest.raises(Invalid, match=reason):
            check(place)
        assert cli.main(["check", str(place)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_command(here, capsys):
    assert cli.main(["check", str(here)]) == 0
    assert capsys.readouterr() == (
        "checked 5 results, 4 routing histories, 2 checkpoints, 1 learner, 1 grid: all is well\n",
        "",
    )
    path = here / "runs" / "seed-3" / "result.json"
    path.write_bytes(path.read_bytes()[:-9])
    (here / "runs" / "seed-3" / ".times.json.x.part").touch()
    assert cli.main(["check", str(here)]) == 1
    printed = capsys.readouterr()
    note, problem = printed.out.splitlines()
    assert note.startswith(f"note: {path.parent}/.times.json.x.part: a write was cut short")
    assert problem.startswith(
        f"problem: {path}: its checksum does not agree with its content; delete it; the same command"
    )
    counts = "5 results, 3 routing histories, 2 checkpoints, 1 learner, 1 grid"
    assert printed.err == f"cotrain: error: checked {counts}: 1 problem\n"


def test_what_was_learned_is_that_of_the_result_beside_it(here):
    place = here / "runs" / "seed-3"
    learner = cotrain.load_learner(place)
    learner.save(place / "learner.safetensors")  # without a word of the run
    assert "it is of another run than the result beside it" in only(here)
    config = read_record(place / "result.json")["config"]
    for seed, problems in ((4, 1), (3, 0)):
        learner.seed = seed
        (place / "learner.safetensors").write_bytes(encode(learner, {"config": config}))
        assert len(told(here)) == problems
    network = cotrain.shared_bottom(learner.network.spec, (4,))
    own = cotrain.finetune(network, optimizer=sgd_of_ones_own)
    (place / "learner.safetensors").write_bytes(encode(cotrain.Learner(own, 3), {"config": config}))
    assert told(here) == []  # its checksum is all that can be known


def sgd_of_ones_own(lr):
    return optax.sgd(lr)


def test_every_changed_byte_is_told(here):
    draws = random.Random(0)
    for path, data in files_of(here).items():
        if path.name in PLAIN:
            continue
        for place in {0, len(data) - 1, *(draws.randrange(len(data)) for _ in range(40))}:
            changed = bytearray(data)
            changed[place] ^= draws.randrange(1, 256)
            path.write_bytes(changed)
            assert str(path) in only(path.parent), place
        path.write_bytes(data)


def test_garbage_is_told(here):
    kept = {path: data for path, data in files_of(here).items() if path.name not in PLAIN}
    garbage = [b"", b"\0" * 5000, b"{}", b"PK\3\4", b"[" * 100_000, random.Random(0).randbytes(3000)]
    for path, data in kept.items():
        of_others = [data for other, data in kept.items() if not other.name == path.name == "times.json"]
        for wrong in (*garbage, *of_others, data[: len(data) // 2], data[1:], data + b"\n", data * 2):
            path.write_bytes(wrong)
            assert wrong == data or str(path) in told(path.parent)[0]
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("result.json", "delete it; the same command runs it again (from its last checkpoint, if there is one)"),
        ("routing.npz", "delete the run's directory and run it again"),
        ("times.json", "delete it; no number depends on it"),
        ("checkpoint-00001-00000000.safetensors", "delete it; the run goes on from the one before"),
        ("../../store/grid.json", "delete it; the same `cotrain reproduce` writes it again"),
    ],
)
def test_how_to_mend_it(here, name, mend):
    path = (here / "runs" / "seed-3" / name).resolve()
    path.write_bytes(path.read_bytes()[:-1])
    assert only(here).startswith(f"{path}: ")
    assert only(here).endswith(f"; {mend}")
    path.unlink() if "delete it" in mend else shutil.rmtree(path.parent)
    assert told(here) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"acc": 0.5}, "its acc is 0.5, and 0."),
        ({"bwt": None}, "its bwt is None"),
        ({"forward_transfer": 0.0}, "its forward_transfer is 0.0, and there is none"),
        ({"forgetting": "0"}, "its forgetting is '0'"),
        ({"accuracy": [[1.2, None], [0.5, 0.5]]}, "an accuracy of 1.2"),
        ({"accuracy": [[0.5, 0.5], [0.5, 0.5]]}, "not of the tasks that were tested"),
        ({"accuracy": [[None, None], [0.5, 0.5]]}, "not of the tasks that were tested"),
        ({"accuracy": [[0.5, None]]}, "not a square matrix"),
        ({"initial_accuracy": [0.5, 0.5]}, "initial accuracies are not of the tasks"),
        ({"initial_accuracy": [None]}, "not one for each task"),
        ({"seed": 7}, "its seed is 7; rename the directory"),
        ({"parameters": 0}, "its number of parameters is 0"),
        ({"numerics": 2}, "its numbers are of another version (2, and this one's 1); run it again"),
        ({"numerics": ...}, "its numbers are of another version (None"),
        ({"colour": "red"}, "an unknown entry 'colour', of a newer version perhaps; use the version that wrote it"),
        ({"seed": ...}, "it has no seed"),
        ({"software": {"jax": 1}}, "its software is {'jax': 1}"),
        ({"data": {"name": "mnist"}}, "its data are {'name': 'mnist'}"),
        ({"files": {}}, "it has no routing history, unlike its network"),
        ({"files": {"../../x": "0"}}, "its files are"),
    ],
)
def test_a_sealed_result_that_cannot_be_true(here, changes, what):
    rewrite(here / "runs" / "seed-3" / "result.json", **changes)
    assert what in only(here / "runs")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"method": {"name": "magic"}}, "its option method is 'magic'"),
        ({"method": {"inner": {"name": "magic"}}}, "its option inner is 'magic'"),
        ({"method": "cotraining"}, "its option method is 'cotraining'"),
        ({"method": ...}, "its option method is None"),
        ({"benchmark": {"name": "arrays"}}, "its option benchmark is 'arrays'"),
        ({"colour": "red"}, "an unknown option 'colour', of a newer version perhaps"),
        ({"lr": 0.1}, "an unknown option 'lr', of a newer version perhaps"),
        ({"router": {"name": "fixed"}}, "an unknown option 'router', of a newer version perhaps"),
        ({"network": {"colour": "red"}}, "an unknown option 'colour', of a newer version perhaps"),
        ({"network": {"router": {"lr": 0.1}}}, "an unknown option 'lr', of a newer version perhaps"),
        ({"network": {"k": 5}}, "its option k is 5"),
        ({"network": {"k": 2.0}}, "its option k is 2.0"),
        ({"batch": True}, "its option batch is True"),
        ({"method": {"inner": {"lr": -1.0}}}, "its option lr is -1.0"),
        ({"network": {"hidden": [8, 0]}}, "its option hidden is 0"),
        ({"network": {"hidden": 8}}, "its option hidden is 8"),
        ({"network": {"router": {"gates": "some"}}}, "its option gates is 'some'"),
        ({"benchmark": {"name": "split-mnist"}}, "it has 2 tasks, and not 5"),
        ({"benchmark": {"name": "rotated-mnist", "tasks": 2}}, "its data are not those of its benchmark"),
        ({"method": {"name": "joint"}}, "not of the tasks that were tested"),
        ({"evaluate_all": True}, "not of the tasks that were tested"),
        ({"network": {"name": "shared-bottom"}}, "it has a routing history, unlike its network"),
    ],
)
def test_a_configuration_that_cannot_be_true(here, changes, what):
    path = here / "runs" / "seed-3" / "result.json"
    rewrite(path, config=with_changes(read_record(path)["config"], changes))
    assert any(what in line for line in told(here / "runs"))


def test_options_that_came_later_are_as_by_default(here):
    path = here / "runs" / "seed-3" / "result.json"
    config = read_record(path)["config"]
    rewrite(path, config=with_changes(config, {"network": {"router": {"noisy_gates": ...}}}))
    for old in path.parent.glob("*.safetensors"):
        old.unlink()
    assert noted(here / "runs") == []


def test_nothing_that_an_entry_may_be_is_a_surprise(here):
    path = here / "runs" / "seed-3" / "result.json"
    record = read_record(path)
    harmless = [("software", None), ("software", {}), ("software", {"a": None}), ("data", None)]  # or not known
    for name, right in record.items():
        for value in NASTY:
            write_record(path, record | {name: value})
            assert told(path.parent) or value == right or (name, value) in harmless
        for text in HOSTILE:
            marked = "\n".join(
                f"{json.dumps(key)}: {json.dumps(value)}," for key, value in record.items() if key != name
            )
            seal(path, f"{{\n{marked}\n{json.dumps(name)}: {text}")
            assert told(path.parent)
    for config in (record["config"], old_config(record["config"])):
        for right, put in places_in(config):
            for value in NASTY:
                write_record(path, record | {"config": put(value)})
                assert told(path.parent) or value == right


def test_a_record_nested_beyond_measure(here):
    path = here / "runs" / "seed-3" / "result.json"
    for depth in (900, 985, 10**6):
        seal(path, '{\n"accuracy": ' + "[" * depth + "]" * depth)
        [problem] = check(path.parent).problems
        assert problem.path == path


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda a: {"gates_0": a["gates_0"] * 1.01}, "gates that do not add up to 1"),
        (lambda a: {"gates_0": -a["gates_0"]}, "gates that are no weights"),
        (lambda a: {"gates_0": a["gates_0"] * np.nan}, "gates that are no weights"),
        (lambda a: {"gates_1": a["gates_1"][:1]}, "layer 1 is of another shape"),
        (lambda a: {"gates_1": np.float32(1)}, "layer 1 is of another shape"),
        (lambda a: {"gates_1": a["gates_1"] > 0}, "layer 1 is of another type"),
        (lambda a: {"used_1": ~a["used_1"]}, "other experts in use than its gates say"),
        (lambda a: {"logits_0": a["logits_0"] + np.inf}, "logits that are no numbers"),
        (lambda a: {"logits_0": -3e38 * np.sign(a["logits_0"])}, "other gates than its logits say"),
        (
            lambda a: {"gates_0": np.full((2, 2, 4), 0.25, np.float32), "used_0": np.ones((2, 4), bool)},
            "routes of more than 2 experts",
        ),
        (lambda a: {"gates_1": None, "used_1": None, "logits_1": None}, "it has 1 layers"),
        (lambda a: {"used_1": None}, "it has 5 arrays"),
        (lambda a: {f"{name}_2": a[f"{name}_1"] for name in ("gates", "used", "logits")}, "it has 3 layers"),
        (lambda a: {"logits_0": None, "logits_1": None}, "its router goes by something else"),
        (lambda a: {"gates_1": None, "gates_7": a["gates_1"]}, "it has no layer 1"),
    ],
)
def test_a_routing_history_that_cannot_be_true(here, change, what):
    place = here / "runs" / "seed-3"
    reroute(place, **change(history(place)))
    line = only(place)
    assert line.startswith(str(place / "routing.npz"))
    assert what in line


def test_private_experts_are_one_for_each_task(here):
    place = run_of(here, "private")
    gates = np.full((2, 2, 4), 0.5, np.float32) * np.array([1, 1, 0, 0], np.float32)
    reroute(place, gates_0=gates, used_0=gates[:, 0] > 0)
    assert "routes of more than 1 experts" in only(place)


@pytest.mark.parametrize("method", [{"method": "progressive"}, {"method": "expert-gate"}, {"inner": "progressive"}])
def test_experts_of_a_tasks_own_are_well_and_no_other_gates(tmp_path, method):
    config = Config(arrays=arrays_file(tmp_path / "tasks.npz"), hidden=(8, 8), **ROUTED, **method)
    run_config(config, [3], tmp_path / "runs", progress=False, workers=1)
    assert told(tmp_path / "runs") == []
    place = tmp_path / "runs" / "seed-3"
    gates = np.full((2, 2, 4), 0.5, np.float32) * np.array([1, 1, 0, 0], np.float32)
    reroute(place, gates_0=gates, used_0=gates[:, 0] > 0)
    assert re.search("other gates than columns have|routes of more than 1 experts", only(tmp_path / "runs"))


OWN_PARTS = [
    {"network": {"name": "my.own:Network", "experts": "many", "k": [1], "router": {"name": "task-matrix"}}},
    {"network": {"router": {"name": "my.own:Router", "k2": 1}}},
    {"network": {"router": {"sampling": {"name": "my.own:Sampling"}}}},
    {"method": {"name": "my.own:Method", "lr": None}},
    {"method": {"inner": {"name": "my.own:Method", "optimizer": {"name": "sgd"}}}},
    {"benchmark": {"name": "my.own:Benchmark", "tasks": 7}},
]


@pytest.mark.parametrize("changes", OWN_PARTS)
def test_parts_of_ones_own_may_do_as_they_like_and_are_not_imported(here, changes, monkeypatch):
    guard(monkeypatch)
    place = here / "runs" / "seed-3"
    config = with_changes(read_record(place / "result.json")["config"], changes)
    rewrite(place / "result.json", config=config)
    for path in place.glob("checkpoint-*"):
        recheckpoint(path, {"config": config})
    (place / "learner.safetensors").write_bytes(encode(cotrain.load_learner(place), {"config": config}))
    assert noted(place) == []
    if "network" in changes:
        np.savez(place / "routing.npz", **(history(place) | {"gates_0": np.ones(3)}))
        rewrite(place / "result.json", files={"routing.npz": digest_of(place / "routing.npz")})
        assert "layer 0 is of another shape" in only(place)


def test_data_of_a_benchmark_of_ones_own_are_anything_with_a_name_and_digests(here):
    path = here / "runs" / "seed-3" / "result.json"
    config = with_changes(read_record(path)["config"], OWN_PARTS[-1])
    for old in path.parent.glob("*.safetensors"):
        old.unlink()
    for data in ({"name": "mnist", "sha256": ["0"]}, {"name": "mine", "sha256": []}):
        rewrite(path, config=config, data=data)
        assert noted(path.parent) == []
    for data in ({"name": "", "sha256": ["0"]}, {"name": "mine"}, {"name": "mine", "sha256": [1]}, [], "mine"):
        rewrite(path, config=config, data=data)
        assert "its data are" in only(path.parent)


def test_gates_among_all_experts_may_add_up_to_less(here):
    place = here / "runs" / "seed-3"
    config = with_changes(read_record(place / "result.json")["config"], {"network": {"router": {"gates": "all"}}})
    changes = {}
    for layer in (0, 1):
        old = history(place)
        weights = np.exp(old[f"logits_{layer}"])
        last = np.where(old[f"gates_{layer}"][-1] > 0, weights / weights.sum(axis=1, keepdims=True), 0)
        changes[f"gates_{layer}"] = np.stack([old[f"gates_{layer}"][0] * np.float32(0.5), last])
    reroute(place, **changes)
    rewrite(place / "result.json", config=config)
    for path in place.glob("checkpoint-*"):
        recheckpoint(path, {"config": config})
    (place / "learner.safetensors").write_bytes(encode(cotrain.load_learner(place), {"config": config}))
    assert noted(place) == []


def test_routing_histories_that_hide_something(here):
    place = here / "runs" / "seed-3"
    arrays = history(place)
    np.savez(place / "routing.npz", **(arrays | {"gates_0": np.array([{}])}), allow_pickle=True)
    rewrite(place / "result.json", files={"routing.npz": digest_of(place / "routing.npz")})
    assert "not a plain array" in only(place)
    shutil.copy(place / "routing.npz", run_of(here, "finetune"))
    assert "it does not belong to the result beside it; delete it" in only(here / "store")


@pytest.mark.parametrize(
    ("notes", "what"),
    [
        ({"phase": 1}, "it is at phase 1, step 0, and its name says otherwise"),
        ({"step": "0"}, "its name says otherwise"),
        ({"numerics": 9}, "its numbers are of another version (9"),
        ({"format": 9}, "of a newer cotrain; this reads 2; use the version that wrote it"),
        ({"seeds": [4]}, "its seed is 4"),
        ({"seeds": 3}, "its seeds are 3"),
        ({"config": None}, "its configuration is None"),
        ({"config": ...}, "another configuration than the result beside it"),
    ],
)
def test_a_checkpoint_that_cannot_be_true(here, notes, what):
    path = here / "runs" / "seed-3" / "checkpoint-00002-00000000.safetensors"
    recheckpoint(path, notes)
    line = only(path.parent)
    assert line.startswith(str(path))
    assert what in line


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"state.inner.learner.parameters.heads.bias": np.full((1, 2, 3), np.nan, np.float32)}, "are not all numbers"),
        ({"accuracy": np.full((1, 2, 2), 1.5)}, "not from 0 to 1"),
        ({"accuracy": np.zeros((2, 2, 2))}, "not of its seeds and tasks"),
        ({"accuracy": np.zeros((1, 1, 1))}, "it is at phase 2 of 1"),
        ({"accuracy": np.zeros(2)}, "it has no accuracies"),
    ],
)
def test_arrays_of_a_checkpoint_that_cannot_be_true(here, arrays, what):
    path = here / "runs" / "seed-3" / "checkpoint-00002-00000000.safetensors"
    recheckpoint(path, **arrays)
    assert what in only(path.parent)


def test_names_of_checkpoints(here):
    place = here / "runs" / "seed-3"
    (place / "checkpoint-00002-00000000.safetensors").rename(place / "checkpoint-00001-00000003.safetensors")
    assert "its name says otherwise" in only(place)
    (place / "checkpoint-00001-00000003.safetensors").rename(place / "checkpoint-last.pt")
    assert "its name is not that of a checkpoint" in only(place)


def test_an_unfinished_run_is_no_problem(here):
    place = here / "runs" / "seed-3"
    for name in ("result.json", "routing.npz", "times.json"):
        (place / name).unlink()
    [note] = noted(place)
    assert note == f"{place}: unfinished, with all tasks learned; go on with --resume (or the same command)"
    (place / "checkpoint-00002-00000000.safetensors").unlink()
    [note] = noted(place)
    assert note.startswith(f"{place}: unfinished, at task 2, step 0; ")
    (place / "checkpoint-00001-00000000.safetensors").unlink()
    assert noted(place) == [f"{place}: nothing is kept of this run yet; the same command runs it"]


def test_missing_files(here):
    place = run_of(here)
    (place / "times.json").unlink()
    assert noted(place) == [f"{place / 'times.json'}: it is missing; it is harmless; no number depends on it"]
    (place / "routing.npz").unlink()
    assert f"{place / 'routing.npz'}: it is missing; delete the run's directory" in only(place)
    shutil.copy(run_of(here, "joint") / "times.json", place)
    (place / "result.json").unlink()
    [note] = noted(place)
    assert note.startswith(
        f"{place / 'result.json'}: it is missing, as when a process is killed just before writing it"
    )
    assert f"{place}: grid.json lists it, and it is not there; the same command runs it again" in only(here / "store")


def test_locks_and_leftovers(here):
    place = here / "runs" / "seed-3"
    (place / ".lock").touch()
    (place / ".result.json.abc.part").write_text("{")
    lock, leftover = noted(here)
    assert lock == f"{place / '.lock'}: no process holds it; it is harmless; removed when the run goes on"
    assert leftover.startswith(f"{place / '.result.json.abc.part'}: a write was cut short; it is harmless")
    (place / "result.json").write_text("")
    with (place / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        [note] = noted(here)
    assert note == f"{place}: another process is at work on it; it was not checked; check it again later"
    assert len(told(here)) == 1


def test_a_run_in_another_place_of_its_store(here):
    place = run_of(here)
    home = place.relative_to(here / "store" / "records")
    place.rename(place.parent / "seed-1")
    lines = told(here / "store")
    assert f"seed-1/result.json: it belongs to {home}; move it there, or delete it" in lines[0]
    (place.parent / "seed-1").rename(here / "store" / "records" / "seed-0")
    lines = told(here / "store")
    assert f"records/seed-0/result.json: it belongs to {home}; move it there" in lines[0]


def test_runs_that_a_grid_does_not_list(here):
    path = here / "store" / "grid.json"
    grid = read_record(path)
    grid["tables"]["table"][0]["runs"] = []
    grid["failed"] = [{"run": "one", "error": "no"}]
    write_record(path, grid)
    there, failed, others = noted(here)
    assert "3 of its 4 runs are there; the same command goes on" in there
    assert "1 run failed; the same command tries again" in failed
    assert f"1 run below records not in it, as {run_of(here).relative_to(here / 'store')}; harmless" in others


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda grid, row: row.update(options={}), "of another configuration than its cell"),
        (lambda grid, row: row.update(runs=["../runs/seed-3"]), "which is elsewhere"),
        (lambda grid, row: row.update(runs=["/etc"]), "which is elsewhere"),
        (lambda grid, row: row.update(runs=["records\0"]), "its tables are none"),
        (lambda grid, row: row.update(runs=row["runs"] * 2), "its tables are none"),
        (lambda grid, row: row.update(runs=["x" * 5000]), "cannot be read (File name too long)"),
        (lambda grid, row: row.pop("runs"), "its tables are none"),
        (lambda grid, row: grid.update(seeds=[1]), "of another seed than its own"),
        (lambda grid, row: grid.update(seeds=None), "its seeds are None"),
        (lambda grid, row: grid.update(tables=[]), "its tables are none"),
        (lambda grid, row: grid.update(failed={}), "its failed runs are {}"),
        (lambda grid, row: grid.update(scale=1), "its scale is 1"),
        (lambda grid, row: grid.pop("scale"), "it does not have the entries of a grid"),
    ],
)
def test_a_grid_that_cannot_be_true(here, change, what):
    path = here / "store" / "grid.json"
    grid = read_record(path)
    change(grid, grid["tables"]["table"][0])
    write_record(path, grid)
    line = only(here)
    assert line.startswith(str(path))
    assert what in line


HOSTILE_OPTIONS = [
    {"method": "os:system"},
    {"network": "os:system", "router": "os:system"},
    {"benchmark": "os:system"},
    {"sampling": "os:system"},
    {"inner": "os:system", "optimizer": "os:system"},
    {"router": "os:system"},
    {"method": {"name": "os:system"}},
    {"method": ["os:system"]},
]


@pytest.mark.parametrize("options", HOSTILE_OPTIONS)
def test_nothing_that_a_file_names_is_imported(here, options, monkeypatch):
    imported = guard(monkeypatch)
    path = here / "store" / "grid.json"
    grid = read_record(path)
    grid["tables"]["table"][0]["options"] = options
    write_record(path, grid)
    assert "of another configuration than its cell" in only(here / "store")
    place = here / "runs" / "seed-3"
    right = read_record(place / "result.json")["config"]
    for config in (options, USUAL | options, right | options, old_config(right) | options):
        rewrite(place / "result.json", config=config)
        recheckpoint(place / "checkpoint-00002-00000000.safetensors", {"config": config})
        lines = told(place)
        try:
            rows(read_records([place]))
        except Invalid:
            result, newest = lines
            assert result.startswith(f"{place / 'result.json'}: ")
            assert "checkpoint-00002-00000000.safetensors: " in newest
        else:  # arrays and a name in a record of its own may be called so
            assert config in (right | options, old_config(right) | options)
    assert imported


def test_a_grid_of_the_first_version_is_checked_as_well(here, tmp_path):
    (tmp_path / "a:b").mkdir()
    arrays = str((here / "tasks.npz").rename(tmp_path / "a:b" / "tasks.npz"))
    path = here / "store" / "grid.json"
    grid = read_record(path)
    for row in grid["tables"]["table"]:
        [run] = row["runs"]
        place = here / "store" / run
        config = old_config(read_record(place / "result.json")["config"]) | {"arrays": arrays, "memory": 77}
        rewrite(place / "result.json", config=config)
        home = Store(here / "store" / "records").home(config, 0)
        home.parent.mkdir(parents=True)
        place.rename(home)
        row["runs"] = [home.relative_to(path.parent).as_posix()]
        row["options"] = {name: value for name, value in config.items() if value != USUAL[name]}
    write_record(path, grid)
    assert noted(here / "store") == []
    grid["tables"]["table"][0]["options"]["memory"] = 78  # of co-training, where it counts
    write_record(path, grid)
    assert "of another configuration than its cell" in only(here / "store")


@pytest.mark.parametrize("kind", ["directory", "pipe", "loop", "dangling", "device"])
def test_what_is_no_file(here, kind):
    place = here / "runs" / "seed-3"
    for path in [
        *(path for path in place.iterdir() if path.name not in PLAIN),
        place / ".lock",
        here / "store" / "grid.json",
    ]:
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        make(kind, path)
        assert any(line.startswith(f"{path}: ") for line in told(here))
        path.rmdir() if kind == "directory" else path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    assert told(here) == []


def make(kind, path):
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)
        case "dangling":
            path.symlink_to("nowhere")
        case "device":
            path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "loop", "dangling", "device"])
def test_what_is_no_directory(here, kind):
    path = here / "runs" / "seed-4"
    make(kind, path)
    assert only(here) == f"{path}: it is not a directory; delete it; the same command runs it again"


def test_links_to_directories_are_not_followed(here):
    (here / "runs" / "all").symlink_to("/")
    (here / "runs" / "seed-3" / "up").symlink_to("..")
    notes = noted(here)
    assert len(notes) == 2
    assert all("it is a link to a directory and was not followed; check that one by itself" in note for note in notes)


def test_what_may_not_be_read(here, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checking, "read_record", refuse)
        lines = told(here / "runs")
    assert len(lines) == 2
    assert all("it cannot be read (Permission denied); see to it that it can" in line for line in lines)
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: refuse(path) if path.name == "seed-3" else iterdir(path))
    assert f"{here / 'runs' / 'seed-3'}: it cannot be read (Permission denied)" in only(here)


def test_strange_names_stay_on_one_line(here, capsys):
    place = here / "runs" / os.fsdecode(b"a\xff\n\x1b[2J")
    (here / "runs" / "seed-3").rename(place)
    (place / "result.json").write_text("{}")
    assert cli.main(["check", str(here)]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert r"runs/a\udcff\n\x1b[2J/result.json: it has no checksum" in line


def test_directories_within_directories_without_end(here):
    deep = here
    with contextlib.suppress(OSError):
        for _ in range(1500):
            deep = deep / "d"
            deep.mkdir()
    try:
        assert noted(here) == []
    finally:
        for path in [deep, *deep.parents]:  # too deep for pytest to clear away
            if path == here:
                break
            with contextlib.suppress(OSError):
                path.rmdir()


def test_what_nobody_has_thought_of_does_not_end_the_check(here, monkeypatch):
    monkeypatch.setattr(checking, "check_times", lambda times: 1 / 0)
    problems = check(here).problems
    assert len(problems) == 5
    assert "it makes no sense (ZeroDivisionError('division by zero'))" in str(problems[0])
