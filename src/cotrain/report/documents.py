"""The tables as Markdown, LaTeX, CSV and JSON."""

import csv
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from cotrain.metrics import Summary
from cotrain.report.claims import run_tests
from cotrain.report.findings import findings
from cotrain.report.routes import records
from cotrain.report.sheets import Sheet, sheets
from cotrain.report.study import Cell, Study
from cotrain.report.verdict import verdict

TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
TEX |= {character: f"\\{character}" for character in "&%$#_{}"}
TEX |= {"−": "$-$", "<": "$<$", ">": "$>$", "“": "``", "”": "''", "|": "$|$", "Δ": r"$\Delta$"}
FILES = {"tuned": "table"}  # the table that is meant when one says "the table"
BRACKETS = "In brackets the 95 % interval of a difference; p is after Holm's correction."
TAKEN = ("grid", "table", "tests", "routing")


def as_markdown(study: Study) -> str:
    """All tables, each with what it says and what it lacks."""
    parts = []
    for table in study.tables:
        said = "\n".join(f"- {escaped(sentence)}" for sentence in findings(table, run_tests(table)))
        parts += [f"# {escaped(table.name)}", *([said, BRACKETS] if said else [])]
        parts += [_section(sheet) for sheet in sheets(Study((table,)))]
    if study.failed:
        parts.append(
            "\n".join(["# Failed runs", "", *(f"- {escaped(f['run'])}: {escaped(f['error'])}" for f in study.failed)])
        )
    return "\n\n".join(parts) + "\n"


def as_latex(study: Study) -> str:
    """All tables, for `\\usepackage{booktabs}`."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(_latex(sheet) for sheet in sheets(study))


def as_csv(study: Study) -> str:
    """All cells, a number a field."""
    text = io.StringIO()
    columns = ["table", "benchmark", "method", "options", "seeds"]
    columns += [
        f"{metric}_{part}" for metric in ("acc", "bwt", "learning_accuracy") for part in ("mean", "std", "low", "high")
    ]
    writer = csv.DictWriter(text, [*columns, "acc_paper", "bwt_paper", "reproduced"], lineterminator="\n")
    writer.writeheader()
    for table in study.tables:
        for cell in table.cells:
            named = {"table": table.name, "benchmark": cell.benchmark, "method": cell.method, "options": cell.options}
            numbers = {"seeds": len(cell.runs)} | _paper(cell)
            for metric in ("acc", "bwt", "learning_accuracy"):
                numbers |= _numbers(metric, cell.summary(metric), ("mean", "std", "low", "high"))
            writer.writerow(named | numbers | {"reproduced": verdict(table, cell)})
    return text.getvalue()


def as_json(study: Study) -> dict[str, str]:
    """The files with the numbers: one for each table, the tests, the routing."""
    files: dict[str, Any] = {
        f"{FILES.get(stem, stem)}.json": [_record(cell) for cell in table.cells]
        for stem, table in zip(stems(study), study.tables, strict=True)
    }
    files["tests.json"] = [test.record() for table in study.tables for test in run_tests(table)]
    files["routing.json"] = records(study.tables)
    return {name: json.dumps(content, indent=1, allow_nan=False) + "\n" for name, content in files.items()}


def stems(study: Study) -> list[str]:
    """A name for each table's files, like no other's."""
    names: list[str] = []
    for table in study.tables:
        name = slug(table.name)
        while name in (*names, *TAKEN):
            name += "-table"
        names.append(name)
    return names


def slug(name: str) -> str:
    """A name that is safe as a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "table"


def _section(sheet: Sheet) -> str:
    lines = [sheet.headings, ("---",) * len(sheet.headings), *sheet.lines]
    table = "\n".join("| " + " | ".join(map(escaped, line)) + " |" for line in lines)
    notes = "\n".join(f"- {escaped(note)}" for note in sheet.notes)
    return "\n\n".join(part for part in (f"## {escaped(sheet.title)}", sheet.before, table, notes) if part)


def escaped(text: str) -> str:
    """Text that Markdown leaves as it is: no markup, on one line."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)


def _latex(sheet: Sheet) -> str:
    rows = [" & ".join(map(_tex, line)) + r" \\" for line in (sheet.headings, *sheet.lines)]
    caption = " ".join(_tex(part) for part in (f"{sheet.title}.", sheet.before, *sheet.notes) if part)
    return "\n".join(
        [
            r"\begin{table*}",
            r"\centering\small",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{'l' * len(sheet.headings)}}}",
            r"\toprule",
            rows[0],
            r"\midrule",
            *rows[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table*}",
            "",
        ]
    )


def _tex(text: str) -> str:
    return "".join(TEX.get(character, character) for character in " ".join(text.split()))


def _record(cell: Cell) -> dict[str, Any]:
    named = {"benchmark": cell.benchmark, "method": cell.name, "seeds": len(cell.runs)}
    numbers = [_numbers(metric, cell.summary(metric), ("mean", "std")) for metric in ("acc", "bwt")]
    return named | numbers[0] | numbers[1] | _paper(cell)


def _numbers(metric: str, summary: Summary, parts: Sequence[str]) -> dict[str, float | None]:
    values = {part: getattr(summary, part) for part in parts}
    return {f"{metric}_{part}": None if value != value else value for part, value in values.items()}


def _paper(cell: Cell) -> dict[str, float | None]:
    acc, bwt = cell.paper or (None, None)
    return {"acc_paper": acc, "bwt_paper": bwt}
