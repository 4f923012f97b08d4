"""The compiled programs that learn: a method's state at the start, after minibatches, and after a task.

They are for several seeds at once; arrays that differ between seeds have a leading axis S.

Axes: S seeds, C minibatches of a chunk, B examples.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from cotrain.data.batch import Batch
from cotrain.devices import over_seeds, placed
from cotrain.errors import Diverged
from cotrain.methods.method import Method, State
from cotrain.speed.randomness import unrolled

# On CPUs with vectors of 512 bits XLA takes 256, lest the clock slow down; but its matrix products use 512 anyway.
WIDE = {"xla_cpu_prefer_vector_width": 512}
DRAWN, MANY = 20, 2**16  # minibatches whose random numbers are drawn at once, unless there are too many for the cache


def keys_of(seeds: Sequence[int]) -> PRNGKeyArray:
    """Each seed's key, from which all its random numbers come."""
    return placed(jnp.stack([jax.random.key(seed) for seed in seeds]), len(seeds))


def init(method: Method, keys: PRNGKeyArray) -> State:
    """The state before the first task."""
    return _init(method, keys)


@eqx.filter_jit
def _init(method: Method, keys: PRNGKeyArray) -> State:
    return over_seeds(method.init, len(keys))(keys)


def consolidate(method: Method, keys: PRNGKeyArray, phase: int, steps: int, sample: Batch, state: State) -> State:
    """The state after so many minibatches of a phase, which end it, in the memory of the state before it."""
    return _consolidate((method, keys, jnp.array(phase), jnp.array(steps), placed(sample, len(keys))), state)


@eqx.filter_jit(donate="all-except-first")
def _consolidate(fixed: tuple[Method, PRNGKeyArray, Array, Array, Batch], state: State) -> State:
    method, keys, phase, steps, batches = fixed

    def end(state: State, key: PRNGKeyArray, batch: Batch) -> State:
        key = jax.random.fold_in(jax.random.fold_in(key, phase + 1), steps)  # as that of a step after the last
        return method.consolidate(state, batch, key)

    return over_seeds(end, len(keys))(state, keys, batches)


class Chunk(NamedTuple):
    """The next minibatches of a phase, and all else that a program needs to learn from them."""

    method: Method
    keys: PRNGKeyArray
    phase: Int[Array, ""] | np.int32
    first: Int[Array, ""] | np.int32  # the place in the phase of the first minibatch
    steps: Int[Array, ""] | np.int32  # minibatches to learn from; the others are padding
    batches: Batch


def advance(
    chunk: Chunk, state: State, seeds: Sequence[int], task: int
) -> tuple[State, dict[str, Float[np.ndarray, "S C"]]]:
    """The state after a chunk, in the memory of the state before it, and each step's scalars."""
    state, found, total = compiled()(chunk, state)
    first, count = int(chunk.first), int(chunk.steps)
    scalars = {name: np.asarray(values)[:, :count] for name, values in found.items()}
    _check_finite(scalars["loss"], seeds, task, first)
    # A loss is taken before its step: what a chunk's last step broke shows only in the parameters.
    _check_finite(np.asarray(total)[:, None], seeds, task, first + count - 1)
    return state, scalars


@cache
def compiled() -> Callable[..., Any]:
    """`_advance`, compiled for this machine."""
    options: Any = {}
    if jax.default_backend() == "cpu":
        with suppress(jax.errors.JaxRuntimeError):  # another XLA may not know them
            jax.jit(lambda: 0, compiler_options=WIDE).lower().compile()
            options = {"compiler_options": WIDE}
    return eqx.filter_jit(_advance, donate="all-except-first", **options)


def _advance(chunk: Chunk, state: State) -> tuple[State, dict[str, Float[Array, "S C"]], Float[Array, " S"]]:
    """The state after a chunk, in the memory of the state before it, each step's scalars, the sum of all parameters."""
    method, keys, phase, first, steps, batches = chunk

    def run(state: State, key: PRNGKeyArray, batches: Batch) -> tuple[State, dict[str, Array], Float[Array, ""]]:
        key = jax.random.fold_in(unrolled(key), phase + 1)
        draws = jax.vmap(lambda i, batch: method.draw(jax.random.fold_in(key, first + i), batch))
        drawn = _drawn(method, batches)
        update = jax.jit(partial(_updated, method), inline=True)  # traced once, to know its scalars and to run it

        def block(number: Array, carry: tuple[State, dict[str, Array]]) -> tuple[State, dict[str, Array]]:
            start = number * drawn
            some = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, drawn), batches)
            noise = draws(start + jnp.arange(drawn), some)

            def minibatch(i: Array, carry: tuple[State, dict[str, Array]]) -> tuple[State, dict[str, Array]]:
                state, scalars = carry
                batch = jax.tree.map(lambda a: a[start + i], batches)
                state, found = update(state, batch, jax.tree.map(lambda a: a[i], noise))
                return state, {name: values.at[start + i].set(found[name]) for name, values in scalars.items()}

            return jax.lax.fori_loop(0, jnp.minimum(drawn, steps - start), minibatch, carry)

        one = jax.tree.map(lambda a: a[0], batches)
        found = jax.eval_shape(lambda state: update(state, one, method.draw(key, one))[1], state)
        nothing = {name: jnp.zeros(len(batches.y), value.dtype) for name, value in found.items()}
        state, scalars = jax.lax.fori_loop(0, -(-steps // drawn), block, (state, nothing))
        # The quickest way to read all parameters: the sum is not finite where one of them is not.
        total = jnp.stack([leaf.sum() for leaf in jax.tree.leaves(state.learner.parameters)]).sum()
        return state, scalars, total

    return over_seeds(run, len(keys))(state, keys, batches)


def _updated(method: Method, state: State, batch: Batch, noise: Any) -> tuple[State, dict[str, Array]]:
    """The state after a minibatch, and what there is to see of it."""
    state, info = method.update(state, batch, noise)
    return state, {**info.scalars, "loss": info.loss}


def _drawn(method: Method, batches: Batch) -> int:
    """The minibatches whose random numbers are drawn at once: the same numbers, faster than one at a time."""
    batch = jax.tree.map(lambda a: a[0], batches)
    each = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(method.draw, jax.random.key(0), batch)))
    return next(n for n in (20, 10, 4, 2, 1) if n * each <= MANY or n == 1)


def _check_finite(losses: np.ndarray, seeds: Sequence[int], task: int, first: int) -> None:
    bad = np.argwhere(~np.isfinite(losses))
    if len(bad):
        seed, step = bad[0]
        raise Diverged(seeds[seed], task, first + int(step), float(losses[seed, step]))
