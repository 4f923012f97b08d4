"""Reads NumPy archives (.npz) that nobody vouches for.

Nothing of them is executed or written to disk, and no memory is set aside on their word: members are read piece by
piece, through zip's checksum, and an array's shape must then account for every byte that was there.
"""

import io
import math
import os
import re
import stat
import zipfile
from pathlib import Path

import numpy as np

from cotrain.errors import Invalid

PIECE = 1 << 20  # bytes read at a time; the list of members, which comes at once, may have no more: some 10,000
LONGEST_HEADER = 10_000  # bytes, as NumPy has it
MAGIC = b"\x93NUMPY"
HEADER = re.compile(  # a dictionary with these three keys in any order; possessive, so that no input takes long
    rb"""\{(?:\ *+(?:
        'descr':\ *+'(?P<kind>[<>|=]?[biufc][1-9][0-9]?)'
        | 'fortran_order':\ *+(?P<columns>True|False)
        | 'shape':\ *+\((?P<shape>|N,|N(?:,\ *+N)++,?)\)
    )\ *+(?:,|(?=\}))){3}\ *+\}\ *+\n?+""".replace(b"N", b"(?:0|[1-9][0-9]{0,18})"),
    re.VERBOSE,
)


class Pieces(io.BufferedReader):
    """A file of which nobody can ask for much at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > PIECE:
            raise ValueError("too many members")
        return super().read(size)


def read_npz(path: Path | str, limit: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of numbers in an archive, by name, in this machine's byte order.

    Anything else is `Invalid`, as are arrays of more than `limit` bytes together, by default this machine's memory.
    """
    limit = _physical_memory() if limit is None else limit
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for somebody to write to it
            raise ValueError("not a plain file")
        with Pieces(io.FileIO(path)) as file:
            if file.read(4) not in (b"PK\3\4", b"PK\5\6"):  # zipfile also finds archives that begin further on
                raise ValueError("not a NumPy archive")
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                _check_members(members, status.st_size, limit)
                return {member.filename.removesuffix(".npy"): _read_member(archive, member) for member in members}
    except Exception as error:  # zipfile does not say what it may raise
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Invalid("NumPy archive", str(path), f"{' '.join(reason.split()):.200}") from error


def parse_npy(data: bytearray) -> np.ndarray:
    """The array of numbers in an .npy file, which shares its memory; a `ValueError` if it is anything else."""
    if data[:6] != MAGIC or data[6:8] not in (b"\1\0", b"\2\0", b"\3\0"):
        raise ValueError("not an .npy file")
    start = 10 if data[6] == 1 else 12
    length = int.from_bytes(data[8:start], "little")
    header = bytes(data[start : start + min(length, LONGEST_HEADER)])
    found = HEADER.fullmatch(header)
    if len(header) < length or found is None or None in found.groups():
        raise ValueError(f"not a plain array of numbers: {header[:80]!r}")
    try:
        kind = np.dtype(found["kind"].decode())
    except TypeError as error:
        raise ValueError(str(error)) from error
    shape = tuple(map(int, re.findall(rb"\d+", found["shape"])))
    needed = math.prod(shape) * kind.itemsize
    there = len(data) - start - length
    if needed != there:
        raise ValueError(f"an array {shape} of {kind.name} has {needed} bytes, and {there} are there")
    if 0 in shape and max(shape) > PIECE:
        raise ValueError(f"{shape} is an absurd shape")
    array = np.ndarray(shape, kind, data, start + length, order="F" if found["columns"] == b"True" else "C")
    if kind.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError("neither true nor false")
    return array.astype(kind.newbyteorder("="), copy=False)


def _check_members(members: list[zipfile.ZipInfo], size: int, limit: int) -> None:
    """Refuses what can be refused before anything is unpacked, in a file of `size` bytes."""
    names = set()
    for member in members:
        name = member.filename
        if not name.endswith(".npy") or "/" in name or "\\" in name:
            raise ValueError(f"{name[:80]!r} is not the name of an .npy file")
        if name in names:
            raise ValueError(f"{name[:80]!r} is there twice")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name[:80]!r} is compressed in an unusual way")
        names.add(name)
    if sum(member.compress_size for member in members) > size:
        raise ValueError("members overlap")
    unpacked = sum(member.file_size for member in members)
    if unpacked > limit:
        raise ValueError(f"{unpacked} bytes when unpacked, more than {limit}")


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """A member's array; its end, where zipfile compares the checksum, is always reached."""
    data = bytearray()
    with archive.open(member) as file:
        while piece := file.read(PIECE):
            data += piece
    try:
        return parse_npy(data)
    except ValueError as error:
        raise ValueError(f"{member.filename[:80]!r}: {error}") from error


def _physical_memory() -> int:
    """The bytes of memory that this machine has, where it tells."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 << 30
