"""Limits of UCB, and what a step leaves alone, in single precision."""

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import NETWORKS, OPTIONS, STREAM, distance, first_batch, identical, moved, run

from cotrain.engine import learn
from cotrain.methods.finetune import FinetuneState, finetune
from cotrain.methods.ucb import ucb

SURE = {"rho": -80.0, "kl": 0.0}  # a deviation of 10⁻³⁵


def test_without_deviations_it_is_finetuning():
    network = NETWORKS["shared_bottom"](STREAM.spec)
    sure, tuned, unsure = (
        run(learn(method, [STREAM], [0], **OPTIONS))
        for method in (ucb(network, **SURE), finetune(network), ucb(network))
    )
    assert distance(sure.state.learner, tuned.state.learner) < 1e-6
    assert distance(unsure.state.learner, tuned.state.learner) > 1e-3


@pytest.mark.parametrize("name", ["routing_network", "by_input"])
def test_without_deviations_it_is_finetuning_on_the_same_routes(name):
    network = NETWORKS[name](STREAM.spec)
    method, plain = ucb(network, **SURE), finetune(network)
    state = method.init(jax.random.key(0))
    tuned = FinetuneState(state.learner)
    update, tune, end = (eqx.filter_jit(function) for function in (method.update, plain.update, method.consolidate))
    for step in range(12):
        batch, key = first_batch(STREAM, step // 4), jax.random.key(step)
        noise = method.draw(key, batch)
        state = update(state, batch, noise)[0]
        tuned = tune(tuned, batch, noise.routes)[0]
        state = end(state, batch, key) if step % 4 == 3 else state
    assert distance(state.learner, tuned.learner) < 1e-6


@pytest.mark.parametrize("name", ["routing_network", "by_input"])
def test_what_takes_no_part_keeps_its_distribution(name):
    network = NETWORKS[name](STREAM.spec)
    method, batch = ucb(network, samples=2), first_batch(STREAM, 1, size=1)
    state = method.init(jax.random.key(0))
    after = eqx.filter_jit(method.update)(state, batch, method.draw(jax.random.key(1), batch))[0]
    used = []
    for before, new in ((state.learner, after.learner), (state.spread, after.spread)):
        used.append(moved(before.parameters.experts[0], new.parameters.experts[0]))
        if name == "routing_network":
            np.testing.assert_array_equal(moved(before.parameters.heads, new.parameters.heads), [False, True, False])
    np.testing.assert_array_equal(*used)
    assert 2 <= used[0].sum() < len(used[0])
    assert identical(after.factors, state.factors)
