"""Checks whether the job fits: the GPU memory for each type and phase, the host memory, and whether a save and its
upload end within AWS's notice. If something does not fit, the module names the smallest change with which it would fit,
but changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpufleet.infra.bill.runtime import SHA256_GB_S, Runtime, scratch_rate, upload_rate
from gpufleet.infra.catalog import Catalog, Instance
from gpufleet.infra.definition.model import Disk, Estimate
from gpufleet.job.contract.aws import NOTICE_S
from gpufleet.job.kind import JobConfig, batch
from gpufleet.job.kind.common import DEVICE_RESERVE_GB, Memory, Rung

POLL_S = 5.0  # seconds between two looks of the supervisor
_HOST_RESERVE_GB = 4.0  # what operating system, container and trainer are assumed to need


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One phase on one instance type. `why` and `nearest` are empty if it fits."""

    type: str
    phase: str
    fits: bool
    needs_gb: float  # predicted peak at the chosen rung, or at the last rung if none fits; 0 if not predicted
    has_gb: float
    micro: int
    checkpointing: bool
    memory: Memory | None = None  # the parts of `needs_gb`; None if not predicted
    why: str = ""
    nearest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """The seconds from AWS's notice to a published manifest in the worst case, which is that a step has just begun."""

    type: str
    phase: str
    checkpoint_gb: float
    step_s: float
    save_s: float
    hash_s: float
    upload_s: float
    saves: bool = True  # whether the job saves when it gets a notice

    @property
    def total_s(self) -> float:
        return POLL_S + self.step_s + self.save_s + self.hash_s + self.upload_s

    @property
    def fits(self) -> bool:
        return self.saves and self.total_s <= NOTICE_S


def fits(
    config: JobConfig, instance: Instance, catalog: Catalog, region: str, *, holder: str | None = None
) -> tuple[Fit, ...]:
    """One Fit per phase. All phases use the same rung, the highest on which every phase fits. `holder`: the answer of
    `cheapest_holder`, for a caller that asks about many types.
    """
    whole = batch.choose_rung(config, instance.gpu_memory_gb, ranks=config.ranks(instance.gpu_count))

    def nearest() -> str:
        return _narrower(config, instance) or (cheapest_holder(config, catalog, region) if holder is None else holder)

    return tuple(_fit(config, instance, index, whole, nearest) for index in range(len(config.phases())))


def notices(
    config: JobConfig,
    instance: Instance,
    runtime: Runtime,
    estimate: Estimate,
    root: Disk,
    stop_s: float | None = None,
) -> list[Notice]:
    """One Notice per phase. `stop_s`: measured seconds from a stop request to the complete checkpoint."""
    times = []
    for index, phase in enumerate(runtime.phases):
        size_gb = config.sizes().checkpoints[index] / 1e9
        times.append(
            Notice(
                type=instance.type,
                phase=phase.name,
                checkpoint_gb=size_gb,
                step_s=phase.step_ms / 1e3,
                save_s=_save_s(size_gb / scratch_rate(instance, root), phase.step_ms / 1e3, stop_s, runtime),
                hash_s=size_gb / SHA256_GB_S,
                upload_s=size_gb / upload_rate(instance, estimate),
                # the command is assumed not to save, unless a rehearsal has shown that it does
                saves=config.saves_on_signal is True,
            )
        )
    return times


def _save_s(predicted_s: float, step_s: float, stop_s: float | None, runtime: Runtime) -> float:
    """Seconds that a save on a notice takes after the current step."""
    return predicted_s if stop_s is None or len(runtime.phases) > 1 else max(0.0, stop_s - step_s)


def scratch_gb(config: JobConfig) -> float:
    """GB of local disk that a run may need: for four checkpoints (the best, the last, the last but one, and one that is
    being written, times 1.2), exports and final weights.
    """
    exports = (*config.sizes().exports.values(), *config.sizes().final.values())
    largest = max(config.sizes().checkpoints[index] for index in range(len(config.phases())))
    return (largest * 4.2 + sum(exports)) / 1e9


def _fit(config: JobConfig, instance: Instance, index: int, whole: Rung | None, nearest: Callable[[], str]) -> Fit:
    ranks = config.ranks(instance.gpu_count)
    rung = whole or batch.choose_rung(config, instance.gpu_memory_gb, index, ranks)
    shown = rung or config.ladder(ranks)[-1]
    needs = config.memory(index, shown, ranks)
    why = _misfit_reason(config, instance, index, rung, needs)
    return Fit(
        type=instance.type,
        phase=config.phases()[index].name,
        fits=not why,
        needs_gb=0.0 if needs is None else needs.total_gb + DEVICE_RESERVE_GB,
        has_gb=instance.gpu_memory_gb,
        micro=shown.micro,
        checkpointing=shown.checkpointing,
        memory=needs,
        why=why,
        nearest=nearest() if why else "",
    )


def _misfit_reason(config: JobConfig, instance: Instance, index: int, rung: Rung | None, needs: Memory | None) -> str:
    if config.device == "cpu":
        return ""  # a rehearsal on a laptop uses no GPU
    if too_old := _too_old(config, instance):
        return too_old
    if rung is None and needs is not None and len(config.ladder()) == 1:
        return f"needs {needs.total_gb + DEVICE_RESERVE_GB:.1f} GB per GPU, has {instance.gpu_memory_gb:.1f}"
    if rung is None and needs is not None:
        state = needs.weights_gb + needs.gradients_gb + needs.moments_gb
        return (
            f"needs {needs.total_gb + DEVICE_RESERVE_GB:.1f} GB per GPU even at the smallest micro-batch with"
            f" activation checkpointing (weights, gradients and moments alone {state:.1f}), has"
            f" {instance.gpu_memory_gb:.1f}"
        )
    host_gb = instance.memory_gib * 1.073741824 - _HOST_RESERVE_GB
    staged_gb = _staged_gb(config, index)
    if staged_gb > host_gb:
        return f"a checkpoint of {staged_gb:.1f} GB is staged in host memory, of which {host_gb:.1f} GB are free"
    return ""


def _too_old(config: JobConfig, instance: Instance) -> str:
    """Why the job cannot compute on the type's GPU, whatever its memory; empty if it can."""
    if config.products() == "bf16" and not instance.gpu.bf16:
        return f"{instance.gpu.name} has no bf16"
    return instance.too_old(config.demands.capability)


def _narrower(config: JobConfig, instance: Instance) -> str:
    """The setting of the first variant of the job that has narrower state and fits; empty if none fits."""
    held = (variant.setting for variant in config.variants() if variant.narrower and _holds(variant.config, instance))
    return next(held, "")


def cheapest_holder(config: JobConfig, catalog: Catalog, region: str) -> str:
    """Names the region's cheapest on-demand type of known speed on which the job fits unchanged."""
    priced = []
    for type_, other in catalog.instances.items():
        if other.unusable or not other.gpu.has_a_roofline(config.products()) or not _holds(config, other):
            continue
        if price := catalog.on_demand_prices.get((type_, region)):
            priced.append((price.amount, other))
    if not priced:
        return f"no type of {region} whose speed is known holds it; a smaller model or batch"
    amount, best = min(priced, key=lambda pair: pair[0])
    return f"{best.type} ({best.gpu.name}, {best.gpu_memory_gb:g} GB, {amount:f} USD/h on demand)"


def _holds(config: JobConfig, instance: Instance) -> bool:
    if _too_old(config, instance) or instance.gpu_count < config.gpus_needed():
        return False
    if batch.choose_rung(config, instance.gpu_memory_gb, ranks=config.ranks(instance.gpu_count)) is None:
        return False
    largest = max(_staged_gb(config, index) for index in range(len(config.phases())))
    return largest <= instance.memory_gib * 1.073741824 - _HOST_RESERVE_GB


def _staged_gb(config: JobConfig, index: int) -> float:
    """GB of a phase's checkpoint if the host holds it in memory while it is written; else 0."""
    sizes = config.sizes()
    return sizes.checkpoints[index] / 1e9 if sizes.staged_in_memory else 0.0
