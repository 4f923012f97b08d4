"""Keeps a run in its directory: one process at a time, a checkpoint now and then, the result at the end."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from cotrain.engine import Snapshot
from cotrain.errors import Busy, Damaged, Diverged, Invalid, Stopped
from cotrain.experiments import stop
from cotrain.experiments.checkpoint import Checkpoints
from cotrain.experiments.config import Config
from cotrain.experiments.files import leftovers
from cotrain.experiments.result import Result, read, save


class Keep(NamedTuple):
    """How runs are kept."""

    place: Callable[[Config | None, int], Path]  # the directory of a configuration's seed
    resume: bool = True  # go on with an unfinished run; otherwise it is refused
    every: float = 60.0  # seconds between checkpoints, besides those at the ends of tasks
    forget: bool = True  # remove the checkpoints when there is a result


class Kept:
    """A run, or several at once, that this process may write the files of."""

    def __init__(self, keep: Keep, config: Config | None, seeds: Sequence[int], checkpoints: Checkpoints):
        self.keep, self.config, self.seeds, self.checkpoints = keep, config, seeds, checkpoints
        self.complete = False  # whether there was nothing left to learn

    def start(self, like: Snapshot) -> Snapshot | None:
        """Where to go on; None: at the beginning."""
        found, finished = self.checkpoints.all(), (self.checkpoints.directory / "result.json").exists()
        if not self.keep.resume:
            if found and not finished:
                place = str(self.checkpoints.directory)
                raise Invalid("out", place, "it holds an unfinished run: go on with --resume, or choose another")
            self.checkpoints.remove()
        snapshot = self.checkpoints.latest(like)
        self.complete = snapshot is not None and snapshot.phase == like.accuracy.shape[1]
        return snapshot

    def show(self, snapshot: Snapshot) -> None:
        """Saves a checkpoint when it is time for one; stops if that was asked for."""
        number = stop.asked()
        task_ended = snapshot.event == "evaluated" and snapshot.phase > 0
        if task_ended or (snapshot.event == "trained" and (number is not None or self.checkpoints.due())):
            self.checkpoints.save(snapshot)
        if number is not None:
            raise Stopped(number)

    def finish(self, results: Sequence[Result]) -> None:
        """Writes the results that are not there yet."""
        for seed, result in zip(self.seeds, results, strict=True):
            place = self.keep.place(self.config, seed)
            if not (self.complete and self._is_there(result, place)):
                save(result, place, self.config, self.checkpoints.about.get("data"))
        self.checkpoints.remove(but=0 if self.keep.forget else 2)

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
