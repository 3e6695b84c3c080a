"""The review of two commits of a project: what each knows, its stacks, and what has changed between them."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from infra.bill.side import Hazards
from infra.catalog import Catalog
from infra.errors import GpufleetError
from infra.evidence import calibration, receipts
from infra.evidence.observations import TRACES, observations
from infra.review import commits, policy
from infra.review.compare import Known, Review, compare
from infra.risk.hazard import learn


def review_commits(project: Path, base: str, head: str, rules: Path | None = None) -> Review:
    """The review of two commits of a project. Raises GpufleetError: unknown commit, broken policy or prices."""
    hashes = [commits.resolve(project, name) for name in (base, head)]
    now = commits.moment(project, hashes[1])
    with tempfile.TemporaryDirectory(prefix="gpufleet-diff-") as scratch:
        folders = [Path(scratch) / side for side in ("BASE", "HEAD")]
        links = [commits.extract(project, commit, folder) for commit, folder in zip(hashes, folders, strict=True)]
        if links[1]:  # what it leads to would be run, and would be in no review
            raise GpufleetError(
                f"HEAD has {links[1][0]} as a link, which a review does not follow: commit the file itself"
            )
        if not any(map(_texts, folders)):  # a check that runs in another folder would hold whatever changes
            raise GpufleetError(
                f"neither commit has a definition file in stacks/ of {project}: run this inside the project"
            )
        try:
            new, new_note = commits.catalog(folders[1])
            chosen = policy.find_policy(folders[1]) if rules is None else policy.load(rules)
            hazards = learn(observations(folders[1]))
        except GpufleetError as error:
            raise GpufleetError(str(error).replace(f"{scratch}/", "")) from None
        try:
            old, old_note = commits.catalog(folders[0])
        except GpufleetError:
            old, old_note = new, "its prices cannot be read; HEAD's stand in"
        notes = [f"{side}: {note}" for side, note in (("BASE", old_note), ("HEAD", new_note)) if note]
        if rules is None and _bytes(folders[0] / "policy.yaml") != _bytes(folders[1] / "policy.yaml"):
            notes.append("**policy.yaml itself changes**; the rules here are HEAD's.")
        known_new = _known(folders[1], new, hazards)
        try:
            hazards = learn(observations(folders[0]))
        except GpufleetError:
            notes.append("BASE: its traces cannot be read; HEAD's hazards stand in")
        known_old = _known(folders[0], old, hazards)
        if left_out := len(receipts.read(folders[1])[1]):
            notes.append(f"HEAD: damaged receipts, left out: {left_out}; `gpufleet receipts` says which and why")
        rules_held = chosen or policy.Policy()
        stacks = compare(_texts(folders[0]), _texts(folders[1]), (known_old, known_new), rules_held, now)
    return Review(
        base=hashes[0],
        head=hashes[1],
        base_prices=f"prices: {old.name}, {old.as_of}",
        head_prices=f"prices: {new.name}, {new.as_of}",
        stacks=stacks,
        notes=tuple(notes),
        rules=chosen is not None,
        policy_uncommitted=chosen is None and (project / "policy.yaml").is_file(),
    )


def _known(folder: Path, catalog: Catalog, hazards: Hazards) -> Known:
    """What the extracted commit in `folder` knows."""
    digest = hashlib.sha256()
    measured = (path for kind in (calibration.FOLDER, receipts.FOLDER, TRACES) for path in (folder / kind).rglob("*"))
    for path in sorted(path for path in measured if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return Known(catalog=catalog, measured=digest.hexdigest(), folder=folder, hazards=hazards)


def _texts(folder: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (folder / "stacks").glob("*.yaml")}


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
