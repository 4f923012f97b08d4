"""Continual learning with sparse routing networks and co-training."""

import contextlib
import io
import os
import re
import sys
from dataclasses import fields
from typing import Annotated, Any

import tyro

from cotrain.ask import Evaluate, Predict
from cotrain.commands import Bench, Check, Data, List, Report, Reproduce, Run, Sweep, Table, Tune
from cotrain.errors import Diverged, Invalid, Stopped

Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Sweep, tyro.conf.subcommand("sweep")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Predict, tyro.conf.subcommand("predict")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[Table, tyro.conf.subcommand("table")]
    | Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[List, tyro.conf.subcommand("list")]
)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 2 for input that cannot be used, 1 for what went wrong outside."""
    if arguments is None:  # this process is ours: XLA's threads would wait for each other more than they help
        os.environ.setdefault("PJRT_NPROC", "1")
    command = None
    try:
        command = _parse(sys.argv[1:] if arguments is None else arguments)
        command()
    except (Invalid, Diverged) as error:
        return _fail(_with_flag(error), 2)
    except Stopped as error:
        how = "with --resume, the same command" if hasattr(command, "config") else "the same command"
        return _fail(f"stopped; {how} goes on from there", 128 + error.number)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (OSError, RuntimeError) as error:
        return _fail(str(error), 1)
    return 0


def _parse(arguments: list[str]) -> Any:
    """The command; what the parser has to complain about becomes one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            if arguments[:1] == ["run"]:
                from cotrain.shell import parse_run

                return parse_run(arguments[1:], Run)
            return tyro.cli(Command, prog="cotrain", args=arguments, description=__doc__)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise SystemExit(_fail(_one_line(complaint.getvalue()), 2)) from None


def _one_line(box: str) -> str:
    """The gist of a parser's complaint: its first paragraph and the nearest option."""
    text = " ".join(re.sub("[│╭╮╰╯]", " ", box.partition("\n")[2]).split())
    gist = re.split(r"─{10,}|Got errors:", text)[0].strip()
    near = re.search(r"Perhaps you meant: (--\S+)", text)
    return f"{gist}; did you mean {near[1]}?" if near else gist


def _with_flag(error: Exception) -> str:
    """An error's message, with the option's name as one types it."""
    from cotrain.choice import NoOption
    from cotrain.experiments.config import every_name

    field = str(getattr(error, "field", ""))
    known = {"protocol", *every_name(), *(option.name for option in fields(Run))}
    typed = isinstance(error, NoOption) or field in known
    line = f"--{field.replace('_', '-')}{str(error)[len(field) :]}" if typed else str(error)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _fail(message: str, code: int) -> int:
    print(f"cotrain: error: {message}", file=sys.stderr)
    return code
