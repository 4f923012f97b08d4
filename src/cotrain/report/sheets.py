"""The tables of a report as text: headings, lines and what to know about them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from cotrain.metrics import Summary
from cotrain.report.claims import Test, run_tests
from cotrain.report.routes import Order, Sharing, orders, sharings
from cotrain.report.study import Study, Table
from cotrain.report.verdict import MARGIN, verdict

NONE = "–"
RESULTS = ("benchmark", "method", "seeds", "ACC", "ACC, 95 %", "BWT", "BWT, 95 %", "just learned")
RESULTS += ("paper's ACC", "paper's BWT", "reproduced?", "options")
TESTS = ("benchmark", "claim", "metric", "seeds", "difference", "95 %", "p", "p, Holm", "paper's difference", "holds?")
ORDERS = ("benchmark", "method", "layer", "seeds", "rank correlation", "95 %")
SHARINGS = ("benchmark", "method", "seeds", "rank correlation", "95 %", "given the task's place", "95 %")


class Sheet(NamedTuple):
    """A table as text."""

    title: str
    headings: tuple[str, ...]
    lines: list[tuple[str, ...]]
    before: str = ""  # a sentence on how to read it
    notes: tuple[str, ...] = ()  # what is missing or not as it should be


def sheets(study: Study) -> list[Sheet]:
    """All tables: results, tests and what the routes say, for each table of the study."""
    made = []
    for table in study.tables:
        made += [results(table), tests(table, run_tests(table))]
        made += [routes_order(table, orders(table)), routes_sharing(table, sharings(table))]
    return [sheet for sheet in made if sheet.lines]


def results(table: Table) -> Sheet:
    """Ours beside the paper's."""
    lines = []
    for cell in table.cells:
        acc, bwt, learned = (cell.summary(name) for name in ("acc", "bwt", "learning_accuracy"))
        paper = (NONE, NONE) if cell.paper is None else tuple(f"{number:.3f}" for number in cell.paper)
        named = (cell.benchmark, cell.method, str(len(cell.runs)))
        ours = (spread(acc), interval(acc), spread(bwt), interval(bwt), spread(learned))
        lines.append((*named, *ours, *paper, verdict(table, cell), cell.options))
    before = (
        f"Mean ± standard deviation over seeds, and the 95 % confidence interval of the mean. Reproduced: “yes” where"
        f" neither ACC nor BWT is worse than the paper's by more than {MARGIN}, “better” where the interval of ACC lies"
        " above the paper's and BWT is no worse."
    )
    return Sheet(f"Results: {table.name}", *_without_empty(RESULTS, lines), before, (*_sizes(table), *table.notes))


def tests(table: Table, some: Sequence[Test]) -> Sheet:
    """The claims and what became of them."""
    lines = []
    for test in some:
        paper = NONE if test.paper is None else f"{test.paper:+z.3f}"
        found = (f"{test.difference:+z.4f}", between(test.low, test.high, "+z.4f"), chance(test.p), chance(test.p_holm))
        lines.append((test.benchmark, test.claim, test.metric.upper(), str(test.seeds), *found, paper, test.holds))
    before = (
        "Paired over the seeds that both methods have: the mean difference with its 95 % t interval, a two-sided"
        " sign-flip permutation test, and Holm's correction over the tests of this table. n seeds give no p below"
        " 2 to the power of 1 − n."
    )
    return Sheet(f"Tests: {table.name}", TESTS, lines, before)


def routes_order(table: Table, some: Sequence[Order]) -> Sheet:
    """Whether near tasks share experts."""
    lines = [
        (
            one.benchmark,
            one.method,
            str(one.layer),
            str(one.rho.seeds),
            f"{number(one.rho.mean, '+z.2f')}",
            rho_range(one.rho),
        )
        for one in some
    ]
    before = (
        "Spearman's correlation between the distance of two tasks, |i − j|, and the dot product of their rows of the"
        " routing matrix after the last task, over all pairs; mean over seeds. Negative: near tasks share experts, as"
        " the paper says of rotations. Permutations have no order, and are a control: what is not 0 there comes from"
        " the order of learning alone."
    )
    return Sheet(f"Routing and task distance: {table.name}", ORDERS, lines, before)


def routes_sharing(table: Table, some: Sequence[Sharing]) -> Sheet:
    """Whether sharing experts goes with forgetting."""
    lines = []
    for one in some:
        given = one.given_position
        found = (number(one.rho.mean, "+z.2f"), rho_range(one.rho), number(given.mean, "+z.2f"), rho_range(given))
        lines.append((one.benchmark, one.method, str(one.rho.seeds), *found))
    before = (
        "Spearman's correlation, over the tasks of a run, between the share of a task's experts that a later task uses"
        " too and the task's drop in accuracy; mean over seeds. Early tasks have more time to be forgotten, so the last"
        " columns hold the task's place in the sequence fixed."
    )
    return Sheet(f"Shared experts and forgetting: {table.name}", SHARINGS, lines, before)


def number(value: float, form: str = "z.3f") -> str:
    """A number, or a dash."""
    return NONE if math.isnan(value) else format(value, form)


def spread(summary: Summary) -> str:
    """Mean ± standard deviation."""
    return number(summary.mean) if math.isnan(summary.std) else f"{summary.mean:z.3f} ± {summary.std:.3f}"


def interval(summary: Summary) -> str:
    """The confidence interval."""
    return between(summary.low, summary.high, "z.3f")


def rho_range(summary: Summary) -> str:
    """The confidence interval of a correlation."""
    return between(max(summary.low, -1), min(summary.high, 1), "+z.2f") if summary.seeds > 1 else NONE


def between(low: float, high: float, form: str) -> str:
    """An interval."""
    return NONE if math.isnan(low) else f"[{low:{form}}, {high:{form}}]"


def chance(p: float) -> str:
    """A p value."""
    return NONE if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _sizes(table: Table) -> list[str]:
    """What to know about the size of the runs."""
    told = [cell for cell in table.cells if cell.runs and cell.paper is not None]
    small = [cell for cell in told if not table.full(cell)]
    notes = []
    if small:
        some = "all cells" if small == told else ", ".join(f"{cell.benchmark} {cell.name}" for cell in small)
        notes.append(f"Not at the paper's full size, so not compared with its numbers: {some}.")
    single = [cell for cell in table.cells if len(cell.runs) == 1]
    if single:
        some = "every cell" if len(single) == len(table.cells) else f"{len(single)} of {len(table.cells)} cells"
        notes.append(f"One seed in {some}: no spread, no interval, no test.")
    return notes


def _without_empty(
    headings: tuple[str, ...], lines: list[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table without the columns that are empty."""
    kept = [place for place in range(len(headings)) if any(line[place] for line in lines)]
    return tuple(headings[place] for place in kept), [tuple(line[place] for place in kept) for line in lines]
