"""Files that appear whole or not at all, and records that know when they are damaged."""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cotrain.errors import Damaged

LIMIT = 1 << 28  # bytes of a record; one of a thousand tasks has a tenth of that
SEAL = ',\n"sha256": "'  # begins the last line of a record


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file by way of a temporary one beside it: whatever happens, the old file is there or the new one.

    A process that is killed meanwhile leaves the temporary one (see `leftovers`). What is there and no plain file, as a
    device, stays what it is.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is not a plain file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException as error:
        with suppress(OSError):
            Path(name).unlink()
        if isinstance(error, OSError) and error.filename is None:  # as of a full disk
            error.filename = str(path)
        raise
    _sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """The same for text, which ends with a new line."""
    write_bytes(path, text.encode() + b"\n")


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes JSON with a line for each entry, and a checksum of all lines as the last."""
    lines = (f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in record.items())
    text = "{\n" + ",\n".join(lines)
    write_text(path, f'{text}{SEAL}{_digest(text.encode())}"\n}}')


def read_record(path: Path) -> dict[str, Any]:
    """Reads what `write_record` has written, to the byte; what anything else has written is damaged."""
    text, seal, end = read_bytes(path, LIMIT).rpartition(SEAL.encode())
    if not seal:
        raise Damaged(path, "it has no checksum")
    if end != f'{_digest(text)}"\n}}\n'.encode():
        raise Damaged(path, "its checksum does not agree with its content")
    try:
        record = json.loads(text + b"\n}", parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"it is not a record ({error})") from error
    if not isinstance(record, dict):
        raise Damaged(path, "it is not a record")
    return record


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a plain file that is not absurdly large."""
    if path.exists() and not path.is_file():
        raise Damaged(path, "it is not a file")
    if path.stat().st_size > limit:
        raise Damaged(path, f"it has more than {limit} bytes")
    return path.read_bytes()


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def leftovers(directory: Path) -> list[Path]:
    """What writes that were cut short have left in a directory."""
    return sorted(directory.glob(".*.part"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _sync_directory(directory: Path) -> None:
    """Makes a renaming last, where the system can."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
