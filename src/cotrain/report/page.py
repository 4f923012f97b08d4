"""The report as one page that needs nothing else: no network, no other file."""

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib import resources
from importlib.metadata import version
from string import Template

from cotrain.report.claims import run_tests
from cotrain.report.figures import FIGURES
from cotrain.report.findings import findings
from cotrain.report.payload import payload
from cotrain.report.routes import orders, sharings
from cotrain.report.sheets import NONE, Sheet, results, routes_order, routes_sharing, tests
from cotrain.report.study import Study

BADGES = {"better": "good", "yes": "good", "no": "bad", "no: the opposite": "bad", "undecided": "open"}
NO_TESTS = "<p>No claim has runs of both its methods with a seed in common.</p>"
NO_ROUTES = "<p>No run has learned routes.</p>"
WRAPS = "options"  # the column whose text may be long
SCRIPTS = ("figures.js", "explorer.js", "page.js")  # joined to one, in this order
INTERVAL = "95 %"  # how the heading of a column with an interval ends


def as_page(study: Study) -> str:
    """The page; all that comes from files is escaped, and only the page's own scripts may run."""
    plotly = (resources.files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8")
    script = "\n".join(map(_part, SCRIPTS))
    parts = {f"figure_{name}": _figure(name) for name in FIGURES}
    tables = [(table, run_tests(table)) for table in study.tables]
    parts |= {
        "allowed": " ".join(f"'sha256-{_hash(text)}'" for text in (plotly, script)),
        "style": _part("page.css"),
        "findings": "".join(_findings(table.name, findings(table, some)) for table, some in tables),
        "results": _sheets([results(table) for table, _ in tables]),
        "tests": _sheets([tests(table, some) for table, some in tables]) or NO_TESTS,
        "orders": _sheets([routes_order(table, orders(table)) for table, _ in tables]) or NO_ROUTES,
        "sharings": _sheets([routes_sharing(table, sharings(table)) for table, _ in tables]),
        "failed": _failed(study),
        "version": escape(version("cotrain")),
        "data": json.dumps(payload(study), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "plotly": plotly,
        "script": script,
    }
    return Template(_part("page.html")).substitute(parts)


def _part(name: str) -> str:
    return (resources.files("cotrain.report") / name).read_text("utf-8")


def _hash(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


def _figure(name: str) -> str:
    caption = FIGURES[name]
    return (
        f'<figure id="{name}"><h3>{escape(caption.title)}</h3>'
        f'<div class="plot" role="img" aria-label="{escape(caption.title)}"></div>'
        f"<figcaption>{escape(caption.look)} <em>The paper: {escape(caption.paper)}.</em></figcaption>"
        '<p class="tools"><button type="button" data-format="png">Download PNG</button>'
        '<button type="button" data-format="svg">Download SVG</button></p></figure>'
    )


def _findings(name: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(_minus(sentence))}</li>" for sentence in sentences)
    return f"<div><h3>{escape(name)}</h3><ul>{items}</ul></div>" if items else ""


def _sheets(sheets: Sequence[Sheet]) -> str:
    """Tables of one kind, after the sentence on how to read them."""
    some = [sheet for sheet in sheets if sheet.lines]
    return f'<p class="note">{escape(some[0].before)}</p>' + "".join(map(_sheet, some)) if some else ""


def _sheet(sheet: Sheet) -> str:
    """A table in a box of its own, which scrolls where it is too wide; a benchmark heads its rows."""
    columns = [place for place, heading in enumerate(sheet.headings) if place and not heading.endswith(INTERVAL)]
    headings = "".join(f'<th scope="col">{escape(sheet.headings[place])}</th>' for place in columns)
    groups = []
    for benchmark in dict.fromkeys(line[0] for line in sheet.lines):
        head = f'<tr><th scope="rowgroup" colspan="{len(columns)}"><span>{escape(benchmark)}</span></th></tr>'
        lines = [line for line in sheet.lines if line[0] == benchmark]
        rows = "".join(
            f"<tr>{''.join(_entry(sheet.headings, line, place) for place in columns)}</tr>" for line in lines
        )
        groups.append(f"<tbody>{head}{rows}</tbody>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in sheet.notes)
    title = escape(sheet.title)
    return (
        f'<h3>{title}</h3><div class="scroll" tabindex="0" role="region" aria-label="{title}">'
        f"<table><thead><tr>{headings}</tr></thead>{''.join(groups)}</table></div>"
        + (f'<ul class="note">{notes}</ul>' if notes else "")
    )


def _entry(headings: Sequence[str], line: Sequence[str], place: int) -> str:
    """A cell, with the interval of the next column below the number; the first one names the row."""
    heading, text = headings[place], line[place]
    if place == 1:
        return f'<th scope="row">{escape(text)}</th>'
    if heading.endswith("?") and text in BADGES:
        return f'<td><span class="{BADGES[text]}">{escape(text)}</span></td>'
    below = line[place + 1] if place + 1 < len(line) and headings[place + 1].endswith(INTERVAL) else NONE
    small = "" if below == NONE else f"<br><small>{escape(_minus(below))}</small>"
    return f"<td{' class=wraps' if heading == WRAPS else ''}>{escape(_minus(text))}{small}</td>"


def _failed(study: Study) -> str:
    items = "".join(f"<li>{escape(one['run'])}: {escape(one['error'])}</li>" for one in study.failed)
    return f"<h3>Runs that failed</h3><ul>{items}</ul>" if items else ""


def _minus(text: str) -> str:
    """A true minus sign before a number."""
    return "".join("−" if _negative(text, place) else letter for place, letter in enumerate(text))


def _negative(text: str, place: int) -> bool:
    before, after = text[place - 1 : place], text[place + 1 : place + 2]
    return text[place] == "-" and after.isdigit() and before in ("", " ", "[")
