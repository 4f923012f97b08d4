"""A-GEM beside a plain version of it, step by step, in double precision."""

import numpy as np
import pytest
import reference
from agreement import NOISE, SPEC, agree, double_precision, reference_noise
from rings import Rings, compared

from cotrain.memory import ring
from cotrain.methods.agem import agem
from cotrain.methods.cotraining import cotraining
from cotrain.networks.experts import dense
from cotrain.networks.routers.sampling import gaussian
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

_double_precision = double_precision
ROUTED = {"layers": 2, "experts": 6, "k": 2, "router": task_matrix(gaussian(NOISE))}
NETWORKS = {
    "shared bottom": shared_bottom(SPEC, hidden=(7, 5)),
    "routing network": routing_network(SPEC, dense(5), **ROUTED),
}
SETTINGS = {"k": (2, 2), "noise": NOISE, "lr": 0.3, "router_lr": 1.5, "cotraining_lr": 0.15, "cotrain_heads": False}


def rings_of(state, settings):
    return state.setdefault("rings", Rings(settings["places"], settings["by_class"]))


def update(state, batch, noise, settings):
    """One minibatch of A-GEM."""
    examples, task = reference.examples_of(batch), int(batch["task"])
    loss, g = reference.whole_gradient(state, examples, reference.sampled(state, batch, noise["current"], settings))
    rings = rings_of(state, settings)
    rings.add(examples)
    old = rings.drawn([other for other in range(SPEC.tasks) if other != task], noise["memory"])
    state["old"] = old
    if old:
        routes = {example.task: reference.route_of(state, example.task, settings) for example in old}
        _, g_ref = reference.whole_gradient(state, old, routes)
        product = sum(np.sum(one * other) for one, other in zip(g, g_ref, strict=True))
        if product < 0:
            square = sum(np.sum(one**2) for one in g_ref)
            g = [one - product / square * other for one, other in zip(g, g_ref, strict=True)]
            state["projected"] = state.get("projected", 0) + 1
    reference.step(state, g, settings["lr"], settings["router_lr"])
    return loss


def cotrained(state, batch, noise, settings):
    """One minibatch of co-training around it."""
    loss, task = update(state, batch, noise, settings), int(batch["task"])
    for layer, gates in enumerate(reference.route_of(state, task, settings)):
        for e in range(len(state["experts"][layer])):
            state["used"][layer][task, e] = e in gates
    reference.cotrain(state, reference.examples_of(batch) + state["old"], task, settings)
    return loss


def noise_of(noise):
    return {"current": reference_noise(noise.current), "memory": np.asarray(noise.memory)}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("capacity", "by_class"), [(18, True), (30, False)])
def test_every_step_agrees(network, capacity, by_class):
    method = agem(NETWORKS[network], ring(SPEC, capacity, 7, by_class=by_class), lr=0.3, router_lr=1.5)
    settings = {**SETTINGS, "places": capacity // (9 if by_class else 3), "by_class": by_class}

    def also(state, expected):
        return compared(state.memory, rings_of(expected, settings))

    end = agree(method, update, settings, also=also, noise_of=noise_of)
    assert end["projected"] > 5


@pytest.mark.parametrize("network", NETWORKS)
def test_every_step_agrees_under_cotraining(network):
    method = agem(NETWORKS[network], ring(SPEC, 18, 7, by_class=True), lr=0.3, router_lr=1.5)
    settings = {**SETTINGS, "places": 2, "by_class": True}
    method = cotraining(method, lr=0.15)
    assert agree(method, cotrained, settings, noise_of=noise_of)["projected"] > 5
