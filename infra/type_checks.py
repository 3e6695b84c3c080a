"""Which instance types a definition file may list, and what to write instead of another. A part of infra.checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infra.definition import Fleet
from infra.schema import Findings
from job import sizing
from job.config import JobConfig

if TYPE_CHECKING:
    from infra.catalog import Catalog, Instance


def instance_types(
    fleet: Fleet, config: JobConfig | None, findings: Findings, catalog: Catalog, *, launchable: bool
) -> None:
    """Adds a problem for each listed type that is unknown, repeated or no good for this run. Without a readable run
    config nothing is said about memory.
    """
    names = fleet.instance_types
    current = _launchable(fleet.region, catalog)
    for index, name in enumerate(names):
        path, kind = f"fleet.instance_types[{index}]", catalog.instances.get(name)
        if name in names[:index]:
            findings.add(path, "each instance type once: it is a set")
        elif kind is None:
            known = sorted(k.type for k in current)
            family = [k for k in known if k.split(".")[0] == name.split(".")[0]] or sorted(
                {k.split(".")[0] + ".*" for k in known}
            )
            closest = catalog.nearest_type(name, known)
            hint = f"Nearest: {closest}." if closest else ""
            if of_gpu := sorted(k.type for k in current if k.gpu.name.split()[0].lower() == name.lower()):
                hint = f"{name} is the GPU of {', '.join(of_gpu)}."
            findings.add(path, "a GPU instance type of the catalog: " + ", ".join(family), hint)
        elif not launchable:
            continue
        elif kind.unusable:
            instead = _instead(kind, config, current)
            use = f"Use {instead} instead." if instead else ""
            allowed = (
                "a type that EC2 still offers" if kind.left_ec2 else "a type whose GPU the AMI and the image can use"
            )
            findings.add(path, allowed, f"{name} {kind.unusable}. {use}".strip())
        elif kind.regions is not None and fleet.region in catalog.regions() and fleet.region not in kind.regions:
            findings.add(path, f"a type offered in {fleet.region}", f"{name} is offered in {', '.join(kind.regions)}.")
        elif reason := _misfit(kind, config):
            instead = _instead(kind, config, current)
            use = f"Nearest that fits: {instead}." if instead else "No type in the catalog fits."
            findings.add(path, f"a type on which every phase fits; {reason}", use)


def gpus_asked(fleet: Fleet, config: JobConfig, findings: Findings, catalog: Catalog) -> None:
    """A node with fewer GPUs than the job asks for would be refused, and so would its replacement."""
    asked = sizing.least_gpus(config)
    kinds = [kind for name in dict.fromkeys(fleet.instance_types) if (kind := catalog.instances.get(name)) is not None]
    few = [f"{kind.type} has {kind.gpu_count}" for kind in kinds if kind.gpu_count < asked]
    if few:
        findings.add("job.parameters.gpus", f"at most the GPUs of each listed type; {', '.join(few)}", value=str(asked))


def _launchable(region: str, catalog: Catalog) -> list[Instance]:
    """What could stand in the file instead; in any region while the file's own is wrong."""
    kinds = [kind for kind in catalog.instances.values() if not kind.unusable]
    known = region in catalog.regions()
    return [kind for kind in kinds if not known or kind.regions is None or region in kind.regions]


def _misfit(kind: Instance, config: JobConfig | None) -> str:
    """Why the run config cannot run on this type, or nothing. A CPU run fits anywhere."""
    if config is None or config.device == "cpu":
        return ""
    if config.precision.compute == "bf16" and not kind.gpu.bf16:
        return f"{kind.gpu.name} has no bf16 tensor cores (job.parameters.precision.compute)"
    ranks = sizing.ranks(config, kind.gpu_count)
    needs: list[tuple[float, str]] = []
    for index, phase in enumerate(sizing.phases(config)):
        if sizing.choose_rung(config, kind.gpu_memory_gb, index, ranks) is None:
            micro = sizing.ladder(config, ranks)[-1]
            used = sizing.memory(config, index, micro.micro, checkpointing=micro.checkpointing, ranks=ranks)
            needs.append((used.total_gb + sizing.DEVICE_RESERVE_GB, phase.name))
    if not needs:
        return ""
    need, phase_name = max(needs)  # the one that decides which type fits
    has = f"{kind.gpu.name} has {kind.gpu_memory_gb:g}"
    return f"phase {phase_name} needs {need:.1f} GB at its smallest micro-batch, {has}"


def _instead(kind: Instance, config: JobConfig | None, current: Sequence[Instance]) -> str:
    """The type with the least GPU memory, then the fewest GPUs and vCPUs, that is no smaller than `kind` and fits; one
    whose speed cannot be derived, so that it has no bill, only where there is no other.
    """
    gpus = 1 if config is None else sizing.least_gpus(config)
    fits = [
        other
        for other in current
        if other.gpu_memory_gb >= kind.gpu_memory_gb
        and other.vcpu >= kind.vcpu
        and other.gpu_count >= gpus
        and not _misfit(other, config)
    ]

    def order(other: Instance) -> tuple[bool, int, float, int, str]:
        unknown = config is not None and not other.gpu.has_a_roofline(sizing.products(config))
        return unknown, other.gpu_count, other.gpu_memory_gb, other.vcpu, other.type

    best = min(fits, key=order, default=None)
    return best.type if best else ""
