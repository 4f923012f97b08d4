"""How sure a difference is: tests and correlations over seeds, without assumptions on how accuracies are spread."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

EXACT = 20  # pairs up to which all ways to flip their signs are counted
DRAWS = 99_999  # random ways beyond that

Numbers = Float[np.ndarray, " n"]


def sign_flip(differences: Numbers) -> float:
    """The two-sided p of the paired permutation test: how often random signs give a mean as far from 0."""
    differences = np.asarray(differences, float)
    least = abs(differences.sum()) - 1e-9 * np.abs(differences).sum()  # equal up to rounding counts as equal
    if len(differences) <= EXACT:
        sums = differences[:1]  # the first sign may stay: flipping all changes no distance from 0
        for difference in differences[1:]:
            sums = np.concatenate([sums + difference, sums - difference])
        return float((np.abs(sums) >= least).mean())
    draws, sums = np.random.default_rng(0), np.zeros(DRAWS)
    for difference in differences:
        sums += difference * draws.choice([-1.0, 1.0], DRAWS)
    return (1 + int((np.abs(sums) >= least).sum())) / (1 + DRAWS)


def holm(ps: Sequence[float]) -> list[float]:
    """The p of a family of tests after Holm's correction: the i-th smallest of m is multiplied by m − i + 1."""
    order = np.argsort(ps, kind="stable")
    scaled = np.array(ps, float)[order] * np.arange(len(ps), 0, -1)
    adjusted = np.empty(len(ps))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return adjusted.tolist()


def spearman(x: Numbers, y: Numbers) -> float:
    """The correlation of the ranks; NaN where one of them does not vary."""
    return _correlation(rankdata(x), rankdata(y))


def partial_spearman(x: Numbers, y: Numbers, given: Numbers) -> float:
    """The correlation of the ranks that is left when a third rank explains what it can of both."""
    xy, xz, yz = spearman(x, y), spearman(x, given), spearman(y, given)
    rest = (1 - xz**2) * (1 - yz**2)
    return (xy - xz * yz) / float(np.sqrt(rest)) if rest > 1e-9 else float("nan")


def _correlation(x: Numbers, y: Numbers) -> float:
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / scale if scale > 0 else float("nan")
