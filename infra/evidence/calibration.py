"""Reads calibrations, which are measurements of a job on a device, and decides whether a bill may use them.

Measurements are in two places, in the same format (job/measured.py, docs/calibration.md): in `calibrations/<stack>/`,
written by `gpufleet calibrate`, and in the receipts of runs in `receipts/<stack>/`. A bill uses a measurement for
instance types that have the measured GPU, as long as everything on which the speed depends is unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from gpufleet.infra.catalog import Instance
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence import receipts
from gpufleet.job import atomic
from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import Fields
from gpufleet.job.kind import JobConfig

FOLDER = "calibrations"
# Names of devices that no EC2 type has: boards with the same chips but other clocks or memory, and parts of a GPU.
_OTHER_BOARDS = {"PCIE", "NVL", "WORKSTATION", "MIG", "GRID", "64GB", "94GB", "96GB"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSpeed:
    """The measured speed of one phase. A time is None if the measurement lacks it."""

    name: str
    step_ms: float  # the median
    step_ms_q1: float
    step_ms_q3: float
    save_blocks_s: float | None  # seconds per save for which the trainer waits
    save_write_s: float | None  # seconds per save until it is complete on the local disk
    evaluation_s: float | None  # seconds per evaluation
    boundary_s: float | None  # seconds between the phases: save, export, growth, compilation of the first step
    save_bytes: int | None = None
    save_steps: int | None = None  # steps between two saves


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A measurement that a bill may use. A number of seconds is None if the measurement lacks it."""

    source: str  # such as `probe of 200 steps`, or `receipt of run r1`
    at: str  # the time of the measurement, in UTC
    device: str  # the driver's name for the device
    torch: str | None
    start_s: float | None  # from the start of the trainer's process to its first step
    setup_s: float | None  # from the launch of the node to the first step
    finish_s: float | None  # from the last step to the end of the process: export, samples, final save
    phases: tuple[PhaseSpeed, ...]
    stop_s: float | None = None  # from the request to stop to the complete checkpoint
    lacks: tuple[str, ...] = ()  # phases of the job without optimizer steps, which no measurement covers
    doubts: tuple[str, ...] = ()  # other differences between the measurement and the run

    def phase(self, name: str) -> PhaseSpeed | None:
        """The phase with this name; None if it has no optimizer steps."""
        return next((phase for phase in self.phases if phase.name == name), None)

    @property
    def spread(self) -> float:
        """How much the steps vary: half of them lie within this share of the median."""
        return max((p.step_ms_q3 - p.step_ms_q1) / 2 / p.step_ms for p in self.phases)

    @property
    def basis(self) -> str:
        """A phrase for the bill: on what, when and how the speed was measured, and how much the steps vary."""
        lacks = f"; not measured, and assumed: {', '.join(self.lacks)}" if self.lacks else ""
        doubts = "".join(f"; {doubt}" for doubt in self.doubts)
        torch = "" if self.torch is None else f", torch {self.torch}"
        return (
            f"measured on {self.device} on {self.at[:10]} ({self.source}{torch}; half of the steps within "
            f"{self.spread:.1%} of the median{lacks}{doubts})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedCalibration:
    """A measurement on this device that a bill may not use, and the reason."""

    why: str


def find(definition: StackDefinition, instance: Instance, root: Path) -> Calibration | RefusedCalibration | None:
    """The newest measurement in the project `root` that is valid for the definition's job on `instance`. If none is
    valid, a RefusedCalibration says why the newest one of this device is not. None if the device was never measured.
    """
    candidates = [
        (tree, path)
        for tree, path in _measurements(root, definition.name)
        if tree is None or _is_of(tree, definition, instance)
    ]
    refused: RefusedCalibration | None = None
    for tree, path in sorted(candidates, key=lambda item: str(item[0]["at"]) if item[0] else "", reverse=True):
        shown = path.relative_to(root)
        if tree is None:
            refused = refused or RefusedCalibration(
                why=f"{shown} is damaged: delete it, or run gpufleet calibrate again"
            )
            continue
        why = _why_not(tree, definition, instance, root)
        if not why:
            doubts = tuple(_doubts(tree, definition, root))
            return replace(parse(tree), lacks=unmeasured(definition.job.parameters), doubts=doubts)
        refused = refused or RefusedCalibration(why=f"{shown} no longer counts: {why}; run gpufleet calibrate again")
    return refused


def find_all(
    definition: StackDefinition, instances: Mapping[str, Instance], root: Path, types: Iterable[str] | None = None
) -> dict[str, Calibration | RefusedCalibration]:
    """The measurements for the definition's types, or for `types`, by instance type. Reads nothing if there is no
    folder of measurements.
    """
    if not any((root / folder / definition.name).is_dir() for folder in (FOLDER, receipts.FOLDER)):
        return {}
    asked = definition.fleet.instance_types if types is None else types
    calibrations = {name: find(definition, instances[name], root) for name in asked if name in instances}
    return {name: calibration for name, calibration in calibrations.items() if calibration is not None}


def unmeasured(config: JobConfig) -> tuple[str, ...]:
    """The phases without optimizer steps, which no measurement covers."""
    return tuple(size.name for size in config.phases() if not size.steps)


def not_reached(tree: Mapping[str, Any], config: JobConfig) -> tuple[str, ...]:
    """The phases with optimizer steps that this measurement lacks. If it lacks one, it is not valid."""
    known = {phase["name"] for phase in tree["phases"]}
    return tuple(size.name for size in config.phases() if size.steps and size.name not in known)


def path_for(root: Path, stack: str, device: str, stage: str = "") -> Path:
    """The file for `gpufleet calibrate`: one per stack, stage and device, to be committed."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return root / FOLDER / stack / f"{'.'.join(filter(None, (slug, stage)))}.json"


def is_gpu(device: str, name: str) -> bool:
    """Whether `device`, as the driver names it, is the catalog's GPU `name`."""
    words = set(re.split(r"[\s_-]+", device.upper()))
    return set(name.split()) <= words and not _OTHER_BOARDS & words


def parse(tree: Any) -> Calibration:
    """The measurement in a document of schema 1. Raises ValueError if it is another document."""
    from gpufleet.job import measured  # imported here, because most bills use no measurement

    fields = Fields(tree)
    fields.schema(measured.SCHEMA)
    phases = tuple(map(_phase, fields.sections("phases")))
    if not phases or len({phase.name for phase in phases}) != len(phases):
        raise ValueError("it has no phases, or one of them twice")
    at, device, versions = fields.need("at", reading.text), fields.section("device"), fields.section("versions")
    date.fromisoformat(at[:10])
    device.need("kind", reading.text)
    device.need("ranks", reading.whole_number)
    fields.section("settings")
    for key in ("code_sha256", "experiment"):
        fields.need(key, reading.text)
    return Calibration(
        source=fields.need("source", reading.text),
        at=at,
        device=device.need("name", reading.text),
        torch=versions.take("torch", reading.text, None),
        start_s=fields.take("start_s", reading.seconds, None),
        setup_s=fields.take("setup_s", reading.seconds, None),
        finish_s=fields.take("finish_s", reading.seconds, None),
        phases=phases,
        stop_s=fields.take("stop_s", reading.seconds, None),
    )


def _phase(fields: Fields) -> PhaseSpeed:
    step, save = fields.section("step_ms"), fields.take("save", reading.mapping(reading.anything), {})
    saved = Fields(save, "save")
    speed = PhaseSpeed(
        name=fields.need("name", reading.text),
        step_ms=step.need("median", reading.number),
        step_ms_q1=step.need("q1", reading.number),
        step_ms_q3=step.need("q3", reading.number),
        save_blocks_s=saved.take("blocks_s", reading.seconds, None),
        save_write_s=saved.take("write_s", reading.seconds, None),
        evaluation_s=fields.take("evaluation_s", reading.seconds, None),
        boundary_s=fields.take("boundary_s", reading.seconds, None),
        save_bytes=saved.take("bytes", reading.whole_number, None),
        save_steps=saved.take("every_steps", reading.whole_number, None),
    )
    if not 0 < speed.step_ms_q1 <= speed.step_ms <= speed.step_ms_q3 < 1e9:
        raise ValueError(f"phase {speed.name}: step times {step.tree} are not in order")
    return speed


def sound(root: Path, stack: str, folder: str) -> Iterator[dict[str, Any]]:
    """Every measurement of the stack in `folder`, without damaged ones."""
    for tree, path in _measurements(root, stack):
        if tree is not None and path.parent.parent.name == folder:
            yield tree


def _measurements(root: Path, stack: str) -> Iterator[tuple[dict[str, Any] | None, Path]]:
    """Yields the measurement in each file, and the file; None if it is damaged. Receipts without one are skipped."""
    for path in sorted((root / FOLDER / stack).glob("[!.]*.json")):
        yield _sound(atomic.read_object(path)), path
    for path in sorted((root / receipts.FOLDER / stack).glob("[!.]*.json")):
        with suppress(OSError, ValueError):  # receipts.read names damaged files
            # imported here for the same reason as in receipts.py
            from gpufleet.job.contract.receipt import parse as parse_receipt

            tree = parse_receipt(path.read_bytes()).measured
            if tree is not None and (sound := _sound(dict(tree))) is not None:
                yield sound, path


def _sound(tree: dict[str, Any] | None) -> dict[str, Any] | None:
    try:
        parse(tree)
    except ValueError:
        return None
    return tree


def _is_of(tree: Mapping[str, Any], definition: StackDefinition, instance: Instance) -> bool:
    """Whether the job, or the stage, was measured on the device on which it would run."""
    if tree.get("stage") not in (None, definition.stage):
        return False
    if definition.job.parameters.device != tree["device"]["kind"]:
        return False
    if tree["device"]["kind"] == "cpu":  # for a type without a GPU, the whole machine is the device
        return instance.gpu_count > 0 or tree["device"]["name"] == instance.type
    return instance.gpu_share == 1 and is_gpu(str(tree["device"]["name"]), instance.gpu.name)


def _why_not(tree: Mapping[str, Any], definition: StackDefinition, instance: Instance, root: Path) -> str:
    """Changes since the measurement that affect the speed, as text; empty if there are none."""
    from gpufleet.job import measured

    config = definition.job.parameters
    if tree["experiment"] != definition.job.experiment:
        return f"job.experiment was {tree['experiment']}, is {definition.job.experiment}"
    was, now = tree["settings"], json.loads(json.dumps(measured.settings(definition.job.experiment, asdict(config))))
    changed = [
        f"{config.path}.{path} was {was.get(path, 'absent')}, is {now.get(path, 'absent')}"
        for path in dict.fromkeys([*now, *was])
        if was.get(path, "absent") != now.get(path, "absent")
    ]
    if (image := tree.get("image")) is not None and image != definition.job.image:
        changed.append(f"job.image was {image}, is {definition.job.image}")
    if changed:
        return ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    ranks = config.ranks(instance.gpu_count)
    if int(tree["device"]["ranks"]) != ranks:
        return f"it was measured with {tree['device']['ranks']} processes, {instance.type} would run {ranks}"
    if config.code_folders() and tree["code_sha256"] != code_now(definition, root):
        folders = ", ".join(f"job/{name}" for name in config.code_folders())
        return f"the code that trains ({folders}) has changed"
    lacking = not_reached(tree, config)
    return f"it did not reach phase {lacking[0]}" if lacking else ""


def _doubts(tree: Mapping[str, Any], definition: StackDefinition, root: Path) -> Iterator[str]:
    """Yields differences between measurement and run that the bill only mentions, and for which it does not refuse the
    measurement.
    """
    if "image" in tree and tree["image"] is None:
        yield "measured outside of job.image, which may be slower or faster"
    if tree["code_sha256"] != (now := code_now(definition, root)) and now:
        yield "the code has changed since"


def code_now(definition: StackDefinition, root: Path) -> str:
    """A hash of the code that trains. For a command, the hash of the user's code; empty if all code is in the image."""
    from gpufleet.infra.inputs import code

    config = definition.job.parameters
    return _code(definition.job.experiment) if config.code_folders() else code.digest(definition, root)


@cache
def _code(experiment: str) -> str:
    from gpufleet.job import measured

    return measured.code_sha256(experiment)
