"""Trouble outside: full and read-only disks, data that vanish, two processes on one run, wrong clocks, a bad cache."""

import ctypes
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from torture.cases import MAIN, Tally, apart, arrays_of, damaged_files, differences, program, reference_of
from torture.child import Ended, alive, attempt
from torture.damage import damaged
from torture.faults import slow_disk, wild_clock
from torture.kills import kill, newest, news

NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000  # for unshare(2)
READ_ONLY, REMOUNT, BIND, ALL_PRIVATE = 1, 32, 4096, 16384 | 1 << 18  # for mount(2)
SIZE = 1 << 20  # bytes of the small disk; a run has a tenth of that


class Trouble(NamedTuple):
    """Something that can be wrong with a disk; making it twice does nothing more."""

    what: str
    says: str
    make: Callable[[Path], None]
    end: Callable[[Path], None]


def spoil_disks(times: int, home: Path, seed: int) -> Tally:
    """Fills a disk, and makes it read-only, before runs and under them. It is real, and gone with the child."""
    return apart("disks", partial(_spoil_disks, times, home, seed))


def _spoil_disks(times: int, home: Path, seed: int, tally: Tally) -> None:
    draws, disk = random.Random(seed), home / "disk"
    disk.mkdir()
    try:
        _mount(disk)
    except OSError as error:
        tally.notes.append(f"SKIPPED, since no disk can be mounted here ({error})")
        return
    for trouble in (
        Trouble("a full disk", "No space left on device", _fill, _empty),
        Trouble("a read-only disk", "Read-only file system", _lock, _unlock),
    ):
        for turn in range(times):
            _write_to(disk, trouble, 0 if turn == 1 else draws.randint(1, 15), home, tally)


def _write_to(disk: Path, trouble: Trouble, wait: int, home: Path, tally: Tally) -> None:
    """A run on a disk with which something is wrong after some checkpoints: it says so, and loses nothing."""
    out, before = disk / "out", list[str]()

    def meddle(child: int) -> None:
        news(out, wait, child)
        before.append(newest(out))
        while alive(child):
            trouble.make(disk)
            time.sleep(0.002)

    if wait == 0:
        trouble.make(disk)
    what = f"{trouble.what} after {wait} checkpoints"
    ended = attempt(program(MAIN, home, out), before=partial(slow_disk, 0.02), meddle=meddle)
    right, told = tally.look(what, ended, (1,)), f"{trouble.says}: '{out}" in ended.said
    kept, whole = newest(out) >= before[0], not damaged_files(disk)
    trouble.end(disk)
    resumed = tally.look(f"going on after {what}", attempt(program(MAIN, home, out)))
    same = not differences(out, reference_of(MAIN, home))
    tally.trial(f"{what} (code, told, kept, whole, resumed, identical)", right, told, kept, whole, resumed, same)
    shutil.rmtree(out)


def lose_data(home: Path, _seed: int) -> Tally:
    """The file of tasks vanishes under a run."""
    tally, place = Tally("other trouble, data that vanish"), home / "vanishing"
    whole, out = place / "whole", place / "out"
    once = tally.look("the undisturbed run", attempt(program(MAIN, place, whole)))
    vanish = partial(_vanish, out, arrays_of(place))
    ended = attempt(program(MAIN, place, out), before=partial(slow_disk, 0.02), meddle=vanish)
    tally.trial("twice well, identical", once, tally.look("without data", ended), not differences(out, whole))
    return tally


def start_twice(home: Path, _seed: int) -> Tally:
    """Two processes are at one run."""
    tally, out, ends = Tally("other trouble, two processes"), home / "both", list[Ended]()
    again = partial(_start_again, program(MAIN, home, out), out, ends)
    ends.append(attempt(program(MAIN, home, out), before=partial(slow_disk, 0.1), meddle=again))
    second, first = ends
    told = "another process is at work on this run" in second.said
    well = tally.look("the first", first), tally.look("the second", second, (1,))
    tally.trial("first, second, told, identical", *well, told, not differences(out, reference_of(MAIN, home)))
    return tally


def turn_clock(home: Path, seed: int) -> Tally:
    """The time of day jumps about, and files are of the future."""
    tally, out, wild = Tally("other trouble, a wrong clock"), home / "clock", partial(wild_clock, seed)
    attempt(program(MAIN, home, out), before=wild, meddle=partial(kill, out, 5, 0.0))
    for path in out.rglob("*"):
        os.utime(path, (2e9, 2e9))
    ended = attempt(program(MAIN, home, out), before=wild)
    tally.trial("resumed, identical", tally.look("going on", ended), not differences(out, reference_of(MAIN, home)))
    return tally


def spoil_cache(home: Path, seed: int) -> Tally:
    """Every compiled program that JAX has kept is damaged."""
    tally, draws, out = Tally("other trouble, damaged programs"), random.Random(seed), home / "cache"
    cache = Path(shutil.copytree(jax.config.values["jax_compilation_cache_dir"], home / "bad-cache"))
    for path in cache.glob("*-cache"):
        path.write_bytes(damaged(draws, path.read_bytes())[1])
    ended = attempt(
        program(MAIN, home, out), before=partial(jax.config.update, "jax_compilation_cache_dir", str(cache))
    )
    tally.trial("well, identical", tally.look("the run", ended), not differences(out, reference_of(MAIN, home)))
    return tally


OTHERS = (lose_data, start_twice, turn_clock, spoil_cache)


def _vanish(out: Path, file: Path, child: int) -> None:
    news(out, 3, child)
    file.unlink()


def _start_again(program: Callable[[], int], out: Path, ends: list[Ended], child: int) -> None:
    news(out, 2, child)
    ends.append(attempt(program))


def _fill(disk: Path) -> None:
    with suppress(OSError), (disk / "ballast").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _empty(disk: Path) -> None:
    (disk / "ballast").unlink()


def _lock(disk: Path) -> None:
    """Puts a read-only view of the disk over it; itself it cannot be made so while a file is open."""
    if not os.statvfs(disk).f_flag & os.ST_RDONLY:
        _call("mount", bytes(disk), bytes(disk), None, BIND, None)
        _call("mount", None, bytes(disk), None, REMOUNT | BIND | READ_ONLY, None)


def _unlock(disk: Path) -> None:
    _call("umount2", bytes(disk), 0)


def _mount(disk: Path) -> None:
    """Mounts a small disk that only this process and its children see; where that takes it, as their own root."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", NEW_MOUNTS | (NEW_USER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", None, b"/", None, ALL_PRIVATE, None)
    _call("mount", b"none", bytes(disk), b"tmpfs", 0, f"size={SIZE}".encode())


def _call(name: str, *arguments: bytes | int | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    whole = (ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments)
    if getattr(libc, name)(*whole) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
