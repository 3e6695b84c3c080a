"""Each of sft-h100's measures, if switched off, changes the bill by its measured effect."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import cast

import pytest

from gpufleet.infra.bill import runtime
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.runtime import Runtime
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import Estimate, StackDefinition
from gpufleet.infra.evidence import roofline
from gpufleet.infra.risk.unknown import P90
from gpufleet.job.experiments.sft.spec import ChatData, Measures, SftConfig
from tests.repository import ROOT

CATALOG = load_catalog()
SFT = load(ROOT / "stacks" / "sft-h100.yaml", now=datetime(2026, 11, 27, tzinfo=UTC))
CONFIG = cast(SftConfig, SFT.job.parameters)


def with_config(config: SftConfig) -> StackDefinition:
    limits = replace(SFT.limits, max_usd=Decimal(5000), max_hours=Decimal(500))
    return replace(SFT, job=replace(SFT.job, parameters=config), limits=limits)


def switched_off(*names: str, config: SftConfig = CONFIG) -> SftConfig:
    return replace(config, measures=replace(config.measures, **dict.fromkeys(names, False)))


def runtime_on(type_: str, config: SftConfig) -> Runtime:
    return runtime.hours(config, CATALOG.instances[type_], Estimate(), SFT.storage.root)


@pytest.mark.parametrize("name", [field.name for field in fields(Measures)])
def test_a_bill_without_a_measure_is_dearer(name: str) -> None:
    plain, off = (price(with_config(each), CATALOG, runs=100) for each in (CONFIG, switched_off(name)))
    assert off.chosen.total > plain.chosen.total


def test_an_eager_step_takes_18_percent_longer_as_measured_on_an_h100() -> None:
    """A step takes 630 ms instead of 533 (bench/results/gpu.md). The effect is smaller if the host sets the pace."""
    one_row = replace(CONFIG, batch=replace(CONFIG.batch, micro_tokens=CONFIG.data.row))  # both are cut in the same way
    compiled, eager = (
        runtime_on("p5.4xlarge", each).phases[0].step_ms for each in (one_row, switched_off("compile", config=one_row))
    )
    assert eager / compiled == pytest.approx(630 / 533, abs=0.002)


def test_text_that_is_tokenised_while_training_takes_the_host_s_time_and_the_bucket_s_room() -> None:
    """A core makes 540 tokens in a millisecond: each rank makes its next rows while its GPU works on earlier ones."""
    texts = switched_off("pretokenised")
    row_ms = CONFIG.data.row * CONFIG.data.fill / 540
    hosts = [roofline.launch_ms(each.phases()[0], CATALOG.instances["p5.4xlarge"], each, 1) for each in (CONFIG, texts)]
    assert hosts[1] - hosts[0] == pytest.approx(CONFIG.rows() * row_ms)
    assert (
        runtime_on("p5.4xlarge", texts).phases[0].step_ms == runtime_on("p5.4xlarge", CONFIG).phases[0].step_ms
    )  # the GPU takes longer
    more = texts.sizes().dataset - CONFIG.sizes().dataset
    assert more == pytest.approx(CONFIG.data.examples * CONFIG.data.tokens_per_example * 4, rel=1e-6)


def test_a_bill_without_packing_says_what_its_rows_hold() -> None:
    def doubt(found: Bill) -> str:
        return " ".join(each for each in found.warnings if "measures.packing" in each)

    padded = switched_off("packing")
    assert doubt(price(with_config(padded), CATALOG, runs=100)) == (
        "measures.packing is off: a row of 4,096 tokens holds one example of 361, and 91% of the work is padding."
        " Let data.row be data.longest, 1,024."
    )
    short = replace(padded, data=replace(padded.data, row=1024))
    assert doubt(price(with_config(short), CATALOG, runs=100)) == (
        "measures.packing is off: a row of 1,024 tokens holds one example of 361, and 65% of the work is padding."
    )
    assert not doubt(price(with_config(CONFIG), CATALOG, runs=100))


def test_an_adapter_of_70_b_on_eight_h100_is_as_fast_as_published_within_its_range() -> None:
    """8,735 tokens/s, NVIDIA NeMo AutoModel, docs/performance-summary.mdx, 2026-06: whole rows of 4,096."""
    model = replace(CONFIG.model, layers=80, width=8192, heads=64, kv_heads=8, head_dim=128, ffn=28_672)
    config = replace(
        CONFIG,
        model=model,
        lora=replace(CONFIG.lora, rank=16, shard_base=True),
        data=ChatData(row=4096, longest=4096, tokens_per_example=4096.0, fill=1.0),
        batch=replace(CONFIG.batch, tokens=8 * 4096),
    )
    found = runtime_on("p5.48xlarge", config)
    assert math.exp(-P90 * found.slower) < found.phases[0].tokens_per_s / 8735 < math.exp(P90 * found.faster)
    assert found.slower < 0.25
