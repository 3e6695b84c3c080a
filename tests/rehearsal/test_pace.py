"""A script that is over before it can be interrupted is rehearsed once more, with as many steps as it needs."""

from __future__ import annotations

import io
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.contract import metrics
from gpufleet.job.spec.command import CommandConfig
from gpufleet.rehearsal import pace
from gpufleet.rehearsal.rehearse import rehearse
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


def definition(tmp_path: Path, command: str) -> StackDefinition:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "mine").mkdir()
    path = tmp_path / "stacks" / "mine.yaml"
    path.write_text(TEXT.replace("COMMAND", command))
    return load(path, now=datetime.now(UTC), rehearsal=True)


@pytest.mark.parametrize(
    ("command", "longer", "every"),
    [
        (
            "python train.py --steps 60 --save-every=10 --lr 60",
            "--steps 30000 --save-every=5000 --lr 60",
            5_000,
        ),
        ("python train.py --max_iters=60", "--max_iters=30000", 10),  # how often it saves, it alone knows
        ("python train.py --steps 60 --save_steps 20", "--steps 30000 --save_steps 20", 10),
    ],
)
def test_a_fast_script_is_given_the_steps_that_two_interruptions_need(
    tmp_path: Path, command: str, longer: str, every: int
) -> None:
    found = definition(tmp_path, command)
    changed = pace.longer(found, 1.0)
    laid = tmp_path / "stacks" / "laid.yaml"
    laid.write_text(rehearsal_text(found.source, tmp_path, changed=changed))
    config = cast(CommandConfig, load(laid, now=datetime.now(UTC)).job.parameters)
    assert config.command == f"python train.py {longer}"
    assert (config.work.steps, config.checkpoint.every.steps) == (30_000, every)
    assert config.device == "cpu"


def test_so_is_one_that_counts_epochs(tmp_path: Path) -> None:
    found = definition(tmp_path, "python train.py --epochs=8")
    text = found.source.read_text()
    for old, new in (("{steps: 2000, step_ms: {L40S: 10}}", "{epochs: 90}"), ("{steps: 60}", "{epochs: 8}")):
        assert old in text
        text = text.replace(old, new)
    text = text.replace("every: {steps: 500}", "every: {epochs: 1}")
    found.source.write_text(text.replace("    checkpoint: {every: {steps: 10}}\n", "").replace("[500]", "[100]"))
    found = load(found.source, now=datetime.now(UTC), rehearsal=True)
    laid = tmp_path / "stacks" / "laid.yaml"
    laid.write_text(rehearsal_text(found.source, tmp_path, changed=pace.longer(found, 100.0)))
    config = cast(CommandConfig, load(laid, now=datetime.now(UTC)).job.parameters)
    assert (config.command, config.work.epochs) == ("python train.py --epochs=300", 300)


@pytest.mark.parametrize(
    ("command", "step_ms"),
    [("python train.py", 1.0), ("python train.py --max_steps 61", 1.0), ("python train.py --max_steps 60", 2000.0)],
)
def test_a_script_that_takes_no_count_or_needs_no_more_is_left_as_it_is(
    tmp_path: Path, command: str, step_ms: float
) -> None:
    assert pace.longer(definition(tmp_path, command), step_ms) is None


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
        ("finished", {}, r"no whole checkpoint of it was ever seen: nothing named ckpt\.pt came into \{checkpoints\}"),
        (
            "finished",
            {60: "final"},
            r"loss at step 40.*60 steps took 100 ms each\. 300 of them with a save every 50 ",
        ),
        ("failed", {}, r"^it does not resume\nStill to come would have been: loss at step 40\.$"),
    ],
)
def test_why_an_interruption_never_came(tmp_path: Path, reason: str, manifests: dict[int, str], said: str) -> None:
    detail = "the command failed: it does not resume"
    body = json.dumps({"reason": reason, "detail": detail, "instance": "i-1", "at": ""}).encode()
    s3 = SimpleNamespace(get_object=lambda **_: {"Body": io.BytesIO(body)})
    began = datetime.now(UTC)
    instance = SimpleNamespace(ended_at=began + timedelta(seconds=6))
    view = SimpleNamespace(
        first_step_at=began, last_step=60, node=SimpleNamespace(instance=instance), logged=lambda: list[bytes]()
    )
    watch: Any = SimpleNamespace(
        planned=[Planned(step=40, kind="loss")], views={"i-1": view}, manifests=manifests, bucket="b", run_id="r1"
    )
    rehearsal: Any = SimpleNamespace(
        definition=definition(tmp_path, "python train.py"), cloud=SimpleNamespace(client=lambda _: s3)
    )
    assert re.search(said, str(pace.failed(rehearsal, watch) or pace.missed(rehearsal, watch)))


def test_it_is_rehearsed_once_more_and_what_was_left_by_then_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition(tmp_path, "python train.py --max_steps 60")
    tries: list[object] = []

    def attempt(path: Path, _: object, folder: Path, *__: object, changed: object, **options: object) -> int:
        assert not folder.exists()
        folder.mkdir(parents=True)
        tries.append(changed)
        if changed is None:
            raise pace.TooFastError("its 60 steps took 1 ms each", 1.0)
        (folder / "receipt.json").write_text(json.dumps({}))
        return 0

    monkeypatch.setattr("gpufleet.rehearsal.rehearse._attempt", attempt)
    said: list[str] = []
    assert rehearse("mine", root=tmp_path, out=said.append) == 0
    assert len(tries) == 2
    assert said[-1].endswith("Once more, with 30,000 steps.")
    assert (tmp_path / "rehearsals" / "mine" / "r1" / "receipt.json").is_file()
