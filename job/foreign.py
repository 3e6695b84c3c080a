"""Reads and writes files in a folder into which a command also writes, which may be hostile. Every operation begins at
the descriptor of the folder, opens one part of the path after the other, and the kernel follows no links. Reading
follows a link whose target lies in the folder; writing follows none, and replaces what is in the way. Only regular
files are opened, so that no pipe or device can block the caller.

The kernel's own way would be openat2 with RESOLVE_BENEATH. But openat2 refuses the absolute links that commands make in
their own folders, older docker daemons block it, and it may be missing on laptops that rehearse. This module needs only
openat.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 20
CLONE = 0x40049409  # FICLONE, linux/fs.h: two files share blocks until one of them is written
MOST_LINKS = 40  # the most links that are followed for one path, as many as in Linux
MOST_DEEP = 100  # the most nested folders, because each needs an open descriptor while it is listed
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class ForeignFolder:
    """The folder at `path`, which is absolute and has trusted parents. The arguments of methods are paths relative to
    it. Methods raise OSError.
    """

    path: Path

    def open(self, path: Path) -> BinaryIO:
        """The regular file at `path`, opened for reading; links are followed within the folder."""
        return os.fdopen(self._open(path, stat.S_ISREG), "rb")

    @contextmanager
    def hold(self, path: Path) -> Iterator[Path]:
        """A context with a path at which other processes can open exactly this file."""
        with self.open(path) as file:
            held = Path(f"/proc/self/fd/{file.fileno()}")
            yield held if held.exists() else path

    def stat(self, path: Path) -> os.stat_result:
        """The state of the regular file at `path`, as `open` finds it."""
        with self.open(path) as file:
            return os.fstat(file.fileno())

    def is_file(self, path: Path) -> bool:
        """Whether `open` finds a regular file at `path`."""
        with suppress(OSError):
            return bool(self.stat(path))
        return False

    def files(self, path: Path, skipped: Collection[str] = ()) -> Iterator[tuple[str, Callable[[], os.stat_result]]]:
        """The names of regular files and links below the folder at `path`, with `/` between their parts. Each name is
        yielded with a function that returns the state of the file, or raises OSError if it is no regular file in the
        folder. Yields nothing if there is no such folder; folders named in `skipped` are not entered. The function can
        be called only before the next name is yielded.
        """
        try:
            top = self._open(path, stat.S_ISDIR)
        except OSError:
            return
        for parts, entry, _ in self._walk(top, (), skipped):
            if entry.is_symlink():
                yield "/".join(parts), lambda: self.stat(path.joinpath(*parts))  # noqa: B023 - used at once
            elif entry.is_file(follow_symlinks=False):
                yield "/".join(parts), lambda: entry.stat(follow_symlinks=False)  # noqa: B023 - used at once

    def names(self, path: Path) -> list[str]:
        """The names in the folder at `path`; empty if there is no folder."""
        try:
            folder = self._open(path, stat.S_ISDIR)
        except OSError:
            return []
        with _closing(folder):
            return sorted(os.listdir(folder))  # noqa: PTH208 - by descriptor

    def _walk(
        self, folder: int, above: tuple[str, ...], skipped: Collection[str] = ()
    ) -> Iterator[tuple[tuple[str, ...], os.DirEntry[str], int]]:
        """Every entry below `folder`, with the descriptor of the folder that contains it. Closes `folder`."""
        with _closing(folder), os.scandir(folder) as entries:
            for entry in entries:
                parts = (*above, entry.name)
                yield parts, entry, folder
                if entry.is_dir(follow_symlinks=False) and entry.name not in skipped and len(parts) < MOST_DEEP:
                    with suppress(OSError):  # the entry may have been removed or replaced meanwhile
                        yield from self._walk(os.open(entry.name, _FOLDER, dir_fd=folder), parts, skipped)

    def is_written(self, path: Path) -> bool | None:
        """Whether any process of the machine has the file open for writing, or has mapped it for writing. None if the
        system does not show this. The kernel grants a lease for reading only if there is no such process. The lease
        exists only for a moment. If another process opens the file during that time, it waits for the end of the lease,
        and this process gets a SIGIO. Files of another user need CAP_LEASE.
        """
        if not hasattr(fcntl, "F_SETLEASE"):
            return None
        with self.open(path) as file:
            try:
                fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except OSError as error:
                return True if error.errno == errno.EAGAIN else None
            fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return False

    def make(self, path: Path, mode: int = 0o777) -> None:
        """Makes a folder at `path`, and the folders above it."""
        with self._made(path) as folder:
            os.fchmod(folder, mode)

    def empty(self, path: Path) -> None:
        """Makes an empty folder at `path`; entries that cannot be removed stay."""
        with self._made(path) as folder:
            for name in os.listdir(folder):  # noqa: PTH208 - by descriptor
                with suppress(OSError):
                    _remove(name, folder)

    def write(self, path: Path, content: bytes, mode: int = 0o644) -> None:
        """Writes a new file at `path` in one step, replacing whatever was there."""
        temporary = f".{path.name}.{os.getpid()}"
        with self._made(path.parent) as folder:
            _remove(temporary, folder)
            with self._create(temporary, folder) as file:
                os.fchmod(file.fileno(), mode)
                file.write(content)
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
                    _remove(path.name, folder)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)

    def copy(self, source: Path | BinaryIO, target: Path) -> None:
        """Copies the bytes of `source`, a path or an open file, into a new file `target`; at least one of the two is in
        the folder. The files share blocks if the disk supports this, and holes stay holes.
        """
        if isinstance(source, Path):
            with self.open(source) if source.is_relative_to(self.path) else source.open("rb") as read:
                self.copy(read, target)
            return
        if target.is_relative_to(self.path):
            made = self._made(target.parent)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            made = _opened(target.parent)
        with made as folder, self._create(target.name, folder) as write:
            _copy(source.fileno(), write.fileno())

    def remove(self, path: Path) -> None:
        """Removes the file, folder or link at `path`, if there is one. The target of a link is not removed."""
        with suppress(FileNotFoundError):
            folder = self._open(path.parent, stat.S_ISDIR)
            with _closing(folder):
                _remove(path.name, folder)

    def remove_empty(self, path: Path) -> None:
        folder = self._open(path.parent, stat.S_ISDIR)
        with _closing(folder):
            os.rmdir(path.name, dir_fd=folder)

    def open_to_all(self, path: Path) -> None:
        """Gives everybody the right to read and write the folder at `path` and everything in it, as far as this process
        may do so.
        """
        with self._made(path) as top:
            _allow(top, 0o777)
            for _, entry, folder in self._walk(os.dup(top), ()):
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder or entry.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        opened = os.open(entry.name, _FOLDER if is_folder else _FILE, dir_fd=folder)
                        with _closing(opened):
                            _allow(opened, 0o777 if is_folder else 0o666)

    def make_pipe(self, path: Path) -> None:
        """Makes a new pipe for everybody at `path`, and replaces what was there."""
        with self._made(path.parent) as folder:
            _remove(path.name, folder)
            if os.mkfifo in os.supports_dir_fd:
                os.mkfifo(path.name, dir_fd=folder)
            else:  # macOS before 13
                os.mkfifo(path)
            pipe = _open_pipe(path.name, os.O_RDWR, folder)
            with _closing(pipe):
                os.fchmod(pipe, 0o666)

    def open_pipe(self, path: Path, way: int) -> int:
        """A descriptor of the pipe at `path`. Opening the pipe never blocks. `way` is os.O_RDONLY, O_WRONLY or
        O_RDWR.
        """
        folder = self._open(path.parent, stat.S_ISDIR)
        with _closing(folder):
            return _open_pipe(path.name, way, folder)

    def _open(self, path: Path, is_wanted: Callable[[int], bool]) -> int:
        """A descriptor of the file or folder at `path`, if `is_wanted` accepts its mode."""
        way, waiting, links = [os.open(self.path, _FOLDER)], [*reversed(path.relative_to(self.path).parts)], 0
        try:
            while waiting:
                part = waiting.pop()
                if part == "..":
                    if len(way) == 1:
                        raise _refused(path)
                    os.close(way.pop())
                    continue
                mode = os.stat(part, dir_fd=way[-1], follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    links += 1
                    target = Path(os.readlink(part, dir_fd=way[-1]))
                    if links > MOST_LINKS or (target.is_absolute() and not target.is_relative_to(self.path)):
                        raise _refused(path)
                    if target.is_absolute():
                        target = target.relative_to(self.path)
                        while len(way) > 1:
                            os.close(way.pop())
                    waiting += reversed(target.parts)
                elif stat.S_ISDIR(mode):
                    way.append(os.open(part, _FOLDER, dir_fd=way[-1]))
                elif waiting or not is_wanted(mode):
                    raise _refused(path)
                else:
                    way.append(os.open(part, _FILE, dir_fd=way[-1]))
            if not is_wanted(os.fstat(way[-1]).st_mode):  # the file was replaced between the two calls
                raise _refused(path)
            return way.pop()
        finally:
            for descriptor in way:
                os.close(descriptor)

    @contextmanager
    def _made(self, path: Path) -> Iterator[int]:
        """A descriptor of the folder at `path`. Makes missing folders. If something else has the name of one of them,
        it is replaced.
        """
        folder = os.open(self.path, _FOLDER)
        try:
            for part in path.relative_to(self.path).parts:
                if part == "..":
                    raise _refused(path)
                above, folder = folder, _enter(part, folder)
                os.close(above)
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _create(self, name: str, folder: int) -> Iterator[BinaryIO]:
        """A new file that replaces the old one; it is removed again if it cannot be written."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        try:
            with os.fdopen(made, "wb") as file:
                yield file
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise


def _refused(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is neither a regular file nor a folder, or it leads out of its folder", str(path))


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with _closing(descriptor):
        yield descriptor


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _enter(name: str, folder: int) -> int:
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
    os.unlink(name, dir_fd=folder)
    os.mkdir(name, dir_fd=folder)
    return os.open(name, _FOLDER, dir_fd=folder)


def _remove(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def _open_pipe(name: str, way: int, folder: int) -> int:
    pipe = os.open(name, way | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
    if stat.S_ISFIFO(os.fstat(pipe).st_mode):
        return pipe
    os.close(pipe)
    raise OSError(errno.EINVAL, "no pipe", name)


def _allow(descriptor: int, rights: int) -> None:
    with suppress(OSError):  # the file may belong to another user
        os.fchmod(descriptor, os.fstat(descriptor).st_mode & 0o7777 | rights)


def _copy(source: int, target: int) -> None:
    """Copies the bytes of one descriptor to another one, whose position is at the beginning."""
    size, at, disk = os.fstat(source).st_size, 0, os.fstatvfs(target)
    # refused if the file is larger than the disk, because a later upload would send its holes as zeros
    if size > disk.f_blocks * disk.f_frsize:
        raise OSError(errno.EFBIG, "it is longer than the disk that it would lie on")
    with suppress(OSError):
        fcntl.ioctl(target, CLONE, source)
        return
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # the rest of the file is a hole
                raise
            break
        end = min(os.lseek(source, at, os.SEEK_HOLE), size)
        while at < end and (part := os.pread(source, min(BLOCK, end - at), at)):
            at += os.pwrite(target, part, at)
        if at < end:  # the file was shortened meanwhile
            break
    os.ftruncate(target, size)
