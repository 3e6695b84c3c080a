"""Measures a job on this machine: runs a few hundred of its steps, and keeps their times for bills."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import calibration
from gpufleet.infra.inputs import code, folders, git, overlay
from gpufleet.infra.inputs.readiness import command
from gpufleet.job import atomic, measured, probe
from gpufleet.job.command.places import own_environment
from gpufleet.job.contract.environment import USER_PATH
from gpufleet.job.contract.run import probe_document
from gpufleet.job.contract.workdir import CODE, DATA, FINAL, INPUTS, NAMED, RUN, USER
from gpufleet.job.kind import JobConfig, batch
from gpufleet.job.measured import WARM_UP
from gpufleet.job.supervisor import machine
from gpufleet.job.text import stamp

CPU_INFO = Path("/proc/cpuinfo")


def require_place(folder: Path) -> None:
    """Raises GpufleetError if the folder cannot be written. This check comes before the measurement, which takes
    minutes of a rented GPU.
    """
    near = next(candidate for candidate in (folder, *folder.parents) if candidate.exists())
    if not near.is_dir() or not os.access(near, os.W_OK):
        raise GpufleetError(
            f"{folder}: the measurement is written there, but {near} is not a writable folder; correct that, or measure"
            " in another checkout"
        )


def why_ignored(tree: dict[str, Any], definition: StackDefinition, root: Path) -> str:
    """A sentence about why the bill of no listed type uses this measurement, and what to do; empty if a bill
    uses it.
    """
    if missing := calibration.not_reached(tree, definition.job.parameters):
        return f"no step of phase {missing[0]} was timed (the first {WARM_UP} never are): ask for more --steps"
    if definition.estimate.step_ms is not None:
        return "since estimate.step_ms takes precedence over a measurement: remove that key from the file"
    measurements = calibration.find_all(definition, load_catalog(root).instances, root).values()
    refused = [
        measurement.why for measurement in measurements if isinstance(measurement, calibration.RefusedCalibration)
    ]
    if len(refused) < len(measurements):
        return ""
    if refused:
        return refused[0]
    types = ", ".join(definition.fleet.instance_types)
    return f"since none of fleet.instance_types ({types}) has whole GPUs of {tree['device']['name']}"


def measure(
    definition: StackDefinition,
    root: Path,
    *,
    steps: int,
    gpus: Sequence[machine.DriverGpu],
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measures, and returns the measurement as JSON. Raises GpufleetError, for example if the job fails."""
    config = definition.job.parameters
    if config.device == "cuda" and not gpus:
        raise GpufleetError(
            f"{definition.source}: {config.path}.device is cuda, but this machine has no NVIDIA GPU: run this on a node"
            " with the GPU that the bill is for, or use --rehearsal"
        )
    if any(size.counts == "epochs" for size in config.phases()):
        raise GpufleetError(
            f"{definition.source}: {config.path}.work counts epochs, but a probe times steps: write"
            f" {config.path}.work.steps_per_epoch beside epochs, so that the work counts steps"
        )
    # fewer steps if the whole run has fewer; the bill states their number
    steps = min(steps, batch.total_steps(config))
    plan, ranks = config.probed(steps), config.ranks(len(gpus))
    too_short = [size for size in config.phases() if 0 < size.steps <= WARM_UP]
    if too_short:
        raise GpufleetError(
            f"{definition.source}: phase {too_short[0].name} has {too_short[0].steps} optimizer steps, but the first"
            f" {WARM_UP} of a phase never count: this run cannot be measured, and its bill stays uncalibrated"
        )
    with tempfile.TemporaryDirectory(prefix="gpufleet-probe-") as scratch:
        workdir = Path(scratch) / "run"
        shipped = place(definition, plan.config, root, workdir)
        programs, python = (None, None) if config.code_folders() else own_programs(definition, root, Path(scratch))
        if config.demands.installs and python is not None:
            programs = overlay.make(python, Path(scratch) / "environment", cache=Path(scratch) / "pip")
            python = programs / "python"
        say(f"probing {definition.name}: {steps} steps of the real job on {name_of(gpus, config)} ...")
        try:
            outcome = probe.run(
                workdir,
                stop_at=plan.stop_at,
                save_at=middles(plan.config, steps),
                steps=steps,
                ranks=batch.launched(config, ranks),
                module=config.module,
                save_wait_s=plan.save_wait_s,
                say=say,
                environment={**os.environ, **({USER_PATH: str(programs)} if programs else {})},
            )
        except probe.ProbeFailedError as error:
            ran = f"\nIts Python was {python}." if python else ""
            raise GpufleetError(f"the probe failed. {error}{ran}") from error
        versions = own_versions(python) if python else None
    device = machine.describe(tuple(gpus))
    tree = measured.document(
        experiment=definition.job.experiment,
        parameters=asdict(config),
        device={
            "kind": config.device,
            "name": name_of(gpus, config),
            "count": len(gpus) if config.device == "cuda" else 0,
            "ranks": ranks,
            "memory_gb": device.gpu_memory_gb,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "cpus": device.cpus,
        },
        versions={
            **({**device.versions, "python": device.python} if versions is None else versions),
            "driver": device.driver,
        },
        source=f"probe of {steps} steps",
        at=stamp(datetime.now(UTC)),
        measured=outcome.phases,
        start_s=outcome.start_s,
        finish_s=outcome.finish_s,
        code=shipped,
    )
    return {
        **tree,
        **({} if config.code_folders() else {"image": None}),  # a probe runs without a container
        "stack": definition.name,
        **({"stage": definition.stage} if definition.stage else {}),
        "commit": _commit(root),
        "cpu_s": outcome.cpu_s,
        "seconds": outcome.seconds,
        "stop_s": outcome.stop_s,
    }


def middles(config: JobConfig, steps: int) -> dict[str, int]:
    """For each phase of a probe of about `steps` steps: the step at which it asks for a checkpoint."""
    first, middle_steps = 0, {}
    for size in config.phases():
        middle_steps[size.name] = first + min(size.steps, steps) // 2
        first += size.steps
    return middle_steps


def place(definition: StackDefinition, config: JobConfig, root: Path, workdir: Path) -> str | None:
    """Fills the work folder as the supervisor does: run.json, data/, the base weights, a command's code and inputs.
    Returns the hash of a command's code; None for a ready-made job. Raises GpufleetError.
    """
    workdir.mkdir()
    storage = definition.storage
    prepare = command(definition)
    for name, setting, place, first in (
        (DATA, "dataset", storage.dataset or None, f"run `{prepare}`, with --rehearsal where the probe has it"),
        (INPUTS, "base_weights", storage.base_weights, "download the weights into such a folder"),
    ):
        if place is not None:
            (workdir / name).symlink_to(_folder(root, setting, place, first), target_is_directory=True)
    asked = {name for _, name in config.demands.inputs}
    earlier = {name: run for name, run in definition.left.items() if name in asked}
    outputs = {name: f"results/{definition.name}/{run}/{FINAL}" for name, run in earlier.items()}
    for name, place in ((storage.inputs or {}) | outputs).items():
        folder = _folder(root, f"inputs.{name}", place, "put it there")
        # One link for each file, and not for the folder, so that new files are written into the work folder.
        for below, file in folders.files_of(folder).items():
            link = workdir / USER / NAMED / name / below
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
    atomic.write_json(workdir / RUN, probe_document(definition.job.experiment, asdict(config)))
    if config.code_folders():
        return None
    tree = code.read(definition, root)
    if tree is None:
        return ""
    packed = code.pack(tree, root)
    code.unpack(packed, workdir / USER / CODE)
    return packed.sha256


def _folder(root: Path, setting: str, place: str, first: str) -> Path:
    folder = root / place
    if place.startswith("s3://") or not folder.is_dir():
        raise GpufleetError(
            f"storage.{setting}: {place} is not a folder here, but a probe trains on local files: "
            f"{first}, or copy it and name the copy"
        )
    return folder.resolve()


def own_programs(definition: StackDefinition, root: Path, scratch: Path) -> tuple[Path, Path]:
    """The folder that comes first on the PATH of a command on this machine, and the command's Python, which is in this
    folder too, under the name `python`.
    """
    python = own_python(definition, root)
    if code.programs(definition, root) is not None:
        return python.parent, python
    shim = scratch / "bin" / "python"
    shim.parent.mkdir()
    shim.write_text(
        f'#!/bin/sh\nexec {shlex.quote(str(python))} "$@"\n'
    )  # not a link, because Python started through a link would not find the environment's packages
    shim.chmod(0o755)
    return shim.parent, python


def own_python(definition: StackDefinition, root: Path) -> Path:
    """The Python of a command on this machine: that of the command's own environment, or the machine's python3 if there
    is none. This Python is never that of this project.
    """
    if (programs := code.programs(definition, root)) is not None:
        return programs / "python"
    path = own_environment(os.environ)["PATH"]
    return Path(shutil.which("python", path=path) or shutil.which("python3", path=path) or "python3")


def own_versions(python: Path) -> dict[str, str]:
    """The versions of the packages that a measurement records, as a command's Python has them."""
    answer = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=False)
    return dict(json.loads(answer.stdout)) if answer.returncode == 0 else {}


_VERSIONS = """
import importlib.metadata as m, json, platform
found = {"python": platform.python_version()}
for name in ("torch", "transformers", "lightning", "pytorch-lightning", "accelerate"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


def name_of(gpus: Sequence[machine.DriverGpu], config: JobConfig) -> str:
    """The device's name: from the driver for a GPU, from the kernel for a CPU."""
    if config.device == "cuda":
        return gpus[0].name
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models and models[0] else platform.machine()


def _commit(root: Path) -> str | None:
    """The commit of the project's files, with `+` if they have changed since; None if they are not in git."""
    head = git.ask(root, "rev-parse", "--short=12", "HEAD")
    return None if head is None else head.decode().strip() + ("+" if git.status(root, "-uno") else "")
