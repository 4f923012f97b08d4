"""The paper's router: a matrix of logits with a row for each task, R in Algorithm 1.

Axes: T tasks, E experts, K chosen, M members, D rows.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from cotrain.choice import Choice, option
from cotrain.errors import Invalid, check_name
from cotrain.networks import SAMPLINGS
from cotrain.networks.path import Route
from cotrain.networks.routers.router import Size, at, softmax
from cotrain.networks.routers.sampling import Sampling, gaussian

GATES = ("chosen", "all")


class Matrix(eqx.Module):
    """A layer's routing matrix."""

    logits: Float[Array, "T E"]
    spread: Float[Array, "T E"] | None  # of the noise, before softplus, where it is learned


class TaskMatrix(eqx.Module):
    """See `task_matrix`."""

    sampling: Sampling
    kind: str = eqx.field(static=True)  # of gates
    noisy_gates: bool = eqx.field(static=True)
    by_task: ClassVar[Literal[True]] = True
    learns: ClassVar[bool] = True

    def init(self, size: Size, key: PRNGKeyArray) -> Matrix:
        # Deviation: the paper does not say how R starts; zeros would tie, and a tie falls to the first experts.
        shape = (size.tasks, size.experts)
        return Matrix(jax.random.uniform(key, shape, minval=-1e-3, maxval=1e-3), self.sampling.spread(shape))

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> Shaped[Array, "D E"] | None:
        return self.sampling.draw(key, shape)

    def scores(self, rows: Matrix, draws: Shaped[Array, "D E"] | None) -> Float[Array, "D E"]:
        return rows.logits if draws is None else rows.logits + self.sampling.noise(rows.spread, draws)

    def gates(self, rows: Matrix, route: Route) -> Float[Array, "D M"]:
        logits = self.scores(rows, route.noise if self.noisy_gates else None)
        if self.kind == "all":  # a share of all experts' probability
            return at(jax.nn.softmax(logits), route.members) * (1 if route.chosen is None else route.chosen)
        return softmax(at(logits, route.members), route.chosen)


def task_matrix(sampling: Sampling | None = None, *, gates: str = "chosen", noisy_gates: bool = False) -> TaskMatrix:
    """A row of logits for each task, whose K largest are chosen.

    `sampling` is the noise that is added while training, by default `gaussian()`. An expert's gate is its softmax among
    the "chosen" experts or among "all"; `noisy_gates` takes the noisy logits for it.
    """
    if isinstance(sampling, str):
        raise Invalid("sampling", sampling, "give an object, as cotrain.gumbel(0.1)")
    sampling = gaussian() if sampling is None else sampling
    return TaskMatrix(sampling, check_name("gates", gates, GATES), noisy_gates or sampling.noisy_gates)


@dataclass(frozen=True)
class TaskMatrixOptions:
    """a row of logits for each task (the paper's)"""

    sampling: Choice = option(SAMPLINGS, "gaussian")
    """how routes are sampled while training"""
    gates: str = "chosen"
    """an expert's weight is its softmax among the chosen experts, or among all"""
    noisy_gates: bool = False
    """take the noisy logits for the gates too"""

    def __post_init__(self):
        check_name("gates", self.gates, GATES)

    def __call__(self) -> TaskMatrix:
        return task_matrix(self.sampling(), gates=self.gates, noisy_gates=self.noisy_gates)
