"""`gpufleet diff BASE HEAD`: compares the costs of the stacks in two commits, without account or network."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gpufleet.infra.definition.loader import project_root
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.review.compare import record
from gpufleet.infra.review.markdown import render
from gpufleet.infra.review.review import review_commits
from gpufleet.job import atomic


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="the commit to compare with, such as main or HEAD~1")
    parser.add_argument("head", metavar="HEAD", help="the commit under review")
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="rules that every stack of HEAD must keep (default: HEAD's policy.yaml)",
    )
    parser.add_argument("--json", action="store_true", help="the same for programs; keys in gpufleet docs review")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the review into this file instead of printing it"
    )


def run(args: argparse.Namespace) -> int:
    """Prints or writes the review. Returns 1 if a p90 exceeds its bound or a rule is broken, 2 if a stack has no bill,
    and otherwise 0.
    """
    review = review_commits(project_root(Path.cwd()), args.base, args.head, args.policy)
    text = json.dumps(record(review), indent=2) + "\n" if args.json else render(review)
    if args.out:
        _write(args.out, text)
    else:
        sys.stdout.write(text)
    return review.exit_code


def _write(path: Path, text: str) -> None:
    """Writes the whole file or nothing, because a workflow would post even an incomplete review."""
    if not path.parent.is_dir():
        raise GpufleetError(f"--out {path}: there is no folder {path.parent}; make it, or write elsewhere")
    try:
        atomic.write_bytes(path, text.encode())
    except OSError as error:
        raise GpufleetError(f"--out {path} cannot be written: {error.strerror}") from None
