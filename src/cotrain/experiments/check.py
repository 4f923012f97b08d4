"""Checks what runs have left in a directory: every checksum, and all that holds of files that are sound.

No file is trusted, none is changed, and whatever is found, the others are looked at too.

Axes: T tasks, P phases (T, or 1 if joint), E experts.
"""

import math
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args

import numpy as np

from cotrain.data.npz import read_npz
from cotrain.errors import Damaged, Invalid, check_name, check_positive
from cotrain.experiments import checkpoint, provenance
from cotrain.experiments.config import Config
from cotrain.experiments.files import leftovers, read_bytes, read_record
from cotrain.experiments.result import METRICS, NUMERICS, Result, verify_files
from cotrain.experiments.store import Store
from cotrain.metrics import used_experts
from cotrain.networks.routing import AGGREGATIONS, GATES, SAMPLINGS

WRITTEN = "name one that `cotrain run --out`, `cotrain reproduce` or `cotrain tune` has written"
AGAIN = "the same command runs it again (from its last checkpoint, if there is one)"
MEND_RESULT = f"delete it; {AGAIN}"
MEND_ROUTING = "delete the run's directory and run it again"
MEND_TIMES = "delete it; no number depends on it"
MEND_CHECKPOINT = "delete it; the run goes on from the one before"
MEND_GRID = "delete it; the same `cotrain reproduce` writes it again"
MEND_OLD = "run it again, or use the version that wrote it"
MEND_NEW = "use the version that wrote it"

KINDS = ("result", "routing history", "checkpoint", "grid")
SEED = re.compile(r"seed-(\d+)")
FILES = {"result.json", "routing.npz", "times.json", ".lock"}  # what makes a directory that of a run
KEYS = {"numerics", "config", "seed", *METRICS, "accuracy", "initial_accuracy", "parameters", "files"}
MORE_KEYS = {"software", "data"}  # which the first records did not have
CLOSE = 1e-5  # sums of gates, which are float32
SAME = 1e-9  # metrics


class Wrong(Exception):
    """What is wrong with a file, and how to mend it where that is not as usual."""

    def __init__(self, what: str, mend: str | None = None):
        super().__init__(what)
        self.what, self.mend = what, mend


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


class Sound(NamedTuple):
    """What a result without fault says."""

    config: Config | None
    seed: int
    accuracy: np.ndarray  # [P, T]
    record: dict[str, Any]


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
                _check_times(read_record(place / "times.json"))
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
            sound = _result_of(read_record(path))
            self._check_place(place, sound.config, sound.seed)
            return sound
        return None

    def _check_place(self, place: Path, config: Config | None, seed: int) -> None:
        """A run is where its seed and, in a store, its configuration say."""
        real = self._real(place)
        named = SEED.fullmatch(real.name)
        store = _store_of(real)
        if config is not None and store is not None and (home := store.place(config, seed)) != real:
            raise Wrong(f"it belongs to {home.relative_to(store.root)}", "move it there, or delete it and run it again")
        if named is not None and int(named[1]) != seed:
            raise Wrong(f"its seed is {_short(seed)}", "rename the directory, or delete it and run it again")

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
                _check_routing(arrays, sound)
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
                config, seed = _checkpoint_of(notes, arrays, at)
                self._check_place(place, config, seed)
                if sound is not None and notes.get("config") != sound.record["config"]:
                    raise Wrong("it is of another configuration than the result beside it", "delete one of them")
                reached.append((at, arrays["accuracy"].shape[1]))
        if not reached:
            return None
        (phase, step), phases = max(reached)
        return f"at task {phase + 1}, step {step}" if phase < phases else "with all tasks learned"

    def _check_grid(self, directory: Path, grid: dict[str, Any]) -> None:
        """A grid lists runs that are there, each in the cell of its configuration."""
        _need(grid.keys() == {"scale", "seeds", "tables", "failed"}, "it does not have the entries of a grid")
        seeds, tables, failed = grid["seeds"], grid["tables"], grid["failed"]
        _need(_is_word(grid["scale"]), f"its scale is {_short(grid['scale'])}")
        _need(_is_list_of(seeds, _is_count), f"its seeds are {_short(seeds)}")
        _need(_is_list_of(failed, lambda one: isinstance(one, dict)), f"its failed runs are {_short(failed)}")
        _need(_is_list_of(_values(tables), lambda rows: _is_list_of(rows, _is_row)), "its tables are none")
        listed, wanted = set(), 0
        for row in (row for rows in tables.values() for row in rows):
            wanted += len(seeds)
            for run in row["runs"]:
                place = directory / run
                listed.add(place)
                sound = self.results.get(place)
                if Path(run).is_absolute() or ".." in Path(run).parts:
                    raise Wrong(f"it lists {_short(run)}, which is elsewhere")
                if not (place / "result.json").is_file():
                    self._problem(place, "grid.json lists it, and it is not there", "the same command runs it again")
                elif sound is not None and (sound.config is None or sound.config.options != row["options"]):
                    raise Wrong(f"it lists {_short(run)}, which is of another configuration than its cell")
                elif sound is not None and sound.seed not in seeds:
                    raise Wrong(f"it lists {_short(run)}, which is of another seed than its own")
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


def _result_of(record: dict[str, Any]) -> Sound:
    """What a record says, if all of it can be true."""
    _check_version(record)
    unknown, missing = record.keys() - KEYS - MORE_KEYS, KEYS - record.keys()
    if unknown:
        raise Wrong(f"it has an unknown entry {_short(min(unknown))}, of a newer version perhaps", MEND_NEW)
    _need(not missing, f"it has no {', '.join(sorted(missing))}")
    config = None if record["config"] is None else _config_of(record["config"])
    seed, parameters, rows = record["seed"], record["parameters"], record["accuracy"]
    _need(_is_count(seed), f"its seed is {_short(seed)}")
    _need(_is_count(parameters) and parameters > 0, f"its number of parameters is {_short(parameters)}")
    square = _is_list_of(rows, lambda row: isinstance(row, list) and len(row) == len(rows)) and len(rows) > 0
    _need(square, "its accuracies are not a square matrix")
    accuracy = np.array([_accuracies(row) for row in rows])
    initial = record["initial_accuracy"]
    _need(isinstance(initial, list) and len(initial) == len(rows), "its initial accuracies are not one for each task")
    initial = np.array(_accuracies(initial))
    accuracy = _check_evaluated(accuracy, initial, config)
    _check_metrics(record, Result(seed, accuracy, initial, (), (), parameters, {}))
    if config is not None and config.method == "private":
        _need(config.experts >= len(rows), f"it has {config.experts} private experts for {len(rows)} tasks")
    _check_origin(record, config)
    return Sound(config, seed, accuracy, record)


def _check_version(entries: dict[str, Any]) -> None:
    version = entries.get("numerics")
    if type(version) is not int or version != NUMERICS:
        raise Wrong(f"its numbers are of another version ({_short(version)}, and this one's {NUMERICS})", MEND_OLD)


def _config_of(entries: Any) -> Config:
    """The configuration of a record; what is not in it is as by default."""
    _need(isinstance(entries, dict), f"its configuration is {_short(entries)}")
    kinds = {option.name: option.type for option in fields(Config)}
    for name, value in entries.items():
        if name not in kinds:
            raise Wrong(f"it has an unknown option {_short(name)}, of a newer version perhaps", MEND_NEW)
        _need(_fits(value, kinds[name]), f"its option {name} is {_short(value)}")
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entries.items()
    }
    config = Config(**options)
    try:
        config.check()
        for units in config.hidden:
            check_positive("hidden", units)
        if config.network == "routing-network":
            _check_network(config)
    except Invalid as error:
        raise Wrong(f"its option {error.field} is {_short(error.value)}") from error
    _need(config.lr >= 0, f"its option lr is {_short(config.lr)}")
    return config


def _check_network(config: Config) -> None:
    for name, known in (("sampling", SAMPLINGS), ("gates", GATES), ("aggregation", AGGREGATIONS)):
        check_name(name, getattr(config, name), known)
    for name in ("layers", "experts", "k"):
        check_positive(name, getattr(config, name))
    _need(config.k <= config.experts, f"its option k is {_short(config.k)}, of {_short(config.experts)} experts")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of an option's type."""
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if kind is float:
        return _is_number(value)
    if get_args(kind):  # tuple[int, ...]
        return _is_list_of(value, lambda item: type(item) is int)
    return value is None if kind is NoneType else type(value) is kind


def _accuracies(values: list[Any]) -> list[float]:
    """Numbers of which each is an accuracy, or NaN where there is none."""
    for value in values:
        _need(value is None or (_is_number(value) and 0 <= value <= 1), f"it has an accuracy of {_short(value)}")
    return [math.nan if value is None else float(value) for value in values]


def _check_evaluated(accuracy: np.ndarray, initial: np.ndarray, config: Config | None) -> np.ndarray:
    """The matrix [P, T], if it has numbers exactly where the configuration says; without one, where one could."""
    tasks = len(accuracy)
    if config is not None and config.arrays is None:
        _need(tasks == config.task_count, f"it has {tasks} tasks, and not {_short(config.task_count)}")
    last, seen, every = np.zeros((tasks, tasks), bool), np.tri(tasks, dtype=bool), np.ones((tasks, tasks), bool)
    last[-1] = True
    there = ~np.isnan(accuracy)
    if config is None:
        joint = tasks > 1 and bool((there == last).all())
        shapes, all_tasks = [last, seen, every], not np.isnan(initial).any()
    else:
        joint, all_tasks = config.method == "joint", config.evaluate_all
        shapes = [last if joint else every if all_tasks else seen]
    _need(any((there == shape).all() for shape in shapes), "its accuracies are not of the tasks that were tested")
    _need(bool((np.isnan(initial) != all_tasks).all()), "its initial accuracies are not of the tasks that were tested")
    return accuracy[-1:] if joint else accuracy


def _check_metrics(record: dict[str, Any], result: Result) -> None:
    for name in METRICS:
        found, right = record[name], getattr(result, name)
        if math.isnan(right):
            _need(found is None, f"its {name} is {_short(found)}, and there is none")
        else:
            same = _is_number(found) and abs(found - right) <= SAME
            _need(same, f"its {name} is {_short(found)}, and {right:.6f} by its accuracies")


def _check_origin(record: dict[str, Any], config: Config | None) -> None:
    """The files, the software and the data that a record names."""
    files, software, data = record["files"], record.get("software"), record.get("data")
    _need(isinstance(files, dict) and files.keys() <= {"routing.npz"}, f"its files are {_short(files)}")
    if config is not None:
        routed = config.network == "routing-network" and config.experts > 1
        _need(bool(files) == routed, f"it has {'no' if routed else 'a'} routing history, unlike its network")
    _need(software is None or _is_list_of(_values(software), _is_word), f"its software is {_short(software)}")
    if data is None:
        return
    _need(config is not None and isinstance(data, dict), f"its data are {_short(data)}")
    assert config is not None
    if config.arrays is None:
        _need(data == provenance.data(config), "its data are not those of its benchmark")
    else:
        named = data.get("name") == Path(config.arrays).name
        _need(named and _is_list_of(data.get("sha256"), _is_word), f"its data are {_short(data)}")


def _check_times(times: dict[str, Any]) -> None:
    for name, value in times.items():
        _need(_is_number(value) and value >= 0, f"its time of {_short(name)} is {_short(value)}")


def _check_routing(arrays: dict[str, np.ndarray], sound: Sound) -> None:
    """Per layer: gates [P, T, E] that route, the experts in use [P, E], and the logits [T, E] after the last phase."""
    config, (phases, tasks) = sound.config, sound.accuracy.shape
    layers = len(arrays) // 3 if config is None else config.layers
    _need(len(arrays) == 3 * layers > 0, f"it has {len(arrays)} arrays")
    for layer in range(layers):
        _need({f"{name}_{layer}" for name in ("gates", "used", "logits")} <= arrays.keys(), f"it has no layer {layer}")
        gates, used, logits = (arrays[f"{name}_{layer}"] for name in ("gates", "used", "logits"))
        _need(gates.dtype.kind == logits.dtype.kind == "f" and used.dtype == bool, f"layer {layer} is of another type")
        experts = gates.shape[-1:] if config is None else (config.experts,)
        shapes = (phases, tasks, *experts), (phases, *experts), (tasks, *experts)
        _need((gates.shape, used.shape, logits.shape) == shapes, f"layer {layer} is of another shape")
        _need(bool(np.isfinite(gates).all() and (gates >= 0).all()), f"layer {layer} has gates that are no weights")
        _need(bool(np.isfinite(logits).all()), f"layer {layer} has logits that are no numbers")
        _need(bool((used == used_experts(gates)).all()), f"layer {layer} has other experts in use than its gates say")
        if config is not None:
            with np.errstate(all="ignore"):
                _check_gates(gates, logits.astype(float), config, f"layer {layer}")


def _check_gates(gates: np.ndarray, logits: np.ndarray, config: Config, layer: str) -> None:
    """Gates are the softmax of the k largest logits, among those or among all; private experts have k = 1."""
    k, kind = (1, "chosen") if config.method == "private" else (config.k, config.gates)
    total = gates.sum(axis=-1, dtype=float)
    full = (total >= 1 - CLOSE) if kind == "chosen" else (total > 0)
    _need(bool((full & (total <= 1 + CLOSE)).all()), f"{layer} has gates that do not add up to 1")
    _need(int((gates > 0).sum(axis=-1).max()) <= k, f"{layer} has routes of more than {k} experts")
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(chosen, np.argsort(-logits, axis=1, kind="stable")[:, :k], True, axis=1)
    among = chosen if kind == "chosen" else np.ones_like(chosen)
    expected = np.where(chosen, weights, 0) / np.where(among, weights, 0).sum(axis=1, keepdims=True)
    _need(bool((np.abs(gates[-1] - expected) <= CLOSE).all()), f"{layer} has other gates than its logits say")


def _checkpoint_of(
    notes: dict[str, Any], arrays: dict[str, np.ndarray], at: tuple[int, int]
) -> tuple[Config | None, int]:
    """The configuration and the first seed of a checkpoint, if all that it says can be true."""
    _check_version(notes)
    config = _config_of(notes["config"]) if "config" in notes else None
    seeds, phase, step = (notes.get(name) for name in ("seeds", "phase", "step"))
    _need(_is_list_of(seeds, _is_count) and bool(seeds), f"its seeds are {_short(seeds)}")
    assert isinstance(seeds, list)
    _need(
        _is_list_of([phase, step], _is_count) and (phase, step) == at,
        f"it is at phase {_short(phase)}, step {_short(step)}, and its name says otherwise",
    )
    accuracy = arrays.get("accuracy")
    _need(accuracy is not None and accuracy.dtype.kind == "f" and accuracy.ndim == 3, "it has no accuracies")
    assert accuracy is not None
    runs, phases, tasks = accuracy.shape
    joint = phases != tasks if config is None else config.method == "joint"
    _need(runs == len(seeds) and phases == (1 if joint else tasks) > 0, "its accuracies are not of its seeds and tasks")
    if config is not None and config.arrays is None:
        _need(tasks == config.task_count, f"it has {tasks} tasks, and not {_short(config.task_count)}")
    _need(at[0] < phases or at == (phases, 0), f"it is at phase {at[0]} of {phases}")
    _need(bool((np.isnan(accuracy) | ((accuracy >= 0) & (accuracy <= 1))).all()), "its accuracies are not from 0 to 1")
    parameters = [array for name, array in arrays.items() if name.startswith("state.learner.parameters")]
    _need(len(parameters) > 0, "it has no parameters")
    _need(all(bool(np.isfinite(array).all()) for array in parameters), "its parameters are not all numbers")
    return config, seeds[0]


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def _is_run(name: str, names: set[str]) -> bool:
    return bool(SEED.fullmatch(name) or names & FILES or any(one.startswith("checkpoint-") for one in names))


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and {"benchmark", "method", "options", "runs"} <= row.keys()
        and _is_list_of(row["runs"], lambda run: isinstance(run, str) and "\0" not in run)
        and len(set(row["runs"])) == len(row["runs"])
    )


def _is_list_of(values: Any, holds: Any) -> bool:
    return isinstance(values, list) and all(map(holds, values))


def _values(entries: Any) -> list[Any] | None:
    return list(entries.values()) if isinstance(entries, dict) else None


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    """Whether a value from JSON is a number, which 1e999 and true are not."""
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 1 << 63)


def _is_held(lock: Path) -> bool:
    """Whether a process is at work beside a lock."""
    import fcntl

    try:
        _need(stat.S_ISREG(lock.lstat().st_mode), "it is not a file")
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # which ends right here
    except (BlockingIOError, FileNotFoundError):  # somebody has it, or has just removed it
        return True
    return False


def _read_all(path: Path) -> bytes:
    """A checkpoint's bytes; memory is asked for only as they take."""
    return read_bytes(path, min(path.stat().st_size, checkpoint.LIMIT))


def _store_of(place: Path) -> Store | None:
    """The store that a run is in."""
    for root in (*place.parents[3:4], *place.parents):  # as deep as a store has it, or wherever
        if root.name == "records":
            manifests = (root.parent / "grid.json", root.parent / "journal.log")
            keyed = re.fullmatch("[0-9a-f]{12}", place.parent.name) is not None
            return Store(root) if keyed or any(path.exists() for path in manifests) else None
    return None


def _short(value: Any) -> str:
    return f"{value!r:.60}"


def _count(number: int, kind: str) -> str:
    if number == 1:
        return f"1 {kind}"
    return f"{number} {kind[:-1]}ies" if kind.endswith("y") else f"{number} {kind}s"
