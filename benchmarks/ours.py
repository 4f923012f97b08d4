"""cotrain's methods, run by its engine as a user's run would be."""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cotrain
from benchmarks.workload import Pass


def finetune(workload: Any) -> Callable[[], Pass]:
    """Plain SGD on a shared bottom."""
    return passes(workload, methods(workload)["shared bottom"])


def replay(workload: Any) -> Callable[[], Pass]:
    """A step on each minibatch, then one on a batch from memory, on a shared bottom."""
    return passes(workload, methods(workload)["shared bottom + replay"])


def algorithm1(workload: Any) -> Callable[[], Pass]:
    """A routing network with replay and co-training: the paper's Algorithm 1."""
    return passes(workload, _algorithm1(workload))


def routed_finetune(workload: Any) -> Callable[[], Pass]:
    """Plain SGD on a routing network: the step on the current task's batch alone."""
    return passes(workload, cotrain.finetune(routing_network(workload), lr=workload.lr))


def routed_replay(workload: Any) -> Callable[[], Pass]:
    """Replay on a routing network."""
    return passes(workload, cotrain.replay(routing_network(workload), _memory(workload), lr=workload.lr))


def resident(workload: Any) -> Callable[[], list[tuple[int, float]]]:
    """Algorithm 1 on a stream of many tasks; returns after some of them the megabytes that the process holds."""
    method, stream = _algorithm1(workload), _stream(workload)

    def one_pass() -> list[tuple[int, float]]:
        seen = []
        for snapshot in cotrain.learn(method, [stream], [workload.seed]):
            if snapshot.event == "evaluated" and snapshot.phase % (len(stream) // 5) == 0:
                seen.append((snapshot.phase, megabytes()))
        return seen

    return one_pass


def methods(workload: Any) -> dict[str, cotrain.Method]:
    """What is measured against others, by name."""
    return {
        "algorithm 1": _algorithm1(workload),
        "shared bottom + replay": cotrain.replay(shared_bottom(workload), _memory(workload), lr=workload.lr),
        "shared bottom": finetuned(workload),
    }


def finetuned(workload: Any) -> cotrain.Method:
    """Plain SGD on a shared bottom."""
    return cotrain.finetune(shared_bottom(workload), lr=workload.lr)


def _algorithm1(workload: Any) -> cotrain.Method:
    replayed = cotrain.replay(routing_network(workload), _memory(workload), lr=workload.lr)
    return cotrain.cotraining(replayed, lr=workload.lr)


def megabytes() -> float:
    """What this process holds."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmRSS:")[1].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS: the peak, in bytes


def passes(workload: Any, method: Any) -> Callable[[], Pass]:
    """A method that learns the whole stream once."""
    stream = _stream(workload)
    counted = workload.tasks[: workload.limit]
    iterations = sum(-(-len(y) // workload.batch) for _, y in counted)

    def one_pass() -> Pass:
        seconds, last, snapshot = 0.0, time.perf_counter(), None
        for snapshot in cotrain.learn(method, [stream], [workload.seed], batch=workload.batch):
            seconds += time.perf_counter() - last if snapshot.event == "trained" else 0
            if snapshot.phase == len(counted):
                break
            last = time.perf_counter()
        return Pass(iterations, seconds, model=snapshot)

    return one_pass


def _stream(workload: Any) -> cotrain.Stream:
    arrays = [(x, y, x[:1], y[:1]) for x, y in workload.tasks]  # testing is not measured
    return cotrain.Stream.from_arrays(arrays, classes=workload.classes)


def _spec(workload: Any) -> cotrain.Spec:
    return cotrain.Spec(workload.tasks[0][0].shape[1:], workload.classes, len(workload.tasks))


def shared_bottom(workload: Any) -> cotrain.Network:
    """The dense network."""
    return cotrain.shared_bottom(_spec(workload), workload.hidden)


def routing_network(workload: Any) -> cotrain.Network:
    """The network of experts."""
    return cotrain.routing_network(
        _spec(workload),
        cotrain.dense(workload.units),
        layers=workload.layers,
        experts=workload.experts,
        k=workload.k,
        router=cotrain.task_matrix(cotrain.gaussian(workload.noise)),
    )


def _memory(workload: Any) -> Any:
    return cotrain.reservoir(workload.memory, workload.memory_batch)
