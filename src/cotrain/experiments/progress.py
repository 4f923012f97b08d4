"""How far runs are, for a person to see: a line for each that is running."""

from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Done(NamedTuple):
    """How far a run is."""

    steps: int
    total: int
    note: str


class Display:
    """The running runs on standard error, each on its line; those that have ended stay above. Or nothing at all."""

    def __init__(self, wanted: bool):
        name, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
        self.bar = (
            Progress(name, BarColumn(), note, TimeRemainingColumn(), console=Console(stderr=True)) if wanted else None
        )
        self.lines: dict[str, TaskID] = {}

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.bar is not None:
            self.bar.stop()

    def show(self, name: str, done: Done) -> None:
        """Brings a run's line up to date."""
        if self.bar is None:
            return
        if name not in self.lines:
            self.bar.start()  # not before: what is fetched first has a bar of its own
            self.lines[name] = self.bar.add_task(name, total=done.total, note=done.note)
        self.bar.update(self.lines[name], completed=done.steps, note=done.note)

    def end(self, name: str) -> None:
        """Moves a run's line up, to those that have ended; without any that runs, there is no bar."""
        if self.bar is not None and name in self.lines:
            line = self.lines.pop(name)
            note = next(task.fields["note"] for task in self.bar.tasks if task.id == line)
            self.bar.remove_task(line)
            self.bar.console.print(f"{name}: {note}", highlight=False)
            if not self.lines:
                self.bar.stop()
