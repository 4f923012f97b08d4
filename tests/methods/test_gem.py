"""GEM beside a plain version of it, whose quadratic programme SciPy solves, step by step, in double precision."""

import numpy as np
import pytest
import reference
import scipy.linalg
import scipy.optimize
from agreement import NOISE, SPEC, agree, double_precision, reference_noise
from rings import Rings, compared

from cotrain.memory import ring
from cotrain.methods.cotraining import cotraining
from cotrain.methods.gem import gem
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


def combination(rows, g, margin, ridge):
    """The v ≥ γ that minimises ½ vᵀ(G Gᵀ + ε)v + gᵀGᵀv, as nonnegative least squares of u = v − γ."""
    gram = rows @ rows.T + ridge * np.eye(len(rows))
    linear = rows @ g + gram @ np.full(len(rows), margin)
    factor = np.linalg.cholesky(gram)
    u, _ = scipy.optimize.nnls(factor.T, -scipy.linalg.solve_triangular(factor, linear, lower=True))
    return u + margin


def update(state, batch, noise, settings):
    """One minibatch of GEM."""
    examples, task = reference.examples_of(batch), int(batch["task"])
    loss, slopes = reference.whole_gradient(
        state, examples, reference.sampled(state, batch, noise["current"], settings)
    )
    rings, rows, state["old"] = rings_of(state, settings), [], []
    rings.add(examples)
    for k in range(SPEC.tasks):
        some = rings.of([k]) if noise["examples"] is None else rings.drawn([k], noise["examples"][k])
        if k != task and some:
            route = {k: reference.route_of(state, k, settings)}
            rows.append(flat(reference.whole_gradient(state, some, route)[1]))
            state["old"] += some
    if rows:
        rows, g = np.stack(rows), flat(slopes)
        if (rows @ g < 0).any():
            g = g + rows.T @ combination(rows, g, settings["margin"], settings["ridge"])
            state.setdefault("projected", []).append(len(rows))
        slopes = np.split(g, np.cumsum([slope.size for slope in slopes])[:-1])
        slopes = [one.reshape(p.shape) for one, p in zip(slopes, reference.parameters(state), strict=True)]
    reference.step(state, slopes, settings["lr"], settings["router_lr"])
    return loss


def flat(arrays):
    return np.concatenate([array.ravel() for array in arrays])


def cotrained(state, batch, noise, settings):
    """One minibatch of co-training around it."""
    loss, task = update(state, batch, noise, settings), int(batch["task"])
    for layer, gates in enumerate(reference.route_of(state, task, settings)):
        for e in range(len(state["experts"][layer])):
            state["used"][layer][task, e] = e in gates
    reference.cotrain(state, reference.examples_of(batch) + state["old"], task, settings)
    return loss


def noise_of(noise):
    drawn = None if noise.examples is None else np.asarray(noise.examples)
    return {"current": reference_noise(noise.current), "examples": drawn}


def made(network, memory_batch, by_class, margin):
    memory = ring(SPEC, 18, 0, by_class=by_class)
    method = gem(network, memory, memory_batch=memory_batch, margin=margin, lr=0.3, router_lr=1.5)
    return method, {**SETTINGS, "places": memory.places, "by_class": by_class, "margin": margin, "ridge": 1e-3}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    ("memory_batch", "by_class", "margin"), [(None, False, 0.0), (None, True, 0.5), (3, False, 0.05), (4, True, 0.0)]
)
def test_every_step_agrees(network, memory_batch, by_class, margin):
    method, settings = made(NETWORKS[network], memory_batch, by_class, margin)

    def also(state, expected):
        return compared(state.memory, rings_of(expected, settings))

    end = agree(method, update, settings, also=also, noise_of=noise_of)
    assert {1, 2} <= set(end["projected"])
    assert len(end["projected"]) > 5


@pytest.mark.parametrize("network", NETWORKS)
def test_every_step_agrees_under_cotraining(network):
    method, settings = made(NETWORKS[network], 3, False, 0.05)
    assert len(agree(cotraining(method, lr=0.15), cotrained, settings, noise_of=noise_of)["projected"]) > 5
