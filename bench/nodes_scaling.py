"""The bill's formula for several nodes against public measurements: `python bench/nodes_scaling.py` prints a table.

Weak scaling: each GPU has the same tokens of a step, so one node's step time is the model's own, and what more nodes
add is their exchange. The bill lets nothing of it happen beside the step; the second column lets 80 % of the step hide
it, as within a node. The measured runs cut weights over all GPUs (FULL_SHARD), which moves more per micro-batch than
the trainer here, which cuts within a node and sums gradients between nodes once a step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from gpufleet.infra.evidence.roofline import BESIDE, GRADIENT_BYTES, NETWORK_REACHED

GPUS, GBPS = 8, 3200  # of a node


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """H100 80GB, bf16, sequences of 2,048, as a public table gives it."""

    model: str
    params: int
    gpus: int
    tokens: int  # of a step, over all GPUs
    rate: int  # tokens per second and GPU


# mosaicml/llm-foundry, scripts/train/benchmarking/README.md, commit 061f2c7, read 2026-11-26
POINTS = [
    Point(model="1b", params=1_315_950_592, gpus=8, tokens=229_376, rate=45_455),
    Point(model="1b", params=1_315_950_592, gpus=16, tokens=655_360, rate=46_037),
    Point(model="1b", params=1_315_950_592, gpus=32, tokens=1_310_720, rate=45_130),
    Point(model="1b", params=1_315_950_592, gpus=64, tokens=2_621_440, rate=44_402),
    Point(model="3b", params=2_651_837_440, gpus=16, tokens=983_040, rate=24_142),
    Point(model="3b", params=2_651_837_440, gpus=32, tokens=1_179_648, rate=23_021),
    Point(model="3b", params=2_651_837_440, gpus=64, tokens=2_359_296, rate=22_525),
    Point(model="13b", params=12_853_954_560, gpus=8, tokens=32_768, rate=4_792),
    Point(model="13b", params=12_853_954_560, gpus=16, tokens=65_536, rate=4_767),
    Point(model="13b", params=12_853_954_560, gpus=32, tokens=131_072, rate=4_811),
    Point(model="13b", params=12_853_954_560, gpus=64, tokens=262_144, rate=4_800),
]


def main() -> None:
    """A line for each point, against the same model's fewest GPUs."""
    sys.stdout.write("| model | GPUs | ms a step | exchange ms | measured | the bill | 80 % beside |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for point in POINTS:
        first = next(each for each in POINTS if each.model == point.model)
        measured = point.rate / first.rate
        own_s = point.tokens / point.gpus / point.rate
        bill, beside = (share(point, hidden) / share(first, hidden) for hidden in (0.0, BESIDE))
        sys.stdout.write(
            f"| {point.model} | {point.gpus} | {own_s * 1e3:.0f} | {exchange_s(point) * 1e3:.0f} | {measured:.2f} |"
            f" {bill:.2f} | {beside:.2f} |\n"
        )


def exchange_s(point: Point) -> float:
    """Seconds of a step in which nodes sum their gradients."""
    nodes = point.gpus // GPUS
    return 2 * (nodes - 1) / nodes * point.params * GRADIENT_BYTES / (GBPS / 8 * NETWORK_REACHED * 1e9)


def share(point: Point, hidden: float) -> float:
    """The share of one node's speed per GPU that is left, where `hidden` of the step's own work hides the exchange."""
    first = next(each for each in POINTS if each.model == point.model)
    work_s = point.tokens / point.gpus / first.rate
    return work_s / (work_s + max(0.0, exchange_s(point) - hidden * work_s))


if __name__ == "__main__":
    main()
