"""Checks which instance types a definition file may list, and says what to write instead. A part of checks.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpufleet.infra.definition.model import Fleet
from gpufleet.infra.definition.schema import Findings
from gpufleet.infra.definition.yaml_tree import Mapping, find_node
from gpufleet.job.kind import JobConfig, batch
from gpufleet.job.text import counted

if TYPE_CHECKING:
    from gpufleet.infra.catalog import Catalog, Instance


def instance_types(
    fleet: Fleet, config: JobConfig | None, findings: Findings, catalog: Catalog, *, launchable: bool
) -> None:
    """Adds a problem for each listed type that is unknown, repeated or unfit for this run. If `config` is None, because
    it cannot be read, memory is not checked.
    """
    names, gpus = fleet.instance_types, 1 if config is None else config.gpus_needed()
    current = _launchable(fleet.region, catalog, gpus)
    for index, name in enumerate(names):
        path, kind = f"fleet.instance_types[{index}]", catalog.instances.get(name)
        if name in names[:index]:
            findings.add(path, "each instance type once")
        elif kind is None:
            known = sorted(k.type for k in current)
            family = [k for k in known if k.split(".")[0] == name.split(".")[0]] or sorted(
                {k.split(".")[0] + ".*" for k in known}
            )
            closest = catalog.nearest_type(name, known)
            of_kind = "a GPU instance type" if gpus else "an instance type"
            hint, allowed = _with_gpus(name, config, current), f"{of_kind} of the catalog"
            if not hint:
                hint, allowed = f"Nearest: {closest}." if closest else "", f"{allowed}: {', '.join(family)}"
            findings.add(path, allowed, hint)
        elif not launchable:
            continue
        elif kind.unusable:
            instead = _suggested_type(kind, config, current)
            use = f"Use {instead} instead." if instead else ""
            allowed = (
                "a type that EC2 still offers" if kind.left_ec2 else "a type whose GPU the AMI and the image can use"
            )
            findings.add(path, allowed, f"{name} {kind.unusable}. {use}".strip())
        elif kind.regions is not None and fleet.region in catalog.regions() and fleet.region not in kind.regions:
            findings.add(path, f"a type offered in {fleet.region}", f"{name} is offered in {', '.join(kind.regions)}.")
        elif config is not None and gpus and not kind.gpu_count:
            asks = f"a type with a GPU, or {config.path}.device: cpu for a job that needs none"
            findings.add(path, asks, f"{name} has no GPU.")
        elif reason := _misfit(kind, config):
            instead = _suggested_type(kind, config, current)
            use = f"Nearest that fits: {instead}." if instead else "No type in the catalog fits."
            findings.add(path, f"a type on which every phase fits; {reason}", use)


def _with_gpus(written: str, config: JobConfig | None, current: Sequence[Instance]) -> str:
    """A hint with the types that have the GPUs in a name such as L40S, L40S:4 or 4xL40S, the smallest first; empty for
    another name. Types on which the run does not fit are named only if no other type exists.
    """
    parts = re.fullmatch(r"(?:([0-9]{1,3}) ?x ?)?(.+?)(?:[:x]([0-9]{1,3}))?", written.strip(), re.IGNORECASE)
    name, count = (_letters(parts[2]), int(parts[1] or parts[3] or 1)) if parts else ("", 1)
    kinds = sorted((k for k in current if name in _gpu_names(k)), key=lambda k: (k.gpu_count, k.vcpu))
    if not kinds:
        return ""
    gpu = kinds[0].gpu.name if len({k.gpu.name for k in kinds}) == 1 else kinds[0].gpu.name.split()[0]
    enough = [k for k in kinds if k.gpu_count >= count]
    if not enough:
        return f"No type has more than {kinds[-1].gpu_count} x {gpu}."
    named = ", ".join(k.type for k in [k for k in enough if not _misfit(k, config)] or enough)
    return f"{gpu} is the GPU of {named}." if count == 1 else f"At least {count} x {gpu}: {named}."


def _gpu_names(kind: Instance) -> set[str]:
    """The GPU's name with and without its memory, such as L40S 48GB and L40S, or A100 80GB and A100."""
    first = kind.gpu.name.split()[0]
    return {_letters(name) for name in (first, kind.gpu.name, f"{first}{kind.gpu.memory_gb:g}GB")}


def _letters(name: str) -> str:
    return re.sub(r"^nvidia|[^a-z0-9]", "", name.lower())


def declared_steps(config: JobConfig, findings: Findings, catalog: Catalog) -> None:
    """Adds a problem for each step time of a GPU that the catalog does not know."""
    known = sorted({kind.gpu.name for kind in catalog.instances.values()})
    for time in config.told_speed.times if config.told_speed else ():
        if time.gpu not in known:
            import difflib  # imported here, because only the message of an error needs it

            spelled = {_letters(gpu): gpu for gpu in known}
            close = [spelled[letters] for letters in difflib.get_close_matches(_letters(time.gpu), spelled, n=1)]
            meant = [gpu for gpu in known if _letters(gpu.split()[0]) == _letters(time.gpu)] or close
            hint = f"Nearest: {' or '.join(meant)}." if meant else ""
            allowed = f"a GPU, or a number of them as in `8 x H100`: {', '.join(known)}"
            written = find_node(findings.tree, time.section)
            node = written.entries.get(time.key) if isinstance(written, Mapping) else None
            findings.add(f"{time.section}.{time.key}", allowed, hint, value=time.key, node=node)


def gpus_asked(fleet: Fleet, config: JobConfig, findings: Findings, catalog: Catalog) -> None:
    """Adds a problem if a listed type has fewer GPUs than the job needs, because such a node would be refused."""
    asked = config.gpus_needed()
    kinds = [kind for name in dict.fromkeys(fleet.instance_types) if (kind := catalog.instances.get(name)) is not None]
    if config.demands.like_nodes and len({kind.gpu_count for kind in kinds}) > 1:
        findings.add(
            "fleet.instance_types",
            f"types with equally many GPUs, or {config.path}.checkpoint.same_gpus: false",
            "A checkpoint that 4 GPUs wrote in shards can only be read by 4 GPUs, unless your script can do more.",
            value=", ".join(f"{kind.type} has {counted(kind.gpu_count, 'GPU')}" for kind in kinds),
        )
    few = [f"{kind.type} has {kind.gpu_count}" for kind in kinds if 0 < kind.gpu_count < asked]
    if few:
        findings.add(f"{config.path}.gpus", f"at most the GPUs of each listed type; {', '.join(few)}", value=str(asked))


def several_nodes(fleet: Fleet, config: JobConfig, findings: Findings, catalog: Catalog) -> None:
    """Adds a problem for each reason why `fleet.nodes` nodes could not train together."""
    if fleet.gather_minutes is not None and not fleet.lets_go:
        findings.add(
            "fleet.gather_minutes", "none, for one node or a Capacity Block", "AWS is then not asked for nodes again."
        )
    if not fleet.is_gang:
        if fleet.cards == "all":
            findings.add("fleet.cards", "one, where fleet.nodes is 1", "A single node talks to no other.")
        return
    for key, names in (("zones", fleet.zones), ("instance_types", fleet.instance_types)):
        if len(names) > 1:
            hint = "The nodes train at the pace of the slowest, over a network that ends with the zone."
            findings.add(f"fleet.{key}", f"one, where fleet.nodes is {fleet.nodes}", hint, value=", ".join(names))
    demands, rows = config.demands, config.rows()
    if demands.one_node:
        findings.add("fleet.nodes", f"1 for this job: {demands.one_node}")
    if apart := demands.apart:
        findings.add(f"{config.path}.command", apart, f"fleet.nodes is {fleet.nodes}.")
    kind = catalog.instances.get(fleet.instance_types[0]) if fleet.instance_types else None
    if kind is None or demands.one_node:
        return
    gpus = kind.gpu_count * fleet.nodes
    if config.device == "cuda" and config.gpus is not None and config.gpus < kind.gpu_count:
        findings.add(f"{config.path}.gpus", f"all {kind.gpu_count} of {kind.type}, where fleet.nodes is {fleet.nodes}")
    elif config.device == "cuda" and rows is not None and rows < gpus:
        findings.add("fleet.nodes", f"at most {rows // kind.gpu_count}: a step has {rows} rows")
    if fleet.cards == "all" and kind.efa_cards < 2:
        findings.add("fleet.cards", f"one: {kind.type} has only one network card for traffic between nodes")


def _launchable(region: str, catalog: Catalog, gpus: int) -> list[Instance]:
    """The types that the file could list instead; if the file's region is wrong, the types of all regions."""
    kinds = [kind for kind in catalog.types_for(gpus).values() if not kind.unusable]
    known = region in catalog.regions()
    return [kind for kind in kinds if not known or kind.regions is None or region in kind.regions]


def _misfit(kind: Instance, config: JobConfig | None) -> str:
    """Why the job cannot run on this type; empty if it can. A CPU run fits on any type."""
    if config is None or config.device == "cpu":
        return ""
    if config.products() == "bf16" and not kind.gpu.bf16:
        return f"{kind.gpu.name} has no bf16 tensor cores ({config.path}.precision.compute)"
    if too_old := kind.too_old(config.demands.capability):
        return too_old
    ranks = config.ranks(kind.gpu_count)
    needs: list[tuple[float, str]] = []
    for index, phase in enumerate(config.phases()):
        if batch.choose_rung(config, kind.gpu_memory_gb, index, ranks) is None:
            needs.append((batch.peak_gb(config, index, config.ladder(ranks)[-1], ranks), phase.name))
    if not needs:
        return ""
    need, phase_name = max(needs)  # the phase that decides which type fits
    has = f"{kind.gpu.name} has {kind.gpu_memory_gb:g}"
    return f"phase {phase_name} needs {need:.1f} GB at its smallest micro-batch, {has}"


def _suggested_type(kind: Instance, config: JobConfig | None, current: Sequence[Instance]) -> str:
    """The type with the least GPU memory, then the fewest GPUs and vCPUs, of those that fit and are no smaller than
    `kind`. A type whose speed cannot be derived has no bill, and is suggested only if there is no other.
    """
    gpus = 1 if config is None else config.gpus_needed()
    fits = [
        other
        for other in current
        if other.gpu_memory_gb >= kind.gpu_memory_gb
        and other.vcpu >= kind.vcpu
        and other.gpu_count >= gpus
        and not _misfit(other, config)
    ]

    def order(other: Instance) -> tuple[bool, int, float, int, str]:
        unknown = config is not None and not other.gpu.has_a_roofline(config.products())
        return unknown, other.gpu_count, other.gpu_memory_gb, other.vcpu, other.type

    best = min(fits, key=order, default=None)
    return best.type if best else ""
