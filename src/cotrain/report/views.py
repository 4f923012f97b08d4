"""The numbers behind the figures: means and standard deviations over the seeds of a cell.

P phases, T tasks, E experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from cotrain.report.routes import drops
from cotrain.report.study import Cell, Run, Table

COMPARED = ("shared bottom + replay", "MoE + replay", "MoE + replay + co-training", "private")
MOST = 8  # lines that a figure can have


class Band(NamedTuple):
    """A mean over seeds and its standard deviation, which is 0 for one seed."""

    mean: np.ndarray
    std: np.ndarray


def in_sequence(cell: Cell) -> list[Run]:
    """The runs of a cell whose tasks were learned one by one, and are as many as the first run's."""
    runs = [run for run in cell.runs if run.in_sequence]
    return [run for run in runs if run.tasks == runs[0].tasks]


def compared(table: Table) -> list[Cell]:
    """The cells whose curves are compared: those with replay and the control, or all where there are none of them."""
    cells = [cell for cell in table.cells if in_sequence(cell)]
    known = [cell for cell in cells if cell.method in COMPARED]
    names = list(dict.fromkeys(cell.name for cell in known or cells))[:MOST]
    return [cell for cell in known or cells if cell.name in names]


def with_routes(table: Table) -> list[Cell]:
    """The cells that have a router."""
    return [cell for cell in table.cells if any(run.final for run in cell.runs)]


def accuracy(cell: Cell) -> Band:
    """The accuracy matrix."""
    return _band([run.accuracy for run in in_sequence(cell)])


def drop(cell: Cell) -> Band:
    """Each task's drop in accuracy from just after learning it to the end."""
    return _band([drops(run) for run in in_sequence(cell)])


def used(cell: Cell, layer: int) -> Band:
    """The number of experts of a layer in use after each phase."""
    runs = [run.used[layer] for run in cell.runs if len(run.used) > layer]
    return _band([one.sum(axis=1) for one in runs if one.shape == runs[0].shape])


def tasks_shown(tasks: int) -> list[int]:
    """The paper's tasks 1 and 10, or the first and the middle one of fewer tasks."""
    return sorted({0, 9 if tasks > 10 else tasks // 2})


def claim_order(run: Run, layer: int) -> Int[np.ndarray, " E"]:
    """The experts in the order in which tasks claimed them; experts are alike, so their order is free."""
    taken, gates = run.used[layer], run.final[layer]
    first = np.where(taken.any(axis=0), taken.argmax(axis=0), len(taken))
    weight = gates.sum(axis=0)
    middle = (gates * np.arange(len(gates))[:, None]).sum(axis=0) / np.maximum(weight, 1e-9)
    return np.lexsort((np.where(weight > 0, middle, len(gates)), first))


def _band(values: Sequence[Float[np.ndarray, "..."]]) -> Band:
    stacked = np.stack(values)
    spread = stacked.std(axis=0, ddof=1) if len(stacked) > 1 else np.where(np.isnan(stacked[0]), np.nan, 0)
    return Band(stacked.mean(axis=0), spread)
