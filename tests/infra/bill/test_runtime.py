"""Hours from work. The expected figures are those of the experiment's own table, computed from the model's shape."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill import runtime
from gpufleet.infra.catalog import Instance, load_catalog
from gpufleet.infra.definition.model import Disk, Estimate
from gpufleet.infra.errors import GpufleetError
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig
from tests.infra.cost_definitions import growth

pytestmark = pytest.mark.usefixtures("everything_known")

ROOT = Disk(size_gib=100)


def instance(type_: str) -> Instance:
    found = load_catalog().instances.get(type_)
    assert found is not None
    return found


def limit_s(type_: str, config: GrowthConfig) -> float:
    """Seconds of all steps at the roofline."""
    phases = runtime.hours(config, instance(type_), Estimate(), ROOT).phases
    return sum(phase.steps * (phase.limit_ms or 0) / 1e3 for phase in phases)


# g5: the table counts 10 B/param of optimizer traffic in phase 3; bf16 moments move 14 B, which is
# 4 B x 2,155,790,208 / 600 GB/s = 14.37 ms more per phase-3 step: 1.44 s per 100 steps, 14.4 s per 1000.
@pytest.mark.parametrize(
    ("sequences", "steps", "table_s", "more_s"),
    [
        (8, 100, 22.3, 1.44),
        (12, 100, 30.5, 1.44),
        (16, 100, 38.8, 1.44),
        (8, 1000, 3.7 * 60, 14.4),
        (12, 1000, 5.1 * 60, 14.4),
        (16, 1000, 6.5 * 60, 14.4),
    ],
)
def test_the_limit_on_an_a10g_is_the_tables_plus_the_traffic_of_bf16_moments(
    sequences: int, steps: int, table_s: float, more_s: float
) -> None:
    found = limit_s("g5.2xlarge", growth(sequences=sequences, steps_per_phase=steps))
    assert found == pytest.approx(table_s + more_s, rel=0.01)


@pytest.mark.parametrize(
    ("sequences", "steps", "table_s"),
    [(8, 100, 11.7), (16, 100, 14.9), (8, 1000, 2.0 * 60), (16, 1000, 2.5 * 60)],
)
def test_the_limit_on_an_l40s_with_fp32_adamw_is_the_tables(sequences: int, steps: int, table_s: float) -> None:
    found = limit_s("g6e.2xlarge", growth(sequences=sequences, steps_per_phase=steps, state="fp32"))
    assert found == pytest.approx(table_s, rel=0.025)  # the table rounds 117 s to 2.0 min


def test_the_steps_of_each_phase_at_batch_8_are_22_5_and_42_and_173_ms() -> None:
    phases = runtime.hours(growth(sequences=8), instance("g5.2xlarge"), Estimate(), ROOT).phases
    assert [phase.limit_ms for phase in phases] == pytest.approx([22.5, 42.0, 172.8], abs=0.1)


def test_efficiency_one_half_doubles_the_limit_and_one_is_the_limit() -> None:
    config = GrowthConfig()
    half = runtime.hours(config, instance("g5.2xlarge"), Estimate(), ROOT).phases[0]
    whole = runtime.hours(config, instance("g5.2xlarge"), Estimate(efficiency=1), ROOT).phases[0]  # type: ignore[arg-type]
    assert half.step_ms == pytest.approx(2 * whole.step_ms)
    assert whole.step_ms == whole.limit_ms


def test_a_fast_gpu_waits_for_its_host_and_a_slow_one_does_not() -> None:
    found = [
        runtime.hours(growth(sequences=16), instance(type_), Estimate(efficiency=efficiency), ROOT)
        for type_, efficiency in (("g5.2xlarge", None), ("g6e.2xlarge", Decimal(1)), ("p5en.48xlarge", None))
    ]
    slow, _, fast = (each.phases for each in found)
    host = "what the host needs to launch a step"
    assert [each.basis for each in found] == [
        "50% of the roofline, from public measurements",
        f"100% of the roofline, estimate.efficiency, but for dense, moe: {host}",
        f"50% of the roofline, from public measurements, but for dense, moe: {host}",
    ]
    assert [phase.step_ms / (phase.limit_ms or 0) for phase in slow] == pytest.approx([2, 2, 2])
    assert [phase.step_ms for phase in fast[:2]] == pytest.approx([10.7, 21.9])
    assert all(phase.step_ms > 2 * (phase.limit_ms or 0) for phase in fast[:2])
    assert fast[2].step_ms == pytest.approx(2 * (fast[2].limit_ms or 0))


@pytest.mark.parametrize(
    ("config", "layer_ms"),
    [(SftConfig(), 4.7), (SftConfig(method="full"), 2.4), (KernelConfig(), 2.4)],
    ids=["lora", "all weights", "kernel-sft"],
)
def test_a_small_model_waits_for_its_host_in_each_micro_batch(
    config: SftConfig | KernelConfig, layer_ms: float
) -> None:
    shape: dict[str, Any] = {
        "vocab": 4000,
        "layers": 24,
        "width": 128,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 64,
        "ffn": 256,
    }
    config = replace(config, model=replace(config.model, **shape))
    micro = replace(config.batch, micro_tokens=config.data.row)
    for each, micros in ((config, config.ladder(8)[0].micro), (replace(config, batch=micro), 1)):
        train = runtime.hours(each, instance("p5.48xlarge"), Estimate(), ROOT)
        rows = -(-(each.batch.tokens // each.data.row) // 8)
        assert train.phases[0].step_ms == pytest.approx(3 + -(-rows // micros) * 24 * layer_ms)
        assert f"but for {train.phases[0].name}" in train.basis
    large = runtime.hours(type(config)(), instance("p5.48xlarge"), Estimate(), ROOT)
    assert "host" not in large.basis


def test_a_small_character_model_waits_for_its_host_too() -> None:
    config = PretrainConfig()
    small = replace(config, model=replace(config.model, layers=12, width=256, head_dim=64))
    found = runtime.hours(small, instance("p5.48xlarge"), Estimate(), ROOT)
    assert found.phases[0].step_ms == pytest.approx(3 + 12 * 2.1)  # all of a rank's rows at once
    assert "host" not in runtime.hours(config, instance("p5.48xlarge"), Estimate(), ROOT).basis


def test_measured_step_times_replace_the_roofline_and_are_named_as_the_basis() -> None:
    found = runtime.hours(GrowthConfig(), instance("g5.2xlarge"), Estimate(step_ms=(30, 60, 250)), ROOT)  # type: ignore[arg-type]
    assert [phase.step_ms for phase in found.phases] == [30, 60, 250]
    assert found.basis == "step times from estimate.step_ms"


def test_fp32_compute_uses_the_fp32_peak() -> None:
    narrow = runtime.hours(GrowthConfig(), instance("g5.2xlarge"), Estimate(), ROOT).phases[0]
    wide = runtime.hours(growth(compute="fp32"), instance("g5.2xlarge"), Estimate(), ROOT).phases[0]
    assert wide.step_ms > 1.7 * narrow.step_ms  # 35 TF against 70, traffic unchanged


def test_the_predicted_mfu_is_what_a_node_measures_at_the_predicted_speed() -> None:
    for compute in ("bf16", "fp32"):
        config = growth(compute=compute)
        phase = runtime.hours(config, instance("g5.2xlarge"), Estimate(), ROOT).phases[0]
        flop_per_s = phase.tokens_per_s * config.phases()[0].flops_per_token
        assert phase.mfu == pytest.approx(flop_per_s / 70e12)  # the denominator of job/experiments/engine/device.py
        several = runtime.hours(config, instance("g5.12xlarge"), Estimate(), ROOT).phases[0]
        assert several.mfu == phase.mfu  # of the GPUs used: one of four


@pytest.mark.parametrize(("type_", "minutes"), [("g5.2xlarge", 8), ("g6e.2xlarge", 8), ("p5.4xlarge", 15)])
def test_setup_is_8_minutes_on_g_types_and_15_on_p_types(type_: str, minutes: int) -> None:
    found = runtime.hours(GrowthConfig(), instance(type_), Estimate(), ROOT)
    assert found.setup_s == found.restart_s == minutes * 60


def test_a_slice_of_a_gpu_is_slower_by_its_share() -> None:
    whole = runtime.hours(GrowthConfig(), instance("g6.xlarge"), Estimate(), ROOT).phases[0]
    slice_ = runtime.hours(GrowthConfig(), instance("g6f.xlarge"), Estimate(), ROOT).phases[0]
    again = (slice_.limit_ms or 0) - 8 * (
        whole.limit_ms or 0
    )  # within 3 GB activations are not kept, so they are computed twice
    assert 0 < again < 0.1 * (slice_.limit_ms or 0)
    assert slice_.step_ms == pytest.approx(8 * whole.step_ms + 2 * again)


@pytest.mark.parametrize("type_", ["g4dn.xlarge", "p3dn.24xlarge"])
def test_a_gpu_without_a_known_peak_asks_for_measured_step_times(type_: str) -> None:
    with pytest.raises(GpufleetError, match=r"estimate\.step_ms"):
        runtime.hours(GrowthConfig(), instance(type_), Estimate(), ROOT)


def test_a_cpu_run_has_no_roofline() -> None:
    with pytest.raises(GpufleetError, match=r"device: cpu .* estimate\.step_ms"):
        runtime.hours(growth(device="cpu"), instance("g5.2xlarge"), Estimate(), ROOT)


def test_a_cpu_run_has_no_share_of_the_gpus_peak() -> None:
    found = runtime.hours(growth(device="cpu"), instance("g5.2xlarge"), Estimate(step_ms=(30, 60, 250)), ROOT)  # type: ignore[arg-type]
    assert [phase.mfu for phase in found.phases] == [None, None, None]


def test_growth_takes_time_by_size_and_compiling_only_on_a_gpu() -> None:
    small = replace(growth(), model=replace(growth().model, vocab=512, layers=3, width=64, heads=4, ffn=256))
    large = runtime.hours(growth(), instance("g5.2xlarge"), Estimate(), ROOT)
    assert large.growth_s == pytest.approx(2 * 40 + 5 * 4 * (0.371640 + 2.155790), rel=1e-4)
    on_gpu = runtime.hours(small, instance("g5.2xlarge"), Estimate(), ROOT)
    assert 2 * 40 < on_gpu.growth_s < 2 * 40 + 1
    on_cpu = runtime.hours(replace(small, device="cpu"), instance("g5.2xlarge"), Estimate(step_ms=(1, 1, 1)), ROOT)  # type: ignore[arg-type]
    assert on_cpu.growth_s < 1


def test_the_upload_never_beats_the_types_sustained_network() -> None:
    assert runtime.upload_rate(instance("g5.2xlarge"), Estimate()) == 5 / 8  # 5 Gbps
    assert runtime.upload_rate(instance("g5.12xlarge"), Estimate()) == 1.02  # measured there, network 40 Gbps
    assert runtime.upload_rate(instance("g5.2xlarge"), Estimate(upload_gb_per_s=2)) == 2  # type: ignore[arg-type]


def test_without_instance_store_checkpoints_are_written_at_the_root_disks_speed() -> None:
    assert runtime.scratch_rate(instance("g5.2xlarge"), ROOT) == 1.0
    fast = Disk(size_gib=100, throughput_mibps=1000)
    assert runtime.scratch_rate(instance("p3.2xlarge"), ROOT) == pytest.approx(0.131, abs=0.001)
    assert runtime.scratch_rate(instance("p3.2xlarge"), fast) == pytest.approx(1.75 / 8)  # the type's EBS baseline


def test_evaluations_saves_growth_and_the_final_upload_are_in_the_hours() -> None:
    found = runtime.hours(GrowthConfig(), instance("g5.2xlarge"), Estimate(), ROOT)
    steps_s = sum(phase.steps * phase.step_ms for phase in found.phases) / 1e3
    parts = steps_s + found.evaluation_s + found.stalls_s + found.growth_s + found.upload_s
    assert found.work_s == pytest.approx(parts)
    assert min(found.evaluation_s, found.stalls_s, found.growth_s, found.upload_s) > 5


@pytest.mark.parametrize(("gpus", "rounds"), [(8, 1), (4, 2), (2, 4), (1, 7)])
def test_a_rank_generates_its_share_of_the_candidates_32_at_once(gpus: int, rounds: int) -> None:
    config = KernelConfig(gpus=gpus)  # 200 candidates of at most 2,048 tokens, 20 ms each
    _, generate, _ = runtime.hours(config, instance("p5.48xlarge"), Estimate(), ROOT).phases
    assert generate.seconds == pytest.approx(rounds * 2048 * 0.02)


def test_with_a_frozen_base_an_evaluation_takes_nearly_half_of_a_step_per_token() -> None:
    """A frozen base gets no weight gradients: 2 of its 4 FLOP per parameter and token are forward, not a third."""
    config = SftConfig()
    once = replace(config, eval=replace(config.eval, every=10_000_000))
    found, other = (runtime.hours(each, instance("p5.4xlarge"), Estimate(), ROOT) for each in (config, once))
    evaluations, tokens = -(-found.phases[0].steps // config.eval.every), config.eval.rows * config.data.row
    forward = 2 * (7_504_658_432 + 167_772_160) + 2 * 32 * 4096 * 361  # matrices, adapters, attention in an example
    seconds = (evaluations - 1) * tokens * forward / (0.45 * 989.5e12)
    assert found.evaluation_s - other.evaluation_s == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("config", "rows", "like"),
    [
        (SftConfig(), 12, 16),  # on eight GPUs two rows for each
        (SftConfig(method="full"), 9, 16),
        (KernelConfig(), 60, 64),
    ],
)
def test_gpus_without_a_row_wait_for_those_that_have_one(
    config: SftConfig | KernelConfig, rows: int, like: int
) -> None:
    def step_ms(count: int) -> float:
        cut = replace(config, batch=replace(config.batch, tokens=count * config.data.row))
        found = runtime.hours(cut, instance("p4d.24xlarge"), Estimate(), ROOT)
        assert found.ranks == 8
        return found.phases[0].step_ms

    assert step_ms(rows) == pytest.approx(step_ms(like), rel=1e-9)
    assert step_ms(like) > 1.05 * step_ms(like - 8)


def test_nodes_beyond_a_steps_rows_make_nothing_faster() -> None:
    def step_ms(config: GrowthConfig | SftConfig, type_: str, nodes: int) -> float:
        return runtime.hours(config, instance(type_), Estimate(), ROOT, nodes=nodes).phases[0].step_ms

    four, eight = (step_ms(SftConfig(), "p5.4xlarge", nodes) for nodes in (4, 8))  # 4 rows a step
    assert four == eight
    assert four < 0.35 * step_ms(SftConfig(), "p5.4xlarge", 1)
    assert step_ms(GrowthConfig(), "g5.2xlarge", 2) == step_ms(GrowthConfig(), "g5.2xlarge", 1)  # one process


@pytest.mark.parametrize(("workers", "parallel"), [(None, 8), (1, 1), (16, 16)])
def test_candidates_are_judged_by_the_funnels_workers_or_by_one_per_gpu(workers: int | None, parallel: int) -> None:
    config = KernelConfig(gpus=4)  # the GPUs that train; all GPUs of the node judge
    config = replace(config, funnel=replace(config.funnel, workers=workers))
    found = runtime.hours(config, instance("p5.48xlarge"), Estimate(), ROOT)
    verify, compiled_s = config.phases()[-1], config.phases()[-1].cpu_core_s / 192
    assert found.phases[-1].seconds - found.upload_s == pytest.approx(compiled_s + verify.gpu_s / parallel)


def test_saves_that_are_not_asynchronous_are_waited_for_until_they_are_written() -> None:
    config = SftConfig(method="full", batch=replace(SftConfig().batch, tokens=65_536))
    plain = replace(config, measures=replace(config.measures, async_checkpoints=False))
    beside, within = (runtime.hours(each, instance("p5.48xlarge"), Estimate(), ROOT) for each in (config, plain))
    written_s = config.sizes().checkpoints[0] / 1e9  # 96 GB at 1 GB/s
    assert beside.stalls_s == pytest.approx(beside.phases[0].saves * (0.1 + written_s / 8 / 4))
    assert within.stalls_s - beside.stalls_s == pytest.approx(within.phases[0].saves * written_s)


@pytest.mark.parametrize(("chunk", "step_ms"), [(None, 10.0), (64, 70.0)])  # of at most 443 queries
def test_each_chunk_of_the_towers_queries_is_launched_anew(chunk: int | None, step_ms: float) -> None:
    found = runtime.hours(TwoTowerConfig(chunk=chunk), instance("g5.xlarge"), Estimate(), ROOT)
    assert [phase.step_ms for phase in found.phases] == [step_ms] * 2


def test_fsdp_over_pcie_waits_for_its_gradients_and_over_nvlink_does_not() -> None:
    """On an A10G each of a rank's 32 rows is a micro-batch. For each of 4.187 G parameters it gathers 2 B of weights
    and sums 4 B of gradients, of which 7/8 are sent, at 45 % of 31.5 GB/s: 49.6 s a step.
    """
    config = PretrainConfig()
    parameters = 44 * 12 * 2816**2 + 2 * 32 * 2816
    sent_ms = 32 * 6 * parameters * 7 / 8 / (31.5e9 * 0.45) * 1e3
    assert sent_ms == pytest.approx(49_600, rel=0.001)
    pcie, nvlink = (
        runtime.hours(config, instance(type_), Estimate(efficiency=Decimal("0.5")), ROOT).phases[0]
        for type_ in ("g5.48xlarge", "p5.48xlarge")
    )
    work_ms = (pcie.limit_ms or 0) / 0.5
    assert pcie.step_ms == pytest.approx(work_ms + max(0, sent_ms - 0.8 * work_ms))
    assert pcie.step_ms > work_ms
    assert nvlink.step_ms == pytest.approx((nvlink.limit_ms or 0) / 0.5)


@pytest.mark.parametrize(
    ("limits_ms", "launch_ms", "exchange_ms", "bound"),
    [
        ((40.0, 10.0), 60.0, (0.0, 0.0), "computation"),
        ((10.0, 40.0), 60.0, (0.0, 0.0), "memory bandwidth"),
        ((40.0, 10.0), 101.0, (0.0, 0.0), "launches of its host"),
        ((40.0, 10.0), 60.0, (70.0, 0.0), "computation"),
        ((40.0, 10.0), 60.0, (161.0, 0.0), "the exchange between GPUs"),
        ((40.0, 10.0), 60.0, (0.0, 81.0), "the exchange between GPUs"),
        (None, 60.0, (0.0, 0.0), ""),
    ],
)
def test_what_takes_most_of_a_step_is_named(
    limits_ms: tuple[float, float] | None, launch_ms: float, exchange_ms: tuple[float, float], bound: str
) -> None:
    """A step reaches half of the roofline, 100 ms, and an exchange within a node may overlap with 80 ms of these."""
    assert runtime._bound(limits_ms, launch_ms, exchange_ms, 0.5) == bound


def test_a_small_batch_on_a_fast_gpu_waits_for_its_host() -> None:
    whole, cheap = (
        {phase.name: phase.bound for phase in runtime.hours(growth(), instance(type_), Estimate(), ROOT).phases}
        for type_ in ("p5.4xlarge", "g5.2xlarge")
    )
    assert (whole["dense"], whole["moe"]) == ("launches of its host", "launches of its host")
    assert set(cheap.values()) == {"computation"}
