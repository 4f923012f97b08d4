"""Some seeds at once, in this process: what is learned is kept, watched, and comes to results."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import jax
import numpy as np

from cotrain.data.stream import Stream
from cotrain.engine import Snapshot, blank, learn, steps_of
from cotrain.experiments import provenance
from cotrain.experiments.cache import shape_of, turn_to_compile
from cotrain.experiments.config import Config
from cotrain.experiments.keep import Keep, kept
from cotrain.experiments.learner import Learner
from cotrain.experiments.progress import Done
from cotrain.experiments.result import Result
from cotrain.experiments.watch import Callback, Watch
from cotrain.methods.method import Method
from cotrain.networks.routing_network import parameter_count

EVENTS = {"compiled": "compiling", "trained": "training", "evaluated": "evaluating"}


def run_at_once(
    method: Method,
    stream: Callable[[int], Stream],
    seeds: list[int],
    options: dict[str, Any],
    show: Callable[[Done], None],
    say: Callable[[str], None],
    keep: Keep | None = None,
    config: Config | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[Result]:
    """The seeds that run at once; where they have a configuration, no other process compiles its shape meanwhile."""
    streams, seconds = [stream(seed) for seed in seeds], dict.fromkeys(EVENTS.values(), 0.0)
    steps = steps_of(streams[0], options["batch"], options["epochs"])
    total = None if None in steps else sum(filter(None, steps))
    with ExitStack() as stack:
        files = None
        if keep is not None:
            about = _about(method, seeds, options, config)
            files = stack.enter_context(kept(keep, config, seeds, about, say))
        empty = blank(method, streams[0], len(seeds))
        now = None if files is None else files.start(method, streams[0], empty)
        if now is not None:
            seconds["from_step"] = _behind(now, steps)  # what came before took its own time
        if files is not None:
            callbacks = [*callbacks, *files.logs(now)]
        for callback in callbacks:
            stack.callback(callback.close)
        if now is None or now.phase < len(steps):
            turn = stack.enter_context(ExitStack())
            show(Done(0, total, "compiling"))
            if config is not None:
                turn.enter_context(turn_to_compile(shape_of(config, options["chunk"], len(seeds))))
            last = time.monotonic()
            snapshots = stack.enter_context(closing(learn(method, streams, seeds, **options, start=now)))
            for now in snapshots:
                seconds[EVENTS[now.event]] += time.monotonic() - last
                if now.event == "compiled":
                    turn.close()
                watch = Watch(method, seeds, now)
                _tell_callbacks(callbacks, watch)
                show(Done(_behind(now, steps), total, _note(now, len(steps))))
                if files is not None:
                    files.show(now)
                if watch.stopping:
                    break
                last = time.monotonic()
        assert now is not None
        if files is not None and now.phase < len(steps):
            files.checkpoints.save(now)  # it was asked to stop
        results = _results(method, now, seeds, options["batch"], seconds)
        if files is not None and now.phase == len(steps):
            files.finish(results)
    return results


def _tell_callbacks(callbacks: Sequence[Callback], watch: Watch) -> None:
    if watch.snapshot.event == "trained":
        for callback in callbacks:
            callback.after_chunk(watch)
    elif watch.snapshot.event == "evaluated" and watch.snapshot.phase > 0:
        for callback in callbacks:
            callback.after_task(watch)


def _behind(now: Snapshot, steps: Sequence[int | None]) -> int:
    """The minibatches that were learned, as far as their number is known."""
    return sum(filter(None, steps[: now.phase])) + now.step


def _results(method: Method, last: Snapshot, seeds: list[int], batch: int, seconds: dict[str, float]) -> list[Result]:
    """What a run has come to, for each seed."""
    shared = {event: round(spent / len(seeds), 3) for event, spent in seconds.items() if event in EVENTS.values()}
    per_seed = {**seconds, **shared}

    def learner(i: int) -> Learner:
        state, sample = jax.tree.map(lambda a: a[i : i + 1], (last.state, last.sample))
        return Learner(method, seeds[i], batch=batch, state=state, finished=last.phase, step=last.step, sample=sample)

    return [
        Result(
            seed,
            last.accuracy[i],
            last.initial[i],
            tuple(logits[i] for logits in last.logits),
            tuple(gates[i] for gates in last.gates),
            parameter_count(method.network),
            per_seed,
            learner(i),
        )
        for i, seed in enumerate(seeds)
    ]


def _about(method: Method, seeds: list[int], options: dict[str, Any], config: Config | None) -> dict[str, Any]:
    """What a checkpoint must agree in with the run that takes it up."""
    if config is not None:
        known = {"config": config.record(), "data": provenance.data(config)}
    else:
        rates = [float(leaf) for leaf in jax.tree.leaves(method) if jax.numpy.ndim(leaf) == 0]
        known = {"options": {name: options[name] for name in ("batch", "epochs", "evaluate_all")}, "rates": rates}
    return json.loads(json.dumps({"seeds": seeds, **known}))


def _note(snapshot: Snapshot, phases: int) -> str:
    """The present task and the accuracy so far, for the progress bar."""
    task = f"task {min(snapshot.phase + 1, phases)}/{phases}"
    if snapshot.phase == 0:
        return task
    return f"{task}, accuracy {np.nanmean(snapshot.accuracy[:, snapshot.phase - 1]):.3f}"
