"""Networks: their sizes, their routes and gates, and what an expert can be."""

import math
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from conftest import STREAM, filled, first_batch, identical, routed
from hypothesis import given
from hypothesis import strategies as st

from cotrain.choice import choose
from cotrain.data.stream import Spec
from cotrain.errors import Invalid
from cotrain.memory import reservoir
from cotrain.methods.cotraining import CotrainingState, cotraining
from cotrain.methods.descent import begin
from cotrain.methods.finetune import FinetuneState, finetune
from cotrain.methods.replay import Noise, ReplayState, replay
from cotrain.networks import SAMPLINGS
from cotrain.networks.experts import convolution, dense, mlp
from cotrain.networks.routers.sampling import gaussian, gumbel, noisy_top_k
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import parameter_count, routing_network, units_for_budget
from cotrain.networks.shared_bottom import shared_bottom
from cotrain.networks.unused import buckets
from cotrain.speed.products import LARGE

MNIST = Spec(shape=(28, 28), classes=10, tasks=20)
SPEC = STREAM.spec
KEY = jax.random.key(0)
DRAWS = 20000


def small(**options):
    return routed(SPEC, dense(4), **{"layers": 1, "experts": 5, "k": 2, "noise": 1.0} | options)


# Sizes


def test_parameters_are_counted_as_by_hand():
    shared = 784 * 256 + 256 + 256 * 256 + 256 + 20 * (256 * 10 + 10)
    assert parameter_count(shared_bottom(MNIST)) == shared == 318152
    routed = 20 * (784 * 19 + 19) + 20 * (19 * 19 + 19) + 20 * (19 * 10 + 10) + 2 * 20 * 20
    assert parameter_count(routing_network(MNIST, dense(19))) == routed == 310700


def test_learned_spread_and_concatenation_are_counted():
    assert parameter_count(small(sampling="noisy-top-k")) - parameter_count(small()) == SPEC.tasks * 5
    assert parameter_count(small(aggregation="concatenate")) - parameter_count(small()) == SPEC.tasks * 3 * 4


def test_experts_are_as_large_as_the_budget_allows():
    shared = shared_bottom(MNIST)
    assert units_for_budget(shared, MNIST) == 19
    assert parameter_count(routing_network(MNIST, dense(20))) > parameter_count(shared)


def test_concatenation_leaves_less_for_the_experts():
    def count(units):
        return 20 * 785 * units + 20 * (4 * units + 1) * units + 20 * (4 * units + 1) * 10 + 2 * 20 * 20

    assert count(17) <= 318152 < count(18)
    assert parameter_count(routing_network(MNIST, dense(17), aggregation="concatenate")) == count(17)
    assert units_for_budget(318152, MNIST, aggregation="concatenate") == 17


@pytest.mark.parametrize("slack", [0, -1])
def test_a_budget_is_kept_to_the_last_parameter(slack):
    options = {"layers": 1, "experts": 3, "k": 2}
    budget = parameter_count(routing_network(SPEC, dense(4), **options)) + slack
    assert units_for_budget(budget, SPEC, **options) == 4 + slack


def test_a_budget_can_be_too_small():
    with pytest.raises(Invalid, match=r"^budget: 10 is not valid; experts of one unit take [0-9]+ parameters"):
        units_for_budget(10, SPEC, layers=1, experts=3, k=2)


@pytest.mark.parametrize("aggregation", ["sum", "concatenate"])
def test_layers_fit_onto_each_other(aggregation):
    network = routed(SPEC, [convolution(2), dense(4)], experts=[5, 4], k=[2, 3], aggregation=aggregation, noise=0.1)
    first, second = (2, 3) if aggregation == "concatenate" else (1, 1)
    assert [(layer.experts, layer.k) for layer in network.layers] == [(5, 2), (4, 3)]
    assert [layer.shape for layer in network.layers] == [(2, 3), (1, 2, first * 2)]
    assert network.head.shape == (second * 4,)
    parameters = eqx.filter_eval_shape(network.init, KEY)
    assert [router.logits.shape for router in parameters.router] == [(SPEC.tasks, 5), (SPEC.tasks, 4)]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 10, 20])
@pytest.mark.parametrize("inputs", [9, 700])
@pytest.mark.parametrize("alone", [False, True])
def test_experts_run_together_as_one_by_one(size, inputs, alone):
    experts = eqx.filter_vmap(lambda key: dense(9, alone=alone)((inputs,), key))(jax.random.split(KEY, 8))
    assert (experts.weight.size >= LARGE) == (inputs == 700)
    x, slope = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(size, inputs), (8, size, 9)]))

    def one_by_one(experts, x):
        return eqx.filter_vmap(jax.vmap(lambda expert, x: expert(x), (None, 0)), in_axes=(0, None))(experts, x)

    results = []
    for run in (one_by_one, lambda experts, x: experts.together(x)):
        y, pull = jax.vjp(run, experts, x)
        results.append((y, pull(slope)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *results)


@given(st.data(), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)).map(sorted), min_size=1, max_size=3))
def test_one_bucket_holds_all_unused_experts(data, sizes):
    ks, experts = zip(*sizes, strict=True)
    made = buckets(routing_network(SPEC, dense(4), layers=len(sizes), experts=experts, k=ks))
    unused = [data.draw(st.integers(0, count - k)) for k, count in sizes]
    fitting = [bucket for bucket in made if bucket.fits(jnp.array(unused))]
    assert len(fitting) == (max(unused) > 0)
    for bucket in fitting:
        assert not any(unused[: bucket.first])
        for layer, (k, count) in enumerate(sizes[bucket.first :], bucket.first):
            assert k == count or bucket.size(layer) >= max(unused[layer], k)  # a whole best route, if nothing is unused
    assert len(made) <= 9 * len(sizes)


# Routes and gates


def test_gates_sum_to_one_over_the_chosen_and_to_less_over_all():
    chosen, among_all = small(), small(gates="all")
    parameters = filled(chosen.init, KEY)
    ((logits, gates),) = chosen.matrices(parameters)
    ((_, shares),) = among_all.matrices(parameters)
    np.testing.assert_array_equal(logits, parameters.router[0].logits)
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    best = np.argsort(np.argsort(-logits, axis=1), axis=1) < 2
    np.testing.assert_allclose(shares, best * softmax, rtol=1e-5)
    np.testing.assert_allclose(gates, best * softmax / (best * softmax).sum(axis=1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(gates.sum(axis=1), 1, rtol=1e-6)
    assert (shares.sum(axis=1) < 0.999).all()


@pytest.mark.parametrize(("gates", "aggregation"), [("chosen", "sum"), ("all", "concatenate")])
def test_predictions_by_hand(gates, aggregation):
    network = small(gates=gates, aggregation=aggregation, activation=jnp.tanh)
    parameters, x = filled(network.init, KEY), first_batch(STREAM, 0).x
    weights, biases = (np.asarray(a) for a in (parameters.experts[0].weight, parameters.experts[0].bias))
    for task in range(SPEC.tasks):
        gate = np.asarray(network.matrices(parameters)[0][1][task])
        flat = np.asarray(x).reshape(len(x), -1)
        outputs = [gate[e] * np.maximum(flat @ weights[e].T + biases[e], 0) for e in np.flatnonzero(gate)]
        hidden = np.tanh(sum(outputs) if aggregation == "sum" else np.concatenate(outputs, axis=1))
        expected = hidden @ np.asarray(parameters.heads.weight[task]).T + np.asarray(parameters.heads.bias[task])
        np.testing.assert_allclose(network.predict(parameters, jnp.array(task), x), expected, rtol=0, atol=1e-5)


def test_predictions_know_no_noise():
    x = first_batch(STREAM, 0).x
    calm = small(sampling="none")
    parameters = filled(calm.init, KEY)
    expected = calm.predict(parameters, jnp.array(1), x)
    for options in ({"sampling": "gumbel"}, {"sampling": "gaussian", "noisy_gates": True, "noise": 50.0}):
        np.testing.assert_array_equal(small(**options).predict(parameters, jnp.array(1), x), expected)
    noisy = small(sampling="noisy-top-k")
    spread = eqx.tree_at(lambda p: p.router[0].spread, filled(noisy.init, KEY), jnp.full((SPEC.tasks, 5), 50.0))
    still = eqx.tree_at(lambda p: p.router[0].spread, spread, jnp.zeros((SPEC.tasks, 5)))
    np.testing.assert_array_equal(noisy.predict(spread, jnp.array(1), x), noisy.predict(still, jnp.array(1), x))


def routes(network, parameters, count, seed=1):
    """The experts of the first layer that `count` draws for task 0 choose."""
    return np.asarray(sampled(network, parameters, jax.random.key(seed)))[:count]


@eqx.filter_jit
def sampled(network, parameters, key):
    def members(key):
        return network.sample(parameters, jnp.array(0), jnp.ones(1), network.draw(key, 1)).routes[0].members

    return jax.vmap(members)(jax.random.split(key, DRAWS))


def test_without_sampling_routes_are_the_best():
    network = small(sampling="none")
    parameters = filled(network.init, KEY)
    assert network.draw(KEY, 3) == (None,)
    for task in range(SPEC.tasks):
        path = network.sample(parameters, jnp.array(task), jnp.ones(6), (None,))
        best = np.argsort(-np.asarray(parameters.router[0].logits[task]))[:2]
        assert path.routes[0].members.tolist() == sorted(best)
        assert np.flatnonzero(network.used(parameters, jnp.array(task))[0]).tolist() == sorted(best)


@pytest.mark.parametrize("sampling", ["gaussian", "noisy-top-k", "gumbel"])
def test_routes_are_sampled(sampling):
    network = small(sampling=sampling)
    parameters = filled(network.init, KEY)
    found = routes(network, parameters, 50)
    assert (np.diff(found, axis=1) > 0).all()
    assert len({tuple(route) for route in found.tolist()}) > 3


def test_little_noise_leaves_the_best_routes():
    network = small(sampling="gaussian", noise=1e-6)
    found = routes(network, filled(network.init, KEY), 50)
    assert (found == found[0]).all()


def with_logits(network, logits):
    parameters = filled(network.init, KEY)
    rows = jnp.asarray(np.tile(np.array(logits, np.float32), (SPEC.tasks, 1)))
    return eqx.tree_at(lambda p: p.router[0].logits, parameters, rows)


LOGITS = np.array([0.0, 1.0, -0.5, 0.5, 0.25])


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_gumbel_choices_follow_the_softmax(scale):
    network = small(sampling="gumbel", k=1, noise=scale)
    counts = np.bincount(routes(network, with_logits(network, LOGITS), DRAWS)[:, 0], minlength=5)
    weights = np.exp(LOGITS / scale)
    assert scipy.stats.chisquare(counts, DRAWS * weights / weights.sum()).pvalue > 1e-4
    assert scipy.stats.chisquare(counts, np.full(5, DRAWS / 5)).pvalue < 1e-9


def test_gumbel_pairs_are_drawn_without_replacement():
    network = small(sampling="gumbel", k=2, noise=1.0)
    found = routes(network, with_logits(network, LOGITS), DRAWS)
    share = np.exp(LOGITS) / np.exp(LOGITS).sum()
    pairs = [(i, j) for i in range(5) for j in range(i + 1, 5)]
    counts = [(found == pair).all(axis=1).sum() for pair in pairs]
    expected = [share[i] * share[j] / (1 - share[i]) + share[j] * share[i] / (1 - share[j]) for i, j in pairs]
    assert scipy.stats.chisquare(counts, DRAWS * np.array(expected)).pvalue > 1e-4


@pytest.mark.parametrize("sampling", ["gaussian", "noisy-top-k"])
def test_gaussian_noise_has_the_deviation_asked_for(sampling):
    network = small(sampling=sampling, experts=2, k=1, noise=0.7)
    parameters = with_logits(network, [0.0, 0.4])
    if sampling == "noisy-top-k":  # as it starts
        start = eqx.filter_jit(network.init)(KEY)
        parameters = eqx.tree_at(lambda p: p.router[0].spread, parameters, start.router[0].spread)
    second = int(routes(network, parameters, DRAWS).sum())
    probability = scipy.stats.norm.cdf(0.4 / (0.7 * math.sqrt(2)))
    assert scipy.stats.binomtest(second, DRAWS, probability).pvalue > 1e-4


def test_the_spread_of_noisy_top_k_is_learned():
    network = small(sampling="noisy-top-k")
    method = finetune(network, lr=0.5)
    state = FinetuneState(filled(begin, network, optax.sgd, KEY))
    noise = (jnp.asarray(np.random.default_rng(0).normal(size=(1, 5)), jnp.float32),)
    batch = first_batch(STREAM, 1)
    after, _ = eqx.filter_jit(method.update)(state, batch, noise)
    old, new = (s.learner.parameters.router[0].spread for s in (state, after))
    members = network.sample(state.learner.parameters, batch.task, batch.weight, noise).routes[0].members
    moved = np.abs(np.asarray(new - old)) > 1e-5
    expected = np.zeros((SPEC.tasks, 5), bool)
    expected[1, np.asarray(members)] = True
    np.testing.assert_array_equal(moved, expected)


def test_a_new_router_prefers_no_expert():
    parameters = eqx.filter_jit(routing_network(SPEC, dense(4), layers=2, experts=20, k=4).init)(KEY)
    for router in parameters.router:
        logits = np.asarray(router.logits)
        assert np.abs(logits).max() < 0.01
        assert len({tuple(np.sort(np.argsort(-row)[:4])) for row in logits}) == SPEC.tasks
    assert not identical(parameters.router[0], parameters.router[1])
    stack = np.asarray(parameters.experts[0].weight)
    assert len({expert.tobytes() for expert in stack}) == 20
    limit = math.sqrt(6 / 6)
    assert 0.9 * limit < np.abs(stack).max() <= limit
    assert not np.asarray(parameters.experts[0].bias).any()


def test_reserved_experts_are_one_a_task():
    network = small().reserved()
    ((_, gates),) = network.matrices(eqx.filter_jit(network.init)(KEY))
    np.testing.assert_array_equal(gates, np.eye(SPEC.tasks, 5))


# Experts of any kind


class Scale(eqx.Module):
    """An expert of one's own: it keeps the shape of its input."""

    factor: jax.Array
    name: str = "scale"

    def __call__(self, x):
        return jnp.tanh(self.factor * x)


def scale(shape, key):
    return Scale(jax.random.normal(key, shape))


def multilayer(shape, key):
    return eqx.nn.Sequential([eqx.nn.Lambda(jnp.ravel), eqx.nn.MLP(math.prod(shape), 5, 6, 1, key=key)])


@pytest.mark.parametrize("expert", [mlp((5, 4)), multilayer, scale], ids=["mlp", "equinox", "own"])
def test_experts_of_any_kind_learn(expert):
    network = routed(SPEC, expert, layers=1, experts=3, k=2, sampling="none")
    update = eqx.filter_jit(finetune(network, lr=0.3).update)
    state, first = update(FinetuneState(filled(begin, network, optax.sgd, KEY)), first_batch(STREAM, 0), (None,))
    for _ in range(40):
        state, last = update(state, first_batch(STREAM, 0), (None,))
    assert float(last.loss) < 0.5 * float(first.loss)


def test_layers_of_any_kind_are_cotrained():
    options = {"experts": [4, 3], "k": 2, "sampling": "none", "aggregation": "concatenate"}
    network = routed(SPEC, [convolution(3), dense(4)], **options)
    method = cotraining(replay(network, reservoir(10, 3), lr=0.3))
    batch = first_batch(STREAM, 0)
    nothing = tuple(jnp.zeros((SPEC.tasks, layer.experts), bool) for layer in network.layers)
    inner = ReplayState(filled(begin, network, optax.sgd, KEY), method.inner.memory.init(SPEC))
    start = CotrainingState(inner, nothing)
    bits = [jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (n, 2), np.uint32)) for n in (6, 3)]
    unrouted = (None,) * len(network.layers)
    noise = Noise(unrouted, unrouted, tuple(bits))
    update = eqx.filter_jit(method.update)
    state, first = update(start, batch, noise)
    for _ in range(40):
        state, last = update(state, batch, noise)
    assert float(last.loss) < 0.7 * float(first.loss)
    for before, after in zip(start.learner.parameters.experts, state.learner.parameters.experts, strict=True):
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert np.abs(np.asarray(new - old)).reshape(len(old), -1).max(axis=1).min() > 1e-6, "each expert moves"


# What cannot be a network


def sampling(name, **options):
    return choose("sampling", name, SAMPLINGS, options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small(k=6), "k: 6 is not valid; choose 1 to 5, the number of experts"),
        (lambda: small(k=0), "k: 0 is not valid"),
        (lambda: small(k=1.5), "k: 1.5 is not valid"),
        (lambda: small(experts=0), "experts: 0 is not valid"),
        (lambda: small(layers=0), "layers: 0 is not valid"),
        (lambda: dense(0), "units: 0 is not valid"),
        (lambda: dense(-3), "units: -3 is not valid"),
        (lambda: routing_network(SPEC, mlp((4, 0))), "units: 0 is not valid"),
        (lambda: routing_network(SPEC, mlp(())), "units: () is not valid"),
        (lambda: routing_network(SPEC, convolution(0)), "channels: 0 is not valid"),
        (lambda: shared_bottom(SPEC, (4, 0)), "hidden: 0 is not valid"),
        (lambda: shared_bottom(SPEC, ()), "hidden: () is not valid"),
        (lambda: small(layers=2, experts=[5]), "experts: [5] is not valid; give one, or one for each of the 2 layers"),
        (lambda: small(layers=2, k=(1, 2, 3)), "k: (1, 2, 3) is not valid; give one, or one for each of the 2 layers"),
        (lambda: routing_network(SPEC, [dense(4)]), "expert: "),
        (lambda: small(layers=2, experts=[5, 3], k=[2, 4]), "k: 4 is not valid; choose 1 to 3"),
        (lambda: sampling("gausian"), "sampling: 'gausian' is not valid; did you mean 'gaussian'?"),
        (lambda: sampling("x"), "sampling: 'x' is not valid; choose from gaussian, noisy-top-k, gumbel, none"),
        (lambda: sampling("gaussian", noise=-1.0), "noise: -1.0 is not valid"),
        (lambda: task_matrix("gaussian"), "sampling: 'gaussian' is not valid; give an object"),
        (lambda: small(gates="al"), "gates: 'al' is not valid; did you mean 'all'?"),
        (lambda: small(aggregation="concat"), "aggregation: 'concat' is not valid; did you mean 'concatenate'?"),
        (lambda: gaussian(-1.0), "noise: -1.0 is not valid"),
        (lambda: gumbel(float("nan")), "noise: nan is not valid"),
        (lambda: noisy_top_k(0.0), "noise: 0.0 is not valid"),
    ],
)
def test_what_cannot_be_a_network(make, message):
    with pytest.raises(Invalid) as error:
        make()
    assert str(error.value).startswith(message)


class Shuffled(eqx.Module):
    """A dense layer on inputs in an order of its own, which does not learn."""

    layer: eqx.Module
    order: jax.Array

    def __call__(self, x):
        return self.layer(x.ravel()[self.order])


def test_an_expert_may_hold_arrays_that_do_not_learn():
    def expert(shape, key):
        size = math.prod(shape)
        return Shuffled(dense(4)((size,), key), jnp.arange(size)[::-1])

    network = routing_network(SPEC, expert, layers=1, experts=3, k=2)
    plain = routing_network(SPEC, dense(4), layers=1, experts=3, k=2)
    assert parameter_count(network) == parameter_count(plain)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, *SPEC.shape)), jnp.float32)
    turned = x.reshape(5, -1)[:, ::-1].reshape(x.shape)
    task = jnp.array(0)
    found = network.predict(network.init(KEY), task, x)
    np.testing.assert_allclose(found, plain.predict(plain.init(KEY), task, turned), rtol=1e-5)


def test_an_expert_must_have_something_to_learn():
    def expert(shape, key):
        return Shuffled(eqx.nn.Lambda(jnp.tanh), jnp.arange(math.prod(shape))[::-1])

    with pytest.raises(Invalid, match=r"^expert: .*is not valid; it has nothing to learn"):
        routing_network(SPEC, expert, layers=1, experts=3, k=2)


def test_no_sampling_has_no_noise_to_choose():
    given = {"noise": 0.1}
    assert sampling("none", **given)().draw(KEY, (1, 5)) is None
    assert choose("sampling", "none", SAMPLINGS, given).flat("sampling") == {"sampling": "none"}
    assert given == {"noise": 0.1}
    assert float(choose("sampling", "gumbel", SAMPLINGS, given)().scale) == np.float32(0.1)
    assert given == {}


def test_sizes_and_rates_may_be_numpy_numbers():
    network = routing_network(SPEC, dense(np.int64(4)), experts=np.int64(3), k=np.int32(2))
    method = cotraining(replay(network, reservoir(np.int64(10)), lr=np.float32(0.5)))
    assert float(method.inner.rates.experts) == float(method.cotraining_rates.experts) == 0.5
