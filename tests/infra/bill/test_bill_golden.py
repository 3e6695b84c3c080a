"""Bills worked by hand: every line follows from shapes, prices and arithmetic written here, without the code's help.

Sizes and formulas are the experiments' (docs/bill.md, docs/parameters.md); prices are the shipped catalog's. Seconds
are floats, money is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from math import ceil
from pathlib import Path

import pytest

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import Disk, Estimate, Keep, Limits, StackDefinition
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig
from gpufleet.job.kind import JobConfig
from tests.freezing import assert_frozen
from tests.infra.cost_definitions import definition, on_nodes

pytestmark = pytest.mark.usefixtures("everything_known")

GOLDEN = Path(__file__).parent / "golden"
PART = 64 * 1024 * 1024  # bytes of one upload request
H100_TFLOPS, H100_GB_S = 989.5e12, 3350e9  # bf16 dense, memory
A10G_BF16, A10G_FP32, A10G_GB_S = 70e12, 35e12, 600e9


def cents(quantity: float, each: str) -> Decimal:
    """The amount of a line: the quantity, rounded to a millionth, times the price, rounded to 1/100 cent."""
    return (Decimal(f"{quantity:.6f}") * Decimal(each)).quantize(Decimal("0.0001"))


def worked(
    *,
    seconds: float,
    usd_per_hour: str,
    nodes: int = 1,
    root_gib: int,
    stored_gb: float,
    left_gb: float,  # exports and final, uploaded once
    inputs_gb: float,  # dataset and weights
    saves: Sequence[tuple[float, int]],  # (number of checkpoints, requests for each)
    final_gb: float,
    logged_lines: float,
) -> dict[str, Decimal]:
    """Prices of us-east-1 and us-east-2: storage 0.08 and 0.023, address 0.005, requests 0.005 and 0.0004 per 1000,
    transfer 0.09, logs 0.50. A month is 730 h, the bucket is kept for 7 days.
    """
    hours = seconds / 3600 * nodes
    writes = sum(count * requests for count, requests in saves) + left_gb * 1e9 / PART + 100
    writes += inputs_gb * 1e9 / (5 * 1024 * 1024)  # the provider's parts
    writes += seconds / 60 * 3  # uploads per minute: heartbeat, metrics and job log
    return {
        "compute": cents(hours, usd_per_hour),
        "root disk": cents(root_gib * hours / 730, "0.08"),
        "public IPv4": cents(hours, "0.005"),
        "S3 storage": cents((stored_gb + 0.02) * 7 * 24 / 730, "0.023"),  # 20 MB of reports
        "S3 write requests": cents(writes / 1000, "0.005"),
        "S3 read requests": cents(((final_gb + inputs_gb) * 1e9 / PART + 100 + seconds / 60) / 1000, "0.0004"),
        "transfer of results": cents(final_gb + 0.02, "0.09"),
        "logs": cents(0.005 + logged_lines * 250 / 1e9, "0.50"),
    }


def plan(
    config: JobConfig,
    type_: str,
    *,
    capacity: str = "spot",
    region: str = "us-east-2",
    root_gib: int = 200,
    weights: str | None = None,
    efficiency: str | None = None,
    nodes: int = 1,
) -> StackDefinition:
    found = definition(
        types=(type_,), region=region, capacity=capacity, root=Disk(size_gib=root_gib), keep=Keep(days=7)
    )
    found = replace(
        found,
        job=replace(found.job, parameters=config),
        storage=replace(found.storage, base_weights=weights),
        limits=Limits(max_usd=Decimal(100_000), max_hours=Decimal(10_000)),
        estimate=Estimate(efficiency=None if efficiency is None else Decimal(efficiency)),
    )
    return on_nodes(found, nodes)


def bill(asked: StackDefinition) -> Bill:
    return price(asked, load_catalog(), runs=100)


WORKED = {
    *("compute", "root disk", "public IPv4", "S3 storage", "S3 write requests", "S3 read requests"),
    *("transfer of results", "logs"),
}


def lines(found: Bill) -> dict[str, Decimal]:
    """The lines that are worked here. The other lines of a bill are in the frozen bills."""
    return {line.name: line.amount for line in found.lines if line.name in WORKED}


def end_s(written_gb: float, upload_gb_s: float) -> float:
    """The last checkpoint and final/: instance store 1 GB/s, hash 1.4 GB/s, upload."""
    return written_gb * (1 / 1.0 + 1 / 1.4 + 1 / upload_gb_s)


def requests_of(saves: float, checkpoint_gb: float, end_gb: float, ranks: int) -> list[tuple[float, int]]:
    """A phase's saves in the form that `worked` takes: all are alike except the last, which has no moments. Each rank's
    file takes a request to begin and one to complete it; two small files, the manifest, best.json, metrics and a
    listing take one request each.
    """
    whole, end = (ceil(gb * 1e9 / PART) + 2 * ranks + 6 for gb in (checkpoint_gb, end_gb))
    return [(saves - 1, whole), (1, end)]


def test_growth_on_an_a10g_spot_node() -> None:
    # 1000 steps a phase, 16 x 256 = 4096 tokens a step. A token's FLOPs: 6 x matmul parameters + 6 x layers x width x
    # sequence; a step is FLOPs at 70 TFLOP/s plus optimizer traffic at 600 GB/s, at half of that limit.
    tokens = 16 * 256
    flops = (
        6 * (50257 * 832 + 7 * (4 * 832**2 + 2 * 832 * 3328)) + 6 * 7 * 832 * 256,
        6 * (50257 * 832 + 7 * (4 * 832**2 + 2 * 2 * 832 * 3328 + 832 * 8)) + 6 * 7 * 832 * 256,
        6 * (50257 * 1664 + 11 * (4 * 1664**2 + 2 * 2 * 1664 * 6656 + 1664 * 8)) + 6 * 11 * 1664 * 256,
    )
    parameters = (100_038_016, 371_640_256, 2_155_790_208)
    step_s = [
        (tokens * each / A10G_BF16 + count * traffic / A10G_GB_S) / 0.5
        for each, count, traffic in zip(flops, parameters, (28, 28, 14), strict=True)
    ]
    # 20 evaluations of 32 windows, forward only, a third of a step per token; 3 prompts x 40 tokens at 20 ms
    beside_s = [20 * each * 32 * 256 / tokens / 3 + 120 * 0.02 for each in step_s]
    # three checkpoints are kept in fp32 (12 bytes a parameter), the last phase's in bf16 (6)
    checkpoint_gb = [count * width / 1e9 for count, width in zip(parameters, (12, 12, 6), strict=True)]
    saves = [(1000 * step + beside) / 300 + 20 + 1 for step, beside in zip(step_s, beside_s, strict=True)]
    stalls_s = sum(n * (0.1 + gb / 4) for n, gb in zip(saves, checkpoint_gb, strict=True))
    growth_s = sum(5 * count * 4 / 1e9 + 40 for count in parameters[1:])  # 5 passes at 1 GB/s, and compiling
    final_gb = parameters[2] * 2 / 1e9
    seconds = 480 + sum(1000 * step for step in step_s) + sum(beside_s) + stalls_s + growth_s
    seconds += end_s(3 * final_gb, 5 / 8)  # the last checkpoint, which has weights alone, export, final/; 5 Gbit/s
    # the weights at each boundary, as they are and as they will be: fp32, then bf16 at the end
    exports_gb = (100_038_016 + 2 * 371_640_256 + 2_155_790_208) * 4 / 1e9 + final_gb
    dataset_gb = 0.0222  # 50,000 stories x 444 bytes
    assert lines(bill(plan(replace(definition().job.parameters), "g5.2xlarge", root_gib=100))) == worked(
        seconds=seconds,
        usd_per_hour="0.3739",  # az3, the dearest of 0.3596, 0.3617, 0.3739
        root_gib=100,
        stored_gb=dataset_gb + 2 * checkpoint_gb[2] + final_gb + exports_gb + final_gb,
        left_gb=exports_gb + final_gb,
        inputs_gb=dataset_gb,
        saves=[pair for n, gb in zip(saves, checkpoint_gb, strict=True) for pair in requests_of(n, gb, gb / 3, 1)],
        final_gb=final_gb,
        logged_lines=3 * 1000 / 10,
    )


# Llama-3.1-8B: 32 layers of q and o 2 x 4096^2, k and v 2 x 4096 x 1024, SwiGLU 3 x 4096 x 14336; two tables of 128,256
# rows; norms 2 x 4096 a layer and one more.
LLAMA_LAYER = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
LLAMA = 32 * (LLAMA_LAYER + 2 * 4096) + 2 * 128_256 * 4096 + 4096  # 8,030,261,248
ADAPTERS = 32 * 64 * (2 * 8192 + 2 * 5120 + 3 * 18432)  # rank 64 x (in + out) on seven projections: 167,772,160


def sft_lines(*, nodes: int, efficiency: float, usd_per_hour: str) -> dict[str, Decimal]:
    """LoRA on `nodes` nodes of one H100 each."""
    # 4 FLOP per frozen parameter that multiplies a token, 6 per adapter's, attention within examples of 361 tokens
    frozen = 32 * LLAMA_LAYER + 128_256 * 4096
    flops = 4 * frozen + 6 * ADAPTERS + 6 * 32 * 4096 * 361
    forward = (2 * frozen + 2 * ADAPTERS + 2 * 32 * 4096 * 361) / flops  # nearly half: no gradients of frozen weights
    steps = ceil(3 * 600_000 * 0.99 * 361 / (16_384 * 0.98))  # 40,066: rows are 98 % full, 1 % of examples held out
    step_s = (16_384 * flops / (H100_TFLOPS * nodes) + ADAPTERS * 28 / H100_GB_S) / efficiency
    step_s += 2 * (nodes - 1) / nodes * ADAPTERS * 4 / (12.5e9 * 0.8)  # fp32 gradients between nodes, 100 Gbit/s
    evaluations = ceil(steps / 1500)
    evaluation_s = evaluations * step_s * 512 * 4096 / 16_384 * forward
    checkpoint_gb, end_gb = 12 * ADAPTERS / 1e9, 4 * ADAPTERS / 1e9
    saves = (steps * step_s + evaluation_s) / 300 + evaluations + 1
    stalls_s = saves * (0.1 + checkpoint_gb / 4)  # an adapter's state is whole on every rank
    # three losses over the held-out rows, 2 x 32 rows in fp32 (15 times the work), 100 answers of 128 tokens at 20 ms,
    # 20 at once
    merge_s = step_s * (3 * 512 * 4096 + 2 * 32 * 15 * 4096) / 16_384 * forward + 5 * 128 * 0.02
    merged_gb = 4 * LLAMA / 1e9
    seconds = 900 + steps * step_s + evaluation_s + stalls_s + merge_s
    final_gb = 2 * ADAPTERS / 1e9 + merged_gb  # the adapter in bf16 lies beside the merged weights
    seconds += end_s(end_gb + final_gb, 1.02)  # 100 Gbit/s are more than 1.02 GB/s
    inputs_gb = int(600_000 * 361 * 6 / 0.98) / 1e9 + 2 * LLAMA / 1e9  # ids and segments; weights in bf16
    return worked(
        seconds=seconds,
        usd_per_hour=usd_per_hour,
        nodes=nodes,
        root_gib=200,
        stored_gb=inputs_gb + 2 * checkpoint_gb + end_gb + final_gb,
        left_gb=final_gb,
        inputs_gb=inputs_gb,
        saves=requests_of(saves, checkpoint_gb, end_gb, nodes),
        final_gb=final_gb,
        logged_lines=steps / 10,
    )


def test_sft_on_one_h100_on_demand() -> None:
    asked = plan(SftConfig(), "p5.4xlarge", capacity="on-demand", region="us-east-1", weights="data/llama")
    found = bill(asked)
    assert lines(found) == sft_lines(nodes=1, efficiency=0.45, usd_per_hour="6.88")
    assert found.usd.p50 == sum(line.amount for line in found.lines[:-1])  # nothing is interrupted


def test_sft_on_two_nodes_pays_for_both() -> None:
    asked = plan(
        SftConfig(), "p5.4xlarge", capacity="on-demand", region="us-east-1", weights="data/llama",
        efficiency="0.42", nodes=2,
    )  # fmt: skip
    assert lines(bill(asked)) == sft_lines(nodes=2, efficiency=0.42, usd_per_hour="6.88")


def test_pretraining_on_eight_h100_spot() -> None:
    # 44 blocks of 12 x 2816^2, two tables of 32 x 2816; 256 rows x 2048 characters a step, over eight GPUs
    hidden, table = 44 * 12 * 2816**2, 32 * 2816
    parameters = hidden + 2 * table  # 4,187,144,192
    tokens = 256 * 2048
    flops = 6 * (hidden + table) + 12 * 44 * 2816 * 2048
    step_s = (tokens * flops / (8 * H100_TFLOPS) + parameters * 28 / 8 / H100_GB_S) / 0.45
    evaluations = 5000 // 250
    beside_s = evaluations * step_s * 160 * 2048 / tokens / 3 + 4 * 32 * 0.02
    checkpoint_gb = (8 * hidden + 12 * 2 * table) / 1e9  # Muon keeps one moment of the hidden matrices
    saves = (5000 * step_s + beside_s) / 300 + evaluations + 1
    best_gb = 4 * parameters / 1e9
    seconds = 900 + 5000 * step_s + beside_s + saves * (0.1 + checkpoint_gb / 4 / 8)
    seconds += end_s(2 * best_gb, 1.02)
    assert lines(bill(plan(PretrainConfig(), "p5.48xlarge"))) == worked(
        seconds=seconds,
        usd_per_hour="11.9912",  # az3, the dearest of 11.2543, 11.5616, 11.9912
        root_gib=200,
        stored_gb=0.35 + 2 * checkpoint_gb + 2 * best_gb,  # a byte a character; the last checkpoint and final/
        left_gb=best_gb,
        inputs_gb=0.35,
        saves=requests_of(saves, checkpoint_gb, best_gb, 8),
        final_gb=best_gb,
        logged_lines=5000 / 10,
    )


def test_kernel_sft_with_phases_that_have_no_optimizer_steps() -> None:
    # Qwen3-8B: 36 layers, SwiGLU 12288 wide, norms 2 x 4096 and 2 x 128 a layer, two tables of 151,936 rows
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    parameters = 36 * (layer + 2 * 4096 + 2 * 128) + 2 * 151_936 * 4096 + 4096  # 8,190,735,360
    tokens = 524_288
    flops = 6 * (36 * layer + 151_936 * 4096) + 6 * 36 * 4096 * 8192
    steps = ceil(1000 * 8192 / tokens)  # 16
    step_s = (tokens * flops / (8 * H100_TFLOPS) + parameters * 28 / 8 / H100_GB_S) / 0.4
    checkpoint_gb = 12 * parameters / 1e9
    evaluated_s = 0.02 * 1000 * 8192 / tokens * step_s / 3  # once, forward: a fiftieth of the pairs is held out
    saves = (steps * step_s + evaluated_s) / 300 + 1
    sft_s = steps * step_s + evaluated_s + saves * (0.1 + checkpoint_gb / 4 / 8)
    generate_s = 2048 * 0.02  # 200 sequences, 25 on each GPU, 32 at once
    candidates = 20 * 10
    verify_s = candidates * 20 / 192 + candidates * (6 + 0.2 * 35) / 8  # 192 vCPUs
    weights_gb = 2 * parameters / 1e9
    seconds = 900 + sft_s + generate_s + verify_s + end_s(weights_gb, 1.02)  # the last phase makes no checkpoint
    inputs_gb = 1000 * 8192 * 6 / 1e9 + weights_gb
    assert lines(bill(plan(KernelConfig(), "p5.48xlarge", weights="data/qwen"))) == worked(
        seconds=seconds,
        usd_per_hour="11.9912",
        root_gib=200,
        # the last two checkpoints are kept, because no figure says which is best; the last has only fp32 weights
        stored_gb=inputs_gb + checkpoint_gb + 2 * weights_gb + weights_gb,
        left_gb=weights_gb,
        inputs_gb=inputs_gb,
        saves=requests_of(saves, checkpoint_gb, 2 * weights_gb, 8),
        final_gb=weights_gb,
        logged_lines=steps / 10,
    )


def two_tower_lines(
    *, tflops: float, gb_s: float, vcpu: int, usd_per_hour: str, upload_gb_s: float
) -> dict[str, Decimal]:
    """Ten folds at once, then one refit, in fp32."""
    heads = 4 * (385 * 96 + 97 * 96)
    query = heads + 385 * 384 + 385 * 256 + 257 * 192 + 193 * 128
    model = 257 * 512 + 513 * 384 + 385 * 256 + 257 * 128
    member = query + model + 1131 * 256  # 1,255,104
    seconds, saves, end_gb = 480.0, [], 0.0
    scores_gb = 11 * 4 * 342 * 1131 / 1e9  # ten folds and the optimistic protocol
    beside_cpu_s = {20: 0.0, 1: BASELINES_CORE_S / vcpu}
    for members, queries in ((20, 342 - 34 + 101), (1, 342 + 101)):  # both protocols; a fold holds 34 or 35 queries out
        flops = 6 * (queries * query + 1131 * model + queries * 1131 * 128) // queries
        on_gpu_s = (members * queries * flops / tflops + members * member * 28 / gb_s) / 0.5
        step_s = max(on_gpu_s, 0.010)  # 10 ms of launches, while the GPU works
        evaluation_s = 35 * step_s * members * 35 / (members * queries) / 3 if members > 1 else 0.0
        beside_s = evaluation_s + beside_cpu_s[members]
        end_gb = (8 if members > 1 else 4) * members * member / 1e9 + scores_gb
        whole_gb = end_gb + 8 * members * member / 1e9
        count = (3500 * step_s + beside_s) / 300 + (35 if members > 1 else 0) + 1
        saves += requests_of(count, whole_gb, end_gb, 1)
        seconds += 3500 * step_s + beside_s + count * (0.1 + whole_gb / 4)
        if members > 1:
            folds_gb = 2 * whole_gb + end_gb
    results_gb = 4 * member / 1e9 + scores_gb
    dataset_gb = (342 * 1131 + (342 + 101) * 384 * 4) / 1e9
    return worked(
        seconds=seconds + end_s(end_gb + results_gb, upload_gb_s),
        usd_per_hour=usd_per_hour,
        root_gib=100,
        stored_gb=dataset_gb + folds_gb + results_gb,
        left_gb=results_gb,
        inputs_gb=dataset_gb,
        saves=saves,
        final_gb=results_gb,
        logged_lines=2 * 3500 / 100,
    )


BASELINES_CORE_S = 190.0  # LambdaRank of every fold, on the node's cores (measured, bench/results/two_tower.md)


def test_two_tower_on_an_a10g_spot_node() -> None:
    found = lines(bill(plan(TwoTowerConfig(), "g5.xlarge", root_gib=100)))
    assert found == two_tower_lines(
        tflops=A10G_FP32, gb_s=A10G_GB_S, vcpu=4, usd_per_hour="0.3943", upload_gb_s=2.5 / 8
    )


def test_an_eighth_of_a_gpu_has_an_eighth_of_its_speed_and_memory() -> None:
    asked = plan(TwoTowerConfig(), "g6f.xlarge", root_gib=100)
    found = bill(asked)
    assert lines(found) == two_tower_lines(
        tflops=60.5e12 / 8, gb_s=300e9 / 8, vcpu=4, usd_per_hour="0.0711", upload_gb_s=2.5 / 8
    )
    assert [fit.has_gb for fit in found.fits] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("name", "config", "type_", "capacity", "region", "weights"),
    [
        ("sft-h100", SftConfig(), "p5.4xlarge", "on-demand", "us-east-1", "data/llama"),
        ("kernel-sft", KernelConfig(), "p5.48xlarge", "spot", "us-east-2", "data/qwen"),
    ],
)
def test_the_table_of_a_stack_is_the_golden_one(
    name: str, config: JobConfig, type_: str, capacity: str, region: str, weights: str
) -> None:
    asked = replace(plan(config, type_, capacity=capacity, region=region, weights=weights), name=name)
    assert_frozen(GOLDEN / f"bill_{name}.txt", render(price(asked, load_catalog())))
