"""What the documents say is what the code does: tables, examples and defaults."""

import dataclasses
import inspect
import json
import re
import runpy
from pathlib import Path

import pytest

import cotrain
from cotrain.experiments.config import BENCHMARKS, METHODS, NETWORKS, OPTIMIZERS, Config
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


@pytest.mark.parametrize("name", ["own_tasks", "own_experts"])
def test_an_example_runs(name, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    accuracy = re.search(r"acc (\d\.\d+)", capsys.readouterr().out)
    assert accuracy is not None
    assert 0.85 < float(accuracy[1]) <= 1


@pytest.mark.parametrize(
    "path", ["README.md", "CONTRIBUTING.md", "docs/design.md", "docs/deviations.md", "docs/performance.md"]
)
def test_links_to_files_lead_somewhere(path):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / path).read_text())
    missing = [target for target in targets if not (ROOT / path).parent.joinpath(target).exists()]
    assert missing == []


def test_every_option_that_the_documents_name_exists():
    options = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Config)}
    named = set(re.findall(r"`(--[a-z-]+)", (ROOT / "docs" / "deviations.md").read_text()))
    assert named
    assert named <= options | {"--seeds", "--first-seed"}


def test_defaults_agree_between_the_shell_and_python():
    config = Config()
    for function in (cotrain.routing_network, cotrain.replay, cotrain.cotraining, cotrain.learn):
        for name, parameter in inspect.signature(function).parameters.items():
            default = getattr(parameter.default, "__name__", parameter.default)  # an optimizer is a function
            if hasattr(config, name) and default != "_empty":
                assert getattr(config, name) == default, f"{function.__name__}: {name}"
    memory = inspect.signature(cotrain.reservoir).parameters
    assert (memory["capacity"].default, memory["batch"].default) == (config.memory, config.memory_batch)
    assert inspect.signature(cotrain.shared_bottom).parameters["hidden"].default == config.hidden


def test_the_help_names_every_choice():
    source = inspect.getsource(Config)
    for name in (*METHODS, *NETWORKS, *OPTIMIZERS, *{known.stream for known in BENCHMARKS.values()}):
        assert name in source


def test_every_public_name_can_be_had():
    assert all(callable(getattr(cotrain, name)) for name in cotrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cotrain.nothing
