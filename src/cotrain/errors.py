"""What can go wrong, in words for the user."""

import difflib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


class Invalid(ValueError):
    """Input that cannot be used: one line with the field, the value and what would be valid."""

    def __init__(self, field: str, value: Any, valid: str):
        super().__init__(f"{field}: {value!r} is not valid; {valid}")
        self.field, self.value, self.valid = field, value, valid

    def __reduce__(self):  # for the way back from a worker process
        return Invalid, (self.field, self.value, self.valid)


def check_name(field: str, name: str, known: Iterable[str]) -> str:
    """Returns `name` if it is known; otherwise raises with the nearest known name."""
    known = list(known)
    if name in known:
        return name
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise Invalid(field, name, f"{hint}choose from {', '.join(known)}")


def check_positive(field: str, value: int, least: int = 1) -> int:
    """Returns `value` if it is a whole number of at least one, or of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise Invalid(field, value, f"choose a whole number of at least {least}")
    return int(value)


def check_rate(field: str, value: float) -> float:
    """Returns `value` if it is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < float("inf"):
        raise Invalid(field, value, "choose a number of at least 0")
    return float(value)


class Diverged(ArithmeticError):
    """A run whose loss or parameters are no longer numbers."""

    def __init__(self, seed: int, task: int, step: int, loss: float, checkpoint: Any = None):
        where = "" if checkpoint is None else f"; the last good checkpoint is {checkpoint}"
        super().__init__(
            f"lr: the loss became {loss} at task {task + 1}, step {step + 1} (seed {seed}); choose a smaller one{where}"
        )
        self.seed, self.task, self.step, self.loss, self.checkpoint = seed, task, step, loss, checkpoint

    def __reduce__(self):
        return Diverged, (self.seed, self.task, self.step, self.loss, self.checkpoint)


class Damaged(RuntimeError):
    """A file that is not as it was written."""

    def __init__(self, path: Any, reason: str):
        super().__init__(f"{path} is damaged: {reason}")
        self.path, self.reason = path, reason

    def __reduce__(self):
        return Damaged, (self.path, self.reason)


class Busy(RuntimeError):
    """A run that another process is at work on."""


class Stopped(KeyboardInterrupt):
    """A run that was asked by a signal to stop, and did so when it could be taken up again."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number
