"""JAX's random numbers, bit for bit, drawn faster on a CPU.

There JAX runs the rounds of its generator (Threefry-2x32, Salmon et al. 2011) in a loop of many small kernels; written
out, they are one. And what makes normal numbers of random bits belongs into another kernel than what draws the bits:
in one, each number would wait for the long chain of both.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl, threefry_prng_impl
from jaxtyping import Array, Float, PRNGKeyArray, UInt, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def unrolled(key: PRNGKeyArray) -> PRNGKeyArray:
    """The same key, for the same numbers."""
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=UNROLLED)


def normal_bits(key: PRNGKeyArray, shape: tuple[int, ...]) -> UInt[Array, "..."]:
    """The random bits that `jax.random.normal` would draw."""
    return jax.random.bits(key, shape, f"uint{jnp.finfo(jnp.result_type(float)).bits}")


def normal(bits: UInt[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The numbers that `jax.random.normal` makes of them."""
    size = bits.dtype.itemsize * 8
    dtype = np.dtype(f"float{size}")
    one, low = dtype.type(1), np.nextafter(dtype.type(-1), dtype.type(0))
    mantissa = bits >> bits.dtype.type(size - np.finfo(dtype).nmant)
    uniform = jax.lax.bitcast_convert_type(mantissa | one.view(bits.dtype), dtype) - one  # from 0 to 1
    return dtype.type(math.sqrt(2)) * jax.lax.erf_inv(jnp.maximum(low, uniform * (one - low) + low))


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
