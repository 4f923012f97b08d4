"""What the routing matrices say: whether near tasks share experts, and whether sharing goes with forgetting.

T tasks, E experts.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from cotrain.metrics import Summary, expert_overlap, summarise, task_similarity
from cotrain.report.statistics import partial_spearman, spearman
from cotrain.report.study import Cell, Run, Table

LEARNED = ("MoE", "MoE + replay", "MoE + replay + co-training")  # the methods whose routes are learned one by one
CONTROLS = ("private", "joint", "progressive", "expert-gate")  # and those whose are not, whatever their network


class Order(NamedTuple):
    """The rank correlation between two tasks' distance |i − j| and the similarity of their routes, over seeds."""

    table: str
    benchmark: str
    method: str
    layer: int  # from 1
    rho: Summary
    each: tuple[float, ...]  # a number per seed, without those in which all pairs are equally similar


class Sharing(NamedTuple):
    """The rank correlation, over tasks, between how much later tasks share their experts and their drop, over seeds."""

    table: str
    benchmark: str
    method: str
    rho: Summary
    given_position: Summary  # what is left of it once the task's place in the sequence is accounted for


def orders(table: Table) -> list[Order]:
    """Every layer of every cell with learned routes."""
    return [_order(table, cell, layer) for cell in routed(table) for layer in range(len(cell.runs[0].final))]


def sharings(table: Table) -> list[Sharing]:
    """Every cell with learned routes."""
    return [_sharing(table, cell) for cell in routed(table) if all(run.in_sequence for run in cell.runs)]


def routed(table: Table) -> list[Cell]:
    """The cells whose runs have learned routes, whatever they are called."""
    return [cell for cell in table.cells if cell.runs and all(r.final for r in cell.runs) and _learned(cell)]


def drops(run: Run) -> Float[np.ndarray, " T"]:
    """How much of each task's accuracy is lost from just after learning it to the end."""
    return np.diagonal(run.accuracy) - run.accuracy[-1]


def shares(run: Run) -> Float[np.ndarray, " T-1"]:
    """The share of each task's experts that a later task uses too: mean over the later tasks and the layers."""
    overlaps = np.mean([expert_overlap(gates) for gates in run.final], axis=0)
    return np.array([overlaps[task, task + 1 :].mean() for task in range(len(overlaps) - 1)])


def records(tables: tuple[Table, ...]) -> dict[str, Any]:
    """Both correlations for JSON, with null for what there is not."""
    distance = [
        {**_named(order), "layer": order.layer, **_numbers("rho", order.rho), "rho_each": list(order.each)}
        for table in tables
        for order in orders(table)
    ]
    overlap = [
        {**_named(one), **_numbers("rho", one.rho), **_numbers("rho_given_position", one.given_position)}
        for table in tables
        for one in sharings(table)
    ]
    return {"distance_and_similarity": distance, "sharing_and_drop": overlap}


def _learned(cell: Cell) -> bool:
    config = cell.runs[0].config
    if config is None:
        return cell.method in LEARNED
    return config.method.name not in CONTROLS and config.flat.get("router") not in ("fixed", "columns")


def _order(table: Table, cell: Cell, layer: int) -> Order:
    each = _present([_task_order(run.final[layer]) for run in cell.runs])
    return Order(table.name, cell.benchmark, cell.name, layer + 1, _summary(each), tuple(each))


def _task_order(gates: Float[np.ndarray, "T E"]) -> float:
    one, other = np.triu_indices(len(gates), k=1)
    return spearman(other - one, task_similarity(gates)[one, other]) if len(one) else float("nan")


def _sharing(table: Table, cell: Cell) -> Sharing:
    some = [run for run in cell.runs if run.tasks > 2]
    pairs = [(shares(run), drops(run)[:-1]) for run in some]
    rho = _present([spearman(share, drop) for share, drop in pairs])
    partial = _present([partial_spearman(share, drop, np.arange(len(drop))) for share, drop in pairs])
    return Sharing(table.name, cell.benchmark, cell.name, _summary(rho), _summary(partial))


def _present(values: list[float]) -> list[float]:
    return [value for value in values if not np.isnan(value)]


def _summary(values: list[float]) -> Summary:
    return summarise(np.array(values)) if values else Summary(np.nan, np.nan, np.nan, np.nan, 0)


def _named(one: Order | Sharing) -> dict[str, Any]:
    return {"table": one.table, "benchmark": one.benchmark, "method": one.method, "seeds": one.rho.seeds}


def _numbers(name: str, summary: Summary) -> dict[str, float | None]:
    numbers = {"mean": summary.mean, "std": summary.std, "low": summary.low, "high": summary.high}
    return {f"{name}_{part}": None if np.isnan(value) else value for part, value in numbers.items()}
