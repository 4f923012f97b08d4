"""Kills processes that feed a learner and save it: what is found is what was saved last, and goes on."""

import os
import random
import re
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax

import cotrain
from torture.cases import TASKS, Tally, arrays_of
from torture.child import Ended, alive, attempt, until
from torture.faults import killed_in_writing
from torture.kills import TRIES

NAME, BATCH = "mine.safetensors", 10
METHODS = ("cotraining", "adam")


def torment_learner(kind: str, quota: int, home: Path, seed: int) -> Tally:
    """Kills processes that feed a learner until there were enough kills, beginning anew whenever all is learned."""
    draws, tally, whole = random.Random(f"{seed} {kind}"), Tally(f"kills of learners, {kind}"), reference_of(kind, home)
    tries = TRIES * quota
    while tally.kills < quota and tries > 0:
        with tempfile.TemporaryDirectory(dir=home) as folder:
            saved, done = 0, False
            while not done and (tries := tries - 1) > 0:
                to_be_killed = tally.kills < quota
                ended = attempt(partial(feed, kind, home, Path(folder)), **_blow(draws, folder) if to_be_killed else {})
                done = not ended.killed
                tally.kills += ended.killed
                if not tally.look("feeding", ended, (-signal.SIGKILL,) if ended.killed else (0,)):
                    break
                found = _number(Path(folder, NAME), whole)
                known = max([saved, *_told(ended)])
                tally.identical += ended.killed and known <= found <= known + 1
                if not known <= found <= known + 1 or (done and found != len(list(whole.iterdir()))):
                    tally.wrong(f"number {known} was saved, and number {found} was found", ended)
                saved = found
    if tally.kills < quota:
        tally.wrong(f"only {tally.kills} of {quota} kills came in time")
    return tally


def feed(kind: str, home: Path, place: Path, each: Path | None = None) -> int:
    """Goes on with the learner in a directory, some minibatches at a time; saves it after each, and tells which."""
    path = place / NAME
    learner = cotrain.load_learner(path) if path.exists() else cotrain.Learner(_method(kind), batch=BATCH)
    data, pieces = np.load(arrays_of(home)), 3
    number = (pieces + 1) * learner.finished + learner.step // 2
    print("found", number, flush=True)
    for task in range(learner.finished, TASKS):
        x, y = data[f"train_x_{task}"], data[f"train_y_{task}"]
        for start in range(learner.step * BATCH, len(y) + 1, 2 * BATCH):
            if start < len(y):
                learner.observe(x[start : start + 2 * BATCH], y[start : start + 2 * BATCH], task)
            else:
                learner.finish(task)
            learner.save(path)
            print("saved", number := number + 1, flush=True)
            if each is not None:
                (each / str(number)).write_bytes(path.read_bytes())
    return 0


def run_reference_learner(kind: str, home: Path) -> Tally:
    """Feeds a learner undisturbed, and keeps what it was after each piece."""
    tally, place = Tally(f"reference, learner, {kind}"), fed(kind, home)
    reference_of(kind, home).mkdir(parents=True)
    place.mkdir(parents=True)
    tally.look("feeding", attempt(partial(feed, kind, home, place, reference_of(kind, home))))
    return tally


def reference_of(kind: str, home: Path) -> Path:
    """Where the files are that an undisturbed learner would have saved, by their numbers."""
    return home / "learners" / kind


def fed(kind: str, home: Path) -> Path:
    """Where an undisturbed learner is that has learned all."""
    return home / "fed" / kind


def _method(kind: str) -> cotrain.Method:
    spec = cotrain.Spec((2, 3), 3, TASKS)
    if kind == "adam":
        return cotrain.replay(cotrain.shared_bottom(spec, (8,)), cotrain.reservoir(20), lr=0.01, optimizer=optax.adam)
    network = cotrain.routing_network(spec, cotrain.dense(8), layers=1, experts=4, k=2)
    return cotrain.cotraining(cotrain.replay(network, cotrain.reservoir(20)))


def _blow(draws: random.Random, folder: str) -> dict[str, Any]:
    """How the next process is to be killed."""
    if draws.random() < 0.5:
        return {"before": partial(killed_in_writing, draws.random())}
    return {"meddle": partial(_kill, Path(folder, NAME), draws.randint(0, 9), draws.uniform(0, 0.03))}


def _kill(path: Path, count: int, delay: float, child: int) -> None:
    """Kills a child a while after it has saved so many times."""
    seen = {_moment(path)}
    until(lambda: seen.add(_moment(path)) or len(seen) > count or not alive(child))
    time.sleep(delay)
    if alive(child):
        os.kill(child, signal.SIGKILL)


def _moment(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _number(path: Path, whole: Path) -> int:
    """Which of the files of an undisturbed learner this is; 0: it is not there; -1: none of them."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    return next((int(one.name) for one in whole.iterdir() if one.read_bytes() == data), -1)


def _told(ended: Ended) -> list[int]:
    """The numbers that were told to be saved."""
    return [int(number) for number in re.findall(r"^saved (\d+)$", ended.said, re.MULTILINE)]
