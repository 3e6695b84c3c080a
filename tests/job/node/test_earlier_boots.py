"""Which boots count as futile."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.job.contract.attempt import AttemptRecord
from gpufleet.job.node.earlier_boots import futile_boots, newest_manifest

CRASH: dict[str, Any] = {"exit": {"code": 1, "notice": False}}
NOTICE: dict[str, Any] = {"exit": {"code": 75, "notice": True}}
LOST: dict[str, Any] = {}
OLD, NEW = "r1/ckpt/step_00000100/manifest.json", "r1/ckpt/step_00000200/manifest.json"

CASES: dict[str, tuple[list[dict[str, Any]], int]] = {
    "none": ([], 0),
    "crashes": ([CRASH, CRASH], 2),
    "a lost node counts": ([LOST, CRASH], 2),
    "a notice is passed over": ([CRASH, NOTICE, CRASH], 2),
    "a checkpoint since then begins anew": ([{**CRASH, "manifest_at_boot": OLD}, CRASH], 1),
    "results before a notice begin anew": ([CRASH, {**NOTICE, "results": True}, CRASH], 1),
    "results of a lost node begin anew": ([CRASH, {**LOST, "results": True}, CRASH], 1),
    "results before a crash do not": ([CRASH, {**CRASH, "results": True}, CRASH], 3),
    "what is no exit is none": ([{"exit": "gone"}, {"exit": [1]}], 2),
}


def read(boot: dict[str, Any]) -> AttemptRecord:
    return AttemptRecord.from_json(boot, print)


@pytest.mark.parametrize(("boots", "count"), CASES.values(), ids=CASES.keys())
def test_boots_in_a_row_that_led_nowhere(boots: list[dict[str, Any]], count: int) -> None:
    timed = [{"manifest_at_boot": NEW, **boot, "booted_at": f"2026-11-21T1{n}:00:00Z"} for n, boot in enumerate(boots)]

    assert futile_boots(map(read, reversed(timed)), NEW) == count


def test_no_manifest_then_and_none_now_is_the_same() -> None:
    boots = [CRASH, {**CRASH, "manifest_at_boot": None}, {**CRASH, "manifest_at_boot": ""}]
    assert futile_boots(map(read, boots), None) == 3


def test_the_newest_manifest_is_that_of_the_highest_step() -> None:
    keys = ["ckpt/step_00000100/manifest.json", "ckpt/step_00001200/manifest.json", "ckpt/step_00009999/model.bin"]

    assert newest_manifest(keys) == "ckpt/step_00001200/manifest.json"
    assert newest_manifest(["done.json"]) is None
