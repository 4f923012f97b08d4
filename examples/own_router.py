"""A router of your own: each example goes to the experts whose prototypes are nearest, and needs no task for it.

From the shell, here: cotrain run --router own_router:Options --one-head --method replay --seeds 3 --out runs/prototypes
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp

import cotrain


class Prototypes(eqx.Module):
    sharpness: jax.Array
    by_task = False  # it reads the layer's input
    learns = True

    def init(self, size, key):
        return jax.random.uniform(key, (1, size.experts, size.inputs))  # one entry for all tasks

    def draw(self, key, shape):
        return None  # nothing at random

    def read(self, stack, draws, x, k, weight):
        logits = -self.sharpness * ((x[:, None] - stack) ** 2).mean(axis=2)
        chosen = logits >= jax.lax.top_k(logits, k)[0][:, -1:]
        return cotrain.Mixture(jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf)), chosen)


@dataclass(frozen=True)
class Options:
    """the experts whose prototypes are nearest to the input"""

    sharpness: float = 10.0
    """how much nearer counts for more"""

    def __call__(self):
        return Prototypes(jnp.asarray(self.sharpness))
