"""More tasks than a method was made for: router rows and heads are added, and nothing else changes.

What a method keeps for each task gets new rows, as they are at a start; a network has as many experts as before.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from cotrain.data.stream import Spec
from cotrain.engine import Snapshot
from cotrain.errors import Invalid
from cotrain.evaluation import matrices
from cotrain.methods.method import Method, State
from cotrain.networks.network import Network
from cotrain.steps import init


def resized(method: Method, spec: Spec) -> Method:
    """The same method on the same network, with another number of tasks."""

    def resize(part: Any) -> Any:
        return part.resized(spec) if isinstance(part, Network) else part

    made = jax.tree.map(resize, method, is_leaf=lambda part: isinstance(part, Network))
    if made.network.spec != spec:
        raise Invalid("method", type(method).__name__, "it is no pytree with its network in it, which could be changed")
    return made


def grown(method: Method, keys: PRNGKeyArray, state: State) -> State:
    """The state of the same method with fewer tasks, as this method's: what is larger is filled as at the start."""
    fresh = init(method, keys)

    def grow(path: Any, new: Any, old: Any) -> Any:
        if new.shape == old.shape:
            return old
        if new.ndim != old.ndim or any(after < before for after, before in zip(new.shape, old.shape, strict=True)):
            what = f"its {jax.tree_util.keystr(path)} of shape {old.shape} would be {new.shape}"
            raise Invalid("method", type(method).__name__, f"it cannot take more tasks: {what}")
        return new.at[tuple(slice(size) for size in old.shape)].set(old)

    if jax.tree.structure(fresh) != jax.tree.structure(state):
        raise Invalid("method", type(method).__name__, "it cannot take more tasks: its state is built otherwise then")
    return jax.tree_util.tree_map_with_path(grow, fresh, state)


def grown_snapshot(method: Method, keys: PRNGKeyArray, now: Snapshot, empty: Snapshot) -> Snapshot:
    """Where a run of fewer tasks was, as of a run with more, whose snapshot is `empty` at the start."""

    def grow(new: np.ndarray, old: np.ndarray) -> np.ndarray:
        new = new.copy()
        new[tuple(slice(size) for size in old.shape)] = old
        return new

    state, tasks = grown(method, keys, now.state), now.accuracy.shape[2]
    logits, gates = tuple(map(grow, empty.logits, now.logits)), tuple(map(grow, empty.gates, now.gates))
    if method.network.by_task:  # new tasks' rows are what they would have been from the start
        for layer, found in enumerate(matrices(method.network, state.learner.parameters)):
            for history, rows in zip((logits, gates), found, strict=True):
                history[layer][:, : now.phase, tasks:] = np.asarray(rows)[:, None, tasks:]
    else:  # a task that is to come took no expert
        for history in gates:
            history[:, : now.phase, tasks:] = 0
    return replace(
        now,
        state=state,
        accuracy=grow(empty.accuracy, now.accuracy),
        initial=grow(empty.initial, now.initial),
        logits=logits,
        gates=gates,
    )
