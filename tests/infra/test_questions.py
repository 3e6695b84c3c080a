"""Questions of researchers before they rent anything. One command answers each, and its figures are worked by hand."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gpufleet.infra.bill.several import Several, StackRuns
from gpufleet.infra.bill.side import Quantiles, exact
from gpufleet.infra.commands import compare, cost
from gpufleet.infra.errors import GpufleetError
from tests.repository import ROOT

H100 = 989.5e12  # dense bf16 FLOP/s
IMAGE = "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `cost` or `compare` in a new project, and returns its JSON output."""
    (tmp_path / "stacks").mkdir()
    monkeypatch.chdir(tmp_path)

    def answered(command: Any, *words: str, code: int = 0, **stacks: Any) -> Any:
        for name, tree in stacks.items():
            text = tree if isinstance(tree, str) else yaml.safe_dump(tree)
            (tmp_path / "stacks" / f"{name}.yaml").write_text(text)
        parser = argparse.ArgumentParser()
        command.arguments(parser)
        assert command.run(parser.parse_intermixed_args([*words, "--json"])) == code
        return json.loads(capsys.readouterr().out)

    return answered


def stack(experiment: str, parameters: dict[str, Any], type_: str = "p5.48xlarge", **others: Any) -> dict[str, Any]:
    """A definition in us-east-2, on spot, with limits that no run reaches."""
    storage = {"dataset": "data/d", "root": {"size_gib": 500}, "keep": {"bucket": True, "days": 30}}
    return {
        "run": {"id": "r1", "owner": "me"},
        "job": {"experiment": experiment, "image": IMAGE, "parameters": parameters},
        "fleet": {"region": "us-east-2", "zones": ["us-east-2a"], "instance_types": [type_], "capacity": "spot"},
        "storage": storage | others.pop("storage", {}),
        "limits": {"max_usd": 5000, "max_hours": 500},
        **others,
    }


LLAMA_70B = {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 28_672}


def seventy_billion(*, spread: bool) -> dict[str, Any]:
    """LoRA on a million examples of a thousand tokens."""
    parameters = {
        "epochs": 1,
        "model": LLAMA_70B,
        "lora": {"rank": 16, "shard_base": spread},
        "data": {"examples": 1_000_000, "tokens_per_example": 1000, "held_out": 0.001, "row": 2048},
        "batch": {"tokens": 131_072},
        "eval": {"every": 100_000, "rows": 8, "prompts": 0},
    }
    return stack("sft-h100", parameters, estimate={"efficiency": 0.4}, storage={"base_weights": "data/70b"})


def test_seventy_billion_with_lora_on_eight_h100_for_a_billion_tokens(ask: Any) -> None:
    """Of a layer 2 x 8192^2 + 2 x 8192 x 1024 + 3 x 8192 x 28,672 = 855.6 M parameters are matrices, 68.45 G in 80
    layers, 69.50 G with the head of 128,256 x 8192. A token takes 4 FLOP of each, 6 of the adapters' 207 M (16 x (2 x
    16,384 + 2 x 9,216 + 3 x 36,864) x 80) and 6 x 80 x 8192 x 1000 of attention: 283.2 GFLOP. It runs with
    checkpointing, which makes again 0.885 x 472 kB less 168 kB of a token in a layer: 38.9 MB written and read in 80,
    and 11.6 us of an H100's memory beside the 286 us of its products. At 40 % of eight that is 10,745 tokens/s; of a
    billion, 98 % of each row text, 26.3 h.
    Memory: 141.1 GB of bf16 over eight are 17.6, two layers 3.4, the tables 4.2; nothing holds 141.1 on one.
    """
    matrices = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672) + 128_256 * 8192
    adapters = 80 * 16 * (2 * 16_384 + 2 * 9216 + 3 * 36_864)
    flop = 4 * matrices + 6 * adapters + 6 * 80 * 8192 * 1000
    tokens_s = 8 * 0.4 / (flop / H100 + 38.9e6 / 3350e9)
    assert tokens_s == pytest.approx(10_745, rel=0.001)
    found = ask(cost, "lora", lora=seventy_billion(spread=True))
    train = found["phases"][0]
    assert train["tokens_per_s"] == pytest.approx(tokens_s, rel=0.01)
    hours = 1e9 * 0.999 / 0.98 / tokens_s / 3600
    assert train["steps"] * train["step_ms"] / 3.6e6 == pytest.approx(hours, rel=0.01) == pytest.approx(26.3, rel=0.02)
    assert all(phase["fits"] for phase in found["fits"])
    with pytest.raises(GpufleetError, match="GB at its smallest micro-batch"):
        ask(cost, "lora", lora=seventy_billion(spread=False))


def test_a_model_of_one_and_a_half_billion_from_scratch_on_ten_billion_tokens(ask: Any) -> None:
    """48 layers of 12 x 1600^2 and a head of 50,304 x 1600: 1.555 G parameters multiply a token, 6 FLOP each, and 12 x
    48 x 1600 x 1024 of attention: 10.27 GFLOP. At 45 % of eight H100s 346,700 tokens/s: 8.0 h for 10 G.
    """
    model = {"layers": 48, "width": 1600, "head_dim": 64, "vocab": 50_304}
    parameters = {
        "steps": 9537,
        "model": model,
        "data": {"sequence": 1024, "characters": 10_000_000_000},
        "batch": {"rows": 1024},
    }
    found = ask(cost, "scratch", scratch=stack("pretrain-d64", parameters, estimate={"efficiency": 0.45}))
    (train,) = found["phases"]
    assert train["params_total"] == 48 * 12 * 1600**2 + 2 * 50_304 * 1600
    assert train["tokens_per_s"] == pytest.approx(346_700, rel=0.01)
    assert train["steps"] * train["step_ms"] / 3.6e6 == pytest.approx(8.0, rel=0.02)


def shipped(name: str) -> str:
    return (ROOT / "stacks" / f"{name}.yaml").read_text(encoding="utf-8")


def test_where_it_is_cheapest(ask: Any) -> None:
    found = ask(compare, "sft", "--scenario", "h100-optimized", sft=shipped("sft-h100"))
    regions = found["regions"]
    means = [float(row["usd"]["mean"]) for row in regions]
    assert means == sorted(means)
    assert (regions[0]["region"], len({row["region"] for row in regions})) == ("us-east-2", len(regions))
    assert means[0] < 0.5 * float(found["scenarios"][1]["usd"]["mean"])  # the cost of the unchanged file


def test_what_is_done_in_six_hours(ask: Any) -> None:
    found = ask(compare, "sft", "--scenario", "h100-optimized", "--within", "6", sft=shipped("sft-h100"))
    best = found["options"][0]
    assert best["late"] <= 0.5
    assert float(best["wall_hours"]["p50"]) < 6
    assert (
        "misses the deadline"
        in next(row for row in found["options"] if (row["type"], row["nodes"]) == ("p5.4xlarge", 1))["lost"]
    )


def test_a_development_box_for_a_day(ask: Any) -> None:
    """24 h of g5.2xlarge on demand in us-east-2 at 1.212 USD: 29.09, whatever the work in it."""
    box = stack("tinystories-growth", {}, "g5.2xlarge", scenarios={"box": {"hold_hours": 24}})
    box["fleet"]["capacity"] = "on-demand"
    found = ask(cost, "box", "--scenario", "box", box=box)
    (compute,) = [line for line in found["lines"] if line["kind"] == "compute"]
    assert float(compute["quantity"]) == pytest.approx(24, abs=0.01)
    assert float(compute["amount"]) == pytest.approx(24 * 1.212, rel=0.001)


def test_with_a_step_of_ones_own(ask: Any) -> None:
    """3 x 1000 steps of 200, 300 and 500 ms take 1,000 s; saves and the like come on top."""
    own = stack("tinystories-growth", {}, "g5.2xlarge", estimate={"step_ms": [200, 300, 500]})
    found = ask(cost, "own", own=own)
    assert sum(phase["steps"] * phase["step_ms"] for phase in found["phases"]) == 1_000_000


def test_a_sweep_of_twenty_runs(ask: Any) -> None:
    """The mean of a sum is the sum of means; its range is narrower than twenty ranges, about sqrt(20) = 4.5 times."""
    found = ask(cost, "own", "other", "--times", "20", own=shipped("tinystories-growth"), other=shipped("pretrain-d64"))
    means = [float(each["usd"]["mean"]) for each in found["stacks"]]
    assert float(found["usd"]["mean"]) == pytest.approx(20 * sum(means), rel=0.005)
    width, alike = (float(found[key]["p90"]) - float(found[key]["p10"]) for key in ("usd", "usd_alike"))
    assert alike / width == pytest.approx(math.sqrt(20), rel=0.15)
    medians = sum(float(each["usd"]["p50"]) for each in found["stacks"])
    assert float(found["usd_alike"]["p50"]) == pytest.approx(20 * medians)


def test_the_sum_of_independent_runs_is_that_of_a_binomial() -> None:
    """A run costs 1 or 3 USD, equally likely: of 100 the mean is 200, sd 10, so p10 and p90 are 12.8 from it."""
    values = np.array([1.0, 3.0] * 50)
    one = Quantiles(p10=exact(1), p50=exact(2), p90=exact(3), mean=exact(2))
    found = Several(parts=(StackRuns(name="a", times=100, one=one, max_usd=exact(5), usd=values),), price_age="")
    assert [float(found.independent.p10), float(found.independent.p90)] == pytest.approx([187.2, 212.8], abs=1.3)
    assert (float(found.alike.p90), float(found.max_usd)) == (300, 500)


def test_on_a_capacity_block(ask: Any) -> None:
    """A day of one p5.48xlarge at the 39.33 USD an hour of AWS's page of January 2025: 943.92, paid at once. A node has
    23.5 h of it. By hand: 500 GiB of disk are 0.0548 USD an hour (0.08 a month of 730 h), the address 0.005.
    """
    tree = stack("sft-h100", {"data": {"examples": 20_000}}, storage={"base_weights": "data/8b"})
    start, fee = "2099-12-01T11:30:00Z", 39.33 * 24
    block = {"start": start, "end": "2099-12-02T11:30:00Z", "fee_usd": round(fee, 2)}
    told = ask(cost, "block", block={**tree, "fleet": {**tree["fleet"], "capacity": "block", "block": block}})
    lines = {line["name"]: float(line["amount"]) for line in told["lines"]}
    hours = float(told["uninterrupted"]["hours"])
    assert (lines["compute"], lines["capacity block"]) == (0, 943.92)
    assert lines["root disk"] == pytest.approx(500 * 0.08 / 730 * hours, abs=1e-3)
    assert lines["public IPv4"] == pytest.approx(0.005 * hours, abs=1e-3)
    beside = sum(lines.values()) - 943.92 - lines["interruptions"]
    assert float(told["usd"]["p50"]) == pytest.approx(943.92 + beside, abs=0.01)
    assert told["cap"]["first"] == "fleet.block.end"
    assert float(told["cap"]["at_hours"]) == pytest.approx(23.5, abs=0.05)
    by_the_hour = float(told["on_demand"]["usd"]["p50"])  # for the part of the day that the run uses
    assert by_the_hour == pytest.approx(55.04 * float(told["on_demand"]["hours"]["p50"]) + beside, rel=0.02)
    assert told["cheaper"] is None  # for the whole day, which is paid
