"""Turns work into seconds: how long each phase of a job takes on one instance type, without interruptions.

The time of a step follows from the job's shape: FLOP at the dense peak of the GPUs plus optimizer traffic at their
memory bandwidth (the roofline), divided by the share of the roofline that such work reaches (infra/evidence/speeds.py).
Or the definition states the time: `estimate.step_ms`. In both cases, nobody has measured this job on this device, and
the bill says so. A calibration measures the time of a step, and the times of evaluations and saves, between phases and
at the end. If optimizer traffic is small, as in all ready-made jobs except tinystories-growth, the share of the
roofline is the MFU of a job in bf16.

Constants without a source are our own assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpufleet.infra.bill.own_steps import StepTime
from gpufleet.infra.catalog import Instance
from gpufleet.infra.definition.model import Disk, Estimate
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import roofline
from gpufleet.infra.evidence.calibration import Calibration, PhaseSpeed
from gpufleet.infra.evidence.speeds import OURS, Expected, SpeedGroup, Speeds, family, shipped
from gpufleet.infra.risk import unknown
from gpufleet.job.kind import JobConfig
from gpufleet.job.kind.common import PhaseSize

# minutes from launch to first step by family: boot, image pull (15-20 GB: 4-6 min), staging
SETUP_MINUTES = {"g": 8.0, "p": 15.0}
# Seconds from the end of the stage before to the first step, on a running node: image, packages and inputs are there.
# Assumed. On the embedded AWS six hand-overs took 5.8 to 10.6 s (2026-12-01, two cores, load 5 to 8). The other part,
# the start of a container from a pulled image on a real node, was not measured.
WARM_S = 60.0
# seconds per save in addition to the copy; a save of 1.2 GB on a CPU with 2 cores blocked training for 0.35 s in all
SAVE_BLOCKS_S = 0.1
HOST_COPY_GB_S = 4.0  # GB/s from device to host over PCIe 4.0 x8, while the training step uses it too
NVME_WRITE_GB_S = 1.0
SHA256_GB_S = 1.4  # measured on one core
# one measurement: 17.4 GB to S3 in 17 s on g5.12xlarge; the bill uses at most the type's sustained network rate
UPLOAD_GB_S = 1.02
# seconds to decode one token of all sequences at once in plain PyTorch: kernel launches limit it; reading the weights
# may take longer
DECODE_S = 0.02
_STEP_MS = "estimate.step_ms, one time per phase with optimizer steps"

# Where step times come from: a calibration or receipt; figures of the definition; one of these, converted from other
# GPUs; or the table of measured speeds.
SpeedBasis = Literal["measured", "declared", "guessed", "derived"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """The time of one phase on one instance type. If the phase has no optimizer steps, `step_ms` and `tokens_per_s` are
    0 and `mfu` is None.
    """

    name: str
    params_total: int
    params_active: int  # per token
    flops_per_token: int  # of the training that is needed, without recomputation
    steps: int
    step_ms: float
    limit_ms: float | None  # the least time of a step by the roofline; None if a peak of the GPU is not known
    bound: str  # what takes most of a step according to the data sheet; empty if a peak is not known
    tokens_per_s: float
    mfu: float | None  # useful FLOP over the GPUs' dense bf16 peak, also for fp32; the job measures it in the same way
    saves: float  # checkpoints written: timed ones, at most one per evaluation, and one at the phase's end
    counts_steps: bool  # False if a "step" stands for a second
    # seconds of steps, evaluations, samples, checkpoint stalls, growth before the phase, and, for the last phase, of
    # the final upload
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """A run on one instance type, if nothing interrupts it."""

    phases: tuple[PhaseTime, ...]
    ranks: int  # number of GPUs used, over all nodes
    setup_s: float
    restart_s: float  # set-up of a replacement node, with the download of the checkpoint
    evaluation_s: float
    stalls_s: float  # checkpoint stalls
    growth_s: float
    upload_s: float  # final save, hash and upload
    held_s: float  # idle time at the end: a buffer of the bill, or the time for which a node is kept after its work
    basis: str
    speed: SpeedBasis
    faster: float  # sigma of ln(actual / these hours of work) below the median
    slower: float  # the same sigma above the median
    shared: float = 0.0  # the part of both sigmas that is the same for the job on every GPU
    setup_seen: bool = False  # whether the set-up was measured in an earlier run
    setup_source: str = ""  # the canary that measured the set-up; empty if something else did

    @property
    def calibrated(self) -> bool:
        """Whether the step times were measured for this job on this device."""
        return self.speed == "measured"

    @property
    def compute_s(self) -> float:
        """Seconds of the optimizer steps alone, which an experiment's tables call compute."""
        return sum(phase.steps * phase.step_ms / 1e3 for phase in self.phases)

    @property
    def work_s(self) -> float:
        """Seconds from the first step to shutdown."""
        return sum(phase.seconds for phase in self.phases) + self.held_s

    @property
    def total_s(self) -> float:
        """Seconds from launch to shutdown, which are billed if nothing interrupts the run."""
        return self.setup_s + self.work_s


def hours(
    config: JobConfig,
    instance: Instance,
    estimate: Estimate,
    root: Disk,
    *,
    nodes: int = 1,
    cards: str = "one",
    hold_hours: float | None = None,
    buffer: float = 0.0,
    calibration: Calibration | None = None,
    own: StepTime | None = None,
    speeds: Speeds | None = None,
) -> Runtime:
    """The time of the run on `nodes` nodes of `instance`.

    `hold_hours`: the least time for which each node is kept. `buffer`: this share of the work is added at the end.
    `cards`: the network cards over which nodes communicate. `calibration`: measurements of this job on one such node;
    figures of `estimate` take precedence. `own`: the step time of a user's command there. `speeds`: measurements of
    other jobs and GPUs, by default the shipped table. Raises GpufleetError if nothing gives a speed.
    """
    sizes = config.phases()
    ranks = config.ranks(instance.gpu_count, nodes)
    if estimate.step_ms is not None or nodes > 1:
        calibration = None
    timed = calibration is not None and sizes[0].counts == "steps"
    upload_gb_s = upload_rate(instance, estimate)
    speed = _speed_basis(estimate, own, timed=timed)
    expected = [_expected(size, instance, ranks, speeds) for size in sizes]
    ends_with = (*list(config.sizes().exports.values())[-1:], *config.sizes().final.values())
    last_gb = (config.sizes().phase_ends[len(sizes) - 1] + sum(ends_with)) / 1e9
    finish_s = calibration.finish_s if calibration and sizes[-1].steps else None
    written_s = last_gb / scratch_rate(instance, root) if finish_s is None else finish_s
    upload_s = written_s + last_gb / SHA256_GB_S + last_gb / upload_gb_s

    phases: list[PhaseTime] = []
    launched: list[str] = []  # phases in which the GPU waits for the host's kernel launches
    evaluation_s = stalls_s = growth_s = 0.0
    for index, size in enumerate(sizes):
        limits_ms = roofline.limits_ms(index, instance, config, ranks)
        limit_ms = None if limits_ms is None else sum(limits_ms)
        seen = calibration.phase(size.name) if calibration else None
        last = index == len(sizes) - 1
        after = calibration.phase(sizes[index + 1].name) if calibration and not last else None
        ended = (after is not None and after.boundary_s is not None) or (last and finish_s is not None)
        launch_ms = roofline.launch_ms(size, instance, config, ranks)
        exchange_ms = roofline.exchange_ms(size, instance, config, ranks, nodes, cards)
        share = expected[index].share if estimate.efficiency is None else float(estimate.efficiency)
        step_ms = _step_ms(index, sizes, limit_ms, launch_ms, exchange_ms, share, config, instance, estimate, seen, own)
        if size.steps and speed == "derived" and limit_ms is not None and launch_ms > limit_ms / share * size.slower:
            launched.append(size.name)
        beside = _beside_s(config, size, instance, ranks, step_ms, seen, ended=ended)
        growth = size.growth_s if seen is None or seen.boundary_s is None or not index else seen.boundary_s
        training_s = size.steps * step_ms / 1e3
        saves = 0.0
        if size.steps and config.saves:
            saves = (training_s + beside) / config.save_interval_s(step_ms / 1e3) + size.evaluations + 1
        blocked_s = saves * _save_s(config, size, index, ranks, scratch_rate(instance, root), seen)
        peak = instance.gpu.bf16_tflops
        flop = size.tokens_per_step * size.flops_per_token
        phases.append(
            PhaseTime(
                name=size.name,
                params_total=size.params_total,
                params_active=size.params_active,
                flops_per_token=size.flops_per_token,
                steps=size.steps,
                step_ms=step_ms if size.steps else 0.0,
                limit_ms=limit_ms if size.steps else None,
                bound=_bound(limits_ms, launch_ms, exchange_ms, share / size.slower) if size.steps else "",
                tokens_per_s=size.tokens_per_step / step_ms * 1e3 if size.steps else 0.0,
                mfu=None
                if peak is None or config.device == "cpu" or not size.steps
                else flop / (step_ms / 1e3) / (peak * instance.gpu_share * ranks * 1e12),
                saves=saves,
                counts_steps=size.counts == "steps",
                seconds=training_s + beside + blocked_s + growth + (upload_s if last else 0.0),
            )
        )
        evaluation_s += beside
        stalls_s += blocked_s
        growth_s += growth

    setup_s, setup_seen, setup_source = _setup_s(instance, estimate, calibration, speeds)
    worked_s = sum(phase.seconds for phase in phases)
    restart = estimate.restart_minutes
    faster, slower, shared = _spread(speed, phases, expected, calibration, own)
    return Runtime(
        phases=tuple(phases),
        ranks=ranks,
        setup_s=setup_s,
        restart_s=setup_s if restart is None else float(restart) * 60,
        evaluation_s=evaluation_s,
        stalls_s=stalls_s,
        growth_s=growth_s,
        upload_s=upload_s,
        held_s=max(buffer * worked_s, 0.0 if hold_hours is None else hold_hours * 3600 - (setup_s + worked_s)),
        basis=calibration.basis if timed and calibration else _basis(estimate, own, phases, expected, launched),
        speed=speed,
        faster=faster,
        slower=slower,
        shared=shared,
        setup_seen=setup_seen,
        setup_source=setup_source,
    )


def upload_rate(instance: Instance, estimate: Estimate) -> float:
    """GB/s from node to S3: the rate in the definition, or the measured one if there is none; at most the type's
    sustained rate.
    """
    if estimate.upload_gb_per_s is not None:
        return float(estimate.upload_gb_per_s)
    return min(UPLOAD_GB_S, instance.network_gbps / 8)


def scratch_rate(instance: Instance, root: Disk) -> float:
    """GB/s at which checkpoints are written locally: to the instance store if there is one, otherwise to the
    root disk.
    """
    if instance.nvme_gb:
        return NVME_WRITE_GB_S
    return min(root.throughput_mibps * 1.048576e-3, instance.ebs_gbps / 8)


def _expected(size: PhaseSize, instance: Instance, ranks: int, known: Speeds | None) -> Expected:
    """The share of the roofline that a ready-made job's phase reaches on these GPUs."""
    return (known or shipped()).expect(SpeedGroup(instance.gpu.name, size.kind, OURS, ranks > 1))


def _speed_basis(estimate: Estimate, own: StepTime | None, *, timed: bool) -> SpeedBasis:
    if estimate.step_ms is None and timed:
        return "measured"
    if estimate.step_ms is None and own is None:
        return "derived"
    return "guessed" if own and own.guessed else "declared"


def _spread(
    speed: SpeedBasis,
    phases: Sequence[PhaseTime],
    expected: Sequence[Expected],
    calibration: Calibration | None,
    own: StepTime | None,
) -> tuple[float, float, float]:
    """Sigmas of ln(actual / priced hours of work) below and above the median, and the part of them that is the same on
    every GPU: means over the phases, weighted by time.
    """
    if speed == "measured" and calibration is not None:
        sigma = max(unknown.MEASURED, calibration.spread)
        return sigma, sigma, 0.0
    if own is not None:
        return own.faster, own.slower, own.shared
    if speed != "derived":
        return unknown.STATED, unknown.STATED, 0.0
    whole = sum(phase.seconds for phase in phases)
    sigma, shared = (
        sum(phase.seconds * getattr(expectation, name) for phase, expectation in zip(phases, expected, strict=True))
        / whole
        for name in ("sigma", "shared")
    )
    return sigma, sigma, shared


def _step_ms(
    index: int,
    sizes: tuple[PhaseSize, ...],
    limit_ms: float | None,
    launch_ms: float,
    exchange_ms: tuple[float, float],
    share: float,
    config: JobConfig,
    instance: Instance,
    estimate: Estimate,
    seen: PhaseSpeed | None,
    own: StepTime | None,
) -> float:
    """Milliseconds per optimizer step of a phase. For a phase without steps, the time that a step of its shape would
    take. 0 if no phase trains.
    """
    if not any(size.steps for size in sizes):
        return 0.0
    if estimate.step_ms is not None:
        training = [place for place, size in enumerate(sizes) if size.steps and place <= index]
        return float(estimate.step_ms[len(training) - 1])
    if seen is not None and sizes[index].counts == "steps":
        return seen.step_ms
    if own is not None:
        return own.step_ms
    if (declared := config.told_speed) is not None:
        peak = (
            "" if instance.gpu.bf16_tflops else f", and the catalog has no peak of a {instance.gpu.name} to guess from"
        )
        unit, ways = "a step", f"measure it (`gpufleet calibrate`), or write {declared.key}"
        if sizes[index].counts == "epochs":
            unit, ways = "an epoch", f"write {declared.key}"
        raise GpufleetError(
            f"{instance.type}: how long {unit} takes there is unknown{peak}: {ways}: {{{instance.gpu.name}: ...}}"
        )
    if config.device == "cpu":
        raise GpufleetError(f"job.parameters.device: cpu has no roofline; give {_STEP_MS}")
    if limit_ms is None:
        raise GpufleetError(
            f"{instance.type}: the peak of its GPU ({instance.gpu.name}) in this job's precision is not in the catalog,"
            f" so its speed cannot be derived; give {_STEP_MS}"
        )
    return roofline.with_exchange(max(limit_ms / share * sizes[index].slower, launch_ms), *exchange_ms)


def _bound(
    limits_ms: tuple[float, float] | None, launch_ms: float, exchange_ms: tuple[float, float], share: float
) -> str:
    """What takes most of the time of a step whose GPUs reach `share` of their roofline; empty if the roofline is not
    known.
    """
    if limits_ms is None:
        return ""
    compute_ms, traffic_ms = (part / share for part in limits_ms)
    own_ms = max(compute_ms + traffic_ms, launch_ms)
    parts = {"computation": compute_ms, "memory bandwidth": traffic_ms}
    if launch_ms > compute_ms + traffic_ms:
        parts = {"launches of its host": launch_ms}
    parts["the exchange between GPUs"] = roofline.with_exchange(own_ms, *exchange_ms) - own_ms
    return max(parts, key=lambda name: parts[name])


def _save_s(
    config: JobConfig, size: PhaseSize, index: int, ranks: int, write_gb_s: float, seen: PhaseSpeed | None
) -> float:
    """Seconds for which the trainer waits at one save. Each rank copies what it holds: its shard, or everything. If the
    save is not asynchronous, the trainer also waits until the files are written.
    """
    whole_gb = config.sizes().checkpoints[index] / 1e9
    copied_s = SAVE_BLOCKS_S + whole_gb / (size.shared_by(ranks) if size.sharded or size.models else 1) / HOST_COPY_GB_S
    written_s = whole_gb / write_gb_s
    if seen is not None:
        copied_s = copied_s if seen.save_blocks_s is None else seen.save_blocks_s
        written_s = written_s if seen.save_write_s is None else seen.save_write_s
    return copied_s + (written_s if size.waits_for_saves else 0.0)


def _beside_s(
    config: JobConfig,
    size: PhaseSize,
    instance: Instance,
    ranks: int,
    step_ms: float,
    seen: PhaseSpeed | None,
    *,
    ended: bool,
) -> float:
    """Seconds of work other than steps: forward passes of evaluations and of whole-data passes, decoding, and other
    work of the node's cores and GPUs. If `ended`, only evaluations are included, because the rest is already in the
    measured time after the last step.
    """
    token_s = step_ms / 1e3 / size.tokens_per_step * size.forward_share
    evaluation_s = size.evaluation_s(step_ms / 1e3)
    if seen is not None and seen.evaluation_s is not None:
        evaluation_s = seen.evaluation_s
    if ended:
        return size.evaluations * evaluation_s
    forward_s = size.evaluations * evaluation_s + token_s * size.forward_tokens
    decode_s = DECODE_S
    if instance.gpu.bandwidth_gb_s is not None and config.device != "cpu":
        width = 2 if config.products() == "bf16" else 4
        decode_s = max(decode_s, size.params_total * width / 1e9 / (instance.gpu.bandwidth_gb_s * instance.gpu_share))
    workers = size.workers or (ranks if config.device == "cpu" else instance.gpu_count)
    beside_s = size.cpu_core_s / instance.vcpu + size.gpu_s / workers
    rounds = math.ceil(math.ceil(size.decode_sequences / ranks) / size.decode_at_once)
    return forward_s + rounds * size.decode_steps * decode_s + beside_s


def _setup_s(
    instance: Instance, estimate: Estimate, calibration: Calibration | None, speeds: Speeds | None
) -> tuple[float, bool, str]:
    """Returns the seconds from launch to first step, whether they were measured, and the canary if it measured them. A
    calibration measures only the trainer's part of the set-up; a receipt of this job has all of it. Receipts of an
    earlier version of the stack are better than an assumption, and so is the account's canary.
    """
    kind = family(instance.type)
    if estimate.setup_minutes is not None:
        return float(estimate.setup_minutes) * 60, False, ""
    if calibration is not None and calibration.setup_s is not None:
        return calibration.setup_s, True, ""
    if speeds is not None and (seen := speeds.setup_s.get(kind)) is not None:
        return seen, True, ""
    start_s = (calibration.start_s or 0.0) if calibration else 0.0
    proven = speeds.canary_s.get(kind) if speeds else None
    seconds, source = proven or (SETUP_MINUTES[kind] * 60, "")
    return (seconds, False, source) if seconds >= start_s else (start_s, False, "")


def _basis(
    estimate: Estimate,
    own: StepTime | None,
    phases: Sequence[PhaseTime],
    expected: Sequence[Expected],
    launched: Sequence[str],
) -> str:
    if own is not None:
        return own.said if own.guessed else f"{own.said} as declared, not measured"
    if not any(phase.steps for phase in phases):
        return "nothing trains here; the time of its other work as assumed"
    if estimate.step_ms is not None:
        return "step times from estimate.step_ms"
    derived = [
        expectation
        for phase, expectation in zip(phases, expected, strict=True)
        if phase.steps and phase.name not in launched
    ]
    shares = [expectation.share for expectation in derived] or [expectation.share for expectation in expected]
    if estimate.efficiency is not None:
        basis = f"{float(estimate.efficiency):.0%} of the roofline, estimate.efficiency"
    else:
        low, high = (f"{bound:.0%}" for bound in (min(shares), max(shares)))
        whose = " and ".join(dict.fromkeys(expectation.whose for expectation in derived or expected))
        basis = f"{low if low == high else f'{low} to {high}'} of the roofline, {whose}"
    return f"{basis}, but for {', '.join(launched)}: what the host needs to launch a step" if launched else basis
