"""The paper's claims, and the control that it lacks, as tests over seeds."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cotrain.metrics import summarise
from cotrain.report.statistics import holm, sign_flip
from cotrain.report.study import Cell, Table

LEVEL = 0.05
COTRAINING = "MoE + replay + co-training"


class Claim(NamedTuple):
    """That one method does better than another."""

    text: str
    metric: str
    better: str
    worse: str


CLAIMS = (
    Claim("co-training improves ACC over MoE + replay", "acc", COTRAINING, "MoE + replay"),
    Claim("co-training improves BWT over MoE + replay", "bwt", COTRAINING, "MoE + replay"),
    Claim("co-training beats shared bottom + replay in ACC", "acc", COTRAINING, "shared bottom + replay"),
    Claim("MoE beats shared bottom in ACC", "acc", "MoE", "shared bottom"),
    Claim("control: co-training beats private experts in ACC", "acc", COTRAINING, "private"),
)


class Test(NamedTuple):
    """A claim on a benchmark of a table, over the seeds that both methods have."""

    table: str
    benchmark: str
    claim: str
    metric: str
    better: str
    worse: str
    seeds: int
    difference: float
    low: float  # 95 % interval of the mean difference, by Student's t
    high: float
    p: float  # NaN for one seed
    p_holm: float
    paper: float | None  # the paper's difference

    @property
    def holds(self) -> str:
        """What the test says of the claim."""
        if self.seeds < 2:
            return "one seed: no test"
        if self.p_holm >= LEVEL or self.difference == 0:
            return "undecided"
        return "yes" if self.difference > 0 else "no: the opposite"

    def record(self) -> dict[str, Any]:
        """The test for JSON, with null for what there is not."""
        numbers = {name: None if value != value else value for name, value in self._asdict().items()}
        return {name: value for name, value in numbers.items() if name != "paper"} | {"holds": self.holds}


def run_tests(table: Table) -> list[Test]:
    """All claims of which a table has both sides, with Holm's correction over them."""
    tests = [test for claim, better, worse in _pairs(table) if (test := _test(table, claim, better, worse))]
    tried = [test for test in tests if test.seeds > 1]
    adjusted = iter(holm([test.p for test in tried]))
    return [test._replace(p_holm=next(adjusted)) if test.seeds > 1 else test for test in tests]


def _pairs(table: Table) -> Iterator[tuple[Claim, Cell, Cell]]:
    """The two sides of each claim on each benchmark; a user's own runs are compared under the same options."""
    for benchmark in table.benchmarks:
        for claim in CLAIMS:
            sides = _named(table, benchmark, claim.better), _named(table, benchmark, claim.worse)
            yield from ((claim, one, other) for one in sides[0] for other in sides[1] if one.setting == other.setting)


def _named(table: Table, benchmark: str, method: str) -> Iterable[Cell]:
    return [cell for cell in table.of(benchmark) if cell.method == method]


def _test(table: Table, claim: Claim, better: Cell, worse: Cell) -> Test | None:
    both = sorted(better.seeds.keys() & worse.seeds.keys())
    if not both:
        return None
    metric = claim.metric
    pairs = ((better.seeds[seed].numbers[metric], worse.seeds[seed].numbers[metric]) for seed in both)
    differences = np.array([one - other for one, other in pairs])
    if np.isnan(differences).any():
        return None
    summary = summarise(differences)
    text = f"{claim.text} ({better.setting})" if better.setting else claim.text
    p = sign_flip(differences) if len(both) > 1 else float("nan")
    paper = None
    if better.paper is not None and worse.paper is not None:
        place = ("acc", "bwt").index(metric)
        paper = better.paper[place] - worse.paper[place]
    named = (table.name, better.benchmark, text, metric, claim.better, claim.worse)
    return Test(*named, len(both), summary.mean, summary.low, summary.high, p, float("nan"), paper)
