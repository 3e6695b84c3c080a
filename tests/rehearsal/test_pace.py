"""What a run that is over before its interruptions is answered with: the cause, or the steps that are enough."""

from __future__ import annotations

import io
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.contract import metrics
from gpufleet.rehearsal import own, pace
from gpufleet.rehearsal.watch import Planned

TEXT = """
run: {id: r1, owner: you}
job:
  image: public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023
  code: {folder: mine}
  command: python train.py
  checkpoint: {each: ckpt.pt, rewritten: true, every: {steps: 500}, size_gb: 0.1}
  progress: {stdout: 'step (?P<step>[0-9]+)'}
  work: {steps: 2000, step_ms: {L40S: 10}}
fleet: {region: us-east-2, zones: [us-east-2a], instance_types: [g6e.2xlarge]}
storage: {keep: {days: 7}}
limits: {max_usd: 5, max_hours: 3}
rehearsal:
  job:
    command: COMMAND
    device: cpu
    work: {steps: 60}
    checkpoint: {every: {steps: 10}}
  estimate: {step_ms: [500]}
"""


def definition(tmp_path: Path, command: str, *, saves: bool = True) -> StackDefinition:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "mine").mkdir()
    path = tmp_path / "stacks" / "mine.yaml"
    text = TEXT if saves else re.sub(r"checkpoint: \{.*\}", "checkpoint: none", TEXT)
    path.write_text(text.replace("COMMAND", command))
    return load(path, now=datetime.now(UTC), rehearsal=True)


def test_the_time_of_a_step_is_the_lines_own_and_never_none() -> None:
    lines = [
        metrics.write({"ts": 1.0 + step, "phase": "train", "step": step, "step_ms": ms})
        for step, ms in ((20, None), (40, 7.0), (60, 5.0))
    ]
    assert pace.step_ms(lines, 99.0) == pytest.approx(6.0, abs=1.0)
    assert pace.step_ms(lines[:1], 99.0) == 99.0
    assert pace.step_ms([metrics.write({"ts": 1.0, "phase": "train", "step": 60, "step_ms": 0.0})], 9.0) == 0.5


@pytest.mark.parametrize(
    ("reason", "manifests", "said"),
    [
        ("finished", {}, r"without a whole checkpoint: no file named ckpt\.pt appeared in \{checkpoints\}"),
        (
            "finished",
            {60: "final"},
            r"loss at step 40.*60 steps took 100 ms each\. 300 steps with a save every 50 ",
        ),
        ("finished", None, r"100 ms each\. 300 steps are enough: write that in job\.command and job\.work of"),
        ("max_hours", {}, r"^max_hours ended the run before .* \(loss at step 40\): the command failed"),
        (
            "failed",
            {},
            r"^it does not resume\nThe planned interruptions that did not happen: loss at step 40\. Unshipped$",
        ),
    ],
)
def test_why_an_interruption_never_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, manifests: dict[int, str] | None, said: str
) -> None:
    """`manifests`: None of a command that saves nothing."""
    monkeypatch.setattr(own, "not_shipped", lambda *_: " Unshipped")
    detail = "the command failed: it does not resume"
    body = json.dumps({"reason": reason, "detail": detail, "instance": "i-1", "at": ""}).encode()
    s3 = SimpleNamespace(get_object=lambda **_: {"Body": io.BytesIO(body)})
    began = datetime.now(UTC)
    instance = SimpleNamespace(ended_at=began + timedelta(seconds=6))
    view = SimpleNamespace(
        first_step_at=began, last_step=60, node=SimpleNamespace(instance=instance), logged=lambda: list[bytes]()
    )
    idle = SimpleNamespace(**{**vars(view), "last_step": 0})  # it found nothing to do
    watch: Any = SimpleNamespace(
        planned=[Planned(step=40, kind="loss")],
        views={"i-1": view, "i-2": idle},
        manifests=manifests or {},
        bucket="b",
        run_id="r1",
    )
    rehearsal: Any = SimpleNamespace(
        definition=definition(tmp_path, "python train.py", saves=manifests is not None),
        root=tmp_path,
        cloud=SimpleNamespace(client=lambda _: s3),
    )
    assert re.search(said, str(pace.ended(rehearsal, watch)))
