"""A scratch project whose definition is ready for `up`, as `gpufleet prepare` and `doctor --pin` would leave it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.definition.pin import pin
from gpufleet.infra.inputs.prepare import prepared
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.account import AMI_PARAMETERS, ami_id
from tests.repository import ROOT

STACK = "tinystories-growth"
DEFINITION = ROOT / "stacks" / f"{STACK}.yaml"
IMAGE = "public.ecr.aws/deep-learning-containers/pytorch:2.13@sha256:" + "5" * 64
AMI = ami_id("us-east-2", next(iter(AMI_PARAMETERS)))


def project(folder: Path) -> Path:
    """The definition file of a new scratch project in `folder`; not pinned yet."""
    scratch.make(folder, {STACK: rehearsal_text(DEFINITION)})
    file = folder / "stacks" / f"{STACK}.yaml"
    edit(file, "stories: 2000", "stories: 100")
    edit(file, "sequence: 64", "sequence: 16")  # 27 tokens are held out
    prepared(load(file, now=datetime.now(UTC)), folder)
    return file


def pinned(file: Path) -> Path:
    pin(file, ami=AMI, image=IMAGE)
    return file


def edit(file: Path, old: str, new: str) -> None:
    """Replaces one passage; it must be there."""
    text = file.read_text()
    assert text.count(old) == 1, (old, text.count(old))
    file.write_text(text.replace(old, new))
