"""What a network can do: its accuracy on tests, and the routes that it takes.

Axes: S seeds, B examples, T tasks, E experts.
"""

import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cotrain.data.feed import Room
from cotrain.data.stream import Examples, Stream
from cotrain.devices import over_seeds, placed, stacked
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
    network: Network,
    parameters: Parameters,
    streams: Sequence[Stream],
    rooms: Sequence[Room],
    task: int,
    limit: int | None = None,
) -> Float[np.ndarray, " S"]:
    """Each seed's accuracy on a task's test examples, or on the first few."""
    tests = [stream[task].test for stream in streams]
    sizes = np.array([len(test) for test in tests]) if limit is None else np.full(len(tests), limit)
    correct = np.zeros(len(tests), int)
    few = 1 << (max(map(len, tests)) - 1).bit_length()  # few different sizes: each is compiled
    count = min(TEST_BATCH, few, max(fitting(network), 1))
    for start in range(0, max(sizes), count):
        places = np.arange(start, start + count)
        each = zip(tests, sizes, rooms, strict=True)
        parts = [_padded(test, places, size, room) for test, size, room in each]
        x, y = placed(stacked(parts), len(parts))
        correct += np.asarray(_correct(network, parameters, jnp.array(task), x, y))
    return correct / sizes


def _padded(examples: Examples, places: np.ndarray, stop: int, room: Room) -> tuple[np.ndarray, np.ndarray]:
    """The test examples at `places`; from `stop` on, ones that no prediction gets right."""
    x, y = examples.take(np.minimum(places, len(examples) - 1), room)
    return x, np.where(places < stop, y, -1)


@eqx.filter_jit
def matrices(network: Network, parameters: Parameters) -> list[tuple[Array, Array]]:
    """The logits and gates of each layer that has a router by task."""
    return over_seeds(network.matrices, len(jax.tree.leaves(parameters)[0]))(parameters)


def mean_gates(
    network: Network, parameters: Parameters, streams: Sequence[Stream], rooms: Sequence[Room], task: int
) -> list[Float[np.ndarray, "S E"]]:
    """The mean gates of a task's first test examples, in each layer whose router reads its input."""
    count = min(max(fitting(network), 1), TEST_BATCH, *(len(stream[task].test) for stream in streams))
    parts = [stream[task].test.take(np.arange(count), room)[0] for stream, room in zip(streams, rooms, strict=True)]
    return list(map(np.asarray, _means(network, parameters, jnp.array(task), placed(stacked(parts), len(parts)))))


@eqx.filter_jit
def _means(network: Network, parameters: Parameters, task: Int[Array, ""], x: Array) -> list[Float[Array, "S E"]]:
    def mean(parameters: Parameters, x: Array) -> list[Array]:
        return [gates.mean(axis=0) for gates in network.taken(parameters, task, x)]

    return over_seeds(mean, len(x))(parameters, x)


def fitting(network: Network) -> int:
    """How many inputs may be laid out at a time."""
    return ROOM // (math.prod(network.spec.shape) * np.dtype(np.float32).itemsize)
