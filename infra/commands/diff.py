"""`gpufleet diff BASE HEAD`: two commits' stacks side by side in dollars, without account or network."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from infra import policy
from infra.catalog import Catalog
from infra.cost.hazard import learn
from infra.cost.side import Hazards
from infra.errors import GpufleetError
from infra.evidence import calibration, receipts
from infra.evidence.observations import TRACES, observations
from infra.loader import project_root
from infra.review import commits
from infra.review.compare import Known, Review, Side, StackReview, compare
from infra.review.markdown import render
from job import atomic


def arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line arguments."""
    parser.add_argument("base", metavar="BASE", help="a commit: the one before, main, HEAD~1")
    parser.add_argument("head", metavar="HEAD", help="the commit under review")
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="rules that every stack of HEAD must hold (default: HEAD's policy.yaml)",
    )
    parser.add_argument("--json", action="store_true", help="the same for programs; keys in docs/review.md")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there instead of printing it")


def run(args: argparse.Namespace) -> int:
    """Prints or writes the review. 0: holds; 1: a p90 passes its bound or a rule is broken; 2: a stack has no bill."""
    review = make(project_root(Path.cwd()), args.base, args.head, args.policy)
    text = json.dumps(to_json(review), indent=2) + "\n" if args.json else render(review)
    if args.out:
        _write(args.out, text)
    else:
        sys.stdout.write(text)
    return review.exit_code


def make(project: Path, base: str, head: str, rules: Path | None = None) -> Review:
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
            chosen = policy.of(folders[1]) if rules is None else policy.load(rules)
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


def to_json(review: Review) -> dict[str, Any]:
    """Keys as documented in docs/review.md. Money is a decimal string."""
    return {
        "schema": 1,
        "base": {"commit": review.base, "prices": review.base_prices},
        "head": {"commit": review.head, "prices": review.head_prices},
        "exit_code": review.exit_code,
        "notes": list(review.notes),
        "stacks": [_stack(stack) for stack in review.stacks],
    }


def _stack(stack: StackReview) -> dict[str, Any]:
    return {
        "stack": stack.name,
        "changed": stack.changed,
        "base": stack.base and _side(stack.base),
        "head": stack.head and _side(stack.head),
        "steps": [
            {
                "keys": list(step.keys),
                "before": step.before,
                "after": step.after,
                "p50": str(step.p50),
                "p90": str(step.p90),
            }
            for step in stack.steps
        ],
        "without_effect": list(stack.aside),
        "over_cap": stack.over_cap,
        "refused": list(stack.refused),
        "policy": [{"rule": each.rule, "message": each.message} for each in stack.policy],
    }


def _side(side: Side) -> dict[str, Any]:
    usd = side.usd
    return {
        "p50": str(usd.p50) if usd else None,
        "p90": str(usd.p90) if usd else None,
        "calibrated": side.bill.calibrated if side.bill else None,
        "errors": list(side.errors),
    }


def _texts(folder: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (folder / "stacks").glob("*.yaml")}


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a workflow that posts a half review would be believed."""
    if not path.parent.is_dir():
        raise GpufleetError(f"--out {path}: there is no folder {path.parent}; make it, or write elsewhere")
    try:
        atomic.write_bytes(path, text.encode())
    except OSError as error:
        raise GpufleetError(f"--out {path} cannot be written: {error.strerror}") from None
