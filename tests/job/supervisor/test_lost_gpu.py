"""A GPU that falls off: its node is refused at once, and heartbeats tell how GPUs fare until then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufleet.job.gpus import Sample, Sampler
from gpufleet.job.supervisor.attempts import REFUSALS
from tests.job.supervisor_world import Bench, FakeTrainer


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi beside the one that is played here
    found = Bench(tmp_path)
    found.sampler = Sampler(gpus=1, clock=found.clock)
    found.sampler.see(Sample(use=97.0, busiest=97.0, memory_gb=70.1, temperature_c=61.0))
    return found


def test_a_node_whose_gpu_falls_off_is_refused_at_once_though_its_trainer_hangs(bench: Bench) -> None:
    sampler = bench.sampler
    assert sampler is not None

    def fall(trainer: FakeTrainer) -> None:
        sampler.xids.append(79)
        trainer.hangs = True

    began = bench.clock.now
    assert bench.attempt(script={4: fall}).run() == 71
    assert bench.clock.now - began < 60
    told = bench.json("attempts/i-1.json")["exit"]
    assert (told["code"], told["reason"]) == (71, "node refused: a GPU is lost, Xid 79, fallen off the bus")
    assert bench.manifests() == [3]  # what was committed before is published
    beat = json.loads((bench.store.get_bytes("heartbeat/i-1.jsonl") or b"").splitlines()[-1])
    assert (beat["gpu_util"], beat["gpu_mem_gb"], beat["gpu_temp_c"], beat["xids"]) == (97.0, 70.1, 61.0, [79])


def test_a_trainer_that_crashes_of_it_first_gets_its_node_refused_too(bench: Bench) -> None:
    sampler = bench.sampler
    assert sampler is not None

    def crash(trainer: FakeTrainer) -> int:
        sampler.xids.append(95)
        return 1

    assert bench.attempt(script={4: crash}).run() == 71


def test_an_error_of_a_program_refuses_no_node(bench: Bench) -> None:
    sampler = bench.sampler
    assert sampler is not None
    assert bench.attempt(script={4: lambda trainer: sampler.xids.append(31)}).run() == 0


def test_once_enough_nodes_were_refused_it_is_not_the_nodes(bench: Bench) -> None:
    sampler = bench.sampler
    assert sampler is not None
    sampler.xids.append(79)
    for number in range(REFUSALS):
        assert bench.attempt(f"i-{number}").run() == 71
    assert bench.trainers == []  # before anything is staged
    assert bench.attempt("i-last").run() == 0
