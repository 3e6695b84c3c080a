"""Work to seconds: how long each phase of a job takes on one instance type, without interruptions.

A step is priced from the job's own shape: FLOP at the GPU's dense peak plus optimizer traffic at its memory bandwidth
(the roofline), divided by an efficiency; or from `estimate.step_ms` when somebody has measured it. Neither is a
calibration of this job on this device, and the bill says so. One GPU is used: this job does not spread over several.

The constants are assumptions of ours unless a source is named. None of them is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.catalog import Gpu, Instance
from infra.definition import Disk, Estimate
from infra.errors import GpufleetError
from job import sizing
from job.config import JobConfig

EFFICIENCY = 0.5  # the targets of the experiments are 0.52 to 0.56 of the roofline; 0.5 = twice the limit's time
SETUP_MINUTES = {"g": 8.0, "p": 15.0}  # launch to first step by family: boot, image pull (15-20 GB: 4-6 min), staging
COMPILE_S = 40.0  # per grown phase, on CUDA only; the first phase compiles within the set-up minutes
GROWTH_PASSES = 5  # over the new fp32 weights at 1 GB/s: grow, check before and after, export, read back
SAVE_BLOCKS_S = 0.1  # per save, beside the copy; a 1.2 GB save on CPU blocked 0.35 s in all (measured, 2 cores)
HOST_COPY_GB_S = 4.0  # device to host, PCIe 4.0 x8 shared with the step
NVME_WRITE_GB_S = 1.0
SHA256_GB_S = 1.4  # measured on one core
UPLOAD_GB_S = 1.02  # 17.4 GB to S3 in 17 s, once, on g5.12xlarge; never above the type's sustained network
SAMPLE_TOKEN_S = 0.02  # greedy decoding, launch-bound


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """One phase on one instance type."""

    name: str
    steps: int
    step_ms: float
    limit_ms: float | None  # the roofline; None where a peak is not known
    tokens_per_s: float
    mfu: float | None  # useful FLOP, causal attention, over the dense peak of the compute dtype
    saves: float  # checkpoints written: timed, and one per evaluation at most
    seconds: float  # steps, evaluations, samples, checkpoint stalls, growth before it, final upload after the last


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """A run on one instance type, if nothing interrupts it."""

    phases: tuple[PhaseTime, ...]
    setup_s: float
    restart_s: float  # the same for a replacement node, checkpoint download included
    evaluation_s: float
    stalls_s: float  # checkpoint stalls
    growth_s: float
    upload_s: float  # final save, hash and upload
    basis: str

    @property
    def work_s(self) -> float:
        """First step to shutdown."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def total_s(self) -> float:
        """Launch to shutdown: what is billed without interruptions."""
        return self.setup_s + self.work_s


def hours(config: JobConfig, instance: Instance, estimate: Estimate, root: Disk) -> Runtime:
    """The run on `instance`. Raises GpufleetError when its speed can be derived from nothing."""
    sizes = sizing.phases(config)
    upload_gb_s = upload_rate(instance, estimate)
    exports = list(sizing.export_bytes(config).values())
    last_gb = (sizing.checkpoint_bytes(config, len(sizes) - 1) + 2 * exports[-1]) / 1e9  # checkpoint, export, final/
    upload_s = last_gb / scratch_rate(instance, root) + last_gb / SHA256_GB_S + last_gb / upload_gb_s

    phases: list[PhaseTime] = []
    evaluation_s = stalls_s = growth_s = 0.0
    for index, size in enumerate(sizes):
        limit_ms = _limit_ms(size, instance.gpu, instance.gpu_share, config)
        step_ms = _step_ms(index, limit_ms, config, instance, estimate)
        evaluation = _evaluation_s(config, size, step_ms)
        growth = _growth_s(config, size) if index else 0.0
        training_s = size.steps * step_ms / 1e3
        saves = (training_s + evaluation) / config.checkpoint.interval_s + size.steps // config.eval.every + 1
        blocked_s = saves * (SAVE_BLOCKS_S + sizing.checkpoint_bytes(config, index) / 1e9 / HOST_COPY_GB_S)
        last = upload_s if index == len(sizes) - 1 else 0.0
        peak = _peak_tflops(instance.gpu, config)
        flop = size.tokens_per_step * size.flops_per_token
        phases.append(
            PhaseTime(
                name=size.name,
                steps=size.steps,
                step_ms=step_ms,
                limit_ms=limit_ms,
                tokens_per_s=size.tokens_per_step / step_ms * 1e3,
                mfu=None
                if peak is None or config.device == "cpu"
                else flop / (step_ms / 1e3) / (peak * instance.gpu_share * 1e12),
                saves=saves,
                seconds=training_s + evaluation + blocked_s + growth + last,
            )
        )
        evaluation_s += evaluation
        stalls_s += blocked_s
        growth_s += growth

    setup_s = _setup_minutes(instance, estimate) * 60
    restart = estimate.restart_minutes
    return Runtime(
        phases=tuple(phases),
        setup_s=setup_s,
        restart_s=setup_s if restart is None else float(restart) * 60,
        evaluation_s=evaluation_s,
        stalls_s=stalls_s,
        growth_s=growth_s,
        upload_s=upload_s,
        basis=_basis(estimate),
    )


def upload_rate(instance: Instance, estimate: Estimate) -> float:
    """Node to S3 in GB/s: the definition's figure as it is, else the measured one capped by the sustained network."""
    if estimate.upload_gb_per_s is not None:
        return float(estimate.upload_gb_per_s)
    return min(UPLOAD_GB_S, instance.network_gbps / 8)


def scratch_rate(instance: Instance, root: Disk) -> float:
    """Writing checkpoints locally, GB/s: instance store where there is one, else the root disk."""
    if instance.nvme_gb:
        return NVME_WRITE_GB_S
    return min(root.throughput_mibps * 1.048576e-3, instance.ebs_gbps / 8)


def _limit_ms(size: sizing.PhaseSize, gpu: Gpu, share: float, config: JobConfig) -> float | None:
    peak = _peak_tflops(gpu, config)
    if peak is None or gpu.bandwidth_gb_s is None:
        return None
    compute_s = size.tokens_per_step * size.flops_per_token / (peak * share * 1e12)
    traffic_s = size.params_total * size.optimizer_traffic_bytes_per_param / (gpu.bandwidth_gb_s * share * 1e9)
    return (compute_s + traffic_s) * 1e3


def _peak_tflops(gpu: Gpu, config: JobConfig) -> float | None:
    return gpu.bf16_tflops if config.precision.compute == "bf16" else gpu.fp32_tflops


def _step_ms(index: int, limit_ms: float | None, config: JobConfig, instance: Instance, estimate: Estimate) -> float:
    if estimate.step_ms is not None:
        return float(estimate.step_ms[index])
    if config.device == "cpu":
        raise GpufleetError("job.parameters.device: cpu has no roofline; give estimate.step_ms, one figure per phase")
    if limit_ms is None:
        raise GpufleetError(
            f"{instance.type}: the peak of its GPU ({instance.gpu.name}) in this job's precision is not in the catalog,"
            " so its speed cannot be derived; give estimate.step_ms, one figure per phase"
        )
    return limit_ms / float(EFFICIENCY if estimate.efficiency is None else estimate.efficiency)


def _evaluation_s(config: JobConfig, size: sizing.PhaseSize, step_ms: float) -> float:
    """Fixed windows every `eval.every` steps, forward only (a third of a step per token), and samples at the end."""
    tokens = config.eval.windows * config.data.sequence
    once_s = step_ms / 1e3 * tokens / size.tokens_per_step / 3
    samples_s = len(config.eval.prompts) * config.eval.sample_tokens * SAMPLE_TOKEN_S
    return (size.steps // config.eval.every) * once_s + samples_s


def _growth_s(config: JobConfig, size: sizing.PhaseSize) -> float:
    return GROWTH_PASSES * size.params_total * 4 / 1e9 + (COMPILE_S if config.device == "cuda" else 0.0)


def _setup_minutes(instance: Instance, estimate: Estimate) -> float:
    if estimate.setup_minutes is not None:
        return float(estimate.setup_minutes)
    return SETUP_MINUTES["p" if instance.type.startswith("p") else "g"]


def _basis(estimate: Estimate) -> str:
    if estimate.step_ms is not None:
        return "step times from estimate.step_ms"
    efficiency = float(EFFICIENCY if estimate.efficiency is None else estimate.efficiency)
    return f"roofline at efficiency {efficiency:g}"
