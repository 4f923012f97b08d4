"""JAX's random numbers, bit for bit, drawn faster on a CPU.

There JAX runs the rounds of its generator (Threefry-2x32, Salmon et al. 2011) in a loop of many small kernels; written
out, they are one. And what makes normal numbers of random bits belongs into another kernel than what draws the bits:
in one, each number would wait for the long chain of both. Its logarithm is written out too: XLA's takes 8 numbers at a
time, on processors that could take 16.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl, threefry_prng_impl
from jaxtyping import Array, Float, Float32, PRNGKeyArray, UInt, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# fmt: off
# Of the inverse error function (Giles 2012): where the logarithm is below 5, and from there on.
SMALL = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
         -0.00417768164, 0.246640727, 1.50140941)
LARGE = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
         0.00943887047, 1.00167406, 2.83297682)
# Of log(1 + x) for x near 0 (Cephes, Moshier 1989): above and below the fraction line.
NEAR = math.sqrt(2) - 1
ABOVE = (4.5270000862445199635e-5, 0.49854102823193375972, 6.5787325942061044847, 29.911919328553073277,
         60.949667980987787058, 57.112963590585538103, 20.039553499201281260)
BELOW = (1.0, 15.062909083469192043, 83.047565967967209469, 221.76239823732856465, 309.09872225312059775,
         216.42788614495947685, 60.118660497603843919)
# fmt: on


def unrolled(key: PRNGKeyArray) -> PRNGKeyArray:
    """The same key, for the same numbers."""
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=UNROLLED)


def normal_bits(key: PRNGKeyArray, shape: tuple[int, ...]) -> UInt[Array, "..."]:
    """The random bits that `jax.random.normal` would draw."""
    return jax.random.bits(key, shape, f"uint{jnp.finfo(jnp.result_type(float)).bits}")


@partial(jax.jit, inline=True)  # operation by operation, products and sums would be rounded apart
def normal(bits: UInt[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The numbers that `jax.random.normal` makes of them."""
    size = bits.dtype.itemsize * 8
    dtype = np.dtype(f"float{size}")
    one, low = dtype.type(1), np.nextafter(dtype.type(-1), dtype.type(0))
    mantissa = bits >> bits.dtype.type(size - np.finfo(dtype).nmant)
    uniform = jax.lax.bitcast_convert_type(mantissa | one.view(bits.dtype), dtype) - one  # from 0 to 1
    inverse = _erf_inv if dtype == np.float32 else jax.lax.erf_inv
    return dtype.type(math.sqrt(2)) * inverse(jnp.maximum(low, uniform * (one - low) + low))


def _erf_inv(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """As `jax.lax.erf_inv`, between -1 and 1."""
    log = -_log1p(x * -x)
    small = log < 5
    at = jnp.where(small, log - np.float32(2.5), jnp.sqrt(log) - np.float32(3))
    coefficients = [jnp.where(small, *map(np.float32, both)) for both in zip(SMALL, LARGE, strict=True)]
    return _polynomial(coefficients, at) * x


def _log1p(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """As `jax.lax.log1p`, from -1 to 0."""
    square = x * x
    # The absolute value, of what is never positive, keeps its last product from being rounded together with the sum.
    rest = jnp.abs(x * square * (_polynomial(ABOVE, x) / _polynomial(BELOW, x)))
    return jnp.where(x > np.float32(-NEAR), x - (np.float32(0.5) * square + rest), jnp.log(x + np.float32(1)))


def _polynomial(coefficients: Sequence[Any], x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The coefficient of the highest power comes first."""
    total = jnp.float32(coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + jnp.float32(coefficient)
    return total


def _hash(key: UInt32[Array, "2"], high: UInt32[Array, "..."], low: UInt32[Array, "..."]) -> tuple[Array, Array]:
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    high, low = high + keys[0], low + keys[1]
    for i in range(5):
        for bits in ROTATIONS[i % 2]:
            high = high + low
            low = high ^ (low << np.uint32(bits) | low >> np.uint32(32 - bits))
        high, low = high + keys[(i + 1) % 3], low + keys[(i + 2) % 3] + np.uint32(i + 1)
    return high, low


def _counted(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The hashes of 0, 1, 2, …"""
    if math.prod(shape) > 2**32:
        raise ValueError(f"{shape}: a key counts its random numbers with 32 bits; draw from several")
    counts = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return _hash(key, jnp.zeros_like(counts), counts)


def _split(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> UInt32[Array, "*shape 2"]:
    return jnp.stack(_counted(key, shape), axis=-1)


def _fold_in(key: UInt32[Array, "2"], data: Any) -> UInt32[Array, "2"]:
    data = jnp.asarray(data, jnp.uint32)
    return jnp.stack(_hash(key, jnp.zeros_like(data), data))


def _random_bits(key: UInt32[Array, "2"], bit_width: int, shape: tuple[int, ...]) -> UInt[Array, "..."]:
    high, low = _counted(key, shape)
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        return high.astype(dtype) << dtype.type(32) | low.astype(dtype)
    return (high ^ low).astype(dtype)


UNROLLED = define_prng_impl(
    key_shape=(2,),
    seed=threefry_prng_impl.seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="unrolled threefry2x32",
    tag="fry",
)
