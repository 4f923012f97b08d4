"""OGD agrees with a plain NumPy version, and its steps are orthogonal to what is stored, in double precision."""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from agreement import NOISE, SPEC, agree, double_precision, examples_for, minibatches, reference_state
from jax.flatten_util import ravel_pytree

from cotrain.methods.cotraining import cotraining
from cotrain.methods.ogd import REMAINDER, ogd
from cotrain.networks.experts import dense
from cotrain.networks.routers.by_input import by_input
from cotrain.networks.routers.fixed import fixed
from cotrain.networks.routers.sampling import gaussian
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

_double_precision = double_precision

BASIS = 4


def routed(router, **options):
    return routing_network(SPEC, dense(5), layers=2, experts=6, k=2, router=router, **options)


NETWORKS = {
    "shared bottom": lambda: shared_bottom(SPEC, hidden=(7, 5)),
    "routing network": lambda: routed(task_matrix(gaussian(NOISE))),
}
MORE_NETWORKS = NETWORKS | {
    "shared bottom, one head": lambda: shared_bottom(SPEC, hidden=(7, 5), one_head=True),
    "routing network, one head": lambda: routed(task_matrix(gaussian(NOISE)), one_head=True),
    "fixed": lambda: routed(fixed()),
    "by input": lambda: routed(by_input(balance=0.1), one_head=True),
}
RATES = {"lr": 0.3, "router_lr": 1.5}
SETTINGS = {**RATES, "noise": NOISE, "k": (2, 2), "cotrain_heads": False, "cotraining_lr": 0.15}


def flat(arrays):
    return np.concatenate([np.ravel(array) for array in arrays])


def split(state, vector):
    """A vector as arrays of the shapes of the parameters."""
    arrays = reference.parameters(state)
    ends = np.cumsum([array.size for array in arrays])
    return [part.reshape(a.shape) for part, a in zip(np.split(vector, ends[:-1]), arrays, strict=True)]


def root_rates(state, settings):
    """The square root of each parameter's learning rate.

    Divided by it, the parameters would all have the rate 1. Of those this is plain OGD: gradients times the root.
    """
    rates = reference.rates_of(state, settings["lr"], settings["router_lr"])
    return flat([np.full(a.shape, rate) for a, rate in zip(reference.parameters(state), rates, strict=True)]) ** 0.5


def update(state, batch, noise, settings):
    """A minibatch of OGD."""
    examples, routes = reference.examples_of(batch), reference.sampled(state, batch, noise, settings)
    loss, slopes = reference.whole_gradient(state, examples, routes)
    root = root_rates(state, settings)
    g = root * flat(slopes)
    for v in state.get("basis", {}).values():
        g = g - (g @ v) * v
    reference.step(state, split(state, g / root), settings["lr"], settings["router_lr"])
    return loss


def consolidate(state, batch, key, settings):
    """The gradients of the true classes' logits, orthonormal: by the QR decomposition of all that are stored."""
    basis, root = state.setdefault("basis", {}), root_rates(state, settings)
    task = int(batch["task"])
    for i, (x, y, weight) in enumerate(zip(batch["x"], batch["y"], batch["weight"], strict=True)):
        if weight == 0:
            continue
        route = reference.route_of(state, task, settings)
        logit = [lambda logits, example: (logits[example.y], np.eye(len(logits))[example.y])]
        u = root * flat(reference.whole_gradient(state, [reference.Example(x, y, task)], {task: route}, logit)[1])
        q = np.linalg.qr(np.stack([*basis.values(), u], axis=1))[0][:, -1]
        left = q @ u
        if abs(left) > REMAINDER * np.linalg.norm(u):
            basis[task, i] = np.sign(left) * q


def stored(state, expected, settings):
    """Pairs of what both store, a vector after another; and zeros elsewhere."""
    state = getattr(state, "inner", state)
    root = root_rates(expected, settings)
    for task in range(SPEC.tasks):
        for i in range(BASIS):
            one = jax.tree.map(lambda a, task=task, i=i: a[task, i], state.basis)
            found = reference.parameters(reference_state(SimpleNamespace(learner=SimpleNamespace(parameters=one))))
            yield root * flat(found), expected.get("basis", {}).get((task, i), np.zeros(len(root)))


def cotrained(state, batch, noise, settings):
    """A minibatch of OGD, then a step of the unused experts on it."""
    loss, task = update(state, batch, noise, settings), int(batch["task"])
    for used, chosen in zip(state["used"], reference.route_of(state, task, settings), strict=True):
        used[task] = np.isin(np.arange(used.shape[1]), list(chosen))
    reference.cotrain(state, reference.examples_of(batch), task, settings)
    return loss


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("router_lr", [0.3, 1.5])
def test_every_step_agrees(network, router_lr):
    settings = SETTINGS | {"router_lr": router_lr}
    method = ogd(NETWORKS[network](), basis=BASIS, lr=0.3, router_lr=router_lr)
    end = agree(method, update, settings, consolidate=consolidate, also=lambda *states: stored(*states, settings))
    assert len(end["basis"]) > SPEC.tasks * (BASIS - 2)  # one example of each task is padding


def test_every_step_agrees_under_cotraining():
    method = cotraining(ogd(NETWORKS["routing network"](), basis=BASIS, **RATES), lr=SETTINGS["cotraining_lr"])
    agree(method, cotrained, SETTINGS, consolidate=consolidate, also=lambda *states: stored(*states, SETTINGS))


def gradients(method, state, batch):
    """The gradients of the true classes' logits, a row each."""

    def logit(parameters, x, y):
        return method.network.predict(parameters, batch.task, x[None])[0, y]

    of = jax.vmap(jax.grad(logit), (None, 0, 0))(state.learner.parameters, batch.x, batch.y)
    return jax.vmap(lambda tree: ravel_pytree(tree)[0])(of)


def learned(method):
    """Three tasks; for each, where it ended, and the gradients that it leaves."""
    step, end = eqx.filter_jit(method.update), eqx.filter_jit(method.consolidate)
    state, kept, batches = method.init(jax.random.key(2)), [], minibatches(joint=False)
    for i, batch in enumerate(batches):
        before = state
        state, info = step(state, batch, method.draw(jax.random.key(i), batch))
        yield before, state, info, np.concatenate(kept) if kept else np.zeros((0, 1))
        if i + 1 == len(batches) or batches[i + 1].task != batch.task:
            some = examples_for(method.examples, int(batch.task))
            kept.append(np.asarray(eqx.filter_jit(gradients)(method, state, some))[np.asarray(some.weight) > 0])
            state = end(state, some, jax.random.key(3))


@pytest.mark.parametrize("network", MORE_NETWORKS)
@pytest.mark.parametrize("router_lr", [0.3, 1.5])
def test_a_step_is_orthogonal_to_all_stored_gradients(network, router_lr):
    method = ogd(MORE_NETWORKS[network](), basis=BASIS, lr=0.3, router_lr=router_lr)
    along, least = [], np.inf
    for before, after, info, kept in learned(method):
        step = ravel_pytree(after.learner.parameters)[0] - ravel_pytree(before.learner.parameters)[0]
        if len(kept):
            lengths = np.linalg.norm(kept, axis=1) * np.linalg.norm(step)
            along.append(np.abs(kept @ np.asarray(step)).max(initial=0) / lengths.max())
            least = min(least, float(info.scalars["kept"]))
        else:
            assert info.scalars["kept"] == 1
    assert len(along) > 30
    assert max(along) < 1e-12
    assert least < 0.99  # without the projection, they would not have been


def test_the_basis_is_orthonormal_though_examples_are_alike():
    method = ogd(NETWORKS["routing network"](), basis=8, lr=1.0)
    *_, (_, state, *_) = learned(method)
    batch = examples_for(8, 2)
    near = batch._replace(x=batch.x[:1] + 1e-3 * batch.x, y=jnp.zeros(8, int), weight=jnp.ones(8))
    state = eqx.filter_jit(method.consolidate)(state, near, jax.random.key(0))
    vectors = np.asarray(jax.vmap(jax.vmap(lambda tree: ravel_pytree(tree)[0]))(state.basis)).reshape(24, -1)
    there = np.linalg.norm(vectors, axis=1) > 0
    assert there.reshape(3, 8)[2].any()
    np.testing.assert_allclose(vectors @ vectors.T, np.diag(there.astype(float)), atol=1e-12)
