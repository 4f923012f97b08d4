"""Files that mean harm: NumPy archives that nobody vouches for, and the fuzzers."""

import io
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import fuzz
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cotrain import cli
from cotrain.data import npz
from cotrain.data.arrays import load_arrays
from cotrain.data.npz import parse_npy, read_npz
from cotrain.errors import Invalid

CENTRAL, END = b"PK\1\2", b"PK\5\6"
HEADER = "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }"


def refused(path, **options):
    """Why an archive is refused, in a line."""
    with pytest.raises(Invalid) as error:
        read_npz(path, **options)
    assert "\n" not in str(error.value)
    assert str(error.value).isprintable()
    assert len(error.value.valid) <= 200
    return error.value.valid


def npy(header=HEADER, data=bytes(48), version=1, length=None):
    """An .npy file with a header of one's own."""
    text = header if isinstance(header, bytes) else header.encode()
    size = struct.pack("<H" if version == 1 else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + data


def packed(members, compression=zipfile.ZIP_STORED):
    """A zip archive, as bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return bytearray(file.getvalue())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tasks.npz"


@pytest.fixture
def saved(path):
    """A file with the bytes of an archive."""

    def save(data):
        path.write_bytes(data)
        return path

    return save


# What is read

arrays = hnp.arrays(
    st.one_of(hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.complex_number_dtypes()),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


@settings(max_examples=60)
@given(arrays, arrays, st.sampled_from([np.savez, np.savez_compressed]), st.booleans())
def test_what_numpy_wrote_is_read(tmp_path_factory, one, other, save, columns):
    path = tmp_path_factory.mktemp("saved") / "some.npz"
    save(path, a=one, b=np.array(other, order="F" if columns else "C"))
    found = read_npz(path)
    assert list(found) == ["a", "b"]
    fuzz.same(found["a"], one)
    fuzz.same(found["b"], other)
    assert all(array.dtype.isnative and array.flags.writeable for array in found.values())


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        HEADER + " " * 40 + "\n",
        "{'shape': (2, 3), 'descr': '<f8', 'fortran_order': False}",
        "{'descr':'<f8','fortran_order':False,'shape':(2,3)}",
    ],
)
def test_headers_of_other_writers_are_read(header, version):
    data = np.arange(6.0)
    found = parse_npy(bytearray(npy(header, data.tobytes(), version)))
    np.testing.assert_array_equal(found, data.reshape(2, 3))


def test_a_header_ends_with_its_line():
    """NumPy takes other line ends for a file of Python 2, and warns: found by the fuzzer."""
    with pytest.raises(ValueError, match="not a plain array of numbers"):
        parse_npy(bytearray(npy(HEADER + "  \n  \n")))


def test_an_archive_of_many_pieces_is_read(path, monkeypatch):
    monkeypatch.setattr(npz, "PIECE", 4096)
    numbers = np.random.default_rng(0).normal(size=5000)
    for save in (np.savez, np.savez_compressed):
        save(path, a=numbers)
        np.testing.assert_array_equal(read_npz(path)["a"], numbers)


# Code


class Payload:
    """What, unpickled, makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["member", "npy", "pickle", "disguised"])
def test_a_pickle_is_not_run(path, tmp_path, kind):
    noticed = tmp_path / "noticed"
    objects = np.array([Payload(noticed)], dtype=object)
    if kind == "member":
        np.savez(path, train_x_0=objects)
        with np.load(path, allow_pickle=True) as archive:
            assert len(archive["train_x_0"]) == 1
        assert noticed.exists()  # the payload works
        noticed.unlink()
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, objects)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Payload(noticed)))
    else:
        path.write_bytes(packed([("a.npy", pickle.dumps(Payload(noticed)))]))
    refused(path)
    with pytest.raises(Invalid, match=r"^arrays: "):
        load_arrays(path)
    assert not noticed.exists()


@pytest.mark.parametrize(
    "header",
    [
        "__import__('pathlib').Path('noticed').touch()",
        "{'descr': __import__('pathlib').Path('noticed').touch(), 'fortran_order': False, 'shape': (2, 3)}",
    ],
)
def test_a_header_is_not_run(saved, tmp_path, monkeypatch, header):
    monkeypatch.chdir(tmp_path)
    assert "not a plain array of numbers" in refused(saved(packed([("a.npy", npy(header))])))
    assert [file.name for file in tmp_path.iterdir()] == ["tasks.npz"]


# Headers


def header_of(kind="'<f8'", order="False", shape="(2, 3)"):
    return f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (header_of(shape="(2, 4)"), "has 64 bytes, and 48 are there"),
        (header_of(shape="(2, 2)"), "has 32 bytes, and 48 are there"),
        (header_of(shape="(0, 3)"), "has 0 bytes, and 48 are there"),
        (header_of(shape="()"), "has 8 bytes, and 48 are there"),
        (header_of(shape="(-2, -3)"), "not a plain array"),
        (header_of(shape="(2, 3.0)"), "not a plain array"),
        (header_of(shape="(2, 03)"), "not a plain array"),
        (header_of(shape="(6)"), "not a plain array"),
        (header_of(shape="[2, 3]"), "not a plain array"),
        (header_of(shape="(True, 6)"), "not a plain array"),
        (header_of(shape="(4294967296, 4294967296, 6)"), "and 48 are there"),  # 2**64 · 6, which overflows to 0
        (header_of(shape="(9223372036854775807, 2)"), "and 48 are there"),
        (header_of(shape=f"({'9' * 30},)"), "not a plain array"),
        (header_of(shape=f"({'1, ' * 65}6)"), "maximum supported dimension"),
        (header_of(shape=f"({'9' * 5000},)"), "not a plain array"),
        (header_of(kind="'|O'"), "'|O'"),
        (header_of(kind="'<U2'"), "'<U2'"),
        (header_of(kind="'|S8'"), "'|S8'"),
        (header_of(kind="'|V8'"), "'|V8'"),
        (header_of(kind="'<M8[s]'"), "'<M8[s]'"),
        (header_of(kind="[('a', '<f8')]"), "[('a', '<f8')]"),
        (header_of(kind="'f8, f8'"), "not a plain array"),
        (header_of(kind="'<f3'"), "'<f3' not understood"),
        (header_of(kind="'\\x3cf8'"), "not a plain array"),
        (header_of(order="0"), "not a plain array"),
        ("{'descr': '<f8', 'shape': (2, 3)}", "not a plain array"),
        ("{'descr': '<f8', 'descr': '<f8', 'shape': (2, 3)}", "not a plain array"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), 'more': 1}", "not a plain array"),
        ("{'descr': '<f8' 'fortran_order': False 'shape': (2, 3)}", "not a plain array"),
        ("", "not a plain array"),
        ("(" * 5000, "not a plain array"),  # the parser's stack
        ("-" * 9000 + "1", "not a plain array"),  # the recursion of ast.literal_eval
        ("{" + " " * 9990, "not a plain array"),
        ("'\\d'", "not a plain array"),  # a warning of the compiler
        (b"\xff\xfe\x00{", "not a plain array"),
        (HEADER + " " * 10_000, "not a plain array"),
    ],
)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_header_that_lies_or_rambles_is_refused(saved, header, reason, version):
    message = refused(saved(packed([("a.npy", npy(header, version=version))])))
    assert message.startswith("'a.npy': ")
    assert reason in message


@pytest.mark.parametrize(
    "shape", ["(0, 1000000000000000000)", "(9223372036854775807, 0)", "(0, 9999999999999999999)", "(0, 2000000)"]
)
def test_an_empty_array_of_absurd_shape_is_refused(saved, shape):
    assert "absurd" in refused(saved(packed([("a.npy", npy(header_of(shape=shape), b""))])))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\1",
        b"NUMPY\1\0" + bytes(60),
        b"\x93NUMPY\4\0" + npy()[8:],
        b"\x93NUMPY\1\1" + npy()[8:],
        npy(length=10_001),
        npy(length=65535),
        npy(version=2, length=2**32 - 1),
        npy(length=len(HEADER) - 3),
        npy()[:-1],
        npy() + b"\0",
        b"hello",
    ],
)
def test_a_member_that_is_no_npy_file_is_refused(saved, data):
    assert "'a.npy': " in refused(saved(packed([("a.npy", data)])))


def test_every_shorter_npy_file_is_refused():
    whole = npy()
    for size in range(len(whole)):
        with pytest.raises(ValueError, match=r"."):
            parse_npy(bytearray(whole[:size]))


def test_what_is_neither_true_nor_false_is_refused(saved):
    header = header_of("'|b1'", shape="(3,)")
    assert read_npz(saved(packed([("a.npy", npy(header, b"\0\1\1"))])))["a"].tolist() == [False, True, True]
    assert "neither true nor false" in refused(saved(packed([("a.npy", npy(header, b"\0\1\2"))])))


# Members


@pytest.mark.parametrize(
    "name", ["../../x.npy", "/x.npy", "..\\x.npy", "a/b.npy", "folder/", "x", "x.NPY", "x.npy\x1b[2J", "x.npy/"]
)
def test_odd_names_are_refused_and_nothing_is_written(saved, tmp_path, name):
    path = saved(packed([(name, npy())]))
    before = sorted(tmp_path.parent.rglob("*"))
    assert "is not the name of an .npy file" in refused(path)
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_two_members_of_one_name_are_refused(saved):
    with pytest.warns(UserWarning, match="Duplicate"):
        data = packed([("a.npy", npy()), ("a.npy", npy())])
    assert "'a.npy' is there twice" in refused(saved(data))
    hidden = packed([("a.npy", npy()), ("a.npyXb", npy())]).replace(b"a.npyXb", b"a.npy\0b")
    assert "'a.npy' is there twice" in refused(saved(hidden))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_unusual_compression_is_refused(saved, method):
    assert "unusual" in refused(saved(packed([("a.npy", npy())], method)))


def test_an_unknown_compression_is_refused(saved):
    data = packed([("a.npy", npy())])
    struct.pack_into("<H", data, data.index(CENTRAL) + 10, 99)
    assert "unusual" in refused(saved(data))


@pytest.mark.parametrize("flag", [0x1, 0x20, 0x40])
def test_encrypted_members_are_refused(saved, flag):
    data = packed([("a.npy", npy())])
    struct.pack_into("<H", data, 6, flag)
    struct.pack_into("<H", data, data.index(CENTRAL) + 8, flag)
    assert re.search("encrypt|patched", refused(saved(data)))


def listed(entries, count, start):
    """A list of members at the place `start`, and the end of an archive."""
    count = min(count, 65535)
    return entries + struct.pack("<4s4H2IH", END, 0, 0, count, count, len(entries), start, 0)


def test_too_many_members_are_refused_before_they_are_listed(saved):
    data = packed([("a.npy", npy())])
    entry = bytes(data[data.index(CENTRAL) : data.index(END)])
    path = saved(b"PK\3\4" + listed(entry * 300_000, 300_000, 4))
    tracemalloc.start()
    try:
        assert refused(path) == "too many members"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_as_many_members_as_anybody_wants_are_read(saved):
    found = read_npz(saved(packed([(f"train_x_{i}.npy", npy()) for i in range(4000)])))
    assert len(found) == 4000


def test_overlapping_members_are_refused(saved):
    """As in Fifield's "A better zip bomb": many members share the same compressed bytes."""
    data = packed([("a.npy", npy(header_of("'|u1'", shape="(5000,)"), bytes(5000)))])
    start = data.index(CENTRAL)
    entry = bytes(data[start : data.index(END)])
    renamed = b"".join(entry.replace(b"a.npy", b"%c.npy" % letter) for letter in b"abcdefgh")
    assert refused(saved(data[:start] + listed(renamed, 8, start))) == "members overlap"


# Size


def test_the_limit_is_on_all_arrays_together(path, monkeypatch):
    np.savez(path, a=np.zeros(1000), b=np.zeros(1000))
    assert set(read_npz(path, limit=20_000)) == {"a", "b"}
    assert "bytes when unpacked, more than 10000" in refused(path, limit=10_000)
    monkeypatch.setattr(npz, "_physical_memory", lambda: 10_000)
    assert "more than 10000" in refused(path)


def test_by_default_the_limit_is_this_machines_memory():
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert npz._physical_memory() == pytest.approx(1024 * int(line.split()[1]), rel=0.01)


def bomb(declared):
    """64 MiB of zeros, packed to 64 KiB and said to be `declared` bytes."""
    member = npy(header_of("'|u1'", shape=f"({64 << 20},)"), bytes(64 << 20))
    data = packed([("a.npy", member)], zipfile.ZIP_DEFLATED)
    struct.pack_into("<I", data, 22, declared)
    struct.pack_into("<I", data, data.rindex(CENTRAL) + 24, declared)
    return data


@pytest.mark.parametrize(
    ("declared", "reason"), [(64 << 20, "when unpacked"), (2**32 - 2, "when unpacked"), (1000, "Bad CRC"), (0, "")]
)
def test_a_bomb_does_not_go_off(saved, declared, reason):
    path = saved(bomb(declared))
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    try:
        assert reason in refused(path, limit=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_memory_is_taken_for_what_is_there_and_not_for_what_is_said(saved):
    data = packed([("a.npy", npy(header_of(shape="(500000000,)")))], zipfile.ZIP_DEFLATED)
    struct.pack_into("<I", data, data.index(CENTRAL) + 24, 2**32 - 2)
    tracemalloc.start()
    try:
        refused(saved(data))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# Damage


def small(compression=zipfile.ZIP_STORED):
    return packed([("a.npy", npy(data=np.arange(6.0).tobytes()))], compression)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_every_shorter_archive_is_refused(saved, compression):
    whole = small(compression)
    for size in range(len(whole)):
        refused(saved(whole[:size]))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_no_flipped_bit_changes_a_number(saved, compression):
    whole = small(compression)
    expected = read_npz(saved(whole))["a"].tobytes()
    inside = range(35, whole.index(CENTRAL))  # past the member's own header
    for place in range(len(whole)):
        for bit in (1, 16, 128):
            data = bytearray(whole)
            data[place] ^= bit
            try:
                (found,) = read_npz(saved(data)).values()
            except Invalid:
                continue
            assert found.tobytes() == expected
            assert compression == zipfile.ZIP_DEFLATED or place not in inside


def test_a_wrong_checksum_is_noticed_wherever_the_damage(saved):
    data = packed([("a.npy", npy(header_of("'|u1'", shape=f"({3 << 20},)"), bytes(3 << 20)))])
    for place in (200, 1 << 20, (3 << 20) + 100):  # in the first piece, at the seam, in the last
        damaged = bytearray(data)
        damaged[place] ^= 4
        assert "Bad CRC-32" in refused(saved(damaged))


@pytest.mark.parametrize(
    "data",
    [b"", b"P", b"PK", b"PK\3\4", b"\x1f\x8b" + bytes(100), npy(), bytes(4096), b"#!/bin/sh\n" + small()],
    ids=range(8),
)
def test_what_is_no_archive_is_refused(saved, data):
    refused(saved(data))


def test_an_archive_of_nothing_is_read(saved):
    path = saved(END + bytes(18))
    assert read_npz(path) == {}
    with pytest.raises(Invalid, match=r"^tasks: 'an empty list'"):
        load_arrays(path)


# Paths


def outcome(path):
    """What becomes of a path within two seconds."""
    reader = fuzz.Reader(list, lambda data: read_npz(path), Invalid, lambda data, found: None)
    with fuzz.bounded():
        return fuzz.try_out(reader, b"")


def test_a_link_to_a_file_is_followed(path, tmp_path):
    np.savez(path, a=np.arange(3))
    (tmp_path / "link").symlink_to(path)
    assert read_npz(tmp_path / "link")["a"].tolist() == [0, 1, 2]
    assert read_npz(str(tmp_path / "link"))["a"].tolist() == [0, 1, 2]


def test_odd_paths_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "to-pipe").symlink_to(tmp_path / "pipe")
    paths = [tmp_path / name for name in ("pipe", "loop", "dangling", "to-pipe", "nowhere", ".", "x" * 300, "a\0b")]
    for path in (*paths, "/dev/zero", "/dev/null", "/dev/stdin", ""):
        assert outcome(path) == "refused", path
        refused(path)
    assert "plain file" in refused(tmp_path / "pipe")
    assert "plain file" in refused("/dev/zero")
    assert "levels of symbolic links" in refused(tmp_path / "loop")
    assert "No such file" in refused(tmp_path / "nowhere")


# The command line


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packed([("train_x_0.npy", npy())]), "train_y_0 is missing"),
        (packed([("train_x_7.npy", npy())]), "train_x_0 is missing"),
        (packed([("train_x_0.npy", npy(header_of(shape="(9, 9)")))]), "'train_x_0.npy': an array (9, 9)"),
        (packed([("../train_x_0.npy", npy())]), "'../train_x_0.npy' is not the name"),
        (small()[:-5], "not a zip file"),
        (b"\x80\x04N.", "not a NumPy archive"),
    ],
)
def test_the_command_line_says_why_in_a_line(saved, capsys, data, reason):
    assert cli.main(["run", "--arrays", str(saved(data))]) == 2
    message = capsys.readouterr().err
    assert message.startswith("cotrain: error: --arrays: ")
    assert message.count("\n") == 1
    assert reason in message


# The fuzzers


def test_the_fuzzers_find_nothing():
    program = [sys.executable, fuzz.__file__, "--seconds", "0", "--least", "100", "--seed", "0"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    for name, line in zip(
        ("idx", "npy", "npz", "checkpoint", "learner", "record"), done.stdout.splitlines(), strict=True
    ):
        counts = re.fullmatch(rf"fuzz: {name}: (\d+) inputs, (\d+) refused, (\d+) read, 0 findings", line)
        assert counts is not None, line
        assert min(map(int, counts.groups())) > 10


def faulty(fault):
    def read(data):
        if data == b"good":
            return data
        return fault(data)

    return fuzz.Reader(lambda: [b"good"], read, Invalid, lambda data, found: np.testing.assert_equal(found, data))


def too_much(data):
    return len(bytearray(2 * fuzz.MEMORY))


def too_much_but_hidden(data):
    try:
        return too_much(data)
    except MemoryError as error:
        raise Invalid("data", data, "less") from error


def two_lines(data):
    raise Invalid("data", "", "one\ntwo")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda data: data[10], "IndexError"),
        (lambda data: b"bad", "a wrong answer"),
        (lambda data: time.sleep(10), "over 0.05 s"),
        (too_much, "MemoryError"),
        (too_much_but_hidden, "over 1 GiB of memory"),
        (two_lines, "more than one line"),
    ],
)
def test_the_fuzzer_finds_faults(monkeypatch, tmp_path, capsys, fault, said):
    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    monkeypatch.setattr(fuzz.tempfile, "tempdir", str(tmp_path))
    assert fuzz.fuzz("faulty", faulty(fault), 0.2, 0) > 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert said in first
    saved = Path(first.split("see ")[-1]).read_bytes()
    assert saved != b"good"
    assert re.fullmatch(r"fuzz: faulty: \d+ inputs, 0 refused, \d+ read, [1-9]\d* findings", last)


def test_the_same_seed_damages_in_the_same_way():
    files = fuzz.npz_files()

    def some(seed):
        draws = random.Random(seed)
        return [fuzz.damaged(draws, draws.choice(files), draws.choice(files)) for _ in range(200)]

    assert some(1) == some(1) != some(2)
    assert len({bytes(data) for data in some(1)} - set(files)) > 150
