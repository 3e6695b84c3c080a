"""What docs/how-to.md says to write can be written: each section's YAML, laid over a file of one's own, is accepted."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufleet.infra.account.quotas import quota_code
from gpufleet.infra.cli import COMMANDS
from gpufleet.infra.definition import campaign
from gpufleet.infra.definition.loader import find, load
from gpufleet.infra.definition.scenarios import scenarios
from gpufleet.job.kind.command import CommandConfig
from gpufleet.rehearsal.rehearse import _lacking as lacking
from gpufleet.rehearsal.scratch import make
from tests import pages
from tests.repository import ROOT

PAGE = ROOT / "docs" / "how-to.md"
BASE = """
run: {id: r1, owner: you}
job:
  image: public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023
  code: {folder: .}
  command: python train.py --out {checkpoints}
  checkpoint: {each: ckpt.pt, rewritten: true, every: {steps: 20}, size_gb: 0.1}
  progress: {stdout: 'step (?P<step>[0-9]+)'}
  work: {steps: 5000, step_ms: {L40S: 500}}
fleet: {region: us-east-2, zones: [us-east-2a, us-east-2b], instance_types: [g6e.2xlarge], capacity: spot}
limits: {max_usd: 20, max_hours: 24}
rehearsal:
  job: {device: cpu, gpus: 1, work: {steps: 60}}
  estimate: {step_ms: [500]}
"""


def laid_over(base: Any, more: Any) -> Any:
    """A section with another one's keys in place of its own; `checkpoint` is taken as a whole."""
    if not (isinstance(base, dict) and isinstance(more, dict)):
        return more
    return {**base, **{key: more[key] if key == "checkpoint" else laid_over(base.get(key), more[key]) for key in more}}


def written() -> dict[str, str]:
    """The section's heading -> its YAML."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = {
        text.splitlines()[0]: re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for text in sections
    }
    return {heading: blocks[0] for heading, blocks in found.items() if blocks}


CAMPAIGNS = {"Try many hyperparameters under one budget": 6, "Let a coding agent work, and limit what it spends": 0}


@pytest.mark.parametrize("heading", sorted({*written()} - {*CAMPAIGNS}))
def test_what_a_section_says_to_write_is_accepted(heading: str, tmp_path: Path) -> None:
    text, now = written()[heading], datetime(2026, 11, 21, 12, tzinfo=UTC)
    path = tmp_path / "mine.yaml"
    more = yaml.safe_load(text)
    whole = more if "stages" in more else laid_over(yaml.safe_load(BASE), more)  # a file with stages is shown whole
    path.write_text(yaml.safe_dump(whole, sort_keys=False))
    loaded = load(path, now=now, staged=True)
    assert all(isinstance(part.job.parameters, CommandConfig) for part in loaded.parts)
    if "rehearsal" in more:
        rehearsed = load(path, now=now, rehearsal=True, staged=True)
        assert [key for part in rehearsed.parts for key in lacking(part)] == []
    if "scenarios:" in text:
        assert [each.scenario for each in scenarios(path, now=now)] == list(yaml.safe_load(text)["scenarios"])


@pytest.mark.parametrize(("heading", "trials"), CAMPAIGNS.items())
def test_the_campaign_that_a_section_says_to_write_is_accepted(heading: str, trials: int, tmp_path: Path) -> None:
    for name, text in (("stacks/mine", BASE), ("campaigns/night", written()[heading])):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.yaml").write_text(text)
    made = campaign.trials(campaign.load("night", tmp_path), tmp_path)
    campaign.write(made, tmp_path)
    read = [load(find(each.name, tmp_path), now=datetime(2026, 11, 21, 12, tzinfo=UTC)) for each in made]
    assert [each.limits.max_usd for each in read if each.name != "mine"] == [2] * trials


def test_the_file_with_stages_is_priced_whole(tmp_path: Path) -> None:
    (text,) = (text for text in written().values() if "stages:" in text)
    project = make(tmp_path / "project", {"mine": text})
    (project / "train.py").write_text("")
    done = pages.run("gpufleet cost mine", project, tmp_path)
    assert done.returncode == 0, done.stderr
    for stage in yaml.safe_load(text)["stages"]:
        assert re.search(rf"^{stage['name']} ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(("types", "examples"), [
    ("G", ["g4dn.xlarge", "g6e.2xlarge"]),
    ("P2 to P4", ["p2.xlarge", "p4de.24xlarge"]),
    ("P5", ["p5.4xlarge", "p5en.48xlarge"]),
])  # fmt: skip
def test_the_quota_codes_of_the_page_are_those_that_doctor_asks_for(types: str, examples: list[str]) -> None:
    (row,) = re.findall(rf"^\| {types} \| `(\S+)` \| `(\S+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert {(quota_code(each, "spot"), quota_code(each, "on-demand")) for each in examples} == {row}


def test_every_command_that_needs_aws_exists() -> None:
    typed = [line for page in (pages.README, *pages.PAGES) for line in pages.sh(page, "aws")]
    used = {line.split()[1] for line in typed if line.startswith("gpufleet ")}
    assert used
    assert used <= set(COMMANDS)
