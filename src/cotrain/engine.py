"""The one loop: a method learns the tasks of a stream, minibatch by minibatch, in a compiled program.

Python regains control only between chunks of minibatches, to hand out a `Snapshot`, evaluate, and lay out the next
chunk. Several seeds can run at once; arrays that differ between them have a leading axis S.

Axes: S seeds, C minibatches of a chunk, B examples, T tasks, P phases (the tasks one after another, or one joint).
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from cotrain.data.ahead import ahead
from cotrain.data.batch import Batch
from cotrain.data.feed import Cut, Feed, Room, feed
from cotrain.data.sample import Sample
from cotrain.data.stream import Stream
from cotrain.devices import placed, stacked
from cotrain.errors import Invalid, check_positive
from cotrain.evaluation import evaluate, fitting, matrices, mean_gates, warm_up
from cotrain.methods.method import Method, State
from cotrain.networks.network import Network
from cotrain.steps import DRAWN, Chunk, advance, compiled, consolidate, init, keys_of

CHUNK = 2000  # minibatches between two looks at the clock, by default


@dataclass(frozen=True)
class Snapshot:
    """Where a run is: all that it takes to go on from here, and all that was measured so far.

    As the run goes on, it takes over the memory of `state`: keep a snapshot for later with `kept`.
    """

    state: State  # with a leading axis S
    phase: int  # phases that are finished
    step: int  # minibatches of the present phase that are done
    accuracy: Float[np.ndarray, "S P T"]  # on each task after each phase; NaN where it was not evaluated
    initial: Float[np.ndarray, "S T"]  # on each task before the first; NaN unless all tasks are evaluated
    logits: tuple[Float[np.ndarray, "S P T E"], ...]  # a router's by task after each phase, for each layer with one
    gates: tuple[Float[np.ndarray, "S P T E"], ...]  # the weights that predictions use, or their mean over examples
    sample: Sample  # the examples of the present phase that its end will be shown
    event: str = "start"  # what was done last: "compiled", "trained" or "evaluated"
    scalars: Mapping[str, Float[np.ndarray, "S C"]] = field(default_factory=dict)  # of the last chunk's steps

    def kept(self) -> "Snapshot":
        """The same with a copy of the state, which stays valid when the run goes on."""
        return replace(self, state=jax.tree.map(jnp.copy, self.state))


def learn(
    method: Method,
    streams: Sequence[Stream],
    seeds: Sequence[int],
    *,
    batch: int = 10,
    epochs: int = 1,
    evaluate_all: bool = False,
    chunk: int | None = None,
    start: Snapshot | None = None,
) -> Generator[Snapshot, None, None]:
    """Learns each stream with its seed, all at once; yields a snapshot after each chunk and each evaluation.

    A chunk has `chunk` minibatches (by default `CHUNK`), or as many as 32 MB hold. The numbers depend neither on that
    nor on where the run was taken up again (`start`).
    """
    chunk = CHUNK if chunk is None else chunk
    for name, value in (("batch", batch), ("epochs", epochs), ("chunk", chunk)):
        check_positive(name, value)
    if len(streams) != len(seeds) or not seeds:
        raise Invalid("seeds", list(seeds), f"give one for each of the {len(streams)} streams, and at least one")
    network, phases = method.network, streams[0].phases
    for stream in streams:
        if stream.spec != network.spec:
            raise Invalid("stream", stream.spec, f"the network was made for {network.spec}")
        if stream.joint != streams[0].joint:
            raise Invalid("streams", [stream.joint for stream in streams], "all that run at once are joint, or none is")
    keys = keys_of(seeds)
    empty = blank(method, streams[0], len(seeds))
    now = replace(empty, state=init(method, keys)) if start is None else start.kept()
    now = replace(now, state=placed(now.state, len(seeds)))
    rooms = [Room() for _ in streams]
    size = _chunk_size(network, streams[0], chunk, batch, epochs)
    laid = _laid_out(streams, seeds, now, empty.sample, batch, epochs, size)

    nothing = Chunk(method, keys, np.int32(0), np.int32(0), np.int32(0), next(laid).batches)
    now = replace(now, state=compiled()(nothing, now.state)[0])
    warm_up(network, now.state.learner.parameters, [stream[0].test for stream in streams], rooms)
    yield (now := replace(now, event="compiled"))

    if evaluate_all and np.isnan(now.initial).any():
        initial = [_accuracy(network, now, streams, rooms, task) for task in range(network.spec.tasks)]
        yield (now := replace(now, initial=np.stack(initial, axis=1), event="evaluated"))

    with closing(ahead(laid)) as chunks:
        for phase, first, count, batches, sample, steps in chunks:
            if count:
                work = Chunk(method, keys, np.int32(phase), np.int32(first), np.int32(count), batches)
                state, scalars = advance(work, now.state, seeds, phases[phase][0])
                now = replace(now, state=state, step=first + count, event="trained", scalars=scalars, sample=sample)
                yield now
            if steps is not None and now.step == steps:
                some = sample.batch(None if streams[0].joint else phases[phase][0])
                state = consolidate(method, keys, phase, steps, some, now.state)
                learned = [task for tasks in phases[: phase + 1] for task in tasks]
                seen = range(network.spec.tasks) if evaluate_all else learned
                now = replace(now, state=state, phase=phase + 1, step=0, event="evaluated", sample=empty.sample)
                yield (now := _measured(network, now, streams, rooms, seen))


class _Laid(NamedTuple):
    """Minibatches that are laid out in memory."""

    phase: int
    first: int  # the place in the phase of the first
    size: int
    batches: Batch  # with padding
    sample: Sample  # of the phase, when they have been learned
    steps: int | None  # minibatches of the phase, if that is known by now


def _laid_out(
    streams: Sequence[Stream], seeds: Sequence[int], now: Snapshot, none: Sample, batch: int, epochs: int, chunk: int
) -> Generator[_Laid, None, None]:
    """Some minibatches to compile for, then all that there are to learn; no more than two are in memory."""
    rooms, size = [[Room(), Room()] for _ in streams], -(-chunk // DRAWN) * DRAWN

    def feeds_of(phase: int) -> list[Feed | Cut]:
        return [feed(stream, phase, seed, batch, epochs) for stream, seed in zip(streams, seeds, strict=True)]

    some = [one.like(size, room[0]) for one, room in zip(feeds_of(0), rooms, strict=True)]
    yield _Laid(0, 0, 0, placed(stacked(some), len(some)), none, None)
    sample, first, steps = now.sample, now.step, None
    for phase in range(now.phase, len(streams[0].phases)):
        feeds = feeds_of(phase)
        while steps is None or first < steps:
            for room in rooms:
                room.reverse()  # what is in the other is being learned
            known = _steps(feeds)
            count = chunk if known is None else min(chunk, known - first)
            parts = [one.minibatches(first, count, size, room[0]) for one, room in zip(feeds, rooms, strict=True)]
            steps = _steps(feeds)
            if steps is not None and steps < first:
                raise Invalid("stream", f"{steps} minibatches", f"the run that goes on here has had {first} of them")
            count = count if steps is None else min(count, steps - first)
            sample = sample.fed(parts, count, seeds, phase, first)
            yield _Laid(phase, first, count, placed(stacked(parts), len(parts)), sample, steps)
            first += count
        sample, first, steps = none, 0, None


def _steps(feeds: Sequence[Feed | Cut]) -> int | None:
    """The minibatches of a phase, if that is known by now."""
    if len({feed.steps for feed in feeds}) > 1:
        raise Invalid("streams", [feed.steps for feed in feeds], "streams that run at once must have equal sizes")
    return feeds[0].steps


def steps_of(stream: Stream, batch: int, epochs: int) -> list[int | None]:
    """How many minibatches each phase of a stream has; None where that shows at its end."""
    return [feed(stream, phase, 0, batch, epochs).steps for phase in range(len(stream.phases))]


def _chunk_size(network: Network, stream: Stream, chunk: int, batch: int, epochs: int) -> int:
    """How many minibatches are laid out at a time."""
    steps = steps_of(stream, batch, epochs)
    longest = chunk if None in steps else max(step or 0 for step in steps)
    return min(chunk, longest, max(fitting(network) // 2 // batch, 1))  # for two are in memory


def blank(method: Method, stream: Stream, seeds: int) -> Snapshot:
    """A run's snapshot with nothing in it: of the state, the shapes; of the rest, NaN."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), seeds))
    state = jax.eval_shape(lambda keys: init(method, keys), keys)
    tasks, phases = len(stream), len(stream.phases)
    network = method.network
    routed = [layer.experts for layer in network.layers if layer.experts > 1]
    return Snapshot(
        state,
        phase=0,
        step=0,
        accuracy=np.full((seeds, phases, tasks), np.nan),
        initial=np.full((seeds, tasks), np.nan),
        logits=tuple(
            np.full((seeds, phases, tasks, experts), np.nan, np.float32) for experts in routed if network.by_task
        ),
        gates=tuple(np.full((seeds, phases, tasks, experts), np.nan, np.float32) for experts in routed),
        sample=Sample.empty(network.spec, seeds, method.examples),
    )


def _measured(
    network: Network,
    now: Snapshot,
    streams: Sequence[Stream],
    rooms: Sequence[Room],
    tasks: Sequence[int] | range,
) -> Snapshot:
    """The snapshot with what there is to measure after a phase."""
    done = now.phase - 1
    accuracy = now.accuracy.copy()
    for task in tasks:
        accuracy[:, done, task] = _accuracy(network, now, streams, rooms, task)
    logits, gates = ([array.copy() for array in arrays] for arrays in (now.logits, now.gates))
    if network.by_task:
        for layer, (scores, weights) in enumerate(matrices(network, now.state.learner.parameters)):
            logits[layer][:, done], gates[layer][:, done] = scores, weights
    else:
        for layer in gates:
            layer[:, done] = 0
        for task in tasks:
            tests = [stream[task].test for stream in streams]
            for layer, weights in enumerate(mean_gates(network, now.state.learner.parameters, tests, rooms, task)):
                gates[layer][:, done, task] = weights
    return replace(now, accuracy=accuracy, logits=tuple(logits), gates=tuple(gates))


def _accuracy(
    network: Network, now: Snapshot, streams: Sequence[Stream], rooms: Sequence[Room], task: int
) -> Float[np.ndarray, " S"]:
    return evaluate(network, now.state.learner.parameters, [stream[task].test for stream in streams], rooms, task)
