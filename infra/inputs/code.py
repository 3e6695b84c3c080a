"""Packs the folder of a command's code into one file for the bucket: the files that git would ship, with uncommitted
changes. The module writes nothing into the folder or git's index. The same files give the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from gpufleet.infra.definition.loader import of_project
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError, GpufleetError, Problem
from gpufleet.infra.inputs import archive, git
from gpufleet.infra.inputs.folders import FOLDER
from gpufleet.job import atomic, progress
from gpufleet.job.contract.bucket import CODE

if TYPE_CHECKING:
    from gpufleet.job.kind.common import Code

MIB = 1024 * 1024
LARGEST = 5  # if the files are too large together, a message names this many of the largest
_LEFT_OUT = (".git", "__pycache__")
ENVIRONMENTS = (".venv", "venv")  # folders in which the code may have its own Python
_ENVIRONMENT = "pyvenv.cfg"  # a folder with this file is a virtual environment, which works only at its own path


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """The files and links of a folder that are to be uploaded, by name. `commit`: the commit of its repository; None if
    it has none.
    """

    folder: Path
    files: dict[str, Path]
    commit: str | None
    changed: bool  # whether the folder differs from that commit, for example by untracked files

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values() if not path.is_symlink())


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """The archive of a tree, as a file in the project's .gpufleet/."""

    tree: Tree
    file: Path
    sha256: str

    def input_entry(self) -> dict[str, Any]:
        """The input's entry in run.json."""
        size = self.file.stat().st_size
        files = [{"name": CODE, "bytes": size, "sha256": self.sha256}]
        git_state = {"commit": self.tree.commit, "changed": self.tree.changed}
        return {"uri": None, "sha256": self.sha256, "files": files, **git_state}


def read(definition: StackDefinition, root: Path) -> Tree | None:
    """The files that `definition` ships; None if the image has all code. Raises DefinitionError if the folder is
    missing or too large.
    """
    if (code := definition.job.parameters.demands.code) is None:
        return None
    folder = root / code.folder
    if not folder.is_dir():
        raise _refused(definition, code.folder, "a folder that exists", f"There is no {folder.resolve()}.")
    commit = git.ask(folder, "rev-parse", "--verify", "-q", "HEAD")
    ours = _projects_own(folder, root)
    parts = list(_repositories(folder))
    files = {
        name: path for name, path in sorted(_named(parts)) if not ours(name) and not _is_excluded(name, code.exclude)
    }
    tree = Tree(
        folder=folder,
        files=files,
        commit=commit.decode().strip() if commit else None,
        changed=bool(commit) and any(git.status(part, "--", ".") for _, part, _ in parts),
    )
    if not files:
        raise _refused(definition, code.folder, "a folder with files", "No file in it would be shipped.")
    if tree.bytes > code.max_mib * MIB:
        raise _refused(definition, _size(tree.bytes), *_too_large(tree, code))
    for name, path in files.items():
        if path.is_symlink() and not _target_inside(path, folder):
            hint = (
                f"{name} leads to {path.resolve()}: put a copy in its place, or name it under job.code.exclude."
                " Data belongs under storage.inputs."
            )
            raise _refused(definition, code.folder, "a folder that contains all of its code", hint)
    return tree


def pack(tree: Tree, root: Path) -> Packed:
    """The tree's archive, in the project `root`. Raises DefinitionError if a file changes while it is packed."""
    own = root / FOLDER
    own.mkdir(parents=True, exist_ok=True)
    unfinished = own / f"code-{os.getpid()}.tar.gz~"
    try:
        with unfinished.open("wb") as target:
            _write(tree, target)
        sha256 = atomic.sha256(unfinished)
        file = own / f"code-{sha256}.tar.gz"
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return Packed(tree=tree, file=file, sha256=sha256)


def programs(definition: StackDefinition, root: Path) -> Path | None:
    """The folder that comes first on the PATH of a command on this machine. This is the folder of `rehearsal.python`,
    or that of the environment in the code's folder, or that of the environment in which gpufleet was installed beside
    the user's packages, in this order. None if there is none of these; the command then uses the system's programs.
    Raises GpufleetError.
    """
    if definition.python:
        python = root / definition.python
        if not python.is_file():
            raise GpufleetError(
                f"{definition.source}: rehearsal.python: there is no file {definition.python}; name the interpreter"
                " that has what the command imports, such as ../my-model/.venv/bin/python"
            )
        # the link is not followed, because the Python of an environment is a link to another Python
        return python.absolute().parent
    code = definition.job.parameters.demands.code
    places = [root / code.folder / name / "bin" for name in ENVIRONMENTS] if code else []
    if Path(__file__).is_relative_to(sys.prefix):  # false in a clone, whose environment has none of the user's packages
        places.append(Path(os.environ.get("VIRTUAL_ENV", sys.prefix)) / "bin")
    return next((place.absolute() for place in places if (place / "python").exists()), None)


def digest(definition: StackDefinition, root: Path) -> str:
    """The hash of the archive of the command's code as it is now; empty if the image has all code, or the code cannot
    be packed.
    """
    try:
        tree = read(definition, root)
        hashing = _Hashing()
        if tree is not None:
            _write(tree, cast(BinaryIO, hashing))
    except (DefinitionError, OSError):
        return ""
    return "" if tree is None else hashing.sha256.hexdigest()


def unpack(packed: Packed, folder: Path) -> None:
    """Unpacks the code as a node does."""
    with tarfile.open(packed.file) as tar:
        tar.extractall(folder, filter="data")


class _Hashing:
    """A writable file that only hashes what is written."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        return len(content)


def _write(tree: Tree, target: BinaryIO) -> None:
    with archive.packing(target, tarfile.GNU_FORMAT) as tar, progress.shown("packing code", tree.bytes) as advance:
        for name, path in tree.files.items():
            _add(tar, name, path, tree.folder)
            advance(0 if path.is_symlink() else path.stat().st_size)


def _add(tar: tarfile.TarFile, name: str, path: Path, folder: Path) -> None:
    """Adds a file, without time and owner. Like git, it keeps only the right to execute from the file's mode."""
    entry = tarfile.TarInfo(name)
    if path.is_symlink() and (target := _target_inside(path, folder)):
        entry.type = tarfile.SYMTYPE
        entry.linkname = os.path.relpath(target, path.parent.resolve())
        tar.addfile(entry)
        return
    with path.open("rb") as content:
        status = os.fstat(content.fileno())
        entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
        tar.addfile(entry, content)


def _target_inside(link: Path, folder: Path) -> Path | None:
    """The target of a link; None if it is outside of the folder."""
    target = link.resolve()
    return target if target.is_relative_to(folder.resolve()) else None


def files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields files and links with their names, except those in virtual environments. If the folder is in git, these are
    the files that git tracks or would track; otherwise they are all files.
    """
    return _named(_repositories(folder))


def _repositories(folder: Path, above: str = "") -> Iterator[tuple[str, Path, set[str]]]:
    """Yields, for the folder and each repository nested in it, (prefix of its files' names, its path, the names)."""
    listed = git.ask(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed == b"./\0":  # the parent's word for a submodule that is not checked out
        listed = None
    names = {os.fsdecode(name) for name in listed.split(b"\0") if name} if listed else set(_walk(folder))
    environments = tuple(name.removesuffix(_ENVIRONMENT) for name in names if name.endswith(f"/{_ENVIRONMENT}"))
    names = {
        name for name in names if not name.startswith(environments) and not (folder / name / _ENVIRONMENT).exists()
    }  # a link to an environment is treated as a file
    yield above, folder, names
    for name in names:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            yield from _repositories(folder / name, f"{above}{name.rstrip('/')}/")


def _named(parts: Iterable[tuple[str, Path, set[str]]]) -> Iterator[tuple[str, Path]]:
    for above, folder, names in parts:
        for name in names:
            if (folder / name).is_file() or ((folder / name).is_symlink() and (folder / name).exists()):
                yield above + name, folder / name


def _projects_own(folder: Path, root: Path) -> Callable[[str], bool]:
    """A function that says whether a name in the folder of code is one of gpufleet's files in the project `root`. The
    project may be that folder, or be inside of it.
    """
    if not root.resolve().is_relative_to(folder.resolve()):
        return lambda name: False
    below = root.resolve().relative_to(folder.resolve()).as_posix()
    prefix, wanted = "" if below == "." else f"{below}/", of_project(root)
    return lambda name: name.startswith(prefix) and wanted.match(name, len(prefix)) is not None


def _walk(folder: Path) -> Iterator[str]:
    for where, folders, files in os.walk(folder):
        at = Path(where)
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not (at / name / _ENVIRONMENT).exists()]
        links = [name for name in folders if (at / name).is_symlink()]
        yield from ((at / name).relative_to(folder).as_posix() for name in (*files, *links))


def _is_excluded(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches the whole name, a folder above it, or a single part of it."""
    parts = name.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(part, pattern.rstrip("/")) for pattern in patterns for part in (*above, *parts))


def _too_large(tree: Tree, code: Code) -> tuple[str, str]:
    sizes = sorted(((path.stat().st_size, name) for name, path in tree.files.items()), reverse=True)
    named = ", ".join(f"{name} ({_size(size)})" for size, name in sizes[:LARGEST])
    return (
        f"at most job.code.max_mib, {code.max_mib} MiB",
        f"The largest: {named}. Name what the command does not need under job.code.exclude; data is storage.inputs.",
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _refused(definition: StackDefinition, value: str, allowed: str, hint: str) -> DefinitionError:
    problem: Problem = definition.problem(f"{definition.job.parameters.path}.code.folder", value, allowed, hint)
    return DefinitionError(str(definition.source), [problem])
