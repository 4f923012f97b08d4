"""The engine agrees with the plain NumPy reference, step by step, in double precision."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from agreement import (
    BATCH,
    NOISE,
    SPEC,
    TOLERANCE,
    agree,
    deviation,
    double_precision,
    reference_batch,
    reference_noise,
    reference_state,
)

from cotrain.data.batch import Batch
from cotrain.data.stream import Stream
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

MEMORY_BATCH = 4
RATES = {"lr": 0.3, "router_lr": 1.5, "memory_lr": 0.2, "cotraining_lr": 0.15}


_double_precision = double_precision


class Case(NamedTuple):
    """A method on a network; `experts` of None is a shared bottom."""

    method: str
    experts: tuple[int, ...] | None = (6, 6)
    k: tuple[int, ...] = (2, 2)
    capacity: int = 20
    cotrain_heads: bool = False
    joint: bool = False  # examples of all tasks in each batch


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


def compare(case: Case, seed: int = 2) -> list[list[int]]:
    """Runs both and compares them after every step; returns each step's numbers of unused experts per layer."""
    method, reference_update, settings = make(case)
    unused: list[list[int]] = []

    def update(expected: dict, *arguments: Any) -> float:
        loss = reference_update(expected, *arguments)
        unused.append([len(free) for free in reference.unused_experts(expected)])
        return loss

    agree(method, update, settings, joint=case.joint, seed=seed)
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
