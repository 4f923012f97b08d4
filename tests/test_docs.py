"""What the documents say is what the code does: tables, examples and defaults."""

import contextlib
import importlib
import inspect
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cotrain
from cotrain.choice import entry_of
from cotrain.experiments.config import TABLES, Config, every_name
from cotrain.report.documents import as_csv, as_json, as_latex, as_markdown
from cotrain.report.readme import readme
from cotrain.report.study import read_study
from cotrain.report.table import insert, markdown, read_records, rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_ablations_are_made_from_the_records():
    text = (ROOT / "docs" / "deviations.md").read_text()
    table = markdown(rows(read_records([ROOT / "results" / "ablations"])))
    assert insert(text, table) == text


@pytest.mark.parametrize(
    ("page", "records"),
    [("routers.md", "routers"), ("protocols.md", "protocols"), ("methods/README.md", "methods")],
)
def test_the_tables_of_pages_are_made_from_the_records(page, records):
    text = (ROOT / "docs" / page).read_text()
    table = markdown(rows(read_records([ROOT / "results" / records])))
    assert insert(text, table) == text


def test_the_readmes_tables_and_those_of_the_paper_are_made_from_the_records():
    directory = ROOT / "results" / "paper"
    study = read_study(directory)
    assert insert(README, readme(study)) == README
    written = as_json(study) | {
        "tables.md": as_markdown(study),
        "tables.csv": as_csv(study),
        "tables.tex": as_latex(study),
    }
    assert {"as-the-paper.json", "tests.json"} <= set(written)
    for name, text in written.items():
        assert (directory / name).read_text() == text, name


def test_the_papers_grid_is_made_of_all_its_records():
    directory = ROOT / "results" / "paper"
    tables = json.loads((directory / "grid.json").read_text())["tables"]
    listed = {run for rows in tables.values() for row in rows for run in row["runs"]}
    assert {path.parent.relative_to(directory).as_posix() for path in directory.rglob("result.json")} == listed


def test_the_readmes_example_is_the_one_that_runs():
    code = re.search(r"```python\n(import cotrain\n.*?)```", README, re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line]) <= 10
    example = (ROOT / "examples" / "rotations.py").read_text()
    assert example.endswith(code[1])


def test_the_readmes_learner_is_the_one_that_runs_and_its_output_is_what_it_prints(tmp_path):
    example = ROOT / "examples" / "learner.py"
    found = re.search(r"```python\n(import zlib\n.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert found is not None
    code, output = found.groups()
    assert example.read_text().endswith(code)
    assert len([line for line in code.splitlines() if line]) <= 15
    printed, digests = "", set()
    for _ in range(2):
        run = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=True)
        printed += f"$ python examples/learner.py\n{run.stdout}"
        digests.add(run.stdout.split()[-1])
    assert len(digests) == 1, "what was predicted for task 0 is the same in both processes, to the bit"
    last_bits = re.compile("[0-9a-f]{8}")  # another processor has others
    assert last_bits.sub("", printed) == last_bits.sub("", output)


def test_the_callback_of_the_documents_watches_and_stops(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(class Patience.*?)```", (ROOT / "docs" / "watching.md").read_text(), re.DOTALL)
    assert code is not None
    x, y = np.zeros((40, 3), np.float32), np.arange(40) % 4  # of which nothing can be learned
    stream = cotrain.Stream.from_arrays([(x, y, x, y)] * 3)
    names = {"cotrain": cotrain, "stream": stream, "method": cotrain.finetune(cotrain.shared_bottom(stream.spec, (4,)))}
    exec(code[1], names)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["task 0, minibatch 4"]
    assert (tmp_path / "runs" / "mine" / "seed-0" / "log.csv").read_text().count("\n") == 3
    assert (names["results"][0].learner.finished, names["results"][0].learner.step) == (1, 0)


def test_own_methods_and_routers_are_short():
    own = {name: (ROOT / "examples" / f"own_{name}.py").read_text() for name in ("method", "router")}
    sizes = {name: len(text.splitlines()) for name, text in own.items()}
    assert sizes["method"] <= 60
    assert sizes["router"] <= 40
    assert f"in {sizes['method']} lines" in README
    assert f"in {sizes['router']}" in README


@pytest.mark.parametrize("name", ["own_tasks", "own_experts"])
def test_an_example_runs(name, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    accuracy = re.search(r"acc (\d\.\d+)", capsys.readouterr().out)
    assert accuracy is not None
    assert 0.85 < float(accuracy[1]) <= 1


@pytest.mark.parametrize(
    "path",
    ["README.md", "CONTRIBUTING.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))],
)
def test_links_to_files_lead_somewhere(path):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / path).read_text())
    missing = [target for target in targets if not (ROOT / path).parent.joinpath(target).exists()]
    assert missing == []


def test_every_option_that_the_documents_name_exists():
    options = {f"--{name.replace('_', '-')}" for name in every_name()}
    named = set(re.findall(r"`(--[a-z-]+)", (ROOT / "docs" / "deviations.md").read_text()))
    assert named
    assert named <= options | {"--seeds", "--first-seed"}


def test_the_walk_of_a_minibatch_is_of_functions_that_there_are():
    text = (ROOT / "docs" / "design.md").read_text()
    walk = re.findall(r"\| \d+ \| `([\w.]+)` \|", text)
    assert 6 <= len(walk) <= 12
    for name in walk:
        module, thing = name, None
        while thing is None:  # a function, or a method of a class
            module = module.rpartition(".")[0]
            with contextlib.suppress(ModuleNotFoundError):
                thing = importlib.import_module(f"cotrain.{module}")
        for part in name.removeprefix(f"{module}.").split("."):
            thing = getattr(thing, part)
        assert callable(thing)


def test_files_are_short():
    kinds = (".py", ".js", ".toml", ".json", ".html", ".css")
    files = [path for path in (ROOT / "src").rglob("*") if path.suffix in kinds]
    assert len(files) > 50
    assert [path.name for path in files if len(path.read_text().splitlines()) > 350] == []


def test_defaults_agree_between_the_shell_and_python():
    config, agreed = Config().flat | Config(network="shared-bottom").flat, set()
    functions = (cotrain.routing_network, cotrain.shared_bottom, cotrain.replay, cotrain.cotraining, cotrain.finetune)
    for function in (
        *functions,
        cotrain.task_matrix,
        cotrain.gaussian,
        cotrain.learn,
        cotrain.by_input,
        cotrain.rotated,
    ):
        for name, parameter in inspect.signature(function).parameters.items():
            default = getattr(parameter.default, "__name__", parameter.default)  # an optimizer is a function
            if name in config and default not in ("_empty", None) and (function, name) != (cotrain.cotraining, "lr"):
                assert config[name] == default, f"{function.__name__}: {name}"
                agreed.add(name)
    assert agreed >= {"lr", "layers", "experts", "k", "aggregation", "gates", "noise", "hidden", "optimizer", "batch"}
    memory = inspect.signature(cotrain.reservoir).parameters
    assert (memory["capacity"].default, memory["batch"].default) == (config["memory"], config["memory_batch"])


def test_what_can_be_chosen_says_in_a_line_what_it_is():
    for kind, table in TABLES.items():
        for name in table:
            assert re.fullmatch("[^\n]{10,120}", entry_of(kind, name, table).__doc__)


def test_every_public_name_can_be_had():
    assert all(callable(getattr(cotrain, name)) for name in cotrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cotrain.nothing
