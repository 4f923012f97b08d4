"""What can be asked of a learner from the shell: what it predicts, and how much of that is right."""

import csv
import functools
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from cotrain.errors import Invalid

if TYPE_CHECKING:
    from cotrain.experiments.learner import Learner

AT_ONCE = 10  # batches of the size that is tested at once: between two looks at the bar


@dataclass(frozen=True)
class Predict:
    """Predict labels for the examples in files; write them as CSV, with their probabilities."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """a learner's file, or the directory of a run of one seed"""
    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE …")]
    """.npy; .npz (x, or its only array); .csv, one example a line, its values taken as they are; .png, one example
    each; or - for standard input (.npy or CSV)"""
    task: int | None = None
    """the examples' task; tasks count from 0, as in Python and in .npz files (train_x_3); may be left out where there
    is one task, or one head for all and no router that goes by the task"""
    out: Path | None = None
    """the CSV file to write; by default standard output"""
    probabilities: bool = False
    """write the probabilities of all classes too: p0, p1, …"""
    scale: float = 1.0
    """divide the values of CSV by this: 255 for pixels, if the network learned from bytes or images"""
    own: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """module or module:Class of your own, of which the learner is made; it is imported"""

    def __call__(self) -> None:
        if not self.files:
            raise Invalid("files", [], "name at least one, or - for standard input")
        _check_file("--out", self.out, self.files)
        from cotrain.data.inputs import pieces, read_inputs
        from cotrain.evaluation import TEST_BATCH, fitting
        from cotrain.experiments.cache import share_compiled
        from cotrain.experiments.files import write_bytes
        from cotrain.experiments.progress import Display, Done

        share_compiled()
        learner = _learner(self.run, self.own)
        spec, task = learner.network.spec, _any(learner, _task(learner, self.task))
        inputs = read_inputs(self.files, spec.shape, self.scale)
        size = max(min(fitting(learner.network), AT_ONCE * TEST_BATCH), 1)
        done, total, text = 0, sum(map(len, inputs)), io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        every = [f"p{i}" for i in range(spec.classes_of(task))] if self.probabilities else []
        lines.writerow(["example", "label", "probability", *every])
        with Display(["predict"], bars=sys.stderr.isatty()) as display:
            display.show("predict", Done(0, total, ""))
            for names, x in (piece for part in inputs for piece in pieces(part, size)):
                probabilities = learner.probabilities(x, task)
                for name, row in zip(names, probabilities, strict=True):
                    label = int(row.argmax())
                    lines.writerow([name, label, f"{row[label]:.6g}", *(f"{p:.6g}" for p in row if self.probabilities)])
                done += len(names)
                display.show("predict", Done(done, total, f"{done} of {total} examples"))
        if self.out is None:
            _print(text.getvalue())
        else:
            write_bytes(self.out, text.getvalue().encode(errors="backslashreplace"))  # of names that are no text


@dataclass(frozen=True)
class Evaluate:
    """Count how many labels of tests a learner predicts; print a table of its tasks' accuracies."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """a learner's file, or the directory of a run of one seed"""
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.npz")]
    """a NumPy archive with x and y; with x, y and task, a number for each example; or with test_x_0, test_y_0,
    test_x_1, …, as `cotrain run --arrays` takes it"""
    task: int | None = None
    """the task of x and y, or the only one to test of several; tasks count from 0, as in Python and in .npz files
    (test_x_3)"""
    json: Path | None = None
    """write the numbers to this file too"""
    own: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """module or module:Class of your own, of which the learner is made; it is imported"""

    def __call__(self) -> None:
        _check_file("--json", self.json, [self.file])
        from cotrain.data.inputs import checked_test, read_tests
        from cotrain.experiments.cache import share_compiled
        from cotrain.experiments.files import write_text
        from cotrain.experiments.progress import Display, Done

        share_compiled()
        learner = _learner(self.run, self.own)
        tests = read_tests(self.file)
        if None in tests:
            tests = {_task(learner, self.task): tests[None]}
        elif self.task is not None:
            if self.task not in tests:
                raise Invalid("--task", self.task, f"{self.file} has tests of {', '.join(map(str, tests))}")
            tests = {self.task: tests[self.task]}
        spec = learner.network.spec
        parts = {task: checked_test(*test, spec, _any(learner, _task(learner, task))) for task, test in tests.items()}
        found = []
        with Display(["evaluate"], bars=sys.stderr.isatty()) as display:
            for task, (x, y) in parts.items():
                display.show("evaluate", Done(len(found), len(parts), f"task {task}"))
                accuracy = learner.evaluate(x, y, _any(learner, task))
                found.append({"task": task, "examples": len(x), "accuracy": accuracy})
            display.show("evaluate", Done(len(found), len(parts), f"{len(found)} tasks"))
        mean = sum(row["accuracy"] for row in found) / len(found)
        _print_table([*found, {"task": "mean", "examples": sum(len(x) for x, _ in parts.values()), "accuracy": mean}])
        if self.json is not None:
            write_text(self.json, json.dumps({"tasks": found, "mean": mean}, indent=1))


def _learner(run: Path, own: tuple[str, ...]) -> "Learner":
    """The learner of a run, with what is one's own in it."""
    given = [_imported(name) for name in own]
    from cotrain.experiments.saved import load_learner

    try:
        return load_learner(run, own=given)
    except Invalid as error:
        if error.field != "own":
            raise
        raise Invalid("--own", error.value, "the learner is made of it; if you trust it, name it with --own") from error


def _imported(name: str) -> Any:
    """What a reference stands for, on the Python path with the working directory."""
    if "" not in sys.path:
        sys.path.append("")
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        found = functools.reduce(getattr, attribute.split("."), found) if attribute else found
    except Exception as error:  # whatever a module of one's own may do
        reason = " ".join(str(error).split())
        raise Invalid("--own", name, f"it cannot be imported ({reason}); give module or module:Class") from error
    if not isinstance(found, ModuleType | type | FunctionType):
        raise Invalid("--own", name, "give a module, or a class or function of one")
    return found


def _task(learner: "Learner", task: int | None) -> int | None:
    """The task that is meant; None where that makes no difference."""
    network, last = learner.network, learner.tasks - 1
    if task is not None and not 0 <= task <= last:
        raise Invalid("task", task, f"the learner has {last + 1}, from 0 to {last}")
    if task is not None or last == 0:
        return task or 0
    if not network.one_head or (network.router is not None and network.by_task):
        raise Invalid("--task", task, f"say of which task the examples are, from 0 to {last}")
    return None


def _any(learner: "Learner", task: int | None) -> int:
    """The task, or one with all classes."""
    return max(range(learner.tasks), key=learner.network.spec.classes_of) if task is None else task


def _check_file(option: str, path: Path | None, read: Sequence[Path | str]) -> None:
    """Refuses to write where there is something else than a file, or one that is to be read."""
    if path is None or not path.exists():
        return
    if not path.is_file():
        raise Invalid(option, str(path), "name a file")
    if any(Path(file).exists() and path.samefile(file) for file in read):
        raise Invalid(option, str(path), "name another file than what is read")


def _print(text: str) -> None:
    """Prints, for as long as somebody reads it."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "examples", "accuracy")
    for row in rows:
        task = "any" if row["task"] is None else str(row["task"])
        table.add_row(task, str(row["examples"]), f"{row['accuracy']:.4f}")
    Console().print(table)
