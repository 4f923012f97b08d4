"""Seeds on devices: arrays that differ between seeds have a leading axis S, of which each device has its share."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

SEEDS = jax.sharding.PartitionSpec("S")


def over_seeds(function: Callable[..., Any], seeds: int) -> Callable[..., Any]:
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


def placed(tree: Any, seeds: int) -> Any:
    """The same arrays, each seed's part on its device."""
    mesh = _mesh(seeds)
    return tree if mesh.size == 1 else jax.device_put(tree, jax.sharding.NamedSharding(mesh, SEEDS))


def stacked(trees: Sequence[Any]) -> Any:
    """The arrays of all seeds, with an axis for them."""
    return jax.tree.map(lambda *arrays: arrays[0][None] if len(arrays) == 1 else np.stack(arrays), *trees)
