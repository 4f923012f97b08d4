"""From a configuration to the stream and the method that it names."""

from collections.abc import Callable
from pathlib import Path

from cotrain.data.fetch import Dataset, load
from cotrain.data.stream import Spec, Stream
from cotrain.experiments.config import Config
from cotrain.methods.method import Method


def build(
    config: Config, data_dir: Path | None = None, report: Callable[[str], None] | None = None
) -> tuple[Method, Callable[[int], Stream]]:
    """The method of a configuration, and its stream as a function of the seed."""
    spec = config.benchmark.options.spec
    method = None if spec is None else build_method(config, spec)  # before anything is fetched: most mistakes show here

    def fetched(name: str) -> Dataset:
        return load(name, data_dir, report)

    make = config.benchmark(fetched)
    stream = (lambda seed: make(seed).shuffled()) if config.joint else make
    return method or build_method(config, make(0).spec), stream


def build_method(config: Config, spec: Spec) -> Method:
    """The method of a configuration, on its network, for tasks of a shape."""
    return config.method(config.network(spec))
