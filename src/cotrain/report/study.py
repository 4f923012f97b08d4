"""What was run, as a report sees it: tables of cells, a cell's runs, and what is missing.

P phases, T tasks, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from cotrain.data.npz import read_npz
from cotrain.errors import Damaged, Invalid
from cotrain.experiments.config import Config
from cotrain.experiments.files import read_record
from cotrain.experiments.paper import METHODS, SCALES, label_of
from cotrain.experiments.result import verify_files
from cotrain.metrics import Summary, summarise, used_experts
from cotrain.report.table import PAPER

FULL_SCALES = (None, "single", "paper")
FULL_EXAMPLES = (None, 60000)
SIZES = {"tasks", "test_examples", "validation", "batch", "rotation_step", "hidden", "layers", "experts", "k", "units"}
SIZES |= {"memory", "memory_batch", "arrays", "one_head", "angles"}  # what the paper says of it, but for examples
NAMED = ("benchmark", "network", "method", "arrays")  # what the row is called, not an option of it
UNREADABLE = (Damaged, OSError, ValueError, KeyError, TypeError)  # a file that is missing, cut short or something else


@dataclass(frozen=True)
class Run:
    """One seed of a cell."""

    path: Path
    seed: int
    config: Config | None  # None for a method or stream that Python made
    accuracy: Float[np.ndarray, "T T"]
    numbers: dict[str, float]  # acc, bwt, learning_accuracy; NaN where there is none
    final: tuple[Float[np.ndarray, "T E"], ...]  # per layer: the routing matrix after the last task; () without router
    used: tuple[Bool[np.ndarray, "P E"], ...]  # per layer: the experts in use after each phase

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return len(self.accuracy)

    @property
    def in_sequence(self) -> bool:
        """Whether tasks were learned one by one, and tested after each."""
        return not np.isnan(np.diagonal(self.accuracy)).any()

    def history(self) -> list[Float[np.ndarray, "P T E"]]:
        """Per layer, the routing matrix after each phase."""
        return _routing(self.path / "routing.npz", self.tasks)[0]


@dataclass(frozen=True)
class Cell:
    """A method on a benchmark."""

    benchmark: str
    method: str
    options: str
    runs: tuple[Run, ...]
    setting: str = ""  # what tells cells with one method and benchmark apart; they are compared within it

    @property
    def name(self) -> str:
        """The method, with what tells it apart from others of the same table and benchmark."""
        return f"{self.method} ({self.setting})" if self.setting else self.method

    @property
    def seeds(self) -> dict[int, Run]:
        """The runs by their seeds."""
        return {run.seed: run for run in self.runs}

    def summary(self, metric: str) -> Summary:
        """A metric over the seeds."""
        if not self.runs:
            return Summary(np.nan, np.nan, np.nan, np.nan, 0)
        return summarise(np.array([run.numbers[metric] for run in self.runs]))

    @property
    def paper(self) -> tuple[float, float] | None:
        """The paper's ACC and BWT."""
        return PAPER.get((self.benchmark, *METHODS[self.method])) if self.method in METHODS else None


@dataclass(frozen=True)
class Table:
    """Cells that are looked at together."""

    name: str
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()  # what is missing or not as it should be
    scale: str | None = None

    @property
    def benchmarks(self) -> list[str]:
        """The benchmarks, in the order of the table."""
        return list(dict.fromkeys(cell.benchmark for cell in self.cells))

    def of(self, benchmark: str) -> list[Cell]:
        """The cells of a benchmark."""
        return [cell for cell in self.cells if cell.benchmark == benchmark]

    def full(self, cell: Cell) -> bool:
        """Whether the cell was run at the size of the paper's experiment."""
        return self.scale in FULL_SCALES and all(is_full(run.config) for run in cell.runs)


@dataclass(frozen=True)
class Study:
    """All that a report is about."""

    tables: tuple[Table, ...]
    failed: tuple[dict[str, str], ...] = ()


@dataclass
class Reader:
    """Reads runs, each once, and remembers what it could not read."""

    root: Path
    problems: list[str] = field(default_factory=list)
    known: dict[Path, Run | None] = field(default_factory=dict)

    def read(self, path: Path) -> Run | None:
        """The run of a directory; None if there is none that can be read."""
        if path not in self.known:
            self.known[path] = self._read(path)
        return self.known[path]

    def _read(self, path: Path) -> Run | None:
        try:
            record = read_record(path / "result.json")
            run = _run(path, record)
        except UNREADABLE as error:
            self.problems.append(f"{self._named(path)}/result.json {_reason(error)}")
            return None
        try:
            verify_files(path, record)
            if not (path / "routing.npz").exists():
                return run
            gates, used = _routing(path / "routing.npz", run.tasks)
        except UNREADABLE as error:
            self.problems.append(f"{self._named(path)}/routing.npz {_reason(error)}")
            return run
        return replace(run, final=tuple(layer[-1] for layer in gates), used=tuple(used))

    def _named(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.name


def _reason(error: Exception) -> str:
    if isinstance(error, Damaged):
        return f"is damaged: {error.reason}"
    return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error!r:.100})"


def read_study(directory: Path) -> Study:
    """The tables of `grid.json`, or one table of all records below the directory where there is none."""
    if not (directory / "grid.json").exists():
        return Study((_table_of_runs(directory),))
    try:
        grid = read_record(directory / "grid.json")
        scale, wanted = grid.get("scale"), grid.get("seeds")
        tables = tuple(_table(directory, str(name), rows, scale, wanted) for name, rows in grid["tables"].items())
        failed = tuple({"run": str(one["run"]), "error": str(one["error"])} for one in grid.get("failed", []))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Invalid("grid.json", f"{error!r:.100}", "write it with `cotrain reproduce`") from error
    return Study(tables, failed)


def is_full(config: Config | None) -> bool:
    """Whether a configuration has the size of the paper's experiment."""
    if config is None:
        return False
    options = config.options
    return options.pop("examples", None) in FULL_EXAMPLES and not options.keys() & SIZES


def _table(
    directory: Path, name: str, rows: Sequence[dict[str, Any]], scale: str | None, wanted: list[int] | None
) -> Table:
    reader, cells = Reader(directory), []
    for row in rows:
        runs = [reader.read(directory / path) for path in row["runs"]]
        options = _options(row.get("options") or {})
        cells.append(Cell(str(row["benchmark"]), str(row["method"]), options, _by_seed(runs)))
    return Table(name, tuple(cells), tuple(reader.problems + _gaps(cells, wanted, scale)), scale)


def _table_of_runs(directory: Path) -> Table:
    """One table of the records below a directory."""
    paths = sorted(path.parent for path in directory.rglob("result.json"))
    if not paths:
        raise Invalid("directory", str(directory), "name one with a grid.json, or with a result.json in it or below")
    reader = Reader(directory)
    runs = [run for path in paths if (run := reader.read(path)) is not None]
    return Table("runs", _grouped(runs), tuple(reader.problems))


def _grouped(runs: Sequence[Run]) -> tuple[Cell, ...]:
    """A cell for each configuration; its name tells what others of its benchmark have otherwise."""
    groups: dict[Config | str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.config or run.path.parent.name, []).append(run)
    cells = sorted(map(_cell, groups.values()), key=_place)
    return tuple(replace(cell, setting=_setting(cell, cells)) for cell in cells)


def _setting(cell: Cell, cells: Sequence[Cell]) -> str:
    """The options of a cell that not all cells of its benchmark share."""
    others = [_changed(other.runs[0].config) for other in cells if other.benchmark == cell.benchmark]
    mine = _changed(cell.runs[0].config)
    return _options({name: value for name, value in mine.items() if any(o.get(name) != value for o in others)})


def _changed(config: Config | None) -> dict[str, Any]:
    """What is not as by default."""
    return {} if config is None else config.told


def _cell(runs: list[Run]) -> Cell:
    config = runs[0].config
    if config is None:
        return Cell("own tasks", runs[0].path.parent.name or "own method", "", _by_seed(runs))
    arrays = config.flat.get("arrays")
    benchmark = config.benchmark.name if arrays is None else Path(arrays).stem
    label = label_of(config)
    return Cell(benchmark, label, _options(_changed(config)), _by_seed(runs))


def _place(cell: Cell) -> tuple[str, int, str, str]:
    """Where a cell of a user's own runs comes in its table: the paper's methods first, in its order."""
    known = list(METHODS)
    return cell.benchmark, known.index(cell.method) if cell.method in known else len(known), cell.method, cell.options


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if name not in NAMED)


def _by_seed(runs: Sequence[Run | None]) -> tuple[Run, ...]:
    """The runs that are there, one for each seed."""
    seeds = {run.seed: run for run in runs if run is not None}
    return tuple(seeds[seed] for seed in sorted(seeds))


def _gaps(cells: Sequence[Cell], wanted: list[int] | None, scale: str | None) -> list[str]:
    """What a table should have and has not; that of a scale of the paper's, all of the paper's cells."""
    seeds = sorted({seed for cell in cells for seed in cell.seeds} | set(wanted or ()))
    notes = []
    for cell in cells:
        missing = [seed for seed in seeds if seed not in cell.seeds]
        if not cell.runs:
            notes.append(f"{cell.benchmark}, {cell.method}: no runs yet.")
        elif missing:
            in_a_row = len(missing) > 2 and missing[-1] - missing[0] == len(missing) - 1
            listed = f"{missing[0]} to {missing[-1]}" if in_a_row else ", ".join(map(str, missing))
            word = "seed" if len(missing) == 1 else "seeds"
            notes.append(
                f"{cell.benchmark}, {cell.method}: {len(cell.runs)} of {len(seeds)} seeds; {word} {listed} missing."
            )
    there = {(cell.benchmark, cell.method) for cell in cells}
    labels = {names: label for label, names in METHODS.items()}
    for benchmark, network, method in PAPER:
        label = labels[network, method]
        if scale in SCALES and (benchmark, label) not in there:
            notes.append(f"{benchmark}, {label}: in the paper's table, not in this one.")
    return notes


def _run(path: Path, record: dict[str, Any]) -> Run:
    numbers = {name: _number(record.get(name)) for name in ("acc", "bwt", "learning_accuracy")}
    accuracy = np.array(record["accuracy"], float)
    if accuracy.ndim != 2 or accuracy.shape[0] != accuracy.shape[1]:
        raise ValueError("the accuracy matrix is not square")
    config = None if record.get("config") is None else Config.read(record["config"])
    return Run(path, int(record["seed"]), config, accuracy, numbers, (), ())


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _routing(path: Path, tasks: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per layer, the gates and the used experts after each phase."""
    file = read_npz(path)
    layers = range(sum(name.startswith("gates_") for name in file))
    gates = [file[f"gates_{layer}"] for layer in layers]
    if any(one.ndim != 3 or one.shape[1] != tasks for one in gates):
        raise ValueError("gates must be phases × tasks × experts")
    used = [
        file[f"used_{layer}"].astype(bool) if f"used_{layer}" in file else used_experts(gates[layer])
        for layer in layers
    ]
    if any(one.shape != (len(layer), layer.shape[2]) for one, layer in zip(used, gates, strict=True)):
        raise ValueError("used experts must be phases × experts")
    return gates, used
