"""The gradients of several tasks in products, beside the gradients themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import double_precision

from cotrain.data.batch import Batch
from cotrain.data.stream import Spec
from cotrain.methods.agem import whole
from cotrain.methods.descent import Rates, slope
from cotrain.methods.gradients import Products, gradients
from cotrain.networks.experts import convolution, dense, mlp
from cotrain.networks.network import Network
from cotrain.networks.parameters import Parameters
from cotrain.networks.routers.by_input import by_input
from cotrain.networks.routers.fixed import fixed
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

_double_precision = double_precision
SPEC = Spec(shape=(4, 4), classes=3, tasks=4)
NETWORKS = {
    "shared bottom": shared_bottom(SPEC, (6, 5)),
    "one head": shared_bottom(SPEC, (6, 5), one_head=True),
    "routing": routing_network(SPEC, dense(5, jnp.tanh), experts=6, k=2),
    "all experts": routing_network(SPEC, dense(5), experts=2, k=2),
    "concatenated": routing_network(SPEC, dense(5), experts=6, k=2, aggregation="concatenate", activation=jnp.tanh),
    "gates of all": routing_network(SPEC, dense(5), experts=6, k=2, router=task_matrix(gates="all")),
    "a layer of one": routing_network(SPEC, dense(5), experts=[1, 6], k=[1, 2]),
    "fixed": routing_network(SPEC, dense(5), experts=6, k=2, router=fixed()),
    "by input": routing_network(SPEC, dense(5), experts=6, k=2, router=by_input(), one_head=True),
    "deep experts": routing_network(SPEC, mlp((5, 4)), experts=4, k=2),
    "convolutions": routing_network(SPEC, [convolution(2), dense(4)], experts=3, k=2),
    "wide": shared_bottom(SPEC, (30, 2)),
}


def examples(size: int) -> Batch:
    """Some of each task's; the last of some is padding, and the last task has none."""
    draws = np.random.default_rng(0)
    weight = np.ones((4, size))
    weight[1, -1:], weight[3] = 0, 0
    x, y = draws.normal(size=(4, size, *SPEC.shape)), draws.integers(3, size=(4, size))
    return Batch(jnp.asarray(x), jnp.asarray(y, jnp.int32), jnp.arange(4, dtype=jnp.int32), jnp.asarray(weight))


def by_themselves(network: Network, parameters: Parameters, batch: Batch, rates: Rates) -> tuple[list, np.ndarray]:
    """The gradient of each task, and all of them as the rows of a matrix: G."""
    found = []
    for task in range(4):
        one = Batch(*(part[task] for part in batch))
        path = network.best(parameters, one.task, whole=True)
        found.append(slope(network, parameters, one, path, rates=rates).gradient)
    rows = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)]) for gradient in found]
    return found, np.stack(rows)


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 3) for name in NETWORKS), ("wide", 1), ("wide", 40), ("routing", 40)]
)
def test_they_agree(name, size):
    network, batch = NETWORKS[name], examples(size)
    parameters = network.init(jax.random.key(0))
    rates = Rates(*[jnp.array(0.1)] * 3)
    found, rows = by_themselves(network, parameters, batch, rates)

    def all_of_it(parameters, batch):
        tasks = gradients(network, parameters, batch, found[0])
        other = jax.tree.map(lambda g: jnp.cos(jnp.arange(g.size)).reshape(g.shape), found[0])
        weights = jnp.array([0.5, -2.0, 0.0, 3.0])
        return tasks.gram(), tasks.dot(other, whole(parameters)), tasks.weighted(weights, parameters), other

    gram, products, total, other = jax.jit(all_of_it)(parameters, batch)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(other)])
    np.testing.assert_allclose(gram, rows @ rows.T, atol=1e-12)
    np.testing.assert_allclose(products, rows @ flat, atol=1e-12)
    expected = jax.tree.map(lambda *each: 0.5 * each[0] - 2 * each[1] + 3 * each[3], *found)
    assert jax.tree.structure(total) == jax.tree.structure(expected)
    for one, wanted in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, wanted, atol=1e-12)
    assert np.abs(rows[0]).max() > 1e-3
    assert not rows[3].any()


def test_the_quicker_way_is_chosen_by_size():
    """Both ways give the same, and are each taken above."""
    draws = np.random.default_rng(1)
    for size in (1, 40):
        found = Products(*(jnp.asarray(draws.normal(size=shape)) for shape in ((4, size, 2, 6), (4, size, 16))))
        text = jax.jit(Products.gram).lower(found).as_text()
        assert (f"{4 * size}x{4 * size}" in text) == (size == 1)


def test_the_inner_products_with_a_part_are_those_with_all_of_it():
    network, batch = NETWORKS["routing"], examples(3)
    parameters, rates = network.init(jax.random.key(0)), Rates(*[jnp.array(0.1)] * 3)
    one = Batch(*(part[0] for part in batch))
    path, every = (network.best(parameters, one.task, whole=whole) for whole in (False, True))
    part = slope(network, parameters, one, path, rates=rates)
    assert part.part.entries[0].at is not None
    all_of_it = slope(network, parameters, one, every, rates=rates)
    tasks = gradients(network, parameters, batch, part.gradient)
    products = tasks.dot(part.gradient, part.part)
    np.testing.assert_allclose(products, tasks.dot(all_of_it.gradient, all_of_it.part), atol=1e-12)
    assert np.abs(products[:3]).max() > 1e-6
