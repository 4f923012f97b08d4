"""Nonnegative quadratic programmes: each solution beside SciPy's, and held against the conditions of optimality."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from agreement import double_precision
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain.methods.quadratic import nonnegative

_double_precision = double_precision
SOLVE = jax.jit(nonnegative)


def gradients(kind: str, size: int, draws: np.random.Generator) -> np.ndarray:
    """Rows that are to be combined: G."""
    wide = draws.normal(size=(size, 2 * size + 1))
    match kind:
        case "random":
            return wide
        case "alike":  # as those of tasks that are nearly the same: few constraints count
            return draws.normal(size=2 * size + 1) + 0.01 * wide
        case "opposed":  # many constraints count
            return wide - 3 * wide.mean(axis=0)
        case "rank-deficient":
            return wide[:, : max(size // 3, 1)]
        case "twice":  # each row, and with another length
            return wide[np.arange(size) // 2] * (1 + np.arange(size) % 2)[:, None]
        case "badly scaled":
            return wide * 10.0 ** draws.uniform(-6, 6, size)[:, None]
        case "with zeros":
            return wide * (np.arange(size) % 3 > 0)[:, None]
        case "all zero":
            return 0 * wide
        case "nearly dependent":
            return wide[np.arange(size) // 2] + 1e-7 * wide
    raise AssertionError(kind)


KINDS = [
    *("random", "alike", "opposed", "rank-deficient", "twice", "badly scaled", "with zeros", "all zero"),
    "nearly dependent",
]


def objective(rows, wanted, u):
    """½ ‖Gᵀu + g‖², which is the programme's but for a constant."""
    return 0.5 * np.sum((rows.T @ u + wanted) ** 2)


def check(rows, wanted, there, u):
    """Whether u solves min ½ uᵀG Gᵀu + gᵀGᵀu over those that are there."""
    assert np.isfinite(u).all()
    assert (u >= 0).all()
    assert not u[~there].any()
    rest = rows.T @ u + wanted
    lengths = np.linalg.norm(rows, axis=1)
    rising = rows[there] @ rest / np.where(lengths > 0, lengths, 1)[there]  # the objective's, along each
    assert rising.min(initial=0) >= -1e-7 * np.linalg.norm(wanted)
    taken = u[there] > 0
    assert np.abs(rising[taken]).max(initial=0) <= 1e-7 * np.linalg.norm(wanted)
    whole = np.zeros(len(u))
    if there.any():  # SciPy dies of a matrix without columns
        whole[there] = scipy.optimize.nnls(rows[there].T, -wanted, maxiter=50 * len(u))[0]
    assert objective(rows, wanted, u) == pytest.approx(objective(rows, wanted, whole), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 7, 20, 200])
def test_it_is_the_minimum(kind, size):
    draws = np.random.default_rng([size, KINDS.index(kind)])
    for _ in range(5 if size < 200 else 1):
        rows = gradients(kind, size, draws)
        wanted = draws.normal(size=rows.shape[1])
        there = draws.random(size) < (1 if size < 7 else 0.8)
        u = SOLVE(jnp.asarray(rows @ rows.T), jnp.asarray(rows @ wanted), jnp.asarray(there))
        check(rows, wanted, there, np.asarray(u))


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(-2, 2), min_size=4, max_size=4), min_size=5, max_size=5), st.integers(0, 31))
def test_small_whole_numbers_which_are_mostly_degenerate(numbers, mask):
    rows = np.array(numbers[:4], float)[:, :3]
    wanted = np.array(numbers[4][:3], float)
    there = (mask >> np.arange(4) & 1).astype(bool)
    u = SOLVE(jnp.asarray(rows @ rows.T), jnp.asarray(rows @ wanted), jnp.asarray(there))
    check(rows, wanted, there, np.asarray(u))


def test_many_at_once_are_each_as_alone():
    draws = np.random.default_rng(3)
    problems = []
    for kind in KINDS:
        rows = gradients(kind, 20, draws)
        wanted = draws.normal(size=rows.shape[1])
        problems.append((rows @ rows.T, rows @ wanted, draws.random(20) < 0.8))
    parts = [jnp.asarray(np.stack(part)) for part in zip(*problems, strict=True)]
    together = jax.jit(jax.vmap(nonnegative))(*parts)
    for problem, u in zip(problems, together, strict=True):
        np.testing.assert_allclose(u, SOLVE(*map(jnp.asarray, problem)), rtol=1e-6, atol=1e-12)


def test_by_hand():
    """min ½(u₁² + u₂² + u₁u₂) − u₁ − u₂/4: freeing the second would raise it."""
    u = SOLVE(jnp.array([[1.0, 0.5], [0.5, 1.0]]), jnp.array([-1.0, -0.25]), jnp.array([True, True]))
    np.testing.assert_allclose(u, [1, 0])
    u = SOLVE(jnp.array([[1.0, 0.5], [0.5, 1.0]]), jnp.array([-1.0, -0.25]), jnp.array([False, True]))
    np.testing.assert_allclose(u, [0, 0.25])
    u = SOLVE(jnp.array([[1.0, 0.5], [0.5, 1.0]]), jnp.array([-1.0, -1.0]), jnp.array([True, True]))
    np.testing.assert_allclose(u, [2 / 3, 2 / 3])


@pytest.mark.parametrize("kind", ["random", "alike", "opposed", "badly scaled", "twice"])
def test_in_single_precision_it_is_as_near_as_that_allows(kind):
    draws = np.random.default_rng(5)
    rows = gradients(kind, 20, draws).astype(np.float32)
    wanted = draws.normal(size=rows.shape[1]).astype(np.float32)
    u = SOLVE(jnp.asarray(rows @ rows.T), jnp.asarray(rows @ wanted), jnp.ones(20, bool))
    assert u.dtype == jnp.float32
    best, _ = scipy.optimize.nnls(rows.T.astype(float), -wanted.astype(float))
    rows, wanted = rows.astype(float), wanted.astype(float)
    assert objective(rows, wanted, np.asarray(u, float)) <= objective(rows, wanted, best) * (1 + 1e-4)
