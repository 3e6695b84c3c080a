"""Asks git about a folder safely: the folder's repository may come from a stranger's archive, and have settings of its
own.

Such settings can name programs that git runs even if it only reads (core.fsmonitor, filters, hooks, fetches of missing
objects), and a list of such settings would soon be incomplete. So git must read none of the repository's settings. Git
is given a git folder made by this module, which has almost no config and no hooks, and whose other entries are links
into the repository. Only the settings of the calling user apply.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpufleet.infra.errors import GpufleetError

WAIT_S = 60
_NOT_TAKEN = {"HEAD", "commondir", "config", "config.worktree", "gitdir", "hooks", "modules", "worktrees"}
# The only settings that are taken from the repository: those that git needs to read it, or to read files on this kind
# of disk. Their values are single words, and none of them makes git run a program.
_NEEDED = {"core": ("filemode", "ignorecase", "symlinks", "autocrlf"), "extensions": ("objectformat", "refstorage")}
_OF_ANOTHER = {  # variables that a user's hook may have set, and that would lead git to the hook's repository
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES"),
    *("GIT_COMMON_DIR", "GIT_PREFIX", "GIT_NAMESPACE"),
}


def top(folder: Path) -> Path | None:
    """The top folder of the repository around `folder`; None if there is none."""
    repository = _find(folder)
    return None if repository is None else repository[0]


def ask(folder: Path, *words: str) -> bytes | None:
    """Git's answer; None if the folder is in no repository, if git is not installed, or if git refuses."""
    try:
        return answer(folder, *words)
    except GpufleetError:
        return None


def status(folder: Path, *words: str) -> str:
    """The lines of `git status --porcelain`, without submodules, which have their own settings; empty if there is no
    repository or no git.
    """
    return os.fsdecode(ask(folder, "status", "--porcelain", "--ignore-submodules=dirty", *words) or b"")


def answer(folder: Path, *words: str, feed: bytes = b"") -> bytes:
    """Git's answer to `words`, with `feed` as its input. Raises GpufleetError with git's own message."""
    import subprocess  # imported here, because every bill imports this module, but few ask git

    if shutil.which("git") is None:
        raise GpufleetError("git is not installed, but lists the files of this folder: install git")
    if (repository := _find(folder)) is None:
        raise GpufleetError(f"neither {folder.resolve()} nor a folder above it is a git repository")
    files, place = repository
    try:
        with _without_settings(place) as ours:
            own = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
            # with this variable, git writes nothing
            more = {"GIT_DIR": str(ours), "GIT_WORK_TREE": str(files), "GIT_OPTIONAL_LOCKS": "0"}
            call = ["git", "-C", str(folder), *words]
            done = subprocess.run(call, input=feed, capture_output=True, env={**own, **more}, timeout=WAIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpufleetError(f"git {words[0]}: {error}") from None
    if done.returncode:
        raise GpufleetError(f"git {words[0]}: {done.stderr.decode(errors='replace').strip() or 'failed'}")
    return done.stdout


def _find(folder: Path) -> tuple[Path, Path] | None:
    """The top of the work tree around the folder, and its git folder; found by git's own rules."""
    for files in (folder.resolve(), *folder.resolve().parents):
        place = files / ".git"
        if place.is_file():  # in a submodule or a second work tree, `.git` is a file
            place = files / _text(place).removeprefix("gitdir:").strip()
        if (place / "HEAD").is_file():
            return files, place
    return None


@contextmanager
def _without_settings(place: Path) -> Iterator[Path]:
    """Makes a git folder without settings, with links into the git folder at `place`. Raises OSError."""
    import tempfile

    # the file exists if the repository has several work trees
    common = place / (_text(place / "commondir").strip() or ".")
    own, shared = ({path.name: path for path in folder.iterdir()} for folder in (place, common))
    with tempfile.TemporaryDirectory(prefix="gpufleet-git-") as folder:
        for name, path in {**own, **shared, **{name: own[name] for name in own if "index" in name}}.items():
            if name not in _NOT_TAKEN:
                Path(folder, name).symlink_to(path.resolve())
        Path(folder, "HEAD").write_text(_text(place / "HEAD"))  # git accepts no link in place of HEAD
        Path(folder, "config").write_text(_config(_text(common / "config")))
        yield Path(folder)


def _config(theirs: str) -> str:
    lines = ["[core]", "repositoryformatversion = 1", "fsmonitor = false"]
    for section, names in _NEEDED.items():
        settings = re.findall(rf"^\s*({'|'.join(names)})\s*=\s*(\w+)\s*$", theirs, re.IGNORECASE | re.MULTILINE)
        lines += [f"[{section}]", *(f"{name} = {word}" for name, word in settings)]
    return "\n".join(lines) + "\n"


def _text(path: Path) -> str:
    """A file's text; empty if it is not a regular file, because reading a pipe would block."""
    return path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else ""
