"""Writes the report of a directory of runs: tables, numbers, figures and the page."""

from pathlib import Path

from cotrain.experiments.files import digest_of, write_text
from cotrain.report.documents import as_csv, as_json, as_latex, as_markdown, slug, stems
from cotrain.report.figure import draw_table, figures, save
from cotrain.report.figures import FIGURES
from cotrain.report.page import as_page
from cotrain.report.study import Study, read_study


def write_report(directory: Path, out: Path | None = None) -> list[Path]:
    """Writes the report of the runs in `directory` to `out`, by default the same, and returns the files."""
    study = read_study(directory)
    out = directory if out is None else out
    texts = {"tables.md": as_markdown(study), "tables.csv": as_csv(study), "tables.tex": as_latex(study)}
    texts |= as_json(study)
    for name, text in texts.items():
        write_text(out / name, text.removesuffix("\n"))
    figures = _write_figures(study, out / "figures")
    write_text(out / "index.html", f"{as_page(study).rstrip()}\n{_origin(directory)}")
    return [*(out / name for name in texts), *figures, out / "index.html"]


def is_fresh(directory: Path) -> bool:
    """Whether the report in a directory of runs is whole, and of the runs as they are."""
    page = directory / "index.html"
    return page.is_file() and page.read_text(encoding="utf-8").rstrip().endswith(_origin(directory))


def _origin(directory: Path) -> str:
    """The page's last line, which tells what it was made from."""
    grid = directory / "grid.json"
    return f"<!-- made from grid.json {digest_of(grid)} -->" if grid.is_file() else "<!-- made from records -->"


def _write_figures(study: Study, out: Path) -> list[Path]:
    """Every figure of every table as PNG and SVG, and a list of them with their captions."""
    out.mkdir(exist_ok=True)
    paths, lines = [], ["# Figures", ""]
    for stem, table in zip(stems(study), study.tables, strict=True):
        for name, make in figures(table).items():
            figure = draw_table(table, make)
            if figure is None:
                continue
            made = [out / f"{stem}-{slug(name)}.{kind}" for kind in ("png", "svg")]
            save(figure, *made)
            paths += made
            caption = FIGURES[name.partition("-")[0]]
            lines += [f"![{caption.title}]({made[0].name})", ""]
            lines += [f"**{caption.title}** (table {stem}; the paper: {caption.paper}). {caption.look}", ""]
    write_text(out / "README.md", "\n".join(lines))
    return [*paths, out / "README.md"]
