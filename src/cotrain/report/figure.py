"""The figures as files: every figure of the paper has its counterpart, and two that it has not."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from cotrain.metrics import task_similarity
from cotrain.report import views
from cotrain.report.figures import FIGURES
from cotrain.report.palette import Look, looks
from cotrain.report.routes import drops, routed, shares, sharings
from cotrain.report.study import Cell, Run, Table

WIDTH = 9.0  # inches
SETTINGS: Any = {
    "text.parse_math": False,  # a label is text, whatever is in it
    "svg.hashsalt": "cotrain",  # the same numbers give the same file
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def figures(table: Table) -> dict[str, Callable[[Table], Figure | None]]:
    """The figures of a table by their names; some come once for each benchmark."""
    known: dict[str, Callable[[Table], Figure | None]] = {}
    for name, entry in FIGURES.items():
        module, _, function = entry.draw.partition(":")
        draw = getattr(importlib.import_module(module), function)
        if entry.each_benchmark:
            known |= {f"{name}-{benchmark}": partial(draw, benchmark=benchmark) for benchmark in table.benchmarks}
        else:
            known[name] = draw
    return known


def draw_table(table: Table, make: Callable[[Table], Figure | None]) -> Figure | None:
    """A figure of a table; None if it has nothing to show."""
    with plt.rc_context(SETTINGS):
        return make(table)


def save(figure: Figure, *paths: Path) -> None:
    """Writes a figure to files and closes it."""
    with plt.rc_context(SETTINGS):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, for all files
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def accuracy(table: Table) -> Figure | None:
    """The accuracy on two tasks after each task."""
    cells, style = views.compared(table), looks(table.cells)
    if not cells:
        return None
    benchmarks = _benchmarks(cells)
    columns = max(len(views.tasks_shown(cell.runs[0].tasks)) for cell in cells)
    figure, grid = _grid(len(benchmarks), columns, 2.6, sharey="row")
    for row, benchmark in zip(grid, benchmarks, strict=True):
        shown = [cell for cell in cells if cell.benchmark == benchmark]
        for axes, task in zip(row, views.tasks_shown(shown[0].runs[0].tasks), strict=False):
            for cell in shown:
                band = views.accuracy(cell)
                if task < len(band.mean):
                    _line(axes, views.Band(band.mean[:, task], band.std[:, task]), cell.name, style[cell.name])
            axes.set_title(f"{benchmark}, task {task + 1}")
        row[0].set_ylabel("test accuracy")
    return _finished(figure, grid, "tasks learned")


def drop(table: Table) -> Figure | None:
    """Each task's drop in accuracy."""
    cells, style = views.compared(table), looks(table.cells)
    if not cells:
        return None
    benchmarks = _benchmarks(cells)
    figure, grid = _grid(1, len(benchmarks), 3.0, sharey="row")
    for axes, benchmark in zip(grid[0], benchmarks, strict=True):
        axes.axhline(0, color="#888888", linewidth=0.8)
        for cell in cells:
            if cell.benchmark == benchmark:
                _line(axes, views.drop(cell), cell.name, style[cell.name], marker=True)
        axes.set_title(benchmark)
    grid[0, 0].set_ylabel("drop in accuracy")
    return _finished(figure, grid, "task")


def used(table: Table) -> Figure | None:
    """The number of experts in use after each task, per layer."""
    cells, style = routed(table), looks(table.cells)
    if not cells:
        return None
    benchmarks, layers = _benchmarks(cells), max(len(cell.runs[0].used) for cell in cells)
    figure, grid = _grid(len(benchmarks), layers, 2.6, sharey=True)
    for row, benchmark in zip(grid, benchmarks, strict=True):
        shown = [cell for cell in cells if cell.benchmark == benchmark]
        for layer, axes in enumerate(row):
            for cell in shown:
                if layer < len(cell.runs[0].used):
                    _line(axes, views.used(cell, layer), cell.name, style[cell.name])
                    axes.axhline(cell.runs[0].used[layer].shape[1], color="#888888", linestyle="--", linewidth=0.8)
            axes.set_title(f"{benchmark}, layer {layer + 1}")
        row[0].set_ylabel("experts in use")
        row[0].set_ylim(bottom=0)
    return _finished(figure, grid, "tasks learned")


def sharing(table: Table) -> Figure | None:
    """How much later tasks share a task's experts, against its drop."""
    found = {(one.benchmark, one.method): one for one in sharings(table)}
    cells = [cell for cell in routed(table) if (cell.benchmark, cell.name) in found and cell.runs[0].tasks > 2]
    if not cells:
        return None
    benchmarks, names = _benchmarks(cells), list(dict.fromkeys(cell.name for cell in cells))
    figure, grid = _grid(len(benchmarks), len(names), 2.8, sharex=True)
    dots = None
    for row, benchmark in zip(grid, benchmarks, strict=True):
        for axes, name in zip(row, names, strict=True):
            for cell in cells:
                if (cell.benchmark, cell.name) == (benchmark, name):
                    x, y = (np.concatenate(part) for part in zip(*map(_dots, cell.runs), strict=True))
                    place = np.concatenate([np.arange(1, run.tasks) for run in cell.runs])
                    dots = axes.scatter(x, y, c=place, cmap="cividis", s=9, alpha=0.8, linewidths=0)
                    one = found[benchmark, name]
                    rho = f"ρ {one.rho.mean:+z.2f}, given place {one.given_position.mean:+z.2f}"
                    axes.set_title(f"{benchmark}\n{name}\n{rho}", fontsize=9)
            axes.set_visible(axes.has_data())
        row[0].set_ylabel("drop in accuracy")
    for axes in grid[-1]:
        axes.set_xlabel("share of its experts that\na later task uses too")
    if dots is not None:
        figure.colorbar(dots, ax=grid, label="task", shrink=0.7)
    return figure


def routing(table: Table, benchmark: str) -> Figure | None:
    """The routing matrix of each layer after the last task."""

    def matrix(run: Run, layer: int) -> np.ndarray:
        return run.final[layer][:, views.claim_order(run, layer)]

    return _matrices(table, benchmark, matrix, "expert, in the order of claims", 2.1, "gate")


def similarity(table: Table, benchmark: str) -> Figure | None:
    """The similarity of tasks in each layer."""
    return _matrices(table, benchmark, lambda run, layer: task_similarity(run.final[layer]), "task", 2.6, "similarity")


def router(table: Table, benchmark: str) -> Figure | None:
    """The routes of a few tasks through the network of one run."""
    cells = [cell for cell in routed(table) if cell.benchmark == benchmark]
    if not cells:
        return None
    run = next(run for run in cells[-1].runs if run.final)
    tasks = sorted({0, 1 % run.tasks, run.tasks - 1})
    figure, grid = _grid(1, len(tasks), 2.6)
    for axes, task in zip(grid[0], tasks, strict=True):
        _route(axes, run, task)
    figure.suptitle(f"{benchmark}, {cells[-1].name}, seed {run.seed}", fontsize=10)
    return figure


def _matrices(
    table: Table, benchmark: str, matrix: Callable[[Run, int], np.ndarray], label: str, height: float, shade: str
) -> Figure | None:
    """A matrix per method and layer, of the first seed that has one."""
    cells = [cell for cell in routed(table) or views.with_routes(table) if cell.benchmark == benchmark][: views.MOST]
    if not cells:
        return None
    runs = [next(run for run in cell.runs if run.final) for cell in cells]
    matrices = [[matrix(run, layer) for layer in range(len(run.final))] for run in runs]
    top = max(float(one.max()) for shown in matrices for one in shown) or 1
    figure, grid = _grid(len(cells), max(map(len, matrices)), height)
    image = None
    for row, cell, shown in zip(grid, cells, matrices, strict=True):
        for layer, axes in enumerate(row):
            axes.grid(visible=False)
            axes.set_visible(layer < len(shown))
            if layer < len(shown):
                rows, columns = shown[layer].shape
                extent = (0.5, columns + 0.5, rows + 0.5, 0.5)
                image = axes.imshow(shown[layer], cmap="Blues", vmin=0, vmax=top, aspect="auto", extent=extent)
                axes.set_title(f"{cell.name}, layer {layer + 1}", fontsize=9)
                axes.set_xlabel(label if cell is cells[-1] else "")
                axes.set_xticks(_ticks(columns))
                axes.set_yticks(_ticks(rows))
        row[0].set_ylabel("task")
    assert image is not None
    figure.colorbar(image, ax=grid, label=shade, shrink=0.5)
    seeds = sorted({run.seed for run in runs})
    figure.suptitle(f"{benchmark}, seed {', '.join(map(str, seeds))}", fontsize=10)
    return figure


def _route(axes: Any, run: Run, task: int) -> None:
    """Input, then per layer the experts and their sum, from below to above."""
    axes.axis("off")
    axes.text(0, -0.55, "input", ha="center", va="top", fontsize=9)
    for layer, gates in enumerate(run.final):
        chosen, height = gates[task, views.claim_order(run, layer)], 2.0 * layer
        places = np.linspace(-1, 1, len(chosen)) if len(chosen) > 1 else np.zeros(1)
        for place, gate in zip(places, chosen, strict=True):
            if gate > 0:
                line = {"color": "#009e73", "linewidth": 0.6 + 5 * gate, "alpha": 0.8, "solid_capstyle": "round"}
                axes.plot([0, place], [height - 0.5, height + 0.3], **line, zorder=1)
                axes.plot([place, 0], [height + 0.3, height + 1.1], **line, zorder=1)
        faces = ["#009e73" if gate > 0 else "white" for gate in chosen]
        size = 500 / max(len(chosen), 8)
        axes.scatter(places, np.full(len(places), height + 0.3), s=size, c=faces, edgecolors="#666666", zorder=2)
        axes.text(0, height + 1.3, "Σ", ha="center", va="center", fontsize=10)
        axes.text(-1, height + 0.6, f"layer {layer + 1}", ha="left", va="bottom", fontsize=8)
    axes.text(0, 2.0 * len(run.final) - 0.4, f"head of task {task + 1}", ha="center", va="bottom", fontsize=9)
    axes.set_xlim(-1.1, 1.1)
    axes.set_ylim(-1.0, 2.0 * len(run.final) + 0.1)


def _dots(run: Run) -> tuple[np.ndarray, np.ndarray]:
    return shares(run), drops(run)[:-1]


def _benchmarks(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.benchmark for cell in cells))


def _grid(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, np.ndarray]:
    size = (WIDTH, 0.7 + height * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    return figure, grid


def _line(axes: Any, band: views.Band, label: str, look: Look, marker: bool = False) -> None:
    place = np.arange(1, len(band.mean) + 1)
    mark = {"marker": look.marker, "markersize": 3.5} if marker else {}
    axes.plot(place, band.mean, label=label, color=look.colour, linestyle=look.dash, **mark)
    axes.fill_between(place, band.mean - band.std, band.mean + band.std, color=look.colour, alpha=0.18, linewidth=0)


def _finished(figure: Figure, grid: np.ndarray, label: str) -> Figure:
    """The figure with labels below and one legend above."""
    lines = {}
    for axes in grid.flat:
        lines |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.set_visible(axes.has_data())
        last = max([1, *(len(line.get_xdata()) for line in axes.lines)])
        axes.set_xticks(_ticks(last))
        axes.set_xlim(1 - 0.02 * last, last * 1.02)
    for axes in grid[-1]:
        axes.set_xlabel(label)
    length = sum(len(name) + 8 for name in lines)
    columns = len(lines) if length <= 120 else max(1, 120 // (max(map(len, lines)) + 8))
    figure.set_figheight(figure.get_figheight() + 0.2 * (-(-len(lines) // columns) - 1))
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=columns, fontsize=9)
    return figure


def _ticks(last: int) -> list[int]:
    """1, and then at most six round numbers."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, last) if last / step <= 6)
    return [1, *range(max(step, 2), last + 1, step)] if step != 2 else [*range(2, last + 1, 2)]
