"""Messages in the work folder: what is written is read, and what cannot be is nothing."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.job import atomic
from gpufleet.job.contract import messages
from gpufleet.job.contract.messages import Message

WRITTEN = [
    messages.Start(rung=2),
    messages.Stop(reason="max_usd", save=True, ends=True),
    messages.Stop(reason="notice", save=False, deadline=1.5),
    messages.Spent(spent_usd=Decimal("1.25"), spent_s=Decimal(60), at=3.0),
    messages.Accept(),
    messages.Fatal(error="ValueError", detail="no dataset"),
    messages.UsedRung(phase="dense", rung=1, micro=8, checkpointing=True, lower=2),
    messages.Ended(code=75),
    messages.Unreadable(step=5, problem="torn"),
    messages.Spent(spent_usd=Decimal("1.25"), spent_s=Decimal(60), at=3.0, attempt=2, published=500),
    messages.CommandEnd(how="the command ended with exit code 1 at step 3", lines=("no such corpus",)),
    messages.Container(number=1, wanted=False),
    messages.Contained(number=1, pid=7),
    messages.Preflight(ranks=({"matmul_tflops": 1.0},), problems=("rank 0: slow",)),
]


@pytest.mark.parametrize("message", WRITTEN, ids=lambda message: message.FILE)
def test_a_message_is_read_as_it_was_written(tmp_path: Path, message: Message) -> None:
    assert type(message).read(tmp_path) is None
    message.write(tmp_path)
    assert type(message).read(tmp_path) == message


@pytest.mark.parametrize("content", [b"", b"[]", b'{"rung": "two", "code": -1, "step": 1.5, "spent_usd": "much"}'])
def test_what_says_nothing_counts_as_not_there(tmp_path: Path, content: bytes) -> None:
    for kind in (
        messages.Start,
        messages.Spent,
        messages.Fatal,
        messages.UsedRung,
        messages.Ended,
        messages.Unreadable,
    ):
        atomic.write_bytes(tmp_path / kind.FILE, content)
        assert kind.read(tmp_path) is None
