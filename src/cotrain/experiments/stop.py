"""Stopping at a signal where a run can be taken up again."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cotrain.errors import Stopped

_asked: int | None = None


def asked() -> int | None:
    """The signal that asked this process to stop; None if none did."""
    return _asked


def ask(number: int | None) -> None:
    """Asks this process to stop, as the signal would; None takes it back."""
    global _asked
    _asked = number


@contextmanager
def gently() -> Iterator[None]:
    """Within it, SIGINT and SIGTERM only ask; what runs looks at `asked` from time to time. A second one ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        if _asked is not None:
            raise Stopped(number)
        ask(number)
        os.write(2, b"\nstopping after this chunk; once more to stop at once\n")

    known = (signal.SIGINT, signal.SIGTERM)  # what is ignored stays so: a script's background jobs ignore SIGINT
    before = {number: signal.getsignal(number) for number in known if signal.getsignal(number) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        ask(None)
