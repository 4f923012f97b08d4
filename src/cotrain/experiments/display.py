"""Learners and results as HTML, for notebooks: tables, and figures in SVG that take their colours from the page.

Axes: S seeds, P phases, T tasks, E experts.
"""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from cotrain.errors import Invalid
from cotrain.experiments.result import METRICS, Result, Results
from cotrain.networks.routing_network import parameter_count

if TYPE_CHECKING:
    from cotrain.experiments.learner import Learner
    from cotrain.networks.network import Network

COLOUR = "#4a90d9"  # neither light nor dark
MOST = 10_000  # cells that are drawn of a heat map
WIDTH, HEIGHT, LEFT, EDGE = 260, 140, 40, 18  # of a curve, with room for its labels


def learner_html(learner: "Learner") -> str:
    """A learner's method and network in words, how far it is, and its routes."""
    spec = learner.network.spec
    into = f", and {learner.step} minibatches of the next" if learner.step else ""
    rows = {
        "method": _method(learner.method),
        "network": _network(learner.network),
        "inputs": f"{' × '.join(map(str, spec.shape))}, of {spec.classes} classes",
        "tasks": f"{learner.finished} of {learner.tasks} finished{into}",
        "seed": learner.seed,
        "parameters": f"{parameter_count(learner.network):,}",
    }
    try:
        routes = learner.routes
    except Invalid as error:  # it diverged
        return _page("Learner", {**rows, "what was learned": f"{error.value}; {error.valid}"}, [])
    routed = [i for i, layer in enumerate(learner.network.layers) if layer.experts > 1]
    maps = [
        _heat_map(np.where(gates > 0, gates, np.nan), f"routes of layer {layer}: experts of each task", "task, expert")
        for layer, gates in zip(routed, routes, strict=False)  # none, of a router that reads its input
    ]
    return _page("Learner", rows, maps)


def results_html(results: Sequence[Result]) -> str:
    """The metrics over the seeds, the mean accuracy matrix, and the accuracy after each task."""
    if not results:
        return _page("No results", {}, [])
    found = {name: Results(results).summary(name) for name in METRICS}
    rows = {
        name.replace("_", " "): f"{one.mean:.3f}" if np.isnan(one.std) else f"{one.mean:.3f} ± {one.std:.3f}"
        for name, one in found.items()
        if not np.isnan(one.mean)
    }
    seeds = f"seed{'s' if len(results) > 1 else ''} {', '.join(str(result.seed) for result in results)}"
    if len({result.accuracy.shape for result in results}) > 1:
        return _page(f"Results of {seeds}", rows, [])
    accuracy = np.stack([result.accuracy for result in results])
    phases, tasks = accuracy.shape[1:]
    title = "accuracy after each task, on each task"
    figures = [_heat_map(accuracy.mean(axis=0), title, "after task, on task", tasks - phases)]
    if phases == tasks:
        figures.append(_curve(np.stack([[row[: t + 1].mean() for t, row in enumerate(one)] for one in accuracy])))
    return _page(f"Results of {seeds}", rows, figures)


def _method(method: Any) -> str:
    inner = getattr(method, "inner", None)
    return type(method).__name__ + (f" around {_method(inner)}" if inner is not None else "")


def _network(network: "Network") -> str:
    kinds = [f"{one.k} of {one.experts} experts" if one.experts > 1 else "one expert" for one in network.layers]
    layers = f"{len(kinds)} layer{'s' if len(kinds) > 1 else ''} with {' and '.join(dict.fromkeys(kinds))}"
    router = "" if network.router is None else f", chosen by {type(network.router).__name__}"
    return f"{layers}{router}; {'one head' if network.one_head else 'a head for each task'}"


def _page(title: str, rows: dict[str, Any], figures: Sequence[str]) -> str:
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    drawn = "".join(f'<div style="margin:0.5em 1.5em 0.5em 0">{figure}</div>' for figure in figures)
    beside = f'<div style="display:flex;flex-wrap:wrap">{drawn}</div>'
    return f"<div><strong>{escape(title)}</strong><table>{cells}</table>{beside}</div>"


def _heat_map(values: Float[np.ndarray, "R C"], title: str, names: str, first: int = 0) -> str:
    """Stronger colour for more, of what is between 0 and 1; rows count from `first`."""
    (down, across), (row_name, column_name) = values.shape, names.split(", ")
    if values.size > MOST:
        return f"{escape(title)}: too many to draw"
    size = max(3, min(26, 260 // max(down, across)))
    frame = f'width="{across * size}" height="{down * size}" fill="none" stroke="currentColor" opacity="0.3"'
    drawn = [f'<rect x="{LEFT - 0.5}" y="0.5" {frame}/>']
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        x, y, told = LEFT + column * size, row * size + 1, f"{row_name} {row + first}, {column_name} {column}: "
        look = f'fill="{COLOUR}" fill-opacity="{0.25 + 0.5 * float(value):.2f}"'
        drawn.append(f'<rect x="{x}" y="{y}" width="{size - 1}" height="{size - 1}" {look}>')
        drawn.append(f"<title>{escape(told)}{value:.3f}</title></rect>")
        if size == 26:
            drawn.append(_text(x + size / 2, y + size / 2 + 3, f"{value:.2f}", "middle"))
    rows, columns = sorted({0, down - 1}), sorted({0, across - 1})
    drawn += [_text(LEFT - 5, row * size + size / 2 + 4, str(row + first), "end") for row in rows]
    drawn += [_text(LEFT + column * size + size / 2, down * size + 13, str(column), "middle") for column in columns]
    return _svg(LEFT + across * size + 10, down * size + EDGE, title, drawn)


def _curve(values: Float[np.ndarray, "S T"]) -> str:
    """The mean over seeds after each task, within a standard deviation."""
    title = "mean accuracy on the tasks so far, after each task"
    values = values[:, ~np.isnan(values).any(axis=0)]
    if values.shape[1] < 2:
        return ""
    mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    low = np.floor(10 * max(0.0, float((mean - spread).min()) - 1e-9)) / 10
    x = LEFT + np.arange(len(mean)) / (len(mean) - 1) * (WIDTH - LEFT - EDGE)
    y, above, below = (_height(part, low) for part in (mean, mean + spread, mean - spread))
    band = _points([*x, *x[::-1]], [*above, *below[::-1]])
    axes = f"M{LEFT} {EDGE / 2}V{HEIGHT - EDGE}H{WIDTH - EDGE}"
    drawn = [
        f'<polygon points="{band}" fill="{COLOUR}" fill-opacity="0.2"/>',
        f'<polyline points="{_points(x, y)}" fill="none" stroke="{COLOUR}" stroke-width="2"/>',
        f'<path d="{axes}" fill="none" stroke="currentColor" opacity="0.5"/>',
        *(_text(LEFT - 4, _height(value, low) + 3, f"{value:.1f}", "end") for value in (low, 1.0)),
        *(_text(x[i], HEIGHT - 4, str(i), "middle") for i in (0, len(mean) - 1)),
    ]
    for i, value in enumerate(mean):
        told = f"after task {i}: {value:.3f}" + (f" ± {spread[i]:.3f}" if len(values) > 1 else "")
        drawn.append(f'<circle cx="{x[i]:.1f}" cy="{y[i]:.1f}" r="3" fill="{COLOUR}"><title>{told}</title></circle>')
    return _svg(WIDTH, HEIGHT, title, drawn)


def _height(value: Any, low: float) -> Any:
    """Where an accuracy is drawn; the axis ends at 1."""
    return EDGE / 2 + (1 - np.clip(value, low, 1)) / (1 - low + 1e-9) * (HEIGHT - 1.5 * EDGE)


def _points(x: Any, y: Any) -> str:
    return " ".join(f"{one:.1f},{other:.1f}" for one, other in zip(x, y, strict=True))


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, height: float, title: str, drawn: Sequence[str]) -> str:
    look = 'font-size="10" font-family="sans-serif" fill="currentColor"'
    named = f'<svg width="{width}" height="{height}" role="img" aria-label="{escape(title)}" {look}>'
    return f"<div><small>{escape(title)}</small></div>{named}{''.join(drawn)}</svg>"
