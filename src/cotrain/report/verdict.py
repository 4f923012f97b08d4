"""Whether a cell reproduces the paper's number."""

from cotrain.report.study import Cell, Table

MARGIN = 0.01  # how much worse still counts as reproduced
ROUNDING = 1e-9


def verdict(table: Table, cell: Cell) -> str:
    """ "better", "yes" or "no"; "–" where the paper has no number, or the run is not the size of the paper's."""
    if cell.paper is None or not cell.runs or not table.full(cell):
        return "–"
    acc, bwt = cell.summary("acc"), cell.summary("bwt")
    paper_acc, paper_bwt = cell.paper
    if acc.low > paper_acc and bwt.mean >= paper_bwt - ROUNDING:  # never with one seed: its interval is NaN
        return "better"
    near = acc.mean >= paper_acc - MARGIN - ROUNDING and bwt.mean >= paper_bwt - MARGIN - ROUNDING
    return "yes" if near else "no"
