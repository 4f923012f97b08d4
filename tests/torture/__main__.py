"""Runs all of it on all cores, tells how it went, and ends with 0 only if nothing was lost or went unnoticed."""

import argparse
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

import fuzz
import jax

from cotrain.experiments import provenance
from torture.cases import CASES, Tally, arrays_of, run_reference
from torture.child import attempt, end_with_parent
from torture.commands import damage_and_type, scenes
from torture.kills import ask_to_stop, torment, torment_workers
from torture.learners import METHODS, run_reference_learner, torment_learner
from torture.readers import LEARNERS, damage_and_read, data_in, targets
from torture.trouble import OTHERS, spoil_disks

PER_CASE = 3  # kills, at least
NEEDED = 3  # cases, for the other parts
SLOWEST = 1800.0  # seconds for any one task

Task = Callable[[], Tally]


def main() -> int:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of runs, and as many of processes that feed learners")
    parser.add_argument("--corruptions", type=int, default=500, help="of runs' files, and as many of learners'")
    parser.add_argument("--fuzz-seconds", type=float, default=20, help="for each reader")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    if sys.platform != "linux":
        sys.exit("torture: it takes Linux to fork, pin, kill and mount like this")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cotrain-torture-", ignore_cleanup_errors=True) as folder:
        say(f"seed {options.seed}, {len(cores())} cores, {folder}")
        tempfile.tempdir, home = folder, Path(folder)
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
        provenance.software()  # asks git; once, for all children
        arrays_of(home)
        data_in(home)
        with workers() as pool:
            cases = list(CASES)[: max(NEEDED, options.kills // PER_CASE)]
            references = [partial(run_reference, case, home) for case in cases]
            parts = done(pool, references + [partial(run_reference_learner, kind, home) for kind in METHODS])
            parts |= done(pool, tasks(cases, options, home))
    total = sum(parts.values(), Tally("all"))
    say(f"seed {options.seed}, {time.monotonic() - start:.0f} s; in all:")
    for part in parts.values():
        say(told(part))
    print(
        f"torture: {total.kills} kills, {total.identical} identical; {total.corruptions} corruptions, "
        f"{total.detected} detected, {total.tracebacks} tracebacks"
    )
    return int(bool(total.problems))


def stop(number: int, _frame: FrameType | None) -> None:
    """Ends it; what it has made is removed on the way out."""
    say(f"stopped by {signal.Signals(number).name}")
    sys.exit(128 + number)


def tasks(cases: list[str], options: argparse.Namespace, home: Path) -> Iterator[Task]:
    """All that there is to do, in parts of about a minute."""
    seed, in_pool, thorough = options.seed, options.kills // 30, options.kills >= 100
    if in_pool:
        yield partial(torment_workers, in_pool, home, seed)
    yield partial(ask_to_stop, 4 if thorough else 2, home, seed)
    yield partial(spoil_disks, 3 if thorough else 1, home, seed)
    for i, case in enumerate(cases):
        yield partial(torment, case, (options.kills - in_pool + i) // len(cases), home, seed)
    for i, kind in enumerate(METHODS):
        yield partial(torment_learner, kind, (options.kills + i) // len(METHODS), home, seed)
    for trouble in OTHERS[: 4 if thorough else 2]:
        yield partial(trouble, home, seed)
    played, read = list(scenes(home)), [name for name in targets(home) if name not in LEARNERS]
    typed = options.corruptions // 10
    for i, name in enumerate(played):
        if count := (typed + i) // len(played):
            yield partial(damage_and_type, name, count, home, seed)
    for i, name in enumerate(read):
        yield partial(damage_and_read, name, (options.corruptions - typed + i) // len(read), home, seed)
    for i, name in enumerate(LEARNERS):
        yield partial(damage_and_read, name, (options.corruptions + i) // len(LEARNERS), home, seed)
    for name in fuzz.readers(home):
        yield partial(fuzz_reader, name, options.fuzz_seconds, seed)


def fuzz_reader(name: str, seconds: float, seed: int) -> Tally:
    """Throws damaged files at a reader for a while."""

    def run() -> int:
        tempfile.tempdir = None  # what is found is kept
        with tempfile.TemporaryDirectory() as folder:
            return int(fuzz.fuzz(name, fuzz.readers(Path(folder))[name], seconds, seed) > 0)

    tally, ended = Tally(f"fuzz, {name}"), attempt(run, patience=seconds + 60)
    if counted := re.search(r"(\d+) inputs.* (\d+) findings", ended.said):
        tally.trials, tally.passed = int(counted[1]), int(counted[1]) - int(counted[2])
    tally.look("the fuzzer", ended)
    return tally


def done(pool: Pool, tasks: Iterable[Task]) -> dict[str, Tally]:
    """Does tasks on all cores, tells of each, and returns the sum of each part."""
    coming, parts = pool.imap_unordered(call, tasks), {}
    with suppress(StopIteration):
        while True:
            tally, seconds = coming.next(SLOWEST)
            say(f"{told(tally)} ({seconds:.0f} s)")
            for problem in tally.problems:
                say(f"PROBLEM: {problem}")
            part = tally.part.partition(",")[0]
            parts[part] = parts.get(part, Tally(part)) + tally
    return parts


def told(tally: Tally) -> str:
    """A line about what was counted."""
    counts = {"kills": "identical", "corruptions": "detected", "trials": "passed"}
    counted = ((getattr(tally, what), what, getattr(tally, well), well) for what, well in counts.items())
    parts = [f"{many} {what}, {good} {well}" for many, what, good, well in counted if many]
    parts += [*tally.notes, *([f"{len(tally.problems)} PROBLEMS"] if tally.problems else [])]
    return f"{tally.part}: {'; '.join(parts) or 'done'}"


def call(task: Task) -> tuple[Tally, float]:
    start = time.monotonic()
    return task(), time.monotonic() - start


def workers() -> Pool:
    """A process on each core, with all imported and no JAX started, which forks children."""
    ours = multiprocessing.get_context("fork").SimpleQueue()
    for core in cores():
        ours.put(core)
    return multiprocessing.get_context("fork").Pool(len(cores()), settle, (ours,))


def settle(ours: "SimpleQueue[int]") -> None:
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's to end all
    os.sched_setaffinity(0, {ours.get()})


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def say(line: str) -> None:
    print(f"torture: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
