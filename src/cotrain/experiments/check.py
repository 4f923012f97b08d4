"""Checks what runs have left in a directory: every checksum, and all that holds of files that are sound.

No file is trusted, none is changed, and whatever is found, the others are looked at too.
"""

import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cotrain.data.npz import read_npz
from cotrain.errors import Damaged, Invalid
from cotrain.experiments import checkpoint, saved
from cotrain.experiments.config import Config
from cotrain.experiments.files import leftovers, read_bytes, read_record
from cotrain.experiments.migration import is_old
from cotrain.experiments.result import verify_files
from cotrain.experiments.sound import (
    MEND_NEW,
    Sound,
    Wrong,
    check_routing,
    check_times,
    checkpoint_of,
    is_count,
    is_list_of,
    is_word,
    need,
    result_of,
    short,
    values,
)
from cotrain.experiments.store import Store

WRITTEN = "name one that `cotrain run --out`, `cotrain reproduce` or `cotrain tune` has written"
AGAIN = "the same command runs it again (from its last checkpoint, if there is one)"
MEND_RESULT = f"delete it; {AGAIN}"
MEND_ROUTING = "delete the run's directory and run it again"
MEND_TIMES = "delete it; no number depends on it"
MEND_CHECKPOINT = "delete it; the run goes on from the one before"
MEND_LEARNER = "delete it; a finished run writes it again with --resume, from its last checkpoint"
MEND_GRID = "delete it; the same `cotrain reproduce` writes it again"

KINDS = ("result", "routing history", "checkpoint", "learner", "grid")
SEED = re.compile(r"seed-(\d+)")
FILES = {"result.json", "routing.npz", "times.json", ".lock"}  # what makes a directory that of a run


class Finding(NamedTuple):
    """Something to tell about a file."""

    path: Path
    what: str
    mend: str

    def __str__(self) -> str:
        line = f"{self.path}: {self.what}; {self.mend}"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


@dataclass
class Checked:
    """What came of a check."""

    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)  # what is harmless
    counts: Counter[str] = field(default_factory=Counter)  # of the files that were looked at, by kind

    def __str__(self) -> str:
        counts = ", ".join(_count(self.counts[kind], kind) for kind in KINDS)
        return f"checked {counts}: {_count(len(self.problems), 'problem') if self.problems else 'all is well'}"


def check(directory: Path) -> Checked:
    """Checks a seed's directory, or all that are below a directory, and the grids."""
    if not directory.is_dir():
        raise Invalid("directory", str(directory), WRITTEN)
    checker = _Checker(directory)
    checker.check()
    checked = checker.checked
    if not (checked.problems or checked.notes or checked.counts.total()):
        raise Invalid("directory", str(directory), f"there is nothing to check in it; {WRITTEN}")
    return checked


class _Checker:
    """Goes through a directory and writes down what it finds."""

    def __init__(self, directory: Path):
        self.directory, self.resolved = directory, directory.resolve()
        self.checked = Checked()
        self.results: dict[Path, Sound | None] = {}  # by their directories; None: not sound

    def check(self) -> None:
        grids = []
        for place, names in self._directories():
            if "grid.json" in names:
                grids.append(place)
            with self._telling(place, "see to it that it can be read"):
                if _is_run(self._real(place).name, names):
                    self._check_run(place, names)
                else:
                    self._note_leftovers(place)
            if saved.NAME in names:
                self._check_learner(place)
        for place in grids:
            self.checked.counts["grid"] += 1
            with self._telling(place / "grid.json", MEND_GRID):
                self._check_grid(place, read_record(place / "grid.json"))

    def _directories(self) -> Iterator[tuple[Path, set[str]]]:
        """All directories with the names of what is in them; links may lead anywhere, and are not followed."""
        waiting = [self.directory]
        while waiting:
            place, entries = waiting.pop(), []
            with self._telling(place, "see to it that it can be read"):
                entries = sorted(place.iterdir(), reverse=True)
                for path in entries:
                    if path.is_dir() and path.is_symlink():
                        self._note(path, "it is a link to a directory and was not followed", "check that one by itself")
                    elif path.is_dir():
                        waiting.append(path)
                    elif SEED.fullmatch(path.name):
                        self._problem(path, "it is not a directory", "delete it; the same command runs it again")
            yield place, {path.name for path in entries}

    @contextmanager
    def _telling(self, path: Path, mend: str) -> Iterator[None]:
        """Writes down what is wrong with a file, and lets the check go on."""
        try:
            yield
        except Damaged as error:
            self._problem(error.path, error.reason, mend)
        except Wrong as error:
            self._problem(path, error.what, error.mend or mend)
        except OSError as error:
            self._problem(path, f"it cannot be read ({error.strerror or error})", "see to it that it can, or delete it")
        except Exception as error:  # whatever nobody has thought of: the check goes on
            self._problem(path, f"it makes no sense ({error!r:.100})", mend)

    def _problem(self, path: Path, what: str, mend: str) -> None:
        self.checked.problems.append(Finding(path, what, mend))

    def _note(self, path: Path, what: str, mend: str) -> None:
        self.checked.notes.append(Finding(path, what, mend))

    def _real(self, place: Path) -> Path:
        """A directory's full path, whatever the way to it was called."""
        return self.resolved / place.relative_to(self.directory)

    def _note_leftovers(self, place: Path) -> None:
        for path in leftovers(place):
            self._note(path, "a write was cut short; it is harmless", "removed when the run goes on, or delete it")

    def _check_run(self, place: Path, names: set[str]) -> None:
        if ".lock" in names:
            with self._telling(place / ".lock", "delete it"):
                if _is_held(place / ".lock"):
                    self._note(place, "another process is at work on it; it was not checked", "check it again later")
                    return
                self._note(place / ".lock", "no process holds it; it is harmless", "removed when the run goes on")
        self._note_leftovers(place)
        finished, sound = "result.json" in names, None
        if finished:
            self.results[place] = sound = self._check_result(place)
        if sound is not None:
            self._check_routing(place, names, sound)
        if "times.json" in names:
            with self._telling(place / "times.json", MEND_TIMES):
                check_times(read_record(place / "times.json"))
        elif sound is not None:
            self._note(place / "times.json", "it is missing; it is harmless", "no number depends on it")
        reached = self._check_checkpoints(place, names, sound)
        if finished:
            return
        if reached is not None:
            self._note(place, f"unfinished, {reached}", "go on with --resume (or the same command)")
        elif names & {"routing.npz", "times.json"}:
            self._note(
                place / "result.json", "it is missing, as when a process is killed just before writing it", AGAIN
            )
        elif not any(name.startswith("checkpoint-") for name in names):
            self._note(place, "nothing is kept of this run yet", "the same command runs it")

    def _check_result(self, place: Path) -> Sound | None:
        self.checked.counts["result"] += 1
        path = place / "result.json"
        with self._telling(path, MEND_RESULT):
            sound = result_of(read_record(path))
            self._check_place(place, sound.record["config"], sound.seed)
            return sound
        return None

    def _check_place(self, place: Path, config: dict[str, Any] | None, seed: int) -> None:
        """A run is where its seed and, in a store, its configuration say."""
        real = self._real(place)
        named = SEED.fullmatch(real.name)
        store = _store_of(real)
        if config is not None and store is not None and (home := store.home(config, seed)) != real:
            raise Wrong(f"it belongs to {home.relative_to(store.root)}", "move it there, or delete it and run it again")
        if named is not None and int(named[1]) != seed:
            raise Wrong(f"its seed is {short(seed)}", "rename the directory, or delete it and run it again")

    def _check_routing(self, place: Path, names: set[str], sound: Sound) -> None:
        path = place / "routing.npz"
        if path.name in names or path.name in sound.record["files"]:
            self.checked.counts["routing history"] += 1
        with self._telling(path, MEND_ROUTING):
            verify_files(place, sound.record)
            if path.name in sound.record["files"]:
                try:
                    arrays = read_npz(path)
                except Invalid as error:
                    raise Wrong(error.valid) from error
                check_routing(arrays, sound)
            elif path.name in names:
                raise Wrong("it does not belong to the result beside it", "delete it")

    def _check_checkpoints(self, place: Path, names: set[str], sound: Sound | None) -> str | None:
        """How far the last good one is; None if there is none."""
        reached = []
        for path in sorted(place / name for name in names if name.startswith("checkpoint-")):
            self.checked.counts["checkpoint"] += 1
            with self._telling(path, MEND_CHECKPOINT):
                named = checkpoint.NAME.fullmatch(path.name)
                if named is None:
                    raise Wrong("its name is not that of a checkpoint", "delete it, if it is not yours")
                try:
                    notes, arrays = checkpoint.decode(_read_all(path), path)
                except Invalid as error:
                    raise Wrong(error.valid, MEND_NEW) from error
                at = int(named[1]), int(named[2])
                seed = checkpoint_of(notes, arrays, at)
                self._check_place(place, notes.get("config"), seed)
                if sound is not None and notes.get("config") != sound.record["config"]:
                    raise Wrong("it is of another configuration than the result beside it", "delete one of them")
                reached.append((at, arrays["accuracy"].shape[1]))
        if not reached:
            return None
        (phase, step), phases = max(reached)
        return f"at task {phase + 1}, step {step}" if phase < phases else "with all tasks learned"

    def _check_learner(self, place: Path) -> None:
        self.checked.counts["learner"] += 1
        path, sound = place / saved.NAME, self.results.get(place)
        with self._telling(path, MEND_LEARNER):
            try:
                notes = saved.notes_of(_read_all(path), path)
            except Invalid as error:
                raise Wrong(error.valid, MEND_NEW) from error
            if sound is not None and (notes["seed"], notes.get("config")) != (sound.seed, sound.record["config"]):
                raise Wrong("it is of another run than the result beside it")

    def _check_grid(self, directory: Path, grid: dict[str, Any]) -> None:
        """A grid lists runs that are there, each in the cell of its configuration."""
        need(grid.keys() == {"scale", "seeds", "tables", "failed"}, "it does not have the entries of a grid")
        seeds, tables, failed = grid["seeds"], grid["tables"], grid["failed"]
        need(is_word(grid["scale"]), f"its scale is {short(grid['scale'])}")
        need(is_list_of(seeds, is_count), f"its seeds are {short(seeds)}")
        need(is_list_of(failed, lambda one: isinstance(one, dict)), f"its failed runs are {short(failed)}")
        need(is_list_of(values(tables), lambda rows: is_list_of(rows, _is_row)), "its tables are none")
        listed, wanted = set(), 0
        for row in (row for rows in tables.values() for row in rows):
            wanted += len(seeds)
            for run in row["runs"]:
                place = directory / run
                listed.add(place)
                sound = self.results.get(place)
                if Path(run).is_absolute() or ".." in Path(run).parts:
                    raise Wrong(f"it lists {short(run)}, which is elsewhere")
                if not (place / "result.json").is_file():
                    self._problem(place, "grid.json lists it, and it is not there", "the same command runs it again")
                elif sound is not None and not _is_of(sound.config, row["options"]):
                    raise Wrong(f"it lists {short(run)}, which is of another configuration than its cell")
                elif sound is not None and sound.seed not in seeds:
                    raise Wrong(f"it lists {short(run)}, which is of another seed than its own")
        there = sum(len(row["runs"]) for rows in tables.values() for row in rows)
        if there < wanted:
            self._note(directory / "grid.json", f"{there} of its {wanted} runs are there", "the same command goes on")
        if failed:
            self._note(directory / "grid.json", f"{_count(len(failed), 'run')} failed", "the same command tries again")
        below = directory / "records"
        others = sorted(place for place in self.results if place.is_relative_to(below) and place not in listed)
        if others:
            what = f"{_count(len(others), 'run')} below records not in it, as {others[0].relative_to(directory)}"
            self._note(directory / "grid.json", what, "harmless: of another scale, or no longer wanted")


def _is_of(config: Config | None, options: Any) -> bool:
    """Whether a cell's options are those of a configuration; a cell of the first version has what did not apply too."""
    if config is None or config.options == options:
        return config is not None
    try:
        return is_old(options) and Config.read(options) == config
    except Invalid:
        return False


def _is_run(name: str, names: set[str]) -> bool:
    return bool(SEED.fullmatch(name) or names & FILES or any(one.startswith("checkpoint-") for one in names))


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and {"benchmark", "method", "options", "runs"} <= row.keys()
        and is_list_of(row["runs"], lambda run: isinstance(run, str) and "\0" not in run)
        and len(set(row["runs"])) == len(row["runs"])
    )


def _is_held(lock: Path) -> bool:
    """Whether a process is at work beside a lock."""
    import fcntl

    try:
        need(stat.S_ISREG(lock.lstat().st_mode), "it is not a file")
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # which ends right here
    except (BlockingIOError, FileNotFoundError):  # somebody has it, or has just removed it
        return True
    return False


def _read_all(path: Path) -> bytes:
    """A sealed file's bytes; memory is asked for only as they take."""
    return read_bytes(path, min(path.stat().st_size, checkpoint.LIMIT))


def _store_of(place: Path) -> Store | None:
    """The store that a run is in."""
    for root in (*place.parents[3:4], *place.parents):  # as deep as a store has it, or wherever
        if root.name == "records":
            manifests = (root.parent / "grid.json", root.parent / "journal.log")
            keyed = re.fullmatch("[0-9a-f]{12}", place.parent.name) is not None
            return Store(root) if keyed or any(path.exists() for path in manifests) else None
    return None


def _count(number: int, kind: str) -> str:
    if number == 1:
        return f"1 {kind}"
    return f"{number} {kind[:-1]}ies" if kind.endswith("y") else f"{number} {kind}s"
