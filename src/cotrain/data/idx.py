"""Reads IDX, the file format of MNIST and its descendants: a magic number, the dimensions, the bytes."""

import math
import struct

import numpy as np

from cotrain.errors import Invalid

UNSIGNED_BYTE = 0x08


def read(data: bytes) -> np.ndarray:
    """Returns the labels `[N]` or images `[N, rows, columns]` in `data`, as a read-only uint8 view."""
    if len(data) < 4:
        raise Invalid("IDX length", len(data), "an IDX file starts with a magic number of 4 bytes")
    zero, kind, rank = struct.unpack_from(">HBB", data)
    if zero != 0 or rank not in (1, 3):
        raise Invalid("IDX magic number", data[:4].hex(), "00000801 (labels) or 00000803 (images) is wanted")
    if kind != UNSIGNED_BYTE:
        raise Invalid("IDX data type", hex(kind), f"only unsigned bytes, {UNSIGNED_BYTE:#x}, are read")
    start = 4 + 4 * rank
    if len(data) < start:
        raise Invalid("IDX length", len(data), f"the header alone is {start} bytes: the file is truncated")
    shape = struct.unpack_from(f">{rank}I", data, 4)
    if 0 in shape:
        raise Invalid("IDX dimensions", shape, "each is at least 1")
    size = start + math.prod(shape)
    if len(data) != size:
        fault = "truncated" if len(data) < size else "followed by other bytes"
        raise Invalid("IDX length", len(data), f"dimensions {shape} need {size} bytes: the file is {fault}")
    pixels = np.frombuffer(data, np.uint8, offset=start).reshape(shape)
    pixels.flags.writeable = False
    return pixels
