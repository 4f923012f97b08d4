"""Kills runs, at any moment and in the middle of writing, until they are done; then compares every byte."""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

import cotrain
from torture.cases import MAIN, Tally, command, damaged_files, differences, program, reference_of
from torture.child import Ended, alive, attempt, until
from torture.faults import killed_in_writing, slow_disk

TRIES = 4  # attempts for each kill that is wanted
POOLED = "replay on routing-network, two seeds"


def torment(case: str, quota: int, home: Path, seed: int) -> Tally:
    """Kills a case's runs."""
    draws, tally = random.Random(f"{seed} {case}"), Tally(f"kills, {case}")

    def run(out: Path, to_be_killed: bool) -> Ended:
        return attempt(program(case, home, out), **(_blow(draws, out) if to_be_killed else {}))

    return _kill_often(run, quota, reference_of(case, home), home, tally)


def torment_workers(quota: int, home: Path, seed: int) -> Tally:
    """Kills worker processes and their parent, which are fresh interpreters here."""
    draws, tally, whole = random.Random(seed), Tally("kills, worker processes and their parent"), home / "pooled"

    def run(out: Path, to_be_killed: bool) -> Ended:
        return _pooled(home, out, partial(_kill_one, draws, out) if to_be_killed else None)

    tally.look("the undisturbed run", run(whole, False))
    return _kill_often(run, quota, whole, home, tally)


def _kill_often(run: Callable[[Path, bool], Ended], quota: int, whole: Path, home: Path, tally: Tally) -> Tally:
    """Kills runs until there were enough kills; each is taken up again until it is done, and compared."""
    tries = TRIES * quota
    while tally.kills < quota and tries > 0:
        with tempfile.TemporaryDirectory(dir=home) as folder:
            out, kills = Path(folder, "out"), 0
            while (tries := tries - 1) > 0 and tally.kills + kills < quota:
                before = newest(out)
                ended = run(out, True)
                if not (ended.killed or "was killed by SIGKILL" in ended.said):
                    break
                kills += 1
                tally.look("a killed run", ended, (-signal.SIGKILL, 1))
                if newest(out) < before and not any(out.rglob("result.json")):
                    tally.wrong(f"after a kill, {before} is lost", ended)
                for told in damaged_files(out):
                    tally.wrong(f"after a kill, {told}", ended)
            else:
                ended = run(out, False)
            unlike = differences(out, whole) if tally.look(f"the run after {kills} kills", ended) else ["all"]
            if unlike:
                tally.wrong(f"after {kills} kills these files differ: {', '.join(unlike)}", ended)
            tally.kills += kills
            tally.identical += 0 if unlike else kills
    if tally.kills < quota:
        tally.wrong(f"only {tally.kills} of {quota} kills came in time")
    return tally


def ask_to_stop(ways: int, home: Path, seed: int) -> Tally:
    """SIGTERM and SIGINT: a run saves its state and stops, or at once if asked twice; it goes on as ever."""
    draws, tally = random.Random(seed), Tally("signals")
    for number, times in ((signal.SIGTERM, 1), (signal.SIGINT, 2), (signal.SIGINT, 1), (signal.SIGTERM, 2))[:ways]:
        what, out, asked = f"{number.name}, {times}×", home / f"signal-{number}-{times}", list[set[str]]()
        slow = partial(slow_disk, 0.02 if times == 1 else 0.5)  # the second comes while a checkpoint is being written
        ask = partial(_ask, out, number, draws.randint(1, 15 if times == 1 else 3), times, asked)
        ended = attempt(program(MAIN, home, out), before=slow, meddle=ask)
        right = tally.look(what, ended, (128 + number,))
        saved = _names(out) == asked[-1] if times == 2 else any(out.rglob("checkpoint-*"))
        told = "stopped; with --resume, the same command goes on from there" in ended.said
        whole, resumed = not damaged_files(out), tally.look(f"after {what}", attempt(program(MAIN, home, out)))
        same = not differences(out, reference_of(MAIN, home))
        tally.trial(
            f"{what} (code, saved or at once, told, whole, resumed, identical)",
            *(right, saved, told, whole, resumed, same),
        )
    return tally


def news(directory: Path, count: int, child: int) -> None:
    """Waits until so many new checkpoints or results have been seen, or the child has ended."""
    known, seen = _names(directory), set[str]()

    def look() -> bool:
        seen.update(_names(directory) - known)
        return len(seen) >= count or not alive(child)

    until(look)


def newest(directory: Path) -> str:
    """The name of the last checkpoint below a directory."""
    return max((path.name for path in directory.rglob("checkpoint-*")), default="")


def _names(directory: Path) -> set[str]:
    return {
        str(Path(folder, name)) for folder, _, names in os.walk(directory) for name in names if not name.startswith(".")
    }


def _blow(draws: random.Random, out: Path) -> dict[str, Any]:
    """How the next attempt is to be killed."""
    if draws.random() < 0.5:
        return {"before": partial(killed_in_writing, draws.random())}
    checkpoints = draws.choice((0, 1, 2, 3, 4, 5, 6))
    return {"meddle": partial(kill, out, checkpoints, draws.uniform(0, 0.03 if checkpoints else 1.0))}


def kill(out: Path, checkpoints: int, delay: float, child: int) -> None:
    """Kills a child a while after so many checkpoints."""
    news(out, checkpoints, child)
    time.sleep(delay)
    if alive(child):
        os.kill(child, signal.SIGKILL)


def _ask(out: Path, number: signal.Signals, checkpoints: int, times: int, asked: list[set[str]], child: int) -> None:
    """Sends signals to a child after so many checkpoints, and notes which files were there."""
    news(out, checkpoints, child)
    for _ in range(times):
        time.sleep(0.1 * len(asked))
        asked.append(_names(out))
        os.kill(child, number)


def _kill_one(draws: random.Random, out: Path, process: int) -> None:
    """Kills a process or one of its workers after some checkpoints."""
    news(out, draws.randint(1, 9), process)
    workers = Path(f"/proc/{process}/task/{process}/children").read_text().split() if alive(process) else []
    if workers:
        os.kill(process if draws.random() < 0.5 else int(draws.choice(workers)), signal.SIGKILL)


def _pooled(home: Path, out: Path, meddle: Callable[[int], None] | None) -> Ended:
    """Runs two seeds as a user does, on two worker processes, from a copy of the package, which no one changes."""
    package = home / "package"
    if not package.exists():
        shutil.copytree(Path(cotrain.__file__).parent, package / "cotrain")
    code = "from cotrain.cli import main; raise SystemExit(main())"
    compiled = jax.config.values["jax_compilation_cache_dir"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": compiled, "PYTHONPATH": str(package)}
    arguments = [sys.executable, "-c", code, *command(POOLED, home, out, workers=2)]

    def run() -> int:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        os.execve(sys.executable, arguments, environment)

    return attempt(run, meddle=meddle)
