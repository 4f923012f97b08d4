"""What a step of each method costs on a shared bottom, with the default options at the workload's sizes."""

from collections.abc import Callable
from typing import Any

from benchmarks import ours
from benchmarks.workload import Pass
from cotrain.experiments.config import Config

# What plain replay is given, too: methods that are slower with their own defaults are so by what they look at.
FEW = {"memory": 1000, "memory_batch": 10}
OPTIONS: dict[str, dict[str, Any]] = {
    "replay": FEW,
    "cotraining": FEW,
    "der": FEW,
    "der-plus-plus": FEW,
    "a-gem": FEW,
    "gem": {"memory": 1000, "memory_batch": 2},  # of each task
    "mer": {"memory": 1000, "memory_batch": 1},
    "ogd": {"basis": 5},
}


def step(workload: Any) -> Callable[[], Pass]:
    """The workload's method."""
    config = Config(method=workload.method, lr=workload.lr, **OPTIONS.get(workload.method, {}))
    return ours.passes(workload, config.method(ours.shared_bottom(workload)))
