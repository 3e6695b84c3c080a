"""`gpufleet rehearse STACK`: a whole run on this machine, from definition file to receipt, on the embedded AWS.

The steps are those of a user, in the same order, each with the command that a user would type. rehearsal.cloud replaces
the AWS account; the definition's `rehearsal` section makes the job small enough for a CPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from gpufleet.infra.definition.loader import load, project_root, rehearsal_text, stacks_of
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.selected import selected
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence.measurement import own_programs
from gpufleet.infra.inputs import overlay
from gpufleet.infra.inputs.prepared import as_prepared
from gpufleet.infra.text import table
from gpufleet.job import progress
from gpufleet.job.kind.command import CommandConfig
from gpufleet.job.kind.job import secrets_needed
from gpufleet.rehearsal import block, environment, evidence, images, own, pace, plumbing, report, scratch, undisturbed
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, Result
from gpufleet.rehearsal.evidence import Evidence, Promise, Rehearsal
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.node import NodeRunner
from gpufleet.rehearsal.timeline import Timeline, say
from gpufleet.rehearsal.undisturbed import Until
from gpufleet.rehearsal.watch import Watch, plan, possible

TRAINS_WITH = ("torch", "safetensors", "tokenizers")  # packages that every ready-made job needs
RELAUNCH_S = 1.0  # seconds until a replacement node; AWS takes minutes, but a longer wait would show nothing more
# The text with which the error message of a command begins.
_REASON = re.compile(r"^(?:gpufleet: |error: | +PROBLEM )", re.MULTILINE)
LONGEST = 400  # in the last line, a reason is cut to this many characters; the whole reason is printed above it
NOT_SHOWN = 3  # exit code of a rehearsal in which nothing failed but not everything was shown


INSTALLS = (
    "Its packages go into an environment on top of that one, which is made for each node and removed at the end; yours "
    "stays unchanged. rehearsal.job.setup: '' leaves the set-up out"
)


class StepFailedError(GpufleetError):
    """A step of the rehearsal failed; the error has the step and the reason."""

    def __init__(self, step: str, why: str) -> None:
        self.step, self.why = step, why
        super().__init__(f"{step}: {why}")


class AnswerError(GpufleetError):
    """A command or the engine has failed. The text is the reason; `printed` is everything that was printed."""

    def __init__(self, printed: str, heading: str = "") -> None:
        self.printed = f"{heading}\n{printed.rstrip()}".strip()
        match = _REASON.search(printed)
        lines = printed[match.end() if match else 0 :].strip().splitlines() or [heading]
        super().__init__("\n".join(lines) if match else lines[-1])


def rehearse(
    name_or_path: str,
    *,
    root: Path | None = None,
    out: Callable[[str], None] = say,
    quiet: bool = False,
    image: bool = False,
    stand_in: bool = False,
    again: Sequence[Until] = (),
) -> int:
    """Rehearses a stack; returns 0 if all promises were shown and held. If a step fails, prints which one and why, and
    keeps the scratch project. `image`: whether a command runs in its own image. `stand_in`: whether a stand-in replaces
    the command's script. `again`: further runs without interruptions. `quiet`: whether nothing is printed before the
    report.
    """
    way = (lambda line: None) if quiet else out
    root = root or project_root(Path.cwd())
    path = selected(name_or_path, root).path
    now = datetime.now(UTC)
    definition = _loaded(path, now)
    is_own = all(map(_is_own, definition.parts))
    # otherwise a node would report it later
    missing = [name for name in TRAINS_WITH if find_spec(name) is None and not is_own]
    if missing:
        raise GpufleetError(
            f"{path.name}: a ready-made job trains with {', '.join(missing)}: pip install 'gpufleet[job,rehearsal]'"
        )
    lacking = dict.fromkeys(key for part in definition.parts for key in _lacking(part, stand_in=stand_in))
    if lacking:
        raise GpufleetError(
            f"{path.name} cannot be rehearsed: a rehearsal trains a small model on this machine's CPU, with data that "
            f"it makes. Write in its `rehearsal` section: {', '.join(lacking)}."
        )
    for asked, why in (
        (again, ": leave out --exact and --limit"),
        (image, ", rehearsed without its image: leave out --image"),
        (stand_in, ", which trains on a CPU: leave out --plumbing"),
    ):
        if asked and not is_own:
            raise GpufleetError(f"{definition.name} is a ready-made job{why}")
        if asked and definition.stages:
            alone = "--exact, --limit, --image and --plumbing take a file without stages"
            raise GpufleetError(f"{definition.name} has stages, and {alone}")
    for part in definition.parts:
        if not (image or stand_in) and (lacks := own.modules_lacking(part, root)):
            if not part.job.parameters.demands.installs:
                raise GpufleetError(lacks)
            way(lacks)
    docker = images.require(definition, way) if image else None
    finished = root / "rehearsals" / definition.name / definition.run.id
    with scratch.locked(finished.parent):
        # the earlier rehearsal is kept until this one has succeeded
        folder = finished.with_name(f"{finished.name}.unfinished")
        shutil.rmtree(folder, ignore_errors=True)
        changed: pace.Change | None = partial(plumbing.stand_in, definition, folder / "plumbing") if stand_in else None
        attempt = partial(_attempt, path, definition, root=root, out=out, way=way, docker=docker)
        code = attempt(folder, changed=changed, stand_in=stand_in)
        if code in (0, NOT_SHOWN):
            shutil.rmtree(finished, ignore_errors=True)
            folder.rename(finished)
        for until in again:  # the results of these runs are beside those of the rehearsal that succeeded
            if code:
                break
            way(f"\nOnce more, undisturbed, to its {until}.")
            laid = undisturbed.limited(definition, finished, changed) if until == "limit" else changed
            code = attempt(finished / until, changed=laid, stand_in=stand_in, until=until)
            if code == 0 and until == "end":
                undisturbed.compare(finished, finished / until, out)
    return 1 if code == NOT_SHOWN else code


def _lacking(definition: StackDefinition, *, stand_in: bool = False) -> list[str]:
    """Keys that are missing in the definition for its rehearsal, with values."""
    config = definition.job.parameters
    phases = sum(1 for size in config.phases() if size.steps)
    if stand_in:
        return list(own.lacking(definition))
    return [
        *(["job.parameters.device: cpu"] if config.device != "cpu" else []),
        *([f"job.parameters.data.source: {config.dataset.generated}"] if config.dataset.argument() else []),
        *(["storage.dataset: a folder"] if definition.storage.dataset.startswith("s3://") else []),
        *(["storage.base_weights: null"] if definition.storage.base_weights else []),
        *([f"estimate.step_ms: a list of {phases}"] if phases and definition.estimate.step_ms is None else []),
        *own.lacking(definition),
    ]


def _attempt(
    path: Path,
    definition: StackDefinition,
    folder: Path,
    root: Path,
    out: Callable[[str], None],
    way: Callable[[str], None],
    *,
    changed: pace.Change | None = None,
    docker: images.Docker | None = None,
    stand_in: bool = False,
    until: Until | None = None,
) -> int:
    """One try of the rehearsal, in a new `folder`, with the definition to which `changed` was applied."""
    is_own = any(map(_is_own, definition.parts))
    trains = "your script on this machine's CPU" if is_own else "job"
    laid = block.begun(definition, changed, datetime.now(UTC))
    project = scratch.make(folder / "scratch", {definition.name: rehearsal_text(path, root, changed=laid)})
    if stand_in:
        trains = "a stand-in for your script, which tests only the file"
    if docker is not None:
        trains = "your script in its own image, without a GPU"
    programs, python = None, None
    if is_own and not stand_in and docker is None:
        programs, python = own_programs(definition, root, project)
    if laid is not None:
        definition = _loaded(project / "stacks" / f"{definition.name}.yaml", datetime.now(UTC))
    if until is not None:
        definition = definition.changed(undisturbed.without_interruptions)
    timeline = Timeline(folder / "timeline.jsonl", out=way)
    way(
        f"Rehearsal of {definition.name}, run {definition.run.id}: "
        f"the real program, user-data and {trains}, against an embedded AWS."
    )
    try:
        with ExitStack() as stack:
            notice_s = float(definition.interruptions.notice_s)
            secrets = {
                name: place for part in definition.parts for name, place in secrets_needed(part.job.parameters).items()
            }
            stack.enter_context(own.secret_values(secrets))
            cloud = stack.enter_context(
                Cloud(project, region=definition.fleet.region, habits=Habits(notice_s=notice_s, relaunch_s=RELAUNCH_S))
            )
            cloud.has(definition.account, secrets)
            if (reservation := block.bought(definition)) is not None:
                cloud.has_block(reservation)
            if docker is not None:
                cloud.has_images(docker.digests)
                docker.require_reach(cloud.endpoint)
                if impatience := docker.impatience(definition):
                    out(f"Warning: {impatience}")
            runner = NodeRunner(cloud, project / "nodes", _programs_of(definition, project, programs, python), docker)
            stack.callback(runner.close)
            engine = stack.enter_context(
                Engine.open(project, cloud.environment(), definition.name, say=_logger(project / "engine.log"))
            )
            rehearsal = Rehearsal(
                definition=definition,
                folder=folder,
                project=project,
                root=root,
                timeline=timeline,
                cloud=cloud,
                engine=engine,
                runner=runner,
                stand_in=stand_in,
                until=until,
            )
            way(f"Engine: {engine.name}")
            if python is not None:
                way(f"Your script's Python: {os.path.normpath(python)}; rehearsal.python names another")
                if _installs(definition):
                    way(INSTALLS)
            try:
                is_shown = run_steps(rehearsal, out, way)
            except BaseException:
                try:
                    report.save_bucket(cloud, project / "bucket")
                except (OSError, BotoCoreError, ClientError) as error:  # this error must not hide the first error
                    out(f"The bucket's objects could not be kept: {error}")
                raise
    except GpufleetError as error:
        for line in _end(error, timeline.seconds, project, root):
            out(line)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        out("\nStopped. Every process of the rehearsal has ended; its scratch project is removed.")
        return 130
    shutil.rmtree(project)
    timeline.sort()
    return 0 if is_shown else NOT_SHOWN


def run_steps(rehearsal: Rehearsal, out: Callable[[str], None], way: Callable[[str], None]) -> bool:
    """Runs the steps of the rehearsal; returns whether everything was shown. `way` is called with the lines before the
    report. Raises GpufleetError if a step fails, and after the report if a promise was broken.
    """
    name, timeline = rehearsal.name, rehearsal.timeline
    with step(rehearsal, "prepare"):
        parts = rehearsal.parts
        shipped = [own.listing(part.definition, rehearsal.root) for part in parts]
        lines = command(rehearsal, "prepare", name).strip().splitlines()
        before = list(
            takewhile(lambda line: not line.startswith(f"{name}: "), lines)
        )  # the preview prints the other lines again
        for line in before[-1:]:
            timeline.add("prepared", line.replace(f"{rehearsal.project}/", ""))
    with step(rehearsal, "doctor --pin"):
        output = command(rehearsal, "doctor", name, "--pin")
        for line in output.splitlines():
            if line.split()[:1] in (["pinned"], ["warning"], ["problem"]):
                way(f"        {line.strip()}")
    with step(rehearsal, "cost"):
        (rehearsal.folder / "bill.json").write_text(command(rehearsal, "cost", name, "--json"), encoding="utf-8")
    with step(rehearsal, "preview"):
        previewed = _ok(rehearsal.engine.preview())
        way(previewed.diagnostics.rstrip())
    with step(rehearsal, "up"):
        created = _ok(rehearsal.engine.up())
        timeline.add("up", f"up: {_changes(created)}")
    watch: Watch | None = None
    for part in parts:
        with step(rehearsal, f"stage {part.definition.stage}" if part.definition.stage else "the run"):
            watch = _follow(part, watch)
    if not all(_is_own(part.definition) for part in parts):  # measured while no node boots
        torch_s = import_torch_s()
        for part in parts:
            part.torch_s = 0.0 if _is_own(part.definition) else torch_s
    with step(rehearsal, "results"):
        command(rehearsal, "results", name, "--to", str(rehearsal.folder / "results"))
        timeline.add("results", "results downloaded")
        by_part = [Evidence(part) for part in parts]
        checks = [check for part, files in zip(by_part, shipped, strict=True) for check in _checks(part, files)]
    try:
        with step(rehearsal, "destroy"):
            destroyed = _ok(rehearsal.engine.destroy())
            asked = " (the bucket and what belongs to it, as asked)" if "kept" in destroyed.changes else ""
            timeline.add("destroy", f"destroy: {_changes(destroyed)}{asked}")
            checks.append(evidence.leftovers(rehearsal))
        with step(rehearsal, "sweep"):
            swept = command(rehearsal, "sweep", name).strip().splitlines()[-1]
            checks.append(Promise(name="sweep", figure=swept, held=True))
    except StepFailedError as error:  # the run's own results are kept
        checks.append(Promise(name=error.step, figure=error.why, held=False))
    with step(rehearsal, "report"):
        report.write(rehearsal, by_part, out, checks=checks)
    if broken := [f"{check.name}: {check.figure}" for check in checks if check.is_broken]:
        raise GpufleetError("; ".join(broken))
    return all(check.shown for check in checks)


def _checks(part: Evidence, shipped: own.Listing) -> Iterator[Promise]:
    """The promises about one part of the run, under the name of its stage."""
    stage = part.rehearsal.definition.stage
    if part.rehearsal.until == "limit":
        checks = undisturbed.limit_checks(part)
    else:
        checks = chain(evidence.checks(part), own.checks(part, shipped))
    for check in checks:
        yield replace(check, name=f"{stage}: {check.name}" if stage else check.name)


def _loaded(path: Path, now: datetime) -> StackDefinition:
    """The definition in its form for the rehearsal, with the interruptions that AWS can cause in its market."""
    whole = load(path, now=now, rehearsal=True, staged=True)
    return whole.changed(lambda part: replace(part, interruptions=possible(part)))


def _is_own(part: StackDefinition) -> bool:
    return part.job.parameters.processes == "own"


def _installs(definition: StackDefinition) -> bool:
    return any(part.job.parameters.demands.installs for part in definition.parts)


def _programs_of(
    definition: StackDefinition, project: Path, programs: Path | None, python: Path | None
) -> Callable[[Path], Path] | None:
    """A function that returns, for a node's root folder, the folder with the programs of the user's command. If the
    set-up installs packages, each node has its own environment on top of the user's, because on AWS each node has its
    own container, without the packages of an earlier node.
    """
    if programs is None or python is None:
        return None
    if _installs(definition):
        return lambda root: overlay.make(python, root / "environment", cache=project / "pip")
    return lambda root: programs


def _end(error: GpufleetError, seconds: float, project: Path, root: Path) -> Iterator[str]:
    """The lines about a failure: everything that is known, the places of the files, and in the last line the reason."""
    cause = error.__cause__ if isinstance(error, StepFailedError) else error
    where, why = (f"at {error.step}, ", error.why) if isinstance(error, StepFailedError) else ("", str(error))
    reason = headline(why)
    printed = cause.printed if isinstance(cause, AnswerError) else why
    yield f"\n{printed}" if printed != reason else ""
    yield f"The files of the rehearsal are in {_shown(project, root)}"
    yield from scratch.full_disks(project, Path(tempfile.gettempdir()))
    yield f"FAILED: {reason} ({where}after {seconds:.0f} s)"


def headline(why: str) -> str:
    """One line with the reason first, cut between words. An error comes before the words about how the command ended;
    lines of a log, which are printed above, are left out.
    """
    if missing := re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", why):
        return (
            f"the Python that runs the script has no module {missing[1]!r}: install it there, or name the Python that"
            " has it as `python` of the file's `rehearsal` section"
        )
    first = re.split(r" \| |\n", why, maxsplit=1)[0]
    if ended := re.fullmatch(r"(.* ended with .* at step [\d,]+) \((.*)\)(.*)", first, re.DOTALL):
        first = f"{ended[2]}: {ended[1]}{ended[3]}"
    return textwrap.shorten(first, LONGEST, placeholder=" ...")


@contextmanager
def step(rehearsal: Rehearsal, name: str) -> Iterator[None]:
    """A context for one step. The context adds the step's name to an error that is raised in it, and records how long
    the step took.
    """
    began = rehearsal.timeline.seconds
    try:
        yield
    except (GpufleetError, RuntimeError, OSError, ValueError, KeyError) as error:
        why = str(error) if isinstance(error, GpufleetError) else f"{type(error).__name__}: {error}"
        rehearsal.timeline.add("failed", f"{name} failed", quiet=True, why=why)
        raise StepFailedError(name, why) from error
    took = rehearsal.timeline.seconds - began
    rehearsal.timeline.add(
        "step", f"{name} took {took:.1f} s", quiet=True, step=name, began=round(began, 3), seconds=round(took, 3)
    )


def command(rehearsal: Rehearsal, *words: str) -> str:
    """Runs `gpufleet WORDS` in the scratch project; returns its standard output. Raises AnswerError if it fails."""
    with _started(rehearsal, *words) as process:
        return _answer(rehearsal, process, words)


@contextmanager
def _started(rehearsal: Rehearsal, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A context in which `gpufleet WORDS` runs in the background."""
    with subprocess.Popen(
        [sys.executable, "-m", "gpufleet.infra.cli", *words],
        cwd=rehearsal.project,
        env=environment.scratch(rehearsal.cloud.environment()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _answer(rehearsal: Rehearsal, process: subprocess.Popen[str], words: Sequence[str]) -> str:
    out, _ = process.communicate()
    with (rehearsal.project / "commands.log").open("a", encoding="utf-8") as log:
        log.write(f"$ gpufleet {' '.join(words)}\n{out}")
    if process.returncode:
        raise AnswerError(out, f"$ gpufleet {' '.join(words)}")
    return out


def _follow(rehearsal: Rehearsal, before: Watch | None = None) -> Watch:
    """Watches the run to its end, with `gpufleet wait` in the background, as a user would. `before`: the watch of the
    stage before.
    """
    outputs = rehearsal.engine.outputs()
    definition = rehearsal.definition
    counted = as_prepared(definition, rehearsal.project).job.parameters
    steps = [phase.steps for phase in counted.phases()]
    planned = plan(definition.interruptions, steps, stays=bool(definition.fleet_of))
    rehearsal.watch = watch = Watch(
        rehearsal.cloud,
        rehearsal.runner,
        rehearsal.timeline,
        planned,
        str(outputs["bucket"]),
        definition.run.id,
        fleet_run=definition.fleet_run,
        before=before if definition.fleet_of else None,
        hands_over=bool(definition.shared and definition.next_stage),
        stage_lines=definition.interruptions.stage_results,
        falls_back=bool(definition.fleet.market.stands_by),
        saves=counted.saves,
        **({"doubts": own.doubts(counted)} if isinstance(counted, CommandConfig) and not rehearsal.stand_in else {}),
    )
    words = ("wait", rehearsal.name)
    with _started(rehearsal, *words) as waiting:
        answered = False

        def check() -> None:
            nonlocal answered
            if not answered and waiting.poll() is not None:
                answered = True
                _answer(rehearsal, waiting, words)

        watch.run(check=check)
    if (failure := pace.ended(rehearsal, watch)) is not None:
        raise failure
    return watch


def import_torch_s() -> float:
    """Seconds that a new process takes to import torch: the part of a restart that gpufleet cannot shorten."""
    program = "import time; began = time.perf_counter(); import torch; print(time.perf_counter() - began)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _ok(result: Result) -> Result:
    if not result.ok:
        raise AnswerError(result.diagnostics.rstrip() or result.text)
    return result


def _changes(result: Result) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(result.changes.items())) or "nothing"


def _logger(path: Path) -> Callable[[str], None]:
    def write(line: str) -> None:
        with path.open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    return write


def _shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def rehearse_all(*, root: Path | None = None, out: Callable[[str], None] = say, quiet: bool = False) -> int:
    """Rehearses every stack in turn and prints a table; returns 0 if all of them succeeded, 1 otherwise, 130 on
    Ctrl-C.
    """
    root = root or project_root(Path.cwd())
    rows, failed = [], False
    paths = [root / "stacks" / f"{name}.yaml" for name in stacks_of(root)]
    with progress.shown("rehearsing", len(paths), "stacks") as advance:
        for path in paths:
            began = time.monotonic()
            try:
                code = rehearse(str(path), root=root, out=out, quiet=quiet)
            except GpufleetError as error:
                out(str(error))
                code = 1
            if code == 130:
                return code
            failed |= bool(code)
            rows.append(_row(root, path, code, time.monotonic() - began))
            advance(1)
    out("")
    heads = ("stack", "held", "seconds", "steps", "nodes", "taken away", "lost", "repeated", "validation", "USD")
    for line in table(heads, rows, right=(2, 3, 4, 6, 7, 8, 9)):
        out(line)
    return int(failed)


def _row(root: Path, path: Path, code: int, seconds: float) -> tuple[str, ...]:
    if code:  # the file itself may be wrong, so it is not read again
        return (path.stem, "NO", f"{seconds:.0f}", "", "", "", "", "", "", "")
    run = load(path, now=datetime.now(UTC), rehearsal=True, staged=True).run.id
    summary = root / "rehearsals" / path.stem / run / "summary.json"
    figures = json.loads(summary.read_text(encoding="utf-8"))
    loss = figures["val_loss"]
    return (
        path.stem,
        "slow" if figures["slow"] else "yes",
        f"{seconds:.0f}",
        str(figures["steps"]),
        str(figures["nodes"]),
        ", ".join(figures["interruptions"]),
        str(figures["lost_on_notice"]),
        str(figures["repeated_after_loss"]),
        "-" if loss is None else f"{figures['validation']} {loss:.4f}",
        str(figures["spent_usd"]),
    )
