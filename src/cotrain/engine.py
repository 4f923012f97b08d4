"""The one loop: a method learns the tasks of a stream, minibatch by minibatch, in a compiled program.

Python regains control only between chunks of minibatches, to hand out a `Snapshot`, evaluate, and lay out the next
chunk. Several seeds can run at once; arrays that differ between them have a leading axis S.

Axes: S seeds, C minibatches of a chunk, B examples, T tasks, P phases (the tasks one after another, or one joint).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.data.stream import Examples, Stream
from cotrain.errors import Diverged, Invalid, check_positive
from cotrain.methods.method import Method, State
from cotrain.networks.routing import Network, Parameters
from cotrain.randomness import unrolled

TEST_BATCH = 2000
ROOM, ALIGNED = 2**26, 64  # bytes of inputs that are laid out at a time, and of what they start at a multiple of
SEEDS = jax.sharding.PartitionSpec("S")
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
    logits: tuple[Float[np.ndarray, "S P T E"], ...]  # the router after each phase, for each layer that has one
    gates: tuple[Float[np.ndarray, "S P T E"], ...]  # the weights that predictions use
    event: str = "start"  # what was done last: "compiled", "trained" or "evaluated"

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
    chunk: int = 2000,
    start: Snapshot | None = None,
) -> Iterator[Snapshot]:
    """Learns each stream with its seed, all at once; yields a snapshot after each chunk and each evaluation.

    A chunk has `chunk` minibatches, or as many as 64 MB hold. The numbers depend neither on that nor on where the run
    was taken up again (`start`).
    """
    for name, value in (("batch", batch), ("epochs", epochs), ("chunk", chunk)):
        check_positive(name, value)
    if len(streams) != len(seeds) or not seeds:
        raise Invalid("seeds", list(seeds), f"give one for each of the {len(streams)} streams, and at least one")
    for stream in streams:
        if stream.spec != method.network.spec:
            raise Invalid("stream", stream.spec, f"the network was made for {method.network.spec}")
    keys = _placed(jnp.stack([jax.random.key(seed) for seed in seeds]), len(seeds))
    empty = blank(method, streams[0], len(seeds))
    now = replace(empty, state=_init(method, keys)) if start is None else start.kept()
    now = replace(now, state=_placed(now.state, len(seeds)))
    phases = streams[0].phases
    rooms = [_Room() for _ in streams]
    chunk = min(chunk, max(steps_of(streams[0], batch, epochs)), max(_fitting(method.network) // batch, 1))
    room = -(-chunk // DRAWN) * DRAWN  # minibatches laid out at a time

    warm = _feeds(streams, seeds, 0, batch, epochs, rooms)
    nothing = _Chunk(method, keys, np.int32(0), np.int32(0), np.int32(0), _lay_out(warm, 0, room))
    advance = _compiled()
    now = replace(now, state=advance(nothing, now.state)[0])
    _evaluate(method.network, now.state.learner.parameters, streams, rooms, 0, limit=1)
    yield (now := replace(now, event="compiled"))

    if evaluate_all and np.isnan(now.initial).any():
        parameters = now.state.learner.parameters
        initial = [_evaluate(method.network, parameters, streams, rooms, i) for i in range(len(streams[0]))]
        yield (now := replace(now, initial=np.stack(initial, axis=1), event="evaluated"))

    for phase in range(now.phase, len(phases)):
        feeds = _feeds(streams, seeds, phase, batch, epochs, rooms)
        while now.step < feeds[0].steps:
            count = min(chunk, feeds[0].steps - now.step)
            batches = _lay_out(feeds, now.step, room)
            work = _Chunk(method, keys, np.int32(phase), np.int32(now.step), np.int32(count), batches)
            state, losses, total = advance(work, now.state)
            _check_finite(np.asarray(losses)[:, :count], seeds, phases[phase][0], now.step)
            # A loss is taken before its step: what a chunk's last step broke shows only in the parameters.
            _check_finite(np.asarray(total)[:, None], seeds, phases[phase][0], now.step + count - 1)
            yield (now := replace(now, state=state, step=now.step + count, event="trained"))

        state = _consolidate((method, jnp.array(phases[phase][-1])), now.state)
        seen = range(len(streams[0])) if evaluate_all else [task for tasks in phases[: phase + 1] for task in tasks]
        now = replace(now, state=state, phase=phase + 1, step=0, event="evaluated")
        yield (now := _measure(method.network, now, streams, rooms, seen))


def steps_of(stream: Stream, batch: int, epochs: int) -> list[int]:
    """How many minibatches each phase of a stream has."""
    return [_Feed(stream, tasks, 0, 0, batch, epochs, _Room()).steps for tasks in stream.phases]


def blank(method: Method, stream: Stream, seeds: int) -> Snapshot:
    """A run's snapshot with nothing in it: of the state, the shapes; of the rest, NaN."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), seeds))
    state = jax.eval_shape(lambda keys: _init(method, keys), keys)
    tasks, phases = len(stream), len(stream.phases)
    routed = [layer.experts for layer in method.network.layers if layer.experts > 1]
    return Snapshot(
        state,
        phase=0,
        step=0,
        accuracy=np.full((seeds, phases, tasks), np.nan),
        initial=np.full((seeds, tasks), np.nan),
        logits=tuple(np.full((seeds, phases, tasks, experts), np.nan, np.float32) for experts in routed),
        gates=tuple(np.full((seeds, phases, tasks, experts), np.nan, np.float32) for experts in routed),
    )


def _measure(
    network: Network,
    now: Snapshot,
    streams: Sequence[Stream],
    rooms: "Sequence[_Room]",
    tasks: Sequence[int] | range,
) -> Snapshot:
    """The snapshot with what there is to measure after a phase."""
    done = now.phase - 1
    accuracy = now.accuracy.copy()
    for task in tasks:
        accuracy[:, done, task] = _evaluate(network, now.state.learner.parameters, streams, rooms, task)
    routing = _routing(network, now.state.learner.parameters)
    logits, gates = ([array.copy() for array in arrays] for arrays in (now.logits, now.gates))
    for layer, (row, weights) in enumerate(routing):
        logits[layer][:, done], gates[layer][:, done] = row, weights
    return replace(now, accuracy=accuracy, logits=tuple(logits), gates=tuple(gates))


def _over_seeds(function: Callable[..., Any], seeds: int) -> Callable[..., Any]:
    """Maps a function over the leading axis of its arguments, on all devices.

    Not where a device has one seed, so that branches stay branches there.
    """

    def alone(*arguments: Any) -> Any:
        result = function(*jax.tree.map(lambda a: a[0], arguments))
        return jax.tree.map(lambda a: a[None], result)

    mesh = _mesh(seeds)
    mapped = alone if seeds == mesh.size else jax.vmap(function)
    if mesh.size == 1:
        return mapped
    return jax.shard_map(mapped, mesh=mesh, in_specs=SEEDS, out_specs=SEEDS, check_vma=False)


def _mesh(seeds: int) -> jax.sharding.Mesh:
    """The devices that share the seeds evenly: as many as that is possible with."""
    devices = jax.local_devices()
    count = max(n for n in range(1, min(seeds, len(devices)) + 1) if seeds % n == 0)
    return jax.sharding.Mesh(np.array(devices[:count]), ("S",))


def _placed(tree: Any, seeds: int) -> Any:
    """The same arrays, each seed's part on its device."""
    mesh = _mesh(seeds)
    return tree if mesh.size == 1 else jax.device_put(tree, jax.sharding.NamedSharding(mesh, SEEDS))


@eqx.filter_jit
def _init(method: Method, keys: PRNGKeyArray) -> State:
    return _over_seeds(method.init, len(keys))(keys)


@eqx.filter_jit(donate="all-except-first")
def _consolidate(fixed: tuple[Method, Int[Array, ""]], state: State) -> State:
    method, task = fixed
    seeds = len(jax.tree.leaves(state)[0])
    return _over_seeds(lambda state: method.consolidate(state, task), seeds)(state)


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


def _advance(chunk: _Chunk, state: State) -> tuple[State, Float[Array, "S C"], Float[Array, " S"]]:
    """The state after a chunk, in the memory of the state before it, the losses, and the sum of all parameters."""
    method, keys, phase, first, steps, batches = chunk

    def run(state: State, key: PRNGKeyArray, batches: Batch) -> tuple[State, Float[Array, " C"], Float[Array, ""]]:
        key = jax.random.fold_in(unrolled(key), phase + 1)
        draws = jax.vmap(lambda i, batch: method.draw(jax.random.fold_in(key, first + i), batch))
        drawn = _drawn(method, batches)

        def block(number: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            start = number * drawn
            some = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, drawn), batches)
            noise = draws(start + jnp.arange(drawn), some)

            def minibatch(i: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
                state, losses = carry
                batch = jax.tree.map(lambda a: a[start + i], batches)
                state, info = method.update(state, batch, jax.tree.map(lambda a: a[i], noise))
                return state, losses.at[start + i].set(info.loss)

            return jax.lax.fori_loop(0, jnp.minimum(drawn, steps - start), minibatch, carry)

        state, losses = jax.lax.fori_loop(0, -(-steps // drawn), block, (state, jnp.zeros(len(batches.y))))
        # The quickest way to read all parameters: the sum is not finite where one of them is not.
        total = jnp.stack([leaf.sum() for leaf in jax.tree.leaves(state.learner.parameters)]).sum()
        return state, losses, total

    return _over_seeds(run, len(keys))(state, keys, batches)


def _drawn(method: Method, batches: Batch) -> int:
    """The minibatches whose random numbers are drawn at once: the same numbers, faster than one at a time."""
    batch = jax.tree.map(lambda a: a[0], batches)
    each = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(method.draw, jax.random.key(0), batch)))
    return next(n for n in (20, 10, 4, 2, 1) if n * each <= MANY or n == 1)


@eqx.filter_jit
def _correct(
    network: Network, parameters: Parameters, task: Int[Array, ""], x: Array, y: Int[Array, "S B"]
) -> Int[Array, " S"]:
    def count(parameters: Parameters, x: Array, y: Array) -> Array:
        return (network.predict(parameters, task, x).argmax(axis=1) == y).sum()

    return _over_seeds(count, len(y))(parameters, x, y)


def _evaluate(
    network: Network,
    parameters: Parameters,
    streams: Sequence[Stream],
    rooms: "Sequence[_Room]",
    task: int,
    limit: int | None = None,
) -> Float[np.ndarray, " S"]:
    """Each seed's accuracy on a task's test examples, or on the first few."""
    tests = [stream[task].test for stream in streams]
    sizes = np.array([len(test) for test in tests]) if limit is None else np.full(len(tests), limit)
    correct = np.zeros(len(tests), int)
    few = 1 << (max(map(len, tests)) - 1).bit_length()  # few different sizes: each is compiled
    count = min(TEST_BATCH, few, max(_fitting(network), 1))
    for start in range(0, max(sizes), count):
        places = np.arange(start, start + count)
        each = zip(tests, sizes, rooms, strict=True)
        parts = [_padded(test, places, size, room) for test, size, room in each]
        x, y = _placed(_stacked(parts), len(parts))
        correct += np.asarray(_correct(network, parameters, jnp.array(task), x, y))
    return correct / sizes


def _padded(examples: Examples, places: np.ndarray, stop: int, room: "_Room") -> tuple[np.ndarray, np.ndarray]:
    """The test examples at `places`; from `stop` on, ones that no prediction gets right."""
    x, y = examples.take(np.minimum(places, len(examples) - 1), room)
    return x, np.where(places < stop, y, -1)


def _stacked(trees: Sequence[Any]) -> Any:
    """The arrays of all seeds, with an axis for them."""
    return jax.tree.map(lambda *arrays: arrays[0][None] if len(arrays) == 1 else np.stack(arrays), *trees)


@eqx.filter_jit
def _routing(network: Network, parameters: Parameters) -> list[tuple[Array, Array]]:
    """The logits and gates of each layer that has a router."""

    def show(parameters: Parameters) -> list[tuple[Array, Array]]:
        gates = network.probabilities(parameters)
        return [(r.logits, g) for r, g in zip(parameters.router, gates, strict=True) if r is not None]

    return _over_seeds(show, len(jax.tree.leaves(parameters)[0]))(parameters)


def _check_finite(losses: np.ndarray, seeds: Sequence[int], task: int, first: int) -> None:
    bad = np.argwhere(~np.isfinite(losses))
    if len(bad):
        seed, step = bad[0]
        raise Diverged(seeds[seed], task, first + int(step), float(losses[seed, step]))


def _fitting(network: Network) -> int:
    """How many inputs may be laid out at a time."""
    return ROOM // (math.prod(network.spec.shape) * np.dtype(np.float32).itemsize)


class _Room:
    """Memory that is filled again and again: the system takes longer to hand out as much anew.

    What was there before must not be needed any more: a chunk is laid out when the one before has been learned.
    """

    def __init__(self):
        self.bytes = np.empty(0, np.uint8)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array in this memory, placed so that JAX uses it as it is, without a copy."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if len(self.bytes) < size + ALIGNED:
            self.bytes = np.empty(size + ALIGNED, np.uint8)
        start = -self.bytes.ctypes.data % ALIGNED
        return self.bytes[start : start + size].view(dtype).reshape(shape)


class _Feed:
    """The minibatches of a phase, for one seed: every example once an epoch, in random order."""

    def __init__(
        self, stream: Stream, tasks: Sequence[int], seed: int, phase: int, batch: int, epochs: int, room: "_Room"
    ):
        self.room = room
        self.joint, self.tasks, self.seed, self.phase, self.batch = stream.joint, tasks, seed, phase, batch
        self.parts = [stream[task].train for task in tasks]
        self.starts = np.cumsum([0, *(len(part) for part in self.parts)])
        self.per_epoch = -(-int(self.starts[-1]) // batch)
        self.steps = self.per_epoch * epochs
        self.epoch, self.epoch_order = -1, np.empty(0, int)

    def order(self, epoch: int) -> Int[np.ndarray, "minibatches B"]:
        """The examples of an epoch's minibatches; -1 fills up the last one."""
        if epoch != self.epoch:
            total = int(self.starts[-1])
            order = np.random.default_rng([11, self.seed, self.phase, epoch]).permutation(total)
            padding = np.full(self.per_epoch * self.batch - total, -1)
            self.epoch = epoch
            self.epoch_order = np.concatenate([order, padding]).reshape(self.per_epoch, self.batch)
        return self.epoch_order

    def minibatches(self, start: int, count: int) -> Batch:
        """The `count` minibatches from `start` on; past the phase's end, any."""
        epoch, place = np.divmod(np.minimum(np.arange(start, start + count), self.steps - 1), self.per_epoch)
        index = np.concatenate([self.order(int(now))[place[epoch == now]] for now in np.unique(epoch)])
        flat = np.maximum(index, 0).ravel()
        part = np.searchsorted(self.starts, flat, side="right") - 1
        if len(self.parts) == 1:
            x, y = self.parts[0].take(flat, self.room)
        else:
            pieces = {i: self.parts[i].take(flat[part == i] - self.starts[i]) for i in np.unique(part)}
            dtype = np.result_type(*(inputs for inputs, _ in pieces.values()))
            x, y = self.room((len(flat), *self.parts[0].x.shape[1:]), dtype), np.empty(len(flat), np.int32)
            for i, piece in pieces.items():
                x[part == i], y[part == i] = piece
        task = np.asarray(self.tasks, np.int32)[part].reshape(index.shape)
        parts: Any = (  # NumPy arrays here, JAX arrays in the compiled loop
            x.reshape(*index.shape, *x.shape[1:]),
            y.reshape(index.shape),
            task if self.joint else task[:, 0],
            (index >= 0).astype(np.float32),
        )
        return Batch(*parts)


def _feeds(
    streams: Sequence[Stream], seeds: Sequence[int], phase: int, batch: int, epochs: int, rooms: "Sequence[_Room]"
) -> list[_Feed]:
    feeds = [
        _Feed(stream, stream.phases[phase], seed, phase, batch, epochs, room)
        for stream, seed, room in zip(streams, seeds, rooms, strict=True)
    ]
    if len({feed.steps for feed in feeds}) > 1:
        raise Invalid("streams", [feed.steps for feed in feeds], "streams that run at once must have equal sizes")
    return feeds


def _lay_out(feeds: Sequence[_Feed], start: int, count: int) -> Batch:
    return _placed(_stacked([feed.minibatches(start, count) for feed in feeds]), len(feeds))
