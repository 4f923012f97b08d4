"""What there is to say about a run: pure functions of its accuracy matrix and of its routing matrices.

`accuracy[t, i]` is the accuracy on task i after learning task t; NaN where it was not evaluated. Tasks that were
learned all at once give a single row, and have no transfer from one to the other.
"""

from typing import NamedTuple

import numpy as np
import scipy.special
from jaxtyping import Bool, Float

Matrix = Float[np.ndarray, "P T"]  # P is T, or 1 for tasks that were learned all at once


def average_accuracy(accuracy: Matrix) -> float:
    """ACC: the mean accuracy on all tasks after the last (Lopez-Paz and Ranzato 2017)."""
    return float(accuracy[-1].mean())


def backward_transfer(accuracy: Matrix) -> float:
    """BWT: how learning later tasks changed the accuracy, mean over the T − 1 earlier tasks (ibid.)."""
    return _mean((accuracy[-1] - np.diagonal(accuracy))[:-1]) if _in_sequence(accuracy) else float("nan")


def forward_transfer(accuracy: Matrix, initial: Float[np.ndarray, " T"]) -> float:
    """FWT: how much better than untrained a task is just before it is learned, mean over tasks 2 to T (ibid.)."""
    return _mean(np.diagonal(accuracy, offset=1) - initial[1:]) if _in_sequence(accuracy) else float("nan")


def forgetting(accuracy: Matrix) -> float:
    """The drop from the best accuracy a task ever had, mean over the T − 1 earlier tasks (Chaudhry et al. 2018)."""
    earlier = accuracy[:-1, :-1]
    best = np.array([np.nan if np.isnan(column).all() else np.nanmax(column) for column in earlier.T])
    return _mean(best - accuracy[-1, :-1])


def learning_accuracy(accuracy: Matrix) -> float:
    """The mean accuracy on each task right after it was learned (Riemer et al. 2019)."""
    return float((np.diagonal(accuracy) if _in_sequence(accuracy) else accuracy[-1]).mean())


class Summary(NamedTuple):
    """A number over seeds."""

    mean: float
    std: float  # of the sample; NaN for one seed
    low: float  # the confidence interval of the mean, by Student's t
    high: float
    seeds: int


def summarise(values: Float[np.ndarray, " S"], confidence: float = 0.95) -> Summary:
    """Mean, standard deviation and confidence interval over seeds."""
    values = np.asarray(values, float)
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return Summary(mean, np.nan, np.nan, np.nan, count)
    std = float(values.std(ddof=1))
    margin = float(scipy.special.stdtrit(count - 1, (1 + confidence) / 2)) * std / np.sqrt(count)
    return Summary(mean, std, mean - margin, mean + margin, count)


def task_similarity(gates: Float[np.ndarray, "T E"]) -> Matrix:
    """The routing matrix times its transpose: how much two tasks' routes have in common (the paper's Figure 5)."""
    return gates @ gates.T


def expert_overlap(gates: Float[np.ndarray, "T E"]) -> Matrix:
    """The share of a task's experts that another task uses too."""
    chosen = (gates > 0).astype(float)
    return chosen @ chosen.T / chosen.sum(axis=1, keepdims=True)


def used_experts(gates: Float[np.ndarray, "P T E"]) -> Bool[np.ndarray, "P E"]:
    """The experts that any of the tasks learned so far uses, after each task, or after all of them at once."""
    phases, tasks, _ = gates.shape
    return np.stack([(after[: tasks - phases + 1 + i] > 0).any(axis=0) for i, after in enumerate(gates)])


def _in_sequence(accuracy: Matrix) -> bool:
    phases, tasks = accuracy.shape
    return phases == tasks


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
