"""A run that a released version has begun is trained to its end by this one, from the bucket that it left."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from gpufleet.job import atomic
from gpufleet.job.contract.reading import iso
from tests.job import runs
from tests.released.recorded import RECORDS, RecordedRun, place

STEPS = {"growth": 300, "command": 300}


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_next_node_goes_on_from_the_newest_checkpoint(record: Path, tmp_path: Path) -> None:
    started = {}
    for run in (RecordedRun(record / name) for name in STEPS if (record / name).is_dir()):
        bucket = place(run.interrupted, tmp_path / run.name)
        config = json.loads(run.interrupted["r1/run.json"])
        config["limits"]["expires"] = iso(time.time() + 86_400)  # when AWS ends its fleet, which is past by now
        run_json = runs.place(tmp_path / f"{run.name}-node", config)
        started[run] = runs.start(run_json, bucket, "i-2", GPUFLEET_LAUNCHED_AT=runs.launched(seconds_ago=60))
    for run, process in started.items():
        said = process.communicate()[0].decode()
        assert process.returncode == 0, said
        left = tmp_path / run.name / "r1"
        attempt = json.loads((left / "attempts" / "i-2.json").read_text())
        assert (attempt["attempt"], attempt["resumed_step"]) == (2, run.restored), said

        before = [line["step"] for line in atomic.objects(run.interrupted["r1/metrics.jsonl"])]
        lines = atomic.objects((left / "metrics.jsonl").read_bytes())
        kept = [step for step in before if step <= run.restored]
        assert [line["step"] for line in lines][: len(kept)] == kept
        if run.name == "growth":  # the trainer took what was restored for its own
            assert [line["resumed"] for line in lines[len(kept) :] if line["resumed"] is not None] == [run.restored]
        assert lines[len(kept)]["step"] > run.restored
        assert lines[-1]["step"] == STEPS[run.name]
        assert json.loads((left / "done.json").read_text())["reason"] == "finished"
        receipt = json.loads((left / "receipt.json").read_text())
        assert [each["last_step"] for each in receipt["attempts"]][1] == STEPS[run.name]
        assert receipt["interruptions"]["with_notice"] == 1
