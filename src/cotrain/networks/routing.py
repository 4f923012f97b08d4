"""Routing networks: layers of experts, a router that picks K of them for each task, and a head per task.

A step touches a *part* of the network, named by a `Path`: its experts (the members of each layer), and the router
rows and heads of the batch's tasks. `narrow` gathers that part, `widen` writes it back. The members run on every
example, combined by the gates; or, where there are many experts, each example has its own K of them.

Axes: T tasks, E experts of a layer, K chosen, M members, B examples, D rows (one for all examples, or each its own).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from cotrain.data.batch import Batch
from cotrain.data.stream import Spec
from cotrain.errors import Invalid, check_name, check_positive
from cotrain.networks.experts import Expert, dense
from cotrain.randomness import normal, normal_bits

SAMPLINGS = ("gaussian", "noisy-top-k", "gumbel", "none")
GATES = ("chosen", "all")
AGGREGATIONS = ("sum", "concatenate")


class Router(eqx.Module):
    """A layer's routing matrix."""

    logits: Float[Array, "T E"]
    spread: Float[Array, "T E"] | None  # of the noise, before softplus, where it is learned (Shazeer et al. 2017)


class Parameters(eqx.Module):
    """All that a network learns, in stacks: the leading axis counts experts or tasks."""

    experts: tuple[Any, ...]  # a stack of E modules per layer
    heads: Any  # a stack of T modules
    router: tuple[Any, ...]  # a Router per layer; None where there is only one expert

    @property
    def stacks(self) -> list[Any]:
        """The stacks in a row: each layer's experts, the heads, each layer's router."""
        return [*self.experts, self.heads, *self.router]

    @staticmethod
    def of(stacks: Sequence[Any]) -> "Parameters":
        """The parameters with these stacks."""
        layers = len(stacks) // 2
        return Parameters(tuple(stacks[:layers]), stacks[layers], tuple(stacks[layers + 1 :]))


class Route(NamedTuple):
    """The part that a layer plays in a step; None stands for all."""

    members: Int[Array, " M"] | Int[Array, "B K"] | None = None  # the experts that take part; E is padding
    active: Bool[Array, " M"] | None = None  # the members that may learn
    chosen: Bool[Array, "D M"] | None = None  # the members that a row uses
    noise: Float[Array, "D E"] | None = None  # what was drawn to choose them
    gates: Float[Array, "1 M"] | None = None  # given weights, instead of the router's
    still: bool = False  # no member learns


class Entries(NamedTuple):
    """The entries of a stack that take part in a step; None stands for all."""

    at: Int[Array, " N"] | None = None
    active: Bool[Array, " N"] | None = None  # those that may learn
    repeat: bool = False  # the same entry may be there several times
    still: bool = False  # none may learn


class Path(NamedTuple):
    """The part of a network that a step touches."""

    tasks: Int[Array, " D"]
    real: Bool[Array, " D"] | None  # rows that may learn
    routes: tuple[Route, ...]

    @property
    def entries(self) -> list[Entries]:
        """For each stack, what takes part of it."""
        rows = Entries(self.tasks, self.real, repeat=len(self.tasks) > 1)
        return [self._experts(route) for route in self.routes] + [rows] * (1 + len(self.routes))

    def _experts(self, route: Route) -> Entries:
        if route.members is None or route.members.ndim == 1:
            return Entries(route.members, route.active, still=route.still)
        assert self.real is not None
        return Entries(route.members.ravel(), jnp.repeat(self.real, route.members.shape[1]), repeat=True)


class Bucket(NamedTuple):
    """A kind of co-training step, by where there are unused experts and how many."""

    first: int  # the first layer that has any
    own: range  # how many it may have
    later: range  # the most that a layer after it may have

    def fits(self, unused: Int[Array, " layers"]) -> Bool[Array, ""]:
        """Whether it is the one for these numbers of unused experts."""
        own, later = unused[self.first], jnp.max(unused[self.first + 1 :], initial=0)
        here = (unused > 0).any() & ((unused > 0).argmax() == self.first)
        return (
            here & (self.own[0] <= own) & (own <= self.own[-1]) & (self.later[0] <= later) & (later <= self.later[-1])
        )

    def size(self, layer: int) -> int:
        """The most unused experts that a layer may have."""
        return (self.own if layer == self.first else self.later)[-1]


class Layer(eqx.Module):
    """What is fixed about a layer."""

    make: Expert = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)  # of an input
    experts: int = eqx.field(static=True)
    k: int = eqx.field(static=True)
    module: Any  # an expert without its arrays

    def init(self, key: PRNGKeyArray) -> Any:
        """A stack of new experts."""
        stack = eqx.filter_vmap(lambda key: self.make(self.shape, key))(jax.random.split(key, self.experts))
        return eqx.filter(stack, eqx.is_inexact_array)

    def run(self, arrays: Any, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """One expert on one example."""
        return eqx.combine(arrays, self.module)(x)

    def outputs(self, stack: Any, route: Route, x: Float[Array, "B ..."]) -> Float[Array, "M B ..."]:
        """Every member on every example; or, where each has its own, the K of each."""
        if self.experts == 1:
            return jax.vmap(self.run, (None, 0))(jax.tree.map(lambda a: a[0], stack), x)[None]
        if route.members is None or route.members.ndim == 1:
            if hasattr(self.module, "together"):
                return eqx.combine(stack, self.module).together(x)
            return jax.vmap(jax.vmap(self.run, (None, 0)), (0, None))(stack, x)
        own = jax.tree.map(lambda a: a.reshape(len(x), -1, *a.shape[1:]), stack)  # [B, K, ...]
        return jax.vmap(jax.vmap(self.run, (0, None)), out_axes=1)(own, x)


class Network(eqx.Module):
    """Layers of experts between the input and the heads; made by `routing_network` and `shared_bottom`."""

    spec: Spec = eqx.field(static=True)
    layers: tuple[Layer, ...]
    head: Layer
    noise: Float[Array, ""]
    sampling: str = eqx.field(static=True)
    gates: str = eqx.field(static=True)
    noisy_gates: bool = eqx.field(static=True)
    aggregation: str = eqx.field(static=True)
    activation: Callable[[Array], Array] | None = eqx.field(static=True)  # after aggregation
    private: bool = eqx.field(static=True)  # each task has its own expert; the router learns nothing

    def init(self, key: PRNGKeyArray) -> Parameters:
        """New parameters."""
        head_key, router_key, expert_key = jax.random.split(key, 3)
        expert_keys, router_keys = (jax.random.split(key, len(self.layers)) for key in (expert_key, router_key))
        return Parameters(
            experts=tuple(layer.init(key) for layer, key in zip(self.layers, expert_keys, strict=True)),
            heads=self.head.init(head_key),
            router=tuple(self._router(layer, key) for layer, key in zip(self.layers, router_keys, strict=True)),
        )

    def _router(self, layer: Layer, key: PRNGKeyArray) -> Router | None:
        if layer.experts == 1:
            return None
        shape = (self.spec.tasks, layer.experts)
        if self.private:
            return Router(jnp.eye(*shape), None)
        # Deviation: the paper does not say how R starts; zeros would tie, and a tie falls to the first experts.
        logits = jax.random.uniform(key, shape, minval=-1e-3, maxval=1e-3)
        learned = self.sampling == "noisy-top-k"
        return Router(logits, jnp.broadcast_to(jnp.log(jnp.expm1(self.noise)), shape) if learned else None)

    def draw(self, key: PRNGKeyArray, rows: int) -> tuple[Shaped[Array, "D E"] | None, ...]:
        """The random numbers that sampling the routes of `rows` tasks takes; for normal ones, their random bits."""
        distribution = jax.random.gumbel if self.sampling == "gumbel" else normal_bits
        return tuple(
            None if self.sampling == "none" or layer.experts == 1 else distribution(key, (rows, layer.experts))
            for layer, key in zip(self.layers, jax.random.split(key, len(self.layers)), strict=True)
        )

    def sample(
        self, parameters: Parameters, task: Array, weight: Float[Array, " B"], noise: Sequence[Array | None]
    ) -> Path:
        """The routes for a batch of one task, or of each example's own: R̂ ← sample(R). The noise is as in `draw`."""
        tasks, real = _rows(task, weight)
        routes = []
        for layer, router, draws in zip(self.layers, parameters.router, noise, strict=True):
            if router is None:
                routes.append(Route(active=None if real is None else real.any(keepdims=True)))
                continue
            if real is not None and draws is not None:  # examples of the same task take the same route
                draws = draws[((tasks[:, None] == tasks[None, :]) & real[None, :]).argmax(axis=1)]
            if draws is not None and jnp.issubdtype(draws.dtype, jnp.unsignedinteger):
                draws = normal(draws)
            logits = self._logits(narrow(router, tasks), draws)
            chosen = jax.lax.top_k(logits, layer.k)[1]  # [D, K]
            routes.append(_route(chosen, real, layer.experts)._replace(noise=draws))
        return Path(tasks, real, tuple(routes))

    def best(self, parameters: Parameters, task: Int[Array, ""]) -> Path:
        """The routes that predictions for a task take: the K largest logits, without noise."""
        return self.sample(parameters, task, jnp.ones(1), (None,) * len(self.layers))

    def used(self, parameters: Parameters, task: Int[Array, ""]) -> tuple[Bool[Array, " E"], ...]:
        """The experts that a task uses: e ∈ argtop-k R[l,t,:]."""
        routes = self.best(parameters, task).routes
        return tuple(
            jnp.ones(layer.experts, bool)
            if route.members is None
            else jnp.zeros(layer.experts, bool).at[route.members].set(True)
            for layer, route in zip(self.layers, routes, strict=True)
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The co-training steps to compile, of which one fits wherever there are unused experts."""
        routed = {i: layer for i, layer in enumerate(self.layers) if layer.k < layer.experts}
        return tuple(
            Bucket(first, own, later)
            for first, layer in routed.items()
            for own in _sizes([layer])
            for later in _sizes([layer for i, layer in routed.items() if i > first])
        )

    def unused(
        self,
        parameters: Parameters,
        used: Sequence[Bool[Array, "T E"]],
        task: Int[Array, ""],
        batch: Batch,
        bucket: Bucket,
    ) -> Path:
        """All experts that no task uses, with equal weights, if there are as many as the bucket holds: θ ⊙ (1 − E).

        Deviation: θ ⊙ (1 − E) is nothing in a layer with no unused expert; there the batch takes the current task's
        best route, which learns nothing.
        """
        routes = []
        layers = zip(self.layers, parameters.router, used, self.best(parameters, task).routes, strict=True)
        for place, (layer, router, taken, best) in enumerate(layers):
            if router is not None:
                best = best._replace(gates=self._gates(narrow(router, task[None]), best))
            if place < bucket.first or best.members is None or best.gates is None:
                routes.append(best._replace(still=True))
                continue
            free = ~taken.any(axis=0)
            count = free.sum()
            gates = jnp.zeros(layer.experts).at[best.members].set(best.gates[0])
            gates = jnp.where(count > 0, free / jnp.maximum(count, 1), gates)[None]
            members, active = None, free
            if bucket.size(place) < layer.experts:
                members = jnp.nonzero(gates[0] > 0, size=bucket.size(place), fill_value=layer.experts)[0]
                active = (members < layer.experts) & (count > 0)
                gates = gates.at[:, members].get(mode="fill", fill_value=0)
            routes.append(Route(members, active, gates > 0, None, gates))
        return Path(*_rows(batch.tasks, batch.weight), tuple(routes))

    def apply(self, part: Parameters, path: Path, x: Float[Array, "B ..."]) -> Float[Array, "B classes"]:
        """The logits that a part of the network gives to a batch."""
        for layer, stack, router, route in zip(self.layers, part.experts, part.router, path.routes, strict=True):
            outputs = layer.outputs(stack, route, x)  # [M, B, ...]
            x = outputs[0] if layer.experts == 1 else self._combine(layer, router, route, outputs)
            x = x if self.activation is None else self.activation(x)
        if len(path.tasks) == 1:
            return self.head.outputs(part.heads, Route(), x)[0]
        return jax.vmap(self.head.run)(part.heads, x)

    def predict(self, parameters: Parameters, task: Int[Array, ""], x: Float[Array, "B ..."]) -> Array:
        """The logits for examples of one task, by its best routes."""
        path = self.best(parameters, task)
        return self.apply(part_of(parameters, path), path, x)

    def probabilities(self, parameters: Parameters) -> tuple[Float[Array, "T E"], ...]:
        """The gates of every task when predicting: the routing matrix, 0 off the routes."""
        matrices = []
        for layer, router in zip(self.layers, parameters.router, strict=True):
            if router is None:
                matrices.append(jnp.ones((self.spec.tasks, 1)))
                continue
            chosen = jax.lax.top_k(router.logits, layer.k)[1]
            matrices.append(self._gates(router, Route(chosen=_among(jnp.arange(layer.experts), chosen))))
        return tuple(matrices)

    def _logits(self, router: Router, noise: Float[Array, "D E"] | None) -> Float[Array, "D E"]:
        if noise is None:
            return router.logits
        scale = self.noise if router.spread is None else jax.nn.softplus(router.spread)
        return router.logits + scale * noise

    def _gates(self, router: Router, route: Route) -> Float[Array, "D M"]:
        """How much each member counts, for each row."""
        if route.gates is not None:
            return route.gates
        logits = self._logits(router, route.noise if self.noisy_gates else None)
        if self.gates == "all":  # a share of all experts' probability
            return _at(jax.nn.softmax(logits), route.members) * (1 if route.chosen is None else route.chosen)
        return _softmax(_at(logits, route.members), route.chosen)

    def _combine(
        self, layer: Layer, router: Router, route: Route, outputs: Float[Array, "M B ..."]
    ) -> Float[Array, "B ..."]:
        """The gates' sum of the members' outputs; or, side by side, of those in each of K slots."""
        gates = self._gates(router, route)  # [D, M]
        if self.aggregation == "concatenate":
            chosen = jnp.ones(gates.shape, bool) if route.chosen is None else route.chosen
            slot = (jnp.cumsum(chosen, axis=1) - 1) % layer.k  # the first K members by index, then again
            gates = gates[..., None] * (slot[..., None] == jnp.arange(layer.k)[None, None, :])  # [D, M, K]
            outputs = outputs[:, :, None]  # [M, B, 1, ...]
        weights = jnp.moveaxis(gates, 0, 1)  # [M, B or 1, ...]
        combined = (weights.reshape(weights.shape + (1,) * (outputs.ndim - weights.ndim)) * outputs).sum(axis=0)
        if self.aggregation == "concatenate":
            combined = combined.reshape(len(combined), -1, *combined.shape[3:])
        return combined

    def reserved(self) -> "Network":
        """The same experts with a fixed router: task t uses expert t of each layer and no other."""
        for layer in self.layers:
            if layer.experts < self.spec.tasks:
                raise Invalid("experts", layer.experts, f"a private expert per task takes {self.spec.tasks} or more")
        return _network(
            self.spec,
            [layer.make for layer in self.layers],
            [layer.experts for layer in self.layers],
            [1] * len(self.layers),
            sampling="none",
            activation=self.activation,
            private=True,
        )


def narrow(stack: Any, index: Int[Array, " M"] | None) -> Any:
    """The chosen entries of a stack; padding gives any of them."""
    return stack if index is None else jax.tree.map(lambda a: a.at[index].get(mode="clip"), stack)


def widen(
    stack: Any, index: Int[Array, " M"] | None, active: Bool[Array, " M"] | None, entries: Any, *, add: bool = False
) -> Any:
    """The stack with its active entries replaced, or added to."""

    def write(old: Array, new: Array) -> Array:
        if index is None:
            new = old + new if add else new
            return new if active is None else jnp.where(active.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)
        place = old.at[index if active is None else jnp.where(active, index, len(old))]
        return place.add(new, mode="drop") if add else place.set(new, mode="drop")

    return jax.tree.map(write, stack, entries)


def part_of(parameters: Parameters, path: Path) -> Parameters:
    """The part of the parameters that a path names: θ ⊙ R̂."""
    entries = zip(parameters.stacks, path.entries, strict=True)
    return Parameters.of([narrow(stack, taking_part.at) for stack, taking_part in entries])


def _rows(task: Array, weight: Float[Array, " B"]) -> tuple[Int[Array, " D"], Bool[Array, " D"] | None]:
    """The tasks of a batch, one for all or each example's own, and which of them count."""
    return (task[None], None) if task.ndim == 0 else (task, weight > 0)


def _route(chosen: Int[Array, "D K"], real: Bool[Array, " D"] | None, experts: int) -> Route:
    """The route through a layer that touches least."""
    if chosen.shape[1] == experts:
        return Route(active=None if real is None else jnp.broadcast_to(real.any(), experts))
    if real is None:
        return Route(members=jnp.sort(chosen[0]))
    if chosen.size < experts:
        return Route(members=jnp.sort(chosen, axis=1))
    mask = _among(jnp.arange(experts), chosen)
    return Route(active=(mask & real[:, None]).any(axis=0), chosen=mask)


def _sizes(layers: Sequence[Layer]) -> list[range]:
    """The numbers of unused experts of some layers, in up to three groups: a quarter, half and all that there are.

    In the last, all take part, used or not: to gather most experts costs more than to run the few others.
    """
    most, least = (max((getattr(layer, name) for layer in layers), default=0) for name in ("experts", "k"))
    sizes = sorted({max(least, -(-most // share)) for share in (4, 2, 1)})
    return [range(low + 1, high + 1) for low, high in pairwise([-1, *sizes])]


def _among(members: Int[Array, " M"], chosen: Int[Array, "D K"]) -> Bool[Array, "D M"]:
    return (members[None, :, None] == chosen[:, None, :]).any(axis=2)


def _at(logits: Float[Array, "D E"], members: Int[Array, "..."] | None) -> Float[Array, "D M"]:
    if members is None or members.ndim == 1:
        return logits if members is None else logits.at[:, members].get(mode="clip")
    return jnp.take_along_axis(logits, members, axis=1)


def _softmax(logits: Float[Array, "D M"], chosen: Bool[Array, "D M"] | None) -> Float[Array, "D M"]:
    """The softmax over the chosen; 0 elsewhere, and where nothing is chosen."""
    if chosen is None:
        return jax.nn.softmax(logits)
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=1, keepdims=True, where=chosen, initial=-1e30))
    exponential = jnp.exp(jnp.where(chosen, logits - largest, -jnp.inf))
    total = exponential.sum(axis=1, keepdims=True)
    return exponential / jnp.where(total > 0, total, 1)


def routing_network(
    spec: Spec,
    expert: Expert | Sequence[Expert] = dense(19),
    *,
    layers: int = 2,
    experts: int | Sequence[int] = 20,
    k: int | Sequence[int] = 4,
    sampling: str = "gaussian",
    noise: float = 0.05,
    gates: str = "chosen",
    noisy_gates: bool = False,
    aggregation: str = "sum",
    activation: Callable[[Array], Array] | None = None,
) -> Network:
    """Layers of `experts` experts, of which a router picks `k` for each task.

    `expert`, `experts` and `k` may be lists with one entry per layer. Routes are sampled while training: the `k`
    largest logits plus noise, of standard deviation `noise` ("gaussian"), of learned deviation that starts at
    `noise` ("noisy-top-k", Shazeer et al. 2017), Gumbel of that scale ("gumbel"), or none. An expert's gate is its
    softmax among the "chosen" experts or among "all"; `noisy_gates` takes the noisy logits for it. The outputs are
    summed, or concatenated, with the gates as weights, and then go through `activation`, if any.
    """
    check_positive("layers", layers)
    return _network(
        spec,
        _per_layer("expert", expert, layers),
        _per_layer("experts", experts, layers),
        _per_layer("k", k, layers),
        check_name("sampling", sampling, SAMPLINGS),
        noise=noise,
        gates=check_name("gates", gates, GATES),
        noisy_gates=noisy_gates or sampling == "noisy-top-k",
        aggregation=check_name("aggregation", aggregation, AGGREGATIONS),
        activation=activation,
    )


def shared_bottom(spec: Spec, hidden: Sequence[int] = (256, 256)) -> Network:
    """A dense network under the tasks' heads: layers of one expert, where there is nothing to route."""
    units = [check_positive("hidden", units) for units in hidden]
    if not units:
        raise Invalid("hidden", tuple(hidden), "give at least one layer")
    return _network(spec, [dense(n, alone=True) for n in units], [1] * len(units), [1] * len(units), sampling="none")


def parameter_count(network: Network) -> int:
    """How many numbers a network learns: experts, heads and router."""
    return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter_eval_shape(network.init, jax.random.key(0))))


def units_for_budget(budget: Network | int, spec: Spec, **options: Any) -> int:
    """The most units that the experts of `routing_network(spec, dense(units), **options)` can have within a budget.

    The budget is a number of parameters, or a network that has it.
    """
    limit = budget if isinstance(budget, int) else parameter_count(budget)

    def fits(units: int) -> bool:
        return parameter_count(routing_network(spec, dense(units), **options)) <= limit

    if not fits(1):
        least = parameter_count(routing_network(spec, dense(1), **options))
        raise Invalid("budget", limit, f"experts of one unit take {least} parameters")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _network(
    spec: Spec,
    makes: Sequence[Expert],
    experts: Sequence[int],
    ks: Sequence[int],
    sampling: str,
    *,
    noise: float = 0.0,
    gates: str = "chosen",
    noisy_gates: bool = False,
    aggregation: str = "sum",
    activation: Callable[[Array], Array] | None = None,
    private: bool = False,
) -> Network:
    if not noise >= 0 or (sampling == "noisy-top-k" and noise == 0):
        raise Invalid("noise", noise, "choose a number above 0")
    layers, shape = [], spec.shape
    for make, count, k in zip(makes, experts, ks, strict=True):
        count, k = check_positive("experts", count), check_positive("k", k)
        if k > count:
            raise Invalid("k", k, f"choose 1 to {count}, the number of experts")
        layer, shape = _layer(make, shape, count, k)
        if count > 1 and aggregation == "concatenate":
            shape = (k * shape[0], *shape[1:])
        layers.append(layer)
    head, _ = _layer(dense(spec.classes, activation=_identity), shape, spec.tasks, 1)
    return Network(
        spec,
        tuple(layers),
        head,
        jnp.asarray(noise, float),
        sampling,
        gates,
        noisy_gates,
        aggregation,
        activation,
        private,
    )


def _layer(make: Expert, shape: tuple[int, ...], experts: int, k: int) -> tuple[Layer, tuple[int, ...]]:
    """A layer and the shape of an expert's output."""
    module = eqx.filter_eval_shape(make, shape, jax.random.key(0))
    output = eqx.filter_eval_shape(lambda module, x: module(x), module, jnp.zeros(shape))
    fixed = jax.tree.map(lambda leaf: None if _learns(leaf) else leaf, module)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(fixed)):  # arrays that do not learn
        fixed = eqx.filter(make(shape, jax.random.key(0)), eqx.is_inexact_array, inverse=True)
    return Layer(make, shape, experts, k, fixed), output.shape


def _learns(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _per_layer(field: str, value: Any, layers: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * layers
    if len(value) != layers:
        raise Invalid(field, value, f"give one, or one for each of the {layers} layers")
    return list(value)


def _identity(x: Array) -> Array:
    return x
