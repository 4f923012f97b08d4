"""What the tests share: a stream that is easy to learn, every method on every network, comparisons of pytrees."""

import os
from pathlib import Path

# Compiling is most of what the tests wait for. What they compile is kept from one to the next, apart from the user's.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cotrain.data.batch import Batch
from cotrain.data.stream import Stream
from cotrain.memory import Ring, reservoir
from cotrain.methods.agem import agem
from cotrain.methods.cotraining import cotraining
from cotrain.methods.der import der, der_plus_plus
from cotrain.methods.ewc import ewc
from cotrain.methods.expert_gate import expert_gate
from cotrain.methods.finetune import finetune
from cotrain.methods.gem import gem
from cotrain.methods.lwf import lwf
from cotrain.methods.mer import mer
from cotrain.methods.ogd import ogd
from cotrain.methods.private import private
from cotrain.methods.progressive import progressive
from cotrain.methods.replay import replay
from cotrain.methods.si import si
from cotrain.methods.ucb import ucb
from cotrain.networks.experts import dense
from cotrain.networks.routers.by_input import by_input
from cotrain.networks.routers.fixed import fixed
from cotrain.networks.routers.sampling import gaussian, gumbel, no_noise, noisy_top_k
from cotrain.networks.routers.task_matrix import task_matrix
from cotrain.networks.routing_network import routing_network
from cotrain.networks.shared_bottom import shared_bottom

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("cotrain", deadline=None, derandomize=True)
hypothesis.settings.load_profile("cotrain")


@pytest.fixture(scope="module", autouse=True)
def _programs_of_a_file():
    """Lets go of compiled programs: a process may have 65,530 mappings of memory, of which each takes some twenty."""
    yield
    jax.clear_caches()


def toy(tasks=3, examples=40, tests=30, shape=(2, 3), classes=3, seed=0) -> Stream:
    """Each task tells apart classes that lie around random points, far from each other."""
    draws = np.random.default_rng(seed)

    def part(centres, size):
        y = np.arange(size) % classes
        return (centres[y] + 0.2 * draws.normal(size=(size, *shape))).astype(np.float32), y

    centres = draws.normal(size=(tasks, classes, *shape))
    return Stream.from_arrays([(*part(task, examples), *part(task, tests)) for task in centres], classes)


def arrays_file(path: Path, examples: int = 40, tests: int = 9) -> str:
    """A file with two tasks, for `--arrays`."""
    draws, parts = np.random.default_rng(0), {}
    for task in range(2):
        for part, size in (("train", examples), ("test", tests)):
            parts[f"{part}_x_{task}"] = draws.normal(size=(size, 6)).astype(np.float32)
            parts[f"{part}_y_{task}"] = np.arange(size) % 3
    np.savez(path, **parts)
    return str(path)


def first_batch(stream: Stream, task: int, size: int = 6) -> Batch:
    """The first examples of a task."""
    x, y = stream[task].train.take(np.arange(size))
    return Batch(jnp.asarray(x), jnp.asarray(y), jnp.array(task, jnp.int32), jnp.ones(size))


def mixed_batch(stream: Stream, tasks: list[int], weight: list[float]) -> Batch:
    """An example of each of these tasks."""
    x, y = zip(*(stream[task].train.take(np.array([i])) for i, task in enumerate(tasks)), strict=True)
    weights = jnp.array(weight, jnp.float32)
    return Batch(jnp.concatenate(x), jnp.concatenate(y), jnp.array(tasks, jnp.int32), weights)


def filled(make, *arguments, seed: int = 0):
    """What a function makes, with every float drawn anew: nothing is compiled for it, and no bias is 0."""
    draws = np.random.default_rng(seed)

    def fill(leaf):
        whole = not jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(np.zeros(leaf.shape) if whole else draws.normal(0, 0.5, leaf.shape), leaf.dtype)

    return jax.tree.map(fill, eqx.filter_eval_shape(make, *arguments))


SAMPLINGS = {"gaussian": gaussian, "noisy-top-k": noisy_top_k, "gumbel": gumbel, "none": lambda noise: no_noise()}


def routed(spec, expert, *, sampling="gaussian", noise=0.05, gates="chosen", noisy_gates=False, **options):
    """A routing network with the paper's router, whose options are given with the others."""
    router = task_matrix(SAMPLINGS[sampling](noise), gates=gates, noisy_gates=noisy_gates)
    return routing_network(spec, expert, router=router, **options)


class Traces(list):
    """What counts traces; equal to itself alone, as befits a static field."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


class Counted(eqx.Module):
    """A method that counts how often its update is traced."""

    method: eqx.Module
    traces: Traces = eqx.field(static=True)

    @property
    def network(self):
        return self.method.network

    @property
    def rates(self):
        return self.method.rates

    @property
    def optimizer(self):
        return self.method.optimizer

    @property
    def examples(self):
        return self.method.examples

    def init(self, key):
        return self.method.init(key)

    def draw(self, key, batch):
        return self.method.draw(key, batch)

    def update(self, state, batch, noise):
        self.traces.append("update")
        return self.method.update(state, batch, noise)

    def consolidate(self, state, batch, key):
        return self.method.consolidate(state, batch, key)


STREAM = toy()
OPTIONS = {"batch": 6, "epochs": 6, "chunk": 16}  # 42 minibatches a task, of which each 7th is not full
NETWORKS = {
    "shared_bottom": lambda spec: shared_bottom(spec, (12,)),
    "routing_network": lambda spec: routing_network(spec, dense(12), layers=1, experts=4, k=2),
}
METHODS = {
    "finetune": lambda network, lr: finetune(network, lr=lr),
    "replay": lambda network, lr: replay(network, reservoir(20, 5), lr=lr),
    "cotraining": lambda network, lr: cotraining(replay(network, reservoir(20, 5), lr=lr)),
    "private": lambda network, lr: private(network, lr=lr),
    "joint": lambda network, lr: finetune(network, lr=lr),
}
CASES = [(method, network) for method in METHODS for network in NETWORKS]
CASES.remove(("private", "shared_bottom"))
# What keeps the contract too, though its numbers are not recorded: a row for each method, and for each router.
MORE_METHODS = {
    "cotrained_finetune": lambda network, lr: cotraining(finetune(network, lr=lr)),
    "ring_replay": lambda network, lr: replay(network, Ring(3, 5, by_class=True), lr=lr),
    "ewc": lambda network, lr: ewc(network, lr=lr, strength=1.0, fisher_examples=10),
    "online_ewc": lambda network, lr: ewc(network, lr=lr, strength=1.0, decay=0.9, fisher_examples=10),
    "si": lambda network, lr: si(network, lr=lr),
    "lwf": lambda network, lr: lwf(network, lr=lr),
    "der": lambda network, lr: der(network, reservoir(20, 5), lr=lr),
    "der_plus_plus": lambda network, lr: der_plus_plus(network, reservoir(20, 5), lr=lr),
    "a_gem": lambda network, lr: agem(network, Ring(3, 8, by_class=True), lr=lr),
    "cotrained_a_gem": lambda network, lr: cotraining(agem(network, Ring(9, 8, by_class=False), lr=lr)),
    "gem": lambda network, lr: gem(network, Ring(9, 0, by_class=False), memory_batch=4, lr=lr),
    "gem_on_all": lambda network, lr: gem(network, Ring(9, 0, by_class=False), lr=lr),
    "ogd": lambda network, lr: ogd(network, basis=4, lr=lr),
    "mer": lambda network, lr: mer(network, reservoir(20, 5), beta=0.3, lr=lr),
    "ucb": lambda network, lr: ucb(network, lr=lr, samples=2),
    "progressive": lambda network, lr: progressive(network, lr=lr),
    "expert_gate": lambda network, lr: expert_gate(network, code=3, gate_lr=lr, lr=lr),
}
ROUTERS = {
    "task_matrix": task_matrix(gumbel(0.1)),
    "fixed": fixed(),
    "by_input": by_input(balance=0.01),
}
METHODS |= MORE_METHODS
NETWORKS |= {
    name: lambda spec, router=router: routing_network(
        spec, dense(12), layers=1, experts=4, k=2, router=router, one_head=not router.by_task
    )
    for name, router in ROUTERS.items()
}
NEED_EXPERTS = {"cotrained_finetune", "cotrained_a_gem", "progressive", "expert_gate"}
MORE_CASES = [
    *((name, "routing_network") for name in MORE_METHODS),
    *((name, "shared_bottom") for name in MORE_METHODS if name not in NEED_EXPERTS),
    *((name, "by_input") for name in ("ewc", "si", "a_gem", "gem", "ucb")),
    *(("cotraining" if router.by_task else "replay", name) for name, router in ROUTERS.items()),
    ("joint", "by_input"),
]
TRACES = {case: Traces() for case in CASES + MORE_CASES}
TRACES |= {("joint", network): TRACES["finetune", network] for network in ("shared_bottom", "routing_network")}  # same


def make(case: tuple[str, str], lr: float = 0.2) -> Counted:
    """A method on a network; one program serves all that differ in `lr` alone."""
    method, network = case
    return Counted(METHODS[method](NETWORKS[network](STREAM.spec), lr), TRACES[case])


def streamed(case: tuple[str, str], stream: Stream = STREAM) -> Stream:
    """The stream that a method learns from."""
    return stream.shuffled() if case[0] == "joint" else stream


def run(iterator):
    """The last of what an iterator yields."""
    *_, last = iterator
    return last


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def identical(one, other) -> bool:
    """Whether two pytrees agree in structure, types and every bit."""
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(leaves(one), leaves(other), strict=True)
    )


def moved(before, after) -> np.ndarray:
    """Which entries of a stack have changed, in whatever bit."""
    old, new = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (before, after))
    return np.array([not identical([a[i] for a in old], [a[i] for a in new]) for i in range(len(old[0]))])


def distance(one, other) -> float:
    """The largest difference between two pytrees of the same structure; NaN if there is one."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = zip(leaves(one), leaves(other), strict=True)
    return float(np.max([0, *(np.max(np.abs(a.astype(float) - b.astype(float)), initial=0) for a, b in pairs)]))
