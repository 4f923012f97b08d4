"""Writes the report of a directory of runs: tables, numbers, figures and the page."""

from pathlib import Path

from cotrain.report.captions import CAPTIONS
from cotrain.report.documents import as_csv, as_json, as_latex, as_markdown, slug, stems
from cotrain.report.figure import draw_table, figures, save
from cotrain.report.page import as_page
from cotrain.report.study import Study, read_study


def write_report(directory: Path, out: Path | None = None) -> list[Path]:
    """Writes the report of the runs in `directory` to `out`, by default the same, and returns the files."""
    study = read_study(directory)
    out = directory if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    texts = {"tables.md": as_markdown(study), "tables.csv": as_csv(study), "tables.tex": as_latex(study)}
    texts |= as_json(study) | {"index.html": as_page(study)}
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return [*(out / name for name in texts), *_write_figures(study, out / "figures")]


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
            caption = CAPTIONS[name.partition("-")[0]]
            lines += [f"![{caption.title}]({made[0].name})", ""]
            lines += [f"**{caption.title}** (table {stem}; the paper: {caption.paper}). {caption.look}", ""]
    (out / "README.md").write_text("\n".join(lines), encoding="utf-8")
    return [*paths, out / "README.md"]
