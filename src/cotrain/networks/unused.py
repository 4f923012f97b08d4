"""The unused experts as a path, θ ⊙ (1 − E), in a few compiled sizes.

Axes: T tasks, E experts of a layer, M members.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from cotrain.data.batch import Batch
from cotrain.networks.layer import Layer
from cotrain.networks.network import Network
from cotrain.networks.parameters import Parameters, narrow
from cotrain.networks.path import Path, Route, rows


class Bucket(NamedTuple):
    """A kind of co-training step, by where there are unused experts and how many."""

    first: int  # the first layer that has any
    own: range  # how many it may have
    later: range  # the most that a layer after it may have

    def fits(self, unused: Int[Array, " layers"]) -> Bool[Array, ""]:
        """Whether it is the one for these numbers of unused experts."""
        own, later = unused[self.first], jnp.max(unused[self.first + 1 :], initial=0)
        here = (unused > 0).any() & ((unused > 0).argmax() == self.first)
        return (
            here & (self.own[0] <= own) & (own <= self.own[-1]) & (self.later[0] <= later) & (later <= self.later[-1])
        )

    def size(self, layer: int) -> int:
        """The most unused experts that a layer may have."""
        return (self.own if layer == self.first else self.later)[-1]


def buckets(network: Network) -> tuple[Bucket, ...]:
    """The co-training steps to compile, of which one fits wherever there are unused experts."""
    routed = {i: layer for i, layer in enumerate(network.layers) if layer.k < layer.experts}
    return tuple(
        Bucket(first, own, later)
        for first, layer in routed.items()
        for own in _sizes([layer])
        for later in _sizes([layer for i, layer in routed.items() if i > first])
    )


def unused_path(
    network: Network,
    parameters: Parameters,
    used: Sequence[Bool[Array, "T E"]],
    task: Int[Array, ""],
    batch: Batch,
    bucket: Bucket,
) -> Path:
    """All experts that no task uses, with equal weights, if there are as many as the bucket holds: θ ⊙ (1 − E).

    Deviation: θ ⊙ (1 − E) is nothing in a layer with no unused expert; there the batch takes the current task's
    best route, which learns nothing.
    """
    routes = []
    best_routes = network.best(parameters, task).routes
    layers = zip(network.layers, parameters.router, used, best_routes, strict=True)
    for place, (layer, router, taken, best) in enumerate(layers):
        if router is not None:
            best = best._replace(gates=network.gates(narrow(router, task[None]), best))
        if place < bucket.first or best.members is None or best.gates is None:
            routes.append(best._replace(still=True))
            continue
        free = ~taken.any(axis=0)
        count = free.sum()
        gates = jnp.zeros(layer.experts).at[best.members].set(best.gates[0])
        gates = jnp.where(count > 0, free / jnp.maximum(count, 1), gates)[None]
        members, active = None, free
        if bucket.size(place) < layer.experts:
            members = jnp.nonzero(gates[0] > 0, size=bucket.size(place), fill_value=layer.experts)[0]
            active = (members < layer.experts) & (count > 0)
            gates = gates.at[:, members].get(mode="fill", fill_value=0)
        routes.append(Route(members, active, gates > 0, None, gates))
    return Path(*rows(batch.tasks, batch.weight), tuple(routes), network.one_head)


def _sizes(layers: Sequence[Layer]) -> list[range]:
    """The numbers of unused experts of some layers, in up to three groups: a quarter, half and all that there are.

    In the last, all take part, used or not: to gather most experts costs more than to run the few others.
    """
    most, least = (max((getattr(layer, name) for layer in layers), default=0) for name in ("experts", "k"))
    sizes = sorted({max(least, -(-most // share)) for share in (4, 2, 1)})
    return [range(low + 1, high + 1) for low, high in pairwise([-1, *sizes])]
