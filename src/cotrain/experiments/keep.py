"""Keeps a run in its directory: one process at a time, a checkpoint now and then, the result at the end."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from cotrain.data.stream import Stream
from cotrain.engine import Snapshot
from cotrain.errors import Busy, Damaged, Diverged, Invalid, Stopped
from cotrain.experiments import stop
from cotrain.experiments.checkpoint import Checkpoints, Smaller
from cotrain.experiments.config import Config
from cotrain.experiments.files import leftovers, read_bytes, write_bytes
from cotrain.experiments.learner import Learner
from cotrain.experiments.loggers import logger
from cotrain.experiments.result import Result, read, save
from cotrain.experiments.saved import NAME, encode, notes_of
from cotrain.experiments.sealed import LIMIT
from cotrain.experiments.watch import Callback
from cotrain.methods.method import Method


class Keep(NamedTuple):
    """How runs are kept."""

    place: Callable[[Config | None, int], Path]  # the directory of a configuration's seed
    resume: bool = True  # go on with an unfinished run; otherwise it is refused
    every: float = 60.0  # seconds between checkpoints, besides those at the ends of tasks
    forget: bool = True  # remove the checkpoints when there is a result
    learner: bool = False  # keep what was learned
    log: tuple[str, ...] = ()  # what is logged


class Kept:
    """A run, or several at once, that this process may write the files of."""

    def __init__(self, keep: Keep, config: Config | None, seeds: Sequence[int], checkpoints: Checkpoints):
        self.keep, self.config, self.seeds, self.checkpoints = keep, config, seeds, checkpoints
        self.complete = False  # whether there was nothing left to learn

    def start(self, method: Method, stream: Stream, empty: Snapshot) -> Snapshot | None:
        """Where to go on; None: at the beginning. `empty` is the run's snapshot with nothing in it."""
        found, finished = self.checkpoints.all(), (self.checkpoints.directory / "result.json").exists()
        if not self.keep.resume:
            if found and not finished:
                place = str(self.checkpoints.directory)
                raise Invalid("out", place, "it holds an unfinished run: go on with --resume, or choose another")
            self.checkpoints.remove()
        smaller = Smaller(method, stream, self.seeds) if self._may_grow() else None
        snapshot = self.checkpoints.latest(empty, smaller)
        self.complete = snapshot is not None and snapshot.phase == empty.accuracy.shape[1]
        if not self.keep.resume or (smaller is not None and smaller.found):
            self._remove_results()  # of another run, or of fewer tasks
        return snapshot

    def _may_grow(self) -> bool:
        """Whether the tasks stay the same where there are more of them."""
        return self.config is None or getattr(self.config.benchmark.options, "grows", False)

    def _remove_results(self) -> None:
        for seed in self.seeds:
            for name in ("result.json", NAME):
                path = self.keep.place(self.config, seed) / name
                if path.is_file():
                    path.unlink()

    def logs(self, start: Snapshot | None) -> list[Callback]:
        """What writes the logs, which go on where the run does."""
        at = (0, 0) if start is None else (start.phase, start.step)
        places = [self.keep.place(self.config, seed) for seed in self.seeds]
        return [logger(name, places, at) for name in self.keep.log]

    def show(self, snapshot: Snapshot) -> None:
        """Saves a checkpoint when it is time for one; stops if that was asked for."""
        number = stop.asked()
        task_ended = snapshot.event == "evaluated" and snapshot.phase > 0
        if task_ended or (snapshot.event == "trained" and (number is not None or self.checkpoints.due())):
            self.checkpoints.save(snapshot)
        if number is not None:
            raise Stopped(number)

    def finish(self, results: Sequence[Result]) -> None:
        """Writes the results and the learners that are not there yet."""
        for seed, result in zip(self.seeds, results, strict=True):
            place = self.keep.place(self.config, seed)
            if self.keep.learner and result.learner is not None:
                self._keep_learner(result.learner, place)
            if not (self.complete and self._is_there(result, place)):
                save(result, place, self.config, self.checkpoints.about.get("data"))
        self.checkpoints.remove(but=0 if self.keep.forget else 2)

    def _keep_learner(self, learner: Learner, place: Path) -> None:
        """Writes what was learned, if it can be written."""
        if self.complete and self._has_learner(place):
            return
        about = {} if self.config is None else {"config": self.config.record()}
        try:
            write_bytes(place / NAME, encode(learner, about))
        except Invalid as error:
            self.checkpoints.report(f"{error}; what was learned is not kept")

    def _has_learner(self, place: Path) -> bool:
        """Whether a directory has what was learned; what is wrong with it is told."""
        if not (place / NAME).exists():
            return False
        try:
            notes_of(read_bytes(place / NAME, LIMIT), place / NAME)
        except (Damaged, Invalid, OSError) as error:
            self.checkpoints.report(f"{error}; writing it again")
            return False
        return True

    def _is_there(self, result: Result, place: Path) -> bool:
        """Whether a directory has the result of this very run; what is wrong with the one that it has is told."""
        if not (place / "result.json").exists():
            return False
        try:
            found, wanted = read(place), result.record(self.config)
            if any(found.get(name) != wanted[name] for name in ("numerics", "config", "seed")):
                raise Damaged(place / "result.json", "it is of another run")
        except (Damaged, OSError) as error:
            self.checkpoints.report(f"{error}; writing it again")
            return False
        return True


@contextmanager
def kept(
    keep: Keep, config: Config | None, seeds: Sequence[int], about: dict[str, Any], report: Callable[[str], None]
) -> Iterator[Kept]:
    """The run of some seeds at once, for this process alone; signals only ask it to stop.

    Its checkpoints are in the directory of the first.
    """
    places = [keep.place(config, seed) for seed in seeds]
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(_alone(place, report))
        checkpoints = Checkpoints(places[0], about, keep.every, report)
        stack.enter_context(stop.gently())
        try:
            yield Kept(keep, config, seeds, checkpoints)
        except Diverged as error:
            raise Diverged(error.seed, error.task, error.step, error.loss, checkpoints.last) from error


def tidy(place: Path) -> None:
    """Removes what a process that was killed at the very end has left beside a result."""
    if any(place.glob("checkpoint-*")) or any(place.glob(".*")):
        with suppress(Busy), _alone(place, lambda line: None):
            Checkpoints(place, {}).remove()


@contextmanager
def _alone(directory: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Holds the directory's lock, which is the operating system's and ends with the process, however that ends."""
    import fcntl

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".lock"
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(f"{directory}: another process is at work on this run; wait for it") from None
            except OSError as error:
                report(f"{directory} cannot be locked ({error.strerror}): see that no other process works on this run")
            if not (path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))):
                continue  # its last owner has just removed it
            for path_of_part in leftovers(directory):
                path_of_part.unlink(missing_ok=True)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
