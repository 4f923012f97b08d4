"""How far runs are, for a person to see: a line for each that is running, and one for all."""

import math
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class Done(NamedTuple):
    """How far a run is."""

    steps: int
    total: int | None  # None: not known yet
    note: str


class Display:
    """The runs on standard error: a bar for each that is running, below those that have ended.

    Without bars, as for a log, only the ends are told, if at all; by default there are bars in a terminal and in a
    notebook. `runs` are their names, or names with what each costs, in any unit, from which the time left is reckoned.
    """

    def __init__(self, runs: Iterable[str] | Mapping[str, float], bars: bool | None = None, ends: bool = False):
        self.costs = dict(runs) if isinstance(runs, Mapping) else dict.fromkeys(runs, 1.0)
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        bars = _is_watched(self.console) if bars is None else bars
        name, note = (TextColumn(f"{{task.{part}}}", markup=False) for part in ("description", "fields[note]"))
        self.bars = Progress(name, BarColumn(), note, console=self.console) if bars else None
        self.ends = ends or bars
        self.running: dict[str, Done] = {}
        self.lines: dict[str | None, TaskID] = {}
        self.ended: dict[str, bool] = {}  # whether it went well
        self.started = time.monotonic()

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.bars is not None:
            if self.lines and self.console.is_jupyter:
                self.bars.refresh()  # in a notebook, the last state is not drawn otherwise
            self.bars.stop()

    def show(self, name: str, done: Done) -> None:
        """Brings a run's line up to date."""
        self.running[name] = done
        if self.bars is None:
            return
        if not self.lines:
            self.bars.start()  # not before: what is fetched first has a bar of its own
        self._line(name, done.steps, done.total, done.note)
        self._line_of_all()

    def end(self, name: str, note: str | None = None, failed: bool = False) -> None:
        """Moves a run's line up, to those that have ended."""
        last = self.running.pop(name, None)
        self.ended[name] = not failed
        note = note if note is not None or last is None else last.note
        if self.bars is not None and name in self.lines:
            self.bars.remove_task(self.lines.pop(name))
            self._line_of_all()
        if self.ends:
            counted = f"[{len(self.ended)}/{len(self.costs)}] " if len(self.costs) > 1 else ""
            left = "" if self.bars is not None or len(self.ended) == len(self.costs) else f"; {self._left()}"
            self.console.print(f"{counted}{name}: {note}{left}", markup=False)

    def say(self, line: str) -> None:
        """Tells something, above the bars."""
        self.console.print(line, markup=False)

    def _line_of_all(self) -> None:
        if len(self.costs) > 1:
            left = "" if len(self.ended) == len(self.costs) else self._left()
            self._line(None, self._done(), sum(self.costs.values()), left)

    def _line(self, name: str | None, done: float, total: float | None, note: str) -> None:
        assert self.bars is not None
        if name not in self.lines:
            self.lines[name] = self.bars.add_task("" if name is None else name, total=total, note=note)
        label = self._counts() if name is None else name
        self.bars.update(self.lines[name], completed=done, note=note, description=label)

    def _counts(self) -> str:
        failed = sum(not well for well in self.ended.values())
        finished = len(self.ended) - failed
        return f"{finished} of {len(self.costs)} finished, {len(self.running)} running, {failed} failed"

    def _done(self) -> float:
        """The cost of what is done."""
        running = self.running.items()
        under_way = sum(self.costs[name] * done.steps / (done.total or math.inf) for name, done in running)
        return sum(self.costs[name] for name in self.ended) + under_way

    def _left(self) -> str:
        done, total = self._done(), sum(self.costs.values())
        if done < 0.01 * total:
            return "time left: not known yet"
        seconds = (time.monotonic() - self.started) * (total - done) / done
        return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


def _is_watched(console: Console) -> bool:
    """Whether there is somebody to see bars: at a terminal, or in a notebook that has what they are made of."""
    return console.file.isatty() or (console.is_jupyter and find_spec("ipywidgets") is not None)
