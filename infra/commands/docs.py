"""`gpufleet docs`: prints the pages of this version, which bills, errors and written files cite."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

PAGES = {path.stem: path for path in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "page", metavar="PAGE", nargs="?", choices=PAGES, help="such as bill; without a name, all names are listed"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the page, or the names and titles of all pages."""
    for name, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        if args.page is None:
            print(f"{name:16} {text.splitlines()[0].lstrip('# ')}")
        elif args.page == name:
            sys.stdout.write(text)
    return 0
