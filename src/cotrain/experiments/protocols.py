"""Protocols by name: whose tasks, examples, network and batches a configuration has where it says nothing else.

"Rotated MNIST" is many benchmarks; docs/protocols.md has them side by side, with their sources.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Protocol(NamedTuple):
    """Options by their names; those that a benchmark or a network does not have are left out."""

    about: str
    options: Mapping[str, Any]


PROTOCOLS = {
    "paper": Protocol("Collier et al. 2020: 20 tasks, angles in steps of 9 degrees, a head per task; the defaults", {}),
    "gem": Protocol(
        "Lopez-Paz and Ranzato 2017: 20 tasks of 1,000 examples, ascending random angles, 100 + 100 units, one head",
        {
            "tasks": 20,
            "examples": 1000,
            "angles": "bins",
            "interpolation": "nearest",
            "permute_first": True,
            "network": "shared-bottom",
            "hidden": (100, 100),
            "one_head": True,
            "batch": 10,
            "epochs": 1,
        },
    ),
    "mammoth": Protocol(
        "Buzzega et al. 2020 (DER): 20 tasks, random angles in any order, 100 + 100 units, one head, batches of 128",
        {
            "tasks": 20,
            "examples": None,
            "angles": "random",
            "interpolation": "nearest",
            "permute_first": True,
            "network": "shared-bottom",
            "hidden": (100, 100),
            "one_head": True,
            "batch": 128,
            "epochs": 1,
        },
    ),
    "a-gem": Protocol(
        "Chaudhry et al. 2019: 17 permuted tasks (3 others are for choosing options), 256 + 256 units, one head",
        {
            "benchmark": "permuted-mnist",
            "tasks": 17,
            "examples": None,
            "angles": "none",  # it has no rotations: with them, this is refused until angles are chosen
            "permute_first": True,
            "network": "shared-bottom",
            "hidden": (256, 256),
            "one_head": True,
            "batch": 10,
            "epochs": 1,
        },
    ),
}
# What a protocol decides. Its benchmark and its network are there only for who names none.
DECIDED = {"rotation_step", *(name for one in PROTOCOLS.values() for name in one.options)} - {"benchmark", "network"}


def undecided(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those in whose place a protocol's come."""
    return {name: value for name, value in options.items() if name not in DECIDED}
