"""Nonnegative quadratic programmes, solved exactly in a compiled program.

By the active-set method of Lawson and Hanson (1974, chapter 23), on the Gram matrix as in fast nonnegative least
squares (Bro and de Jong 1997).

Axes: K unknowns.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class _Search(NamedTuple):
    """Where the search is; `done` when nothing would lower the objective."""

    u: Float[Array, " K"]  # feasible, and lower with each step that changes it
    free: Bool[Array, " K"]  # the passive set P; the others are held at 0
    barred: Bool[Array, " K"]  # not to be freed again before something else has helped
    newest: Bool[Array, " K"]  # what was freed last, while it has not shown to help
    done: Bool[Array, ""]
    steps: Int[Array, ""]


def nonnegative(gram: Float[Array, "K K"], linear: Float[Array, " K"], there: Bool[Array, " K"]) -> Float[Array, " K"]:
    """The u ≥ 0 that minimises ½ uᵀQu + qᵀu, with 0 for unknowns that are not `there`.

    Q is positive semidefinite, and the objective bounded below. Where Q is singular, it is one of several such u.
    """
    size = len(linear)
    there = there & (jnp.diag(gram) > 0)
    scale = jnp.where(there, jax.lax.rsqrt(jnp.where(there, jnp.diag(gram), 1)), 0)
    gram, linear = scale[:, None] * gram * scale[None, :], scale * linear  # so that Q has ones on its diagonal

    def step(now: _Search) -> _Search:
        system = jnp.where(now.free[:, None] & now.free[None, :], gram, jnp.eye(size, dtype=gram.dtype))
        s = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(system), jnp.where(now.free, -linear, 0))
        sound = jnp.isfinite(s).all() & ~(now.newest & (s <= 0)).any()  # else rounding errors freed it
        below = now.free & (s <= 0) & sound

        share = jnp.min(jnp.where(below, now.u / jnp.where(below, now.u - s, 1), 1))  # α: as far as all are ≥ 0
        u = jnp.where(sound, now.u + share * (s - now.u), now.u)
        held = below & (now.u <= share * (now.u - s))
        u = jnp.where(now.free & ~held, u, 0)
        free = now.free & ~held & ~(now.newest & ~sound)

        barred = jnp.where(sound, False, now.barred | now.newest)
        descent = -(gram @ u + linear)  # w = −(Qu + q)
        error = size * jnp.finfo(gram.dtype).eps * (jnp.abs(gram) @ jnp.abs(u) + jnp.abs(linear))
        better = there & ~free & ~barred & (descent > error)
        best = better & (jnp.arange(size) == jnp.where(better, descent, -jnp.inf).argmax())
        whole = ~below.any()  # u solves Q_PP u_P = −q_P
        newest = best & whole
        done = whole & ~best.any() | ~sound & ~now.newest.any()
        return _Search(u, free | newest, barred, newest, done, now.steps + 1)

    nothing = jnp.zeros(size, bool)
    start = _Search(jnp.zeros_like(linear), nothing, nothing, nothing, jnp.array(False), jnp.array(0))
    end = jax.lax.while_loop(lambda now: ~now.done & (now.steps < 10 * size), step, start)
    return scale * end.u
