"""Protocols by name: the stream, the network and the batches of each, and that names change nothing that had none."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import arrays_file

from cotrain import cli
from cotrain.choice import flattened
from cotrain.data.fetch import Dataset
from cotrain.errors import Invalid
from cotrain.experiments.build import build
from cotrain.experiments.config import Config, with_protocol
from cotrain.experiments.files import read_record
from cotrain.experiments.protocols import DECIDED, PROTOCOLS
from cotrain.experiments.store import Store, key_of
from cotrain.experiments.sweep import read_sweep
from cotrain.experiments.toml import read_toml, toml
from cotrain.networks.routing_network import parameter_count
from cotrain.report.study import is_full
from cotrain.report.table import rows

ROOT = Path(__file__).parent.parent
IMAGES = 1100  # of the stand-in for MNIST, a little more than GEM takes
OTHERS = [name for name in PROTOCOLS if name != "paper"]
GEM = {"tasks": 20, "examples": 1000, "batch": 10, "epochs": 1, "network": "shared-bottom", "hidden": (100, 100)}
MAMMOTH = GEM | {"examples": None, "batch": 128}
A_GEM = GEM | {"tasks": 17, "examples": None, "hidden": (256, 256)}
PARAMETERS = {"gem": 89_610, "mammoth": 89_610, "a-gem": 269_322}  # 784·n + n + n·n + n + 10·n + 10


@pytest.fixture
def images(monkeypatch):
    """A stand-in for MNIST, of which no two images are alike."""

    def load(name, data_dir=None, report=None):
        draws = np.random.default_rng(0)

        def part(count):
            return draws.integers(0, 256, (count, 28, 28), np.uint8), (np.arange(count) % 10).astype(np.uint8)

        return Dataset(name, *part(IMAGES), *part(50))

    monkeypatch.setattr("cotrain.experiments.build.load", load)


@pytest.fixture
def turned(monkeypatch):
    """How images are turned from now on: degrees and interpolation, once for each task and part."""
    asked = []
    monkeypatch.setattr("cotrain.data.stream.rotation", lambda shape, *how: asked.append(how))
    return asked


def config_of(*arguments: object) -> Config:
    """The configuration that `cotrain run` takes these to be."""
    return cli._parse(["run", *map(str, arguments)]).config


def refused(capsys, *arguments: object) -> str:
    """The line with which a command is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cotrain.experiments.run.run_config", lambda *_, **__: pytest.fail("it runs"))
        assert cli.main(["run", *map(str, arguments)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


# What each is


@pytest.mark.parametrize(("name", "decided"), [("gem", GEM), ("mammoth", MAMMOTH), ("a-gem", A_GEM)])
def test_permuted_tasks_of_a_protocol(images, name, decided):
    config = Config(protocol=name, benchmark="permuted-mnist", method="finetune")
    assert config.flat.items() >= {**decided, "one_head": True, "permute_first": True}.items()
    assert "angles" not in config.flat
    method, make = build(config)
    stream = make(3)
    assert len(stream) == decided["tasks"]
    assert parameter_count(method.network) == PARAMETERS[name]
    plain, _ = build(Config(benchmark="permuted-mnist"))[1](3)[0].test.take(np.arange(50))
    for task in stream:
        assert (len(task.train), len(task.test)) == (decided["examples"] or IMAGES, 50)
        x, _ = task.test.take(np.arange(50))
        assert not np.array_equal(x, plain)
        np.testing.assert_array_equal(np.sort(x[7], axis=None), np.sort(plain[7], axis=None))


@pytest.mark.parametrize(("name", "decided"), [("gem", GEM), ("mammoth", MAMMOTH)])
def test_rotated_tasks_of_a_protocol(images, turned, name, decided):
    config = Config(protocol=name, method="finetune")
    assert config.flat.items() >= {**decided, "one_head": True, "interpolation": "nearest"}.items()
    assert "permute_first" not in config.flat
    method, make = build(config)
    assert parameter_count(method.network) == PARAMETERS[name]
    tasks = list(make(3))
    assert [len(task.train) for task in tasks] == [decided["examples"] or IMAGES] * 20
    assert {how for _, how in turned} == {"nearest"}
    angles = np.array([degrees for degrees, _ in turned[::2]])
    assert ((angles >= 0) & (angles < 180)).all()
    np.testing.assert_equal((angles // 9 == np.arange(20)).all(), name == "gem")
    np.testing.assert_equal((np.diff(angles) > 0).all(), name == "gem")


def test_the_papers_protocol_is_what_is_by_default(turned, images):
    assert PROTOCOLS["paper"].options == {}
    for chosen in ({}, {"benchmark": "split-mnist"}, {"network": "shared-bottom", "method": "replay", "lr": 0.2}):
        assert Config(protocol="paper", **chosen) == Config(**chosen)
    assert config_of("--protocol", "paper", "--k", "2") == config_of("--k", "2") == Config(k=2)
    assert list(build(Config())[1](0))
    assert turned == [(9.0 * i, "bilinear") for i in range(1, 20) for _ in ("train", "test")]


def test_a_protocol_has_options_that_there_are_and_says_what_it_is_in_a_line():
    for name, (about, options) in PROTOCOLS.items():
        assert re.fullmatch("[^\n]{10,120}", about)
        of = {"benchmark": "rotated-mnist", "angles": "bins"}, {"benchmark": "permuted-mnist"}
        had = set().union(*(Config(protocol=name, **chosen).flat for chosen in of))
        assert set(options) <= had
        assert set(options) <= DECIDED | {"benchmark", "network"}


def test_where_there_are_no_rotations_angles_must_be_chosen(capsys):
    assert Config(protocol="a-gem").benchmark.name == "permuted-mnist"
    message = refused(capsys, "--protocol", "a-gem", "--benchmark", "rotated-mnist")
    assert message.startswith("cotrain: error: --angles: 'none' is not valid; choose from steps, bins, random")
    assert Config(protocol="a-gem", benchmark="rotated-mnist", angles="bins").flat["tasks"] == 17


# Defaults, and what goes before them


def test_what_is_given_goes_before_the_protocol():
    config = Config(protocol="gem", method="finetune", tasks=5, hidden=(8,), angles="steps", rotation_step=3.0)
    wanted = {"tasks": 5, "hidden": (8,), "angles": "steps", "rotation_step": 3.0}
    assert config.flat == Config(protocol="gem", method="finetune").flat | wanted
    assert Config(protocol="gem", examples=None).flat["examples"] is None


def test_what_the_chosen_parts_do_not_have_is_left_out(tmp_path):
    dense = {"network": "shared-bottom", "method": "finetune"}
    permuted = Config(benchmark="permuted-mnist", permute_first=True, examples=1000, hidden=(100, 100), one_head=True)
    assert Config(protocol="gem", benchmark="permuted-mnist", **dense) == permuted.but(**dense)
    own = arrays_file(tmp_path / "tasks.npz")
    arrays = Config(arrays=own, hidden=(100, 100), one_head=True, batch=128, **dense)
    assert Config(protocol="mammoth", arrays=own, method="finetune") == arrays
    routed = Config(protocol="gem", network="routing-network").flat
    assert routed.items() >= {"hidden": (100, 100), "one_head": True, "experts": 20}.items()
    split = Config(protocol="gem", benchmark="split-mnist", tasks=5).flat
    assert split.items() >= {"examples": 1000, "tasks": 5}.items()


def test_another_protocol_takes_the_place_of_what_one_has_decided():
    gem, mammoth = (Config(protocol=name, method="replay", lr=0.2, memory=50) for name in ("gem", "mammoth"))
    assert gem.but(protocol="mammoth") == mammoth
    assert mammoth.but(protocol="gem", tasks=3) == gem.but(tasks=3)
    routed = Config(rotation_step=3.0, lr=0.2)
    assert routed.but(protocol="gem") == Config(protocol="gem", network="routing-network", lr=0.2)
    assert routed.but(protocol="gem").but(protocol="paper") == Config(lr=0.2)


def test_a_protocol_that_there_is_not_is_refused(capsys):
    for wrong in ("gme", "", None, 3, ["gem"], {"name": "gem"}):
        with pytest.raises(Invalid, match=r"^protocol: [^\n]* choose from paper, gem, mammoth, a-gem$"):
            Config(protocol=wrong)
    assert "--protocol: 'gme' is not valid; did you mean 'gem'?" in refused(capsys, "--protocol", "gme")
    assert "--protocol: '' is not valid" in refused(capsys, "--protocol")
    message = refused(capsys, "--protocol", "gem", "--k", "2")
    assert "network shared-bottom," in message
    assert message.endswith("; it is one of network routing-network\n")


# In the shell


@pytest.mark.parametrize("name", OTHERS)
def test_a_protocol_is_typed(name):
    for typed in (["--protocol", name], [f"--protocol={name}"]):
        assert config_of(*typed) == Config(protocol=name)
        assert config_of("--method", "finetune", *typed, "--lr", "0.3") == Config(
            protocol=name, method="finetune", lr=0.3
        )
    typed = ["--tasks", "4", "--benchmark", "permuted-mnist", "--no-permute-first", "--network", "routing-network"]
    wanted = {"tasks": 4, "benchmark": "permuted-mnist", "permute_first": False, "network": "routing-network"}
    assert config_of("--protocol", name, *typed) == Config(protocol=name, **wanted)


def test_own_arrays_have_what_of_a_protocol_applies(tmp_path):
    own = arrays_file(tmp_path / "tasks.npz")
    for name in OTHERS:
        assert config_of("--protocol", name, "--arrays", own) == Config(protocol=name, arrays=own)


def test_help_shows_the_defaults_of_the_protocol(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # or there are two boxes beside each other

    def shown(*arguments: str) -> dict[str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["run", *arguments, "--help"])
        assert not stop.value.code
        text = " ".join(re.sub("[│╭╮╰╯]", " ", capsys.readouterr().out).split())
        return dict(re.findall(r"--([a-z-]+) (?:(?!--[a-z]).)*?\(default: ([^()]*)\)", text))

    usual, gem = shown(), shown("--protocol", "gem")
    assert (usual["protocol"], usual["batch"], usual["angles"]) == ("paper", "10", "steps")
    assert (gem["protocol"], gem["examples"], gem["angles"], gem["hidden"]) == ("gem", "1000", "bins", "100 100")
    assert shown("--protocol", "mammoth")["batch"] == "128"
    assert shown("--protocol", "mammoth", "--batch", "5").keys() >= {"batch"}


def test_list_has_the_protocols(capsys):
    assert cli.main(["list"]) == 0
    printed = capsys.readouterr().out
    for name, (about, _) in PROTOCOLS.items():
        assert re.search(rf"^  {name} +{re.escape(about)}$", printed, re.MULTILINE)


# In files


def test_a_file_names_a_protocol(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('protocol = "gem"\nlr = 0.2\n[benchmark]\nname = "permuted-mnist"\ntasks = 5\n')
    gem = Config(protocol="gem", benchmark="permuted-mnist", tasks=5, lr=0.2)
    assert config_of(path) == Config(**flattened(read_toml(path))) == gem
    assert config_of(path, "--examples", "7") == gem.but(examples=7)
    assert config_of(path, "--network", "routing-network") == gem.but(network="routing-network")
    assert config_of(path, "--benchmark", "rotated-mnist").flat["angles"] == "bins"


def test_a_typed_protocol_goes_before_what_a_file_says_of_its_options(tmp_path):
    path = tmp_path / "config.toml"
    gem = Config(protocol="gem", method="replay", lr=0.2)
    path.write_text(toml(gem.record()))
    assert config_of(path) == gem
    assert config_of(path, "--protocol", "mammoth") == Config(protocol="mammoth", method="replay", lr=0.2)
    assert config_of(path, "--protocol", "paper") == Config(network="shared-bottom", method="replay", lr=0.2)
    path.write_text('protocol = "gem"\ntasks = 5')
    assert config_of(path, "--protocol", "mammoth") == Config(protocol="mammoth")


def test_a_sweep_has_protocols_as_it_has_options(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text("""
        method = "finetune"
        tasks = 5
        network = "shared-bottom"
        [product]
        protocol = ["paper", "gem", "mammoth"]
        [[runs]]
        [[runs]]
        examples = 70
    """)
    common = {"method": "finetune", "tasks": 5, "network": "shared-bottom"}
    wanted = [
        Config(protocol=p, **common, **few) for p in ("paper", "gem", "mammoth") for few in ({}, {"examples": 70})
    ]
    assert [cell.config for cell in read_sweep(path).cells] == wanted


def test_the_labels_of_a_sweep_name_protocols(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text('network = "shared-bottom"\nmethod = "finetune"\n[product]\nprotocol = ["paper", "gem", "mammoth"]')
    labels = [cell.method for cell in read_sweep(path).cells]
    assert labels == ["shared bottom", "shared bottom (protocol gem)", "shared bottom (protocol mammoth)"]
    path.write_text('protocol = "gem"\nmethod = "finetune"\n[product]\nlr = [0.1, 0.2]')
    assert [cell.method for cell in read_sweep(path).cells] == [f"shared bottom (lr {lr})" for lr in (0.1, 0.2)]


# In records


def test_a_run_is_kept_under_the_options_that_its_protocol_stands_for(images, tmp_path, capsys):
    typed = ["--method", "finetune", "--tasks", "2", "--examples", "20", "--hidden", "4", "--workers", "1"]
    out = tmp_path / "out"
    assert cli.main(["run", "--protocol", "gem", *typed, "--out", str(out)]) == 0
    config = Config(protocol="gem", method="finetune", tasks=2, examples=20, hidden=(4,))
    record = read_record(out / "seed-0" / "result.json")
    assert record["config"] == json.loads(json.dumps(config.record()))
    assert "protocol" not in json.dumps(record)
    assert Config.read(record["config"]) == Config(**flattened(read_toml(out / "config.toml"))) == config
    assert record["config"]["benchmark"].items() >= {"angles": "bins", "interpolation": "nearest"}.items()
    assert cli.main(["check", str(out)]) == 0


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("benchmark", ["permuted-mnist", "rotated-mnist"])
def test_a_configuration_is_the_same_whether_the_protocol_is_named_or_spelled_out(tmp_path, name, benchmark):
    given = {"protocol": name, "benchmark": benchmark, "method": "finetune", "lr": 0.2}
    given |= {"angles": "bins"} if (name, benchmark) == ("a-gem", "rotated-mnist") else {}
    config = Config(**given)
    spelled = Config(**with_protocol(given))
    assert (config, key_of(config), hash(config)) == (spelled, key_of(spelled), hash(spelled))
    assert Store(tmp_path).place(config, 0) == Store(tmp_path).place(spelled, 0)
    assert Config.read(json.loads(json.dumps(config.record()))) == config
    assert Config(**config.options) == Config(**config.flat) == config


def test_what_names_no_protocol_is_kept_where_it_was():
    assert Config().options == {}
    assert key_of(Config()) == hashlib.sha256(b'{"numerics": 1}').hexdigest()[:12]
    assert Config(permute_first=True, benchmark="permuted-mnist").options.keys() == {"benchmark", "permute_first"}
    older = Config().record()
    del older["benchmark"]["angles"], older["benchmark"]["interpolation"]
    assert Config.read(older) == Config()


def test_a_report_says_which_protocol_it_was_by_the_options():
    numbers = {"acc": 0.9, "bwt": -0.1, "learning_accuracy": 1.0}

    def told(**options) -> str:
        [row] = rows([{"config": Config(method="finetune", **options).record(), **numbers}])
        return row.options

    assert told(protocol="gem", lr=0.2) == "protocol gem, lr 0.2"
    assert told(protocol="a-gem") == "protocol a-gem"
    assert told(protocol="mammoth", benchmark="permuted-mnist", stream_seed=7) == "protocol mammoth, stream_seed 7"
    assert "protocol" not in told(protocol="mammoth", examples=7)
    assert told(protocol="gem", network="routing-network") == "protocol gem"
    assert told(protocol="gem", tasks=5).startswith("tasks 5, examples 1000, angles bins, ")
    assert told(tasks=5) == "tasks 5"
    for name in OTHERS:
        config = Config(protocol=name)
        assert (config.protocol, is_full(config)) == (name, False)
        assert config.but(batch=7).protocol is None
    assert Config().protocol is Config(protocol="paper").protocol is None


# In the documents


def test_the_documents_have_the_numbers_of_each():
    text = (ROOT / "docs" / "protocols.md").read_text()
    for name in PROTOCOLS:
        flat = Config(protocol=name, network="shared-bottom", benchmark="permuted-mnist").flat
        heads = "one" if flat["one_head"] else "one per task"
        sizes = " + ".join(map(str, flat["hidden"]))
        examples = "all" if flat["examples"] is None else f"{flat['examples']:,}"
        first = "permuted" if flat["permute_first"] else "as it is"
        turns = PROTOCOLS[name].options.get("angles", "steps"), PROTOCOLS[name].options.get("interpolation", "bilinear")
        rotations = ["–", "–"] if turns[0] == "none" else [f"`{turn}`" for turn in turns]
        row = (f"`{name}`", flat["tasks"], examples, flat["batch"], flat["epochs"], sizes, heads, first, *rotations)
        assert f"| {' | '.join(map(str, row))} |" in text
