"""Private experts: a control that routes nothing and forgets nothing, with as many parameters as a routing network."""

import optax

from cotrain.methods.descent import Optimizer
from cotrain.methods.finetune import Finetune, finetune
from cotrain.networks.routing import Network


def private(network: Network, *, lr: float = 0.1, optimizer: Optimizer = optax.sgd) -> Finetune:
    """Task t fine-tunes expert t of each layer, alone: no router to learn, no memory."""
    return finetune(network.reserved(), lr=lr, optimizer=optimizer)
