"""The engine agrees with the plain NumPy reference, step by step, in double precision."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from cotrain.data.batch import Batch
from cotrain.data.stream import Spec, Stream
from cotrain.engine import learn
from cotrain.memory import below, reservoir
from cotrain.methods.cotraining import cotraining
from cotrain.methods.finetune import finetune
from cotrain.methods.private import private
from cotrain.methods.replay import replay
from cotrain.networks.experts import dense
from cotrain.networks.routers.sampling import gaussian
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom
from cotrain.speed.randomness import normal

TOLERANCE = 1e-9
SPEC = Spec(shape=(3, 4), classes=3, tasks=3)
STEPS, BATCH, MEMORY_BATCH = 50, 5, 4
RATES = {"lr": 0.3, "router_lr": 1.5, "memory_lr": 0.2, "cotraining_lr": 0.15}
NOISE = 0.5


class Case(NamedTuple):
    """A method on a network; `experts` of None is a shared bottom."""

    method: str
    experts: tuple[int, ...] | None = (6, 6)
    k: tuple[int, ...] = (2, 2)
    capacity: int = 20
    cotrain_heads: bool = False
    joint: bool = False  # examples of all tasks in each batch


@pytest.fixture(autouse=True)
def _double_precision():
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running here
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def make(case: Case) -> tuple[Any, Any, dict]:
    """The engine's method, the reference's, and the settings of the latter."""
    if case.experts is None:
        network = shared_bottom(SPEC, hidden=(7, 5))
    else:
        options = {"layers": len(case.experts), "experts": case.experts, "k": case.k}
        network = routing_network(SPEC, dense(5), router=task_matrix(gaussian(NOISE)), **options)
    memory = reservoir(case.capacity, MEMORY_BATCH)
    lr, router_lr, memory_lr = RATES["lr"], RATES["router_lr"], RATES["memory_lr"]
    settings = {
        **RATES,
        "noise": NOISE,
        "k": case.k,
        "capacity": case.capacity,
        "cotrain_heads": case.cotrain_heads,
    }
    match case.method:
        case "finetune":
            return finetune(network, lr=lr, router_lr=router_lr), reference.finetune, settings
        case "private":
            return private(network, lr=lr), reference.finetune, {**settings, "k": (1, 1), "router_lr": 0.0}
        case "replay":
            rates = {"lr": lr, "router_lr": router_lr, "memory_lr": memory_lr}
            return replay(network, memory, **rates), reference.replay, settings
        case "cotraining":
            inner = replay(network, memory, lr=lr, router_lr=router_lr, memory_lr=memory_lr)
            method = cotraining(inner, lr=RATES["cotraining_lr"], cotrain_heads=case.cotrain_heads)
            return method, reference.cotraining, settings
    raise AssertionError(case.method)


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
        "router": [None if router is None else np.array(router.logits) for router in parameters.router],
        "memory": reference.empty_memory(),
        "used": [np.array(used) for used in getattr(state, "used", ())],
    }


def outputs_by_inputs(stack: Any) -> Any:
    """The weights of a stack, each [outputs, inputs] whichever way it holds them."""
    return stack.weight.swapaxes(1, 2) if stack.alone else stack.weight


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


def deviation(state: Any, expected: dict) -> float:
    """The largest difference between two states in any float; whole numbers and masks must be the same."""
    state = jax.tree.map(np.asarray, state)
    parameters = state.learner.parameters
    pairs = []
    stacks = [*parameters.experts, parameters.heads]
    for stack, modules in zip(stacks, [*expected["experts"], expected["heads"]], strict=True):
        pairs.append((outputs_by_inputs(stack), [module["weight"] for module in modules]))
        pairs.append((stack.bias, [module["bias"] for module in modules]))
    for router, logits in zip(parameters.router, expected["router"], strict=True):
        assert (router is None) == (logits is None)
        if router is not None:
            pairs.append((router.logits, logits))

    for used, mask in zip(getattr(state, "used", ()), expected["used"], strict=True):
        np.testing.assert_array_equal(used, mask)

    if (memory := getattr(getattr(state, "inner", state), "memory", None)) is not None:
        kept, following = expected["memory"]["kept"], expected["memory"]["next"]
        assert memory.seen == expected["memory"]["seen"]
        assert len(kept) == min(memory.seen, len(memory.y))
        np.testing.assert_array_equal(memory.y[: len(kept)], [example.y for example in kept])
        np.testing.assert_array_equal(memory.task[: len(kept)], [example.task for example in kept])
        pairs.append((memory.x[: len(kept)], [example.x for example in kept]))
        for name in ("y", "task", "weight"):
            np.testing.assert_array_equal(getattr(memory.next, name), following[name])
        pairs.append((memory.next.x, following["x"]))

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


def compare(case: Case, seed: int = 2) -> list[list[int]]:
    """Runs both and compares them after every step; returns each step's numbers of unused experts per layer."""
    method, reference_update, settings = make(case)
    state = method.init(jax.random.key(seed))
    expected = reference_state(state)
    update = eqx.filter_jit(method.update)
    unused = []
    for step, batch in enumerate(minibatches(case.joint)):
        noise = method.draw(jax.random.fold_in(jax.random.key(3), step), batch)
        state, info = update(state, batch, noise)
        loss = reference_update(expected, reference_batch(batch), reference_noise(noise), settings)
        assert abs(float(info.loss) - loss) < TOLERANCE, step
        assert deviation(state, expected) < TOLERANCE, step
        unused.append([len(free) for free in reference.unused_experts(expected)])
    return unused


CASES = {
    "finetune, shared bottom": Case("finetune", experts=None),
    "finetune": Case("finetune"),
    "replay, shared bottom": Case("replay", experts=None),
    "replay": Case("replay"),
    "cotraining, shared bottom": Case("cotraining", experts=None),
    "cotraining": Case("cotraining"),
    "private": Case("private"),
    "joint, shared bottom": Case("finetune", experts=None, joint=True),
    "joint": Case("finetune", joint=True),
    "joint, wide": Case("finetune", experts=(24, 24), joint=True),
    "replay, wide, memory smaller than a batch": Case("replay", experts=(24, 24), capacity=3),
    "cotraining, layers differ, heads too": Case("cotraining", (1, 4, 6), k=(1, 3, 1), cotrain_heads=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_step_agrees(case):
    compare(case)


def test_a_layer_without_unused_experts_agrees():
    unused = compare(Case("cotraining", experts=(5, 6)), seed=15)
    assert any(first == 0 and second > 2 for first, second in unused)


def test_nothing_left_to_cotrain_agrees():
    unused = compare(Case("cotraining", experts=(3, 4)))
    assert [0, 1] in unused
    assert [0, 0] in unused


def test_a_layer_whose_routes_take_all_experts_agrees():
    unused = compare(Case("cotraining", experts=(2, 4)))
    assert [0, 2] in unused


def test_whole_numbers_from_bits_agree():
    """At the first and last bits that give a number, where the low word decides."""
    numbers = [(bound, number) for bound in (1, 3, 20, 1000, 999_999_937) for number in {0, 1 % bound, bound - 1}]
    firsts = [(bound, -(-(number << 64) // bound)) for bound, number in numbers]
    cases = firsts + [(bound, (first - 1) % 2**64) for bound, first in firsts]
    bounds = [bound for bound, _ in cases]
    bits = [[bits >> 32, bits % 2**32] for _, bits in cases]
    wanted = [reference.below(*case) for case in zip(bounds, bits, strict=True)]
    found = below(jnp.array(bounds, jnp.int32), jnp.array(bits, jnp.uint32))
    np.testing.assert_array_equal(found, wanted)


def tasks_for(seed: int) -> list[tuple[np.ndarray, ...]]:
    """Train and test examples of every task, of a number that leaves the last batch incomplete."""
    generator = np.random.default_rng(seed)
    return [
        tuple(
            array
            for size in (38, 30)
            for array in (generator.normal(size=(size, *SPEC.shape)), generator.integers(SPEC.classes, size=size))
        )
        for _ in range(SPEC.tasks)
    ]


def fed(tasks: list[tuple[np.ndarray, ...]], phase: list[int], joint: bool, order: np.ndarray) -> list[Batch]:
    """The minibatches of an epoch; padding repeats the first example."""
    x, y = (np.concatenate([tasks[task][i] for task in phase]) for i in (0, 1))
    task = np.concatenate([np.full(len(tasks[task][1]), task) for task in phase])
    weight = np.ones(len(order))
    padding = -len(order) % BATCH
    order, weight = np.pad(order, (0, padding)), np.pad(weight, (0, padding))
    return [
        Batch(x[part], y[part], task[part] if joint else np.array(phase[0]), weight[i : i + BATCH])
        for i in range(0, len(order), BATCH)
        for part in [order[i : i + BATCH]]
    ]


@pytest.mark.parametrize(
    ("case", "seeds"),
    [
        pytest.param(Case("cotraining", experts=(4, 4)), [4], id="cotraining"),
        pytest.param(Case("cotraining", experts=(4, 4)), [4, 5], id="cotraining, two seeds at once"),
        pytest.param(Case("finetune", joint=True), [4], id="joint"),
    ],
)
def test_the_engine_agrees(case, seeds):
    epochs = 2
    method, reference_update, settings = make(case)
    tasks = [tasks_for(seed) for seed in seeds]
    streams = [Stream.from_arrays(each, classes=SPEC.classes) for each in tasks]
    streams = [stream.shuffled() if case.joint else stream for stream in streams]
    *_, last = learn(method, streams, seeds, batch=BATCH, epochs=epochs, chunk=7)

    largest = 0.0
    for s, seed in enumerate(seeds):
        expected = reference_state(method.init(jax.random.key(seed)))
        for phase, together in enumerate(streams[s].phases):
            step = 0
            key = jax.random.fold_in(jax.random.key(seed), phase + 1)
            for epoch in range(epochs):
                examples = sum(len(tasks[s][task][1]) for task in together)
                order = np.random.default_rng([11, seed, phase, epoch]).permutation(examples)
                for batch in fed(tasks[s], together, case.joint, order):
                    noise = method.draw(jax.random.fold_in(key, step), batch)
                    reference_update(expected, reference_batch(batch), reference_noise(noise), settings)
                    step += 1
            for task in range(max(together) + 1):
                wanted = reference.accuracy(expected, task, *tasks[s][task][2:], settings)
                assert last.accuracy[s, phase, task] == pytest.approx(wanted, abs=TOLERANCE)
        largest = max(largest, deviation(jax.tree.map(lambda a, s=s: a[s], last.state), expected))
    assert largest < TOLERANCE
