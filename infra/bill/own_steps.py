"""How long a step of a user's own command takes on a node: as its file says, as it was measured, or guessed from these.

A figure holds for one kind of GPU and so many of them. Elsewhere the same work takes

- on other GPUs as much longer or shorter as other code did (infra/evidence/speeds.py), as far as that is known;
- on half as many GPUs twice as long, on twice as many half as long. Not every script gains so much, so the range is
  wider on the side of gaining less. A script whose batch grows with its GPUs needs as many fewer of its steps.
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

P90_SIGMAS = 1.2816  # p10 and p90 of a normal distribution are so many sigmas from its middle
SECOND_MS = 1000.0  # of a run that declares hours, or nothing: a "step" is one second on the listed types


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Milliseconds of a step, or of an epoch where these are counted, on `gpus` of a GPU, and how far it may be off:
    sigmas of its logarithm.
    """

    gpu: Gpu
    gpus: int
    step_ms: float
    faster: float
    slower: float
    shared: float  # the part of both that the same job has on every GPU
    said: str  # whose figure it is
    guessed: bool = False  # from a figure of other GPUs

    def carried_over(self, gpu: Gpu, gpus: int, speeds: Speeds) -> StepTime | None:
        """What follows for so many of another GPU. None: the peak of one of the two is not known."""
        if (gpu, gpus) == (self.gpu, self.gpus):
            return self
        times, sigma = gpus / self.gpus, 0.0  # as fast
        if gpu != self.gpu:
            if not gpu.bf16_tflops or not self.gpu.bf16_tflops:
                return None
            own, other = (SpeedGroup(each.name, "", NOBODY, self.gpus > 1) for each in (self.gpu, gpu))
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
    """What file and measurements say of a command's step; nothing for a ready-made job. A figure that does not name how
    many GPUs it is of, is of those of the first listed type that has them, else of the first listed type's.
    """
    return tuple(_known(definition, catalog, measured))


def step_time(known: Iterable[StepTime], instance: Instance, ranks: int, speeds: Speeds | None) -> StepTime | None:
    """The step on `ranks` of a type's GPUs, from the figure that leaves the least open; None where none tells."""
    there = (each.carried_over(instance.gpu, ranks, speeds or shipped()) for each in known)
    return min(filter(None, there), key=lambda each: each.faster + each.slower, default=None)


def untried(known: Sequence[StepTime], instance: Instance, ranks: int) -> str:
    """That the GPUs have less memory than those on which a command is known to run, whose need nobody has said; or
    nothing.
    """

    def holds(each: StepTime) -> bool:
        has = instance.gpu_memory_gb
        return each.gpu.memory_gb <= has and each.gpus * each.gpu.memory_gb <= ranks * has

    if not known or any(map(holds, known)):
        return ""
    least = min(known, key=lambda each: each.gpus * each.gpu.memory_gb)
    return (
        f"whether {ranks} x {instance.gpu_memory_gb:g} GB hold it is not known, {least.gpus} x"
        f" {least.gpu.memory_gb:g} GB do: job.memory_gb would say"
    )


def _known(
    definition: StackDefinition, catalog: Catalog, measured: Mapping[str, Calibration | RefusedCalibration]
) -> Iterator[StepTime]:
    config, nodes, stated = definition.job.parameters, definition.nodes, definition.estimate.step_ms
    if (told := config.told_speed) is None:
        return
    counts = config.phases()[-1].counts
    listed = [each for name in definition.fleet.instance_types if (each := catalog.instances.get(name))]

    def figure(gpu: Gpu, gpus: int, step_ms: float, faster: float, slower: float, said: str) -> StepTime:
        shared = min(faster, slower)
        return StepTime(gpu=gpu, gpus=gpus, step_ms=step_ms, faster=faster, slower=slower, shared=shared, said=said)

    if stated is not None or counts == "seconds":
        step_ms, said = (SECOND_MS, f"{config.path}.work") if stated is None else (float(stated[0]), "estimate.step_ms")
        bought = batch.is_endless(config)  # hours, which are hours anywhere, and none of which can be missed
        spread = (0.0, 0.0) if told.hours is None else _spread(*told.hours)
        if stated is not None:
            spread = unknown.STATED, unknown.STATED
        for each in catalog.instances.values() if bought else listed:
            yield figure(each.gpu, config.ranks(each.gpu_count, nodes), step_ms, *spread, said)
        return
    for name, found in measured.items():
        if isinstance(found, Calibration) and counts == "steps":
            instance, sigma = catalog.instances[name], max(unknown.MEASURED, found.spread)
            step_ms = found.phases[0].step_ms
            yield figure(instance.gpu, config.ranks(instance.gpu_count), step_ms, sigma, sigma, "what was measured")
    sigma = unknown.PAGE if told.from_page else unknown.STATED
    said = told.key + (", a page's," if told.from_page else "")
    gpus = {each.gpu.name: each.gpu for each in catalog.instances.values()}
    for time in told.times:
        own = next((each for each in listed if each.gpu.name == time.gpu), listed[0])
        if time.counts and time.gpu in gpus:
            ranks = time.gpus or config.ranks(own.gpu_count, nodes)
            yield figure(gpus[time.gpu], ranks, time.ms, sigma, sigma, said)


def _spread(low: float, likely: float, high: float) -> tuple[float, float]:
    """Sigma of a log-normal distribution below and above its middle, of its p10, p50 and p90."""
    return math.log(likely / low) / P90_SIGMAS, math.log(high / likely) / P90_SIGMAS
