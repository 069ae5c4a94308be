"""Atomic writes: two writers of one file or one network, links, and what killed writers leave."""

import errno
import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch import nn

import slimstart
from slimstart.io import atomic
from slimstart.io.files import Folder, open_to_read, read_bytes
from tests.lines import stopped_at_every_line

CONTEXT = multiprocessing.get_context("fork")


def write_often(path: Path, byte: bytes, size: int, end: float) -> None:
    while time.monotonic() < end:
        atomic.write(path, byte * size)


@pytest.mark.slow
def test_two_writers_of_one_file_do_not_tear_it(tmp_path: Path) -> None:
    path, end = tmp_path / "file", time.monotonic() + 2.0
    atomic.write(path, b"a" * 200_000)
    sizes = {b"a": 200_000, b"b": 90_000}
    writers = [CONTEXT.Process(target=write_often, args=(path, byte, size, end)) for byte, size in sizes.items()]
    for writer in writers:
        writer.start()
    found = set()
    while time.monotonic() < end:
        content = path.read_bytes()
        found.add((content[:1], len(content), len(set(content))))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert found == {(byte, size, 1) for byte, size in sizes.items()}
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_killed_writer_leaves_is_removed_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def die(file: BinaryIO) -> None:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    killed = CONTEXT.Process(target=atomic.write_with, args=(path, die))
    killed.start()
    killed.join()
    (left,) = os.listdir(tmp_path)
    assert left.endswith(".partial")
    (tmp_path / "file.partial").write_bytes(b"somebody's own")

    def other_writer_comes(file: BinaryIO) -> None:
        file.write(b"new")
        atomic.write(path, b"between")  # which leaves the file that is being written, and removes the other
        assert left not in os.listdir(tmp_path)

    atomic.write_with(path, other_writer_comes)
    assert path.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["file", "file.partial"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "run" / "report.html"
    precious.write_bytes(b"mine")
    path.parent.mkdir()
    path.symlink_to(precious)
    (path.parent / "report.html.partial").symlink_to(precious)
    atomic.write(path, b"report")
    assert precious.read_bytes() == b"mine"
    assert path.read_bytes() == b"report"
    assert not path.is_symlink()


def test_a_folder_that_is_a_link_is_refused_where_it_is_not_allowed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    atomic.write(tmp_path / "link" / "file", b"allowed")
    with pytest.raises(OSError, match="is a link"):
        atomic.write_with(tmp_path / "link" / "other", lambda file: None, is_link_allowed=False)
    assert os.listdir(tmp_path / "elsewhere") == ["file"]


def test_errors_have_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as found:
        atomic.write(tmp_path / "missing" / "file", b"")
    assert found.value.filename == str(tmp_path / "missing" / "file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as also:
        atomic.write(tmp_path / "folder", b"")
    assert also.value.filename == str(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


def test_new_files_have_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    atomic.write(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_only_regular_files_are_read_and_no_more_than_asked_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_to_read(tmp_path / "pipe")
    with Folder(tmp_path) as folder, pytest.raises(OSError, match="not a regular file"):
        folder.open("pipe", os.O_RDONLY, "rb")
    with pytest.raises(IsADirectoryError):
        open_to_read(tmp_path)
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_bytes(tmp_path / "file", 4)


def save_again_and_again(path: Path, seed: int) -> None:
    torch.set_num_threads(1)
    networks = [narrow(10 * seed + number) for number in range(2)]
    for number in range(60):
        slimstart.save(networks[number % 2], path)


def dense() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


def narrow(seed: int) -> nn.Module:
    graph = slimstart.trace(dense(), torch.zeros(1, 3, 8, 8))
    mask = torch.rand(graph.num_units, generator=torch.Generator().manual_seed(seed)) < 0.5
    return slimstart.compact(dense(), graph.select(graph.costs.at_least_one(mask)))


def test_two_processes_save_one_network(tmp_path: Path) -> None:
    """Whoever reads in the meantime finds one of the networks, and so does whoever reads afterwards."""
    path = tmp_path / "net"
    slimstart.save(narrow(0), path)
    writers = [CONTEXT.Process(target=save_again_and_again, args=(path, seed)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers) or not reads:
        slimstart.load(path, dense)
        reads += 1
    assert [writer.exitcode for writer in writers] == [0, 0]
    slimstart.load(path, dense)
    assert os.listdir(tmp_path) == ["net.safetensors"]


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stopped_writer_leaves_an_old_or_a_new_network(is_killed: bool, tmp_path: Path) -> None:
    path, networks, found = tmp_path / "net", [narrow(0), narrow(1)], []
    weights = [next(one.parameters()).sum().item() for one in networks]
    stopped = stopped_at_every_line(
        lambda: slimstart.save(networks[1], path), lambda: slimstart.save(networks[0], path), is_killed
    )
    for _ in stopped:
        found.append(weights.index(next(slimstart.load(path, dense).parameters()).sum().item()))
    assert found == sorted(found)
    assert set(found) == {0, 1}
    gc.collect()  # closes what interrupts have left open
    slimstart.save(networks[0], path)
    assert os.listdir(tmp_path) == ["net.safetensors"]


def write_folder(path: Path, content: str, names: str) -> None:
    with atomic.replacing(path, "[a-c]") as new:
        for name in names:
            (new / name).write_text(content)


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stopped_writer_of_a_folder_leaves_all_old_or_all_new_files(is_killed: bool, tmp_path: Path) -> None:
    path, found = tmp_path / "folder", []
    path.mkdir()
    (path / "own").write_text("somebody's own")

    def seen() -> tuple[str, str]:
        folder = atomic.newest(path)
        names = "".join(name for name in "abc" if (folder / name).exists())
        contents = {(folder / name).read_text() for name in names}
        assert len(contents) == 1
        return contents.pop(), names

    for _ in stopped_at_every_line(
        lambda: write_folder(path, "new", "bc"), lambda: write_folder(path, "old", "ab"), is_killed
    ):
        found.append(seen())
    old, new = ("old", "ab"), ("new", "bc")
    assert found == [old] * found.count(old) + [new] * found.count(new)
    assert set(found) == {old, new}
    write_folder(path, "old", "ab")
    assert seen() == old
    assert sorted(os.listdir(path)) == ["a", "b", "own"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_folder_is_unchanged_after_an_error(error: type[BaseException], tmp_path: Path) -> None:
    write_folder(tmp_path, "old", "ab")

    def fail() -> None:
        with atomic.replacing(tmp_path, "[a-c]") as new:
            (new / "b").write_text("new")
            raise error

    with pytest.raises(error):
        fail()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert (tmp_path / "b").read_text() == "old"


def test_a_folder_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", none)
    write_folder(tmp_path / "deep" / "folder", "old", "ab")
    write_folder(tmp_path / "deep" / "folder", "new", "bc")
    assert sorted(os.listdir(tmp_path / "deep" / "folder")) == ["b", "c"]
    assert (tmp_path / "deep" / "folder" / "b").read_text() == "new"
