"""Reads the speed of GPUs from a project's own calibrations and receipts, for bills of other jobs and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from gpufleet.infra.catalog import Instance
from gpufleet.infra.evidence import calibration, receipts
from gpufleet.infra.evidence.proofs import newest
from gpufleet.infra.evidence.roofline import launch_ms, limit_ms
from gpufleet.infra.evidence.speeds import OURS, ProvenStartUp, Speed, SpeedGroup, Speeds, family, shipped
from gpufleet.job.kind import from_json

# if the host's kernel launches take a larger share of a step, the host decides the step's time, and not the GPU
_HOST_BOUND = 0.7
NEWEST = 10  # the number of newest nodes whose start-up times are used


def known(root: Path, instances: Mapping[str, Instance], stack: str = "") -> Speeds:
    """The speeds of the shipped table, the speeds measured in the project `root`, and the start-up times of the stack's
    nodes.
    """
    own = [
        speed
        for folder in (calibration.FOLDER, receipts.FOLDER)
        for place in sorted((root / folder).glob("*/"))
        for tree in calibration.sound(root, place.name, folder)
        for speed in _speeds(tree, instances)
    ]
    setup_s = start_ups(root, stack)
    canary_s = canary_start_ups(root)
    return Speeds([*shipped().figures, *own], setup_s, canary_s) if own or setup_s or canary_s else shipped()


def canary_start_ups(root: Path) -> dict[str, ProvenStartUp]:
    """The start-up times of nodes in the account's newest canary, by family of types. The canary's image may be smaller
    than that of the job.
    """
    last = newest(root)
    seconds = None if last is None else last.figure("node.started_s")
    if last is None or seconds is None:
        return {}
    proven = ProvenStartUp(seconds, f"the canary of {last.day} in {last.tree['region']}")
    return dict.fromkeys(map(family, last.tree.get("types", [])), proven)


def start_ups(root: Path, stack: str) -> dict[str, float]:
    """Seconds from launch to first step, by family of types: the median of the newest nodes in the stack's receipts."""
    took: dict[str, list[float]] = {}
    for receipt in receipts.read(root, stack)[0] if stack else ():
        for attempt in () if receipt.rehearsal else receipt.attempts:
            if attempt.started_s is not None and not attempt.older_s:
                took.setdefault(family(attempt.type), []).append(float(attempt.started_s))
    return {name: median(seconds[-NEWEST:]) for name, seconds in took.items()}


def _speeds(tree: Mapping[str, Any], instances: Mapping[str, Instance]) -> Iterator[Speed]:
    """Yields one speed for each phase of a ready-made job in which the GPU, and not the host, decided the time."""
    try:
        config = from_json(tree["experiment"], _nested(tree["settings"]))
    except ValueError:
        return  # the settings come from another version
    device, ranks = tree["device"], int(tree["device"]["ranks"])
    node = next(
        (
            instance
            for instance in instances.values()
            if instance.gpu_share == 1
            and instance.gpu_count >= ranks
            and calibration.is_gpu(device["name"], instance.gpu.name)
        ),
        None,
    )
    if node is None or device["kind"] != "cuda" or config.told_speed is not None:
        return
    sizes = {size.name: (index, size) for index, size in enumerate(config.phases())}
    for phase in tree["phases"]:
        if phase["name"] not in sizes:
            continue
        index, size = sizes[phase["name"]]
        limit, step_ms = limit_ms(index, node, config, ranks), float(phase["step_ms"]["median"])
        if not limit or launch_ms(size, node, config, ranks) > _HOST_BOUND * step_ms:
            continue
        place = SpeedGroup(node.gpu.name, size.kind, OURS, ranks > 1)
        yield Speed(place, limit * size.slower / step_ms, f"{tree['experiment']}, {size.name}")


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a tree, from settings by dotted path."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *above, key = path.split(".")
        inner = tree
        for name in above:
            inner = inner.setdefault(name, {})
        inner[key] = value
    return tree
