"""Progressive networks: a column for each task, which reads the frozen ones before it (Rusu et al. 2016)."""

from dataclasses import dataclass, replace

import optax

from cotrain.data.stream import Spec
from cotrain.errors import Invalid
from cotrain.methods.descent import Optimizer
from cotrain.methods.finetune import DescentOptions, Finetune, finetune
from cotrain.networks.experts import dense
from cotrain.networks.network import Network, build
from cotrain.networks.routers.columns import columns
from cotrain.networks.routing_network import units_for_budget


def progressive(network: Network, *, lr: float = 0.1, optimizer: Optimizer = optax.sgd) -> Finetune:
    """Task t fine-tunes column t alone: h_i ← f(W_i h_{i−1} + Σ_{j<t} U_i^(t:j) h_{i−1}^(j)), equation 1.

    A column has one expert of each layer and a head. A network whose router is not `columns()` is made anew with as
    many columns as it has experts, and so many units as leave it no more parameters, with lateral connections, than
    it had (for a task for each expert).
    """
    return finetune(network if network.laterals else _in_columns(network), lr=lr, optimizer=optimizer)


def _in_columns(network: Network) -> Network:
    """A network's experts as columns, smaller by what their lateral connections take."""
    spec, makes = network.spec, [layer.make for layer in network.layers]
    experts = max(layer.experts for layer in network.layers)
    if experts == 1:
        if spec.tasks > 1:
            raise Invalid("network", "shared-bottom", "progressive networks need a routing-network")
        return network
    kind = makes[0]
    if not isinstance(kind, dense) or {*makes} != {kind}:
        raise Invalid("expert", kind, "give dense ones that are alike, or a routing_network with router=columns(), k=1")
    sizes, ones = [experts] * len(makes), [1] * len(makes)
    options = {"layers": len(makes), "experts": sizes, "k": ones, "router": columns(), "activation": network.activation}
    whole = Spec(spec.shape, spec.classes, experts)
    units = units_for_budget(network.resized(whole), whole, expert=lambda units: replace(kind, units=units), **options)
    makes = [replace(kind, units=units)] * len(makes)
    return build(spec, makes, sizes, ones, columns(), activation=network.activation)


@dataclass(frozen=True)
class ProgressiveOptions(DescentOptions):
    """a column of experts for each task, which reads the frozen ones before it; no forgetting"""

    def __call__(self, network: Network) -> Finetune:
        return progressive(network, lr=self.lr, optimizer=self.optimizer())
