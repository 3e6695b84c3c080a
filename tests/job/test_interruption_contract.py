"""The real supervisor and the real trainer, killed for real: the weights are those of a run that nobody disturbed.

SIGKILLs and a notice, one after the other, on one run; every attempt is a fresh node with an empty disk. The matrix of
stop points inside one warm process is in the trainer's own tests.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.experiments.growth.spec import Batch, TextData
from gpufleet.job.kind import Checkpoint
from gpufleet.rehearsal.imds import Imds
from tests.job import rank_world, runs
from tests.waiting import is_alive, wait_for

pytestmark = pytest.mark.xdist_group("ranks")

CONFIG = replace(
    runs.TINY,
    steps_per_phase=24,
    batch=Batch(sequences=8),
    data=TextData(sequence=32, source="generated-stories", stories=400),
    checkpoint=Checkpoint(interval_s=0.5, heartbeat_s=0.5),
)
SEED = 7


class TrainerAttempt:
    """One node: a supervisor in a session of its own, and what it has said so far."""

    def __init__(self, folder: Path, bucket: Path, run: dict[str, Any], instance: str, **environment: str) -> None:
        self.instance, self.bucket = instance, bucket
        self.process = runs.start(runs.place(folder / instance, run), bucket, instance, **environment)
        self.log = folder / instance / "job.log"

    def wait_for(self, what: str, seen: Callable[[], object]) -> None:
        wait_for(what, seen, process=self.process, log=self.own_log)

    def own_log(self) -> str:
        """job.log from where this attempt began."""
        text = self.log.read_text() if self.log.exists() else ""
        return text.partition(f"on {self.instance} ")[2]

    def steps(self) -> list[int]:
        """What this attempt's trainer has logged."""
        return [int(number) for number in re.findall(r"^step (\d{6})/", self.own_log(), re.MULTILINE)]

    def trainer(self) -> int:
        """Process id of the trainer, a child of the supervisor."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def sigkill(self) -> None:
        """The supervisor's group dies at once, and the trainer, in a group of its own, with it."""
        trainer = self.trainer()
        os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.wait() == -signal.SIGKILL
        wait_for("the trainer's end with its supervisor", lambda: not trainer or not is_alive(trainer))
        self.output()

    def output(self) -> str:
        return self.process.communicate()[0].decode()


def reached(attempt: TrainerAttempt, step: int, bucket: Path) -> bool:
    """It has trained that far, and something of the run is published."""
    return max(attempt.steps(), default=0) >= step and bool(manifests(bucket))


def manifests(bucket: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (bucket / "r1" / "ckpt").glob("step_*/manifest.json"))


@contextmanager
def undisturbed(workdir: Path, run: dict[str, Any], bucket: Path) -> Iterator[Callable[[], str]]:
    """A run in one piece, by the trainer alone, beside the others; asked for, it gives its final weights' sha256."""
    runs.place(workdir, run)
    (workdir / "data").symlink_to(bucket / "inputs" / run["inputs"]["dataset"]["sha256"])
    process = rank_world.CONTEXT.Process(target=rank_world.train_on_one_rank, args=(workdir,), daemon=True)
    process.start()

    def weights() -> str:
        process.join()
        assert process.exitcode == 0
        found: str = json.loads((workdir / "results.json").read_text())["weights_sha256"]
        return found

    try:
        yield weights
    finally:
        process.kill()  # no effect on one that has ended
        process.join()


@pytest.mark.skipif(sys.platform != "linux", reason="a trainer dies with its supervisor on Linux only")
@pytest.mark.parametrize(
    ("noticed", "killed"),
    [(False, (1,)), pytest.param(True, (0, 1, 2), marks=pytest.mark.slow)],
    ids=["a kill", "a notice and three kills"],
)
def test_an_interruption_changes_no_bit_of_the_weights(noticed: bool, killed: tuple[int, ...], tmp_path: Path) -> None:
    """`killed`: the phases in which a node is lost without notice."""
    bucket = tmp_path / "bucket"
    # Seconds in a phase, so that a notice is seen while it trains, also on a quick machine.
    config = replace(CONFIG, steps_per_phase=60) if noticed else CONFIG
    run = runs.with_stories(runs.tree(config), bucket)
    draw = random.Random(SEED)

    with undisturbed(tmp_path / "undisturbed", run, bucket) as expected:
        if noticed:
            with Imds() as imds:
                first = TrainerAttempt(tmp_path, bucket, run, "i-1", AWS_EC2_METADATA_SERVICE_ENDPOINT=imds.endpoint)
                first.wait_for("two steps", lambda: len(first.steps()) >= 2)
                imds.notice(imds.clock.now() + timedelta(minutes=9))
                first.wait_for("the notice's line", lambda: "spot notice" in first.own_log())
                said = first.output()
            assert first.process.returncode == 75, said
            ended = json.loads((bucket / "r1" / "attempts" / "i-1.json").read_text())["exit"]
            assert ended["notice"] is True
            assert manifests(bucket)[-1] == first.steps()[-1]  # 0 optimizer steps lost

        # A kill in a phase, some steps after its beginning (or after where the attempt went on).
        for number, phase in enumerate(killed, 2):
            newest, steps = max(manifests(bucket), default=0), draw.randrange(2, 7)
            attempt = TrainerAttempt(tmp_path, bucket, run, f"i-{number}")
            least = max(newest, phase * config.steps_per_phase) + steps
            attempt.wait_for(f"step {least}", partial(reached, attempt, least, bucket))
            attempt.sigkill()
            assert attempt.steps()[0] == newest + 1  # it went on from the newest manifest
            assert not (bucket / "r1" / "done.json").exists()

        newest = manifests(bucket)[-1]
        last = TrainerAttempt(tmp_path, bucket, run, "i-5")
        said = last.output()
        assert last.process.returncode == 0, said
        assert last.steps()[0] == newest + 1
        results = json.loads((bucket / "r1" / "results.json").read_text())
        assert results["weights_sha256"] == expected()
        logged = [json.loads(line)["step"] for line in (bucket / "r1" / "metrics.jsonl").read_text().splitlines()]
        assert logged == list(range(1, 3 * config.steps_per_phase + 1))
        receipt = json.loads((bucket / "r1" / "receipt.json").read_text())
        assert len(receipt["attempts"]) == noticed + len(killed) + 1
        counted = receipt["interruptions"]
        assert (counted["with_notice"], counted["without_notice"]) == (noticed, len(killed))
        assert json.loads((bucket / "r1" / "done.json").read_text())["reason"] == "finished"
