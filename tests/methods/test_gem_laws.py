"""A-GEM and GEM: limits in which they are simpler methods, and what a changed step keeps to."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import NETWORKS, STREAM, distance, filled, first_batch, identical, leaves, make, run

from cotrain.data.stream import Spec
from cotrain.engine import learn
from cotrain.errors import Invalid
from cotrain.experiments.learner import Learner
from cotrain.growth import grown as grow
from cotrain.growth import resized
from cotrain.memory import reservoir, ring
from cotrain.methods.agem import AgemOptions, AgemState, agem
from cotrain.methods.agem import Noise as AgemNoise
from cotrain.methods.descent import slope
from cotrain.methods.finetune import finetune
from cotrain.methods.gem import GemOptions, GemState, gem
from cotrain.methods.gem import Noise as GemNoise
from cotrain.networks.experts import dense
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom
from cotrain.steps import keys_of

SPEC, KEY, SIZE = STREAM.spec, jax.random.key(0), 5
ALL = {
    "shared_bottom": shared_bottom(SPEC, (8, 6)),
    "one_head": shared_bottom(SPEC, (8,), one_head=True),
    "routing_network": routing_network(SPEC, dense(4, jnp.tanh), experts=6, k=2),
}
every_network = pytest.mark.parametrize("name", ALL)


def draws(network, seed=1):
    """The bits of a step: for routes, and for examples."""
    bits = jax.random.bits(jax.random.key(seed), (SPEC.tasks, SIZE, 2), jnp.uint32)
    return network.draw(jax.random.key(seed + 1), 1), bits


def stored(memory, *batches):
    """A memory with some batches in it."""
    held = memory.init(SPEC)
    for batch in batches:
        held = memory.add(held, batch, memory.draw(KEY, len(batch.y)))
    return held


def stepped(method, learner, memory, batch, seed=1):
    """The state after a minibatch, and its scalars; `seed` draws the same routes and examples for each method."""
    current, bits = draws(method.network, seed)
    if isinstance(memory, tuple) and hasattr(method, "margin"):
        state, noise = GemState(learner, memory), GemNoise(current, method.memory.draw(KEY, 6), bits)
    else:
        state, noise = AgemState(learner, memory), AgemNoise(current, bits[0])
    return eqx.filter_jit(method.update)(state, batch, noise)


def tuned(network, learner, batch, seed=1, **options):
    """What fine-tuning makes of the same minibatch."""
    method = finetune(network, lr=0.1, **options)
    start = method.init(KEY)._replace(learner=learner)
    return eqx.filter_jit(method.update)(start, batch, draws(network, seed)[0])[0].learner


def learner_of(network):
    return filled(finetune(network).init, KEY).learner


def methods(network, **options):
    """A-GEM and GEM on rings of five examples, of which both take five."""
    return [
        agem(network, ring(SPEC, 15, SIZE), lr=0.1, **options),
        gem(network, ring(SPEC, 15, 0), memory_batch=SIZE, margin=0.0, ridge=0.0, lr=0.1, **options),
    ]


@pytest.mark.parametrize("which", [0, 1], ids=["a-gem", "gem"])
@every_network
def test_with_an_empty_memory_it_is_finetuning_to_the_bit(name, which):
    network, batch = ALL[name], first_batch(STREAM, 1)
    method, learner = methods(network)[which], learner_of(ALL[name])
    for memory in (method.memory.init(SPEC), stored(method.memory, first_batch(STREAM, 1, 7))):  # but for the current
        after, info = stepped(method, learner, memory, batch)
        assert info.scalars["projected"] == 0
        assert identical(after.learner, tuned(network, learner, batch))


@pytest.mark.parametrize("which", [0, 1], ids=["a-gem", "gem"])
def test_a_whole_first_task_is_finetuning_to_the_bit(which):
    """As it runs in the engine, where nothing is drawn for routes."""
    network = NETWORKS["shared_bottom"](SPEC)
    options = {"batch": 6, "epochs": 2, "chunk": 16}
    ends = []
    for method in (methods(network)[which], finetune(network, lr=0.1)):
        evaluated = (s.kept() for s in learn(method, [STREAM], [0], **options) if s.event == "evaluated")
        ends.append(next(evaluated).state.learner)
    assert identical(*ends)


@pytest.mark.parametrize("which", [0, 1], ids=["a-gem", "gem"])
def test_where_nothing_is_violated_it_is_finetuning(which):
    """The earlier task has the same examples, and with one head nothing tells them apart."""
    network, batch = ALL["one_head"], first_batch(STREAM, 1)
    method, learner = methods(network)[which], learner_of(network)
    memory = stored(method.memory, batch._replace(task=jnp.array(0)))
    after, info = stepped(method, learner, memory, batch)
    assert info.scalars["projected"] == 0
    assert identical(after.learner, tuned(network, learner, batch))
    other = batch._replace(task=jnp.array(0), y=(batch.y + 1) % SPEC.classes)  # opposed
    after, info = stepped(method, learner, stored(method.memory, other), batch)
    assert info.scalars["projected"] == 1
    assert distance(after.learner, tuned(network, learner, batch)) > 1e-4


def conflict(network):
    """An earlier task, and a batch of another whose step would raise its loss."""
    batch, old = first_batch(STREAM, 1), first_batch(STREAM, 0)
    for seed in range(20):
        learner = filled(finetune(network).init, KEY, seed=seed).learner
        old = old._replace(y=(old.y + 1) % SPEC.classes)
        g, g_ref = gradient_of(network, learner, batch, draws(network)[0]), gradient_of(network, learner, old)
        if g @ g_ref < -1e-2:
            return learner, batch, old
    raise AssertionError("no conflict")


def gradient_of(network, learner, batch, noise=None):
    noise = (None,) * len(network.layers) if noise is None else noise
    path = network.sample(learner.parameters, batch.task, batch.weight, noise, whole=True)
    return flat(slope(network, learner.parameters, batch, path).gradient)


def flat(tree):
    return np.concatenate([leaf.ravel().astype(float) for leaf in leaves(tree)])


@every_network
def test_with_one_earlier_task_gem_is_agem(name):
    network = ALL[name]
    learner, batch, old = conflict(network)
    ends = []
    for method in methods(network):
        after, info = stepped(method, learner, stored(method.memory, old), batch)
        assert info.scalars["projected"] == 1
        ends.append(after.learner)
    assert distance(*ends) < 1e-6
    assert distance(ends[0], tuned(network, learner, batch)) > 1e-4


@every_network
def test_a_changed_step_does_not_raise_the_earlier_loss_and_is_the_nearest_such(name):
    network = ALL[name]
    learner, batch, old = conflict(network)
    method = gem(network, ring(SPEC, 18, 0), margin=0.0, ridge=0.0, lr=0.1)  # on all six
    state = GemState(learner, stored(method.memory, old))
    noise = GemNoise(draws(network)[0], jnp.zeros((0, 2), jnp.uint32), None)
    after, _ = eqx.filter_jit(method.update)(state, batch, noise)
    g, g_k = gradient_of(network, learner, batch, draws(network)[0]), gradient_of(network, learner, old)
    taken = (flat(learner.parameters) - flat(after.learner.parameters)) / 0.1
    assert abs(taken @ g_k) < 1e-5 * np.linalg.norm(g) * np.linalg.norm(g_k)
    np.testing.assert_allclose(taken, g - (g @ g_k) / (g_k @ g_k) * g_k, atol=1e-5)


def test_the_margin_is_the_least_share_of_each_earlier_gradient():
    network = ALL["shared_bottom"]
    learner, batch, old = conflict(network)
    third = first_batch(STREAM, 2)
    method = gem(network, ring(SPEC, 18, 0), margin=0.7, lr=0.1)
    state = GemState(learner, stored(method.memory, old, third))
    noise = GemNoise(draws(network)[0], jnp.zeros((0, 2), jnp.uint32), None)
    after, _ = eqx.filter_jit(method.update)(state, batch, noise)
    g, *rows = (gradient_of(network, learner, some) for some in (batch, old, third))
    taken = (flat(learner.parameters) - flat(after.learner.parameters)) / 0.1
    v = np.linalg.lstsq(np.stack(rows).T, taken - g, rcond=None)[0]
    assert v.min() > 0.7 - 1e-4
    np.testing.assert_allclose(np.stack(rows).T @ v, taken - g, atol=1e-5)


@pytest.mark.parametrize("which", [0, 1], ids=["a-gem", "gem"])
def test_a_reference_without_a_gradient_is_none(which):
    """All that is remembered is so surely right that its gradient is 0."""
    network = ALL["shared_bottom"]
    method, learner = methods(network)[which], learner_of(network)
    bias = learner.parameters.heads.bias.at[0].set(jnp.array([1e4, 0.0, 0.0]))
    learner = eqx.tree_at(lambda learner: learner.parameters.heads.bias, learner, bias)
    old = first_batch(STREAM, 0)
    old = old._replace(y=jnp.zeros_like(old.y))
    batch = first_batch(STREAM, 1)
    after, info = stepped(method, learner, stored(method.memory, old), batch)
    assert info.scalars["projected"] == 0
    assert identical(after.learner, tuned(network, learner, batch))


def test_of_a_reservoir_the_current_task_does_not_count():
    network, batch = ALL["shared_bottom"], first_batch(STREAM, 1)
    method, learner = agem(network, reservoir(10, SIZE), lr=0.1), learner_of(ALL["shared_bottom"])
    memory = stored(method.memory, batch)
    noise = AgemNoise(draws(network)[0], method.memory.draw(KEY, 6))
    after, info = eqx.filter_jit(method.update)(AgemState(learner, memory), batch, noise)
    assert info.replayed.weight.tolist() == [0] * SIZE
    assert identical(after.learner, tuned(network, learner, batch))


@pytest.mark.parametrize("optimizer", [lambda lr: optax.sgd(lr, momentum=0.9), optax.adam], ids=["momentum", "adam"])
def test_with_any_optimizer_the_first_step_on_a_shared_bottom_is_finetunings(optimizer):
    network, batch = ALL["one_head"], first_batch(STREAM, 1)
    learner = finetune(network, optimizer=optimizer).init(KEY).learner
    for method in methods(network, optimizer=optimizer):
        after, _ = stepped(method, learner, method.memory.init(SPEC), batch)
        assert distance(after.learner, tuned(network, learner, batch, optimizer=optimizer)) < 1e-7


@pytest.mark.parametrize("case", [("a_gem", "shared_bottom"), ("gem", "shared_bottom"), ("gem", "routing_network")])
def test_seeds_at_once_agree_with_one_at_a_time(case):
    options = {"batch": 6, "epochs": 1, "chunk": 16}
    together = run(learn(make(case), [STREAM] * 2, [0, 1], **options))
    for seed in (0, 1):
        alone = run(learn(make(case), [STREAM], [seed], **options))
        one = jax.tree.map(lambda a, i=seed: a[i : i + 1], together.state.learner)
        assert distance(one, alone.state.learner) < 1e-4


def test_all_tasks_together_are_refused():
    for method in methods(ALL["shared_bottom"]):
        with pytest.raises(Invalid, match=r"stream: 'joint'"):
            run(learn(method, [STREAM.shuffled()], [0], batch=6))


def test_the_memory_is_shared_evenly():
    network = ALL["shared_bottom"]
    assert AgemOptions()(network).memory == ring(SPEC, 5000, 256, by_class=True)
    assert AgemOptions()(network).memory.places == 5000 // 9
    assert GemOptions()(network).memory.places == 5120 // 3
    for options in (AgemOptions(memory=8), GemOptions(memory=2)):
        with pytest.raises(Invalid, match=r"^memory: \d is not valid; give at least [93], one for each"):
            options(network)
    for wrong in ({"memory": 0}, {"memory_batch": 0}, {"margin": -1.0}, {"ridge": float("nan")}):
        with pytest.raises(Invalid, match=f"^{next(iter(wrong))}: "):
            GemOptions(**wrong)


def fed(method, tasks, first=None):
    """A learner that has had some minibatches of each task; it has room for more tasks after the first, if told."""
    learner = Learner(method, batch=6)
    for task in range(tasks):
        if task == 1 and first is not None:
            learner.add_tasks(first)
        x, y = STREAM[task].train.take(np.arange(18))
        learner.observe(x, y, task)
        learner.finish(task)
    return learner


@pytest.mark.parametrize("which", [0, 1], ids=["a-gem", "gem"])
def test_more_tasks_can_follow(which):
    """And a learner with rings can be kept."""
    network = ALL["shared_bottom"]
    larger, smaller = methods(network)[which], methods(network)[which]
    smaller = resized(smaller, Spec(SPEC.shape, SPEC.classes, 1))
    whole, grown = fed(larger, 3), fed(smaller, 3, first=2)
    assert jax.tree.map(jnp.shape, whole.state) == jax.tree.map(jnp.shape, grown.state)
    assert identical(whole.state.memory, grown.state.memory)
    assert distance(whole.state.learner, grown.state.learner) < 1e-5
    again = pickle.loads(pickle.dumps(grown))
    assert identical(again.state, grown.state)
    assert again.method.memory == grown.method.memory


def test_a_memory_of_the_same_size_for_more_tasks_is_refused():
    """Since each task has fewer places then."""
    two, three = (SPEC._replace(tasks=tasks) for tasks in (2, 3))
    methods = [agem(shared_bottom(spec, (8,)), ring(spec, 12, SIZE)) for spec in (two, three)]
    state = jax.vmap(methods[0].init)(keys_of([0]))
    with pytest.raises(Invalid, match=r"it cannot take more tasks: its \.memory\.x"):
        grow(methods[1], keys_of([0]), state)
