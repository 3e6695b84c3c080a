"""How ranks meet; and what rank 0 decides arrives whole on every rank, however long and in whatever script."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpufleet.job.experiments.engine import parallel
from gpufleet.job.experiments.engine.parallel import World


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


@pytest.mark.parametrize(("theirs", "plugin"), [(None, "none"), ("ofi", "ofi")])
def test_nccl_meets_without_a_plugin_for_a_network_that_one_node_has_not(
    theirs: str | None, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"})
    if theirs is not None:
        os.environ["NCCL_NET_PLUGIN"] = theirs
    seen: list[str | None] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get("NCCL_NET_PLUGIN")))
    monkeypatch.setattr(parallel, "require_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(parallel, "meet", lambda kind, *, local_rank, nodes: World(local_rank=local_rank))
    assert parallel.join("cuda").local_rank == 1
    assert seen == [plugin]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"  # all that its container has


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_gradients_of_shards_are_summed_in_fp32(compute: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[Any] = []
    monkeypatch.setattr(parallel, "fully_shard", lambda part, **given: policies.append(given["mp_policy"]))
    parallel.shard(torch.nn.Linear(2, 2), World(size=2), [], compute=compute, reshard=True)
    gathered = None if compute == torch.float32 else compute  # None: as the weights are
    assert [(policy.param_dtype, policy.reduce_dtype) for policy in policies] == [(gathered, torch.float32)]
