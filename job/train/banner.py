"""What is said before the first step: precision and its reason, data, and the bill's prediction beside the limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from job.dataset.prepare import describe, read_manifest
from job.spec.common import PhaseSize
from job.train.experiment import Session


def lines(session: Session, run: dict[str, Any]) -> Iterator[str]:
    """After the device's own line."""
    config = session.config
    sizes = config.phases()
    yield "phases: " + ", ".join(f"{s.name} {s.params_total:,} / {s.params_active:,} active" for s in sizes)
    yield _work(sizes)
    yield f"precision: products in {config.precision.compute}, state {config.state_in_words()}"
    yield f"data: {describe(read_manifest(session.data))}"
    for predicted in session.predicted:
        yield f"predicted {predicted['phase']}: {_figures(predicted)}"
    if session.predicted:
        yield _against_limits(session, run)


def _work(sizes: Sequence[PhaseSize]) -> str:
    """What mfu is a share of; figures of other conventions are not comparable."""
    trained = ", ".join(f"{size.name} {size.flops_per_token / 1e6:,.1f}" for size in sizes if size.steps)
    counted = sizes[0].attention
    return f"useful work: {trained} MFLOP per token" + (f", attention counted {counted}" if counted else "")


def _figures(predicted: dict[str, Any]) -> str:
    mfu = predicted.get("mfu")
    return (
        f"{predicted['step_ms']:.1f} ms, {predicted['tokens_per_s']:,.0f} tok/s, "
        + (f"mfu {mfu:.1%}, " if mfu else "")
        + f"{predicted['memory_gb']:.1f} GB"
    )


def _against_limits(session: Session, run: dict[str, Any]) -> str:
    """The one line: predicted against limit."""
    limits, estimate = run.get("limits") or {}, run.get("estimate") or {}
    hours, usd = (estimate.get(key) or {} for key in ("hours", "usd"))
    memory = max(predicted["memory_gb"] for predicted in session.predicted)
    return (
        f"predicted vs limit: {hours.get('p50', '?')} of {limits.get('max_hours', '?')} h, "
        f"${usd.get('p50', '?')} of ${limits.get('max_usd', '?')}, "
        f"{memory:.1f} of {session.device.memory_gb:.1f} GB"
    )
