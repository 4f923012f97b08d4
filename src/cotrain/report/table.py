"""The table of results: ours beside the paper's."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cotrain.errors import Invalid
from cotrain.experiments.config import Config
from cotrain.experiments.result import read
from cotrain.methods import METHODS
from cotrain.metrics import Summary, summarise
from cotrain.networks import NETWORKS

# Table 1 of Collier et al. (2020): (benchmark, network, method) -> ACC and BWT.
PAPER = {
    ("permuted-mnist", "shared-bottom", "finetune"): (0.726, -0.219),
    ("permuted-mnist", "shared-bottom", "replay"): (0.912, -0.057),
    ("permuted-mnist", "routing-network", "finetune"): (0.839, -0.122),
    ("permuted-mnist", "routing-network", "replay"): (0.918, -0.040),
    ("permuted-mnist", "routing-network", "cotraining"): (0.920, -0.038),
    ("rotated-mnist", "shared-bottom", "finetune"): (0.693, -0.269),
    ("rotated-mnist", "shared-bottom", "replay"): (0.920, -0.057),
    ("rotated-mnist", "routing-network", "finetune"): (0.721, -0.250),
    ("rotated-mnist", "routing-network", "replay"): (0.923, -0.038),
    ("rotated-mnist", "routing-network", "cotraining"): (0.929, -0.034),
}
HEADINGS = (
    "benchmark",
    "network",
    "method",
    "seeds",
    "ACC",
    "BWT",
    "just learned",
    "paper's ACC",
    "paper's BWT",
    "options",
)
NAMED = ("benchmark", "network", "method", "arrays")


class Row(NamedTuple):
    """What the seeds of one configuration gave."""

    benchmark: str
    network: str
    method: str
    acc: Summary
    bwt: Summary
    learning_accuracy: Summary
    options: str  # what is not as by default

    @property
    def full(self) -> bool:
        """Whether the paper's numbers are for this configuration."""
        return not self.options

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        paper = PAPER.get((self.benchmark, self.network, self.method)) if self.full else None
        theirs = ("", "") if paper is None else tuple(f"{number:.3f}" for number in paper)
        ours = (_text(summary) for summary in (self.acc, self.bwt, self.learning_accuracy))
        return (self.benchmark, self.network, self.method, str(self.acc.seeds), *ours, *theirs, self.options)


def read_records(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """All `result.json` below the directories."""
    paths = sorted(path for directory in directories for path in directory.rglob("result.json"))
    if not paths:
        raise Invalid("directory", ", ".join(map(str, directories)), "name one with a result.json in it or below")
    return [read(path.parent) for path in paths]


def rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """The records, grouped by configuration, in the paper's order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(json.dumps(record["config"], sort_keys=True), []).append(record)
    table = [_row(group) for group in groups.values()]
    networks, methods = list(reversed(NETWORKS)), list(METHODS)
    return sorted(table, key=lambda r: (r.benchmark, _rank(r.network, networks), _rank(r.method, methods), r.options))


def lines_of(table: Sequence[Row]) -> list[tuple[str, ...]]:
    """The headings and the rows as text, without the columns that are empty."""
    columns = zip(HEADINGS, *(row.cells for row in table), strict=True)
    return list(zip(*(column for column in columns if any(column[1:])), strict=True))


def markdown(table: Sequence[Row]) -> str:
    """The table for a README."""
    headings, *body = lines_of(table)
    lines = [headings, ("---",) * len(headings), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def insert(text: str, table: str) -> str:
    """The text with a new table between its markers."""
    before, start, rest = text.partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- /table -->")
    if not start or not end:
        raise Invalid("into", "no markers", "the file must have <!-- table --> and <!-- /table --> lines")
    return f"{before}{start}{table}\n{end}{after}"


def _row(group: list[dict[str, Any]]) -> Row:
    config = Config.read(group[0]["config"])

    def summary(name: str) -> Summary:
        return summarise(np.array([np.nan if record[name] is None else record[name] for record in group]))

    changed = {name: value for name, value in config.told.items() if name not in NAMED}
    return Row(
        config.flat.get("arrays") or config.benchmark.name,
        config.network.name,
        config.method.name,
        summary("acc"),
        summary("bwt"),
        summary("learning_accuracy"),
        ", ".join(f"{name} {value}" for name, value in changed.items()),
    )


def _rank(name: str, known: Sequence[str]) -> int:
    """Where a name comes: somebody's own come last."""
    return known.index(name) if name in known else len(known)


def _text(summary: Summary) -> str:
    if math.isnan(summary.mean):
        return "–"
    return f"{summary.mean:.3f}" if math.isnan(summary.std) else f"{summary.mean:.3f} ± {summary.std:.3f}"
