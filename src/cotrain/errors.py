"""The one error that a user's input can cause."""

import difflib
from collections.abc import Iterable
from numbers import Integral
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
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise Invalid(field, name, f"{hint}choose from {', '.join(known)}")


def check_positive(field: str, value: int) -> int:
    """Returns `value` if it is a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise Invalid(field, value, "choose a whole number of at least 1")
    return int(value)


class Diverged(ArithmeticError):
    """A run whose loss is no longer a number."""

    def __init__(self, seed: int, task: int, step: int, loss: float):
        super().__init__(
            f"lr: the loss became {loss} at task {task + 1}, step {step + 1} (seed {seed}); choose a smaller one"
        )
        self.seed, self.task, self.step, self.loss = seed, task, step, loss

    def __reduce__(self):
        return Diverged, (self.seed, self.task, self.step, self.loss)
