"""Downloads from a local server: complete, interrupted, with and without ranges, wrong, and missing."""

import contextlib
import dataclasses
import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from slimstart.errors import DataError
from slimstart.lab.data import cifar, download
from slimstart.lab.data.download import fetch
from tests.datasets import cifar_files, random_arrays, small_cifar, write_archive

CONTENT = np.random.default_rng(0).bytes(700_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


@dataclass
class Server:
    """What it sends, and what it was asked for."""

    url: str = ""
    content: bytes = CONTENT
    ranges: bool = True
    says_length: bool = True
    length: str | None = None  # that it claims instead
    pause: float = 0.0  # seconds after each byte
    breaks: list[int] = field(default_factory=list)  # bytes after which each of the next answers ends
    asked: list[str | None] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            state.asked.append(wanted)
            if not self.path.endswith(".gz"):
                return self.send_error(404)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and state.ranges else 0
            if start >= len(state.content):
                return self.send_error(416)
            rest = state.content[start:]
            self.send_response(206 if start else 200)
            if state.says_length:
                self.send_header("Content-Length", state.length or str(len(rest)))
            self.end_headers()
            if state.pause:
                with contextlib.suppress(OSError):  # nobody listens any more
                    for byte in rest:
                        self.wfile.write(bytes([byte]))
                        time.sleep(state.pause)
            self.wfile.write(rest[: state.breaks.pop(0)] if state.breaks else rest)
            return None

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_port}/file.tar.gz"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def test_a_whole_file_with_progress(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    path = tmp_path / "new" / "folder" / "file"
    fetch(server.url, path, MD5, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    assert seen[-1] == (700_000, 700_000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    server.says_length = False
    fetch(server.url, tmp_path / "other", MD5, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (700_000, None)


def test_a_broken_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.breaks = [100_000, 300_000]
    fetch(server.url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", "bytes=400000-"]


def test_a_later_call_resumes_a_download(server: Server, tmp_path: Path) -> None:
    server.breaks = [100_000, 0]
    with pytest.raises(DataError, match="the connection broke after 100,000 of 700,000 bytes; try again to resume"):
        fetch(server.url, tmp_path / "file", MD5)
    assert [p.name for p in tmp_path.iterdir()] == ["file.part"]
    seen: list[tuple[int, int | None]] = []
    fetch(server.url, tmp_path / "file", MD5, lambda done, total: seen.append((done, total)))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked[-1] == "bytes=100000-"
    assert seen[0][0] > 100_000
    assert seen[-1] == (700_000, 700_000)


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"something else")
    server.ranges = False
    fetch(server.url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    server.breaks = [5000, 5000, 5000]
    with pytest.raises(DataError, match="the connection broke after 5,000 of 700,000 bytes"):
        fetch(server.url, tmp_path / "again", MD5)
    assert len(server.breaks) == 1  # an attempt that brings nothing new is the last


def test_of_two_that_start_together_one_downloads(server: Server, tmp_path: Path) -> None:
    server.breaks, together = [300_000, 200_000], threading.Barrier(3)

    def start() -> None:
        together.wait()
        fetch(server.url, tmp_path / "file", MD5)

    with ThreadPoolExecutor(3) as pool:
        for found in [pool.submit(start) for _ in range(3)]:
            found.result()
    assert server.asked == [None, "bytes=300000-", "bytes=500000-"]
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_complete_part_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    fetch(server.url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_file_with_a_wrong_checksum_is_removed(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + b"x"
    with pytest.raises(DataError, match=f"gave a file with the MD5 [0-9a-f]{{32}}, not {MD5}; it was removed"):
        fetch(server.url, tmp_path / "file", MD5)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file.part").write_bytes(CONTENT + b"too long")
    with pytest.raises(DataError, match="it was removed: try again"):
        fetch(server.url, tmp_path / "file", MD5)
    server.content = CONTENT
    fetch(server.url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_failed_downloads_are_reported(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not be fetched: HTTP Error 404"):
        fetch(server.url + ".asc", tmp_path / "file", MD5)
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(DataError, match=r"could not be fetched: .*taken"):
        fetch(server.url, tmp_path / "taken" / "file", MD5)


@pytest.mark.parametrize("length", ["abc", "-5", "99999999999999999999"])
def test_a_length_that_is_no_number_or_a_wrong_one(server: Server, tmp_path: Path, length: str) -> None:
    server.length = length
    fetch(server.url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_that_breaks_every_connection_is_left(server: Server, tmp_path: Path) -> None:
    server.breaks = [100] * 1000
    with pytest.raises(DataError, match="the connection broke after 600 of 700,000 bytes"):
        fetch(server.url, tmp_path / "file", MD5)
    assert len(server.asked) == 6


def test_a_slow_server_is_left(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.pause = 0.01
    monkeypatch.setattr(download, "_PATIENCE", 0.2)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"sent only \d+ bytes in \d s; try again later"):
        fetch(server.url, tmp_path / "file", MD5)
    assert time.monotonic() - began < 10


def test_a_server_that_sends_too_much_is_left(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_MAX_BYTES", 500_000)
    server.says_length = False
    with pytest.raises(DataError, match="sends more than 500,000 bytes"):
        fetch(server.url, tmp_path / "file", MD5)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_written_through(server: Server, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / "file.part").symlink_to("precious")
    with pytest.raises(DataError, match="is a link, which is not followed"):
        fetch(server.url, tmp_path / "file", MD5)
    assert (tmp_path / "precious").read_bytes() == b"mine"


def test_cifar_is_fetched_once(server: Server, tmp_path: Path) -> None:
    form = small_cifar("cifar10")
    write_archive(tmp_path / "a", form.python, cifar_files(form, random_arrays(form), binary=False))
    server.content = (tmp_path / "a").read_bytes()
    url = server.url.replace("file.tar.gz", "cifar-10-python.tar.gz")
    form = dataclasses.replace(form, url=url, md5=hashlib.md5(server.content).hexdigest())
    for _ in range(2):
        found = cifar.read(form, tmp_path / "data", download=True)
        assert found.train[1].tolist() == random_arrays(form)["train_labels"].tolist()
    assert len(server.asked) == 1


def test_without_a_network_the_error_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/cifar-10-python.tar.gz"
        with pytest.raises(DataError) as caught:
            cifar.read(small_cifar("cifar10", url=url), tmp_path, download=True)
    message = str(caught.value)
    for part in ("cifar10 is not in", url, "could not be fetched", "refused", "cifar-10-batches-py", "--data-dir"):
        assert part in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []
