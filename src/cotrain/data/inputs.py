"""Inputs from files that nobody vouches for: arrays, tables of numbers, images.

Nothing of them is executed. What is wrong with one is `Invalid`, with its name. An array in a file of its own is
mapped, and images are decoded when they are taken: no more of either need be in memory than is worked on.
"""

import csv
import io
import math
import mmap
import re
import sys
import warnings
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Float, Shaped, UInt8

from cotrain.data.examples import LARGEST, check_arrays, check_finite, floats
from cotrain.data.npz import MAGIC, parse_npy, read_npz
from cotrain.data.stream import Spec
from cotrain.errors import Invalid

STANDARD_INPUT = "-"
TABLES, IMAGES = (STANDARD_INPUT, ".csv"), ".png"
TESTS = "x and y, with the task of each example if there are several, or test_x_0, test_y_0, test_x_1, …"


@dataclass(frozen=True)
class Rows:
    """Examples in an array."""

    file: str
    x: Shaped[np.ndarray, "N ..."]
    prefix: str  # of the examples' names, before their places

    def __len__(self) -> int:
        return len(self.x)

    def name(self, example: int) -> str:
        """What an example is called."""
        return f"{self.prefix}{example}"

    def take(self, start: int, stop: int) -> Float[np.ndarray, "N ..."]:
        """Some of the examples, as floats."""
        x = floats(self.x[start:stop])
        finite = np.abs(x) <= LARGEST
        if not finite.all():
            bad, *_ = np.argwhere(~finite)
            wrong = float(x[tuple(bad)])
            raise Invalid(f"{self.file}, example {start + bad[0]}", wrong, "inputs must be finite 32-bit numbers")
        return x


@dataclass(frozen=True)
class Images:
    """Examples in files of their own."""

    files: Sequence[str]
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def name(self, example: int) -> str:
        """What an example is called."""
        return self.files[example]

    def take(self, start: int, stop: int) -> Float[np.ndarray, "N ..."]:
        """Some of the examples, as floats."""
        return floats(np.stack([_image(file, self.shape) for file in self.files[start:stop]]))


Inputs = Rows | Images


def read_inputs(files: Sequence[str], shape: tuple[int, ...], scale: float = 1.0) -> list[Inputs]:
    """The examples in files, in their order, for a network with inputs of a shape; tables are divided by `scale`."""
    if not 0 < scale < math.inf:
        raise Invalid("scale", scale, "choose a number above 0")
    if scale != 1 and not any(_kind(file) in TABLES for file in files):
        raise Invalid("scale", scale, "there is no CSV; other inputs come as they are, and bytes and images in [0, 1]")
    inputs: list[Inputs] = []
    for images, group in groupby(files, lambda file: _kind(file) == IMAGES):
        some = list(group)
        inputs += [Images(some, shape)] if images else [_rows(file, shape, scale, len(files) > 1) for file in some]
    return inputs


def pieces(inputs: Inputs, size: int) -> Iterator[tuple[list[str], Float[np.ndarray, "N ..."]]]:
    """The names of examples and the examples, so many at a time."""
    for start in range(0, len(inputs), size):
        stop = min(start + size, len(inputs))
        yield [inputs.name(i) for i in range(start, stop)], inputs.take(start, stop)


def read_tests(file: Path | str) -> dict[int | None, tuple[str, np.ndarray, np.ndarray]]:
    """The tests in a NumPy archive, by task: what they are called, inputs and labels. None is a task without a name."""
    arrays = read_npz(file)
    numbers = [int(found[1]) for name in arrays if (found := re.fullmatch(r"test_x_(0|[1-9][0-9]{0,8})", name))]
    pairs = {number: (f"test_x_{number}", f"test_y_{number}") for number in sorted(numbers)} or {None: ("x", "y")}
    missing = [name for pair in pairs.values() for name in pair if name not in arrays]
    if missing:
        raise Invalid("tests", str(file), f"{missing[0]} is missing; give an .npz file with {TESTS}")
    tests = {task: (f"{file}: {x}", arrays[x], arrays[y]) for task, (x, y) in pairs.items()}
    return _by_task(*tests[None], arrays["task"]) if None in tests and "task" in arrays else tests


def checked_test(name: str, x: np.ndarray, y: np.ndarray, spec: Spec, task: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, in the shape that a network takes, and labels of a task, if they are that."""
    x = shaped(name, x, spec.shape)
    check_arrays(name, x, y, spec.shape, spec.classes_of(task))
    check_finite(x, name)
    return x, y


def shaped(name: str, x: np.ndarray, shape: tuple[int, ...]) -> Shaped[np.ndarray, "N ..."]:
    """Examples in the shape that a network takes; rows of as many numbers are given it."""
    size = math.prod(shape)
    if x.dtype.kind not in "fiub" or x.dtype.itemsize > 8:
        raise Invalid(name, x.dtype.name, "inputs must be numbers of at most 64 bits")
    if x.ndim == 0 or (x.shape[1:] != shape and x.shape[1:] != (size,)):
        wanted = " or ".join(f"(examples, {', '.join(map(str, one))})" for one in dict.fromkeys([shape, (size,)]))
        raise Invalid(name, x.shape, f"the network takes {wanted}")
    if len(x) == 0:
        raise Invalid(name, x.shape, "give at least one example")
    return x.reshape(len(x), *shape)


def _by_task(
    name: str, x: np.ndarray, y: np.ndarray, task: np.ndarray
) -> dict[int | None, tuple[str, np.ndarray, np.ndarray]]:
    """The examples of each task, where a number says whose each of them is."""
    if task.ndim != 1 or task.dtype.kind not in "iu" or not x.shape[:1] == y.shape[:1] == task.shape:
        found = f"{task.dtype.name}{list(task.shape)}"
        raise Invalid(f"{name}, task", found, "give a whole number and a label for each example")
    if len(task) == 0:
        raise Invalid(name, x.shape, "give at least one example")
    return {int(one): (f"{name}, task {one}", x[task == one], y[task == one]) for one in np.unique(task)}


def _rows(file: str, shape: tuple[int, ...], scale: float, several: bool) -> Rows:
    name = _named(file)
    return Rows(name, shaped(name, _array(file, scale), shape), f"{name}:" if several else "")


def _array(file: str, scale: float) -> np.ndarray:
    """The numbers in a file."""
    with _reading(file):
        kind = _kind(file)
        if kind == STANDARD_INPUT:
            if sys.stdin is None:
                raise ValueError("it is closed")
            data: Any = sys.stdin.buffer.read()
            return parse_npy(data) if data.startswith(MAGIC) else _table(io.BytesIO(data)) / np.float32(scale)
        with _plain(file) as stream:
            if kind == ".csv":
                return _table(stream) / np.float32(scale)
            if kind == ".npy":
                empty = not stream.peek(1)
                data = b"" if empty else mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                return parse_npy(data)
        if kind != ".npz":
            raise ValueError("give .npy, .npz, .csv or .png, or - for standard input")
        arrays = read_npz(file)
        if "x" not in arrays and len(arrays) != 1:
            raise ValueError(f"of its {len(arrays)} arrays, none is called x")
        return arrays["x"] if "x" in arrays else next(iter(arrays.values()))


def _table(stream: BinaryIO) -> Float[np.ndarray, "lines columns"]:
    """Lines of numbers with commas between them; the first may be a heading, in which there are none."""
    values, width, first = array("f"), 0, True
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        lines = csv.reader(text)
        for cells in filter(None, lines):
            try:
                values.extend(map(float, cells))
            except ValueError:
                wrong = [cell for cell in cells if not _is_number(cell)]
                if not first or len(wrong) < len(cells):
                    raise ValueError(f"line {lines.line_num}: {wrong[0][:40]!r} is no number") from None
            else:
                width = width or len(cells)
            if width not in (0, len(cells)):
                raise ValueError(f"line {lines.line_num} has {len(cells)} numbers, and the ones before {width}")
            first = False
    if not width:
        raise ValueError("there are no numbers in it")
    return np.frombuffer(values, np.float32).reshape(-1, width)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _image(file: str, shape: tuple[int, ...]) -> UInt8[np.ndarray, "..."]:
    """An image's pixels, in the shape that a network takes, if nothing of them is lost by that."""
    from PIL import Image, UnidentifiedImageError

    grey = shape[2:] in ((), (1,))
    if len(shape) not in (2, 3) or not (grey or shape[2] == 3):
        raise Invalid(file, "an image", f"the network takes {shape}, not (rows, columns) or (rows, columns, 3)")

    def refuse(found: str) -> Invalid:
        return Invalid(file, found, f"the network takes {'grey' if grey else 'RGB'} images, {shape[0]} × {shape[1]}")

    with _reading(file), warnings.catch_warnings(), _plain(file) as stream:
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        depth = stream.read(25)[24:]  # bits a channel; of 16, Pillow may drop some
        stream.seek(0)
        try:
            image = Image.open(stream, formats=["PNG"])
        except UnidentifiedImageError:
            raise ValueError("it is no PNG image") from None
        if (image.height, image.width) != shape[:2]:
            raise refuse(f"{image.height} × {image.width}")
        if depth > b"\x08":
            raise refuse("16 bits a channel")
        if getattr(image, "n_frames", 1) > 1:
            raise refuse("an animation")
        if grey and image.mode in ("RGB", "RGBA"):
            raise refuse(image.mode)
        image.verify()  # the checksums, which decoding leaves alone
        stream.seek(0)
        pixels = np.asarray(Image.open(stream, formats=["PNG"]).convert("RGBA"))
    if pixels[..., 3].min() < 255:
        raise refuse(f"transparent {image.mode}")
    if grey and (pixels[..., :1] != pixels[..., 1:3]).any():
        raise refuse("a palette of colours")
    return pixels[..., 0].reshape(shape) if grey else pixels[..., :3]


def _named(file: str) -> str:
    return "standard input" if file == STANDARD_INPUT else file


def _kind(file: str) -> str:
    """What a file is by its name."""
    return file if file == STANDARD_INPUT else Path(file).suffix.lower()


@contextmanager
def _plain(file: str) -> Iterator[io.BufferedReader]:
    """Opens a file; a pipe would wait for somebody to write to it."""
    path = Path(file)
    if path.exists() and not path.is_file():
        raise ValueError("it is not a plain file")
    with path.open("rb") as stream:
        yield stream


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Says of a file what is wrong with it."""
    try:
        yield
    except Invalid:
        raise
    except Exception as error:  # neither csv nor Pillow says what it may raise
        reason = "it is no text" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or str(error)
        reason = " ".join(reason.split()) or type(error).__name__
        raise Invalid("input", _named(file), f"{reason:.200}") from error
