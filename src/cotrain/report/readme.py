"""The results for a README: a short table for each of a report's."""

from cotrain.report.claims import run_tests
from cotrain.report.documents import escaped
from cotrain.report.findings import findings
from cotrain.report.sheets import results
from cotrain.report.study import Study

TITLES = {
    "as-the-paper": "**As the paper**: one learning rate, 0.1, for all methods and steps.",
    "tuned": "**Tuned**: each method at its best, all with the same budget.",
}
LEFT_OUT = ("options", "ACC, 95 %", "BWT, 95 %")


def readme(study: Study) -> str:
    """The tables, each with what its tests say."""
    parts = []
    for table in study.tables:
        headings, lines = results(table).headings, results(table).lines
        kept = [i for i, heading in enumerate(headings) if heading not in LEFT_OUT]
        rows = [[line[i] for i in kept] for line in (headings, ["---"] * len(headings), *lines)]
        parts.append(TITLES.get(table.name, escaped(table.name)))
        parts.append("\n".join("| " + " | ".join(map(escaped, row)) + " |" for row in rows))
        parts.append("\n".join(f"- {escaped(sentence)}" for sentence in findings(table, run_tests(table))))
    return "\n\n".join(part for part in parts if part)
