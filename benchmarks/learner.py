"""A learner beside the engine, and a stream that is never stored: what feeding by hand and reading ahead cost."""

import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

import cotrain
from benchmarks import ours
from cotrain import engine
from cotrain.data.ahead import ahead
from cotrain.data.examples import Examples
from cotrain.data.feed import Room
from cotrain.evaluation import evaluate

FED, ROUNDS, TESTED = 200, 7, 10_000  # minibatches that are fed at once; images that are predicted
STORED, LEARNED = 50e9, 2e9  # bytes of the stream, and those that are learned
MADE = 1000  # examples that the stream makes at a time


def learner(workload: Any) -> Callable[[], dict[str, Any]]:
    """For each method, a minibatch by the engine, fed 200 at a time, and fed alone; and predictions."""
    passes = iter((1,))  # the first, which compiles, has a round alone

    def one_pass() -> dict[str, Any]:
        rounds, methods = next(passes, ROUNDS), ours.methods(workload)
        return {name: _beside_the_engine(method, workload, rounds) for name, method in methods.items()}

    return one_pass


def _beside_the_engine(method: Any, workload: Any, wanted: int) -> dict[str, Any]:
    batch, count = workload.batch, 2 * FED * workload.batch
    x, y = (np.resize(a, (count, *a.shape[1:])) for a in workload.tasks[0])
    many = np.resize(x, (TESTED, *x.shape[1:]))
    stream = cotrain.Stream.from_arrays([(x, y, x[:1], y[:1])] * len(workload.tasks), classes=workload.classes)
    fed, test, room = cotrain.Learner(method, batch=batch), [Examples(many, np.zeros(TESTED, int))], [Room()]
    whole, alone = ([(x[i : i + n], y[i : i + n]) for i in range(0, count, n)] for n in (FED * batch, batch))

    def one_round() -> dict[str, float]:
        return {
            "engine": _engine_pass(method, stream, batch) / (2 * FED),
            "at once": _seconds(lambda: [fed.observe(*piece, 0) for piece in whole]) / (2 * FED),
            "one by one": _seconds(lambda: [fed.observe(*piece, 0) for piece in alone]) / (2 * FED),
            "evaluation": _seconds(lambda: evaluate(method.network, fed.state.learner.parameters, test, room, 0)),
            "predict": _seconds(lambda: fed.predict(many, 0)),
        }

    one_round()  # compiles
    rounds = [one_round() for _ in range(wanted)]
    return {
        "microseconds": {name: [1e6 * one[name] for one in rounds] for name in rounds[0]},
        "at_once_over_engine": statistics.median(one["at once"] / one["engine"] for one in rounds),
        "one_by_one_more_ms": 1e3 * statistics.median(one["one by one"] - one["engine"] for one in rounds),
        "predict_over_evaluation": statistics.median(one["predict"] / one["evaluation"] for one in rounds),
    }


def _engine_pass(method: Any, stream: cotrain.Stream, batch: int) -> float:
    """Seconds in which the engine learns the first task, testing not counted."""
    seconds, last = 0.0, time.perf_counter()
    for snapshot in cotrain.learn(method, [stream], [0], batch=batch):
        now = time.perf_counter()
        seconds += now - last if snapshot.event == "trained" else 0
        if snapshot.phase == 1:
            break
        last = time.perf_counter()
    return seconds


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def stream(workload: Any) -> Callable[[], dict[str, float]]:
    """Algorithm 1 on a task of 50 GB that is made as it is read; its first 2 GB are learned, with all cores to read."""
    [(x, _), *_] = workload.tasks
    spec = cotrain.Spec(x.shape[1:], workload.classes, len(workload.tasks))
    example = int(np.prod(spec.shape)) * 4  # bytes
    passes = iter((LEARNED / 20,))  # the first, which compiles, is short

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        draws = np.random.default_rng(0)
        for _ in range(int(STORED / example / MADE)):
            yield draws.random((MADE, *spec.shape), np.float32), draws.integers(0, spec.classes, MADE)

    def one_pass() -> dict[str, float]:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        wanted, tests = next(passes, LEARNED), (x[:1], np.zeros(1, int))
        made = cotrain.Stream.from_tasks([(batches, tests)] * spec.tasks, spec.classes)
        reading, waiting, resident = [0.0], [0.0], [0.0]
        engine.ahead = lambda items: _timed(items, reading, waiting)
        try:
            for snapshot in cotrain.learn(ours.methods(workload)["algorithm 1"], [made], [0], batch=workload.batch):
                resident.append(ours.megabytes())
                if snapshot.step * workload.batch * example >= wanted:
                    break
        finally:
            engine.ahead = ahead
        return {
            "gigabytes": snapshot.step * workload.batch * example / 1e9,
            "resident_megabytes": max(resident),
            "reading_seconds": reading[0],
            "waiting_seconds": waiting[0],
            "hidden": 1 - waiting[0] / reading[0],
        }

    return one_pass


def _timed(items: Iterator[Any], reading: list[float], waiting: list[float]) -> Generator[Any, None, None]:
    """Reads ahead, and adds up what the reading takes, and how long there is nothing to do but to wait for it."""

    def read() -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            item = next(items, None)
            reading[0] += time.perf_counter() - start
            if item is None:
                return
            yield item

    coming = ahead(read())
    try:
        while True:
            start = time.perf_counter()
            item = next(coming, None)
            waiting[0] += time.perf_counter() - start
            if item is None:
                return
            yield item
    finally:
        coming.close()
