"""What a router is: it picks K of a layer's experts, and weighs them.

There are two kinds. One goes by the task: its routes are known before there is an input, so a step need only touch
the experts on them. The other reads the layer's input, and each example takes a route of its own.

Axes: T tasks, E experts, K chosen, M members, B examples, D rows.
"""

from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from cotrain.data.stream import Spec
from cotrain.networks.layer import Layer
from cotrain.networks.path import Route, among


class Size(NamedTuple):
    """What a router must know of a layer."""

    tasks: int
    experts: int
    k: int
    inputs: int  # numbers of an input, flattened

    @staticmethod
    def of(spec: Spec, layer: Layer) -> "Size":
        """The size of a layer."""
        inputs = 1
        for size in layer.shape:
            inputs *= size
        return Size(spec.tasks, layer.experts, layer.k, inputs)


class Mixture(NamedTuple):
    """The experts that examples take."""

    gates: Float[Array, "B E"]  # 0 off the routes
    chosen: Bool[Array, "B E"]
    penalty: Float[Array, ""] | None = None  # to be added to the loss


class TaskRouter(Protocol):
    """Goes by the task: what it learns of a layer is a stack with a row for each."""

    by_task: ClassVar[Literal[True]]
    learns: ClassVar[bool]  # whether steps move it

    def init(self, size: Size, key: PRNGKeyArray) -> Any:
        """What it learns of a layer, at the start."""
        ...

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> Shaped[Array, "D E"] | None:
        """The random numbers that sampling the routes of D rows takes."""
        ...

    def scores(self, rows: Any, draws: Shaped[Array, "D E"] | None) -> Float[Array, "D E"]:
        """By what the K largest are chosen, for some tasks' rows; without draws, as for predictions."""
        ...

    def gates(self, rows: Any, route: Route) -> Float[Array, "D M"]:
        """How much each member of a route counts; 0 where a row does not use it."""
        ...


class InputRouter(Protocol):
    """Reads the layer's input: what it learns of a layer is a stack of one, for all tasks."""

    by_task: ClassVar[Literal[False]]
    learns: ClassVar[bool]

    def init(self, size: Size, key: PRNGKeyArray) -> Any:
        """What it learns of a layer, at the start."""
        ...

    def draw(self, key: PRNGKeyArray, shape: tuple[int, int]) -> Shaped[Array, "B E"] | None:
        """The random numbers that sampling the routes of B examples takes."""
        ...

    def read(
        self,
        stack: Any,
        draws: Shaped[Array, "B E"] | None,
        x: Float[Array, "B inputs"],
        k: int,
        weight: Float[Array, " B"],
    ) -> Mixture:
        """The experts that examples take; those of weight 0 do not count."""
        ...


Router = TaskRouter | InputRouter


def at(logits: Float[Array, "D E"], members: Int[Array, "..."] | None) -> Float[Array, "D M"]:
    """The members' logits."""
    if members is None or members.ndim == 1:
        return logits if members is None else logits.at[:, members].get(mode="clip")
    return jnp.take_along_axis(logits, members, axis=1)


def softmax(logits: Float[Array, "D M"], chosen: Bool[Array, "D M"] | None) -> Float[Array, "D M"]:
    """The softmax over the chosen; 0 elsewhere, and where nothing is chosen."""
    if chosen is None:
        return jax.nn.softmax(logits)
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=1, keepdims=True, where=chosen, initial=-1e30))
    exponential = jnp.exp(jnp.where(chosen, logits - largest, -jnp.inf))
    total = exponential.sum(axis=1, keepdims=True)
    return exponential / jnp.where(total > 0, total, 1)


def largest(logits: Float[Array, "D E"], k: int) -> Bool[Array, "D E"]:
    """The K largest of each row."""
    return among(jnp.arange(logits.shape[1]), jax.lax.top_k(logits, k)[1])
