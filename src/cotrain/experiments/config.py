"""What a run is, in words and numbers: the configuration, which is also the command line and its help."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from cotrain.errors import Invalid, check_name, check_positive


class Benchmark(NamedTuple):
    """A stream by its name."""

    stream: str
    dataset: str
    tasks: int  # by default


BENCHMARKS = {
    "rotated-mnist": Benchmark("rotated", "mnist", 20),
    "permuted-mnist": Benchmark("permuted", "mnist", 20),
    "split-mnist": Benchmark("split", "mnist", 5),
    "rotated-fashion-mnist": Benchmark("rotated", "fashion-mnist", 20),
    "permuted-fashion-mnist": Benchmark("permuted", "fashion-mnist", 20),
    "split-fashion-mnist": Benchmark("split", "fashion-mnist", 5),
}
METHODS = {
    "finetune": "plain gradient descent; nothing against forgetting",
    "replay": "each minibatch, then one from a reservoir of earlier examples",
    "cotraining": "replay, then a step of the experts that no task uses (the paper's method)",
    "private": "a control: each task has its own expert; no routing, no forgetting",
    "joint": "a control: all tasks shuffled together; the ceiling",
}
NETWORKS = {
    "routing-network": "layers of experts, of which a router picks k for each task",
    "shared-bottom": "a dense network under the tasks' heads",
}
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")


@dataclass(frozen=True)
class Config:
    """A benchmark, a network and a method; the defaults are the paper's, or our reading of it."""

    benchmark: str = "rotated-mnist"
    """stream of tasks: rotated-, permuted- or split-, mnist or fashion-mnist"""
    method: str = "cotraining"
    """how to learn: finetune, replay, cotraining, private or joint"""
    network: str = "routing-network"
    """what learns: routing-network or shared-bottom"""
    arrays: str | None = None
    """your own tasks instead of a benchmark: an .npz file with train_x_0, train_y_0, test_x_0, test_y_0, …"""

    tasks: int | None = None
    """number of tasks; by default 20, or 5 for split benchmarks"""
    examples: int | None = None
    """training examples per task; by default all"""
    test_examples: int | None = None
    """test examples per task; by default all"""
    validation: int | None = None
    """keep this many training images apart and test on those, for choosing options; by default test on the test set"""
    epochs: int = 1
    """passes over each task"""
    batch: int = 10
    """examples of a minibatch"""
    stream_seed: int | None = None
    """what makes the tasks; by default the run's seed, which is the same for every method"""
    permute_first: bool = False
    """permute the first task of a permuted benchmark too"""
    rotation_step: float = 9.0
    """degrees between one task and the next of a rotated benchmark"""

    hidden: tuple[int, ...] = (256, 256)
    """units of the shared bottom's layers; their parameters are the routing network's budget"""
    layers: int = 2
    """layers of the routing network"""
    experts: int = 20
    """experts of a layer"""
    k: int = 4
    """experts that a task uses at once in a layer"""
    units: int | None = None
    """units of an expert; by default as many as the shared bottom's parameter count allows"""
    sampling: str = "gaussian"
    """how routes are sampled while training: gaussian, noisy-top-k, gumbel or none"""
    noise: float = 0.05
    """standard deviation (or Gumbel scale) of the noise that samples routes"""
    gates: str = "chosen"
    """an expert's weight is its softmax among the chosen experts, or among all"""
    noisy_gates: bool = False
    """take the noisy logits for the gates too"""
    aggregation: str = "sum"
    """how the experts' outputs are put together: sum or concatenate"""
    activate_after: bool = False
    """apply ReLU after the experts' outputs are put together, not in each expert"""

    lr: float = 0.1
    """learning rate of experts and heads"""
    router_lr: float | None = None
    """learning rate of the router; by default lr"""
    memory_lr: float | None = None
    """learning rate in the step on replayed examples; by default lr"""
    cotraining_lr: float | None = None
    """learning rate in the co-training step; by default lr"""
    cotrain_heads: bool = False
    """let the co-training step move the heads too"""
    optimizer: str = "sgd"
    """sgd, momentum, adam or adamw"""
    memory: int = 1000
    """examples that the replay memory holds"""
    memory_batch: int = 10
    """examples replayed after each minibatch"""

    evaluate_all: bool = False
    """evaluate on tasks to come as well, for forward transfer"""

    def check(self) -> None:
        """Refuses what can be refused without data or networks."""
        for field, known in (
            ("benchmark", BENCHMARKS),
            ("method", METHODS),
            ("network", NETWORKS),
            ("optimizer", OPTIMIZERS),
        ):
            check_name(field, getattr(self, field), known)
        for field in ("epochs", "batch", "memory", "memory_batch"):
            check_positive(field, getattr(self, field))
        for field in ("tasks", "examples", "test_examples", "validation", "units"):
            if getattr(self, field) is not None:
                check_positive(field, getattr(self, field))
        for field in ("tasks", "examples", "test_examples", "validation"):
            if self.arrays is not None and getattr(self, field) is not None:
                raise Invalid(field, getattr(self, field), "with your own arrays, leave it out")
        if self.stream_seed is not None:
            check_positive("stream_seed", self.stream_seed, least=0)
        if self.method == "private" and self.network == "shared-bottom":
            raise Invalid("network", self.network, "private experts need a routing-network")

    def record(self) -> dict[str, Any]:
        """The configuration as it is written to and read from JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @property
    def options(self) -> dict[str, Any]:
        """What is not as by default, as in `record`."""
        usual = Config().record()
        return {name: value for name, value in self.record().items() if value != usual[name]}

    @property
    def task_count(self) -> int:
        """The number of tasks."""
        return BENCHMARKS[self.benchmark].tasks if self.tasks is None else self.tasks
