"""Watching a run: what callbacks see of it, after each chunk of minibatches and after each task.

Axes: S seeds, T tasks, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from cotrain.engine import Snapshot
from cotrain.evaluation import matrices
from cotrain.methods.method import Method
from cotrain.metrics import used_experts


@dataclass
class Watch:
    """A run, or several seeds at once, at one of its moments."""

    method: Method
    seeds: Sequence[int]
    snapshot: Snapshot  # whose state the run takes over when it goes on: keep it with `snapshot.kept()`
    stopping: bool = field(default=False, init=False)

    def stop(self) -> None:
        """Asks the run to stop here. It can be taken up again, if it is kept in files."""
        self.stopping = True

    @property
    def task(self) -> int:
        """The task that is being learned, or has just been; of tasks that are learned together, the last."""
        phases, tasks = self.snapshot.accuracy.shape[1:]
        return self._phase + tasks - phases

    @property
    def step(self) -> int:
        """The minibatches of the task that were learned; 0 after it."""
        return self.snapshot.step

    @property
    def scalars(self) -> Mapping[str, np.ndarray]:
        """What the steps of the last chunk had to show, the loss among it: a row for each seed."""
        return self.snapshot.scalars if self.snapshot.event == "trained" else {}

    @cached_property
    def measures(self) -> list[dict[str, float]]:
        """For each seed: `loss` and other scalars as means over the chunk; or, after a task, `accuracy` (the mean over
        the tasks so far) and `accuracy/0`, `accuracy/1`, …; and for each layer that has a choice, `experts/0`, … in use
        by the tasks so far, and `entropy/0`, … of the present task's gates, in nats (the mean of several tasks').
        """
        return [self._measured(i) for i in range(len(self.seeds))]

    @property
    def _phase(self) -> int:
        return self.snapshot.phase - (self.snapshot.event == "evaluated")

    def _measured(self, seed: int) -> dict[str, float]:
        found = {name: float(values[seed].mean()) for name, values in self.scalars.items()}
        if self.snapshot.event == "evaluated":
            accuracy = self.snapshot.accuracy[seed, self._phase]
            found["accuracy"] = float(accuracy[: self.task + 1].mean())
            found |= {f"accuracy/{i}": float(value) for i, value in enumerate(accuracy) if not np.isnan(value)}
        for layer, gates in enumerate(self._gates):
            mine = gates[seed][self._phase : self.task + 1]
            found[f"experts/{layer}"] = int(used_experts(gates[seed][None, : self.task + 1])[0].sum())
            found[f"entropy/{layer}"] = float(-(mine * np.log(np.where(mine > 0, mine, 1))).sum(axis=-1).mean())
        return found

    @cached_property
    def _gates(self) -> list[Any]:
        """Each layer's gates, [S, T, E]; of routers that read their input, they are known after a task alone."""
        if self.snapshot.event == "evaluated":
            return [gates[:, self._phase] for gates in self.snapshot.gates]
        if not self.method.network.by_task:
            return []
        found = matrices(self.method.network, self.snapshot.state.learner.parameters)
        return [np.asarray(gates) for _, gates in found]


class Callback:
    """What a run calls. Override what you want to know."""

    def after_chunk(self, watch: Watch) -> None:
        """Some minibatches have been learned."""

    def after_task(self, watch: Watch) -> None:
        """A task has been learned, and all tasks so far were tested."""

    def close(self) -> None:
        """The run has ended, for whatever reason."""
