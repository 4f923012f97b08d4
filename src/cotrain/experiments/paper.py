"""The paper's grid: its five methods and two controls on its two benchmarks, as the paper has them and tuned."""

import json
from dataclasses import replace
from importlib import resources
from typing import Any, NamedTuple

from cotrain.experiments.config import Config

BENCHMARKS = ("permuted-mnist", "rotated-mnist")
METHODS = {  # as the paper calls them -> network and method
    "shared bottom": ("shared-bottom", "finetune"),
    "shared bottom + replay": ("shared-bottom", "replay"),
    "MoE": ("routing-network", "finetune"),
    "MoE + replay": ("routing-network", "replay"),
    "MoE + replay + co-training": ("routing-network", "cotraining"),
    "private": ("routing-network", "private"),
    "joint": ("shared-bottom", "joint"),
}
TABLES = ("as-the-paper", "tuned")
TUNED = resources.files("cotrain.experiments") / "tuned.json"  # written by `cotrain tune`


class Scale(NamedTuple):
    """How much of the paper's experiment."""

    examples: int | None  # of a task; None: all
    seeds: int


SCALES = {"quick": Scale(6000, 1), "single": Scale(None, 1), "paper": Scale(None, 15)}


class Cell(NamedTuple):
    """A cell of a table: a method on a benchmark."""

    table: str
    benchmark: str
    method: str
    config: Config


def cells(scale: Scale) -> list[Cell]:
    """All cells of both tables; the tuned one has those that were tuned."""
    return [
        Cell(table, benchmark, method, replace(preset(benchmark, method, table), examples=scale.examples))
        for table in TABLES
        for benchmark in BENCHMARKS
        for method in METHODS
        if table == "as-the-paper" or tuned(benchmark, method)
    ]


def preset(benchmark: str, method: str, table: str) -> Config:
    """The configuration of a cell at full size: the defaults, or with what tuning found."""
    network, name = METHODS[method]
    config = Config(benchmark=benchmark, network=network, method=name)
    return replace(config, **tuned(benchmark, method)) if table == "tuned" else config


def tuned(benchmark: str, method: str) -> dict[str, Any]:
    """The options that tuning found for a method on a benchmark."""
    found = json.loads(TUNED.read_text())["found"]
    return found.get(benchmark, {}).get(method, {}).get("options", {})
