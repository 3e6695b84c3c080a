"""Checks a user's own command in a rehearsal, in addition to the checks of every run. The script only has to run. The
rehearsal finds out how the script reacts to a stop request, and reports it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from botocore.exceptions import ClientError

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.discover.lacking import lacking as modules_without
from gpufleet.infra.evidence.measurement import own_python
from gpufleet.infra.inputs import code
from gpufleet.job import atomic
from gpufleet.job.command.places import own_environment
from gpufleet.job.contract import environment, metrics
from gpufleet.job.contract.messages import Observed
from gpufleet.job.contract.workdir import CODE, FINAL
from gpufleet.job.kind import JobConfig
from gpufleet.job.kind.command import CommandConfig
from gpufleet.job.kind.job import secrets_needed
from gpufleet.job.text import counted
from gpufleet.rehearsal.evidence import Evidence, Promise, Rehearsal, Resumption, having_begun

LEAST_GB = 0.0001  # the smallest allowed value of job.checkpoint.size_gb
FEW = 5  # at most this many files are named in a message
LATE = 3  # a run is doubtful after this many intervals without a checkpoint, or this many checkpoints without a step
# uploaded files with the hash of their content; empty for a file that does not exist any more
Listing = Mapping[Path, str]


def lacking(definition: StackDefinition) -> Iterator[str]:
    """Keys of inputs in a bucket, which a rehearsal does not have."""
    for name, place in (definition.storage.inputs or {}).items():
        if place.startswith("s3://"):
            yield f"storage.inputs.{name}: a folder with a small part of the data"


def modules_lacking(definition: StackDefinition, root: Path) -> str:
    """A message that names the modules that the script imports and its Python on this machine lacks, and what to do;
    empty if no module is missing.
    """
    config = definition.job.parameters
    if not isinstance(config, CommandConfig) or config.code is None or "PYTHONPATH" in (config.env or {}):
        return ""
    python = own_python(definition, root)
    missing = modules_without(root / config.code.folder, config.command, python, own_environment(os.environ))
    if not missing:
        return ""
    if config.demands.installs:
        folder, words = root / config.code.folder, f"{config.setup} {config.command}"
        files = [folder / name for name in (*re.findall(r"-r\s*(\S+)", words), "pyproject.toml", "setup.py")]
        words += "".join(file.read_text(errors="replace") for file in files if file.is_file())
        missing = {name: where for name, where in missing.items() if not re.search(rf"\b{name}\b", words)}
    if not missing:
        return ""
    places = ", ".join(f"{name} ({where})" for name, where in missing.items())
    mend = (
        f"Install it there (`{python} -m pip install {' '.join(missing)}`, if the packages have the modules' names), or"
        " name the Python that has it: `rehearsal: {python: ../my-model/.venv/bin/python}`."
    )
    if config.demands.installs:
        return (
            f"Warning: {python} lacks {places}, and job.setup does not name that package. Unless another package of"
            f" job.setup installs it, the script will fail after some minutes. {mend}"
        )
    return f"{definition.source}: the script imports what {python} does not have: {places}. {mend} Nothing was started."


@contextmanager
def secret_values(wanted: Iterable[str]) -> Iterator[None]:
    """Sets random values for those secrets of the jobs that are not set in the environment. The values cannot be
    guessed, so if a file contains one, it must come from the node.
    """
    names = [environment.SECRET + name for name in wanted]
    made = {name: f"{secrets.token_hex(12)}:{secrets.token_hex(12)}" for name in names if name not in os.environ}
    os.environ.update(made)
    try:
        yield
    finally:
        for name in made:
            os.environ.pop(name, None)


def listing(definition: StackDefinition, root: Path) -> Listing:
    """The files of the code's folder that are uploaded; empty if no code is uploaded."""
    tree = code.read(definition, root)
    return _contents([] if tree is None else tree.files.values())


def _contents(files: Iterable[Path]) -> Listing:
    """The files with hashes of their content, because git may rewrite a file without changing it."""
    return {path: atomic.sha256(path) if path.is_file() else "" for path in files}


def code_is_untouched(before: Listing, root: Path) -> Promise:
    """The promise that the uploaded files are unchanged. Commits and other files are not checked."""
    after = _contents(before)
    changed = sorted(
        os.path.relpath(path, root) + ("" if after[path] else " (gone)")
        for path in before
        if before[path] != after[path]
    )
    figure = f"{counted(len(before), 'file')}, untouched"
    if changed:
        figure = f"{', '.join(changed[:FEW])}{' ...' if changed[FEW:] else ''} changed during the rehearsal, which"
        figure += " ran them as they were before: rehearse again, and do not change shipped files meanwhile"
    return Promise(name="your code's folder", figure=figure, held=not changed)


def not_shipped(definition: StackDefinition, root: Path, reason: str) -> str:
    """A paragraph about the first file that `reason` quotes, if the code's folder has the file and the run does not get
    it: the cause, and the lines to write. Otherwise empty. Data are often such files, because git ignores them.
    """
    if (tree := code.read(definition, root)) is None:
        return ""
    for quoted in re.findall(r"'([^'\n]+)'", reason):
        name = os.path.normpath(quoted.rpartition(f"/{CODE}/")[2] or quoted)
        path = tree.folder / name
        shipped = any(f"{file}/".startswith(f"{name}/") for file in tree.files)
        if shipped or name.startswith(("/", "..")) or not path.exists():
            continue
        cause = f"\n{name} is not shipped, because git ignores it, or job.code.exclude names it."
        data = Path(name) if path.is_dir() else Path(name).parent
        if data == Path():
            return cause
        return (
            f"{cause} Make {data} an input, which the command reads as {{inputs.data}}. `setup` copies it to where the"
            " script looks for it:\n"
            f"  storage: {{inputs: {{data: {os.path.relpath(tree.folder / data, root)}}}}}\n"
            f"  job: {{setup: 'mkdir -p {data} && cp -r {{inputs.data}}/. {data}'}}"
        )
    return ""


def doubts(config: CommandConfig) -> Callable[[Observed, int], str]:
    """A function that returns the reason why the command will fail its rehearsal, from the observations and the step,
    so that this is reported at once instead of minutes later. The reason is empty if the command may succeed, and on a
    node that is not the leader.
    """
    every, patterns = config.steps_between_saves(), ", ".join(config.patterns)

    def doubt(observed: Observed, step: int) -> str:
        sentences = list[str]()
        if observed.follows:
            return ""
        is_due = every is None or not observed.told or step > every
        if observed.elsewhere and not observed.checkpoints and is_due:
            sentences.append(f"no checkpoint was saved in the declared folder: {observed.elsewhere}")
        elif config.saves and every is not None and not observed.begun and step > LATE * every:
            sentences.append(
                f"no checkpoint appeared in {config.checkpoint.folder} by {config.unit} {step:,}, but"
                " job.checkpoint.every"
                f" says every {every:,}: make the command save there, or write checkpoint: none"
            )
        trains = bool(observed.checkpoints or observed.elsewhere)
        is_told_by_names = not config.progress.stdout and not config.checkpoint.rewritten
        if trains and observed.unread and not observed.told and not is_told_by_names:
            sentences.append(
                f"no line matched job.progress.stdout, {patterns}; the last ones with numbers were:\n"
                + "\n".join(f"  | {line}" for line in observed.unread)
            )
        elif config.checkpoint.rewritten and not observed.told and observed.checkpoints >= LATE:
            sentences.append(
                f"{observed.checkpoints} checkpoints are whole, but their steps are unknown: the name of an"
                " overwritten file contains none, and no line showed one. Print a line for each step, unbuffered"
                " (stdbuf -oL), or write JSON lines into $GPUFLEET_PROGRESS, or save under names with {step}"
            )
        return ".\n".join(sentences)

    return doubt


def checks(evidence: Evidence, before: Listing) -> Iterator[Promise]:
    """The promises about a user's command; none for a ready-made job."""
    rehearsal, definition = evidence.rehearsal, evidence.rehearsal.definition
    config = definition.job.parameters
    if config.processes != "own":
        return
    assert rehearsal.watch is not None
    views = having_begun(rehearsal.watch.views.values())
    count = sum(view.observed.told for view in views)
    yield Promise(name=f"lines with its {_unit(config)}", figure=f"from {count} of {len(views)} nodes", held=True)
    if definition.fleet.is_gang and not rehearsal.stand_in:
        yield trains_together([view.observed for view in views])
    nodes = [resumption.observed for resumption in evidence.resumptions() if resumption.observed.resumes]
    if nodes and not rehearsal.stand_in:
        yield resumes(nodes)
    published = sorted(rehearsal.watch.manifests)
    sizes = [save.bytes for line in evidence.metrics for save in metrics.saves(line)]
    largest = max(sizes, default=0)
    size = f", {largest / 1e6:.1f} MB (job.checkpoint.size_gb: {max(LEAST_GB, largest / 1e9):.2g})" if sizes else ""
    yield Promise(
        name="whole checkpoints in the bucket",
        figure=_few(published) + size,
        held=bool(published) or not config.saves,
    )
    if not rehearsal.stand_in:
        yield code_is_untouched(before, rehearsal.root)
    files = [path for path in (evidence.folder / FINAL).rglob("*") if path.is_file()]
    yield Promise(name="outputs", figure=counted(len(files), "file"), held=True)
    yield from _secrets(rehearsal)
    notices = [resumption for resumption in evidence.resumptions() if resumption.kind == "notice"]
    if notices and not rehearsal.stand_in:
        figure = advice(notices, config.steps_between_saves(), config.saves_on_signal)
        yield Promise(name="saves on the signal of a notice", figure=figure, held=True)


def trains_together(nodes: Sequence[Observed]) -> Promise:
    """The promise that the ranks of several nodes train together. A run whose nodes train alone has ended."""
    name, figure = "nodes train together", next((node.met for node in nodes if node.met), "")
    if figure:
        return Promise(name=name, figure=figure, held=True)
    figure = (
        "not shown: no process of the command was started with WORLD_SIZE, which gives the number of ranks; a launcher"
        " such as torchrun sets it. If your script itself reads it, write job.env: {WORLD_SIZE: '{ranks}'}"
    )
    return Promise(name=name, figure=figure, held=False, shown=False)


def resumes(nodes: Sequence[Observed]) -> Promise:
    """The promise that the command resumes from its checkpoints: kept, broken or not shown. It is enough if one node
    shows it, because a node that shows the contrary ends the run.
    """
    name, by_verdict = "goes on from its checkpoint", {node.resumes: node.why for node in nodes}
    if (why := by_verdict.get("goes on")) is not None:
        return Promise(name=name, figure=f"goes on: {why}", held=True)
    if (why := by_verdict.get("not looked at")) is not None:
        return Promise(name=name, figure=f"not looked at: {why}", held=True)
    return Promise(name=name, figure=f"not shown: {nodes[-1].why}", held=False, shown=False)


def _unit(config: JobConfig) -> str:
    return config.unit if isinstance(config, CommandConfig) else "step"


def saves(evidence: Evidence) -> bool | None:
    """The promise that the user's script saves on the signal of each notice. None if this was not shown."""
    rehearsal = evidence.rehearsal
    config = rehearsal.definition.job.parameters
    if config.processes != "own" or rehearsal.stand_in:
        return None
    saved = [
        resumption.saved(config.steps_between_saves())
        for resumption in evidence.resumptions()
        if resumption.kind == "notice"
    ]
    return None if not saved or None in saved else all(saved)


def advice(notices: Sequence[Resumption], every: int | None, declared: bool | None) -> str:
    """The value of job.stop.saves that the definition should have, as text."""
    if not all(notice.signalled for notice in notices):
        why = "job.stop.saves is false" if declared is False else "there was no time for a signal"
        return f"not shown: no signal was sent, {why}"
    saved = [notice.saved(every) for notice in notices]
    if None in saved:
        return (
            "not shown: the save may be one that comes every so many steps; another rehearsal.interruptions.seed may"
            " help"
        )
    saves, doubt = all(saved), next((notice.doubt for notice in notices if notice.doubt), "")
    if doubt and not saves:
        return f"not shown: {doubt}"
    verdict = "it did" if saves else "it did not"
    if saves == (declared is True):
        return f"{verdict}, as the bill assumes"
    return f"{verdict}: write job.stop.saves: {str(saves).lower()}, so that the bill assumes it"


def _secrets(rehearsal: Rehearsal) -> Iterator[Promise]:
    """The promise that no file of node, bucket, state or log contains a secret's value."""
    names = secrets_needed(rehearsal.definition.job.parameters)
    values = {name: os.environ[environment.SECRET + name].encode() for name in names}
    if not values:
        return
    leaks = [
        f"{name} in {place}" for place, content in _written(rehearsal) for name, v in values.items() if v in content
    ]
    figure = f"{counted(len(values), 'value')} in no file of node, bucket, state or log"
    yield Promise(name="secrets", figure=", ".join(leaks) or figure, held=not leaks)


def _written(rehearsal: Rehearsal) -> Iterator[tuple[str, bytes]]:
    """The content of every file and object that the run has written, with its path or key."""
    for path in rehearsal.project.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                yield str(path.relative_to(rehearsal.project)), path.read_bytes()
    s3 = rehearsal.cloud.client("s3")
    for listed in s3.list_buckets()["Buckets"]:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=listed["Name"]):
            for entry in page.get("Contents", []):
                with suppress(ClientError):
                    yield entry["Key"], s3.get_object(Bucket=listed["Name"], Key=entry["Key"])["Body"].read()


def _few(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:6]))
    return f"steps {shown}{' ...' if len(steps) > 6 else ''}" if steps else "none"
