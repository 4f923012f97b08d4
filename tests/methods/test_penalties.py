"""Limits of EWC and SI, to the bit: without strength, they are fine-tuning."""

import functools

import jax
import numpy as np
import pytest
from conftest import NETWORKS, OPTIONS, STREAM, distance, identical, run

from cotrain.engine import learn
from cotrain.errors import Invalid
from cotrain.methods.cotraining import cotraining
from cotrain.methods.ewc import ewc
from cotrain.methods.finetune import finetune
from cotrain.methods.si import si

METHODS = {
    "ewc": functools.partial(ewc, fisher_examples=10),
    "online ewc": functools.partial(ewc, decay=0.9, fisher_examples=10),
    "si": si,
}
CASES = {
    "shared bottom": ("shared_bottom", lambda method: method),
    "routing network": ("routing_network", lambda method: method),
    "routing network, co-trained": ("routing_network", cotraining),
    "by input": ("by_input", lambda method: method),
}


@functools.cache
def learned(case, method=None, strength=0.0):
    """Where a run ends; without a method, of fine-tuning."""
    name, wrapped = CASES[case]
    network = NETWORKS[name](STREAM.spec)
    inner = finetune(network, lr=0.2) if method is None else METHODS[method](network, lr=0.2, strength=strength)
    return run(learn(wrapped(inner), [STREAM], [0], **OPTIONS))


@pytest.mark.parametrize(
    ("method", "case"), [("online ewc", "shared bottom"), *((name, case) for name in ("ewc", "si") for case in CASES)]
)
def test_without_strength_it_is_finetuning(method, case):
    plain, free, held = learned(case), learned(case, method), learned(case, method, strength=1.0)
    assert identical(free.state.learner, plain.state.learner)
    np.testing.assert_array_equal(free.accuracy, plain.accuracy)
    assert distance(held.state.learner, plain.state.learner) > 1e-3


@pytest.mark.parametrize("method", ["ewc", "si"])
def test_seeds_at_once_are_seeds_alone(method):
    made = METHODS[method](NETWORKS["routing_network"](STREAM.spec), lr=0.2, strength=1.0)
    both = run(learn(made, [STREAM, STREAM], [0, 1], **OPTIONS))
    for i in (0, 1):
        alone = run(learn(made, [STREAM], [i], **OPTIONS))
        assert distance(jax.tree.map(lambda a, i=i: a[i], both.state), jax.tree.map(lambda a: a[0], alone.state)) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_it_learns_one_task_after_another(method):
    made = METHODS[method](NETWORKS["shared_bottom"](STREAM.spec))
    with pytest.raises(Invalid, match=r"^stream: 'joint' is not valid; .* one task after another"):
        run(learn(made, [STREAM.shuffled()], [0], **OPTIONS))
