"""Continual learning with sparse routing networks and co-training.

The public names, each imported when it is first used, so that the command line starts fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cotrain.choice import Choice as Choice
    from cotrain.choice import option as option
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
    from cotrain.experiments.learner import Learner as Learner
    from cotrain.experiments.result import Result as Result
    from cotrain.experiments.result import Results as Results
    from cotrain.experiments.result import save as save
    from cotrain.experiments.run import run as run
    from cotrain.experiments.run import run_config as run_config
    from cotrain.experiments.saved import load_learner as load_learner
    from cotrain.experiments.watch import Callback as Callback
    from cotrain.experiments.watch import Watch as Watch
    from cotrain.memory import reservoir as reservoir
    from cotrain.memory import ring as ring
    from cotrain.methods.agem import agem as agem
    from cotrain.methods.cotraining import cotraining as cotraining
    from cotrain.methods.der import der as der
    from cotrain.methods.der import der_plus_plus as der_plus_plus
    from cotrain.methods.descent import Learned as Learned
    from cotrain.methods.descent import Optimizer as Optimizer
    from cotrain.methods.descent import Part as Part
    from cotrain.methods.descent import Rates as Rates
    from cotrain.methods.descent import Slope as Slope
    from cotrain.methods.descent import begin as begin
    from cotrain.methods.descent import cross_entropy as cross_entropy
    from cotrain.methods.descent import descend as descend
    from cotrain.methods.descent import move as move
    from cotrain.methods.descent import rates_of as rates_of
    from cotrain.methods.descent import slope as slope
    from cotrain.methods.ewc import ewc as ewc
    from cotrain.methods.expert_gate import expert_gate as expert_gate
    from cotrain.methods.finetune import DescentOptions as DescentOptions
    from cotrain.methods.finetune import Finetune as Finetune
    from cotrain.methods.finetune import RoutedOptions as RoutedOptions
    from cotrain.methods.finetune import finetune as finetune
    from cotrain.methods.gem import gem as gem
    from cotrain.methods.lwf import lwf as lwf
    from cotrain.methods.mer import mer as mer
    from cotrain.methods.method import Info as Info
    from cotrain.methods.method import Method as Method
    from cotrain.methods.ogd import ogd as ogd
    from cotrain.methods.private import private as private
    from cotrain.methods.progressive import progressive as progressive
    from cotrain.methods.replay import replay as replay
    from cotrain.methods.si import si as si
    from cotrain.methods.ucb import ucb as ucb
    from cotrain.networks.experts import convolution as convolution
    from cotrain.networks.experts import dense as dense
    from cotrain.networks.experts import mlp as mlp
    from cotrain.networks.network import Network as Network
    from cotrain.networks.parameters import Parameters as Parameters
    from cotrain.networks.path import Route as Route
    from cotrain.networks.routers.by_input import by_input as by_input
    from cotrain.networks.routers.columns import columns as columns
    from cotrain.networks.routers.fixed import fixed as fixed
    from cotrain.networks.routers.router import InputRouter as InputRouter
    from cotrain.networks.routers.router import Mixture as Mixture
    from cotrain.networks.routers.router import Size as Size
    from cotrain.networks.routers.router import TaskRouter as TaskRouter
    from cotrain.networks.routers.sampling import gaussian as gaussian
    from cotrain.networks.routers.sampling import gumbel as gumbel
    from cotrain.networks.routers.sampling import no_noise as no_noise
    from cotrain.networks.routers.sampling import noisy_top_k as noisy_top_k
    from cotrain.networks.routers.task_matrix import task_matrix as task_matrix
    from cotrain.networks.routing_network import parameter_count as parameter_count
    from cotrain.networks.routing_network import routing_network as routing_network
    from cotrain.networks.routing_network import units_for_budget as units_for_budget
    from cotrain.networks.shared_bottom import shared_bottom as shared_bottom

_MODULES = {
    "cotrain.choice": ["Choice", "option"],
    "cotrain.data.arrays": ["load_arrays"],
    "cotrain.data.batch": ["Batch"],
    "cotrain.data.fetch": ["Dataset", "load"],
    "cotrain.data.stream": ["Spec", "Stream", "permuted", "rotated", "split"],
    "cotrain.engine": ["Snapshot", "learn"],
    "cotrain.errors": ["Diverged", "Invalid"],
    "cotrain.experiments.config": ["Config"],
    "cotrain.experiments.learner": ["Learner"],
    "cotrain.experiments.result": ["Result", "Results", "save"],
    "cotrain.experiments.run": ["run", "run_config"],
    "cotrain.experiments.saved": ["load_learner"],
    "cotrain.experiments.watch": ["Callback", "Watch"],
    "cotrain.memory": ["reservoir", "ring"],
    "cotrain.methods.agem": ["agem"],
    "cotrain.methods.cotraining": ["cotraining"],
    "cotrain.methods.der": ["der", "der_plus_plus"],
    "cotrain.methods.descent": [
        "Learned",
        "Optimizer",
        "Part",
        "Rates",
        "Slope",
        "begin",
        "cross_entropy",
        "descend",
        "move",
        "slope",
        "rates_of",
    ],
    "cotrain.methods.ewc": ["ewc"],
    "cotrain.methods.expert_gate": ["expert_gate"],
    "cotrain.methods.finetune": ["DescentOptions", "Finetune", "RoutedOptions", "finetune"],
    "cotrain.methods.mer": ["mer"],
    "cotrain.methods.lwf": ["lwf"],
    "cotrain.methods.gem": ["gem"],
    "cotrain.methods.method": ["Info", "Method"],
    "cotrain.methods.ogd": ["ogd"],
    "cotrain.methods.private": ["private"],
    "cotrain.methods.progressive": ["progressive"],
    "cotrain.methods.replay": ["replay"],
    "cotrain.methods.si": ["si"],
    "cotrain.methods.ucb": ["ucb"],
    "cotrain.networks.experts": ["convolution", "dense", "mlp"],
    "cotrain.networks.network": ["Network"],
    "cotrain.networks.parameters": ["Parameters"],
    "cotrain.networks.path": ["Route"],
    "cotrain.networks.routers.by_input": ["by_input"],
    "cotrain.networks.routers.columns": ["columns"],
    "cotrain.networks.routers.fixed": ["fixed"],
    "cotrain.networks.routers.router": ["InputRouter", "Mixture", "Size", "TaskRouter"],
    "cotrain.networks.routers.sampling": ["gaussian", "gumbel", "no_noise", "noisy_top_k"],
    "cotrain.networks.routers.task_matrix": ["task_matrix"],
    "cotrain.networks.routing_network": ["parameter_count", "routing_network", "units_for_budget"],
    "cotrain.networks.shared_bottom": ["shared_bottom"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cotrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
