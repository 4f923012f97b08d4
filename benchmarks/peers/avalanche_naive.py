"""Fine-tuning and replay with Avalanche's own strategies.

As `torch_eager`, each function returns a function that learns the whole stream once. Avalanche's replay is not quite
ours: it takes one step on current and replayed examples together, replays from the second task on, and adds to its
memory after each task.
"""

import importlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workload import Pass


def _import_torchvision() -> list[torch.library.Library]:
    """Imports torchvision, which Avalanche needs, even where it was built for a GPU and PyTorch was not.

    Such a torchvision lacks the operators of its compiled part. The import asks for two of them, which are defined
    here, without a kernel, for as long as what is returned lives.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
        return [library]
    return []


with warnings.catch_warnings(record=True):
    _OPERATORS = _import_torchvision()
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.models import MultiHeadClassifier, MultiTaskModule
    from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin, SupervisedPlugin
    from avalanche.training.plugins.evaluation import default_evaluator
    from avalanche.training.storage_policy import ReservoirSamplingBuffer
    from avalanche.training.supervised import Naive


class SharedBottom(MultiTaskModule):
    """A dense network under the tasks' heads, which Avalanche adds as the tasks come."""

    def __init__(self, pixels: int, hidden: Sequence[int], classes: int):
        super().__init__()
        layers = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise((pixels, *hidden))]
        self.bottom = nn.Sequential(*(module for layer in layers for module in layer))
        self.heads = MultiHeadClassifier(hidden[-1], classes, masking=False)

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        return self.heads(self.bottom(x), task_labels)


class Clock(SupervisedPlugin):
    """Times the epochs of training, the loading of minibatches included."""

    def __init__(self) -> None:
        super().__init__()
        self.iterations, self.seconds, self.start = 0, 0.0, 0.0
        self.losses: deque[Tensor] = deque(maxlen=20)

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.iterations += 1
        self.losses.append(strategy.loss.detach())

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self.start


def finetune(workload: Any) -> Callable[[], Pass]:
    """The strategy Naive on a shared bottom, with Avalanche's default metrics and logger."""
    return _passes(workload, list, default_evaluator)


def finetune_bare(workload: Any) -> Callable[[], Pass]:
    """The same, measuring nothing."""
    return _passes(workload, list, nothing)


def replay(workload: Any) -> Callable[[], Pass]:
    """Naive with a reservoir memory, with Avalanche's default metrics and logger."""
    return _passes(workload, lambda: [_memory(workload)], default_evaluator)


def replay_bare(workload: Any) -> Callable[[], Pass]:
    """The same, measuring nothing."""
    return _passes(workload, lambda: [_memory(workload)], nothing)


def nothing() -> EvaluationPlugin:
    return EvaluationPlugin(loggers=[])


def _memory(workload: Any) -> ReplayPlugin:
    memory = ReservoirSamplingBuffer(max_size=workload.memory)
    return ReplayPlugin(workload.memory, workload.batch, workload.memory_batch, storage_policy=memory)


def _passes(
    workload: Any, plugins: Callable[[], list[SupervisedPlugin]], evaluator: Callable[[], EvaluationPlugin]
) -> Callable[[], Pass]:
    with warnings.catch_warnings(record=True):
        tensors = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in workload.tasks]
        benchmark = tensors_benchmark(
            train_tensors=tensors, test_tensors=tensors, task_labels=list(range(len(tensors)))
        )

    def one_pass() -> Pass:
        torch.manual_seed(workload.seed)
        model = SharedBottom(workload.tasks[0][0].shape[1], workload.hidden, workload.classes)
        clock = Clock()
        with warnings.catch_warnings(record=True):  # not a filter: Avalanche sets its own
            strategy = Naive(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=workload.lr),
                train_mb_size=workload.batch,
                train_epochs=1,
                plugins=[*plugins(), clock],
                evaluator=evaluator(),
            )
            for experience in benchmark.train_stream:
                strategy.train(experience, num_workers=0)
        return Pass(clock.iterations, clock.seconds, torch.stack(list(clock.losses)).mean().item(), model)

    return one_pass
