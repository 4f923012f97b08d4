"""Routing networks: layers of experts, a router that picks k of them, and a head per task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from cotrain.choice import Choice, option
from cotrain.data.stream import Spec
from cotrain.errors import Invalid, check_name, check_positive
from cotrain.networks import ROUTERS
from cotrain.networks.experts import Expert, dense
from cotrain.networks.layer import AGGREGATIONS
from cotrain.networks.network import Network, build
from cotrain.networks.routers.columns import columns
from cotrain.networks.routers.router import Router
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.shared_bottom import HIDDEN, check_hidden, shared_bottom


def routing_network(
    spec: Spec,
    expert: Expert | Sequence[Expert] = dense(19),
    *,
    layers: int = 2,
    experts: int | Sequence[int] = 20,
    k: int | Sequence[int] = 4,
    router: Router | None = None,
    aggregation: str = "sum",
    activation: Callable[[Array], Array] | None = None,
    one_head: bool = False,
) -> Network:
    """Layers of `experts` experts, of which the `router` (by default, `task_matrix()`) picks `k`.

    `expert`, `experts` and `k` may be lists with one entry per layer. The outputs are summed, or concatenated, with the
    router's gates as weights, and then go through `activation`, if any. Each task has a head, unless `one_head`.
    """
    check_positive("layers", layers)
    return build(
        spec,
        _per_layer("expert", expert, layers),
        _per_layer("experts", experts, layers),
        _per_layer("k", k, layers),
        task_matrix() if router is None else router,
        one_head=one_head,
        aggregation=check_name("aggregation", aggregation, AGGREGATIONS),
        activation=activation,
    )


def parameter_count(network: Network) -> int:
    """How many numbers a network learns: experts, heads and router."""
    made = eqx.filter_eval_shape(network.init, jax.random.key(0))
    router = made.router if network.router is not None and network.router.learns else ()
    return sum(layer.size for layer in (*network.layers, network.head)) + sum(a.size for a in jax.tree.leaves(router))


def units_for_budget(
    budget: Network | int, spec: Spec, *, expert: Callable[[int], Expert] = dense, **options: Any
) -> int:
    """The most units that the experts of `routing_network(spec, expert(units), **options)` can have within a budget.

    The budget is a number of parameters, or a network that has it.
    """
    limit = budget if isinstance(budget, int) else parameter_count(budget)

    def fits(units: int) -> bool:
        return parameter_count(routing_network(spec, expert(units), **options)) <= limit

    if not fits(1):
        least = parameter_count(routing_network(spec, expert(1), **options))
        raise Invalid("budget", limit, f"experts of one unit take {least} parameters")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def in_columns(network: Network) -> Network:
    """A network's experts as columns (see `columns`), with so many units as leave it no more parameters than before.

    That is reckoned for as many tasks as there are columns, so that they stay as they are when tasks are added.
    """
    if network.laterals:
        return network
    spec, make, layers = network.spec, network.layers[0].make, len(network.layers)
    experts = max(layer.experts for layer in network.layers)
    if experts == 1 == spec.tasks:
        return network
    if experts == 1:
        raise Invalid("network", "shared-bottom", "progressive networks need a routing-network")
    if not isinstance(make, dense) or any(layer.make != make for layer in network.layers):
        raise Invalid("expert", make, "give dense ones that are alike, or a routing_network with router=columns(), k=1")

    def expert(units: int) -> Expert:
        return replace(make, units=units)

    options = {"layers": layers, "experts": experts, "k": 1, "router": columns(), "activation": network.activation}
    whole = Spec(spec.shape, spec.classes, experts)
    units = units_for_budget(network.resized(whole), whole, expert=expert, **options)
    return routing_network(spec, expert(units), **options)


@dataclass(frozen=True)
class RoutingNetwork:
    """layers of experts, of which a router picks k"""

    layers: int = 2
    """layers of experts"""
    experts: int = 20
    """experts of a layer"""
    k: int = 4
    """experts that a task uses at once in a layer"""
    units: int | None = None
    """units of an expert; by default as many as the parameters of a shared bottom with --hidden allow"""
    hidden: tuple[int, ...] = HIDDEN
    """units of the shared bottom's layers, whose parameters are the budget"""
    budget_tasks: int | None = None
    """tasks for which that is reckoned; by default all (a run that goes on with more tasks keeps its experts)"""
    aggregation: str = "sum"
    """how the experts' outputs are put together: sum or concatenate"""
    activate_after: bool = False
    """apply ReLU after the experts' outputs are put together, not in each expert"""
    one_head: bool = False
    """one head for all tasks; with a router that reads its input, no task is needed to predict"""
    router: Choice = option(ROUTERS, "task-matrix")
    """what picks the experts"""

    def __post_init__(self):
        for field in ("layers", "experts", "k"):
            check_positive(field, getattr(self, field))
        if self.k > self.experts:
            raise Invalid("k", self.k, f"choose 1 to {self.experts}, the number of experts")
        for field in ("units", "budget_tasks"):
            if getattr(self, field) is not None:
                check_positive(field, getattr(self, field))
        check_hidden(self.hidden)
        check_name("aggregation", self.aggregation, AGGREGATIONS)

    def __call__(self, spec: Spec) -> Network:
        options = {
            "layers": self.layers,
            "experts": self.experts,
            "k": self.k,
            "router": self.router(),
            "aggregation": self.aggregation,
            "activation": jax.nn.relu if self.activate_after else None,
            "one_head": self.one_head,
        }
        units = self.units
        if units is None:
            budgeted = spec if self.budget_tasks is None else Spec(spec.shape, spec.classes, self.budget_tasks)
            budget = shared_bottom(budgeted, self.hidden, one_head=self.one_head)
            units = units_for_budget(budget, budgeted, **options)
        return routing_network(spec, dense(units, _identity) if self.activate_after else dense(units), **options)


def _per_layer(field: str, value: Any, layers: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * layers
    if len(value) != layers:
        raise Invalid(field, value, f"give one, or one for each of the {layers} layers")
    return list(value)


def _identity(x: Array) -> Array:
    return x
