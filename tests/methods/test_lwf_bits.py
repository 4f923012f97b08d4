"""Learning without forgetting in single precision, as it runs: what agrees to the bit, and what it is for."""

import numpy as np
import pytest
from conftest import OPTIONS, STREAM, identical, run, toy

import cotrain
from cotrain.engine import learn
from cotrain.experiments.saved import encode
from cotrain.methods.finetune import finetune
from cotrain.methods.lwf import lwf
from cotrain.networks.experts import dense
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom


def bottom(spec):
    return shared_bottom(spec, (12,))


def routing(spec):
    return routing_network(spec, dense(12), layers=1, experts=4, k=2)


every_network = pytest.mark.parametrize("network", [bottom, routing])


def learned(method, stream=STREAM):
    return run(learn(method, [stream], [0], **OPTIONS)).state


def test_with_strength_zero_it_is_finetuning():
    state = learned(lwf(bottom(STREAM.spec), strength=0.0, lr=0.2))
    assert identical(state.learner, learned(finetune(bottom(STREAM.spec), lr=0.2)).learner)
    np.testing.assert_array_equal(state.ended[0], [True] * 3)


def test_the_first_task_is_finetuned():
    stream = toy(tasks=1)
    one, other = (learned(make(bottom(stream.spec), lr=0.2), stream).learner for make in (lwf, finetune))
    assert identical(one, other)


@every_network
def test_a_learner_with_more_tasks_goes_on_as_one_that_had_them_from_the_start(network):
    wide = STREAM.spec._replace(tasks=5)
    learners = [cotrain.Learner(lwf(network(spec), lr=0.2), batch=6) for spec in (STREAM.spec, wide)]
    for task in range(5):
        for learner in learners:
            if task == 3 and learner.tasks == 3:
                learner.add_tasks(2)
            x, y = STREAM[task % 3].train.take(np.arange(40))
            learner.observe(x, y, task)
            learner.finish(task)
    assert encode(learners[0]) == encode(learners[1])


@every_network
def test_it_forgets_less_than_finetuning(network):
    """On tasks that share their inputs, and differ in their labels."""
    first = toy(tasks=1, seed=3)[0]
    x, y = first.train.take(np.arange(40))
    tests = first.test.take(np.arange(30))
    stream = cotrain.Stream.from_arrays([(x, (y + t) % 3, tests[0], (tests[1] + t) % 3) for t in range(3)], classes=3)
    kept, forgotten = (
        run(learn(make(network(stream.spec), lr=0.2), [stream], [0], **OPTIONS)).accuracy[0, -1]
        for make in (lwf, finetune)
    )
    assert kept.min() > 0.95
    assert kept.mean() >= forgotten.mean()
