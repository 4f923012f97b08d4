"""MER agrees with a plain NumPy version of its Algorithm 1, step by step, in double precision."""

import numpy as np
import pytest
import reference
from agreement import NOISE, SPEC, agree, double_precision

from cotrain.memory import reservoir
from cotrain.methods.cotraining import cotraining
from cotrain.methods.mer import mer
from cotrain.networks.experts import dense
from cotrain.networks.routers.sampling import gaussian
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom
from cotrain.speed.randomness import normal

_double_precision = double_precision

NETWORKS = {
    "shared bottom": lambda: shared_bottom(SPEC, hidden=(7, 5)),
    "routing network": lambda: routing_network(
        SPEC, dense(5), layers=2, experts=6, k=2, router=task_matrix(gaussian(NOISE))
    ),
}
RATES = {"lr": 0.3, "router_lr": 1.5}
SETTINGS = {**RATES, "noise": NOISE, "k": (2, 2), "cotrain_heads": False, "cotraining_lr": 0.15}


def noise_of(noise):
    """The engine's random numbers, as the reference wants them."""
    routes = [None if bits is None else np.asarray(normal(bits)) for bits in noise.routes]
    return {"routes": routes, "memory": [np.asarray(bits) for bits in noise.memory]}


def part_way(state, start, share):
    for parameter, before in zip(reference.parameters(state), start, strict=True):
        parameter[...] = before + share * (parameter - before)


def copied(state):
    return [parameter.copy() for parameter in reference.parameters(state)]


def learn_one(state, example, draws, settings):
    """One step on one example; returns the loss before it."""
    routes = {example.task: reference.route_of(state, example.task, settings, draws, 0)}
    loss, slopes = reference.whole_gradient(state, [example], routes)
    reference.step(state, slopes, settings["lr"], settings["router_lr"])
    return loss


def update(state, batch, noise, settings):
    """A minibatch of MER, as Algorithm 1 has it for each of its examples; `replayed` says what it replayed."""
    s, others, memory = settings["batches"], settings["memory_batch"], state["memory"]
    losses, state["replayed"] = [], []
    for i, weight in enumerate(batch["weight"]):
        one = {name: batch[name][i : i + 1] for name in ("x", "y", "weight")} | {"task": batch["task"]}
        if weight == 1:
            current, old, held = reference.examples_of(one)[0], memory["next"], memory["seen"]
            first = copied(state)  # θ^A_0
            for b in range(s):
                before = copied(state)  # θ^W_{b,0}
                for j in range(1 + min(others, held)):
                    row = b * (1 + others) + j
                    draws = [None if a is None else a[i, row : row + 1] for a in noise["routes"]]
                    if j == 0:
                        losses += [learn_one(state, current, draws, settings)]
                        continue
                    place = b * others + j - 1
                    replayed = reference.Example(*(old[name][place] for name in ("x", "y", "task")))
                    learn_one(state, replayed, draws, settings)
                    state["replayed"].append(replayed)
                part_way(state, before, settings["beta"])
            part_way(state, first, settings["gamma"])
            losses = losses[: len(losses) - s + 1]  # the other batches met an example that they had learned
        place_bits, pick_bits = (bits[i] for bits in noise["memory"])
        reference.remember(memory, one, place_bits, pick_bits, settings["capacity"])
    return np.mean(losses)


def cotrained(state, batch, noise, settings):
    """A minibatch of MER, then a step of the unused experts on all that it learned from."""
    loss, task = update(state, batch, noise, settings), int(batch["task"])
    for used, chosen in zip(state["used"], reference.route_of(state, task, settings), strict=True):
        used[task] = np.isin(np.arange(used.shape[1]), list(chosen))
    reference.cotrain(state, reference.examples_of(batch) + state["replayed"], task, settings)
    return loss


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    ("capacity", "shape"),
    [
        (20, {"batches": 2, "memory_batch": 3, "beta": 0.3, "gamma": 0.7}),
        (2, {"batches": 1, "memory_batch": 4, "beta": 0.1, "gamma": 1.0}),
    ],
    ids=["two batches", "a small memory"],
)
def test_every_step_agrees(network, capacity, shape):
    method = made(network, capacity, shape)
    agree(method, update, SETTINGS | {"capacity": capacity} | shape, noise_of=noise_of)


def made(network, capacity, shape):
    options = {name: value for name, value in shape.items() if name != "memory_batch"}
    return mer(NETWORKS[network](), reservoir(capacity, shape["memory_batch"]), **options, **RATES)


def test_every_step_agrees_under_cotraining():
    shape = {"batches": 2, "memory_batch": 2, "beta": 0.3, "gamma": 0.7}
    method = cotraining(made("routing network", 20, shape), lr=SETTINGS["cotraining_lr"])
    agree(method, cotrained, SETTINGS | {"capacity": 20} | shape, noise_of=noise_of)
