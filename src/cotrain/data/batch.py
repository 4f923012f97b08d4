"""A minibatch."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Batch(NamedTuple):
    """Examples that are learned from together."""

    x: Float[Array, "B ..."]
    y: Int[Array, " B"]
    task: Int[Array, ""] | Int[Array, " B"]  # of the whole batch, or of each example
    weight: Float[Array, " B"]  # 0 for padding, 1 for the others

    @property
    def tasks(self) -> Int[Array, " B"]:
        """Each example's task."""
        return jnp.broadcast_to(self.task, self.y.shape)

    def union(self, other: "Batch") -> "Batch":
        """The examples of both: x ∪ x_M."""
        return Batch(
            x=jnp.concatenate([self.x, other.x]),
            y=jnp.concatenate([self.y, other.y]),
            task=jnp.concatenate([self.tasks, other.tasks]),
            weight=jnp.concatenate([self.weight, other.weight]),
        )
