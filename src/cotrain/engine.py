"""The one loop: a method learns the tasks of a stream, minibatch by minibatch, in a compiled program.

Python regains control only between chunks of minibatches, to hand out a `Snapshot`, evaluate, and lay out the next
chunk. Several seeds can run at once; arrays that differ between them have a leading axis S.

Axes: S seeds, C minibatches of a chunk, B examples, T tasks, P phases (the tasks one after another, or one joint).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.data.feed import Feed, Room
from cotrain.data.stream import Stream
from cotrain.devices import over_seeds, placed, stacked
from cotrain.errors import Diverged, Invalid, check_positive
from cotrain.evaluation import evaluate, fitting, matrices, mean_gates
from cotrain.methods.method import Method, State
from cotrain.networks.network import Network
from cotrain.speed.randomness import unrolled

CHUNK = 2000  # minibatches between two looks at the clock, by default
# On CPUs with vectors of 512 bits XLA takes 256, lest the clock slow down; but its matrix products use 512 anyway.
WIDE = {"xla_cpu_prefer_vector_width": 512}
DRAWN, MANY = 20, 2**16  # minibatches whose random numbers are drawn at once, unless there are too many for the cache


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
) -> Iterator[Snapshot]:
    """Learns each stream with its seed, all at once; yields a snapshot after each chunk and each evaluation.

    A chunk has `chunk` minibatches (by default `CHUNK`), or as many as 64 MB hold. The numbers depend neither on that
    nor on where the run was taken up again (`start`).
    """
    chunk = CHUNK if chunk is None else chunk
    for name, value in (("batch", batch), ("epochs", epochs), ("chunk", chunk)):
        check_positive(name, value)
    if len(streams) != len(seeds) or not seeds:
        raise Invalid("seeds", list(seeds), f"give one for each of the {len(streams)} streams, and at least one")
    for stream in streams:
        if stream.spec != method.network.spec:
            raise Invalid("stream", stream.spec, f"the network was made for {method.network.spec}")
    keys = placed(jnp.stack([jax.random.key(seed) for seed in seeds]), len(seeds))
    empty = blank(method, streams[0], len(seeds))
    now = replace(empty, state=_init(method, keys)) if start is None else start.kept()
    now = replace(now, state=placed(now.state, len(seeds)))
    phases = streams[0].phases
    rooms = [Room() for _ in streams]
    chunk = min(chunk, max(steps_of(streams[0], batch, epochs)), max(fitting(method.network) // batch, 1))
    room = -(-chunk // DRAWN) * DRAWN  # minibatches laid out at a time

    warm = _feeds(streams, seeds, 0, batch, epochs, rooms)
    nothing = _Chunk(method, keys, np.int32(0), np.int32(0), np.int32(0), _lay_out(warm, 0, room))
    advance = _compiled()
    now = replace(now, state=advance(nothing, now.state)[0])
    evaluate(method.network, now.state.learner.parameters, streams, rooms, 0, limit=1)
    yield (now := replace(now, event="compiled"))

    if evaluate_all and np.isnan(now.initial).any():
        parameters = now.state.learner.parameters
        initial = [evaluate(method.network, parameters, streams, rooms, i) for i in range(len(streams[0]))]
        yield (now := replace(now, initial=np.stack(initial, axis=1), event="evaluated"))

    for phase in range(now.phase, len(phases)):
        feeds = _feeds(streams, seeds, phase, batch, epochs, rooms)
        while now.step < feeds[0].steps:
            count = min(chunk, feeds[0].steps - now.step)
            batches = _lay_out(feeds, now.step, room)
            work = _Chunk(method, keys, np.int32(phase), np.int32(now.step), np.int32(count), batches)
            state, scalars, total = advance(work, now.state)
            scalars = {name: np.asarray(values)[:, :count] for name, values in scalars.items()}
            _check_finite(scalars["loss"], seeds, phases[phase][0], now.step)
            # A loss is taken before its step: what a chunk's last step broke shows only in the parameters.
            _check_finite(np.asarray(total)[:, None], seeds, phases[phase][0], now.step + count - 1)
            yield (now := replace(now, state=state, step=now.step + count, event="trained", scalars=scalars))

        some = placed(stacked([feed.some(method.examples) for feed in feeds]), len(feeds))
        state = _consolidate((method, keys, jnp.array(phase), jnp.array(feeds[0].steps), some), now.state)
        seen = range(len(streams[0])) if evaluate_all else [task for tasks in phases[: phase + 1] for task in tasks]
        now = replace(now, state=state, phase=phase + 1, step=0, event="evaluated")
        yield (now := _measure(method.network, now, streams, rooms, seen))


def steps_of(stream: Stream, batch: int, epochs: int) -> list[int]:
    """How many minibatches each phase of a stream has."""
    return [Feed(stream, tasks, 0, 0, batch, epochs, Room()).steps for tasks in stream.phases]


def blank(method: Method, stream: Stream, seeds: int) -> Snapshot:
    """A run's snapshot with nothing in it: of the state, the shapes; of the rest, NaN."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), seeds))
    state = jax.eval_shape(lambda keys: _init(method, keys), keys)
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
    )


def _measure(
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
        accuracy[:, done, task] = evaluate(network, now.state.learner.parameters, streams, rooms, task)
    logits, gates = ([array.copy() for array in arrays] for arrays in (now.logits, now.gates))
    if network.by_task:
        for layer, (scores, weights) in enumerate(matrices(network, now.state.learner.parameters)):
            logits[layer][:, done], gates[layer][:, done] = scores, weights
    else:
        for layer in gates:
            layer[:, done] = 0
        for task in tasks:
            for layer, weights in enumerate(mean_gates(network, now.state.learner.parameters, streams, rooms, task)):
                gates[layer][:, done, task] = weights
    return replace(now, accuracy=accuracy, logits=tuple(logits), gates=tuple(gates))


@eqx.filter_jit
def _init(method: Method, keys: PRNGKeyArray) -> State:
    return over_seeds(method.init, len(keys))(keys)


@eqx.filter_jit(donate="all-except-first")
def _consolidate(fixed: tuple[Method, PRNGKeyArray, Array, Array, Batch], state: State) -> State:
    method, keys, phase, steps, batches = fixed

    def end(state: State, key: PRNGKeyArray, batch: Batch) -> State:
        key = jax.random.fold_in(jax.random.fold_in(key, phase + 1), steps)  # as that of a step after the last
        return method.consolidate(state, batch, key)

    return over_seeds(end, len(keys))(state, keys, batches)


class _Chunk(NamedTuple):
    """The next minibatches of a phase, and all else that a program needs to learn from them."""

    method: Method
    keys: PRNGKeyArray
    phase: Int[Array, ""] | np.int32
    first: Int[Array, ""] | np.int32  # the place in the phase of the first minibatch
    steps: Int[Array, ""] | np.int32  # minibatches to learn from; the others are padding
    batches: Batch


@cache
def _compiled() -> Callable[..., Any]:
    """`_advance`, compiled for this machine."""
    options: Any = {}
    if jax.default_backend() == "cpu":
        with suppress(jax.errors.JaxRuntimeError):  # another XLA may not know them
            jax.jit(lambda: 0, compiler_options=WIDE).lower().compile()
            options = {"compiler_options": WIDE}
    return eqx.filter_jit(_advance, donate="all-except-first", **options)


def _advance(chunk: _Chunk, state: State) -> tuple[State, dict[str, Float[Array, "S C"]], Float[Array, " S"]]:
    """The state after a chunk, in the memory of the state before it, each step's scalars, the sum of all parameters."""
    method, keys, phase, first, steps, batches = chunk

    def run(state: State, key: PRNGKeyArray, batches: Batch) -> tuple[State, dict[str, Array], Float[Array, ""]]:
        key = jax.random.fold_in(unrolled(key), phase + 1)
        draws = jax.vmap(lambda i, batch: method.draw(jax.random.fold_in(key, first + i), batch))
        drawn = _drawn(method, batches)
        update = jax.jit(partial(_updated, method), inline=True)  # traced once, to know its scalars and to run it

        def block(number: Array, carry: tuple[State, dict[str, Array]]) -> tuple[State, dict[str, Array]]:
            start = number * drawn
            some = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, drawn), batches)
            noise = draws(start + jnp.arange(drawn), some)

            def minibatch(i: Array, carry: tuple[State, dict[str, Array]]) -> tuple[State, dict[str, Array]]:
                state, scalars = carry
                batch = jax.tree.map(lambda a: a[start + i], batches)
                state, found = update(state, batch, jax.tree.map(lambda a: a[i], noise))
                return state, {name: values.at[start + i].set(found[name]) for name, values in scalars.items()}

            return jax.lax.fori_loop(0, jnp.minimum(drawn, steps - start), minibatch, carry)

        one = jax.tree.map(lambda a: a[0], batches)
        found = jax.eval_shape(lambda state: update(state, one, method.draw(key, one))[1], state)
        nothing = {name: jnp.zeros(len(batches.y), value.dtype) for name, value in found.items()}
        state, scalars = jax.lax.fori_loop(0, -(-steps // drawn), block, (state, nothing))
        # The quickest way to read all parameters: the sum is not finite where one of them is not.
        total = jnp.stack([leaf.sum() for leaf in jax.tree.leaves(state.learner.parameters)]).sum()
        return state, scalars, total

    return over_seeds(run, len(keys))(state, keys, batches)


def _updated(method: Method, state: State, batch: Batch, noise: Any) -> tuple[State, dict[str, Array]]:
    """The state after a minibatch, and what there is to see of it."""
    state, info = method.update(state, batch, noise)
    return state, {**info.scalars, "loss": info.loss}


def _drawn(method: Method, batches: Batch) -> int:
    """The minibatches whose random numbers are drawn at once: the same numbers, faster than one at a time."""
    batch = jax.tree.map(lambda a: a[0], batches)
    each = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(method.draw, jax.random.key(0), batch)))
    return next(n for n in (20, 10, 4, 2, 1) if n * each <= MANY or n == 1)


def _check_finite(losses: np.ndarray, seeds: Sequence[int], task: int, first: int) -> None:
    bad = np.argwhere(~np.isfinite(losses))
    if len(bad):
        seed, step = bad[0]
        raise Diverged(seeds[seed], task, first + int(step), float(losses[seed, step]))


def _feeds(
    streams: Sequence[Stream], seeds: Sequence[int], phase: int, batch: int, epochs: int, rooms: Sequence[Room]
) -> list[Feed]:
    feeds = [
        Feed(stream, stream.phases[phase], seed, phase, batch, epochs, room)
        for stream, seed, room in zip(streams, seeds, rooms, strict=True)
    ]
    if len({feed.steps for feed in feeds}) > 1:
        raise Invalid("streams", [feed.steps for feed in feeds], "streams that run at once must have equal sizes")
    return feeds


def _lay_out(feeds: Sequence[Feed], start: int, count: int) -> Batch:
    return placed(stacked([feed.minibatches(start, count) for feed in feeds]), len(feeds))
