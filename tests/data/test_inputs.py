"""Inputs from files: what is read, and what is refused."""

import io
import os
import struct
import sys
import tracemalloc
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from cotrain.data import npz
from cotrain.data.inputs import Images, Rows, checked_test, pieces, read_inputs, read_tests
from cotrain.data.stream import Spec
from cotrain.errors import Invalid

SHAPE = (2, 3)
GREY, RGB = (4, 5), (4, 5, 3)
PIXELS = np.arange(20, dtype=np.uint8).reshape(GREY) * 12
COLOURS = np.stack([PIXELS, PIXELS + 3, 255 - PIXELS], axis=2)
X = np.random.default_rng(0).normal(size=(5, *SHAPE)).astype(np.float32)


def read(*files, shape=SHAPE, scale=1.0, size=2):
    """The names and the examples in some files."""
    found = [piece for part in read_inputs(list(map(str, files)), shape, scale) for piece in pieces(part, size)]
    return [name for names, _ in found for name in names], np.concatenate([x for _, x in found])


def refused(*files, **options):
    """Why files are refused, in a line."""
    with pytest.raises(Invalid) as error:
        read(*files, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def saved(path, array):
    np.save(path, array)
    return path


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(x, heading=""):
    return heading + "".join(",".join(map(repr, map(float, row.ravel()))) + "\n" for row in x)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def png(path, pixels, mode=None, **options):
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(path, "PNG", **options)
    return path


# Arrays


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, ">f4", np.int8, np.int64, bool, np.uint8])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("flat", [False, True])
def test_an_array_is_read_and_given_the_networks_shape(tmp_path, kind, order, flat):
    x = (10 * np.abs(X)).astype(kind)
    path = saved(tmp_path / "x.npy", np.asarray(x.reshape(5, 6) if flat else x, order=order))
    names, found = read(path)
    assert names == ["0", "1", "2", "3", "4"]
    np.testing.assert_array_equal(
        found, x.astype(float).astype(np.float32) / np.float32(255 if kind == np.uint8 else 1)
    )


def test_an_array_in_a_file_of_its_own_is_mapped(tmp_path):
    path = saved(tmp_path / "x.npy", np.zeros((1000, 100, 100), np.uint8))
    tracemalloc.start()
    try:
        [rows] = read_inputs([str(path)], (100, 100))
        for _, x in pieces(rows, 10):
            assert x.shape == (10, 100, 100)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


def test_files_are_in_the_order_in_which_they_are_named(tmp_path):
    for part in (0, 1):
        png(tmp_path / f"{part}.PNG", PIXELS + np.uint8(part))
        saved(tmp_path / f"{part}.npy", np.full((3, *GREY), part + 10.0))
    files = [tmp_path / name for name in ("1.npy", "1.PNG", "0.PNG", "0.npy")]
    names, x = read(*files, shape=GREY)
    rows = [[f"{files[i]}:{j}" for j in range(3)] for i in (0, 3)]
    assert names == [*rows[0], str(files[1]), str(files[2]), *rows[1]]
    assert x[:, 0, 0].tolist() == pytest.approx([11, 11, 11, 1 / 255, 0, 10, 10, 10])
    assert [type(part) for part in read_inputs(list(map(str, files)), GREY)] == [Rows, Images, Rows]


def test_an_archive_has_x_or_one_array(tmp_path):
    path = tmp_path / "some.npz"
    np.savez(path, x=X, y=np.arange(5))
    np.testing.assert_array_equal(read(path)[1], X)
    np.savez(path, images=X)
    np.testing.assert_array_equal(read(path)[1], X)
    np.savez(path, images=X, y=np.arange(5))
    assert "of its 2 arrays, none is called x" in refused(path)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((5, 3, 2)), "(5, 3, 2) is not valid; the network takes (examples, 2, 3) or (examples, 6)"),
        (np.zeros((5, 7)), "(5, 7) is not valid; the network takes (examples, 2, 3) or (examples, 6)"),
        (np.zeros(SHAPE), "(2, 3) is not valid; the network takes (examples, 2, 3) or (examples, 6)"),
        (np.zeros(6), "(6,) is not valid"),
        (np.zeros(()), "() is not valid"),
        (np.zeros((0, 2, 3)), "(0, 2, 3) is not valid; give at least one example"),
        (np.zeros((5, 6), complex), "'complex128' is not valid; inputs must be numbers"),
        (np.array([{}] * 6, object), "not a plain array of numbers"),
        (np.array(["a"] * 6), "not a plain array of numbers"),
    ],
)
@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_other_arrays_are_refused_by_their_files_name(tmp_path, array, expected, kind):
    path = tmp_path / f"x.{kind}"
    (np.save if kind == "npy" else np.savez)(path, array)
    message = refused(path)
    assert str(path) in message
    assert expected in message


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1e39])
def test_what_is_no_number_for_jax_is_refused_by_its_place(tmp_path, wrong):
    x = X.astype(float)
    x[3, 1, 2] = wrong
    path = saved(tmp_path / "x.npy", x)
    assert refused(path) == f"{path}, example 3: {wrong} is not valid; inputs must be finite 32-bit numbers"


def test_every_shorter_array_is_refused(tmp_path):
    whole, path = npy(X), tmp_path / "x.npy"
    for size in [*range(0, len(whole), 3), len(whole) - 1]:
        assert str(path) in refused(written(path, whole[:size]))


def test_a_bomb_does_not_go_off(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((64 << 20) // 6 * 6, np.uint8).reshape(-1, 6))
    monkeypatch.setattr(npz, "_physical_memory", lambda: 1 << 20)
    tracemalloc.start()
    try:
        assert "bytes when unpacked, more than 1048576" in refused(tmp_path / "x.npz")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["nothing.npy", "nothing.npz", "nothing.csv", "nothing.png"])
def test_files_that_are_not_there_or_no_files_are_refused(tmp_path, name):
    path, shape = tmp_path / name, GREY if name.endswith("png") else SHAPE
    assert "No such file" in refused(path, shape=shape)
    path.mkdir()
    assert "not a plain file" in refused(path, shape=shape)
    path.rmdir()
    os.mkfifo(path)  # opening it would wait
    assert "not a plain file" in refused(path, shape=shape)


@pytest.mark.parametrize("name", ["x", "x.txt", "x.jpg", "x.pkl"])
def test_other_kinds_of_files_are_refused(tmp_path, name):
    assert "give .npy, .npz, .csv or .png" in refused(written(tmp_path / name, npy(X)))


# Tables


@pytest.mark.parametrize(
    "heading", ["", "a,b,c,d,e,f\n", "\ufeff", "\ufeffa,b,c,d,e,f\n", "\n\n", '"a,b",c,d,e,f,g\r\n', "label\n"]
)
def test_a_line_of_a_table_is_an_example(tmp_path, heading):
    names, x = read(written(tmp_path / "x.csv", table(X, heading)))
    assert names == ["0", "1", "2", "3", "4"]
    np.testing.assert_array_equal(x, X)


def test_tables_of_other_writers_are_read(tmp_path):
    x = np.arange(12).reshape(2, 2, 3)
    text = '0, 1,2.0,"3",4e0,+5\r\n\r\n6,7,8,9,10,11'
    np.testing.assert_array_equal(read(written(tmp_path / "x.csv", text))[1], x)


def test_a_table_is_divided_by_the_scale(tmp_path):
    bytes_ = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    one, other = written(tmp_path / "x.csv", table(bytes_)), saved(tmp_path / "x.npy", bytes_)
    np.testing.assert_array_equal(read(one)[1], bytes_)
    expected = read(other)[1]
    assert 0 < expected.max() < 0.1
    np.testing.assert_array_equal(read(one, scale=255)[1], expected)
    np.testing.assert_array_equal(read(one, other, scale=255)[1], np.concatenate([expected, expected]))
    assert "scale: 255 is not valid; there is no CSV" in refused(other, scale=255)


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf")])
def test_other_scales_are_refused(tmp_path, scale):
    assert "choose a number above 0" in refused(written(tmp_path / "x.csv", table(X)), scale=scale)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "there are no numbers in it"),
        ("\n\n", "there are no numbers in it"),
        ("a,b,c,d,e,f\n", "there are no numbers in it"),
        ("1,2,3,4,5,6\n1,2,3,4,5\n", "line 2 has 5 numbers, and the ones before 6"),
        ("1,2,3,4,5,6\n1,2,x,4,5,6\n", "line 2: 'x' is no number"),
        ("1,2,x,4,5,6\n", "line 1: 'x' is no number"),
        ("a,b,c,d,e,f\ng,h,i,j,k,l\n", "line 2: 'g' is no number"),
        ("1,2,3,4,5,\n", "line 1: '' is no number"),
        ("1;2;3;4;5;6\n1;2;3;4;5;6\n", "line 2: '1;2;3;4;5;6' is no number"),
        ("1,2,3\n4,5,6\n", "(2, 3) is not valid; the network takes (examples, 2, 3) or (examples, 6)"),
        ("1,2,3,4,5,nan\n", "example 0: nan is not valid"),
        ("1,2,3,4,5,6\n1,2,3,4,5,1e39\n", "example 1: inf is not valid"),
        (b"\xff\xfe1,2\n", "it is no text"),
        (npy(X), "it is no text"),
        ("9" * 200_000, "field larger"),
    ],
)
def test_other_tables_are_refused(tmp_path, content, expected):
    message = refused(written(tmp_path / "x.csv", content))
    assert str(tmp_path / "x.csv") in message
    assert expected in message


# Standard input


@pytest.fixture
def given_in(monkeypatch):
    def give(data):
        monkeypatch.setattr(sys, "stdin", data and SimpleNamespace(buffer=io.BytesIO(data)))

    return give


@pytest.mark.parametrize("data", [npy(X), npy(X.reshape(5, 6)), table(X).encode(), table(X, "a,b,c,d,e,f\n").encode()])
def test_standard_input_is_recognised_by_its_beginning(given_in, data):
    given_in(data)
    names, x = read("-")
    assert names == ["0", "1", "2", "3", "4"]
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize(
    ("data", "expected"),
    [(npy(X)[:-1], "are there"), (b"\x89PNG\r\n\x1a\n", "no text"), (b"\n", "no numbers"), (None, "closed")],
)
def test_other_standard_input_is_refused(given_in, data, expected):
    given_in(data)
    message = refused("-")
    assert "'standard input'" in message
    assert expected in message


# Images


def paletted(*colours):
    """An image of these colours, which are its palette."""
    image = Image.new("P", (5, 4))
    image.putpalette([channel for colour in colours for channel in colour])
    image.putdata([i % len(colours) for i in range(20)])
    return image


BITS = (PIXELS > 100) * np.uint8(255)
OPAQUE = np.dstack([COLOURS, np.full(GREY, 255, np.uint8)])


@pytest.mark.parametrize(
    ("image", "shape", "expected"),
    [
        (PIXELS, GREY, PIXELS),
        (PIXELS, (*GREY, 1), PIXELS[..., None]),
        (PIXELS, RGB, np.dstack([PIXELS] * 3)),
        (Image.fromarray(BITS).convert("1"), GREY, BITS),
        (Image.fromarray(BITS).convert("1"), RGB, np.dstack([BITS] * 3)),
        (Image.fromarray(PIXELS).convert("LA"), GREY, PIXELS),
        (paletted((7, 7, 7), (200, 200, 200)), GREY, np.resize([7, 200], GREY)),
        (paletted((1, 2, 3), (4, 5, 6)), RGB, np.resize([1, 2, 3, 4, 5, 6], RGB)),
        (COLOURS, RGB, COLOURS),
        (OPAQUE, RGB, COLOURS),
    ],
)
def test_an_image_is_read_where_nothing_of_it_is_lost(tmp_path, image, shape, expected):
    names, x = read(png(tmp_path / "one.png", image), shape=shape)
    assert names == [str(tmp_path / "one.png")]
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, expected[None].astype(np.float32) / np.float32(255))


def clear(pixels):
    """With one pixel that shows what is behind it."""
    image = Image.fromarray(pixels).convert("LA" if pixels.ndim == 2 else "RGBA")
    image.putpixel((0, 0), (*image.getpixel((0, 0))[:-1], 254))
    return image


@pytest.mark.parametrize(
    ("image", "shape", "found"),
    [
        (COLOURS, GREY, "'RGB'"),
        (np.zeros(RGB, np.uint8), GREY, "'RGB'"),
        (OPAQUE, GREY, "'RGBA'"),
        (paletted((7, 7, 7), (7, 8, 7)), GREY, "'a palette of colours'"),
        (clear(PIXELS), GREY, "'transparent LA'"),
        (clear(COLOURS), RGB, "'transparent RGBA'"),
        (PIXELS.astype(np.uint16) * 200, GREY, "'16 bits a channel'"),
        (PIXELS.T, GREY, "'5 × 4'"),
        (PIXELS[:3], GREY, "'3 × 5'"),
        (COLOURS[:, :4], RGB, "'4 × 4'"),
    ],
)
def test_an_image_of_another_size_or_mode_is_refused_by_name(tmp_path, image, shape, found):
    path = png(tmp_path / "one.png", image)
    kind = "RGB" if shape == RGB else "grey"
    assert refused(path, shape=shape) == f"{path}: {found} is not valid; the network takes {kind} images, 4 × 5"


def test_a_palette_with_a_hole_in_it_is_refused(tmp_path):
    path = png(tmp_path / "one.png", paletted((7, 7, 7), (9, 9, 9)), transparency=1)
    assert "'transparent P'" in refused(path, shape=GREY)


def test_16_bits_of_colour_are_refused_though_pillow_drops_half_of_them(tmp_path):
    pixels = b"".join(b"\0" + bytes(30) for _ in range(4))
    path = written(tmp_path / "one.png", raw_png(5, 4, pixels, depth=16, colour=2))
    with Image.open(path) as image:
        assert image.mode == "RGB"
    assert "'16 bits a channel'" in refused(path, shape=RGB)


def test_an_animation_is_refused(tmp_path):
    frames = [Image.fromarray(PIXELS + np.uint8(i)) for i in range(2)]
    frames[0].save(tmp_path / "one.png", save_all=True, append_images=frames[1:])
    assert "'an animation'" in refused(tmp_path / "one.png", shape=GREY)


@pytest.mark.parametrize("shape", [(20,), (3, 4, 5), (4, 5, 2), (1, 1, 4, 5)])
def test_networks_that_take_no_images_are_given_none(tmp_path, shape):
    path = png(tmp_path / "one.png", PIXELS)
    message = f"{path}: 'an image' is not valid; the network takes {shape}, not (rows, columns) or (rows, columns, 3)"
    assert refused(path, shape=shape) == message


def raw_png(width, height, pixels, depth=8, colour=0):
    """A PNG file that says what one wants it to say."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("side", [9_000, 9_900, 60_000])
def test_an_image_is_not_unpacked_beyond_its_size(tmp_path, side):
    path = written(tmp_path / "one.png", raw_png(side, side, bytes(1 << 20)))
    bomb = side > 9_000  # for Pillow, which does no more than warn of it at 9,900
    for shape in (GREY, (side, side)) if bomb else (GREY,):
        tracemalloc.start()
        try:
            assert ("decompression bomb" if bomb else "'9000 × 9000'") in refused(path, shape=shape)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\nIHDR", b"\xff\xd8\xff\xe0 JFIF", raw_png(0, 0, b"")],
)
def test_what_is_no_image_is_refused(tmp_path, content):
    path = written(tmp_path / "one.png", content)
    assert refused(path, shape=GREY) == f"input: {str(path)!r} is not valid; it is no PNG image"


def test_an_image_of_another_format_is_refused(tmp_path):
    Image.fromarray(PIXELS).save(tmp_path / "one.png", "BMP")
    assert "it is no PNG image" in refused(tmp_path / "one.png", shape=GREY)


def test_a_damaged_image_is_refused_or_the_same(tmp_path):
    path = png(tmp_path / "one.png", PIXELS)
    whole = path.read_bytes()
    expected = read(path, shape=GREY)[1]
    shorter = [whole[:size] for size in range(len(whole) - 12)]
    for data in shorter:
        refused(written(path, data), shape=GREY)
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        try:
            found = read(written(path, bytes(data)), shape=GREY)[1]
        except Invalid:
            continue
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["x.npy", "x.npz", "x.csv", "x.png"]),
    start=st.sampled_from([b"", npy(X)[:100], raw_png(5, 4, b"")[:40], b"PK\3\4", b"1,2,3,4,5,6\n"]),
    noise=st.binary(max_size=64),
)
def test_noise_is_read_or_refused(tmp_path, kind, start, noise):
    path = written(tmp_path / kind, start + noise)
    shape = GREY if kind == "x.png" else SHAPE
    try:
        _, x = read(path, shape=shape)
    except Invalid:
        return
    assert x.shape[1:] == shape


# Tests


def test_tests_are_x_and_y_or_those_of_each_task(tmp_path):
    path, y = tmp_path / "tests.npz", np.arange(5)
    np.savez(path, x=X, y=y)
    [(task, (name, x, labels))] = read_tests(path).items()
    assert (task, name) == (None, f"{path}: x")
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(labels, y)
    np.savez(path, x=X, y=y, task=[2, 0, 2, 0, 2])
    found = read_tests(path)
    assert list(found) == [0, 2]
    np.testing.assert_array_equal(found[2][1], X[::2])
    np.testing.assert_array_equal(found[0][2], [1, 3])
    np.savez(path, test_x_10=X[:2], test_y_10=y[:2], test_x_3=X, test_y_3=y, train_x_0=X, train_y_0=y)
    found = read_tests(path)
    assert list(found) == [3, 10]
    np.testing.assert_array_equal(found[10][1], X[:2])


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": X}, "y is missing"),
        ({"y": np.arange(5)}, "x is missing"),
        ({"train_x_0": X, "train_y_0": np.arange(5)}, "x is missing"),
        ({"test_x_0": X, "test_y_1": np.arange(5)}, "test_y_0 is missing"),
        ({"x": X, "y": np.arange(5), "task": np.zeros(4, int)}, "int64[4]"),
        ({"x": X, "y": np.arange(5), "task": np.zeros(5)}, "float64[5]"),
        ({"x": X, "y": np.arange(5), "task": np.zeros((5, 1), int)}, "int64[5, 1]"),
        ({"x": X, "y": np.arange(4), "task": np.zeros(5, int)}, "int64[5]"),
        ({"x": np.zeros(()), "y": np.arange(5), "task": np.zeros(5, int)}, "int64[5]"),
        ({"x": X[:0], "y": np.arange(0), "task": np.arange(0)}, "give at least one example"),
    ],
)
def test_other_tests_are_refused(tmp_path, arrays, expected):
    path = tmp_path / "tests.npz"
    np.savez(path, **arrays)
    with pytest.raises(Invalid) as error:
        read_tests(path)
    assert str(path) in str(error.value)
    assert expected in str(error.value)


def test_tests_are_checked_for_their_task():
    spec = Spec(SHAPE, 3, 2, (2, 3))
    labels = np.array([0, 1, 2, 0, 1])
    x, y = checked_test("it", X.reshape(5, 6), labels, spec, 1)
    np.testing.assert_array_equal(x, X)
    assert y is labels
    with pytest.raises(Invalid, match="it labels: 2 is not valid; labels must be 0 to 1"):
        checked_test("it", X, labels, spec, 0)
    with pytest.raises(Invalid, match="one label per input"):
        checked_test("it", X, labels[:4], spec, 1)
    with pytest.raises(Invalid, match="it, example 2: nan"):
        checked_test("it", np.where(np.arange(5)[:, None, None] == 2, np.nan, X), labels, spec, 1)
