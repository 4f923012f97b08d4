"""What is there for speed alone agrees with its plain version, by itself and in a whole run.

The random numbers are in `test_randomness.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import OPTIONS, STREAM, Counted, Traces, distance, filled, identical, leaves, run

from cotrain import steps
from cotrain.engine import learn
from cotrain.memory import reservoir
from cotrain.methods import cotraining as cotraining_module
from cotrain.methods import descent
from cotrain.methods.replay import replay
from cotrain.networks import experts
from cotrain.networks.experts import dense
from cotrain.networks.routers import sampling
from cotrain.networks.routing_network import routing_network
from cotrain.speed import products as products_module
from cotrain.speed.loops import after, each, once, plain_after, plain_each, plain_once
from cotrain.speed.products import LARGE, plain_products, products

OPTIMIZERS = {"sgd": optax.sgd, "momentum": partial(optax.sgd, momentum=0.9), "adam": optax.adam}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Each by itself


@pytest.mark.parametrize("examples", [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 31, 32, 33])
@pytest.mark.parametrize("inputs", [9, 700])
def test_products_are_the_plain_ones(examples, inputs):
    weight, x, slope = normal(0, 8, 9, inputs), normal(1, examples, inputs), normal(2, 8, examples, 9)
    large = weight.size >= LARGE
    assert large == (inputs == 700)
    two_parts = large and examples & (examples - 1)
    assert str(jax.make_jaxpr(products.__wrapped__)(weight, x)).count("dot_general") == (2 if two_parts else 1)
    results = []
    for function in (products, plain_products):
        y, pull = jax.vjp(function, weight, x)
        results.append((y, pull(slope)))
    exact = np.einsum("mui,bi->mbu", *(np.asarray(a, float) for a in (weight, x)))
    np.testing.assert_allclose(results[0][0], exact, rtol=0, atol=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-4), *results)


def test_products_are_mapped_over_seeds():
    weight, x = normal(0, 2, 8, 9, 700), normal(1, 2, 6, 700)
    found, plain = (jax.vmap(function)(weight, x) for function in (products, plain_products))
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("condition", [False, True])
def test_a_step_is_done_once_or_not_at_all(condition):
    def step(zero, carry):
        numbers, count = carry
        return numbers.at[zero + 1].multiply(3.0), count + 1

    carry = jnp.array([1.0, 2.0, 4.0]), jnp.array(5)
    found = jax.jit(lambda holds: once(holds, step, carry))(jnp.array(condition))
    assert identical(found, jax.jit(lambda holds: plain_once(holds, step, carry))(jnp.array(condition)))
    assert [a.tolist() for a in found] == ([[1, 6, 4], 6] if condition else [[1, 2, 4], 5])


def test_a_rate_that_waits_for_a_gradient_is_the_same_rate():
    rate = jnp.array(0.3)
    for last in (0.0, -1.5, jnp.inf):
        gradient = {"bias": jnp.ones(2), "weight": jnp.full((2, 3), last)}
        assert identical(jax.jit(after)(gradient, rate), plain_after(gradient, rate))
    assert "weight" in sorted(gradient)[-1], "what it looks at is the last leaf"
    assert np.isnan(after(gradient | {"weight": jnp.full((2, 3), jnp.nan)}, rate)), "so XLA must compute it first"


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=[*OPTIMIZERS])
@pytest.mark.parametrize("index", [[4, 0, 2], [3], [1, 5, 2, 0, 4, 3]], ids=["some", "one", "all"])
def test_entries_one_after_another_move_as_at_once(optimizer, index):
    stack = {"weight": normal(0, 6, 2, 3), "bias": normal(1, 6, 2)}
    moments = filled(jax.vmap(optimizer(0.1).init), stack)
    moments = jax.tree.map(jnp.abs, moments)
    gradient = {"weight": normal(2, len(index), 2, 3), "bias": normal(3, len(index), 2)}
    found, plain = (
        jax.jit(partial(step, optimizer(0.1)))(stack, moments, gradient, jnp.array(index))
        for step in (each, plain_each)
    )
    assert distance(found, plain) < 1e-6
    rest = np.setdiff1d(np.arange(6), index)
    left, before = (jax.tree.map(lambda a: a[rest], both) for both in (found, (stack, moments)))
    assert identical(left, before)
    assert np.abs(np.asarray(found[0]["bias"] - stack["bias"]))[index].max(axis=1).min() > 1e-3


# All in a whole run


def counting(function, calls):
    def called(*arguments, **options):
        calls.append(function.__name__)
        return function(*arguments, **options)

    return called


def cotrained():
    """The end of a run of a method that has never been traced, for its network's activation is new."""
    network = routing_network(STREAM.spec, dense(12, lambda x: jax.nn.relu(x)), experts=[4, 3], k=[2, 3])
    method = Counted(cotraining_module.cotraining(replay(network, reservoir(20, 5), lr=0.2)), Traces())
    end = run(learn(method, [STREAM], [0], **OPTIONS))
    assert method.traces
    return end


def test_a_run_without_anything_fast_ends_with_the_same_numbers(monkeypatch):
    fast_calls, plain_calls = [], []
    places = {
        (descent, "after"): plain_after,
        (descent, "each"): plain_each,
        (cotraining_module, "once"): plain_once,
        (experts, "products"): plain_products,
        (steps, "unrolled"): lambda key: key,
        (sampling, "normal_bits"): jax.random.normal,
    }
    monkeypatch.setattr(products_module, "LARGE", 0)  # so that they are made in parts here
    for module, name in places:
        monkeypatch.setattr(module, name, counting(getattr(module, name), fast_calls))
    fast = cotrained()
    assert set(fast_calls) == {"after", "each", "once", "products", "unrolled", "normal_bits"}

    fast_calls.clear()
    for (module, name), plain in places.items():
        monkeypatch.setattr(module, name, counting(plain, plain_calls))
    slow = cotrained()
    assert set(plain_calls) == {plain.__name__ for plain in places.values()}
    assert not fast_calls

    assert distance(leaves(fast.state.learner), leaves(slow.state.learner)) < 1e-5
    assert identical(fast.state.used, slow.state.used)
    assert identical(fast.state.inner.memory, slow.state.inner.memory)
    np.testing.assert_array_equal(fast.accuracy, slow.accuracy)
