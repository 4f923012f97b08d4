"""The runs that are tortured: small ones, of every method on every network, each with an undisturbed reference."""

import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import numpy as np

from cotrain import cli
from cotrain.experiments.config import PARTS, Config, known_names
from cotrain.experiments.grid import run_grid
from cotrain.experiments.sweep import Cell
from torture.child import Ended, attempt

TASKS = 3
LONG = 1200.0  # seconds
SMALL = {"hidden": 8, "layers": 1, "experts": 4, "k": 2, "memory": 20}  # where there are such options
OFTEN = "--resume --chunk 1 --save-every 0"  # a checkpoint after each of some twenty minibatches
MAIN, OTHER, GRID = "private on routing-network", "private on routing-network, adam", "grid"
CASES = {  # those that other parts need come first; they are the quickest
    MAIN: "--method private",
    OTHER: "--method private --optimizer adam",
    GRID: None,
    "cotraining on routing-network": "",
    "cotraining on routing-network, adam": "--optimizer adam",
    "cotraining on routing-network, two seeds at once": "--seeds 2 --at-once True",
    "replay on shared-bottom": "--method replay --network shared-bottom",
    "joint on routing-network": "--method joint",
    "finetune on shared-bottom": "--method finetune --network shared-bottom",
    "replay on routing-network, two seeds": "--method replay --seeds 2",
    "finetune on routing-network, all tasks evaluated": "--method finetune --evaluate-all",
    "joint on shared-bottom": "--method joint --network shared-bottom",
    "cotraining on shared-bottom": "--network shared-bottom",
    "replay on routing-network, momentum": "--method replay --optimizer momentum",
    "replay on shared-bottom, two seeds at once": "--method replay --network shared-bottom --seeds 2 --at-once True",
}


@dataclass
class Tally:
    """What was done, and how it ended."""

    part: str
    kills: int = 0
    identical: int = 0  # of the kills, those after which a run ended as the undisturbed one
    corruptions: int = 0
    detected: int = 0
    trials: int = 0  # others: signals, full disks, clocks, fuzzed inputs
    passed: int = 0
    tracebacks: int = 0
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __add__(self, other: "Tally") -> "Tally":
        summed = (getattr(self, each.name) + getattr(other, each.name) for each in fields(self)[1:])
        return Tally(self.part, *summed)

    def wrong(self, what: str, ended: Ended | None = None) -> None:
        """Notes a problem, with the end of what was printed."""
        said = "" if ended is None else f"; code {ended.code}, it said:\n{ended.said[-3000:]}"
        self.problems.append(f"{self.part}: {what}{said}")

    def look(self, what: str, ended: Ended, codes: tuple[int, ...] = (0,)) -> bool:
        """Whether a program ended with one of these codes and without a traceback."""
        if "Traceback" in ended.said:
            self.tracebacks += 1
            self.wrong(f"{what}: a traceback", ended)
            return False
        if ended.code not in codes:
            self.wrong(f"{what}: wanted code {' or '.join(map(str, codes))}", ended)
            return False
        return True

    def trial(self, what: str, *held: bool) -> None:
        """Counts a trial of which all of this should hold."""
        self.trials += 1
        self.passed += all(held)
        if not all(held):
            self.wrong(f"{what}: {', '.join('held' if one else 'DID NOT HOLD' for one in held)}")


def apart(part: str, work: Callable[[Tally], None]) -> Tally:
    """Does some work in a child, where JAX may start and disks be mounted, and returns what it has counted."""
    with tempfile.NamedTemporaryFile() as file:

        def run() -> int:
            tally = Tally(part)
            work(tally)
            Path(file.name).write_bytes(pickle.dumps(tally))
            return 0

        ended = attempt(run, patience=LONG)
        if ended.code == 0:
            return pickle.loads(Path(file.name).read_bytes())
    tally = Tally(part)
    tally.look("the work", ended)
    return tally


def arrays_of(home: Path) -> Path:
    """The file of tasks, which is made if it is not there."""
    path = home / "tasks" / "tasks.npz"
    if not path.exists():
        path.parent.mkdir(parents=True)
        draws, parts = np.random.default_rng(0), {}
        for task in range(TASKS):
            for part, size in (("train", 60), ("test", 9)):
                parts[f"{part}_x_{task}"] = draws.normal(size=(size, 2, 3)).astype(np.float32)
                parts[f"{part}_y_{task}"] = np.arange(size) % 3
        np.savez(path, **parts)
    return path


def command(case: str, home: Path, out: Path, workers: int = 1) -> list[str]:
    """What a user types to run a case, or to go on with it."""
    chosen = (CASES[case] or "").split()
    names = known_names({"network": _after("--network", chosen), "method": _after("--method", chosen)})
    small = [word for name, size in SMALL.items() if name in names for word in (f"--{name}", str(size))]
    given = f"run {OFTEN} --workers {workers}".split()
    return [*given, *chosen, *small, "--arrays", str(arrays_of(home)), "--out", str(out)]


def _after(option: str, words: list[str]) -> str:
    """What an option was given, or what it is by default."""
    return words[words.index(option) + 1] if option in words else PARTS[option[2:]][1]


def program(case: str, home: Path, out: Path) -> Callable[[], int]:
    """The same as a function, which returns the exit code."""
    if CASES[case] is None:
        return partial(_run_grid, str(arrays_of(home)), out)
    return partial(cli.main, command(case, home, out))


def _run_grid(arrays: str, out: Path) -> int:
    small = {"arrays": arrays, "network": "shared-bottom", "hidden": (8,)}
    configs = {
        "shared bottom": Config(**small, method="finetune"),
        "shared bottom + replay": Config(**small, method="replay", memory=20),
    }
    grid = [Cell("as-the-paper", "toy", label, config) for label, config in configs.items()]
    return len(run_grid(grid, [0, 1], out, report=print, workers=1, chunk=2))


def reference_of(case: str, home: Path) -> Path:
    """Where the undisturbed run of a case is."""
    return home / "reference" / case.replace(" ", "-").replace(",", "")


def run_reference(case: str, home: Path) -> Tally:
    """Runs a case undisturbed."""
    tally, ended = Tally(f"reference, {case}"), attempt(program(case, home, reference_of(case, home)))
    tally.look("the undisturbed run", ended)
    return tally


def content(directory: Path) -> dict[str, bytes]:
    """All files below a directory but those with the times."""
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "times.json")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def differences(found: Path, wanted: Path) -> list[str]:
    """The files that are not the same in two directories."""
    one, other = content(found), content(wanted)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def damaged_files(directory: Path) -> list[str]:
    """What is wrong with the files of a run that was ended somehow; there should be nothing, ever."""
    if not directory.exists():
        return []
    ended = attempt(partial(cli.main, ["check", str(directory)]))  # in a child: to check what was learned takes JAX
    if ended.code == 2 and "there is nothing to check in it" in ended.said:
        return []
    wrong = [line for line in ended.said.splitlines() if line.startswith("problem: ")]
    return wrong or ([] if ended.code == 0 else [f"check ended with {ended.code}: {ended.said}"])
