"""What the numbers say, in sentences; no sentence is true unless the numbers make it so."""

from collections.abc import Sequence

from cotrain.report.claims import CLAIMS, COTRAINING, Test
from cotrain.report.routes import routed
from cotrain.report.sheets import between, chance
from cotrain.report.study import Table
from cotrain.report.verdict import verdict
from cotrain.report.views import used

CONTROL = CLAIMS[-1].worse


def findings(table: Table, tests: Sequence[Test]) -> list[str]:
    """A table in a few sentences."""
    return [
        *_reproduced(table),
        *_claims(tests),
        *_steps(tests),
        *_margins(table, tests),
        *_control(tests),
        *_in_use(table),
    ]


def _reproduced(table: Table) -> list[str]:
    verdicts = [verdict(table, cell) for cell in table.cells if cell.paper is not None]
    judged = [one for one in verdicts if one != "–"]
    if not judged:
        return ["No cell can be compared with the paper's numbers."] if verdicts else []
    yes, better, no = (judged.count(word) for word in ("yes", "better", "no"))
    return [f"Of {len(judged)} cells of the paper's table, {yes} reproduced, {better} better, {no} not."]


def _claims(tests: Sequence[Test]) -> list[str]:
    claims = [test for test in tests if test.worse != CONTROL]
    if not claims:
        return []
    found = [test.holds for test in claims]
    parts = (
        (found.count("yes"), "hold"),
        (found.count("no: the opposite"), "are contradicted"),
        (found.count("undecided"), "remain undecided"),
        (found.count("one seed: no test"), "have one seed only and are not tested"),
    )
    said = ", ".join(f"{many} {what}" for many, what in parts if many)
    return [f"Of the paper's claims on these benchmarks ({len(claims)} tests), {said}."]


def _steps(tests: Sequence[Test]) -> list[str]:
    """What co-training adds to replay."""
    words = {
        "yes": "co-training raises {} over MoE + replay: ",
        "no: the opposite": "co-training lowers {} over MoE + replay: ",
        "undecided": "it stays open whether co-training raises {} over MoE + replay: ",
        "one seed: no test": "with one seed, which proves nothing, co-training changes {} over MoE + replay: ",
    }
    return _said([test for test in tests if (test.better, test.worse) == (COTRAINING, "MoE + replay")], words)


def _said(tests: Sequence[Test], words: dict[str, str]) -> list[str]:
    """Tests in words, by what they say of the claim."""
    return [f"{test.benchmark}: {words[test.holds].format(test.metric.upper())}{_size(test)}." for test in tests]


def _margins(table: Table, tests: Sequence[Test]) -> list[str]:
    """Co-training's lead over the dense baseline, ours and the paper's, where the sizes are the same."""
    full = {(cell.benchmark, cell.method): table.full(cell) for cell in table.cells}
    return [
        f"{test.benchmark}: the lead of co-training over shared bottom + replay in ACC is {_size(test)};"
        f" in the paper it is {test.paper:+.3f}."
        for test in tests
        if test.worse == "shared bottom + replay" and test.paper is not None and full[test.benchmark, COTRAINING]
    ]


def _control(tests: Sequence[Test]) -> list[str]:
    """Whether learned routes beat one fixed expert per task, which the paper does not compare with."""
    control = "the private control, which routes and replays nothing: {} "
    words = {
        "yes": f"co-training beats {control}",
        "no: the opposite": f"co-training does worse than {control}",
        "undecided": f"co-training cannot be told apart from {control}",
        "one seed: no test": f"with one seed, co-training against {control}",
    }
    return _said([test for test in tests if test.worse == CONTROL], words)


def _in_use(table: Table) -> list[str]:
    """How many experts are in use at the end, which the paper says co-training raises."""
    said = []
    for benchmark in table.benchmarks:
        cells = [cell for cell in routed(table) if cell.benchmark == benchmark]
        parts = []
        for cell in cells:
            layers = range(len(cell.runs[0].used))
            parts.append(f"{cell.name} {' and '.join(f'{used(cell, layer).mean[-1]:.1f}' for layer in layers)}")
        if parts:
            experts = " and ".join(str(layer.shape[1]) for layer in cells[0].runs[0].used)
            said.append(
                f"{benchmark}: experts in use after the last task, of {experts} in the layers: {'; '.join(parts)}."
                " The paper says that without co-training some stay unused."
            )
    return said


def below(p: float) -> str:
    """A p value after its letter."""
    return chance(p) if p < 0.001 else f"= {chance(p)}"


def _size(test: Test) -> str:
    if test.seeds < 2:
        return f"{test.difference:+z.4f}"
    return f"{test.difference:+z.4f} {between(test.low, test.high, '+z.4f')}, p {below(test.p_holm)}"
