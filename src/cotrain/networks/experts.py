"""What an expert can be: a recipe that makes an Equinox module for the shape of its input.

Any callable `(shape, key) -> module` will do, where the module maps one input of that shape to one output. If it also
has `together`, that runs all experts of a stack, whose arrays have an axis for them, on all inputs of a batch.

Axes: M experts, B examples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from cotrain.errors import Invalid, check_positive
from cotrain.speed.products import products

Expert = Callable[[tuple[int, ...], PRNGKeyArray], Callable[[Array], Array]]  # the result is an Equinox module


class Dense(eqx.Module):
    """A fully connected layer on a flattened input, with He-uniform weights and zero biases."""

    weight: Float[Array, "units inputs"] | Float[Array, "inputs units"]
    bias: Float[Array, " units"]
    activation: Callable[[Array], Array] = eqx.field(static=True)
    alone: bool = eqx.field(static=True)

    def __init__(
        self, inputs: int, units: int, activation: Callable[[Array], Array], key: PRNGKeyArray, alone: bool = False
    ):
        limit = math.sqrt(6 / inputs)
        weight = jax.random.uniform(key, (units, inputs), minval=-limit, maxval=limit)
        self.weight = weight.T if alone else weight
        self.bias = jnp.zeros(units)
        self.activation = activation
        self.alone = alone

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, " units"]:
        x = x.ravel()
        return self.activation((x @ self.weight if self.alone else self.weight @ x) + self.bias)

    def together(self, x: Float[Array, "B ..."]) -> Float[Array, "M B units"]:
        """All experts of a stack on all examples."""
        weight = jnp.moveaxis(self.weight, 2, 1) if self.alone else self.weight
        return self.activation(products(weight, x.reshape(x.shape[0], -1)) + self.bias[:, None])


@dataclass(frozen=True)
class dense:
    """One fully connected layer: the paper's expert.

    One that is the only expert of its layer is faster with its weights the other way round (`alone`), as products of
    several are not.
    """

    units: int
    activation: Callable[[Array], Array] = jax.nn.relu
    alone: bool = False

    def __post_init__(self):
        check_positive("units", self.units)

    def __call__(self, shape: tuple[int, ...], key: PRNGKeyArray) -> Dense:
        return Dense(math.prod(shape), self.units, self.activation, key, self.alone)


class Chain(eqx.Module):
    """Modules one after another."""

    modules: tuple[Callable[[Array], Array], ...]

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        for module in self.modules:
            x = module(x)
        return x


@dataclass(frozen=True)
class mlp:
    """Several fully connected layers, one after another."""

    units: tuple[int, ...]

    def __post_init__(self):
        if not self.units:
            raise Invalid("units", self.units, "give at least one layer")
        for units in self.units:
            check_positive("units", units)

    def __call__(self, shape: tuple[int, ...], key: PRNGKeyArray) -> Chain:
        sizes = (math.prod(shape), *self.units)
        keys = jax.random.split(key, len(self.units))
        pairs = zip(sizes[:-1], sizes[1:], keys, strict=True)
        return Chain(tuple(Dense(inputs, units, jax.nn.relu, key) for inputs, units, key in pairs))


class Convolution(eqx.Module):
    """A convolution that halves height and width, then ReLU."""

    convolve: eqx.nn.Conv2d
    image: tuple[int, ...] = eqx.field(static=True)  # rows, columns, channels

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "rows columns channels"]:
        return jnp.moveaxis(jax.nn.relu(self.convolve(jnp.moveaxis(x.reshape(self.image), 2, 0))), 0, 2)


@dataclass(frozen=True)
class convolution:
    """A convolution of stride 2 on images as they come: [rows, columns] or [rows, columns, channels]."""

    channels: int
    size: int = 3

    def __post_init__(self):
        check_positive("channels", self.channels)
        check_positive("size", self.size)

    def __call__(self, shape: tuple[int, ...], key: PRNGKeyArray) -> Convolution:
        if len(shape) not in (2, 3):
            raise Invalid("shape", shape, "a convolution takes images: rows and columns, and channels if there are any")
        image = (*shape, 1)[:3]
        convolve = eqx.nn.Conv2d(image[2], self.channels, self.size, stride=2, padding=self.size // 2, key=key)
        return Convolution(convolve, image)
