"""One colour, dash and marker per method, wherever it is drawn, in Okabe and Ito's colours for the colour-blind."""

from collections.abc import Sequence
from typing import NamedTuple

from cotrain.report.study import Cell


class Look(NamedTuple):
    """How a method is drawn; dashes and markers by the names that Matplotlib has for them."""

    colour: str
    dash: str
    marker: str


LOOKS = {
    "shared bottom": Look("#56b4e9", ":", "v"),
    "shared bottom + replay": Look("#0072b2", "--", "s"),
    "MoE": Look("#e69f00", ":", "^"),
    "MoE + replay": Look("#d55e00", "--", "D"),
    "MoE + replay + co-training": Look("#009e73", "-", "o"),
    "private": Look("#cc79a7", "-.", "P"),
    "joint": Look("#7f7f7f", "-", "X"),
}
OTHERS = [Look(look.colour, dash, look.marker) for dash in ("-", "--", ":") for look in reversed(LOOKS.values())]


def looks(cells: Sequence[Cell]) -> dict[str, Look]:
    """A look for each name of the cells: a method's own, or another where there are several of it."""
    names = list(dict.fromkeys(cell.name for cell in cells))
    others = [name for name in names if name not in LOOKS]
    taken = {LOOKS[name].colour for name in names if name in LOOKS}
    free = [look for look in OTHERS if look.colour not in taken] or OTHERS
    return LOOKS | {name: free[place % len(free)] for place, name in enumerate(others)}
