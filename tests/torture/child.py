"""Runs a program in a forked child, which can be killed at any moment and starts without importing anything.

This works as long as JAX has made no array here, for with the first one come its threads: all that needs JAX happens in
children.
"""

import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from jax._src.xla_bridge import backends_are_initialized

PATIENCE = 300.0  # seconds until a child counts as hanging
HUNG = 124


class Ended(NamedTuple):
    """How a program ended, and what it printed."""

    code: int  # negative: the signal that killed it
    said: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


def attempt(
    program: Callable[[], int],
    *,
    before: Callable[[], None] | None = None,
    meddle: Callable[[int], None] | None = None,
    patience: float = PATIENCE,
) -> Ended:
    """Runs a program in a child; there `before` comes first. Here `meddle` is called with the child's number."""
    assert not backends_are_initialized()
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            _be_the_child(program, before, log.fileno())
        try:
            if meddle is not None:
                meddle(child)
            ended = until(lambda: not alive(child), patience)
        finally:
            if alive(child):
                os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        log.seek(0)
        said = log.read().decode(errors="replace")
        return Ended(code, said) if ended else Ended(HUNG, f"{said}\nhung for {patience:g} s")


def alive(child: int) -> bool:
    """Whether a child has not ended yet."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> bool:
    """Waits for something; whether it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def end_with_parent() -> None:
    """Has this process killed when its parent ends, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _be_the_child(program: Callable[[], int], before: Callable[[], None] | None, log: int) -> None:
    code = 70
    try:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if before is not None:
            before()
        code = program()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
