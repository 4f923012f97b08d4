"""Random numbers that are drawn faster are the same numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cotrain.speed.randomness import normal, normal_bits, unrolled

KEY = jax.random.key(7)
# As users run it: what tests compile is not optimized, and there XLA rounds its own logarithm otherwise.
OPTIMIZED = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
)
DRAWS = {
    "bits": lambda key: jax.random.bits(key, (3, 5)),
    "8 bits": lambda key: jax.random.bits(key, (11,), "uint8"),
    "16 bits": lambda key: jax.random.bits(key, (11,), "uint16"),
    "one number": lambda key: jax.random.uniform(key),
    "many numbers": lambda key: jax.random.normal(key, (1000, 7)),
    "of a key with data": lambda key: jax.random.gumbel(jax.random.fold_in(key, 2**31 + 5), (4,)),
    "of split keys": lambda key: jax.vmap(lambda key: jax.random.normal(key, (4,)))(jax.random.split(key, 3)),
    "of keys split in two dimensions": lambda key: jax.random.normal(jax.random.split(key, (2, 3))[1, 2], (4,)),
    "whole numbers": lambda key: jax.random.randint(key, (9,), -5, 100),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_unrolled_keys_draw_the_same_numbers(draw):
    np.testing.assert_array_equal(draw(unrolled(KEY)), draw(KEY))


def test_unrolled_keys_draw_the_same_wide_numbers():
    with jax.enable_x64(True):
        draws = [jax.random.bits(key, (3, 5), "uint64") for key in (unrolled(jax.random.key(7)), jax.random.key(7))]
        assert draws[0].dtype == jnp.uint64
        np.testing.assert_array_equal(*draws)


def test_unrolled_keys_are_the_same_keys():
    np.testing.assert_array_equal(jax.random.key_data(unrolled(KEY)), jax.random.key_data(KEY))
    np.testing.assert_array_equal(
        jax.random.key_data(jax.random.split(unrolled(KEY), 4)), jax.random.key_data(jax.random.split(KEY, 4))
    )


@pytest.mark.parametrize("shape", [(), (1,), (10, 20), (100_001,)])
def test_normal_numbers_are_those_of_jax(shape):
    drawn = OPTIMIZED(lambda key: normal(normal_bits(key, shape)))
    np.testing.assert_array_equal(drawn(KEY), OPTIMIZED(lambda key: jax.random.normal(key, shape))(KEY))


def test_every_normal_number_is_one_of_jax():
    bits = jnp.arange(2**23, dtype=jnp.uint32) << 9  # of 32 bits, 23 count
    low = np.nextafter(np.float32(-1), np.float32(0))

    def wanted(bits):
        uniform = jax.lax.bitcast_convert_type(bits >> 9 | np.float32(1).view(np.uint32), jnp.float32) - 1
        return np.float32(np.sqrt(2)) * jax.lax.erf_inv(jnp.maximum(low, uniform * (1 - low) + low))

    np.testing.assert_array_equal(OPTIMIZED(normal)(bits), OPTIMIZED(wanted)(bits))


def test_wide_normal_numbers_are_those_of_jax():
    with jax.enable_x64(True):
        key = jax.random.key(7)
        found, wanted = normal(normal_bits(key, (1000,))), jax.random.normal(key, (1000,))
        assert found.dtype == jnp.float64
        np.testing.assert_array_equal(found, wanted)


def test_the_least_and_the_most_bits_give_finite_numbers():
    ends = normal(jnp.array([0, 2**32 - 1], jnp.uint32))
    assert np.isfinite(ends).all()
    np.testing.assert_allclose(ends, [-5.42, 5.22], rtol=1e-3)


def test_more_numbers_than_can_be_counted_are_refused():
    with pytest.raises(ValueError, match="32 bits"):
        jax.jit(lambda key: jax.random.bits(key, (2**20, 2**13))).lower(unrolled(KEY))
