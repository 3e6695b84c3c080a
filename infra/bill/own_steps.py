"""Computes how long a step of a user's own command takes on a node: from a time in the file, from a measured time, or
from a guess based on these. A time is that of one kind and number of GPUs. For other nodes it is converted:

- to another kind of GPU by the ratio of the speeds of other code on both (infra/evidence/speeds.py), if it is known;
- to another number of GPUs in proportion: half as many take twice as long. Not every script gains that much from more
  GPUs, so the range is wider on that side. If a script's batch grows with its GPUs, it needs fewer steps in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpufleet.infra.catalog import Catalog, Gpu, Instance
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence.calibration import Calibration, RefusedCalibration
from gpufleet.infra.evidence.speeds import NOBODY, SpeedGroup, Speeds, shipped
from gpufleet.infra.risk import unknown
from gpufleet.job.kind import batch

P90_SIGMAS = 1.2816  # p10 and p90 of a normal distribution are this many sigmas away from its mean
SECOND_MS = 1000.0  # if a run declares only hours, or nothing, its "step" stands for one second on the listed types


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Milliseconds of a step (or of an epoch, if the run counts epochs) on `gpus` GPUs of one kind, and how wrong this
    time may be, as sigmas of its logarithm.
    """

    gpu: Gpu
    gpus: int
    step_ms: float
    faster: float
    slower: float
    shared: float  # the part of both sigmas that is the same for the job on every GPU
    said: str  # where the time comes from
    guessed: bool = False  # whether the time was measured on other GPUs and converted

    def carried_over(self, gpu: Gpu, gpus: int, speeds: Speeds) -> StepTime | None:
        """The step time on `gpus` GPUs of another kind; None if the peak FLOP/s of one of the two GPUs is not known."""
        if (gpu, gpus) == (self.gpu, self.gpus):
            return self
        times, sigma = gpus / self.gpus, 0.0  # at first, the time is only converted to the number of GPUs
        if gpu != self.gpu:
            if not gpu.bf16_tflops or not self.gpu.bf16_tflops:
                return None
            own, other = (SpeedGroup(device.name, "", NOBODY, self.gpus > 1) for device in (self.gpu, gpu))
            share, sigma = speeds.ratio(own, other)
            times *= share * gpu.bf16_tflops / self.gpu.bf16_tflops
        scaled = abs(math.log2(gpus / self.gpus)) * unknown.PER_DOUBLING
        return StepTime(
            gpu=gpu,
            gpus=gpus,
            step_ms=self.step_ms / times,
            faster=math.hypot(self.faster, sigma, scaled if gpus < self.gpus else 0.0),
            slower=math.hypot(self.slower, sigma, scaled if gpus > self.gpus else 0.0),
            shared=self.shared,
            said=f"guessed from {self.said} for {self.gpus} x {self.gpu.name}",
            guessed=True,
        )


def known_steps(
    definition: StackDefinition, catalog: Catalog, measured: Mapping[str, Calibration | RefusedCalibration]
) -> tuple[StepTime, ...]:
    """The step times of a command, from its file and from measurements; none for a ready-made job. If a time in the
    file names no number of GPUs, it is the time on as many GPUs as the first listed type with this GPU has; if no
    listed type has this GPU, on as many as the first listed type has.
    """
    return tuple(_known(definition, catalog, measured))


def step_time(known: Iterable[StepTime], instance: Instance, ranks: int, speeds: Speeds | None) -> StepTime | None:
    """The step time on `ranks` GPUs of a type, from the least uncertain time; None if no known time can be used."""
    there = (figure.carried_over(instance.gpu, ranks, speeds or shipped()) for figure in known)
    return min(filter(None, there), key=lambda figure: figure.faster + figure.slower, default=None)


def untried(known: Sequence[StepTime], instance: Instance, ranks: int) -> str:
    """A sentence if the file does not say how much memory the command needs, and the type's GPUs have less memory than
    those on which it is known to run; otherwise empty.
    """

    def holds(figure: StepTime) -> bool:
        has = instance.gpu_memory_gb
        return figure.gpu.memory_gb <= has and figure.gpus * figure.gpu.memory_gb <= ranks * has

    if not known or any(map(holds, known)):
        return ""
    least = min(known, key=lambda figure: figure.gpus * figure.gpu.memory_gb)
    return (
        f"whether {ranks} x {instance.gpu_memory_gb:g} GB hold it is not known, {least.gpus} x"
        f" {least.gpu.memory_gb:g} GB do: job.memory_gb would say"
    )


def _known(
    definition: StackDefinition, catalog: Catalog, measured: Mapping[str, Calibration | RefusedCalibration]
) -> Iterator[StepTime]:
    config, nodes, stated = definition.job.parameters, definition.nodes, definition.estimate.step_ms
    if (declared := config.told_speed) is None:
        return
    counts = config.phases()[-1].counts
    listed = [type_ for name in definition.fleet.instance_types if (type_ := catalog.instances.get(name))]

    def figure(gpu: Gpu, gpus: int, step_ms: float, faster: float, slower: float, source: str) -> StepTime:
        shared = min(faster, slower)
        return StepTime(gpu=gpu, gpus=gpus, step_ms=step_ms, faster=faster, slower=slower, shared=shared, said=source)

    if stated is not None or counts == "seconds":
        step_ms, basis = (
            (SECOND_MS, f"{config.path}.work") if stated is None else (float(stated[0]), "estimate.step_ms")
        )
        # declared hours are the same on every type, and are not taken for too low
        bought = batch.is_endless(config)
        spread = (0.0, 0.0) if declared.hours is None else _spread(*declared.hours)
        if stated is not None:
            spread = unknown.STATED, unknown.STATED
        for type_ in catalog.types_for(config.gpus_needed()).values() if bought else listed:
            yield figure(type_.gpu, config.ranks(type_.gpu_count, nodes), step_ms, *spread, basis)
        return
    for name, calibration in measured.items():
        if isinstance(calibration, Calibration) and counts == "steps":
            instance, sigma = catalog.instances[name], max(unknown.MEASURED, calibration.spread)
            step_ms = calibration.phases[0].step_ms
            yield figure(instance.gpu, config.ranks(instance.gpu_count), step_ms, sigma, sigma, "what was measured")
    sigma = unknown.PAGE if declared.from_page else unknown.STATED
    basis = declared.key + (", a page's," if declared.from_page else "")
    gpus = {known_type.gpu.name: known_type.gpu for known_type in catalog.instances.values()}
    for time in declared.times:
        own = next((own_type for own_type in listed if own_type.gpu.name == time.gpu), listed[0])
        if time.counts and time.gpu in gpus:
            ranks = time.gpus or config.ranks(own.gpu_count, nodes)
            yield figure(gpus[time.gpu], ranks, time.ms, sigma, sigma, basis)


def _spread(low: float, likely: float, high: float) -> tuple[float, float]:
    """Sigmas of a log-normal distribution below and above its middle, from its p10, p50 and p90."""
    return math.log(likely / low) / P90_SIGMAS, math.log(high / likely) / P90_SIGMAS
