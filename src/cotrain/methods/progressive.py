"""Progressive networks: a column for each task, which reads the frozen ones before it (Rusu et al. 2016)."""

from dataclasses import dataclass

import optax

from cotrain.methods.descent import Optimizer
from cotrain.methods.finetune import DescentOptions, Finetune, finetune
from cotrain.networks.network import Network
from cotrain.networks.routing_network import in_columns


def progressive(network: Network, *, lr: float = 0.1, optimizer: Optimizer = optax.sgd) -> Finetune:
    """Task t fine-tunes column t alone: h_i ← f(W_i h_{i−1} + Σ_{j<t} U_i^(t:j) h_{i−1}^(j)), equation 1.

    A column has one expert of each layer and a head. A network whose router is not `columns()` is made anew with as
    many columns as it has experts, and so many units as leave it no more parameters, with lateral connections, than
    it had.
    """
    # Deviation: the paper adds a column for each task; here there is room for as many as experts, within a budget.
    return finetune(in_columns(network), lr=lr, optimizer=optimizer)


@dataclass(frozen=True)
class ProgressiveOptions(DescentOptions):
    """a column of experts for each task, which reads the frozen ones before it; no forgetting"""

    def __call__(self, network: Network) -> Finetune:
        return progressive(network, lr=self.lr, optimizer=self.optimizer())
