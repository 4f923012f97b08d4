"""Continual learning with sparse routing networks and co-training.

The public names, each imported when it is first used, so that the command line starts fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cotrain.data.arrays import load_arrays as load_arrays
    from cotrain.data.batch import Batch as Batch
    from cotrain.data.fetch import Dataset as Dataset
    from cotrain.data.fetch import load as load
    from cotrain.data.stream import Spec as Spec
    from cotrain.data.stream import Stream as Stream
    from cotrain.data.stream import permuted as permuted
    from cotrain.data.stream import rotated as rotated
    from cotrain.data.stream import split as split
    from cotrain.engine import Snapshot as Snapshot
    from cotrain.engine import learn as learn
    from cotrain.errors import Diverged as Diverged
    from cotrain.errors import Invalid as Invalid
    from cotrain.experiments.config import Config as Config
    from cotrain.experiments.result import Result as Result
    from cotrain.experiments.result import Results as Results
    from cotrain.experiments.result import save as save
    from cotrain.experiments.run import run as run
    from cotrain.experiments.run import run_config as run_config
    from cotrain.memory import reservoir as reservoir
    from cotrain.methods.cotraining import cotraining as cotraining
    from cotrain.methods.finetune import finetune as finetune
    from cotrain.methods.private import private as private
    from cotrain.methods.replay import replay as replay
    from cotrain.networks.experts import convolution as convolution
    from cotrain.networks.experts import dense as dense
    from cotrain.networks.experts import mlp as mlp
    from cotrain.networks.routing import Network as Network
    from cotrain.networks.routing import parameter_count as parameter_count
    from cotrain.networks.routing import routing_network as routing_network
    from cotrain.networks.routing import shared_bottom as shared_bottom
    from cotrain.networks.routing import units_for_budget as units_for_budget

_MODULES = {
    "cotrain.data.arrays": ["load_arrays"],
    "cotrain.data.batch": ["Batch"],
    "cotrain.data.fetch": ["Dataset", "load"],
    "cotrain.data.stream": ["Spec", "Stream", "permuted", "rotated", "split"],
    "cotrain.engine": ["Snapshot", "learn"],
    "cotrain.errors": ["Diverged", "Invalid"],
    "cotrain.experiments.config": ["Config"],
    "cotrain.experiments.result": ["Result", "Results", "save"],
    "cotrain.experiments.run": ["run", "run_config"],
    "cotrain.memory": ["reservoir"],
    "cotrain.methods.cotraining": ["cotraining"],
    "cotrain.methods.finetune": ["finetune"],
    "cotrain.methods.private": ["private"],
    "cotrain.methods.replay": ["replay"],
    "cotrain.networks.experts": ["convolution", "dense", "mlp"],
    "cotrain.networks.routing": [
        "Network",
        "parameter_count",
        "routing_network",
        "shared_bottom",
        "units_for_budget",
    ],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cotrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
