"""What can be wrong with the machine that a child runs on. Each is called in the child, before the program."""

import io
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

CALLS = 90  # saving a checkpoint takes nine of them


def killed_in_writing(seed: float) -> None:
    """Kills this process at one of its next calls that change files: before it, after it, or half-way through a write.

    Half of the time power fails as well. What was written and not made to last with fsync is then cut short, and the
    latest renamings and removals in directories that were not are undone.
    """
    draws = random.Random(seed)
    left, power_fails = draws.randrange(CALLS), draws.random() < 0.5
    paths: dict[int, Path] = {}  # of descriptors
    unsynced: set[Path | None] = set()  # files that may lose what is in them
    undo: list[Callable[[], Any]] = []

    def its_time() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    def die() -> None:
        nonlocal left
        left = 1 << 60  # what follows is not to be killed
        if power_fails:
            for path in unsynced:
                if path is not None and path.exists():
                    os.truncate(path, draws.randint(0, path.stat().st_size))
            for back in reversed(undo[draws.randint(0, len(undo)) :]):
                back()
        os.kill(os.getpid(), signal.SIGKILL)

    def deadly(name: str, note: Callable[..., None]) -> None:
        original = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            now = its_time()
            if now and draws.random() < 0.5:
                die()
            note(*arguments)
            result = original(*arguments, **options)
            if name == "open":
                paths[result] = Path(arguments[0])
            if now:
                die()
            return result

        setattr(os, name, call)

    def note_replaced(old: Any, new: Any) -> None:
        undo.append(partial(_put_back, Path(new), _content(Path(new))))
        if Path(old) in unsynced:
            unsynced.add(Path(new))

    def note_removed(path: Any, **_: Any) -> None:
        undo.append(partial(_put_back, Path(path), _content(Path(path))))

    def note_synced(descriptor: int) -> None:
        path = paths.get(descriptor)
        if path is not None and path.is_dir():
            undo.clear()
        unsynced.discard(path)

    class Torn(io.BufferedWriter):
        def write(self, data: Any, /) -> int:
            unsynced.add(paths[self.fileno()])
            if its_time():
                os.write(self.fileno(), data[: draws.randint(0, len(data))])
                die()
            return super().write(data)

    fdopen = os.fdopen
    os.fdopen = lambda file, mode="r", *rest: Torn(io.FileIO(file, mode)) if mode == "wb" else fdopen(file, mode, *rest)
    for name in ("open", "mkdir", "chmod"):
        deadly(name, lambda *_: None)
    deadly("fsync", note_synced)
    deadly("replace", note_replaced)
    deadly("unlink", note_removed)


def slow_disk(seconds: float) -> None:
    """Makes every fsync take a while."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow


def wild_clock(seed: int) -> None:
    """Makes the time of day jump by years, back and forth."""
    draws, now = random.Random(seed), time.time
    time.time = lambda: now() + draws.uniform(-3e8, 3e8)
    time.time_ns = lambda: int(time.time() * 1e9)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _put_back(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(content)
