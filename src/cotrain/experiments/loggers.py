"""Logs of runs, written as they go: callbacks that a run makes by name.

`log.csv` is what the other logs follow: they show its lines, so what holds of it when a run goes on holds of them too.
"""

import csv
import importlib
import io
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cotrain.errors import Invalid, check_name
from cotrain.experiments.files import write_bytes
from cotrain.experiments.watch import Callback, Watch

LOGGERS = {
    "csv": "cotrain.experiments.loggers:Csv",
    "tensorboard": "cotrain.experiments.tensorboard_log:TensorBoard",
    "wandb": "cotrain.experiments.wandb_log:WeightsAndBiases",
}
EXTRAS = {"tensorboard", "wandb"}  # logs that take a library of the same name


def check_logs(names: Sequence[str]) -> tuple[str, ...]:
    """The names of logs, if they are some that can be written; with any of them goes the one that they follow."""
    if isinstance(names, str):
        raise Invalid("log", names, "give a list of names, as ['csv']")
    for name in names:
        if check_name("log", name, LOGGERS) in EXTRAS and not _installed(name):
            raise RuntimeError(f"this log needs a library: pip install 'cotrain[{name}]'")
    return tuple(dict.fromkeys(["csv", *names])) if names else ()


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
        self.paths, self.start = [path_of(place) for place in places], start
        self.columns: list[str] = []

    def after_chunk(self, watch: Watch) -> None:
        if not self.columns:
            self._begin(watch)
        for path, measures in zip(self.paths, watch.measures, strict=True):
            line = self._text([{**measures, "task": watch.task, "step": watch.step or ""}])
            try:
                with path.open("a", newline="") as file:
                    file.write(line)
            except OSError as error:  # as of a full disk
                error.filename = str(path)
                raise

    after_task = after_chunk

    def _begin(self, watch: Watch) -> None:
        """Writes the columns' names, and the lines that are still true."""
        network, (phases, tasks) = watch.method.network, watch.snapshot.accuracy.shape[1:]
        layers = range(sum(layer.experts > 1 for layer in network.layers))
        accuracies = ["accuracy", *(f"accuracy/{task}" for task in range(tasks))]
        routing = [f"{name}/{layer}" for name in ("experts", "entropy") for layer in layers]
        scalars = sorted({*watch.snapshot.scalars} - {"loss"})
        self.columns = list(dict.fromkeys(["task", "step", "loss", *scalars, *accuracies, *routing]))
        names = self._text([dict(zip(self.columns, self.columns, strict=True))])
        for path in self.paths:
            true = [row for row in _whole_rows(path) if self._is_before(row, tasks - phases)]
            write_bytes(path, (names + self._text(true)).encode())

    def _text(self, rows: Sequence[dict[str, Any]]) -> str:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n").writerows(rows)
        return text.getvalue()

    def _is_before(self, row: dict[str, Any], first: int) -> bool:
        """Whether what a line tells of was done before the run went on; the first phase ended with task `first`."""
        try:
            phase, step = int(row["task"]) - first, int(row["step"] or 0)
        except (KeyError, ValueError):
            return False  # it is of something else
        return phase < self.start[0] or (phase == self.start[0] and 0 < step <= self.start[1])


class Follower(Callback):
    """A log that shows what `log.csv` has, from its first line on, also where a run goes on."""

    def __init__(self, places: Sequence[Path], start: tuple[int, int]):
        del start
        self.places, self.lines = places, list[Lines]()

    def after_chunk(self, watch: Watch) -> None:
        if not self.lines:
            self.begin(watch)
            self.lines = [Lines(path_of(place)) for place in self.places]
        for seed, lines in enumerate(self.lines):
            for minibatches, numbers in lines.new():
                self.write(seed, minibatches, numbers)

    after_task = after_chunk

    def begin(self, watch: Watch) -> None:
        """Begins a log in each place, in the stead of an earlier one."""
        raise NotImplementedError

    def write(self, seed: int, minibatches: int, numbers: dict[str, float]) -> None:
        """Writes what a line tells; so many minibatches were learned by then, of all tasks."""
        raise NotImplementedError

    def close(self) -> None:
        for lines in self.lines:
            lines.file.close()


class Lines:
    """The lines of a CSV log, as they come."""

    def __init__(self, path: Path):
        self.file = path.open(newline="")
        self.rows = csv.DictReader(self.file)
        self.before = self.step = 0  # minibatches of the tasks that are finished, and of the present one

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Those that were not there before: the minibatches of all tasks so far, and the numbers by name."""
        for row in self.rows:  # at the file's end it stops, and goes on when there is more
            if step := row.pop("step"):
                self.step = int(step)
            else:
                self.before, self.step = self.before + self.step, 0
            yield self.before + self.step, {name: float(value) for name, value in row.items() if value}


def path_of(place: Path) -> Path:
    """The CSV log of a run that is kept there."""
    return place / "log.csv"


def _installed(library: str) -> bool:
    spec = find_spec(library)
    return spec is not None and spec.origin is not None  # otherwise a directory that is called so


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of an earlier log, without one that was cut short."""
    if not path.is_file():
        return []
    text = path.read_bytes().decode(errors="replace")
    try:
        return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))
    except csv.Error:
        return []  # it is no such log
