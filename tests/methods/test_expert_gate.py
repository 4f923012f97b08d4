"""Expert Gate: told the task it is private; its autoencoders by hand; which task inputs are of."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OPTIONS, STREAM, distance, first_batch, identical, moved, run

import cotrain
from cotrain.engine import learn
from cotrain.errors import Invalid
from cotrain.methods.expert_gate import expert_gate
from cotrain.methods.private import private
from cotrain.metrics import backward_transfer
from cotrain.networks.experts import dense
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

SPEC = STREAM.spec
NETWORK = routing_network(SPEC, dense(6), layers=2, experts=4, k=2)
CODE = 3


def gate(network=NETWORK, **options):
    return expert_gate(network, **{"code": CODE, "gate_lr": 0.1} | options)


@functools.cache
def learned(**options):
    return run(learn(gate(**options), [STREAM], [0], **OPTIONS))


@eqx.filter_jit
def update(method, state, batch):
    return method.update(state, batch, method.draw(jax.random.key(0), batch))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# Told the task


@pytest.mark.parametrize("gate_lr", [0.0, 0.5])
def test_with_the_task_given_it_is_private_to_the_bit(gate_lr):
    control = run(learn(private(NETWORK), [STREAM], [0], **OPTIONS))
    found = learned(gate_lr=gate_lr)
    assert identical(found.state.learner, control.state.learner)
    np.testing.assert_array_equal(found.accuracy, control.accuracy)
    assert identical(found.gates, control.gates)
    assert backward_transfer(found.accuracy[0]) == 0


def test_without_a_rate_the_autoencoders_stay():
    start = jax.tree.map(lambda a: a[None], gate().init(jax.random.key(0)))
    assert distance(learned(gate_lr=0.0).state.autoencoders, start.autoencoders) == 0
    assert distance(learned(gate_lr=0.5).state.autoencoders, start.autoencoders) > 0.1


# The autoencoders


def test_a_step_moves_the_tasks_own_autoencoder_alone():
    before, batch = gate().init(jax.random.key(0)), first_batch(STREAM, 1)
    after, info = update(gate(), before, batch)
    for of in ("autoencoders", "moments"):
        np.testing.assert_array_equal(moved(getattr(before, of), getattr(after, of)), [False, True, False])
    np.testing.assert_array_equal(after.seen, [False, True, False])
    assert float(update(gate(), after, batch)[1].scalars["reconstruction"]) < float(info.scalars["reconstruction"])


def test_an_input_is_of_the_task_that_reconstructs_it_best():
    method, state = gate(), jax.tree.map(lambda a: a[0], learned().state)
    x = jnp.concatenate([first_batch(STREAM, task).x for task in range(SPEC.tasks)])
    encoder, decoder = jax.tree.map(np.asarray, state.autoencoders.modules)
    errors = [
        [((sigmoid(v @ np.maximum(w @ one.ravel() + a, 0) + b) - one.ravel()) ** 2).sum() for one in np.asarray(x)]
        for w, a, v, b in zip(encoder.weight, encoder.bias, decoder.weight, decoder.bias, strict=True)
    ]
    np.testing.assert_array_equal(method.infer(state, x), np.argmin(errors, axis=0))
    early = state._replace(seen=jnp.array([True, False, True]))
    wanted = np.argmin([errors[0], np.full(len(x), np.inf), errors[2]], axis=0)
    np.testing.assert_array_equal(method.infer(early, x), wanted)


# Which task


def shades(tasks=3, size=36, seed=0):
    """Tasks whose inputs are bright at places of their own, as images are; labels say which half of those."""
    draws, parts = np.random.default_rng(seed), []
    for _ in range(tasks):
        places = draws.permutation(size)[:12].reshape(2, 6)

        def part(count, places=places):
            y = np.arange(count) % 2
            x = 0.1 * draws.random((count, size))
            for i, label in enumerate(y):
                x[i, places[label]] = 0.7 + 0.3 * draws.random(6)
            return x.astype(np.float32), y

        parts.append((*part(120), *part(60)))
    return cotrain.Stream.from_arrays(parts)


@functools.cache
def learner_of_shades():
    stream = shades()
    network = routing_network(stream.spec, dense(8), experts=3, k=1)
    [result] = cotrain.run(gate(network, code=8, lr=0.2), stream, epochs=4, progress=False)
    return result.learner


def test_tasks_that_look_different_are_told_apart():
    learner = learner_of_shades()
    for task, (_, test) in enumerate(shades()):
        x, y = test.take(np.arange(60))
        found = learner.infer(x)
        assert found.dtype == np.int32
        assert (found == task).mean() > 0.95
        assert learner.evaluate(x, y, task) > 0.95
    assert learner.infer(x[:0]).shape == (0,)


def test_tasks_that_have_not_begun_are_never_inferred():
    learner = cotrain.Learner(gate())
    x, y = STREAM[2].train.take(np.arange(40))
    learner.observe(x, y, 0)
    assert (learner.infer(x) == 0).all()
    learner.observe(x, y, 2)
    learner.add_tasks(1)
    assert set(np.unique(learner.infer(x))) <= {0, 2}


def test_a_saved_learner_infers_the_same(tmp_path):
    learner = learner_of_shades()
    learner.save(tmp_path / "one")
    x = shades()[1].test.take(np.arange(60))[0]
    np.testing.assert_array_equal(cotrain.load_learner(tmp_path / "one").infer(x), learner.infer(x))


def test_what_cannot_tell_tasks_apart_says_so():
    with pytest.raises(Invalid, match=r"method: 'Finetune' .*expert_gate can"):
        cotrain.Learner(private(NETWORK)).infer(np.zeros((1, *SPEC.shape), np.float32))


# Related tasks


def test_a_task_starts_from_the_most_related_expert():
    method, state = gate(related=True, lr=0.0), learned(related=True).state
    state = jax.tree.map(lambda a: a[0], state)._replace(seen=jnp.array([True, True, False]))
    for task, other in ((0, 1), (1, 0)):
        batch = first_batch(STREAM, task)._replace(task=jnp.array(2, jnp.int32))
        near = [
            float(jnp.where(batch.weight > 0, method._errors(state, batch.x), 0).sum(axis=1)[of])
            for of in (task, other)
        ]
        assert near[0] < near[1]  # its own inputs, which come as another task's
        after, _ = update(method, state, batch)
        for old, new in zip(state.learner.parameters.experts, after.learner.parameters.experts, strict=True):
            assert identical(jax.tree.map(lambda a: a[2], new), jax.tree.map(lambda a, of=task: a[of], old))
            assert not moved(old, new)[[0, 1, 3]].any()
        assert identical(after.learner.parameters.heads, state.learner.parameters.heads)
        again, _ = update(method, after, first_batch(STREAM, other)._replace(task=jnp.array(2, jnp.int32)))
        assert identical(again.learner, after.learner)  # it has begun


def test_the_first_task_starts_from_nothing():
    method, plain = gate(related=True), gate()
    state = method.init(jax.random.key(0))
    assert identical(update(method, state, first_batch(STREAM, 1))[0], update(plain, state, first_batch(STREAM, 1))[0])


# What is refused


def test_what_it_cannot_do_is_refused():
    with pytest.raises(Invalid, match="code"):
        gate(code=0)
    with pytest.raises(Invalid, match="network: 'shared-bottom'"):
        expert_gate(shared_bottom(SPEC, (12,)))
    with pytest.raises(Invalid, match="stream: 'joint'"):
        next(learn(gate(), [STREAM.shuffled()], [0], **OPTIONS))
