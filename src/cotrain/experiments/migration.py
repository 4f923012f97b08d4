"""Records of the first version, read as this one's: the one migration that there is.

Their configurations were one flat table with every option of every method, router and benchmark, whether it applied or
not. What applies has its name still; what does not is left out, as it changed no number (as the noise of a router that
took none). The file names of such runs are made of all options that were not as by default then, those that did not
apply among them: `old_key`. So a store looks for a run by what its record says where it is not under its own name.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from cotrain.choice import NoOption
from cotrain.errors import Invalid

USUAL: dict[str, Any] = {  # the first version's options, and what they were by default
    "benchmark": "rotated-mnist",
    "method": "cotraining",
    "network": "routing-network",
    "arrays": None,
    "tasks": None,
    "examples": None,
    "test_examples": None,
    "validation": None,
    "epochs": 1,
    "batch": 10,
    "stream_seed": None,
    "permute_first": False,
    "rotation_step": 9.0,
    "hidden": [256, 256],
    "layers": 2,
    "experts": 20,
    "k": 4,
    "units": None,
    "sampling": "gaussian",
    "noise": 0.05,
    "gates": "chosen",
    "noisy_gates": False,
    "aggregation": "sum",
    "activate_after": False,
    "lr": 0.1,
    "router_lr": None,
    "memory_lr": None,
    "cotraining_lr": None,
    "cotrain_heads": False,
    "optimizer": "sgd",
    "memory": 1000,
    "memory_batch": 10,
    "evaluate_all": False,
}


def is_old(record: Any) -> bool:
    """Whether a record's configuration is of the first version."""
    return isinstance(record, dict) and not any(isinstance(value, dict) for value in record.values())


def migrated(record: Mapping[str, Any], known_names: Callable[[Mapping[str, Any]], set[str]]) -> dict[str, Any]:
    """The options of this version that a configuration of the first stands for."""
    for name, value in record.items():
        if name not in USUAL:
            raise NoOption(name, value, "the first version had no such option")
    options = {**USUAL, **record}
    if options["arrays"] is not None:
        options["benchmark"] = "arrays"
    for name in ("benchmark", "network", "method", "sampling", "optimizer"):
        if ":" in str(options[name]):  # which would be imported
            raise Invalid(name, options[name], "the first version had no references")
    names = known_names({name: value for name, value in options.items() if isinstance(value, str)})
    optional = {name for name, value in USUAL.items() if value is None}
    return {
        name: value for name, value in options.items() if name in names and not (value is None and name in optional)
    }


def old_key(record: Mapping[str, Any], numerics: int) -> str:
    """The name that the first version's store gave to a configuration."""
    changed = {name: value for name, value in record.items() if value != USUAL[name]}
    return hashlib.sha256(json.dumps({"numerics": numerics, **changed}, sort_keys=True).encode()).hexdigest()[:12]
