import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cotrain.data import idx
from cotrain.errors import Invalid


def write(array):
    """Returns `array` as an IDX file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


shapes = st.one_of(st.tuples(st.integers(1, 9)), st.tuples(*[st.integers(1, 9)] * 3))
arrays = hnp.arrays(np.uint8, shapes)


@given(arrays)
def test_what_was_written_is_read(array):
    found = idx.read(write(array))
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, array)


def test_a_file_worked_by_hand():
    found = idx.read(bytes.fromhex("00000803 00000001 00000002 00000003 010203 0405ff"))
    assert found.tolist() == [[[1, 2, 3], [4, 5, 255]]]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_result_is_a_read_only_view(kind):
    data = kind(write(np.arange(4, dtype=np.uint8)))
    found = idx.read(data)
    assert not found.flags.writeable
    assert np.shares_memory(found, np.frombuffer(data, np.uint8))


@given(st.binary(max_size=64), st.sampled_from([b"", b"\0\0\x08\x01", b"\0\0\x08\x03"]))
def test_any_other_bytes_are_invalid(noise, magic):
    data = magic + noise
    try:
        array = idx.read(data)
    except Invalid:
        return
    assert write(array) == data


@given(arrays, st.data())
def test_every_shorter_file_is_invalid(array, data):
    whole = write(array)
    with pytest.raises(Invalid):
        idx.read(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("", "IDX length: 0"),
        ("00000802 00000001 00000001 07", "IDX magic number: '00000802'"),
        ("1f8b0803 00000001 07", "IDX magic number: '1f8b0803'"),
        ("00000d01 00000001 3f800000", "IDX data type: '0xd'"),
        ("00000803 00000001", "the header alone is 16 bytes: the file is truncated"),
        ("00000801 00000003 0102", "need 11 bytes: the file is truncated"),
        ("00000801 00000001 0102", "followed by other bytes"),
        ("00000801 00000000", "IDX dimensions: (0,)"),
        ("00000803 00000000 ffffffff ffffffff", "each is at least 1"),
        ("00000803 ffffffff ffffffff ffffffff 01", "truncated"),
    ],
)
def test_the_message_says_what_is_wrong(file, message):
    with pytest.raises(Invalid) as error:
        idx.read(bytes.fromhex(file))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
