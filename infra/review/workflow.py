"""Writes the GitHub workflow that reviews pull requests: fills in gpufleet-review.yml for one project."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

TEMPLATE = Path(__file__).with_name("gpufleet-review.yml")
# Files that a review uses. In gpufleet's own repository, they include its code, which prices both commits.
READ = ("stacks/**", "prices/**", "calibrations/**", "receipts/**", "traces/**", "policy.yaml")
CODE = ("infra/**", "job/**")
CHECK = "  # CHECK: gpufleet came from a file here; name where CI can get it"


def workflow(folder: str, install: str) -> str:
    """The workflow's text. `folder`: the project's folder in its repository, or `.`. `install`: pip's argument."""
    own = (*READ, *(CODE if install.endswith(" -e .") else ()))
    paths = ", ".join(json.dumps(path if folder == "." else f"{folder}/{path}") for path in own)
    values = {"PATHS": paths, "FOLDER": folder, "GPUFLEET": install}
    return re.sub("|".join(values), lambda match: values[match[0]], TEMPLATE.read_text(encoding="utf-8"))


def installation(project: Path) -> str:
    """pip's argument to install this gpufleet elsewhere, from pip's record of its source (PEP 610). The argument ends
    with CHECK if the source is on this machine.
    """
    try:
        installed = distribution("gpufleet")
    except PackageNotFoundError:  # gpufleet runs from a checkout that is not installed
        return f"gpufleet{CHECK}"
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return f'"gpufleet @ {vcs["vcs"]}+{url}@{vcs["commit_id"]}"'
    if url.startswith("file:"):
        here = Path(unquote(urlsplit(url).path)) == project.resolve()
        return "-c constraints.txt -e ." if here else f"gpufleet=={installed.version}{CHECK}"
    return f'"gpufleet @ {url}"' if url else f"gpufleet=={installed.version}"
