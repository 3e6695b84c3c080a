"""The definition file of a folder of training code: what was found in it, each with its place, and what was not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpufleet.infra.discover.script import (
    BACKEND,
    COMPILE,
    DEVICE,
    LOG_EVERY,
    OUT,
    RESUME,
    ScriptArgument,
    ScriptFacts,
)
from gpufleet.infra.inputs.code import ENVIRONMENTS
from gpufleet.job.kind.command import FORMATS, INPUT, SAVE_INTERVALS, STEP_COUNTS, setting

IMAGE = "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"
REHEARSED_STEPS, REHEARSED_EVERY = 60, 10  # of slow ones; a fast script is given more (rehearsal/pace.py)
_HF_ON_CPU = "--use_cpu true --report_to none"


@dataclass(slots=True)
class Draft:
    """The text of a definition, and what its reader has to know or decide, a sentence each."""

    text: str = ""
    known: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def draft(name: str, found: ScriptFacts, *, folder: str, command: str = "", modeline: str = "") -> Draft:
    """A definition that loads. `folder`: the code's, relative to the project; `modeline`: for editors, or empty."""
    made = Draft()
    every, steps = found.argument(SAVE_INTERVALS), found.argument(STEP_COUNTS)
    typed = command or _command(found)
    written = _where_it_writes(found, typed, made)
    if every is None and found.every and found.every.value in found.arguments:
        every = found.arguments[found.every.value]
    fixed = int(found.every.value) if every is None and found.every and found.every.value.isdigit() else None
    every_steps = fixed or _said(typed, every) or _positive(every.default if every else None) or 500
    saved_at = every.where if every else found.every.where if fixed and found.every else ""
    total = _said(typed, steps) or _positive(steps.default if steps else None)
    counted = found.counted if steps is None else None
    total, where = (int(counted.value), counted.where) if counted else (total, steps.where if steps else "")
    if found.framework == "hf-trainer" and every and not _said(typed, every):
        written += f" {every.with_value(every_steps)}"
    elif every and _positive(every.default) is None and not _said(typed, every):
        written += f" {every.with_value(every_steps)}"
        made.known.append(f"{every.where}: it saves nothing by default, so the command asks for it ({every.written})")
    lines = [
        *filter(None, [modeline]),
        f"# {name}: {found.script or typed}, on rented GPUs.",
        "# Written by `gpufleet new`; lines marked CHECK are yours. All keys: docs/definition.md of gpufleet.",
        "",
        "run:",
        "  id: r1            # a new id is a new fleet on the same bucket",
        "  owner: you        # tagged on everything, so that a bill can be asked about",
        "",
        "job:",
        "  # CHECK: any Linux image with sh and what the script needs",
        f"  image: {IMAGE}",
        "  code:",
        f"    folder: {_quoted(folder)}",
        *_setup(found),
        f"  command: {_quoted(written)}",
        *_resume(found, made),
        *_checkpoint(found, every_steps if total else None, saved_at, made),
        *_progress(found, made),
        *_work(total, where, made),
        *_stop(found, made),
        *_secrets(found),
        "",
        "fleet:",
        "  region: us-east-2",
        "  zones: [us-east-2a, us-east-2b, us-east-2c]",
        "  instance_types: [g6e.2xlarge]   # CHECK: one L40S with 48 GB; `gpufleet compare` ranks others",
        "  capacity: spot",
        f"  ami: unpinned     # gpufleet doctor {name} --pin",
        "",
        "storage:",
        *_inputs(typed, made),
        "  root:",
        "    size_gib: 200",
        "  keep:",
        "    bucket: true",
        "    days: 7",
        "",
        "limits:             # CHECK: the run ends at the first of them, saved",
        "  max_usd: 20",
        "  max_hours: 24",
        "",
        *_rehearsal(found, written, fixed, total, made),
    ]
    made.text = "\n".join(lines) + "\n"
    made.unknown.append(
        f"which GPU it needs: fleet.instance_types has one L40S with 48 GB, whatever the script is; `gpufleet compare"
        f" {name}` prices the others"
    )
    return made


def _command(found: ScriptFacts) -> str:
    start = f"-m {found.script[:-3].replace('/', '.')}" if found.module else found.script
    if found.launcher:
        return f"torchrun --standalone --nproc-per-node={{gpus}} {start}"
    return f"python {start}"


def _where_it_writes(found: ScriptFacts, typed: str, made: Draft) -> str:
    """The command, told to write below {checkpoints} where it can be told."""
    if "{checkpoints}" in typed or found.framework == "nanochat":
        return typed
    out = found.argument(OUT)
    if out is not None and out.written.rstrip("=") not in typed:
        made.known.append(f"{out.where}: {out.written.rstrip('=')} says where it writes")
        return f"{typed} {out.with_value('{checkpoints}')}"
    if out is None and found.writes_there:
        made.known.append(f"{found.writes_there.where}: {found.writes_there.value} says where it writes")
    elif out is None:
        made.unknown.append(
            "where the script writes its checkpoints: into $GPUFLEET_CHECKPOINTS ({checkpoints} in the command), or"
            " into a folder of its own that checkpoint.folder names"
        )
    return typed


def _setup(found: ScriptFacts) -> Iterator[str]:
    install = {"requirements.txt": "pip install -r requirements.txt", "pyproject.toml": "pip install -e ."}
    if found.requirements:
        yield f"  setup: {install[found.requirements]}   # once per node; a pinned image starts faster"


def _resume(found: ScriptFacts, made: Draft) -> Iterator[str]:
    """What the command gets where a checkpoint was restored."""
    argument = found.argument(RESUME)
    if found.bare_resume:
        made.unknown.append(
            f"{found.bare_resume.where}: trainer.train() is given no checkpoint, so it begins anew on each node. Write"
            " trainer.train(resume_from_checkpoint=os.environ.get('GPUFLEET_RESUME_FROM')) there; a rehearsal refuses"
            " it as it is"
        )
        return
    if argument is None and found.loads:
        made.known.append(f"{found.loads.where}: {found.loads.value}; a rehearsal shows whether it goes on from there")
        return
    if argument is None:
        made.unknown.append("how it goes on from a checkpoint: job.resume.args, or it looks into {checkpoints} itself")
        yield "  # resume: {args: --resume}   # CHECK: added only where a checkpoint was restored"
        return
    plain = argument.written.strip("-=").replace("-", "_")
    if plain == "init_from":
        value = "resume"
    elif argument.default is True or isinstance(argument.default, bool):
        value = ""
    elif "step" in plain:
        value = "{step}"
    elif found.framework == "litgpt":
        value = "auto"
    else:
        value = "{checkpoint}"
    text = argument.with_value(value) if value else argument.written.rstrip("=")
    made.known.append(f"{argument.where}: {argument.written.rstrip('=')} goes on from a checkpoint")
    yield f"  resume: {{args: {_quoted(text)}}}   # {argument.where}"


def _checkpoint(found: ScriptFacts, every: int | None, where: str, made: Draft) -> Iterator[str]:
    """`every`: steps between two saves; None where nobody counts steps."""
    yield "  checkpoint:"
    if found.framework and found.why:
        yield f"    format: {found.framework}   # {found.why.value} ({found.why.where})"
        made.known.append(f"{found.why.where}: {found.why.value}")
        if found.framework == "nanochat":
            yield '    folder: "{state}/base_checkpoints/d20"   # CHECK: d and the depth, or the model tag'
        if found.framework == "dcp" and found.saves and "{step" in found.saves.value:
            yield f"    each: {_quoted(found.saves.value)}   # {found.saves.where}"
    elif found.saves:
        yield f"    each: {_quoted(found.saves.value)}   # {found.saves.where}"
        if "{step" not in found.saves.value:
            yield "    rewritten: true   # the same file each time"
        made.known.append(f"{found.saves.where}: a checkpoint is {found.saves.value}")
    else:
        yield '    each: "ckpt.pt"   # CHECK: what one checkpoint is; {step} stands for its step'
        yield "    rewritten: true"
        made.unknown.append("what one checkpoint is called: job.checkpoint.each")
    if every is None:
        yield "    every: {minutes: 10}   # CHECK: how often it saves, which is what a loss repeats"
        made.unknown.append("how often it saves, in minutes: job.checkpoint.every")
    else:
        yield f"    every: {{steps: {every}}}   # {where or 'CHECK: how often it saves'}"
    yield "    size_gb: 1.5   # CHECK: of one checkpoint; the rehearsal and the first receipt tell"
    made.unknown.append("how large a checkpoint is: job.checkpoint.size_gb (the price of storage and of a notice)")


def _progress(found: ScriptFacts, made: Draft) -> Iterator[str]:
    if found.framework and FORMATS[found.framework].progress:
        return
    yield "  progress:"
    if not found.progress:
        yield "    # CHECK: tqdm's bar, or a line of yours that tells the step"
        yield "    stdout: '(?P<step>[0-9]+)/(?P<total>[0-9]+) \\['"
        made.unknown.append("which line tells the step: job.progress.stdout, with the group (?P<step>...)")
        return
    best = sorted(found.progress, key=lambda each: ("(?P<val>" in each.value, -each.value.count("(?P<")))
    chosen = best[:1] + [each for each in best[1:] if "(?P<val>" in each.value][:1]
    yield "    stdout:"
    for each in chosen:
        yield f"      - {_quoted(each.value)}   # {each.where}"
        made.known.append(f"{each.where}: a line of its output tells the step")


def _work(total: int | None, where: str, made: Draft) -> Iterator[str]:
    if total:
        made.known.append(f"{where}: {total} steps")
        made.unknown.append("how long a step takes: `gpufleet calibrate` measures it, job.work.step_ms declares it")
        yield "  work:"
        yield f"    steps: {total}   # {where}"
        yield "    step_ms: {L40S: 500}   # CHECK: a guess until `gpufleet calibrate` has measured it"
    else:
        made.unknown.append("how long it is: job.work.steps or hours; until then the bill says what the money buys")
        yield "  # work: {hours: {low: 2, likely: 4, high: 8}}   # CHECK: without it the bill says what the money buys"


def _stop(found: ScriptFacts, made: Draft) -> Iterator[str]:
    if found.handles_signal:
        made.known.append(
            f"{found.handles_signal.where}: it handles {found.handles_signal.value}; a rehearsal shows whether it saves"
        )
        signal = found.handles_signal.value.removeprefix("SIG")
        yield f"  stop: {{signal: {signal}, saves: unknown}}   # {found.handles_signal.where}"


def _secrets(found: ScriptFacts) -> Iterator[str]:
    if found.wandb:
        yield f"  # secrets: {{WANDB_API_KEY: ssm:/wandb}}   # {found.wandb.where}: {found.wandb.value}"


def _inputs(command: str, made: Draft) -> Iterator[str]:
    """Those that the command names."""
    if not (names := dict.fromkeys(INPUT.findall(command))):
        made.unknown.append("what the data is: storage.inputs, or the script fetches it itself (setup)")
        yield "  # inputs: {NAME: data/folder or s3://bucket/prefix}   # read as {inputs.NAME} in the command"
        return
    made.unknown.append(f"where the data is: storage.inputs ({', '.join(names)})")
    yield "  inputs:   # CHECK: a folder, or s3://bucket/prefix; the rehearsal needs a folder with a little of it"
    yield from (f"    {name}: data/{name}" for name in names)


def _rehearsal(found: ScriptFacts, command: str, fixed: int | None, total: int | None, made: Draft) -> Iterator[str]:
    """The lines of a rehearsal's section: the command, small enough for a laptop's CPU, as far as its settings are
    known. `fixed`: the steps between two saves, where no setting says them; `total`: of the whole training.
    """
    small, every = command, fixed or REHEARSED_EVERY
    steps, check = max(REHEARSED_STEPS, 3 * every), ""
    if found.argument(STEP_COUNTS) is None:
        steps, check = total or steps, "   # CHECK: as many as that command does"
        made.unknown.append(
            "how a rehearsal gets fewer steps: the script takes no count from its command line"
            + (f", and trains all {total} of {found.counted.where} there" if total and found.counted else "")
        )
    for names, value in (
        (STEP_COUNTS, steps),
        (SAVE_INTERVALS, every),
        (LOG_EVERY, 1),
        (DEVICE, "cpu"),
        (BACKEND, "gloo"),
    ):
        if (argument := found.argument(names)) is not None and not isinstance(argument.default, bool):
            small = _with_setting(small, argument.written, argument.with_value(value))
    if found.runs_alone:  # one process on a CPU needs no launcher, and some scripts take any for GPUs
        small = re.sub(r"^torchrun(?: +--\S+(?: +(?:\d+|\{gpus\}))?)* +", "python ", small)
    compile_ = found.argument(COMPILE)
    if compile_ is not None and compile_.written.endswith("="):
        small = _with_setting(small, compile_.written, compile_.with_value(False))
    if found.framework == "hf-trainer":
        small += f" {_HF_ON_CPU}"
    yield "rehearsal:          # the same script on a laptop's CPU: laid over the sections above"
    if not any((found.folder / name / "bin").is_dir() for name in ENVIRONMENTS):
        yield "  # python: path/to/python   # CHECK: which has what the script imports; else this machine's python3"
        made.unknown.append("which Python has what the script imports: its folder has no .venv, so rehearsal.python")
    yield "  job:"
    yield "    # CHECK: small enough for a CPU"
    yield f"    command: {_quoted(small)}"
    yield "    device: cpu"
    yield "    gpus: 1"
    yield "    work:"
    yield f"      steps: {steps}{check}"
    yield "    checkpoint:"
    yield f"      every: {{steps: {every}}}" if total else f"      every: {{minutes: null, steps: {every}}}"
    yield "      size_gb: 0.01"
    yield "      heartbeat_s: 1"
    yield "  estimate:"
    yield "    step_ms: [500]"
    yield "    setup_minutes: 0.1"
    yield "    restart_minutes: 0.1"
    yield "    capacity_wait_minutes: 0.05"
    yield "  interruptions:"
    yield "    with_notice: 1"
    yield "    without_notice: 1"


def _with_setting(command: str, written: str, wanted: str) -> str:
    """The command with a setting, in place of the one that it has of that name."""
    name = re.escape(written.rstrip("="))
    changed, count = re.subn(rf"{name}(=|\s+)\S+", lambda _: wanted, command)
    return changed if count else f"{command} {wanted}"


def _said(command: str, argument: ScriptArgument | None) -> int | None:
    """The value that a command gives to a setting; None: it does not."""
    found = setting(command, [argument.written.strip("-=").replace("-", "_")]) if argument else None
    return int(found["value"]) if found else None


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _quoted(text: str) -> str:
    """A YAML scalar in single quotes where a plain one would mean something else."""
    plain = re.fullmatch(r"[A-Za-z./~][A-Za-z0-9 ./_=-]*", text) and " #" not in text
    return text if plain else "'" + text.replace("'", "''") + "'"
