"""The engine's methods beside the plain NumPy reference, step by step, in double precision."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from cotrain.data.batch import Batch
from cotrain.data.stream import Spec
from cotrain.speed.randomness import normal

TOLERANCE = 1e-9
SPEC = Spec(shape=(3, 4), classes=3, tasks=3)
STEPS, BATCH = 50, 5
NOISE = 0.5


@pytest.fixture(autouse=True)
def double_precision():
    """Computes in float64; a test's module that imports it does so in every test."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running here
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def reference_state(state: Any) -> dict:
    """A copy of the engine's first state, as the reference wants it."""

    def modules(stack: Any) -> list[dict]:
        weights, biases = np.array(outputs_by_inputs(stack)), np.array(stack.bias)
        assert weights.dtype == biases.dtype == np.float64
        return [{"weight": weight, "bias": bias} for weight, bias in zip(weights, biases, strict=True)]

    parameters = state.learner.parameters
    return {
        "experts": [modules(stack) for stack in parameters.experts],
        "heads": modules(parameters.heads),
        "router": [None if logits is None else np.array(logits) for logits in map(logits_of, parameters.router)],
        "memory": reference.empty_memory(),
        "used": [np.array(used) for used in getattr(state, "used", ())],
    }


def logits_of(router: Any) -> Any:
    """A layer's routing matrix, if it has one."""
    return getattr(router, "logits", None)


def outputs_by_inputs(stack: Any) -> Any:
    """The weights of a stack, each [outputs, inputs] whichever way it holds them."""
    return stack.weight.swapaxes(1, 2) if stack.alone else stack.weight


def listed(parameters: Any) -> list[np.ndarray]:
    """What has a number for each parameter, in the order of `reference.parameters`."""
    stacks = [*parameters.experts, parameters.heads]
    modules = [np.asarray(a) for stack in stacks for pair in _modules(stack) for a in pair]
    return modules + [np.asarray(router.logits) for router in parameters.router if router is not None]


def _modules(stack: Any) -> Iterable[tuple[Any, Any]]:
    return zip(outputs_by_inputs(stack), stack.bias, strict=True)


def reference_noise(noise: Any) -> Any:
    """The engine's random numbers, as the reference wants them."""
    if hasattr(noise, "_asdict"):
        memory = [np.asarray(bits) for bits in noise.memory]
        return {
            "current": reference_noise(noise.current),
            "replayed": reference_noise(noise.replayed),
            "memory": memory,
        }
    return [None if bits is None else np.asarray(normal(bits)) for bits in noise]


def reference_batch(batch: Batch) -> dict:
    return {name: np.asarray(value) for name, value in batch._asdict().items()}


def deviation(state: Any, expected: dict, more: Iterable[tuple[Any, Any]] = ()) -> float:
    """The largest difference between two states in any float; whole numbers and masks must be the same.

    `more` are further pairs of floats to compare.
    """
    state = jax.tree.map(np.asarray, state)
    parameters = state.learner.parameters
    pairs = list(more)
    stacks = [*parameters.experts, parameters.heads]
    for stack, modules in zip(stacks, [*expected["experts"], expected["heads"]], strict=True):
        pairs.append((outputs_by_inputs(stack), [module["weight"] for module in modules]))
        pairs.append((stack.bias, [module["bias"] for module in modules]))
    for found, logits in zip(map(logits_of, parameters.router), expected["router"], strict=True):
        assert (found is None) == (logits is None)
        if found is not None:
            pairs.append((found, logits))

    for used, mask in zip(getattr(state, "used", ()), expected["used"], strict=True):
        np.testing.assert_array_equal(used, mask)

    memory = getattr(getattr(state, "inner", state), "memory", None)
    if memory is not None and memory.seen.ndim == 0:  # a reservoir; what a ring holds is for `more`
        kept, following = expected["memory"]["kept"], expected["memory"]["next"]
        assert memory.seen == expected["memory"]["seen"]
        assert len(kept) == min(memory.seen, len(memory.y))
        np.testing.assert_array_equal(memory.y[: len(kept)], [example.y for example in kept])
        np.testing.assert_array_equal(memory.task[: len(kept)], [example.task for example in kept])
        pairs.append((memory.x[: len(kept)], [example.x for example in kept]))
        for name in ("y", "task", "weight"):
            np.testing.assert_array_equal(getattr(memory.next, name), following[name])
        pairs.append((memory.next.x, following["x"]))
        for name, column in memory.columns.items():
            pairs.append((column[: len(kept)], [example.columns[name] for example in kept]))
            pairs.append((memory.next_columns[name], [columns[name] for columns in following["columns"]]))

    largest = 0.0
    for found, wanted in pairs:
        found, wanted = np.asarray(found), np.asarray(wanted)
        assert found.dtype == np.float64
        assert found.shape == wanted.shape
        assert np.isfinite(found).all()
        assert np.isfinite(wanted).all()
        largest = max(largest, np.abs(found - wanted).max())
    return largest


def minibatches(joint: bool) -> list[Batch]:
    """The tasks one after another or, if joint, mixed; in every seventh batch one to three examples are padding."""
    generator = np.random.default_rng(1)
    batches = []
    for step in range(STEPS):
        weight = np.ones(BATCH)
        if step % 7 == 3:
            weight[generator.choice(BATCH, 1 + step % 3, replace=False)] = 0
        tasks = generator.integers(SPEC.tasks, size=BATCH)
        batches.append(
            Batch(
                x=jnp.asarray(generator.normal(size=(BATCH, *SPEC.shape))),
                y=jnp.asarray(generator.integers(SPEC.classes, size=BATCH), jnp.int32),
                task=jnp.asarray(tasks if joint else step * SPEC.tasks // STEPS, jnp.int32),
                weight=jnp.asarray(weight),
            )
        )
    return batches


def agree(
    method: Any,
    update: Callable[[dict, dict, Any, dict], float | None],
    settings: dict,
    *,
    consolidate: Callable[[dict, dict, Any, dict], None] | None = None,
    also: Callable[[Any, dict], Iterable[tuple[Any, Any]]] = lambda state, expected: (),
    noise_of: Callable[[Any], Any] | None = None,
    joint: bool = False,
    seed: int = 2,
) -> dict:
    """Runs a method and its reference, compares them after every step, and returns where the reference ends.

    The reference `update` changes its state, and returns the loss; `consolidate` changes it at the end of each task.
    They see what the method sees, its key too. `also` gives what else must agree of both states, in pairs.
    """
    state = method.init(jax.random.key(seed))
    expected = reference_state(state)
    step_of, end_of = eqx.filter_jit(method.update), eqx.filter_jit(method.consolidate)
    batches = minibatches(joint)
    for step, batch in enumerate(batches):
        noise = method.draw(jax.random.fold_in(jax.random.key(3), step), batch)
        state, info = step_of(state, batch, noise)
        given = (noise_of or reference_noise)(noise)
        loss = update(expected, reference_batch(batch), given, settings)
        assert loss is not None
        assert abs(float(info.loss) - loss) < TOLERANCE, step
        assert deviation(state, expected, also(state, expected)) < TOLERANCE, step
        if consolidate is None or (step + 1 < len(batches) and batches[step + 1].task == batch.task):
            continue
        key, some = jax.random.fold_in(jax.random.key(4), step), examples_for(method.examples, int(batch.task))
        state = end_of(state, some, key)
        consolidate(expected, reference_batch(some), key, settings)
        assert deviation(state, expected, also(state, expected)) < TOLERANCE, f"end of task {batch.task}"
    return expected


def examples_for(count: int, task: int) -> Batch:
    """Examples of a task for `consolidate`; where it wants several, the last is padding."""
    generator = np.random.default_rng([5, task])
    return Batch(
        x=jnp.asarray(generator.normal(size=(count, *SPEC.shape))),
        y=jnp.asarray(generator.integers(SPEC.classes, size=count), jnp.int32),
        task=jnp.asarray(task, jnp.int32),
        weight=jnp.asarray(np.arange(count) < max(count - 1, 1), float),
    )
