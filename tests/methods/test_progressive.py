"""Progressive networks: their limits, that what was learned stays, that laterals are used, what they cost."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import OPTIONS, STREAM, distance, first_batch, identical, moved, run, toy

import cotrain
from cotrain.engine import learn
from cotrain.errors import Invalid
from cotrain.methods.cotraining import cotraining
from cotrain.methods.finetune import finetune
from cotrain.methods.private import private
from cotrain.methods.progressive import progressive
from cotrain.metrics import backward_transfer
from cotrain.networks.experts import convolution, dense, mlp
from cotrain.networks.routers.columns import columns
from cotrain.networks.routing_network import parameter_count, routing_network, units_for_budget
from cotrain.networks.shared_bottom import shared_bottom

SPEC, MNIST = STREAM.spec, cotrain.Spec((28, 28), 10, 20)
UNITS, COLUMNS = 6, 4


def in_columns(spec=SPEC, expert=dense(UNITS), experts=COLUMNS, **options):
    return routing_network(spec, expert, **{"layers": 2, "experts": experts, "k": 1, "router": columns()} | options)


def own_part(parameters):
    """The parameters without lateral connections, as of private experts."""
    first = parameters.experts[0]
    own = [eqx.tree_at(lambda one: one.weight, stack, stack.weight[..., :UNITS]) for stack in stacks(parameters)]
    return [first, *own]


def without_laterals(parameters):
    def cut(stack):
        return eqx.tree_at(lambda one: one.weight, stack, stack.weight.at[..., UNITS:].set(0))

    return eqx.tree_at(stacks, parameters, [cut(stack) for stack in stacks(parameters)])


def stacks(parameters):
    """Those that have lateral connections."""
    return [*parameters.experts[1:], parameters.heads]


def laterals(stack):
    """U^(t:j), by task and earlier column: how large."""
    weight = np.abs(np.asarray(stack.weight))
    return weight.reshape(*weight.shape[:2], COLUMNS, UNITS).max(axis=(1, 3))[:, 1:]


@functools.cache
def after_tasks():
    """What was learned after each task."""
    found = learn(progressive(in_columns(), lr=0.2), [STREAM], [0], **OPTIONS)
    return [snapshot.kept() for snapshot in found if snapshot.event == "evaluated"]


def parameters_of(snapshot):
    return jax.tree.map(lambda a: a[0], snapshot.state.learner.parameters)


@eqx.filter_jit
def update(method, state, batch):
    return method.update(state, batch, method.draw(jax.random.key(0), batch))[0]


@eqx.filter_jit
def predict(network, parameters, task, x):
    return network.predict(parameters, task, x)


# Limits


def test_a_network_of_one_column_is_fine_tuned():
    stream = toy(tasks=1)
    network = routing_network(stream.spec, dense(UNITS), experts=1, k=1)
    tuned, progressed = (run(learn(make(network), [stream], [0], **OPTIONS)) for make in (finetune, progressive))
    assert identical(tuned.state, progressed.state)


def test_the_first_column_is_fine_tuned_whatever_follows():
    stream = toy(tasks=1)
    alone = run(learn(finetune(in_columns(stream.spec, experts=1)), [stream], [0], **OPTIONS))
    among = run(learn(progressive(in_columns(stream.spec)), [stream], [0], **OPTIONS))
    np.testing.assert_array_equal(among.accuracy, alone.accuracy)
    column = jax.tree.map(lambda a: a[:1], own_part(parameters_of(among)))
    assert distance(column, own_part(parameters_of(alone))) < 1e-5


def test_it_begins_as_private_experts():
    method, control = progressive(in_columns()), private(in_columns())
    state, alone = method.init(jax.random.key(0)), control.init(jax.random.key(0))
    assert identical(own_part(state.learner.parameters), own_part(alone.learner.parameters))
    assert identical(without_laterals(state.learner.parameters), state.learner.parameters)


def test_with_laterals_at_zero_it_is_private():
    method, control = progressive(in_columns(), lr=0.2), private(in_columns(), lr=0.2)
    state, alone = method.init(jax.random.key(0)), control.init(jax.random.key(0))
    with_laterals = state
    for task in (0, 0, 1, 1, 2, 2):
        batch = first_batch(STREAM, task)
        state, alone, with_laterals = (
            update(*which, batch) for which in ((method, state), (control, alone), (method, with_laterals))
        )
        state = eqx.tree_at(lambda s: s.learner.parameters, state, without_laterals(state.learner.parameters))
    assert distance(own_part(state.learner.parameters), own_part(alone.learner.parameters)) < 1e-6
    assert distance(own_part(with_laterals.learner.parameters), own_part(alone.learner.parameters)) > 1e-3
    x = first_batch(STREAM, 2).x
    found, wanted = (
        predict(one.network, of.learner.parameters, jnp.array(2), x) for one, of in ((method, state), (control, alone))
    )
    assert distance(found, wanted) < 1e-5


# What stays


def test_what_was_learned_stays_to_the_bit():
    x = jnp.concatenate([first_batch(STREAM, task).x for task in range(SPEC.tasks)])
    network, last = in_columns(), parameters_of(after_tasks()[-1])
    for task, snapshot in enumerate(after_tasks()):
        then = parameters_of(snapshot)
        for old, new in zip((*then.experts, then.heads), (*last.experts, last.heads), strict=True):
            np.testing.assert_array_equal(moved(old, new)[: SPEC.tasks], np.arange(SPEC.tasks) > task)
        for earlier in range(task + 1):
            assert identical(*(predict(network, of, jnp.array(earlier), x) for of in (then, last)))
    accuracy = after_tasks()[-1].accuracy[0]
    assert backward_transfer(accuracy) == 0
    assert np.diagonal(accuracy).min() > 0.9


def test_with_co_training_it_stays_too():
    found = [s.kept() for s in learn(cotraining(progressive(in_columns(), lr=0.2)), [STREAM], [0], **OPTIONS)]
    accuracy = found[-1].accuracy[0]
    assert backward_transfer(accuracy) == 0
    assert not identical(parameters_of(found[-1]), parameters_of(after_tasks()[-1]))


# Lateral connections


def test_a_column_reads_those_before_it_and_no_other():
    for stack in stacks(parameters_of(after_tasks()[-1])):
        found = laterals(stack)
        there = np.tri(*found.shape, -1, dtype=bool)
        assert found[: SPEC.tasks][there[: SPEC.tasks]].min() > 1e-3
        assert (found[~there] == 0).all()


def test_predictions_use_the_columns_before_and_not_those_after():
    network, learned, x = in_columns(), parameters_of(after_tasks()[-1]), first_batch(STREAM, 1).x
    before = [predict(network, learned, jnp.array(task), x) for task in range(SPEC.tasks)]
    for layer in range(2):
        bias = jnp.zeros(COLUMNS).at[1].set(1.0)[:, None]
        changed = eqx.tree_at(lambda p, i=layer: p.experts[i].bias, learned, learned.experts[layer].bias + bias)
        after = [predict(network, changed, jnp.array(task), x) for task in range(SPEC.tasks)]
        assert [distance(*pair) > 1e-3 for pair in zip(before, after, strict=True)] == [False, True, True]
        assert identical(before[0], after[0])
    cut = [predict(network, without_laterals(learned), jnp.array(task), x) for task in range(SPEC.tasks)]
    assert [distance(*pair) > 1e-3 for pair in zip(before, cut, strict=True)] == [False, True, True]


def test_an_expert_gives_the_same_whoever_reads_it():
    """What column 1 gives for its own task is what column 2 reads of it, though its input is not column 2's."""
    network, learned, batch = in_columns(), parameters_of(after_tasks()[-1]), first_batch(STREAM, 2)
    read = [route.beside for route in network.beside(learned, network.best(learned, jnp.array(2)), batch.x).routes]
    first, second = (np.asarray(part).reshape(len(batch.y), COLUMNS - 1, UNITS) for part in read)
    x = np.asarray(batch.x).reshape(len(batch.y), -1)
    below, above = jax.tree.map(np.asarray, learned.experts)
    h = [np.maximum(x @ below.weight[j].T + below.bias[j], 0) for j in range(2)]
    weight = above.weight[1].reshape(UNITS, COLUMNS, UNITS)
    by_hand = np.maximum(h[1] @ weight[:, 0].T + h[0] @ weight[:, 1].T + above.bias[1], 0)
    np.testing.assert_allclose(first[:, 1], h[1], atol=1e-5)
    np.testing.assert_allclose(second[:, 1], by_hand, atol=1e-5)
    assert (first[:, 2] == 0).all()  # its own comes first


def test_routes_show_the_columns_that_a_task_reads():
    for gates in after_tasks()[-1].gates:
        np.testing.assert_array_equal(gates[0, -1], np.tri(SPEC.tasks, COLUMNS))


# What they cost, and what is refused


def test_lateral_connections_count():
    def count(units, experts=20, tasks=20):
        own = experts * (785 * units + (units + 1) * units) + tasks * (units + 1) * 10
        return own + experts * (experts - 1) // 2 * units * units + tasks * (tasks - 1) // 2 * units * 10

    for units in (15, 16):
        assert parameter_count(in_columns(MNIST, dense(units), experts=20)) == count(units)
    budget = parameter_count(shared_bottom(MNIST))
    assert count(15) == 314750 <= budget == 318152 < count(16)
    assert units_for_budget(budget, MNIST, experts=20, k=1, router=columns()) == 15
    options = {"experts": 20, "layers": 3, "k": 1, "router": columns()}
    assert parameter_count(routing_network(MNIST, dense(5), **options)) == count(5) + 20 * 5 * 6 + 190 * 25


def test_a_network_becomes_columns_with_no_more_parameters():
    given = routing_network(MNIST, dense(19))
    made = progressive(given).network
    assert [(layer.experts, layer.k) for layer in made.layers] == [(20, 1)] * 2
    assert made.layers[0].make.units == 14
    assert parameter_count(made) <= parameter_count(given)
    fewer = progressive(routing_network(MNIST._replace(tasks=5), dense(19))).network
    assert fewer.layers[0].make == made.layers[0].make  # so that there may be more tasks later
    assert fewer.resized(MNIST).layers == made.layers
    assert progressive(made).network is made


def test_columns_that_run_out_are_refused():
    with pytest.raises(Invalid, match=r"experts: .*columns take as many in every layer, 3 or more"):
        in_columns(experts=2)
    with pytest.raises(Invalid, match=r"experts: .* 3 or more"):
        progressive(routing_network(SPEC, dense(UNITS), experts=2, k=1))
    learner = cotrain.Learner(progressive(in_columns()))
    learner.add_tasks(1)
    with pytest.raises(Invalid, match=r"experts: .* 5 or more"):
        learner.add_tasks(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 2}, "k: 2 .*choose 1"),
        ({"one_head": True}, "router: 'columns'.*a head of its own"),
        ({"aggregation": "concatenate"}, "router: 'columns'.*side by side anyway"),
        ({"experts": (4, 5)}, "experts: .*as many in every layer"),
    ],
)
def test_what_is_no_column_is_refused(options, message):
    with pytest.raises(Invalid, match=message):
        in_columns(**options)


def test_networks_that_cannot_become_columns_are_refused():
    with pytest.raises(Invalid, match=r"network: 'shared-bottom' .*routing-network"):
        progressive(shared_bottom(SPEC, (12,)))
    with pytest.raises(Invalid, match=r"expert: .*router=columns\(\), k=1"):
        progressive(routing_network(SPEC, mlp((4, 4)), experts=3, k=1))


# Around it


@pytest.mark.parametrize("experts", [[mlp((8, 5)), dense(4)], [convolution(2), dense(8)]], ids=["mlp", "convolution"])
def test_other_experts_can_be_columns(experts):
    stream = toy(shape=(4, 4))
    last = run(learn(progressive(in_columns(stream.spec, experts), lr=0.2), [stream], [0], **OPTIONS))
    assert np.diagonal(last.accuracy[0]).min() > 0.8
    assert backward_transfer(last.accuracy[0]) == 0


def test_a_learner_is_saved_goes_on_and_is_exported(tmp_path):
    learner = cotrain.Learner(progressive(in_columns(), optimizer=optax.adam))
    x, y = STREAM[0].train.take(np.arange(40))
    for task in range(2):
        learner.observe(x, y, task)
        learner.finish(task)
    learner.save(tmp_path / "one")
    again = cotrain.load_learner(tmp_path / "one")
    assert again.network == learner.network
    for one in (learner, again):
        one.observe(x, y, 2)
        one.add_tasks(1)
    assert all((learner.probabilities(x, task) == again.probabilities(x, task)).all() for task in range(4))
    learner.export(tmp_path / "program")
    program = jax.jit(jax.export.deserialize(bytearray((tmp_path / "program").read_bytes())).call)
    np.testing.assert_allclose(program(x, np.int32(2)), learner.probabilities(x, 2), atol=1e-6)


def test_seeds_at_once_agree_with_one_at_a_time():
    method = progressive(in_columns(), lr=0.2)
    together = run(learn(method, [STREAM] * 2, [3, 0], **OPTIONS))
    assert distance(jax.tree.map(lambda a: a[1:], together.state), after_tasks()[-1].state) < 1e-4
