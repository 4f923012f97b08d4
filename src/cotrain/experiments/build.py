"""From a configuration to the stream and the method that it names."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax

from cotrain.data.arrays import load_arrays
from cotrain.data.fetch import Dataset, load
from cotrain.data.stream import Spec, Stream, permuted, rotated, share_of, split
from cotrain.errors import Invalid
from cotrain.experiments.config import BENCHMARKS, Config
from cotrain.memory import reservoir
from cotrain.methods.cotraining import cotraining
from cotrain.methods.descent import Optimizer
from cotrain.methods.finetune import finetune
from cotrain.methods.method import Method
from cotrain.methods.private import private
from cotrain.methods.replay import replay
from cotrain.networks.experts import dense
from cotrain.networks.routing import Network, routing_network, shared_bottom, units_for_budget

CLASSES, SHAPE = 10, (28, 28)  # of MNIST and its drop-ins

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": optax.sgd,
    "momentum": partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
    "adamw": optax.adamw,
}


def _identity(x: jax.Array) -> jax.Array:
    return x


def build_spec(config: Config) -> Spec:
    """The shape of a configuration's tasks, which is known before there is data."""
    tasks, split_up = config.task_count, BENCHMARKS[config.benchmark].stream == "split"
    return Spec(SHAPE, share_of(CLASSES, tasks) if split_up else CLASSES, tasks)


def build_network(config: Config, spec: Spec) -> Network:
    """The network of a configuration, for tasks of a shape."""
    shared = shared_bottom(spec, config.hidden)
    if config.network == "shared-bottom":
        return shared
    options = {
        "layers": config.layers,
        "experts": config.experts,
        "k": config.k,
        "sampling": config.sampling,
        "noise": config.noise,
        "gates": config.gates,
        "noisy_gates": config.noisy_gates,
        "aggregation": config.aggregation,
        "activation": jax.nn.relu if config.activate_after else None,
    }
    units = units_for_budget(shared, spec, **options) if config.units is None else config.units
    expert = dense(units, _identity) if config.activate_after else dense(units)
    return routing_network(spec, expert, **options)


def build_method(config: Config, spec: Spec) -> Method:
    """The method of a configuration, on its network."""
    network, optimizer = build_network(config, spec), OPTIMIZERS[config.optimizer]
    if config.method == "private":
        return private(network, lr=config.lr, optimizer=optimizer)
    if config.method in ("finetune", "joint"):
        return finetune(network, lr=config.lr, router_lr=config.router_lr, optimizer=optimizer)
    memory = reservoir(config.memory, config.memory_batch)
    rates = {"lr": config.lr, "router_lr": config.router_lr, "memory_lr": config.memory_lr}
    if config.method == "replay":
        return replay(network, memory, **rates, optimizer=optimizer)
    return cotraining(
        network,
        memory,
        **rates,
        cotraining_lr=config.cotraining_lr,
        cotrain_heads=config.cotrain_heads,
        optimizer=optimizer,
    )


def build(
    config: Config, data_dir: Path | None = None, report: Callable[[str], None] | None = None
) -> tuple[Method, Callable[[int], Stream]]:
    """The method of a configuration, and its stream as a function of the seed."""
    config.check()
    if config.arrays is not None:
        stream = load_arrays(config.arrays)
        stream = stream.shuffled() if config.method == "joint" else stream
        return build_method(config, stream.spec), lambda seed: stream
    method = build_method(config, build_spec(config))  # before anything is fetched: most mistakes show here
    dataset = load(BENCHMARKS[config.benchmark].dataset, data_dir, report)
    return method, lambda seed: build_stream(config, dataset, seed)


def build_stream(config: Config, dataset: Dataset, seed: int) -> Stream:
    """The stream of a configuration, for a run's seed."""
    if config.validation is not None:
        dataset = _held_out(dataset, config.validation)
    sizes = {"examples": config.examples, "test_examples": config.test_examples}
    seed = seed if config.stream_seed is None else config.stream_seed
    kind = BENCHMARKS[config.benchmark].stream
    if kind == "split":
        stream = split(dataset, config.task_count, **sizes, seed=seed)
    elif kind == "permuted":
        stream = permuted(dataset, config.task_count, **sizes, permute_first=config.permute_first, seed=seed)
    else:
        stream = rotated(dataset, config.task_count, step=config.rotation_step, **sizes, seed=seed)
    return stream.shuffled() if config.method == "joint" else stream


def _held_out(dataset: Dataset, count: int) -> Dataset:
    """The data set with its last training images in the place of the test images."""
    size = len(dataset.train_x)
    if count >= size:
        raise Invalid("validation", count, f"choose fewer than the {size} training images")
    (train_x, test_x), (train_y, test_y) = (np.split(a, [size - count]) for a in (dataset.train_x, dataset.train_y))
    return dataset._replace(train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
