"""Names and what they stand for: every entry of every table, entries of one's own, and what a record may not do."""

import importlib
import itertools
import json
import sys
import tomllib

import pytest
from conftest import arrays_file

from cotrain import cli
from cotrain.choice import NoOption, entry_of, flattened, meanings, options_of
from cotrain.errors import Invalid
from cotrain.experiments.check import check
from cotrain.experiments.config import TABLES, Config, every_name, known_names, meanings_of
from cotrain.experiments.files import read_record
from cotrain.experiments.grid import run_grid
from cotrain.experiments.migration import USUAL
from cotrain.experiments.store import Store, key_of
from cotrain.experiments.sweep import Cell
from cotrain.experiments.toml import read_toml, toml
from cotrain.methods import METHODS
from cotrain.report.study import read_study
from cotrain.report.table import read_records, rows

ENTRIES = [(kind, name) for kind, table in TABLES.items() for name in table]
OWN = '''
from dataclasses import dataclass
from typing import Literal, Optional

from cotrain.choice import Choice, option
from cotrain.data.benchmarks import RotatedMnist
from cotrain.methods import OPTIMIZERS
from cotrain.methods.finetune import finetune
from cotrain.networks.routers.fixed import fixed
from cotrain.networks.shared_bottom import shared_bottom


@dataclass(frozen=True)
class Gentle:
    """goes gently"""

    strength: float = 0.5
    """how gently"""
    pauses: tuple[int, ...] = (1, 2)
    """when"""
    word: Optional[str] = None
    """what is said"""
    optimizer: Choice = option(OPTIMIZERS, "adam")
    """how"""

    def __call__(self, network):
        return finetune(network, lr=self.strength, optimizer=self.optimizer())


@dataclass(frozen=True)
class Plain:
    """has an option"""

    tilt: float = 0.0
    """how much it leans"""

    def __call__(self, *arguments):
        return (self.tilt, *arguments)


@dataclass(frozen=True)
class Slow(RotatedMnist):
    """turns slowly"""

    rotation_step: float = 1.0
    """degrees"""


@dataclass(frozen=True)
class Greedy:
    batch: int = 5

    def __call__(self, *arguments): ...


@dataclass(frozen=True)
class Bossy:
    resume: bool = True

    def __call__(self, *arguments): ...


@dataclass(frozen=True)
class Silent:
    tilt: float = 0.0


@dataclass
class Thawed:
    tilt: float = 0.0

    def __call__(self, *arguments): ...


@dataclass(frozen=True)
class Namesake:
    name: str = "me"

    def __call__(self, *arguments): ...


@dataclass(frozen=True)
class Odd:
    way: Literal["up", "down"] = "up"

    def __call__(self, *arguments): ...


def function(): ...
'''
PLACES = {  # kind -> an entry of one's own, and options by which there is such a choice
    "benchmark": ("Slow", {"rotation_step": 2}),
    "network": ("Plain", {"tilt": 2, "method": "finetune"}),
    "router": ("Plain", {"tilt": 2}),
    "sampling": ("Plain", {"tilt": 2}),
    "method": ("Gentle", {"strength": 2, "pauses": [3], "optimizer": "momentum", "momentum": 0.5}),
    "inner": ("Gentle", {"strength": 2, "word": "so", "b1": 0.5}),
    "optimizer": ("Plain", {"tilt": 2}),
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module with entries of one's own, on the Python path."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "path")
    yield "mine"
    sys.modules.pop("mine", None)


def guard(monkeypatch):
    """The modules that are imported for entries from now on, of which none may be anybody's own."""
    names, original = [], importlib.import_module

    def import_module(name, *rest):
        names.append(name)
        if not name.startswith("cotrain."):
            pytest.fail(f"{name} is imported")
        return original(name, *rest)

    monkeypatch.setattr(importlib, "import_module", import_module)
    return names


def forget(monkeypatch, tmp_path):
    """From now on there is no such module any more."""
    sys.modules.pop("mine", None)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(tmp_path / "path")])


def in_json(config):
    return json.loads(json.dumps(config.record(), allow_nan=False))


def refused(capsys, *arguments):
    """The line with which a command is refused."""
    assert cli.main(list(arguments)) == 2
    err = capsys.readouterr().err
    assert err.startswith("cotrain: error: ")
    assert err.count("\n") == 1
    return err


# The tables


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_entry_says_what_it_is_and_what_its_options_mean(kind, name):
    entry = entry_of(kind, name, TABLES[kind])
    known = {option.name for option in options_of(entry)}
    assert not entry.__doc__.startswith(f"{entry.__name__}(")  # as a dataclass has it by itself
    told = meanings(entry)
    assert set(told) == known
    assert all(text.strip() and "\n" not in text for text in (*told.values(), entry.__doc__))


def combinations():
    """All that can be chosen together."""
    routers = [{"router": name} for name in TABLES["router"] if name != "task-matrix"]
    routers += [{"sampling": name} for name in TABLES["sampling"]]
    networks = [{"network": "shared-bottom"}, *routers]
    methods = [{"method": name} for name in METHODS if name != "cotraining"]
    methods += [{"inner": name} for name in METHODS if name != "cotraining"]
    benchmarks = [
        {"benchmark": name} | ({"arrays": "mine.npz"} if name == "arrays" else {}) for name in TABLES["benchmark"]
    ]
    optimizers = [{"optimizer": name} for name in TABLES["optimizer"]]
    for parts in itertools.product(benchmarks, networks, methods, optimizers):
        yield {name: value for part in parts for name, value in part.items()}


def test_whatever_is_chosen_together_is_a_configuration_that_its_record_and_file_keep():
    all_of_it, seen = list(combinations()), set()
    assert len(all_of_it) == 7 * 8 * 2 * (len(METHODS) - 1) * 4
    for chosen in all_of_it:
        config = Config(**chosen)
        assert config.flat.items() >= chosen.items()
        assert config.flat.keys() == known_names(chosen)
        assert Config.read(in_json(config)) == config
        seen.add(config)
    assert len(seen) == len(all_of_it)
    for config in list(seen)[:200]:
        assert Config(**flattened(tomllib.loads(toml(config.record())))) == config
        assert meanings_of(config.flat).keys() >= config.flat.keys() - {"benchmark", "network", "method"}


def test_an_unknown_option_is_refused_by_its_name_with_who_has_it():
    with pytest.raises(
        NoOption, match=r"^memory_lr: 0.5 is not valid; there is no such option with .*method finetune, "
    ) as it:
        Config(method="finetune", memory_lr=0.5)
    assert str(it.value).endswith("optimizer sgd; it is one of method replay, method cotraining")
    with pytest.raises(NoOption, match=r"^k: 2 .*; it is one of network routing-network$"):
        Config(network="shared-bottom", k=2)
    with pytest.raises(
        NoOption, match=r"^noise: .*; it is one of sampling gaussian, sampling noisy-top-k, sampling gumbel$"
    ):
        Config(sampling="none", noise=0.1)
    with pytest.raises(NoOption, match=r"^colour: 'red' is not valid; there is no such option with [^;]*$"):
        Config(colour="red")


def test_without_noise_there_is_no_noise_to_choose():
    config = Config(sampling="none")
    assert "noise" not in config.flat
    assert Config(noise=0.3).but(sampling="none") == config
    with pytest.raises(NoOption, match=r"^noise: "):
        config.but(noise=0.3)


def test_co_training_does_not_go_around_itself(capsys):
    with pytest.raises(Invalid, match=r"^inner: .* have an option of this name"):
        Config(inner="cotraining")
    assert "--inner: " in refused(capsys, "run", "--inner", "cotraining")
    assert {"inner", "lr"} <= every_name()


# Entries of one's own


@pytest.mark.parametrize("kind", PLACES)
def test_an_own_entry_is_chosen_like_any_other_and_its_record_is_read_without_it(own, kind, tmp_path, monkeypatch):
    entry, options = PLACES[kind]
    name = f"{own}:{entry}"
    config = Config(**{kind: name}, **options)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    assert config.flat.items() >= ({kind: name} | given).items()
    assert config.options.items() >= ({kind: name} | options).items()
    assert Config(**config.options) == config
    assert Config(**flattened(tomllib.loads(toml(config.record())))) == config
    record, flat, changed, key = in_json(config), config.flat, config.options, key_of(config)
    assert flattened(record).items() >= ({kind: name} | options).items()

    forget(monkeypatch, tmp_path)
    read = Config.read(record)
    assert (read.flat, read.options, key_of(read)) == (flat, changed, key)
    assert Config.read(record) == read
    assert hash(Config.read(record)) == hash(read)
    assert Config.read(in_json(read)).flat == flat
    assert "mine" not in sys.modules
    with pytest.raises(Invalid, match=f"^{kind}: 'mine:{entry}' .* cannot be imported"):
        Config(**changed)


def test_the_defaults_of_an_own_entry_count_as_options_since_they_may_change(own):
    config = Config(method=f"{own}:Gentle")
    wanted = {"method": "mine:Gentle", "strength": 0.5, "pauses": [1, 2], "optimizer": "adam", "b1": 0.9, "b2": 0.999}
    assert config.options == wanted
    assert config.record()["method"] == {
        "name": "mine:Gentle",
        "strength": 0.5,
        "pauses": [1, 2],
        "word": None,
        "optimizer": {"name": "adam", "b1": 0.9, "b2": 0.999},
    }


def test_an_own_entry_makes_what_it_makes(own):
    config = Config(sampling=f"{own}:Plain", tilt=3)
    assert config.network.options.router.options.sampling("x") == (3.0, "x")
    assert meanings_of(config.flat)["tilt"] == "how much it leans"


def test_two_options_of_one_name_are_refused(own, capsys):
    with pytest.raises(
        Invalid, match=r"^batch: 10 is not valid; two parts of the configuration have an option of this"
    ):
        Config(network=f"{own}:Greedy")
    with pytest.raises(Invalid, match=r"^tilt: .* two parts of the configuration have an option of this name"):
        Config(network=f"{own}:Plain", method=f"{own}:Plain")
    assert "--batch: " in refused(capsys, "run", "--network", f"{own}:Greedy")
    assert "--resume: " in refused(capsys, "run", "--network", f"{own}:Bossy")
    assert "--resume: " in refused(capsys, "run", "--network", f"{own}:Bossy", "--resume")


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("nowhere:Thing", "it cannot be imported (No module named 'nowhere'); give package.module:Class"),
        ("nowhere.at.all:Thing", "No module named 'nowhere'"),
        ("mine:Nothing", "module 'mine' has no attribute 'Nothing'"),
        ("mine:", "it cannot be imported"),
        (":Gentle", "it cannot be imported (Empty module name)"),
        (":", "it cannot be imported"),
        (".mine:Gentle", "it cannot be imported"),
        ("..:Gentle", "it cannot be imported"),
        ("mine:Gentle:more", "it cannot be imported"),
        ("mi\0ne:Gentle", "it cannot be imported"),
        ("mi\nne:Gentle", "it cannot be imported"),
        ("broken:Gentle", "it cannot be imported (something is amiss)"),
        ("mine:function", "it is not a frozen dataclass with __call__"),
        ("mine:OPTIMIZERS", "it is not a frozen dataclass with __call__"),
        ("mine:Silent", "it is not a frozen dataclass with __call__"),
        ("mine:Thawed", "it is not a frozen dataclass with __call__"),
        ("builtins:int", "it is not a frozen dataclass with __call__"),
        ("mine:Namesake", "its option name would be taken for its own; rename it"),
        ("mine:Odd", "its option way has none of the types true or false, a whole number, a number, a text"),
    ],
)
def test_a_reference_that_is_no_entry_is_refused_in_a_line(own, tmp_path, capsys, reference, reason):
    (tmp_path / "path" / "broken.py").write_text("raise ImportError('something\\nis amiss')")
    for kind in ("benchmark", "network", "method", "inner", "router", "sampling", "optimizer"):
        with pytest.raises(Invalid) as error:
            Config(**{kind: reference})
        assert str(error.value).startswith(f"{kind}: {reference!r} is not valid; ")
        assert reason in str(error.value)
        assert str(error.value).isprintable()
    assert reason in refused(capsys, "run", f"--method={reference}")


@pytest.mark.parametrize("name", ["cotraning", "", "a.b", None, 3, 0.5, True, ["replay"], {"name": "replay"}])
def test_what_is_neither_a_name_nor_a_reference_is_refused(name):
    with pytest.raises(Invalid, match=r"^method: [^\n]* choose from finetune, replay, "):
        Config(method=name)


# What is read and not chosen


def test_the_runs_of_an_own_method_are_checked_and_shown_without_it(own, tmp_path, monkeypatch, capsys):
    arrays = arrays_file(tmp_path / "tasks.npz")
    config = Config(arrays=arrays, network="shared-bottom", hidden=(4,), method=f"{own}:Gentle", optimizer="sgd")
    assert run_grid([Cell("table", "tasks", "gentle", config)], [0], tmp_path / "out", progress=False, workers=1) == []
    forget(monkeypatch, tmp_path)
    guard(monkeypatch)
    [path] = (tmp_path / "out" / "records" / "tasks").glob("shared-bottom-mine.Gentle/*/seed-0/result.json")
    checked = check(tmp_path / "out")
    assert (checked.problems, checked.notes) == ([], [])
    [row] = rows(read_records([tmp_path / "out"]))
    assert (row.network, row.method) == ("shared-bottom", "mine:Gentle")
    assert "strength 0.5" in row.options
    assert Store(tmp_path / "out" / "records").read(Config.read(read_record(path)["config"]), 0) == read_record(path)
    [table] = read_study(tmp_path / "out").tables
    assert "gentle" in str(table)


HOSTILE = "os:system"
NESTED = Config().record()
PATHS = ["benchmark", "network", "network router", "network router sampling", "method", "method inner"]
PATHS += ["method inner optimizer"]


def with_node(config, path, node):
    """A record's configuration with something else at a place."""
    first, *rest = path
    return config | {first: with_node(config[first], rest, node) if rest else node}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"command": "true"}, {"some": [1, [2]]}, {"x": {"name": HOSTILE, "y": {}}}])
def test_a_record_imports_nothing_of_somebodys_own(monkeypatch, path, options):
    imported = guard(monkeypatch)
    config = Config.read(with_node(NESTED, path.split(), {"name": HOSTILE, **options}))
    kind = path.split()[-1]
    assert config.flat[kind] == config.options[kind] == HOSTILE
    assert config.flat.keys() >= options.keys()
    assert hash(config) == hash(Config.read(in_json(config)))
    assert key_of(config) == key_of(Config.read(in_json(config)))
    assert imported


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "node",
    [HOSTILE, [HOSTILE], {"name": [HOSTILE]}, {"command": HOSTILE}, {"name": HOSTILE, "some": [{"x": 1}]},
     {"name": HOSTILE, "x": {"y": 1}, "z": {"y": 1}}, {"name": HOSTILE, "lr": 1, "k": 1, "lambda": {"lr": 1}}],
)  # fmt: skip
def test_a_record_that_is_none_is_refused_and_imports_nothing(monkeypatch, path, node):
    guard(monkeypatch)
    with pytest.raises(Invalid, match=r"^\w+: [^\n]*$"):
        Config.read(with_node(NESTED, path.split(), node))


@pytest.mark.parametrize("kind", [*TABLES, "inner"])
@pytest.mark.parametrize("rest", [{}, NESTED, USUAL, {"inner": {"name": "replay"}}])
def test_a_reference_in_another_place_of_a_record_is_refused_and_not_imported(monkeypatch, kind, rest):
    guard(monkeypatch)
    with pytest.raises(Invalid, match=r"^(\w+): [^\n]*$"):
        Config.read(rest | {kind: HOSTILE})


def test_a_run_that_is_refused_leaves_the_configuration_of_another_alone(tmp_path, monkeypatch, capsys):
    small = ["run", "--arrays", arrays_file(tmp_path / "tasks.npz"), "--out", str(tmp_path / "out"), "--workers", "1"]
    small += ["--network", "shared-bottom", "--hidden", "4", "--method", "finetune"]
    assert cli.main(small) == 0
    file = tmp_path / "out" / "config.toml"
    kept = file.read_bytes()
    assert Config(**flattened(tomllib.loads(kept.decode()))) == cli._parse(small).config
    (tmp_path / "out" / "seed-0" / "result.json").unlink()
    capsys.readouterr()
    assert "unfinished run" in refused(capsys, *small, "--lr", "0.2")
    assert "of another run (lr 0.1, not 0.2)" in refused(capsys, *small, "--lr", "0.2", "--resume")
    assert file.read_bytes() == kept
    file.unlink()
    assert cli.main([*small, "--resume"]) == 0
    assert file.read_bytes() == kept


def test_a_file_may_be_called_anything(tmp_path):
    for name in ("ta sks", "é😀", '"quoted"', "tab\there", "delete\x7f", "back\\slash", "not\udcffutf-8"):
        config = Config(arrays=f"{tmp_path}/{name}.npz")
        path = tmp_path / "config.toml"
        path.write_bytes(toml(config.record()).encode(errors="surrogateescape"))
        assert Config(**flattened(read_toml(path))) == config


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('"a\\nb" = 1', r"--a\nb: 1 is not valid; there is no such option"),
        ("lr = 'fast'", "--lr: 'fast' is not valid; give a number"),
        ("lr = 2020-01-01", "--lr: datetime.date(2020, 1, 1) is not valid; give a number"),
        ("lr = nan", "--lr: nan is not valid"),
        ("method = 3", "--method: 3 is not valid"),
        ("[method]\nname = 'replay'\n[network]\nmemory = 5\n[method.x]\nmemory = 5", "--memory: 5 is not valid; two"),
        ("lr = ", "file: "),
        ("lr = 1\nlr = 2", "file: "),
        (b"\xff\xfe", "file: "),
        ("x = " + "[" * 5000, "file: "),
        (None, "file: "),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_line(tmp_path, capsys, content, reason):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refused(capsys, "run", str(path)).startswith(f"cotrain: error: {reason}")
    for other in (str(tmp_path), "no\0file", "x" * 300, f"{path}/more"):
        assert refused(capsys, "run", other).startswith("cotrain: error: file: ")
