"""Private experts: a control that routes nothing and forgets nothing, with as many parameters as a routing network."""

from dataclasses import dataclass

import optax

from cotrain.methods.descent import Optimizer
from cotrain.methods.finetune import DescentOptions, Finetune, finetune
from cotrain.networks.network import Network


def private(network: Network, *, lr: float = 0.1, optimizer: Optimizer = optax.sgd) -> Finetune:
    """Task t fine-tunes expert t of each layer, alone: no router to learn, no memory."""
    return finetune(network.reserved(), lr=lr, optimizer=optimizer)


@dataclass(frozen=True)
class PrivateOptions(DescentOptions):
    """a control: each task has its own expert; no routing, no forgetting"""

    def __call__(self, network: Network) -> Finetune:
        return private(network, lr=self.lr, optimizer=self.optimizer())
