"""Two commits of the project as folders: only what a bill stands on, read from git's own store, no checkout touched.

That is stacks, policy, prices, and what was measured: calibrations, receipts and traces.
"""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from infra.catalog import SHIPPED, Catalog, files, load_catalog
from infra.errors import GpufleetError

_WANTED = re.compile(
    r"stacks/[^/.][^/]*\.yaml|policy\.yaml|prices/[^/]+/(on_demand|spot|services)\.csv"
    r"|infra/catalog/(gpus|instances|on_demand|spot|services)\.csv|(calibrations|receipts)/[^/]+/[^/.][^/]*\.json"
    r"|traces/[^/.][^/]*\.(csv|json)"
)
_REGULAR = ("100644", "100755")  # no links, no submodules


def resolve(project: Path, name: str) -> str:
    """The full hash of a commit. Raises GpufleetError when this clone does not have it, or git cannot say."""
    _git(project, "rev-parse", "--git-dir")  # no git, no repository, one of somebody else's: git's own words say which
    try:
        return (
            _git(project, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").decode().strip()
        )
    except GpufleetError:
        raise GpufleetError(
            f"{name!r} is not a commit of the git repository at {project}; in CI, check out with fetch-depth: 0"
        ) from None


def moment(project: Path, commit: str) -> datetime:
    """When the commit was made, UTC: the only clock of a review."""
    return datetime.fromtimestamp(int(_git(project, "log", "-1", "--no-show-signature", "--format=%ct", commit)), UTC)


def extract(project: Path, commit: str, folder: Path) -> list[str]:
    """Writes what a bill of the commit stands on into `folder`, laid out as in the project. Gives the paths that are
    links there: they are not followed."""
    top = Path(_git(project, "rev-parse", "--show-toplevel").decode().strip())
    prefix = project.resolve().relative_to(top.resolve()).as_posix()
    prefix = "" if prefix == "." else f"{prefix}/"
    listed = _git(top, "ls-tree", "-r", "-z", "--full-tree", commit).decode("utf-8", "backslashreplace")
    blobs: dict[str, str] = {}
    links: list[str] = []
    for entry in filter(None, listed.split("\0")):
        facts, _, path = entry.partition("\t")
        mode, _, blob = facts.split(" ")
        inside = path.removeprefix(prefix)
        if not path.startswith(prefix) or not _WANTED.fullmatch(inside):
            continue
        if mode in _REGULAR:
            blobs[inside] = blob
        else:
            links.append(inside)
    (folder / "stacks").mkdir(parents=True)
    for path, content in zip(blobs, _contents(top, list(blobs.values())), strict=True):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return links


def catalog(folder: Path) -> tuple[Catalog, str]:
    """The prices of an extracted commit, and a sentence when it is not quite them.

    A commit's own shipped catalog counts where this version can read it, else this version's. A broken prices/ folder
    is an error: GpufleetError.
    """
    own = folder / "infra" / "catalog"
    if not own.is_dir():
        return load_catalog(folder), ""
    try:
        files.read(own)
        return load_catalog(folder, shipped=own), ""
    except (GpufleetError, KeyError, ValueError, TypeError, AttributeError, OSError):
        return load_catalog(folder, shipped=SHIPPED), "its shipped catalog has another form; this version's stands in"


def _contents(top: Path, blobs: list[str]) -> list[bytes]:
    out = _git(top, "cat-file", "--batch", feed="".join(f"{blob}\n" for blob in blobs).encode())
    found: list[bytes] = []
    start = 0
    for _ in blobs:
        head = out.index(b"\n", start)
        facts = out[start:head].split()
        if len(facts) != 3:
            raise GpufleetError(
                f"git does not have {blobs[len(found)]}, a file of a commit under review: fetch both commits whole,"
                " without a filter"
            )
        size = int(facts[2])
        found.append(out[head + 1 : head + 1 + size])
        start = head + 1 + size + 1
    return found


def _git(folder: Path, *words: str, feed: bytes = b"") -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], input=feed, capture_output=True)
    except FileNotFoundError:
        raise GpufleetError("git is not installed; a review reads both commits with it") from None
    if done.returncode:
        raise GpufleetError(f"git {words[0]}: {done.stderr.decode(errors='replace').strip() or 'failed'}")
    return done.stdout
