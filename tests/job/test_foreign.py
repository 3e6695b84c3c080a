"""No operation in a folder that somebody else writes leads out of it, waits, or fills memory or disk."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet.job.foreign import MOST_DEEP, ForeignFolder


class Hostile:
    """A folder, `own`, and one beside it that is nobody's business."""

    def __init__(self, root: Path) -> None:
        self.own, self.outside = root / "own", root / "outside"
        for folder in (self.own, self.outside):
            (folder / "deep").mkdir(parents=True)
            (folder / "file").write_text(folder.name)
            (folder / "deep" / "file").write_text(folder.name)
        self.folder = ForeignFolder(self.own)

    def state(self) -> list[tuple[str, int, str]]:
        """Everything outside: names, modes, contents."""
        paths = sorted(self.outside.rglob("*"))
        return [(p.name, p.stat().st_mode, p.read_text() if p.is_file() else "") for p in paths]


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path)


def replaced(at: Path, kind: str, outside: Path) -> None:
    """Something that is no folder or file in the place of `at`."""
    if at.is_dir():
        at.rename(at.with_name("moved"))
    else:
        at.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(at)
    elif kind == "socket":
        os.mknod(at, stat.S_IFSOCK | 0o600)
    else:
        to = {"link": str(outside), "relative": os.path.relpath(outside, at.parent), "device": "/dev/zero"}
        at.symlink_to(to[kind])


READS: dict[str, Callable[[ForeignFolder, Path], object]] = {
    "open": lambda own, path: own.open(path).close(),
    "stat": lambda own, path: own.stat(path),
    "hold": lambda own, path: own.hold(path).__enter__(),
    "copy": lambda own, path: own.copy(path, path.parents[2] / "taken"),
    "is_written": lambda own, path: own.is_written(path),
}
KINDS = ("link", "relative", "pipe", "socket", "device")


@pytest.mark.parametrize("part", ["file", "folder"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", READS)
def test_nothing_is_read_but_regular_files_of_the_folder(hostile: Hostile, read: str, kind: str, part: str) -> None:
    path = hostile.own / "deep" / "file"
    replaced(
        path if part == "file" else path.parent, kind, hostile.outside / ("deep/file" if part == "file" else "deep")
    )

    with pytest.raises(OSError, match=r"."):
        READS[read](hostile.folder, path)
    assert not (hostile.own.parent / "taken").exists() or (hostile.own.parent / "taken").read_text() == ""


@pytest.mark.parametrize("way", ["file", "../own/file", "deep/../file", "{own}/file", "{own}/link2"])
def test_a_link_that_stays_in_the_folder_is_followed(hostile: Hostile, way: str) -> None:
    (hostile.own / "link2").symlink_to("file")
    (hostile.own / "link").symlink_to(way.replace("{own}", str(hostile.own)))
    if way.startswith(".."):  # out of the folder and in again: who knows what is there by then
        with pytest.raises(OSError, match=r"."):
            hostile.folder.open(hostile.own / "link")
    else:
        with hostile.folder.open(hostile.own / "link") as file:
            assert file.read() == b"own"


def test_links_that_lead_to_each_other_end(hostile: Hostile) -> None:
    (hostile.own / "a").symlink_to("b")
    (hostile.own / "b").symlink_to("a")
    with pytest.raises(OSError, match=r"."):
        hostile.folder.open(hostile.own / "a")
    assert sorted(name for name, _ in hostile.folder.files(hostile.own)) == ["a", "b", "deep/file", "file"]


WRITES: dict[str, Callable[[ForeignFolder, Path], object]] = {
    "make": lambda own, path: own.make(path),
    "empty": lambda own, path: own.empty(path),
    "write": lambda own, path: own.write(path, b"new", 0o666),
    "copy": lambda own, path: own.copy(own.path.parent / "new", path),
    "remove": lambda own, path: own.remove(path),
    "remove_empty": lambda own, path: own.remove_empty(path),
    "make_pipe": lambda own, path: own.make_pipe(path),
    "open_pipe": lambda own, path: own.open_pipe(path, os.O_RDWR),
    "open_to_all": lambda own, path: own.open_to_all(path.parent),
}


@pytest.mark.parametrize("part", ["file", "folder"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_written_emptied_or_opened_but_in_the_folder(
    hostile: Hostile, write: str, kind: str, part: str
) -> None:
    (hostile.own.parent / "new").write_text("new")
    path = hostile.own / "deep" / "file"
    replaced(
        path if part == "file" else path.parent, kind, hostile.outside / ("deep/file" if part == "file" else "deep")
    )
    before = hostile.state()

    try:
        WRITES[write](hostile.folder, path)
    except OSError:
        assert write in ("remove", "remove_empty", "open_pipe")

    assert hostile.state() == before
    if write in ("write", "copy"):
        assert not path.is_symlink()
        assert path.read_text() == "new"


def test_a_path_that_goes_up_leads_nowhere(hostile: Hostile) -> None:
    before = hostile.state()
    for act in (*READS.values(), *WRITES.values()):
        with pytest.raises(OSError, match=r"."):
            act(hostile.folder, hostile.own / "deep" / ".." / ".." / "outside" / "deep" / "file")
    assert hostile.state() == before


def test_the_folder_itself_turned_into_a_link_is_none(hostile: Hostile) -> None:
    hostile.own.rename(hostile.own.with_name("moved"))
    hostile.own.symlink_to(hostile.outside)
    with pytest.raises(OSError, match=r"."):
        hostile.folder.open(hostile.own / "file")
    with pytest.raises(OSError, match=r"."):
        hostile.folder.write(hostile.own / "file", b"new")
    assert list(hostile.folder.files(hostile.own)) == []


def test_folders_in_each_other_are_looked_through_so_far(hostile: Hostile) -> None:
    deepest = hostile.own.joinpath(*("d" for _ in range(MOST_DEEP + 50)))
    deepest.mkdir(parents=True)
    (deepest / "file").touch()
    assert sorted(name for name, _ in hostile.folder.files(hostile.own)) == ["deep/file", "file"]
    hostile.folder.open_to_all(hostile.own)
    hostile.folder.empty(hostile.own)
    assert list(hostile.own.iterdir()) == []


def test_everybody_may_write_what_is_opened_to_all(hostile: Hostile) -> None:
    (hostile.own / "deep" / "file").chmod(0o600)
    hostile.folder.open_to_all(hostile.own)
    assert [stat.S_IMODE(path.stat().st_mode) & 0o777 for path in (hostile.own, hostile.own / "deep")] == [0o777] * 2
    assert stat.S_IMODE((hostile.own / "deep" / "file").stat().st_mode) == 0o666


@pytest.mark.parametrize("shared", [True, False], ids=["blocks are shared where the disk can", "blocks are copied"])
@pytest.mark.parametrize("holes", [(), (0, 3 << 20), (1 << 20, 1 << 30)], ids=["none", "the first half", "nearly all"])
def test_a_copy_has_the_same_bytes_and_holes_stay_holes(
    hostile: Hostile, holes: tuple[int, int] | tuple[()], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr("gpufleet.job.foreign.CLONE", 0)
    body = os.urandom((2 << 20) + 17)
    source, target = hostile.own / "file", hostile.own.parent / "copy"
    with source.open("wb") as file:
        file.write(body)
        if holes:
            file.seek(holes[0] + holes[1])
            file.write(body)

    hostile.folder.copy(source, target)

    assert target.stat().st_size == source.stat().st_size
    assert target.stat().st_blocks * 512 <= 3 * len(body)
    with source.open("rb") as one, target.open("rb") as other:
        for at in (0, *((holes[0] + holes[1] - 1,) if holes else ())):
            one.seek(at)
            other.seek(at)
            assert one.read(3 << 20) == other.read(3 << 20)


def test_a_file_that_cannot_be_written_to_its_end_is_not_left(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("gpufleet.job.foreign._copy", full)
    (hostile.own.parent / "new").touch()
    with pytest.raises(OSError, match="full"):
        hostile.folder.copy(hostile.own.parent / "new", hostile.own / "file")
    assert not (hostile.own / "file").exists()


def test_who_writes_a_file_is_known_without_a_look_at_any_process(hostile: Hostile) -> None:
    path = hostile.own / "file"
    if hostile.folder.is_written(path) is None:
        pytest.skip("this system gives no leases")
    with path.open("rb"):
        assert hostile.folder.is_written(path) is False
    with path.open("r+b") as writing:
        assert hostile.folder.is_written(path) is True
        mapped = mmap.mmap(writing.fileno(), 0)
    assert hostile.folder.is_written(path) is True  # closed, and still written to
    mapped.close()
    assert hostile.folder.is_written(path) is False
