"""Expert Gate agrees with NumPy: private experts, and autoencoders trained by Adagrad, example by example."""

import jax
import numpy as np
import pytest
import reference
from agreement import NOISE, SPEC, agree, double_precision

from cotrain.methods.cotraining import cotraining
from cotrain.methods.expert_gate import expert_gate
from cotrain.networks.experts import dense
from cotrain.networks.routing_network import routing_network

_double_precision = double_precision

SETTINGS = {"lr": 0.3, "router_lr": 0.0, "gate_lr": 0.2, "k": (1, 1), "noise": NOISE}
SETTINGS |= {"cotraining_lr": 0.15, "cotrain_heads": False}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def arrays(state):
    """Encoder, decoder: weights and biases, and what Adagrad has summed of each."""
    gate = getattr(state, "inner", state)
    return [
        np.array(leaf) for part in (gate.autoencoders, gate.moments) for leaf in jax.tree.leaves(part) if leaf.ndim > 1
    ]


def autoencode(state, batch, settings):
    """A step down the mean of Σ (x̂ − x)²: ReLU for the code, sigmoid for the reconstruction."""
    task, examples = int(batch["task"]), reference.examples_of(batch)
    parameters, sums = ([array[task] for array in half] for half in (state["gate"][:4], state["gate"][4:]))
    w, a, v, b = parameters
    slopes = [np.zeros_like(array) for array in parameters]
    for x in (example.x.ravel() for example in examples):
        code = np.maximum(w @ x + a, 0)
        made = sigmoid(v @ code + b)
        out = 2 * (made - x) * made * (1 - made) / len(examples)
        inner = (v.T @ out) * (code > 0)
        for slope, more in zip(slopes, (np.outer(inner, x), inner, np.outer(out, code), out), strict=True):
            slope += more
    for array, total, slope in zip(parameters, sums, slopes, strict=True):
        total += slope**2
        array -= settings["gate_lr"] * slope / np.sqrt(total + 1e-7)


@pytest.mark.parametrize(
    ("wrap", "wrapped"), [(lambda m: m, None), (lambda m: cotraining(m, lr=0.15), reference.cotrain)]
)
def test_every_step_agrees(wrap, wrapped):
    network = routing_network(SPEC, dense(5), layers=2, experts=4, k=2)
    method = wrap(expert_gate(network, code=3, gate_lr=SETTINGS["gate_lr"], lr=SETTINGS["lr"]))
    start = arrays(method.init(jax.random.key(2)))

    def update(state, batch, noise, settings):
        state.setdefault("gate", start)
        autoencode(state, batch, settings)
        loss = reference.finetune(state, batch, noise, settings)
        if wrapped is not None:
            task = int(batch["task"])
            for used in state["used"]:
                used[task, task] = True
            wrapped(state, reference.examples_of(batch), task, settings)
        return loss

    agree(method, update, SETTINGS, also=lambda state, expected: zip(arrays(state), expected["gate"], strict=True))
