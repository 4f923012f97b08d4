"""The network: layers of experts, a router that picks K of them, and heads.

A step touches a part of it, named by a `Path`. The members of each layer run on every example, combined by the gates;
or, where there are many experts, each example has its own K of them.

Axes: T tasks, E experts of a layer, K chosen, M members, B examples, D rows (one for all examples, or each its own).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from cotrain.data.stream import Spec
from cotrain.errors import Invalid
from cotrain.networks.experts import Expert, dense
from cotrain.networks.layer import Layer, layer_of, layers_of
from cotrain.networks.parameters import Parameters, narrow
from cotrain.networks.path import Path, Route, part_of, route_of, rows
from cotrain.networks.routers.columns import Columns, side_by_side
from cotrain.networks.routers.fixed import Fixed, fixed
from cotrain.networks.routers.router import Router, Size

NEVER = -1e30  # the logit of a class that a task does not have
Draws = tuple[Shaped[Array, "D E"] | None, ...]  # per layer; None where nothing is drawn


class Ran(NamedTuple):
    """What a part of a network made of a batch."""

    logits: Float[Array, "B classes"]
    gates: tuple[Float[Array, "B E"] | None, ...]  # of layers whose router reads its input: what examples took
    penalty: Float[Array, ""] | None = None  # what such routers add to the loss
    inputs: tuple[Float[Array, "B ..."], ...] = ()  # what each layer, and the head, was given


class Network(eqx.Module):
    """Layers of experts between the input and the heads; made by `routing_network` and `shared_bottom`."""

    spec: Spec = eqx.field(static=True)
    layers: tuple[Layer, ...]
    head: Layer
    router: Router | None  # None where no layer has a choice
    one_head: bool = eqx.field(static=True)  # for all tasks
    aggregation: str = eqx.field(static=True)
    activation: Callable[[Array], Array] | None = eqx.field(static=True)  # after aggregation

    @property
    def by_task(self) -> bool:
        """Whether routes depend on the task alone, and so are known before there is an input."""
        return self.router is None or self.router.by_task

    @property
    def laterals(self) -> bool:
        """Whether layers read what other tasks' experts give, beside the output of a task's own."""
        return isinstance(self.router, Columns)

    def init(self, key: PRNGKeyArray) -> Parameters:
        """New parameters."""
        head_key, router_key, expert_key = jax.random.split(key, 3)
        expert_keys, router_keys = (jax.random.split(key, len(self.layers)) for key in (expert_key, router_key))
        return Parameters(
            experts=tuple(layer.init(key) for layer, key in zip(self.layers, expert_keys, strict=True)),
            heads=self.head.init(head_key),
            router=tuple(
                None if self.router is None or layer.experts == 1 else self.router.init(Size.of(self.spec, layer), key)
                for layer, key in zip(self.layers, router_keys, strict=True)
            ),
        )

    def draw(self, key: PRNGKeyArray, tasks: int, examples: int | None = None) -> Draws:
        """The random numbers that sampling the routes of a batch takes, of so many tasks (by default, examples)."""
        count = tasks if self.by_task or examples is None else examples
        return tuple(
            None if self.router is None or layer.experts == 1 else self.router.draw(key, (count, layer.experts))
            for layer, key in zip(self.layers, jax.random.split(key, len(self.layers)), strict=True)
        )

    def sample(
        self,
        parameters: Parameters,
        task: Array,
        weight: Float[Array, " B"],
        noise: Sequence[Array | None],
        whole: bool = False,
    ) -> Path:
        """The routes for a batch of one task, or of each example's own: R̂ ← sample(R). The noise is as in `draw`.

        A `whole` path has all of every stack in it, though only the routes are used: its gradients are those of all
        parameters, as some methods want them.
        """
        tasks, real = rows(task, weight)
        routes = []
        for layer, stack, draws in zip(self.layers, parameters.router, noise, strict=True):
            if self.router is None or stack is None:
                routes.append(Route(active=None if real is None else real.any(keepdims=True)))
            elif self.router.by_task is False:
                routes.append(Route(noise=draws))
            else:
                if real is not None and draws is not None:  # examples of the same task take the same route
                    draws = draws[((tasks[:, None] == tasks[None, :]) & real[None, :]).argmax(axis=1)]
                scores = self.router.scores(narrow(stack, tasks), draws)
                chosen = jax.lax.top_k(scores, layer.k)[1]  # [D, K]
                routes.append(route_of(chosen, real, layer.experts, whole)._replace(noise=draws))
        return Path(tasks, real, tuple(routes), self.one_head, self.by_task, whole)

    def best(self, parameters: Parameters, task: Int[Array, ""], whole: bool = False) -> Path:
        """The routes that predictions for a task take: the K largest logits, without noise."""
        return self.sample(parameters, task, jnp.ones(1), (None,) * len(self.layers), whole)

    def used(self, parameters: Parameters, task: Int[Array, ""]) -> tuple[Bool[Array, " E"], ...]:
        """The experts that a task uses: e ∈ argtop-k R[l,t,:]."""
        routes = self.best(parameters, task).routes
        return tuple(
            jnp.ones(layer.experts, bool)
            if route.members is None
            else jnp.zeros(layer.experts, bool).at[route.members].set(True)
            for layer, route in zip(self.layers, routes, strict=True)
        )

    def run(self, part: Parameters, path: Path, x: Float[Array, "B ..."], weight: Float[Array, " B"]) -> Ran:
        """What a part of the network makes of a batch."""
        read, penalties, inputs = [], [], []
        for layer, stack, router, route in zip(self.layers, part.experts, part.router, path.routes, strict=True):
            read.append(None)
            inputs.append(x)
            if self.router is None or layer.experts == 1:
                x = layer.outputs(stack, route, x)[0]
            elif self.router.by_task is True:
                outputs = layer.outputs(stack, route, x)  # [M, B, ...]
                gates = self.gates(narrow(router, path.tasks) if path.whole else router, route)
                x = layer.combine(gates, route.chosen, outputs, self.aggregation)
            else:
                mixture = self.router.read(router, route.noise, x.reshape(x.shape[0], -1), layer.k, weight)
                outputs = layer.outputs(stack, route, x)
                x = layer.combine(mixture.gates, mixture.chosen, outputs, self.aggregation)
                read[-1] = mixture.gates
                penalties += [] if mixture.penalty is None else [mixture.penalty]
            x = x if self.activation is None else self.activation(x)
            x = x if route.beside is None else jnp.concatenate([x.reshape(x.shape[0], -1), route.beside], axis=1)
        penalty = jnp.stack(penalties).sum() if penalties else None
        return Ran(self._logits(part, path, x), tuple(read), penalty, (*inputs, x))

    def beside(self, parameters: Parameters, path: Path, x: Float[Array, "B ..."]) -> Path:
        """The path with what other tasks' experts give for these inputs, where layers read it beside their own's.

        No gradient goes that way: what is read belongs to others.
        """
        if not self.laterals:
            return path
        routes, signal = [], None
        for layer, stack, claims, route in zip(
            self.layers, parameters.experts, parameters.router, path.routes, strict=True
        ):
            if signal is None:
                outputs = layer.outputs(stack, Route(), x)  # [E, B, ...]
            else:  # each expert on what its owner reads
                outputs = jax.vmap(jax.vmap(layer.run, (None, 0)))(stack, signal[claims.owned.argmax(axis=0)])
            outputs = outputs.reshape(*outputs.shape[:2], -1)
            outputs = outputs if self.activation is None else self.activation(outputs)
            own = outputs[claims.owned.argmax(axis=1)]  # [T, B, units]
            signal = jnp.concatenate([own, jax.vmap(side_by_side, (0, None))(claims.read[:, None], outputs)], axis=2)
            routes.append(route._replace(beside=side_by_side(narrow(claims.read, path.tasks), outputs)))
        return path._replace(routes=tuple(routes))

    def _logits(self, part: Parameters, path: Path, x: Float[Array, "B ..."]) -> Float[Array, "B classes"]:
        if self.one_head:
            return self.head.outputs(part.heads, Route(), x)[0]
        heads = narrow(part.heads, path.tasks) if path.whole else part.heads
        one = len(path.tasks) == 1
        logits = self.head.outputs(heads, Route(), x)[0] if one else jax.vmap(self.head.run)(heads, x)
        if not self.spec.widths:
            return logits
        widths = jnp.array(self.spec.widths)[path.tasks]
        return jnp.where(jnp.arange(self.spec.classes)[None, :] < widths[:, None], logits, NEVER)

    def predict(self, parameters: Parameters, task: Int[Array, ""], x: Float[Array, "B ..."]) -> Array:
        """The logits for examples of one task, by its best routes."""
        path = self.beside(parameters, self.best(parameters, task), x)
        return self.run(part_of(parameters, path), path, x, jnp.ones(x.shape[0])).logits

    def taken(self, parameters: Parameters, task: Int[Array, ""], x: Float[Array, "B ..."]) -> list[Array]:
        """The gates that examples take in each layer whose router reads its input: [B, E]."""
        path = self.best(parameters, task)
        ran = self.run(part_of(parameters, path), path, x, jnp.ones(x.shape[0]))
        return [gates for gates in ran.gates if gates is not None]

    def gates(self, part: object, route: Route) -> Float[Array, "D M"]:
        """How much each member counts, for each row."""
        assert self.router is not None
        assert self.router.by_task is True
        return self.router.gates(part, route) if route.gates is None else route.gates

    def matrices(self, parameters: Parameters) -> list[tuple[Float[Array, "T E"], Float[Array, "T E"]]]:
        """For each layer with a choice, the logits of every task and the gates when predicting, 0 off the routes."""
        found = []
        for layer, stack in zip(self.layers, parameters.router, strict=True):
            if stack is not None and self.router is not None and self.router.by_task is True:
                scores = self.router.scores(stack, None)
                chosen = jax.lax.top_k(scores, layer.k)[1]
                mask = (jnp.arange(layer.experts)[None, :, None] == chosen[:, None, :]).any(axis=2)
                gates = self.router.gates(stack, Route(chosen=mask))
                found.append((scores, gates + stack.read if self.laterals else gates))
        return found

    def resized(self, spec: Spec) -> "Network":
        """The same experts, and the same router, for another number of tasks."""
        if spec.shape != self.spec.shape or spec.classes != self.spec.classes:
            raise Invalid("spec", tuple(spec), f"inputs and heads stay as they are: {tuple(self.spec)}")
        makes, experts, ks = zip(*((layer.make, layer.experts, layer.k) for layer in self.layers), strict=True)
        options = {name: getattr(self, name) for name in ("one_head", "aggregation", "activation")}
        return build(spec, makes, experts, ks, self.router, **options)

    def reserved(self) -> "Network":
        """The same experts with a fixed router: task t uses expert t of each layer and no other."""
        if self.router is None and self.spec.tasks > 1:
            raise Invalid("network", "shared-bottom", "private experts need a routing-network")
        makes, experts = zip(*((layer.make, layer.experts) for layer in self.layers), strict=True)
        ones = [1] * len(makes)
        options = {"one_head": self.one_head, "activation": self.activation}
        return build(self.spec, makes, experts, ones, fixed(own=True), **options)


def build(
    spec: Spec,
    makes: Sequence[Expert],
    experts: Sequence[int],
    ks: Sequence[int],
    router: Router | None = None,
    *,
    one_head: bool = False,
    aggregation: str = "sum",
    activation: Callable[[Array], Array] | None = None,
) -> Network:
    """A network of these experts, so many in each layer."""
    laterals = isinstance(router, Columns) and max(experts) > 1
    if laterals:
        _check_columns(spec, experts, ks, one_head, aggregation)
    layers, shape, parts = layers_of(spec.shape, makes, experts, ks, aggregation, laterals)
    for layer in layers if isinstance(router, Fixed) and router.own else ():
        if layer.experts < spec.tasks:
            raise Invalid("experts", layer.experts, f"a private expert per task takes {spec.tasks} or more")
    head, _ = layer_of(dense(spec.classes, activation=_identity), shape, 1 if one_head else spec.tasks, 1, parts)
    router = router if any(layer.experts > 1 for layer in layers) else None
    return Network(spec, layers, head, router, one_head, aggregation, activation)


def _check_columns(spec: Spec, experts: Sequence[int], ks: Sequence[int], one_head: bool, aggregation: str) -> None:
    """Refuses columns that are no column for each task."""
    if min(experts) < max(spec.tasks, max(experts)):
        raise Invalid("experts", tuple(experts), f"columns take as many in every layer, {spec.tasks} or more")
    if max(ks) > 1:
        raise Invalid("k", max(ks), "a column has one expert of each layer; choose 1")
    if one_head or aggregation != "sum":
        raise Invalid("router", "columns", "a column has a head of its own, and experts are read side by side anyway")


def _identity(x: Array) -> Array:
    return x
