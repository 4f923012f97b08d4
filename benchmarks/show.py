"""The benchmark's figures as tables, for a terminal or in Markdown, and as a picture."""

import re
import statistics
from pathlib import Path
from typing import Any

Table = tuple[str, list[list[str]]]  # a title, and lines of which the first has the headings


def tables(figures: dict[str, Any]) -> list[Table]:
    """What was measured, in words."""
    parts = (_one_core, _machine, _steps, _growth, _learner, _stream, _ratios)
    return [part(figures) for part in parts]


def markdown(figures: dict[str, Any]) -> str:
    """The tables in Markdown."""
    parts = []
    for title, (headings, *lines) in tables(figures):
        rows = [headings, ["---"] + ["---:"] * (len(headings) - 1), *lines]
        parts.append(f"**{title}**\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows))
    return "\n\n".join(parts)


def claims(text: str, figures: dict[str, Any]) -> str:
    """The text with the measured ratio wherever it names one, as in `3.0×<!-- shared_bottom_vs_torch -->`."""
    return re.sub(r"[\d.]+(×<!-- (\w+) -->)", lambda found: f"{figures['ratios'][found[2]]:.1f}{found[1]}", text)


def draw(figures: dict[str, Any], path: Path) -> None:
    """Times per iteration beside each other, and how ours grow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    subjects = list(dict.fromkeys(m["subject"] for m in figures["one_core"]))
    canvas, axes = pyplot.subplots(1, len(subjects) + 1, figsize=(16, 3.6), layout="constrained")
    for axis, subject in zip(axes, subjects, strict=False):
        found = [m for m in figures["one_core"] if m["subject"] == subject and m["microseconds"]["median"]]
        for place, m in enumerate(reversed(found)):
            rounds = m["microseconds"]["rounds"]
            colour = {"cotrain": "C0", "its matrix products in BLAS": "C2"}.get(m["name"], "0.7")
            axis.barh(place, m["microseconds"]["median"], color=colour)
            axis.plot([min(rounds), max(rounds)], [place, place], color="black", linewidth=1)
        axis.set_yticks(range(len(found)), [m["name"] for m in reversed(found)], fontsize=8)
        axis.set(title=subject, xlabel="µs an iteration, one core")
    axis = axes[-1]
    for subject in ("current batch", "with replay"):
        found = [m for m in figures["growth"] if m["subject"] == subject and m["name"].endswith("experts")]
        experts = [int(m["name"].split()[0]) for m in found]
        axis.plot(experts, [m["microseconds"]["median"] for m in found], marker="o", label=subject)
    axis.set(title="cotrain, more experts", xlabel="experts of a layer", xscale="log", ylim=(0, None))
    axis.set_xticks([20, 80, 320, 1280], ["20", "80", "320", "1280"])
    axis.minorticks_off()
    axis.legend(frameon=False)
    canvas.savefig(path, dpi=150)
    pyplot.close(canvas)


def _one_core(figures: dict[str, Any]) -> Table:
    lines = [["one core", "µs an iteration", "least to most", "times ours", "first pass, s"]]
    ours = {m["subject"]: m["microseconds"]["median"] for m in figures["one_core"] if m["name"] == "cotrain"}
    for m in figures["one_core"]:
        time = m["microseconds"]
        if time["error"]:
            lines.append([f"{m['subject']}: {m['name']}", _short(time["error"]), "", "", ""])
            continue
        spread = f"{min(time['rounds']):.0f} to {max(time['rounds']):.0f}"
        against = f"{time['median'] / ours[m['subject']]:.1f}" if ours[m["subject"]] else ""
        ready = f"{time['ready_seconds']:.0f}"
        lines.append([f"{m['subject']}: {m['name']}", f"{time['median']:.0f}", spread, against, ready])
    return (
        f"{figures['iterations_per_pass']} iterations a pass; BLAS peak {figures['blas_peak_gflops']:.0f} GFLOP/s",
        lines,
    )


def _machine(figures: dict[str, Any]) -> Table:
    lines = [["all cores", "iterations a second", "least to most"]]
    for m in figures["machine"]:
        rate = m["iterations_per_second"]
        spread = f"{min(rate['rounds']):.0f} to {max(rate['rounds']):.0f}"
        lines.append([f"{m['subject']}: {m['name']}", f"{rate['median']:.0f}", spread])
    return f"{figures['cores']} cores, a process on each", lines


def _steps(figures: dict[str, Any]) -> Table:
    lines = [["a step, shared bottom", "µs", "least to most", "times replay"]]
    for m in figures["steps"]:
        time, over = m["microseconds"], figures["ratios"].get(f"step_{m['name'].replace('-', '_')}_over_replay")
        if time["error"]:
            lines.append([m["name"], _short(time["error"]), "", ""])
            continue
        spread = f"{min(time['rounds']):.0f} to {max(time['rounds']):.0f}"
        lines.append([m["name"], f"{time['median']:.0f}", spread, "" if over is None else f"{over:.2f}"])
    return "Methods: a minibatch, the mean over 20 tasks", lines


def _growth(figures: dict[str, Any]) -> Table:
    lines = [["cotrain", "µs an iteration", "least to most"]]
    for m in figures["growth"]:
        time = m["microseconds"]
        spread = f"{min(time['rounds']):.0f} to {max(time['rounds']):.0f}"
        lines.append([f"{m['subject']}, {m['name']}", f"{time['median']:.0f}", spread])
    for seen in figures["resident_megabytes"]:
        lines.append([f"resident memory after {seen['tasks']} tasks", f"{seen['megabytes']:.0f} MB", ""])
    return "Growth", lines


def _learner(figures: dict[str, Any]) -> Table:
    lines = [["a learner, one core", "µs", "least to most"]]
    units = {"evaluation": "10,000 images tested by the engine", "predict": "10,000 images predicted"}
    for method, found in figures["learner"].items():
        for name, times in found["microseconds"].items():
            what = units.get(name, f"a minibatch, {name if name == 'engine' else f'fed {name}'}")
            spread = f"{min(times):.0f} to {max(times):.0f}"
            lines.append([f"{method}: {what}", f"{statistics.median(times):.0f}", spread])
    return "A learner beside the engine; *at once* is 200 minibatches a call", lines


def _stream(figures: dict[str, Any]) -> Table:
    stream = figures["stream"]
    lines = [
        ["a stream of 50 GB, algorithm 1", ""],
        ["learned", f"{stream['gigabytes']:.1f} GB"],
        ["resident memory, at most", f"{stream['resident_megabytes']:.0f} MB"],
        ["reading, in its thread", f"{stream['reading_seconds']:.1f} s"],
        ["of which the learner waited for", f"{stream['waiting_seconds']:.1f} s"],
    ]
    return "A stream that is made as it is read", lines


def _ratios(figures: dict[str, Any]) -> Table:
    lines = [["ratio", ""]]
    lines += [[name, "not measured" if value is None else f"{value:.2f}"] for name, value in figures["ratios"].items()]
    return "Ratios (medians over the rounds)", lines


def _short(error: str) -> str:
    return "not installed" if error.startswith(("ModuleNotFoundError", "ImportError")) else error[:60]
