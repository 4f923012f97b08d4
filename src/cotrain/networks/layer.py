"""A layer: experts side by side, and how their outputs are put together.

Axes: E experts of a layer, K chosen, M members, B examples, D rows.
"""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from cotrain.errors import Invalid, check_positive
from cotrain.networks.experts import Expert
from cotrain.networks.path import Route

AGGREGATIONS = ("sum", "concatenate")


class Layer(eqx.Module):
    """What is fixed about a layer."""

    make: Expert = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)  # of an input
    experts: int = eqx.field(static=True)
    k: int = eqx.field(static=True)
    module: Any  # an expert without its arrays
    parts: int = eqx.field(static=True, default=1)  # of an input, side by side: expert e reads the first e + 1 alone

    def init(self, key: PRNGKeyArray) -> Any:
        """A stack of new experts; what they have for further parts of an input starts at 0."""
        stack = eqx.filter_vmap(lambda key: self.make(self._first(1), key))(jax.random.split(key, self.experts))
        stack = eqx.filter(stack, eqx.is_inexact_array)
        if self.parts == 1:
            return stack
        whole, form = jax.tree.flatten(self._shapes(self.shape))
        leaves = [
            _padded(a, (self.experts, *all_of_it.shape))
            for a, all_of_it in zip(jax.tree.leaves(stack), whole, strict=True)
        ]
        return jax.tree.unflatten(form, leaves)

    @property
    def size(self) -> int:
        """How many numbers its experts learn; those for parts of an input that one does not read are none."""
        one, two = (sum(a.size for a in jax.tree.leaves(self._shapes(self._first(n)))) for n in (1, min(2, self.parts)))
        return sum(one + min(e, self.parts - 1) * (two - one) for e in range(self.experts))

    def _first(self, parts: int) -> tuple[int, ...]:
        """The shape of the first parts of an input."""
        return self.shape if self.parts == 1 else (self.shape[0] // self.parts * parts,)

    def _shapes(self, shape: tuple[int, ...]) -> Any:
        """What an expert for an input of a shape learns."""
        return eqx.filter(eqx.filter_eval_shape(self.make, shape, jax.random.key(0)), _learns)

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

    def combine(
        self,
        gates: Float[Array, "D M"],
        chosen: Bool[Array, "D M"] | None,
        outputs: Float[Array, "M B ..."],
        aggregation: str,
    ) -> Float[Array, "B ..."]:
        """The gates' sum of the members' outputs; or, side by side in the last axis, of those in each of K slots."""
        if aggregation == "concatenate":
            chosen = jnp.ones(gates.shape, bool) if chosen is None else chosen
            slot = (jnp.cumsum(chosen, axis=1) - 1) % self.k  # the first K members by index, then again
            gates = gates[..., None] * (slot[..., None] == jnp.arange(self.k)[None, None, :])  # [D, M, K]
            outputs = outputs[:, :, None]  # [M, B, 1, ...]
        weights = jnp.moveaxis(gates, 0, 1)  # [M, B or 1, ...]
        combined = (weights.reshape(weights.shape + (1,) * (outputs.ndim - weights.ndim)) * outputs).sum(axis=0)
        if aggregation == "concatenate":
            combined = jnp.moveaxis(combined, 1, -2)  # as channels, beside each other
            combined = combined.reshape(*combined.shape[:-2], -1)
        return combined


def layer_of(
    make: Expert, shape: tuple[int, ...], experts: int, k: int, parts: int = 1
) -> tuple[Layer, tuple[int, ...]]:
    """A layer and the shape of an expert's output."""
    experts, k = check_positive("experts", experts), check_positive("k", k)
    if k > experts:
        raise Invalid("k", k, f"choose 1 to {experts}, the number of experts")
    module = eqx.filter_eval_shape(make, shape, jax.random.key(0))
    if not any(map(_learns, jax.tree.leaves(module))):
        raise Invalid("expert", make, "it has nothing to learn; give it at least one array of floats")
    output = eqx.filter_eval_shape(lambda module: module(jnp.zeros(shape)), module)  # which takes no memory
    fixed = jax.tree.map(lambda leaf: None if _learns(leaf) else leaf, module)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(fixed)):  # arrays that do not learn
        fixed = eqx.filter(make(shape, jax.random.key(0)), eqx.is_inexact_array, inverse=True)
    return Layer(make, shape, experts, k, fixed, parts), output.shape


def layers_of(
    shape: tuple[int, ...],
    makes: Sequence[Expert],
    experts: Sequence[int],
    ks: Sequence[int],
    aggregation: str,
    laterals: bool = False,
) -> tuple[tuple[Layer, ...], tuple[int, ...], int]:
    """Layers one upon another, for inputs of a shape; the shape of what comes out, and of how many parts it is."""
    layers, parts = [], 1
    for make, count, k in zip(makes, experts, ks, strict=True):
        layer, shape = layer_of(make, shape, count, k, parts)
        if laterals:
            shape, parts = (layer.experts * math.prod(shape),), layer.experts
        elif layer.experts > 1 and aggregation == "concatenate":
            shape = (*shape[:-1], layer.k * shape[-1])
        layers.append(layer)
    return tuple(layers), shape, parts


def _padded(array: Array, shape: tuple[int, ...]) -> Array:
    """An array in the first places of a larger one, with 0 in the others."""
    return jnp.pad(array, [(0, size - old) for size, old in zip(shape, array.shape, strict=True)])


def _learns(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.inexact)
