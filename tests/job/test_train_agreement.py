"""What rank 0 decides arrives whole on every rank, however long and in whatever script."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from job.train.parallel import World


@pytest.mark.parametrize(
    "value",
    [
        None,
        ["timed", ["test", True]],
        [None, ["Abbruch durch Müller: " + "é" * 200, True]],
        "x" * 506,
        "x" * 507,
        "not \u0000 an end",
        "日本" * 5000,
    ],
)
def test_a_decision_arrives_whole(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    monkeypatch.setattr(dist, "broadcast", lambda message, source, group: sent.append(message.clone()))
    assert World(rank=0, size=2).agree(value) == value
    monkeypatch.setattr(dist, "broadcast", lambda message, source, group: message.copy_(sent.pop(0)))
    assert World(rank=1, size=2).agree("rank 1's own") == value
    assert sent == []
