"""Imports point one way, and only the upper layers have to do with the world outside."""

import ast
from pathlib import Path

import pytest

import cotrain

ROOT = Path(cotrain.__file__).parent
LAYERS = [  # each imports those above it in this list, and its own
    {"errors", "metrics", "speed"},
    {"choice"},
    {"data"},
    {"memory", "networks"},
    {"methods"},
    {"devices"},
    {"evaluation"},
    {"steps"},
    {"engine"},
    {"growth"},
    {"experiments"},
    {"report"},
    {"ask", "commands", "shell"},
    {"cli", "__main__"},
    {"__init__"},
]
HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}
OUTSIDE = {"time", "datetime", "os", "pathlib", "sys", "shutil", "subprocess", "tempfile", "logging", "rich"}
MAY_TOUCH_FILES = {"data/fetch.py", "data/arrays.py", "data/npz.py", "data/benchmarks.py", "data/inputs.py"}
MAY_IMPORT = {
    "choice.py": ["sys"],  # for the Python path, on which an entry of one's own is found
}
FILES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


def part_of(file):
    """The part of the package that a file belongs to."""
    return file.split("/")[0].removesuffix(".py")


def imported(file, source):
    """The full names that a file imports, wherever in it."""
    package = ["cotrain", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def upward(file, source):
    """The imports of a file that point to another part of the package, and not to a lower one."""
    part = part_of(file)
    for name in imported(file, source):
        top, _, rest = name.partition(".")
        if top == "cotrain":
            target = rest.split(".")[0]
            if target != part and HEIGHT.get(target, len(LAYERS)) >= HEIGHT[part]:
                yield name


def outside(source):
    """What a source imports or calls that has to do with the world outside."""
    yield from (name for name in imported("x.py", source) if name.split(".")[0] in OUTSIDE)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "open", "input"):
            yield ast.unparse(node.func)


def test_every_part_has_its_place():
    assert {part_of(file) for file in FILES} <= set(HEIGHT)
    assert {"data", "networks", "memory", "methods", "engine"} <= {part_of(file) for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_imports_point_one_way(file):
    assert list(upward(file, FILES[file])) == []


@pytest.mark.parametrize(
    "file", [file for file in FILES if HEIGHT[part_of(file)] < HEIGHT["experiments"] and file not in MAY_TOUCH_FILES]
)
def test_nothing_below_the_experiments_prints_or_reads_a_clock_or_touches_a_file(file):
    assert list(outside(FILES[file])) == MAY_IMPORT.get(file, [])


def test_methods_know_the_network_record_alone():
    names = {
        name
        for file, source in FILES.items()
        if part_of(file) == "methods"
        for name in imported(file, source)
        if name.startswith("cotrain.networks")
    }
    assert "cotrain.networks.network.Network" in names
    makers = ("shared_bottom", "routing_network", "dense", "mlp", "convolution", "build")
    assert not [name for name in names if name.rpartition(".")[2] in makers]
    assert not [name for name in names if name.startswith("cotrain.networks.routers")]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("methods/ewc.py", "from cotrain.engine import learn"),
        ("methods/ewc.py", "def f():\n    import cotrain.engine"),
        ("methods/ewc.py", "from .. import engine"),
        ("methods/ewc.py", "from cotrain import finetune"),
        ("data/batch.py", "from cotrain.memory import reservoir"),
        ("memory.py", "from .networks.network import Network"),
        ("memory.py", "from . import networks"),
        ("networks/network.py", "from ..methods.descent import descend"),
        ("networks/routers/by_input.py", "from ...methods.descent import descend"),
        ("speed/loops.py", "from cotrain.networks.path import Path"),
        ("choice.py", "from cotrain.networks import ROUTERS"),
        ("evaluation.py", "from cotrain.engine import Snapshot"),
        ("methods/replay.py", "from cotrain.devices import placed"),
        ("engine.py", "from cotrain.experiments.config import Config"),
        ("metrics.py", "import cotrain.data.stream"),
        ("experiments/run.py", "from cotrain.report.table import table"),
        ("report/table.py", "from cotrain import cli"),
        ("experiments/config.py", "from cotrain.shell import parse_run"),
        ("commands.py", "from cotrain.cli import main"),
    ],
)
def test_an_import_that_points_the_other_way_is_found(file, source):
    assert len(list(upward(file, source))) == 1


@pytest.mark.parametrize(
    "source", ["print(1)", "import os.path", "from time import monotonic", "def f():\n    open('x')", "import pathlib"]
)
def test_what_has_to_do_with_the_world_outside_is_found(source):
    assert len(list(outside(source))) == 1
