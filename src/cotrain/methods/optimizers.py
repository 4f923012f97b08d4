"""Optax's optimizers by name, each as a function of the learning rate."""

from dataclasses import dataclass
from functools import partial

import optax

from cotrain.methods.descent import Optimizer


@dataclass(frozen=True)
class Sgd:
    """plain gradient descent"""

    def __call__(self) -> Optimizer:
        return optax.sgd


@dataclass(frozen=True)
class Momentum:
    """gradient descent with momentum"""

    momentum: float = 0.9
    """share of the last step that is taken again"""

    def __call__(self) -> Optimizer:
        return partial(optax.sgd, momentum=self.momentum)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015)"""

    b1: float = 0.9
    """decay of the first moment"""
    b2: float = 0.999
    """decay of the second moment"""

    def __call__(self) -> Optimizer:
        return partial(optax.adam, b1=self.b1, b2=self.b2)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)"""

    weight_decay: float = 1e-4
    """share of a weight that each step of size 1 takes away"""

    def __call__(self) -> Optimizer:
        return partial(optax.adamw, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay)
