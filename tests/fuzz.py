"""Throws damaged files at the readers: each may return what a file says, or refuse it, and may do nothing else.

    python tests/fuzz.py --seconds 20 [--seed N]

A finding is another error, a wrong answer, a read that takes over two seconds or over 1 GiB; its file is kept.
"""

import argparse
import contextlib
import hashlib
import io
import json
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

import cotrain
from cotrain.data import idx
from cotrain.data.npz import parse_npy, read_npz
from cotrain.errors import Damaged, Invalid
from cotrain.experiments.checkpoint import DIGEST, FORMAT, decode
from cotrain.experiments.config import Config
from cotrain.experiments.described import describe
from cotrain.experiments.files import SEAL, read_record
from cotrain.experiments.saved import decode as decode_learner
from cotrain.experiments.saved import encode
from cotrain.experiments.sealed import unseal

SECONDS = 2.0  # for one file
MEMORY = 1 << 30  # bytes, on top of what the process has before
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1)
DIGITS = (b"", b"0", b"1", b"2", b"-1", b"07", b"65536", b"4294967296", b"9223372036854775807", b"9" * 40, b"1e3")


class Reader(NamedTuple):
    """What there is to know of a reader in order to throw files at it."""

    valid: Callable[[], list[bytes]]  # files to damage
    read: Callable[[bytes], Any]
    refuses: type[Exception] | tuple[type[Exception], ...]  # how it refuses a file
    check: Callable[[bytes, Any], None]  # asserts that what was read is what the bytes say


class TooLong(BaseException):
    """A read that takes too long; no `Exception`, so that no reader swallows it."""


def readers(folder: Path) -> dict[str, Reader]:
    """The readers by name; `folder` is for those that read from a path."""

    def from_file(read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
        def write_and_read(data: bytes) -> Any:
            (folder / "input").write_bytes(data)
            return read(folder / "input")

        return write_and_read

    return {
        "idx": Reader(idx_files, idx.read, Invalid, check_idx),
        "npy": Reader(npy_files, lambda data: parse_npy(bytearray(data)), ValueError, check_npy),
        "npz": Reader(npz_files, from_file(read_npz), Invalid, check_npz),
        "checkpoint": Reader(
            checkpoint_files, lambda data: decode(sealed(data), folder), (Damaged, Invalid), check_checkpoint
        ),
        "learner": Reader(
            learner_files, lambda data: decode_learner(sealed(data), folder), (Damaged, Invalid), check_learner
        ),
        "record": Reader(record_files, lambda data: from_file(read_record)(sealed_record(data)), Damaged, check_record),
    }


def idx_files() -> list[bytes]:
    shapes = [(1,), (7,), (300,), (1, 1, 1), (2, 3, 4), (5, 28, 28)]
    return [struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(np.prod(shape)) for shape in shapes]


def check_idx(data: bytes, found: np.ndarray) -> None:
    rank = data[3]
    shape = [int.from_bytes(data[4 * i : 4 * i + 4], "big") for i in range(1, rank + 1)]
    assert data[:3] == b"\0\0\x08"
    assert list(found.shape) == shape
    assert found.tobytes() == data[4 + 4 * rank :]


def arrays() -> dict[str, np.ndarray]:
    return {
        "gates_0": np.arange(12, dtype=np.float32).reshape(2, 2, 3),
        "used_0": np.array([[True, False], [True, True]]),
        "train_y_0": np.arange(5),
        "columns": np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
        "scalar": np.array(1 + 2j),
        "empty": np.zeros((0, 3), np.uint8),
    }


def npy_files() -> list[bytes]:
    files = []
    for version in ((1, 0), (2, 0), (3, 0)):
        for array in arrays().values():
            np.lib.format.write_array(file := io.BytesIO(), array, version)
            files.append(file.getvalue())
    return files


def check_npy(data: bytes, found: np.ndarray) -> None:
    file = io.BytesIO(data)
    same(found, np.lib.format.read_array(file, allow_pickle=False))
    assert file.read() == b""


def npz_files() -> list[bytes]:
    files = []
    for save in (np.savez, np.savez_compressed):
        for some in ({}, arrays(), *({name: array} for name, array in arrays().items())):
            save(file := io.BytesIO(), **some)
            files.append(file.getvalue())
    return files


def check_npz(data: bytes, found: dict[str, np.ndarray]) -> None:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        assert list(found) == archive.files
        for name, array in found.items():
            same(array, archive[name])


def checkpoint_files() -> list[bytes]:
    notes = {"format": FORMAT, "numerics": 1, "phase": 2, "step": 40, "seeds": [0], "config": Config().record()}
    whole = {name: np.ascontiguousarray(array) for name, array in arrays().items() if name not in ("scalar", "columns")}
    return [safetensors.numpy.save(some, {"cotrain": "0" * 64 + json.dumps(notes)}) for some in ({}, whole)]


def learner_files() -> list[bytes]:
    spec = cotrain.Spec((2, 3), 3, 2)
    routed = cotrain.routing_network(spec, cotrain.dense(5), layers=1, experts=4, k=2)
    read = cotrain.routing_network(spec, cotrain.mlp((5, 4)), experts=3, k=2, router=cotrain.by_input(), one_head=True)
    methods = (cotrain.cotraining(cotrain.replay(routed, cotrain.reservoir(4))), cotrain.finetune(read))
    return [encode(cotrain.Learner(method)) for method in methods]


def check_learner(data: bytes, found: cotrain.Learner) -> None:
    notes, arrays = unseal(sealed(data), 1, "learner", Path())
    assert alike(describe(found.method), notes["method"])
    for name, array in unseal(encode(found), 1, "learner", Path())[1].items():
        same(array, arrays[name])


def alike(one: Any, other: Any) -> bool:
    """Whether two descriptions are the same, with numbers that are to be floats of 32 bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other or (isinstance(one, float) and np.float32(one) == np.float32(other))


def sealed(data: bytes) -> bytes:
    """A sealed file with a checksum that agrees, so that what comes after it is reached."""
    blank = data[: DIGEST.start] + b"0" * 64 + data[DIGEST.stop :]
    return data[: DIGEST.start] + hashlib.sha256(blank).hexdigest().encode() + data[DIGEST.stop :]


def check_checkpoint(data: bytes, found: tuple[dict[str, Any], dict[str, np.ndarray]]) -> None:
    expected = safetensors.numpy.load(sealed(data))
    assert found[1].keys() == expected.keys()
    for name, array in found[1].items():
        same(array, expected[name])


def record_files() -> list[bytes]:
    config = json.dumps(Config().record())
    texts = ["{}", f'{{\n"acc": 0.5,\n"config": {config},\n"files": {{"routing.npz": "\\u00e9"}}}}']
    return [text.removesuffix("}").encode() for text in texts]


def sealed_record(data: bytes) -> bytes:
    """The same for a record, of which `data` is all but the end."""
    return data + f'{SEAL}{hashlib.sha256(data).hexdigest()}"\n}}\n'.encode()


def check_record(data: bytes, found: dict[str, Any]) -> None:
    assert found == json.loads(data + b"}")


def same(one: np.ndarray, other: np.ndarray) -> None:
    assert one.dtype == other.dtype.newbyteorder("=")
    assert one.shape == other.shape
    assert one.tobytes() == other.astype(one.dtype).tobytes()


def damaged(draws: random.Random, data: bytes, other: bytes) -> bytes:
    """A file with one kind of damage, chosen at random; `other` is a file to take a part of."""
    place = draws.randrange(len(data) + 1)
    end = min(len(data), place + draws.choice((1, 2, 4, 8, 30, 200)))
    before, part, after = data[:place], data[place:end], data[end:]
    match draws.randrange(9):
        case 0:
            flipped = bytes(byte ^ (1 << draws.randrange(8)) for byte in part[:1])
            return before + flipped + part[1:] + after
        case 1:
            return before
        case 2:
            return before + after
        case 3:
            return before + draws.randrange(2, 4) * part + after
        case 4:
            return before + draws.randbytes(draws.choice((len(part), 1, 17))) + after
        case 5:
            start = draws.randrange(len(other) + 1)
            return before + other[start : start + len(part)] + draws.choice((after, other[start + len(part) :]))
        case 6:
            size = draws.choice((1, 2, 4, 8))
            number = draws.choice((*NUMBERS, len(data), len(data) + draws.randint(-40, 40))) % 256**size
            return before + number.to_bytes(size, draws.choice(("little", "big"))) + data[place + size :]
        case 7:
            size = draws.choice((1, 2, 4, 8))
            order = draws.choice(("little", "big"))
            number = int.from_bytes(data[place : place + size], order) + draws.randint(-3, 3)
            return before + (number % 256**size).to_bytes(size, order) + data[place + size :]
        case _:
            numbers = list(re.finditer(rb"[0-9]+", data))
            if not numbers:
                return before
            one = draws.choice(numbers)
            return data[: one.start()] + draws.choice(DIGITS) + data[one.end() :]


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Bounds the memory of this process, and makes the alarm clock an error."""

    def ring(*_):
        raise TooLong

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = resource.getrlimit(resource.RLIMIT_AS)
    clock = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, memory[1]))
    try:
        with warnings.catch_warnings(action="error"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.signal(signal.SIGALRM, clock)


def try_out(reader: Reader, data: bytes) -> str:
    """What a reader does with a file: "read", "refused", or what is wrong with that."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        found = reader.read(data)
    except reader.refuses as error:
        short_of_memory = isinstance(error.__cause__, MemoryError)
        return "over 1 GiB of memory" if short_of_memory else "more than one line" if "\n" in str(error) else "refused"
    except TooLong:
        return f"over {SECONDS:g} s"
    except Exception as error:
        return repr(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        reader.check(data, found)
    except Exception as error:
        return f"a wrong answer: {error!r}"
    return "read"


def fuzz(name: str, reader: Reader, seconds: float, seed: int, least: int = 0) -> int:
    """Damages files and has them read for some seconds, and at least so many; prints and returns what was found."""
    draws, files = random.Random(seed), reader.valid()
    counts = {"refused": 0, "read": 0, "findings": 0}
    end = time.monotonic() + seconds
    with bounded():
        while (time.monotonic() < end or sum(counts.values()) < least) and counts["findings"] < 20:
            data = draws.choice(files)
            for _ in range(draws.randint(0, 4)):
                data = damaged(draws, data, draws.choice(files))
            outcome = try_out(reader, data)
            if outcome in counts:
                counts[outcome] += 1
                continue
            counts["findings"] += 1
            with tempfile.NamedTemporaryFile(prefix=f"fuzz-{name}-", delete=False) as file:
                file.write(data)
            print(f"fuzz: {name}: {outcome:.300}; see {file.name}")
    parts = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    print(f"fuzz: {name}: {sum(counts.values())} inputs, {parts}")
    return counts["findings"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="for each reader")
    parser.add_argument("--least", type=int, default=0, help="inputs of each reader, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    memory = Path("/dev/shm")  # where writing is quick
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        known = readers(Path(folder))
        found = [fuzz(name, reader, options.seconds, options.seed, options.least) for name, reader in known.items()]
        return int(sum(found) > 0)


if __name__ == "__main__":
    sys.exit(main())
