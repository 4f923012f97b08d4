"""The paper's grid: its five methods and two controls on its two benchmarks, as the paper has them and tuned.

`paper.toml` has it as a sweep; here are the names by which a report knows its methods.
"""

from importlib import resources
from pathlib import Path
from typing import NamedTuple

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
GRID = Path(str(resources.files("cotrain.experiments") / "paper.toml"))


class Scale(NamedTuple):
    """How much of the paper's experiment."""

    examples: int | None  # of a task; None: all
    seeds: int


SCALES = {"quick": Scale(6000, 1), "single": Scale(None, 1), "paper": Scale(None, 15)}


def preset(benchmark: str, method: str) -> Config:
    """The configuration of a method of the grid as the paper has it, at full size."""
    network, name = METHODS[method]
    return Config(benchmark=benchmark, network=network, method=name)


def names_of(config: Config) -> tuple[str, ...]:
    """The names that make a method what it is."""
    flat = config.flat
    return tuple(flat.get(kind, "") for kind in ("network", "router", "method", "inner"))


def label_of(config: Config) -> str:
    """What the paper calls the method of a configuration; of others, what it is."""
    for label in METHODS:
        if names_of(preset(BENCHMARKS[0], label)) == names_of(config):
            return label
    return f"{config.method.name} on {config.network.name}"
