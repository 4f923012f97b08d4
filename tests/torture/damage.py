"""Ways to damage a file."""

import hashlib
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from cotrain.experiments.checkpoint import DIGEST, decode
from cotrain.experiments.files import read_record, write_record

KINDS = ("flip", "cut", "empty", "append", "overwrite", "garbage", "zero a part", "zero", "swap", "lose a part")


def damaged(draws: random.Random, data: bytes) -> tuple[str, bytes]:
    """Other bytes, and what was done to the right ones."""
    kind, bad = "", data
    while bad == data:
        kind, size = draws.choice(KINDS), draws.choice((1, 8, 64, 512))
        place, other = sorted((draws.randrange(len(data)), draws.randrange(len(data))))
        head, part, tail = data[:place], data[place : place + size], data[place + size :]
        match kind:
            case "flip":
                bad = head + bytes([part[0] ^ (1 << draws.randrange(8))]) + data[place + 1 :]
            case "cut":
                bad = head
            case "empty":
                bad = b""
            case "append":
                bad = data + draws.choice((b"\0", b"\n", b" ", data, draws.randbytes(size)))
            case "overwrite":
                bad = head + draws.randbytes(len(part)) + tail
            case "garbage":
                bad = draws.randbytes(len(data))
            case "zero a part":
                bad = head + bytes(len(part)) + tail
            case "zero":
                bad = bytes(len(data))
            case "swap":
                bad = data[other:] + data[place:other] + head
            case _:
                bad = head + tail
    return kind, bad


def reseal(data: bytes, **changes: Any) -> bytes:
    """A checkpoint with other notes and a checksum that agrees."""
    notes, arrays = decode(data, Path())
    data = save(arrays, {"cotrain": "0" * 64 + json.dumps(notes | changes)})
    return data[: DIGEST.start] + hashlib.sha256(data).hexdigest().encode() + data[DIGEST.stop :]


def reseal_record(data: bytes, **changes: Any) -> bytes:
    """The same for a record."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record")
        path.write_bytes(data)
        write_record(path, read_record(path) | changes)
        return path.read_bytes()
