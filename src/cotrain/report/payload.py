"""The numbers that the page draws, small enough to travel with it.

P phases, T tasks, E experts.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from cotrain.report import views
from cotrain.report.palette import looks
from cotrain.report.routes import LEARNED, drops, routed, shares, sharings
from cotrain.report.study import Cell, Run, Study, Table

SEEDS = 5  # of a cell, whose routes travel
BUDGET = 3_000_000  # characters for all routes
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
SYMBOLS = {
    "v": "triangle-down",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "o": "circle",
    "P": "cross",
    "X": "x",
}


def payload(study: Study) -> dict[str, Any]:
    """Per table and benchmark: the cells, and the routes of a handful of seeds as far as they fit."""
    cells = [cell for table in study.tables for cell in views.with_routes(table)]
    routes: dict[int, list[dict[str, Any]]] = {id(cell): [] for cell in cells}
    left = BUDGET
    for place in range(SEEDS):  # all cells have their first seed before one has its second
        for cell in cells:
            runs = [run for run in cell.runs if run.final]
            if place < len(runs):
                made = run_routes(runs[place])
                left -= len(json.dumps(made))
                if left >= 0:
                    routes[id(cell)].append(made)
    return {"tables": [_table(table, routes) for table in study.tables]}


def run_routes(run: Run) -> dict[str, Any]:
    """A run's routes after each phase, row by row as expert, gate in thousandths, …; experts in the order of claims."""
    layers = []
    for layer, gates in enumerate(run.history()):
        place = np.argsort(views.claim_order(run, layer))
        phases, tasks, experts = gates.shape
        learned = [tasks - phases + 1 + phase for phase in range(phases)]
        rows = [[_row(gates[phase, task], place) for task in range(learned[phase])] for phase in range(phases)]
        layers.append({"experts": experts, "phases": rows})
    return {"seed": run.seed, "tasks": run.tasks, "layers": layers}


def _row(gates: np.ndarray, place: np.ndarray) -> list[int]:
    chosen = np.flatnonzero(gates > 0)
    return [int(part) for expert in chosen for part in (place[expert], max(1, round(1000 * float(gates[expert]))))]


def _table(table: Table, routes: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    style, shown = looks(table.cells), {cell.name for cell in views.compared(table)}
    found = {(one.benchmark, one.method): one for one in sharings(table)}
    learned = {id(cell) for cell in routed(table)}
    benchmarks = []
    for benchmark in table.benchmarks:
        cells = []
        for cell in table.of(benchmark):
            look = style[cell.name]
            drawn = {"colour": look.colour, "dash": DASHES[look.dash], "symbol": SYMBOLS[look.marker]}
            made = {"name": cell.name, "seeds": len(cell.runs), "shown": cell.name in shown, **drawn}
            made |= _curves(cell) | {"routes": routes.get(id(cell), [])}
            if id(cell) in learned:
                made["used"] = [_used(cell, layer) for layer in range(len(cell.runs[0].used))]
                if (benchmark, cell.name) in found:
                    one = found[benchmark, cell.name]
                    rho = {"rho": _number(one.rho.mean), "given": _number(one.given_position.mean)}
                    made["sharing"] = rho | _dots(cell.runs)
            cells.append(made)
        benchmarks.append({"name": benchmark, "cells": cells})
    return {"name": table.name, "usual": LEARNED[-1], "benchmarks": benchmarks}


def _curves(cell: Cell) -> dict[str, Any]:
    if not views.in_sequence(cell):
        return {}
    accuracy, drop = views.accuracy(cell), views.drop(cell)
    return {
        "accuracy": {"mean": _lower(accuracy.mean), "std": _lower(accuracy.std)},
        "drop": {"mean": _rounded(drop.mean), "std": _rounded(drop.std)},
    }


def _used(cell: Cell, layer: int) -> dict[str, Any]:
    band = views.used(cell, layer)
    experts = cell.runs[0].used[layer].shape[1]
    return {"mean": _rounded(band.mean), "std": _rounded(band.std), "experts": experts}


def _dots(runs: Sequence[Run]) -> dict[str, Any]:
    points = [(task + 1, run.seed, x, y) for run in runs for task, (x, y) in enumerate(_pairs(run))]
    task, seed, x, y = zip(*points, strict=True) if points else ((), (), (), ())
    return {"task": task, "seed": seed, "x": _rounded(np.array(x)), "y": _rounded(np.array(y))}


def _pairs(run: Run) -> list[tuple[float, float]]:
    return list(zip(shares(run), drops(run)[:-1], strict=True))


def _lower(matrix: np.ndarray) -> list[list[float | None]]:
    """The lower triangle, a column a task: from when it is learned to the end."""
    return [_rounded(matrix[task:, task]) for task in range(len(matrix))]


def _rounded(values: np.ndarray) -> list[float | None]:
    return [_number(float(value)) for value in values]


def _number(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 4)
