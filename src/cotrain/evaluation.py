"""What a network can do: its accuracy on tests, and the routes that it takes.

Axes: S seeds, B examples, T tasks, E experts.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cotrain.data.examples import Batches, Examples
from cotrain.data.feed import Cut, Room
from cotrain.data.sources import Source
from cotrain.devices import over_seeds, placed, stacked
from cotrain.methods.method import Infers, State
from cotrain.networks.network import Network
from cotrain.networks.parameters import Parameters

TEST_BATCH = 2000
ROOM = 2**26  # bytes of inputs that are laid out at a time


@eqx.filter_jit
def _correct(
    network: Network, parameters: Parameters, task: Int[Array, ""], x: Array, y: Int[Array, "S B"]
) -> Int[Array, " S"]:
    def count(parameters: Parameters, x: Array, y: Array) -> Array:
        return (network.predict(parameters, task, x).argmax(axis=1) == y).sum()

    return over_seeds(count, len(y))(parameters, x, y)


def evaluate(
    network: Network, parameters: Parameters, tests: Sequence[Source], rooms: Sequence[Room], task: int
) -> Float[np.ndarray, " S"]:
    """Each seed's accuracy on its test examples of a task."""
    size = _size(network, tests)
    pieces = [pieces_of(test, size, room) for test, room in zip(tests, rooms, strict=True)]
    correct, counts = np.zeros(len(tests), int), np.zeros(len(tests), int)
    for parts in itertools.zip_longest(*pieces):
        there = next(part for part in parts if part is not None)
        x, y = placed(stacked([_nothing(there) if part is None else part for part in parts]), len(parts))
        counts += np.asarray([0 if part is None else (part[1] >= 0).sum() for part in parts])
        correct += np.asarray(_correct(network, parameters, jnp.array(task), x, y))
    return correct / counts


def warm_up(network: Network, parameters: Parameters, tests: Sequence[Source], rooms: Sequence[Room]) -> None:
    """Compiles what `evaluate` runs on such tests; nothing is read but arrays."""
    size, parts = _size(network, tests), []
    for test, room in zip(tests, rooms, strict=True):
        read = isinstance(test, Examples)
        x = _padded(test, 0, size, room)[0] if read else room((size, *network.spec.shape), np.float32)
        parts.append((x, np.full(size, -1, np.int32)))
    np.asarray(_correct(network, parameters, jnp.array(0), *placed(stacked(parts), len(parts))))


def pieces_of(source: Source, size: int, room: Room) -> Iterator[tuple[np.ndarray, Int[np.ndarray, " B"]]]:
    """The examples, as many at a time, filled up with ones of label -1, which no prediction gets right."""
    if not isinstance(source, Batches):
        yield from (_padded(source, start, size, room) for start in range(0, len(source), size))
        return
    cut, at = Cut(source, 0, size, 1), 0
    while cut.steps is None or at < cut.steps:
        x, y, _, weight = (np.asarray(part)[0] for part in cut.minibatches(at, 1, 1, room))
        yield x, np.where(weight > 0, y, -1)
        at += 1


def _padded(examples: Any, start: int, size: int, room: Room) -> tuple[np.ndarray, np.ndarray]:
    places = np.arange(start, start + size)
    x, y = examples.take(np.minimum(places, len(examples) - 1), room)
    return x, np.where(places < len(examples), y, -1)


def _nothing(piece: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """As many examples, of which none counts."""
    return piece[0], np.full_like(piece[1], -1)


def _size(network: Network, tests: Sequence[Source]) -> int:
    """How many examples are tested at once; few different numbers, since each is compiled."""
    longest = max(TEST_BATCH if isinstance(test, Batches) else len(test) for test in tests)
    return min(TEST_BATCH, 1 << (longest - 1).bit_length(), max(fitting(network), 1))


def answers(
    network: Network, parameters: Parameters, source: Source, room: Room, task: int
) -> Iterator[tuple[Int[np.ndarray, " B"], Float[np.ndarray, "B classes"]]]:
    """The labels and probabilities that are predicted for a task's examples, of one seed, some at a time."""
    for x, y in pieces_of(source, _size(network, [source]), room):
        labels, probabilities = _answers(network, parameters, jnp.array(task), placed(x[None], 1))
        count = int((y >= 0).sum())
        yield np.asarray(labels[0])[:count], np.asarray(probabilities[0])[:count]


@eqx.filter_jit
def _answers(
    network: Network, parameters: Parameters, task: Int[Array, ""], x: Array
) -> tuple[Int[Array, "S B"], Float[Array, "S B classes"]]:
    def answer(parameters: Parameters, x: Array) -> tuple[Array, Array]:
        logits = network.predict(parameters, task, x)
        return logits.argmax(axis=1), jax.nn.softmax(logits)

    return over_seeds(answer, len(x))(parameters, x)


def inferred(method: Infers, network: Network, state: State, source: Source, room: Room) -> Iterator[np.ndarray]:
    """The tasks that examples seem to be of, of one seed, some at a time."""
    for x, y in pieces_of(source, _size(network, [source]), room):
        yield np.asarray(_inferred(method, state, placed(x[None], 1))[0])[: int((y >= 0).sum())]


@eqx.filter_jit
def _inferred(method: Infers, state: State, x: Array) -> Int[Array, "S B"]:
    return over_seeds(method.infer, len(x))(state, x)


@eqx.filter_jit
def matrices(network: Network, parameters: Parameters) -> list[tuple[Array, Array]]:
    """The logits and gates of each layer that has a router by task."""
    return over_seeds(network.matrices, len(jax.tree.leaves(parameters)[0]))(parameters)


def mean_gates(
    network: Network, parameters: Parameters, tests: Sequence[Source], rooms: Sequence[Room], task: int
) -> list[Float[np.ndarray, "S E"]]:
    """The mean gates of a task's first test examples, in each layer whose router reads its input."""
    size = _size(network, tests)
    firsts = [next(pieces_of(test, size, room)) for test, room in zip(tests, rooms, strict=True)]
    count = min((y >= 0).sum() for _, y in firsts)
    x = placed(stacked([x[:count] for x, _ in firsts]), len(firsts))
    return list(map(np.asarray, _means(network, parameters, jnp.array(task), x)))


@eqx.filter_jit
def _means(network: Network, parameters: Parameters, task: Int[Array, ""], x: Array) -> list[Float[Array, "S E"]]:
    def mean(parameters: Parameters, x: Array) -> list[Array]:
        return [gates.mean(axis=0) for gates in network.taken(parameters, task, x)]

    return over_seeds(mean, len(x))(parameters, x)


def fitting(network: Network) -> int:
    """How many inputs may be laid out at a time."""
    return ROOM // (math.prod(network.spec.shape) * np.dtype(np.float32).itemsize)
