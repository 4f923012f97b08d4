"""Progressive networks agree with equation 1 of Rusu et al. (2016) in NumPy, one example and one column at a time."""

import numpy as np
import pytest
import reference
from agreement import SPEC, agree, double_precision

from cotrain.methods.progressive import progressive
from cotrain.networks.experts import dense
from cotrain.networks.routers.columns import columns
from cotrain.networks.routing_network import routing_network

_double_precision = double_precision
UNITS = 6


def in_columns(experts, layers=2):
    return routing_network(SPEC, dense(UNITS), layers=layers, experts=experts, k=1, router=columns())


def weights(module, size, count):
    """W_i, and U_i^(t:j) for each earlier column j."""
    return [module["weight"][:, j * size : (j + 1) * size] for j in range(1 + count)]


def activations(state, x, task):
    """h_i^(j): each column's input, then the outputs of its layers."""
    signals = [[x.ravel()] for _ in range(task + 1)]
    for i, layer in enumerate(state["experts"]):
        below = [column[-1] for column in signals]
        for t, column in enumerate(signals):
            column.append(np.maximum(before_activation(layer[t], below[: t + 1], lateral=i > 0), 0))
    return signals


def before_activation(module, below, lateral=True):
    """W_i h_{i−1} + Σ_{j<t} U_i^(t:j) h_{i−1}^(j), and the bias."""
    *others, own = below
    others = others if lateral else []
    w, *u = weights(module, len(own), len(others))
    return w @ own + module["bias"] + sum(matrix @ h for matrix, h in zip(u, others, strict=True))


def update(state, batch, noise, settings):
    examples, task = reference.examples_of(batch), int(batch["task"])
    column = [layer[task] for layer in state["experts"]] + [state["heads"][task]]
    slopes = [{name: np.zeros_like(array) for name, array in module.items()} for module in column]
    loss = 0.0
    for example in examples:
        signals = activations(state, example.x, task)
        logits = before_activation(column[-1], [h[-1] for h in signals])
        value, slope = reference.cross_entropy(logits, example, len(examples))
        loss += value
        for i in reversed(range(len(column))):
            own = signals[task][i]
            parts = weights(slopes[i], len(own), task if i else 0)
            for part, h in zip(parts, [own, *(signals[j][i] for j in range(task))], strict=False):
                part += np.outer(slope, h)
            slopes[i]["bias"] += slope
            slope = (weights(column[i], len(own), 0)[0].T @ slope) * (own > 0)
    for module, slope in zip(column, slopes, strict=True):
        reference.move(module, slope, settings["lr"])
    return loss


@pytest.mark.parametrize("experts", [3, 5])
@pytest.mark.parametrize("layers", [1, 2])
def test_every_step_agrees(experts, layers):
    expected = agree(progressive(in_columns(experts, layers), lr=0.3), update, {"lr": 0.3})
    laterals = [matrix for layer in expected["experts"][1:] for matrix in weights(layer[2], UNITS, 2)[1:]]
    laterals += weights(expected["heads"][2], UNITS, 2)[1:]
    assert min(np.abs(matrix).max() for matrix in laterals) > 1e-3
