"""The claim as a figure: how the accuracy on a task fares as others are learned after it (the paper's Figure 2)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

SHOWN = {
    ("shared-bottom", "replay"): ("shared bottom + replay", "#8a8a8a"),
    ("routing-network", "replay"): ("routing network + replay", "#e08a3c"),
    ("routing-network", "cotraining"): ("routing network + replay + co-training", "#1f6fb4"),
}
TASKS = (0, 9)


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the mean accuracy over seeds, with a band of one standard deviation, for each benchmark and task."""
    benchmarks = sorted({record["config"]["benchmark"] for record in records}, reverse=True)
    figure, grid = plt.subplots(
        len(benchmarks),
        len(TASKS),
        figsize=(9, 0.6 + 2.6 * len(benchmarks)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, benchmark in zip(grid, benchmarks, strict=True):
        for axes, task in zip(row, TASKS, strict=True):
            for shown, (label, colour) in SHOWN.items():
                curves = [_curve(record, task) for record in records if _key(record) == (benchmark, *shown)]
                if curves:
                    _band(axes, np.array(curves), label, colour)
            axes.set_title(f"{benchmark}, task {task + 1}", fontsize=10)
            axes.grid(alpha=0.3)
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        row[0].set_ylabel("test accuracy")
    for axes in grid[-1]:
        axes.set_xlabel("tasks learned")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(SHOWN), fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _key(record: dict[str, Any]) -> tuple[str, str, str]:
    config = record["config"]
    return config["benchmark"], config["network"], config["method"]


def _curve(record: dict[str, Any], task: int) -> np.ndarray:
    return np.array(record["accuracy"], float)[:, task]


def _band(axes: Any, curves: np.ndarray, label: str, colour: str) -> None:
    learned = np.arange(1, curves.shape[1] + 1)
    mean, std = curves.mean(axis=0), curves.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(curves.shape[1])
    axes.plot(learned, mean, label=label, color=colour)
    axes.fill_between(learned, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)
