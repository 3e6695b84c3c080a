"""Reviews two commits of a project: the data and stacks of each, and the changes between them.

A review reads only what a bill uses: stacks, policy, prices and measurements (calibrations, receipts, traces). A review
reads these files from git's object store, and touches no checkout.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from datetime import UTC, date, datetime
from pathlib import Path

from gpufleet.infra.catalog import SHIPPED, Catalog, files, load_catalog
from gpufleet.infra.definition.loader import is_definition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import calibration, receipts
from gpufleet.infra.evidence.observations import TRACES, observations
from gpufleet.infra.inputs import git
from gpufleet.infra.review import policy
from gpufleet.infra.review.compare import Known, Review, compare
from gpufleet.infra.risk.hazard import Hazards, learn


def review_commits(project: Path, base: str, head: str, rules: Path | None = None) -> Review:
    """The review of two commits of a project. Raises GpufleetError if a commit is unknown, or if its policy or its
    prices are invalid.
    """
    hashes = [_commit_hash(project, name) for name in (base, head)]
    now = _made_at(project, hashes[1])
    with tempfile.TemporaryDirectory(prefix="gpufleet-diff-") as scratch:
        folders = [Path(scratch) / side for side in ("BASE", "HEAD")]
        links = [_extract(project, commit, folder) for commit, folder in zip(hashes, folders, strict=True)]
        if links[1]:  # links are refused, because a bill would follow the link to a file that the review does not show
            raise GpufleetError(
                f"{links[1][0]} of HEAD is a link, which a review does not follow: commit the file itself"
            )
        # an error, because otherwise a check in the wrong folder would always succeed
        if not any(map(_texts, folders)):
            raise GpufleetError(
                f"neither commit has a definition file in stacks/ of {project}: run this inside the project"
            )
        try:
            new, new_note = _catalog_of(folders[1], now.date())
            chosen = policy.find_policy(folders[1]) if rules is None else policy.load(rules)
            hazards = learn(observations(folders[1]))
        except GpufleetError as error:
            raise GpufleetError(str(error).replace(f"{scratch}/", "")) from None
        try:
            old, old_note = _catalog_of(folders[0], now.date())
        except GpufleetError:
            old, old_note = new, "its prices cannot be read; HEAD's are used instead"
        notes = [f"{side}: {note}" for side, note in (("BASE", old_note), ("HEAD", new_note)) if note]
        if rules is None and _bytes(folders[0] / "policy.yaml") != _bytes(folders[1] / "policy.yaml"):
            notes.append("**policy.yaml itself changes**; this review uses the rules of HEAD.")
        known_new = _known(folders[1], new, hazards)
        try:
            hazards = learn(observations(folders[0]))
        except GpufleetError:
            notes.append("BASE: its traces cannot be read; HEAD's hazards are used instead")
        known_old = _known(folders[0], old, hazards)
        if left_out := len(receipts.read(folders[1])[1]):
            notes.append(f"HEAD: damaged receipts, left out: {left_out}; `gpufleet receipts` says which and why")
        if uncommitted := _uncommitted(project, hashes[1]):
            notes.append(f"Not in HEAD, since it is not committed: {', '.join(map('`{}`'.format, uncommitted))}.")
        rules_held = chosen or policy.Policy()
        stacks = compare(_texts(folders[0]), _texts(folders[1]), (known_old, known_new), rules_held, now)
    return Review(
        base=hashes[0],
        head=hashes[1],
        base_prices=f"prices: {old.name}, {old.as_of}",
        head_prices=f"prices: {new.name}, {new.as_of}",
        stacks=stacks,
        folder=_place(project)[1].rstrip("/"),
        notes=tuple(notes),
        rules=chosen is not None,
        policy_uncommitted=chosen is None and (project / "policy.yaml").is_file(),
    )


def _known(folder: Path, catalog: Catalog, hazards: Hazards) -> Known:
    """The data of the extracted commit in `folder`."""
    digest = hashlib.sha256()
    measured = (path for kind in (calibration.FOLDER, receipts.FOLDER, TRACES) for path in (folder / kind).rglob("*"))
    for path in sorted(path for path in measured if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return Known(catalog=catalog, measured=digest.hexdigest(), folder=folder, hazards=hazards)


def _texts(folder: Path) -> dict[str, bytes]:
    texts = {path.stem: path.read_bytes() for path in (folder / "stacks").glob("*.yaml")}
    return {name: text for name, text in texts.items() if is_definition(text)}


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


_WANTED = re.compile(
    r"stacks/[^/.][^/]*\.yaml|policy\.yaml|prices/[^/]+/(on_demand|spot|services)\.csv"
    r"|infra/catalog/(gpus|instances|on_demand|spot|services)\.csv|(calibrations|receipts)/[^/]+/[^/.][^/]*\.json"
    r"|traces/[^/.][^/]*\.(csv|json)"
)
_REGULAR = ("100644", "100755")  # modes of files that are neither links nor submodules


def _commit_hash(project: Path, name: str) -> str:
    """The full hash of a commit. Raises GpufleetError if this clone lacks the commit, or if git cannot answer."""
    # called first, because it reports a missing git or a missing repository
    git.answer(project, "rev-parse", "--git-dir")
    words = ("--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    try:
        return git.answer(project, "rev-parse", *words).decode().strip()
    except GpufleetError:
        raise GpufleetError(
            f"{name!r} is not a commit of the git repository at {project}; in CI, check out with fetch-depth: 0"
        ) from None


def _made_at(project: Path, commit: str) -> datetime:
    """The commit's time in UTC, which is the review's only clock."""
    seconds = git.answer(project, "log", "-1", "--no-show-signature", "--format=%ct", commit)
    return datetime.fromtimestamp(int(seconds), UTC)


def _uncommitted(project: Path, head: str) -> list[str]:
    """Files that affect a bill and differ in the working folder; empty if another commit is checked out."""
    if head != _commit_hash(project, "HEAD"):
        return []
    top, prefix = _place(project)
    listed = git.status(top, "-z", "--no-renames", "--untracked-files=all", "--", prefix or ".")
    shown = os.fsencode(listed).decode("utf-8", "backslashreplace")
    names = (entry[3:].removeprefix(prefix) for entry in shown.split("\0"))
    return sorted(name for name in names if _WANTED.fullmatch(name))


def _place(project: Path) -> tuple[Path, str]:
    """The repository's top folder, and the prefix of the project's names in it."""
    top = git.top(project) or project
    prefix = project.resolve().relative_to(top).as_posix()
    return top, "" if prefix == "." else f"{prefix}/"


def _extract(project: Path, commit: str, folder: Path) -> list[str]:
    """Writes those files of the commit that a bill uses into `folder`, laid out as in the project. Returns the paths
    that are links, which are not followed.
    """
    top, prefix = _place(project)
    listed = git.answer(top, "ls-tree", "-r", "-z", "--full-tree", commit).decode("utf-8", "backslashreplace")
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


def _catalog_of(folder: Path, day: date) -> tuple[Catalog, str]:
    """The prices of an extracted commit that apply on that day, and a sentence if other prices had to be used. If this
    version of gpufleet cannot read the catalog that the commit shipped, it uses its own. Raises GpufleetError if
    prices/ is broken.
    """
    own = folder / "infra" / "catalog"
    if not own.is_dir():
        return load_catalog(folder, day=day), ""
    try:
        files.read(own)
        return load_catalog(folder, shipped=own, day=day), ""
    except (GpufleetError, KeyError, ValueError, TypeError, AttributeError, OSError):
        return load_catalog(
            folder, shipped=SHIPPED, day=day
        ), "its shipped catalog has another form; this version's is used instead"


def _contents(top: Path, blobs: list[str]) -> list[bytes]:
    out = git.answer(top, "cat-file", "--batch", feed="".join(f"{blob}\n" for blob in blobs).encode())
    contents: list[bytes] = []
    start = 0
    for _ in blobs:
        head = out.index(b"\n", start)
        facts = out[start:head].split()
        if len(facts) != 3:
            raise GpufleetError(
                f"git lacks {blobs[len(contents)]}, a file of a commit under review: fetch both commits completely,"
                " without a filter"
            )
        size = int(facts[2])
        contents.append(out[head + 1 : head + 1 + size])
        start = head + 1 + size + 1
    return contents
