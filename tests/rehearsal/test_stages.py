"""A run in three stages on the embedded AWS: the real program, user-data and job, each stage on its own fleet."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account.stages import combine, report
from gpufleet.infra.account.stop import ask
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.contract.bucket import DONE
from gpufleet.job.contract.receipt import Receipt
from gpufleet.job.contract.workdir import RECEIPT, RUN
from gpufleet.job.supervisor.store import S3Store
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.launch import CloudInstance
from gpufleet.rehearsal.node import NodeRunner
from gpufleet.rehearsal.rehearse import rehearse
from tests.infra.staged_files import PINNED, STAGED
from tests.repository import ROOT
from tests.waiting import wait_for

STAGES = ("prepare", "train", "judge")
SCRIPT = """\
import os, pathlib, sys, time
name, *given, outputs = sys.argv[1:]
print("step 1", flush=True)
pathlib.Path(HOLD, f"{name}.{os.getpid()}").touch()
before = pathlib.Path(given[0], "done.txt").read_text() if given else ""
hold = pathlib.Path(HOLD, name)
while hold.exists():
    time.sleep(0.05)
pathlib.Path(outputs, "done.txt").write_text(before + name + "\\n")
print("step 2", flush=True)
"""


class StagedRun:
    """The run, launched. A stage does not end while a file with its name is in `hold`."""

    def __init__(self, cloud: Cloud, runner: NodeRunner, hold: Path, definition: StackDefinition) -> None:
        self.cloud, self.runner, self.hold, self.definition = cloud, runner, hold, definition
        self.run = definition.run.id
        (self.bucket,) = (name for kind, name in cloud.leftovers() if kind == "bucket")

    def store(self, stage: str) -> S3Store:
        return S3Store(f"s3://{self.bucket}/{self.run}/{stage}", client=self.cloud.client("s3"))

    def json(self, stage: str, key: str) -> dict[str, Any] | None:
        content = self.store(stage).get_bytes(key)
        return None if content is None else json.loads(content)

    def nodes(self, stage: str) -> list[CloudInstance]:
        """All that a stage has had, the oldest first."""
        return [each for each in self.cloud.instances() if each.tags["gpufleet:run"] == f"{self.run}/{stage}"]

    def started(self, stage: str, times: int) -> CloudInstance:
        """The stage's newest node, once its script has been started so often."""
        there = self.hold.glob
        wait_for(f"start {times} of {stage}", lambda: len([*there(f"{stage}.*")]) >= times, log=self.logs)
        return self.nodes(stage)[-1]

    def living(self) -> list[CloudInstance]:
        return [each for each in self.cloud.instances() if each.ended_at is None]

    def status(self) -> list[str]:
        """What `gpufleet status` says of each stage."""
        ec2, s3 = self.cloud.client("ec2"), self.cloud.client("s3")
        said = list(report(self.definition, ec2, s3, datetime.now(UTC)))
        first = next(index for index, line in enumerate(said) if line.startswith("stage "))
        return [line[12:] for line in said[first : first + len(STAGES)]]

    def receipt(self, stage: str) -> Receipt:
        return Receipt.from_json(self.wait(stage, RECEIPT))

    def result(self) -> Receipt:
        """The receipt of the whole run, as `gpufleet results` makes it."""
        target = self.hold.parent / "results"
        for stage in STAGES:
            (target / stage).mkdir(parents=True, exist_ok=True)
            for name in (RUN, RECEIPT):
                (target / stage / name).write_bytes(self.store(stage).get_bytes(name) or b"")
        found = combine(self.definition, target)
        assert found is not None
        return found

    def wait(self, stage: str, key: str = DONE) -> dict[str, Any]:
        wait_for(f"{key} of {stage}", lambda: self.json(stage, key), log=self.logs)
        return self.json(stage, key) or {}

    def logs(self) -> str:
        return "\n".join(
            f"== {name} {node.instance.tags.get('gpufleet:run')}\n{node.log.read_text()[-2500:]}\n"
            + (node.container_log.read_text(errors="replace")[-3000:] if node.container_log.exists() else "")
            for name, node in self.runner.nodes.items()
        )


@contextmanager
def launched(folder: Path, text: str = PINNED, files: Mapping[str, str] = {"stage.py": SCRIPT}) -> Iterator[StagedRun]:
    project = scratch.make(folder / "project", {"staged": text})
    hold, programs = folder / "hold", folder / "programs"
    for each in (hold, programs, project / "code"):
        each.mkdir()
    (programs / "python").symlink_to(sys.executable)
    for name, script in files.items():
        (project / "code" / name).write_text(script.replace("HOLD", repr(str(hold))))
    definition = load(project / "stacks" / "staged.yaml", now=datetime.now(UTC), staged=True)
    with Cloud(project, habits=Habits(notice_s=20.0, relaunch_s=1.0)) as cloud:
        runner = NodeRunner(cloud, folder / "nodes", lambda root: programs)
        try:
            with Engine.open(project, cloud.environment(), "staged", say=lambda line: None, real=False) as engine:
                result = engine.up()
                assert result.ok, result.text
                yield StagedRun(cloud, runner, hold, definition)
        finally:
            runner.close()


REHEARSED = """\
import json, pathlib, sys, time
name, *given, kept, outputs = sys.argv[1:]
state = pathlib.Path(kept, "state.json")
step = json.loads(state.read_text())["step"] if state.exists() else 0
before = pathlib.Path(given[0], "done.txt").read_text() if given else ""
while step < 300:
    step += 1
    time.sleep(0.1 if name == "train" else 0)
    if step % 20 == 0:
        state.with_suffix(".new").write_text(json.dumps({"step": step}))
        state.with_suffix(".new").replace(state)
    print("step", step, flush=True)
pathlib.Path(outputs, "done.txt").write_text(before + name + "\\n")
"""
SAVES = "checkpoint: {each: state.json, rewritten: true, every: {steps: 20}, size_gb: 0.001}"
NO_INTERRUPTIONS = "    rehearsal: {interruptions: {with_notice: 0, without_notice: 0}}\n"


def saving_stages() -> str:
    """A file with stages that save, of which only `train` is interrupted."""
    return (
        STAGED.replace("checkpoint: none", SAVES)
        .replace("work: {hours: {low: 0.1, likely: 0.2, high: 0.4}}", "work: {steps: 300}")
        .replace(" {outputs}", " {checkpoints} {outputs}")
        .replace("stages:\n", "estimate: {step_ms: [100]}\nstages:\n")
        .replace("  - name: prepare\n", f"  - name: prepare\n{NO_INTERRUPTIONS}")
        .replace("  - name: judge\n", f"  - name: judge\n{NO_INTERRUPTIONS}")
    )


def project_with(text: str, folder: Path) -> Path:
    """A project with this file `staged` and the code of its stages."""
    project = scratch.make(folder / "project", {"staged": text})
    (project / "code").mkdir()
    (project / "code" / "stage.py").write_text(REHEARSED)
    return project


@pytest.mark.slow
def test_a_file_with_stages_is_rehearsed_each_stage_on_its_own_fleet(tmp_path: Path) -> None:
    project = project_with(saving_stages(), tmp_path)
    said: list[str] = []
    assert rehearse("staged", root=project, out=said.append) == 0, "\n".join(said)
    folder = project / "rehearsals" / "staged" / "r1"
    assert (folder / "results" / "judge" / "final" / "done.txt").read_text() == "prepare\ntrain\njudge\n"
    summary = json.loads((folder / "summary.json").read_text())
    assert [each.split()[0] for each in summary["interruptions"]] == ["notice", "loss"]
    assert (summary["steps"], summary["nodes"]) == (900, 5)
    parts = [Receipt.from_json(json.loads((folder / "results" / stage / RECEIPT).read_bytes())) for stage in STAGES]
    whole = Receipt.from_json(json.loads((folder / RECEIPT).read_bytes()))
    assert whole.actual == sum(each.actual for each in parts)
    assert all((folder / stage / "report.html").is_file() for stage in STAGES)


@pytest.mark.slow
def test_kernel_sft_in_two_stages_judges_nothing_twice_and_costs_their_sum(tmp_path: Path) -> None:
    name = "kernel-sft-stages"
    project = scratch.make(tmp_path / "project", {name: (ROOT / "stacks" / f"{name}.yaml").read_text()})
    said: list[str] = []
    assert rehearse(name, root=project, out=said.append) == 0, "\n".join(said)
    folder = project / "rehearsals" / name / "r1"
    train, judge = (folder / "results" / stage for stage in ("train", "judge"))
    summary = json.loads((folder / "summary.json").read_text())
    assert [each.split()[0] for each in summary["interruptions"]] == ["notice", "loss"]
    assert summary["nodes"] == 4
    verdicts = [json.loads(line) for line in (judge / "stages" / "verdicts.jsonl").read_text().splitlines()]
    assert len({each["candidate"] for each in verdicts}) == len(verdicts) == 8 + 60
    assert not (train / "stages" / "verdicts.jsonl").exists()
    trained, judged = (json.loads((part / "results.json").read_text()) for part in (train, judge))
    del trained["statement"]
    assert {key: judged[key] for key in trained} == trained
    assert judged["generated"]["candidates"] == 8
    said_by_nodes = (judge / "job.log").read_text()
    assert "input train: 2 files" in said_by_nodes  # neither weights nor a dataset
    assert "base weights:" not in said_by_nodes
    parts = [Receipt.from_json(json.loads((part / RECEIPT).read_bytes())) for part in (train, judge)]
    whole = Receipt.from_json(json.loads((folder / RECEIPT).read_bytes()))
    assert whole.actual == sum(each.actual for each in parts)


def test_interrupted_in_each_stage_and_killed_between_them_it_ends_once_and_costs_the_sum(tmp_path: Path) -> None:
    with launched(tmp_path) as run:
        for stage in STAGES:
            (run.hold / stage).touch()
        run.cloud.kill(run.started("prepare", 1).id)  # without a word, in the first stage
        run.cloud.deny("StartExecution", node=True)  # AWS refuses to begin the second
        run.started("prepare", 2)
        (run.hold / "prepare").unlink()
        run.wait("prepare")
        wait_for("another node of the stage that is done", lambda: len(run.nodes("prepare")) > 2, log=run.logs)
        assert not run.nodes("train")
        run.cloud.allow("StartExecution")
        run.cloud.interrupt(run.started("train", 1).id)  # with a notice, in the second
        again = run.started("train", 2)
        assert [line.partition(", ")[0] for line in run.status()] == [
            "prepare: finished",
            "train: under way",
            "judge: after train",
        ]
        (run.hold / "train").unlink()
        run.wait("train")
        run.cloud.kill(again.id)  # done, and perhaps not handed on
        run.started("judge", 1)
        (run.hold / "judge").unlink()
        assert run.wait("judge")["reason"] == "finished"
        assert run.store("judge").get_bytes("final/done.txt") == b"prepare\ntrain\njudge\n"
        assert len(run.nodes("judge")) == 1  # begun twice, perhaps, and launched once
        whole, parts = run.result(), [run.receipt(stage) for stage in STAGES]
        assert whole.actual == sum(each.actual for each in parts) == sum(line.actual for line in whole.lines)
        assert len(whole.attempts) == sum(len(each.attempts) for each in parts)
        assert (whole.with_notice, whole.without_notice) == (1, 1)
        beats = run.store("judge").get_bytes(f"heartbeat/{run.nodes('judge')[0].id}.jsonl") or b""
        metered = Decimal(json.loads(beats.splitlines()[-1])["spent_usd"])  # what the cap counts: all stages
        assert metered > sum(each.actual for each in parts[:2])


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_begins_no_further_stage(tmp_path: Path) -> None:
    with launched(tmp_path) as run:
        (run.hold / "prepare").touch()
        run.started("prepare", 1)
        for stage in run.definition.stages:
            ask(stage, run.cloud.client("ec2"), run.cloud.client("s3"), datetime.now(UTC), say=lambda line: None)
        (run.hold / "prepare").unlink()  # a command that saves nothing is left to its end
        assert run.wait("prepare")["reason"] == "finished"
        wait_for("the last node's end", lambda: not run.living(), log=run.logs)
        assert not run.nodes("train")
        assert run.status()[1:] == ["train: asked to end", "judge: after train"]


@pytest.mark.slow
def test_a_rerun_takes_what_another_run_s_stage_has_left(tmp_path: Path) -> None:
    text = f"{PINNED.replace('id: r1', 'id: r2')}rerun: {{run: r1, from: judge}}\n"
    with launched(tmp_path, text) as run:
        left = b"prepare\ntrain\n"
        listed = {"name": "done.txt", "bytes": len(left), "sha256": hashlib.sha256(left).hexdigest()}
        theirs = S3Store(f"s3://{run.bucket}/r1/train/final", client=run.cloud.client("s3"))
        theirs.put_bytes(left, "done.txt")
        theirs.put_bytes(json.dumps({"schema": 1, "files": [listed]}).encode(), "handed_on.json")
        assert run.wait("judge")["reason"] == "finished"
        assert run.store("judge").get_bytes("final/done.txt") == b"prepare\ntrain\njudge\n"
        assert [len(run.nodes(stage)) for stage in STAGES] == [0, 0, 1]
