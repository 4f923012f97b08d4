"""Logs of runs, written as they go: callbacks that a run makes by name."""

import csv
import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotrain.errors import check_name
from cotrain.experiments.files import write_bytes
from cotrain.experiments.watch import Callback, Watch

LOGGERS = {
    "csv": "cotrain.experiments.loggers:Csv",
}


def check_logs(names: Sequence[str]) -> tuple[str, ...]:
    """The names of logs, if they are some."""
    for name in names:
        check_name("log", name, LOGGERS)
    return tuple(dict.fromkeys(names))


def logger(name: str, places: Sequence[Path], start: tuple[int, int]) -> Callback:
    """What writes a log for each seed into its directory; `start` are the phase and step at which the run goes on."""
    module, _, kind = LOGGERS[name].partition(":")
    return getattr(importlib.import_module(module), kind)(places, start)


class Csv(Callback):
    """`log.csv`: a line for each chunk and each task, with the same columns from beginning to end.

    What an earlier process logged past the place where the run goes on is dropped: an interrupted run has the log of
    one that was not.
    """

    def __init__(self, places: Sequence[Path], start: tuple[int, int]):
        self.paths, self.start = [place / "log.csv" for place in places], start
        self.columns: list[str] = []

    def after_chunk(self, watch: Watch) -> None:
        self._write(watch, watch.step)

    after_task = after_chunk

    def _write(self, watch: Watch, step: int) -> None:
        if not self.columns:
            self._begin(watch)
        for path, measures in zip(self.paths, watch.measures, strict=True):
            row = {"task": watch.task, "step": step or "", **measures}
            with path.open("a", newline="") as file:
                csv.DictWriter(file, self.columns, extrasaction="ignore").writerow(row)

    def _begin(self, watch: Watch) -> None:
        """Writes the columns' names, and the lines that are still true."""
        network = watch.method.network
        layers = range(sum(layer.experts > 1 for layer in network.layers))
        accuracies = ["accuracy", *(f"accuracy/{task}" for task in range(network.spec.tasks))]
        routing = [f"{name}/{layer}" for name in ("experts", "entropy") for layer in layers]
        self.columns = ["task", "step", "loss", *sorted({*watch.snapshot.scalars} - {"loss"}), *accuracies, *routing]
        for path in self.paths:
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, self.columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row for row in _rows(path) if self._is_before(row))
            write_bytes(path, text.getvalue().encode())

    def _is_before(self, row: dict[str, Any]) -> bool:
        """Whether what a line tells of was done before the run went on."""
        try:
            task, step = int(row["task"]), row["step"]
            return task < self.start[0] or (task == self.start[0] and 0 < int(step or 0) <= self.start[1])
        except (KeyError, TypeError, ValueError):
            return False  # as of a line that was cut short


def _rows(path: Path) -> list[dict[str, Any]]:
    """The lines of an earlier log."""
    if not path.is_file():
        return []
    with path.open(newline="", errors="replace") as file:
        return list(csv.DictReader(file))
