"""A path: the part of a network that a step touches, θ ⊙ R̂.

Each layer plays its part by a route: the experts that take part (its members) and those that each row uses. A row
stands for a task of the batch: one for all examples, or each example's own.

Axes: E experts of a layer, K chosen, M members, B examples, D rows.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from cotrain.networks.parameters import Entries, Parameters, narrow


class Route(NamedTuple):
    """The part that a layer plays in a step; None stands for all."""

    members: Int[Array, " M"] | Int[Array, "B K"] | None = None  # the experts that take part; E is padding
    active: Bool[Array, " M"] | None = None  # the members that may learn
    chosen: Bool[Array, "D M"] | None = None  # the members that a row uses
    noise: Shaped[Array, "D E"] | None = None  # what was drawn to choose them
    gates: Float[Array, "1 M"] | None = None  # given weights, instead of the router's
    still: bool = False  # no member learns
    beside: Float[Array, "B laterals"] | None = None  # what other tasks' experts give, to be read beside the members'


class Path(NamedTuple):
    """The part of a network that a step touches."""

    tasks: Int[Array, " D"]
    real: Bool[Array, " D"] | None  # rows that may learn
    routes: tuple[Route, ...]
    one_head: bool = False  # which all tasks share
    by_task: bool = True  # the router has a row for each task, and not one entry for all
    whole: bool = False  # every stack as it is: what takes part is chosen as the network runs

    @property
    def entries(self) -> list[Entries]:
        """For each stack, what takes part of it."""
        rows = Entries(self.tasks, self.real, repeat=len(self.tasks) > 1)
        shared = Entries(active=None if self.real is None else self.real.any(keepdims=True))
        if self.whole:
            return [shared] * (1 + 2 * len(self.routes))
        experts = [self._experts(route) for route in self.routes]
        return [*experts, shared if self.one_head else rows, *[rows if self.by_task else shared] * len(self.routes)]

    def _experts(self, route: Route) -> Entries:
        if route.members is None or route.members.ndim == 1:
            return Entries(route.members, route.active, still=route.still)
        assert self.real is not None
        return Entries(route.members.ravel(), jnp.repeat(self.real, route.members.shape[1]), repeat=True)


def part_of(parameters: Parameters, path: Path) -> Parameters:
    """The part of the parameters that a path names."""
    entries = zip(parameters.stacks, path.entries, strict=True)
    return Parameters.of([narrow(stack, taking_part.at) for stack, taking_part in entries])


def rows(task: Array, weight: Float[Array, " B"]) -> tuple[Int[Array, " D"], Bool[Array, " D"] | None]:
    """The tasks of a batch, one for all or each example's own, and which of them count."""
    return (task[None], None) if task.ndim == 0 else (task, weight > 0)


def route_of(chosen: Int[Array, "D K"], real: Bool[Array, " D"] | None, experts: int, whole: bool) -> Route:
    """The route through a layer that touches least; or all of it."""
    if chosen.shape[1] == experts:
        return Route(active=None if real is None else jnp.broadcast_to(real.any(), experts))
    if not whole and real is None:
        return Route(members=jnp.sort(chosen[0]))
    if not whole and chosen.size < experts:
        return Route(members=jnp.sort(chosen, axis=1))
    mask = among(jnp.arange(experts), chosen)
    return Route(active=None if real is None else (mask & real[:, None]).any(axis=0), chosen=mask)


def among(members: Int[Array, " M"], chosen: Int[Array, "D K"]) -> Bool[Array, "D M"]:
    """The members that each row has chosen."""
    return (members[None, :, None] == chosen[:, None, :]).any(axis=2)
