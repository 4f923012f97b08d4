"""What came of a run, and the files that keep it."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cotrain import metrics
from cotrain.errors import Damaged
from cotrain.experiments import provenance
from cotrain.experiments.config import Config
from cotrain.experiments.files import digest_of, read_record, write_bytes, write_record

if TYPE_CHECKING:
    from cotrain.experiments.learner import Learner

# Raised, with a line in the changelog, by a change after which the same configuration gives other numbers.
NUMERICS = 1
METRICS = ("acc", "bwt", "learning_accuracy", "forgetting", "forward_transfer")


@dataclass(frozen=True)
class Result:
    """One seed's run."""

    seed: int
    accuracy: np.ndarray  # [T, T]: on task i after learning task t; NaN where it was not evaluated; [1, T] if joint
    initial: np.ndarray  # [T]: before learning anything
    logits: tuple[np.ndarray, ...]  # [T, T, E] per layer with a router by task: after each task
    gates: tuple[np.ndarray, ...]  # per layer with a router: the routing probabilities, 0 off the routes
    parameters: int
    seconds: dict[str, float]  # compiling, training, evaluating
    learner: "Learner | None" = None  # what it leaves, to predict and to go on with

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
            "software": provenance.software(),
            "data": None if config is None else provenance.data(config),
        }

    def routing(self) -> dict[str, np.ndarray]:
        """What goes into `routing.npz`, per layer: gates and used experts after each task, logits after the last."""
        history = {}
        for layer, gates in enumerate(self.gates):
            history |= {f"gates_{layer}": gates, f"used_{layer}": metrics.used_experts(gates)}
            history |= {f"logits_{layer}": logits[-1] for logits in self.logits[layer : layer + 1]}
        return history

    def _repr_html_(self) -> str:
        from cotrain.experiments.display import results_html

        return results_html([self])


class Results(list[Result]):
    """The runs of several seeds."""

    def summary(self, metric: str = "acc") -> metrics.Summary:
        """A metric's mean, standard deviation and confidence interval over the seeds."""
        return metrics.summarise(np.array([getattr(result, metric) for result in self]))

    def __str__(self) -> str:
        parts = (f"{name} {_plus_minus(self.summary(name))}" for name in ("acc", "bwt", "learning_accuracy"))
        return ", ".join(parts) + f" ({len(self)} {'seed' if len(self) == 1 else 'seeds'})"

    def _repr_html_(self) -> str:
        from cotrain.experiments.display import results_html

        return results_html(self)


def save(result: Result, directory: Path, config: Config | None = None, data: dict[str, Any] | None = None) -> None:
    """Writes `times.json`, `routing.npz` where there is a router, and at last `result.json`, which has its checksum.

    Equal runs give equal files, but for the times. `data` are what `provenance.data` told when the run began; by
    default, what it tells now.
    """
    files = {}
    if result.gates:
        routing = io.BytesIO()
        np.savez_compressed(routing, allow_pickle=False, **result.routing())
        write_bytes(directory / "routing.npz", routing.getvalue())
        files["routing.npz"] = hashlib.sha256(routing.getvalue()).hexdigest()
    write_record(directory / "times.json", result.seconds)
    known = {} if data is None else {"data": data}
    write_record(directory / "result.json", {**result.record(config), **known, "files": files})


def read(directory: Path) -> dict[str, Any]:
    """The record of a run that was saved, with its other files verified."""
    record = read_record(directory / "result.json")
    verify_files(directory, record)
    return record


def verify_files(directory: Path, record: dict[str, Any]) -> None:
    """Checks the files that belong to a record."""
    files = record.get("files")
    if not isinstance(files, dict) or not set(files) <= {"routing.npz"}:
        raise Damaged(directory / "result.json", "it does not say which files belong to it")
    for name, digest in files.items():
        path = directory / name
        if not path.is_file():
            raise Damaged(path, "it is not a file" if path.exists() else "it is missing")
        if digest_of(path) != digest:
            raise Damaged(path, "its checksum is not the one in result.json")


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
