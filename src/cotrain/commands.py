"""What `cotrain` can be told to do. Printing only; what is heavy is imported when it is needed."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from cotrain.errors import Invalid, check_name, check_positive
from cotrain.experiments.paper import BENCHMARKS as PAPER_BENCHMARKS
from cotrain.experiments.paper import GRID, SCALES
from cotrain.experiments.paper import METHODS as PAPER_METHODS

if TYPE_CHECKING:
    from cotrain.experiments.config import Config


@dataclass(frozen=True)
class Run:
    """Train a method on a benchmark, over seeds; print a table and write the records."""

    seeds: int = 1
    """number of seeds"""
    first_seed: int = 0
    """the first of them"""
    out: Path | None = None
    """directory for what is kept of each seed: seed-N/result.json, routing.npz, log.csv, learner, checkpoints"""
    resume: bool = False
    """go on with the unfinished runs there, to the bit, also with more --tasks; finished ones are not run again"""
    keep_learner: bool = True
    """keep what was learned (learner.safetensors), to predict and to go on with: as large as a checkpoint, which at the
    paper's sizes is 1.3 MB of parameters and 3.1 MB for a memory of 1,000 images"""
    log: str = "csv"
    """logs to write with --out: csv, tensorboard, wandb, several with commas between them, or none"""
    save_every: float = 60.0
    """seconds between checkpoints, besides those at the ends of tasks"""
    data_dir: Path | None = None
    """directory with the data set's files, if you have them"""
    chunk: int | None = None
    """minibatches between two looks at the clock, or as many as 32 MB hold; by default thousands; changes no number"""
    workers: int | None = None
    """worker processes; by default one per core, at most one per seed; 1 runs in this process"""
    at_once: bool | None = None
    """run all seeds in one program; by default on accelerators, not on CPUs"""

    def __call__(self, config: "Config") -> None:
        from cotrain.experiments.continued import continued
        from cotrain.experiments.run import run_config, seed_directory
        from cotrain.report.table import rows

        check_positive("seeds", self.seeds)
        if self.chunk is not None:
            check_positive("chunk", self.chunk)
        if self.first_seed < 0:
            raise Invalid("first_seed", self.first_seed, "choose a whole number of at least 0")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise Invalid("out", str(self.out), "name a directory")
        if self.resume and self.out is None:
            raise Invalid("resume", self.resume, "name the directory of the runs with --out")
        if not self.save_every >= 0:
            raise Invalid("save_every", self.save_every, "choose a number of at least 0")
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        options = {"chunk": self.chunk, "workers": self.workers, "at_once": self.at_once}
        options |= {"resume": self.resume, "every": self.save_every, "keep_learner": self.keep_learner}
        options |= {"log": [] if self.log == "none" else self.log.split(",")}
        if self.resume and self.out is not None:
            config = continued(config, [seed_directory(self.out, config, seed) for seed in seeds])
        results = run_config(config, seeds, self.out, self.data_dir, _say, **options)
        _print_table(rows([result.record(config) for result in results]))
        if self.out is not None:
            _say(f"records: {self.out}")


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's grid, twice: as the paper has it and tuned; write its table, figures and a page."""

    scale: Literal["quick", "single", "paper"] = "quick"
    """a tenth of the examples and one seed; all of them and one seed; or all of them and the paper's 15 seeds"""
    out: Path | None = None
    """directory for records and report; by default runs/SCALE"""
    data_dir: Path | None = None
    """directory with the data set's files, if you have them"""
    workers: int | None = None
    """worker processes; by default one per core, at most one per run; 1 runs in this process"""

    def __call__(self) -> None:
        scale = SCALES[self.scale]
        sizes = {} if scale.examples is None else {"examples": scale.examples}
        out = self.out or Path("runs") / self.scale
        Sweep(GRID, scale.seeds, out, self.data_dir, self.workers).run(self.scale, **sizes)


@dataclass(frozen=True)
class Sweep:
    """Run a product or a list of options over seeds, as a file says; write tables, figures and a page."""

    file: Annotated[Path, tyro.conf.Positional]
    """a TOML file with options, [product] and [[runs]] (docs/design.md); the paper's grid is one"""
    seeds: int | None = None
    """number of seeds; by default what the file says, or 1"""
    out: Path | None = None
    """directory for records and report; by default runs/NAME of the file; the same command goes on where it was"""
    data_dir: Path | None = None
    """directory with the data set's files, if you have them"""
    workers: int | None = None
    """worker processes; by default one per core, at most one per run; 1 runs in this process"""

    def __call__(self) -> None:
        self.run(None)

    def run(self, scale: str | None, **options: Any) -> None:
        """Runs it at a scale of the paper's, with some options in the place of the file's."""
        from cotrain.experiments.grid import run_grid
        from cotrain.experiments.sweep import read_sweep
        from cotrain.report.write import is_fresh

        sweep, out = read_sweep(self.file, **options), self.out or Path("runs") / self.file.stem
        seeds = sweep.seeds if self.seeds is None else range(check_positive("seeds", self.seeds))
        how = {"scale": scale, "data_dir": self.data_dir, "report": _say, "workers": self.workers}
        failed = run_grid(sweep.cells, seeds, out, **how)
        if is_fresh(out):
            _print_results(out)
            _say(f"report: {out / 'index.html'}")
        else:
            Report(out)()
        if failed:
            raise RuntimeError(f"{len(failed)} runs failed; the same command tries them again")


@dataclass(frozen=True)
class Report:
    """Write the report of a directory of runs: tables, statistical tests, figures, and a page for the browser."""

    directory: Annotated[Path, tyro.conf.Positional]
    """what `cotrain reproduce` or `cotrain run --out` has written"""
    out: Path | None = None
    """where to write it; by default there"""
    into: Path | None = None
    """write the results into this file too, between <!-- table --> and <!-- /table -->"""

    def __call__(self) -> None:
        from cotrain.report.readme import readme
        from cotrain.report.study import read_study
        from cotrain.report.table import insert
        from cotrain.report.write import write_report

        _print_results(self.directory)
        _say("writing the report …")
        [page] = [file for file in write_report(self.directory, self.out) if file.name == "index.html"]
        if self.into is not None:
            self.into.write_text(insert(self.into.read_text(), readme(read_study(self.directory))))
        _say(f"report: {page}")


@dataclass(frozen=True)
class Tune:
    """Search the options of each method of the paper's grid, on seeds and images that serve no reported run."""

    benchmarks: tuple[str, ...] = PAPER_BENCHMARKS
    """where to search"""
    methods: tuple[str, ...] = tuple(PAPER_METHODS)
    """for which methods of the grid"""
    trials: int = 16
    """trials of each method on each benchmark"""
    out: Path = Path("runs/tune")
    """directory for the search's journal and records; the same command goes on where it was"""
    into: Path = Path("tuned.json")
    """file for the search space, the budget and what was found"""
    data_dir: Path | None = None
    """directory with the data set's files, if you have them"""
    workers: int | None = None
    """worker processes; by default one per core"""

    def __call__(self) -> None:
        if importlib.util.find_spec("optuna") is None:
            raise RuntimeError("cotrain tune needs Optuna: pip install 'cotrain[tune]'")
        from cotrain.experiments.tune import Budget, save, tune

        for field, known in (("benchmarks", PAPER_BENCHMARKS), ("methods", PAPER_METHODS)):
            for name in getattr(self, field):
                check_name(field, name, known)
        budget = Budget(trials=check_positive("trials", self.trials))
        options = {"workers": self.workers, "data_dir": self.data_dir, "bars": sys.stderr.isatty(), "report": _say}
        found = tune(self.benchmarks, self.methods, self.out, budget, **options)
        save(found, self.into)
        for benchmark, methods in found["found"].items():
            for method, best in methods.items():
                print(f"{benchmark}, {method}: {best['validation_acc']:.4f} with {best['options']}")


@dataclass(frozen=True)
class Data:
    """Fetch and verify data sets."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ("mnist",)
    """mnist, fashion-mnist"""
    data_dir: Path | None = None
    """directory with the files, if you have them"""

    def __call__(self) -> None:
        from cotrain.data.fetch import load

        for name in self.names:
            dataset = load(name, self.data_dir, _say)
            print(f"{name}: {len(dataset.train_x)} training and {len(dataset.test_x)} test images, verified")


@dataclass(frozen=True)
class Table:
    """Print the table of the records below some directories, as Markdown."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """where to look for result.json"""
    into: Path | None = None
    """write it into this file instead, between <!-- table --> and <!-- /table -->"""

    def __call__(self) -> None:
        from cotrain.report.table import insert, markdown, read_records, rows

        records = read_records(self.directories)
        table = markdown(rows(records))
        if self.into is None:
            print(table)
        else:
            self.into.write_text(insert(self.into.read_text(), table))


@dataclass(frozen=True)
class Check:
    """Verify all files of a directory of runs: checksums, and that what they say can be true. Changes nothing."""

    directory: Annotated[Path, tyro.conf.Positional]
    """what `cotrain run --out`, `cotrain reproduce` or `cotrain tune` has written"""

    def __call__(self) -> None:
        from cotrain.experiments.check import check

        checked = check(self.directory)
        for note in checked.notes:
            print(f"note: {note}")
        for problem in checked.problems:
            print(f"problem: {problem}")
        if checked.problems:
            raise RuntimeError(str(checked))
        print(checked)


@dataclass(frozen=True)
class Bench:
    """Measure the speed beside PyTorch, Avalanche and BLAS, in one run; needs a clone of the repository."""

    quick: bool = False
    """fewer and shorter rounds: all of it in under three minutes"""
    json: Path | None = None
    """write every figure that was measured to this file"""
    figure: Path = Path("bench.png")
    """draw the figure here"""
    into: Path | None = None
    """write the tables into this file, between <!-- table --> and <!-- /table -->"""
    claims: Path | None = None
    """renew the ratios in this file, wherever it has one as in 3.0×<!-- shared_bottom_vs_torch -->"""
    read: Path | None = None
    """show the figures of this file, written with --json, instead of measuring"""

    def __call__(self) -> None:
        import json

        clone = Path(__file__).parents[2]
        if not (clone / "benchmarks" / "bench.py").exists():
            raise RuntimeError("cotrain bench needs a clone of the repository, with its benchmarks directory")
        sys.path.insert(0, str(clone))
        from benchmarks.bench import bench
        from benchmarks.show import claims, draw, markdown, tables
        from cotrain.report.table import insert

        figures = bench(self.quick) if self.read is None else json.loads(self.read.read_text())
        if self.json is not None:
            self.json.write_text(json.dumps(figures, indent=1) + "\n")
        for title, lines in tables(figures):
            _print_grid(lines, title)
        draw(figures, self.figure)
        _say(f"figure: {self.figure}")
        if self.into is not None:
            self.into.write_text(insert(self.into.read_text(), markdown(figures)))
        if self.claims is not None:
            self.claims.write_text(claims(self.claims.read_text(), figures))


@dataclass(frozen=True)
class List:
    """List all that can be chosen by name: benchmarks, networks, routers, methods, optimizers; protocols."""

    def __call__(self) -> None:
        from cotrain.choice import entry_of
        from cotrain.experiments.config import TABLES
        from cotrain.experiments.protocols import PROTOCOLS

        for kind, table in TABLES.items():
            print(f"{kind}:")
            for name in table:
                print(f"  {name:24} {entry_of(kind, name, table).__doc__}")
        print("protocol:")
        for name, protocol in PROTOCOLS.items():
            print(f"  {name:24} {protocol.about}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _print_table(table: list) -> None:
    from cotrain.report.table import lines_of

    _print_grid(lines_of(table))


def _print_results(directory: Path) -> None:
    """The results' tables, without intervals: those, tests and the rest are in the report."""
    from cotrain.report.sheets import results
    from cotrain.report.study import read_study

    for table in read_study(directory).tables:
        sheet = results(table)
        kept = [i for i, heading in enumerate(sheet.headings) if "95 %" not in heading]
        _print_grid([[line[i] for i in kept] for line in (sheet.headings, *sheet.lines)], sheet.title)
        for note in sheet.notes:
            print(note)


def _print_grid(lines: Sequence[Sequence[str]], title: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    headings, *body = lines
    grid = Grid(*headings, title=title, title_justify="left")
    for line in body:
        grid.add_row(*line)
    console = Console()
    Console(width=max(console.width, 140) if not console.is_terminal else None).print(grid)
