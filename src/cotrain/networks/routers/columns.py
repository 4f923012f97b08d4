"""Columns: task t learns expert t of each layer, and reads the experts of earlier tasks beside it (Rusu et al. 2016).

A layer's input is then what lies below side by side: first the output of the task's own expert, then those of the
experts that it reads, 0 for the others. Whoever runs an expert, it reads what its owner reads, so that it gives the
same for all. Nothing is learned here; the lateral connections are weights of the experts and heads that read.

Axes: T tasks, E experts, M members, D rows, B examples.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from cotrain.networks.path import Route
from cotrain.networks.routers.router import Size, at


class Claims(eqx.Module):
    """Whose a layer's experts are, and who reads them."""

    owned: Float[Array, "T E"]  # 1 for the experts that a task learns
    read: Float[Array, "T E"]  # 1 for those whose outputs it reads beside its own


class Columns(eqx.Module):
    """See `columns`."""

    by_task: ClassVar[Literal[True]] = True
    learns: ClassVar[bool] = False

    def init(self, size: Size, key: PRNGKeyArray) -> Claims:
        del key
        return Claims(jnp.eye(size.tasks, size.experts), jnp.tri(size.tasks, size.experts, -1))

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> None:
        del key, shape

    def scores(self, rows: Claims, draws: Shaped[Array, "D E"] | None) -> Float[Array, "D E"]:
        del draws
        return rows.owned

    def gates(self, rows: Claims, route: Route) -> Float[Array, "D M"]:
        return at(rows.owned, route.members)


def columns() -> Columns:
    """Task t learns expert t of each layer, a column, which reads the outputs of the columns before it.

    A network must have k = 1 and an expert for each task.
    """
    return Columns()


def side_by_side(read: Float[Array, "D E"], outputs: Float[Array, "E B units"]) -> Float[Array, "B laterals"]:
    """The outputs that each row reads, 0 for the others; the last expert comes after all who could read it."""
    masked = (read.T[:, :, None] * outputs)[:-1]
    return jnp.moveaxis(masked, 0, 1).reshape(outputs.shape[1], (len(outputs) - 1) * outputs.shape[2])


@dataclass(frozen=True)
class ColumnsOptions:
    """task t learns expert t and reads those of earlier tasks (progressive networks); takes k = 1"""

    def __call__(self) -> Columns:
        return columns()
