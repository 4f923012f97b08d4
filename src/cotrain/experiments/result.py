"""What came of a run, and the files that keep it."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cotrain import metrics
from cotrain.experiments import provenance
from cotrain.experiments.config import Config

# Raised, with a line in the changelog, by a change after which the same configuration gives other numbers.
NUMERICS = 1
METRICS = ("acc", "bwt", "learning_accuracy", "forgetting", "forward_transfer")


@dataclass(frozen=True)
class Result:
    """One seed's run."""

    seed: int
    accuracy: np.ndarray  # [T, T]: on task i after learning task t; NaN where it was not evaluated; [1, T] if joint
    initial: np.ndarray  # [T]: before learning anything
    logits: tuple[np.ndarray, ...]  # [T, T, E] per layer with a router: after each task
    gates: tuple[np.ndarray, ...]  # the routing probabilities, 0 off the routes
    parameters: int
    seconds: dict[str, float]  # compiling, training, evaluating

    @property
    def acc(self) -> float:
        """The mean accuracy after the last task."""
        return metrics.average_accuracy(self.accuracy)

    @property
    def bwt(self) -> float:
        """Backward transfer."""
        return metrics.backward_transfer(self.accuracy)

    @property
    def learning_accuracy(self) -> float:
        """The mean accuracy right after each task."""
        return metrics.learning_accuracy(self.accuracy)

    @property
    def forgetting(self) -> float:
        """The mean drop from the best accuracy."""
        return metrics.forgetting(self.accuracy)

    @property
    def forward_transfer(self) -> float:
        """Forward transfer; NaN unless tasks to come were evaluated."""
        return metrics.forward_transfer(self.accuracy, self.initial)

    def record(self, config: Config | None) -> dict[str, Any]:
        """What goes into `result.json`."""
        numbers = {name: _json(getattr(self, name)) for name in METRICS}
        return {
            "numerics": NUMERICS,
            "config": None if config is None else config.record(),
            "seed": self.seed,
            **numbers,
            "accuracy": _json(_square(self.accuracy)),
            "initial_accuracy": _json(self.initial),
            "parameters": self.parameters,
            "seconds": self.seconds,
            "software": provenance.software(),
            "data": None if config is None else provenance.data(config),
        }

    def routing(self) -> dict[str, np.ndarray]:
        """What goes into `routing.npz`, per layer: gates and used experts after each task, logits after the last."""
        history = {}
        for layer, (logits, gates) in enumerate(zip(self.logits, self.gates, strict=True)):
            history |= {f"gates_{layer}": gates, f"used_{layer}": metrics.used_experts(gates)}
            history[f"logits_{layer}"] = logits[-1]
        return history


class Results(list[Result]):
    """The runs of several seeds."""

    def summary(self, metric: str = "acc") -> metrics.Summary:
        """A metric's mean, standard deviation and confidence interval over the seeds."""
        return metrics.summarise(np.array([getattr(result, metric) for result in self]))

    def __str__(self) -> str:
        parts = (f"{name} {_plus_minus(self.summary(name))}" for name in ("acc", "bwt", "learning_accuracy"))
        return ", ".join(parts) + f" ({len(self)} {'seed' if len(self) == 1 else 'seeds'})"


def save(result: Result, directory: Path, config: Config | None = None) -> None:
    """Writes `result.json` and, where there is a router, `routing.npz`; each file appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    routing = result.routing()
    if routing:
        _write(directory / "routing.npz", lambda file: np.savez_compressed(file, allow_pickle=False, **routing))
    record = result.record(config)
    lines = (f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in record.items())
    write_text(directory / "result.json", "{\n" + ",\n".join(lines) + "\n}")


def write_text(path: Path, text: str) -> None:
    """Writes a text file, which appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, lambda file: file.write(text.encode() + b"\n"))


def _square(accuracy: np.ndarray) -> np.ndarray:
    """The accuracy matrix with a row per task; a joint run has only the last."""
    phases, tasks = accuracy.shape
    return np.concatenate([np.full((tasks - phases, tasks), np.nan), accuracy])


def _plus_minus(summary: metrics.Summary) -> str:
    return f"{summary.mean:.3f}" if np.isnan(summary.std) else f"{summary.mean:.3f} ± {summary.std:.3f}"


def _json(value: Any) -> Any:
    """Numbers and arrays for JSON, with null for NaN."""
    if isinstance(value, np.ndarray):
        return [_json(item) for item in value.tolist()]
    if isinstance(value, list):
        return [_json(item) for item in value]
    return None if np.isnan(value) else value


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise
