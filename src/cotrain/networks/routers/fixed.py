"""A router that learns nothing: task t has experts t, t + 1, …, t + K − 1, around the end to the first.

With K = 1 and as many experts as tasks, each task has one of its own: a control (`methods/private.py`).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from cotrain.networks.path import Route
from cotrain.networks.routers.router import Size, at, softmax
from cotrain.networks.routers.task_matrix import Matrix


class Fixed(eqx.Module):
    """See `fixed`."""

    own: bool = eqx.field(static=True, default=False)
    by_task: ClassVar[Literal[True]] = True
    learns: ClassVar[bool] = False

    def init(self, size: Size, key: PRNGKeyArray) -> Matrix:
        del key
        first = jnp.arange(size.tasks)[:, None] % size.experts
        distance = (jnp.arange(size.experts)[None, :] - first) % size.experts
        return Matrix((distance < size.k).astype(float), None)

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> None:
        del key, shape

    def scores(self, rows: Matrix, draws: Shaped[Array, "D E"] | None) -> Float[Array, "D E"]:
        del draws
        return rows.logits

    def gates(self, rows: Matrix, route: Route) -> Float[Array, "D M"]:
        return softmax(at(rows.logits, route.members), route.chosen)


def fixed(*, own: bool = False) -> Fixed:
    """Each task its own experts, or as few as possible in common with others, without anything to learn.

    With `own`, a network must have an expert for each task.
    """
    return Fixed(own)


@dataclass(frozen=True)
class FixedOptions:
    """task t has experts t to t + k − 1; nothing is learned"""

    def __call__(self) -> Fixed:
        return fixed()
