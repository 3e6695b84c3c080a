"""`gpufleet prepare STACK [TEXT]`: makes the dataset that storage.dataset names from its source, or from a text."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from infra.bill import doubts, limits
from infra.bill.estimate import problems
from infra.catalog import load_catalog
from infra.commands import stack
from infra.definition.loader import load, project_root
from infra.definition.model import StackDefinition
from infra.definition.readiness import dataset_differs
from infra.errors import DefinitionError, GpufleetError
from infra.pricing import bill_of
from job import atomic
from job.dataset import prepare, weights
from job.spec import JobConfig
from job.spec.common import Given
from job.text import counted

OFTEN = 50  # passes over the data; few are trained beyond: the shipped pretraining makes 8


def arguments(parser: argparse.ArgumentParser) -> None:
    """STACK, TEXT and where the tokenizer is."""
    stack.argument(parser)
    parser.add_argument(
        "text",
        metavar="TEXT",
        nargs="?",
        type=Path,
        help="a text or JSONL file, or a folder of queries and labels, instead of the source",
    )
    parser.add_argument("--rehearsal", action="store_true", help="the dataset of the definition's rehearsal section")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        type=Path,
        help="tokenizer.json: the base weights', or GPT-2's where it cannot be fetched",
    )


def run(args: argparse.Namespace) -> int:
    """Prepares, or says that it is prepared already."""
    root = project_root(Path.cwd())
    if args.rehearsal:
        definition = load(stack.path_of(args), now=datetime.now(UTC), rehearsal=True, past_deadline=True)
        _require_another_folder(load(definition.source, now=datetime.now(UTC), past_deadline=True), definition, root)
    else:
        definition = stack.definition_of(args)
    try:
        if (weights_folder := definition.storage.weights_folder(root)) is not None:
            definition.job.parameters.check_weights(weights_folder, _say)  # before an hour of tokenising is spent
    except (ValueError, ImportError) as error:
        raise _as_user_error(error) from error
    made = prepared(definition, root, text=args.text, tokenizer=args.tokenizer)
    _agrees(definition, root)
    try:
        definition.job.parameters.check_dataset(root / definition.storage.dataset, _say)
    except ValueError as error:
        raise GpufleetError(str(error)) from error
    listed(definition, root)
    if not args.rehearsal:
        if often := repeated(definition.job.parameters, made):
            _say(often)
        predict(definition, root)
    return 0


def repeated(config: JobConfig, made: prepare.DatasetManifest) -> str:
    """How often a run of so many steps, not epochs, reads this dataset; nothing where that is below twice."""
    read = config.data_read_by_steps(made)
    if read is None:
        return ""
    there, unit, key = read
    asked = sum(phase.steps * phase.tokens_per_step for phase in config.phases())
    if asked < 2 * there:
        return ""
    warning = "warning: " if asked > OFTEN * there else ""
    return f"{warning}training reads each {unit} about {asked / there:,.0f} times: job.parameters.{key} says how long"


def predict(definition: StackDefinition, root: Path) -> None:
    """Says what the run will take with this dataset, before a GPU starts. Raises DefinitionError when the bill's p50
    passes a limit, or the uninterrupted run the deadline; the dataset stays.
    """
    bill = bill_of(definition, root, load_catalog(root))
    usd, hours = bill.chosen.needed_usd, bill.chosen.needed_hours
    steps = sum(phase.steps for phase in bill.chosen.runtime.phases)
    _say(
        f"predicted on {bill.chosen.type}, {bill.capacity}: {counted(f'{steps:,}', 'optimizer step')},"
        f" {hours.p50:.2f} node-hours and {usd.p50:.2f} USD at p50, {hours.p90:.2f} and {usd.p90:.2f} at p90;"
        f" see gpufleet cost {definition.argument}"
    )
    for doubt in (*doubts.schedule(definition.job.parameters, bill.chosen.runtime), doubts.cut_short(bill)):
        if doubt:
            _say(f"warning: {doubt}")
    now = datetime.now(UTC)
    found = [*problems(definition, bill), *limits.deadline_problems(definition, bill, now)]
    if found:
        raise DefinitionError(str(definition.source), found)
    for late in limits.deadline_warnings(definition, bill, now):
        _say(f"warning: {late}")


def listed(definition: StackDefinition, root: Path) -> None:
    """Writes weights.json into a local folder of base weights; nothing without one. Raises GpufleetError."""
    folder = definition.storage.weights_folder(root)
    if folder is None:
        return
    try:
        found = weights.describe(folder)
    except ValueError as error:
        raise GpufleetError(str(error)) from error
    _say(f"{folder}: {len(found.files)} files of base weights, {found.bytes / 1e9:.2f} GB")
    if left := weights.left_out(folder):
        _say(f"{folder}: not needed and left out: {', '.join(left)}, {sum(left.values()) / 1e9:.2f} GB")


def prepared(
    definition: StackDefinition, root: Path, *, text: Path | None = None, tokenizer: Path | None = None
) -> prepare.DatasetManifest:
    """The definition's dataset under `root`, made now or found there. Raises GpufleetError."""
    name = definition.storage.dataset
    if name.startswith("s3://"):
        raise GpufleetError(f"storage.dataset is {name}, prepared already; name a local folder to prepare one here")
    config = definition.job.parameters
    if text is not None and text.exists() and not (text.is_file() or text.is_dir()):  # <(zcat ...), /dev/stdin
        raise GpufleetError(f"{text}: a pipe or device, and it is read more than once: write it to a file first")
    if tokenizer is not None and not config.takes_tokenizer:
        raise GpufleetError(f"{definition.job.experiment} takes no tokenizer: leave out --tokenizer")
    folder, weights_folder = root / name, definition.storage.weights_folder(root)
    try:
        if text is None and tokenizer is None and _of_a_file(folder, config):
            try:
                found = prepare.as_found(folder, lambda line: None)
            except ValueError as error:  # prepare it again, it says to whoever has just done that
                raise ValueError(f"{error}: `{_prepare_command(definition)}`") from error
            config.report_found(folder, found, weights_folder, _say)
            return found
        return config.prepare(folder, Given(text=text, tokenizer=tokenizer, weights=weights_folder, say=_say))
    except (ValueError, ImportError) as error:
        raise _as_user_error(error) from error


def _as_user_error(error: ValueError | ImportError) -> GpufleetError:
    """The same for who prepares."""
    if isinstance(error, ValueError):
        return GpufleetError(str(error))
    return GpufleetError(f"this data needs a package that is missing ({error}): pip install -e '.[job]'")


def _require_another_folder(plain: StackDefinition, rehearsal: StackDefinition, root: Path) -> None:
    """Raises GpufleetError where generated data would replace what was made from a file of the user's."""
    folder = root / plain.storage.dataset
    if plain.storage.dataset != rehearsal.storage.dataset or not _of_a_file(folder, plain.job.parameters):
        return
    if not str((atomic.read_object(folder / prepare.MANIFEST) or {}).get("source")).startswith("generated "):
        raise GpufleetError(
            f"{folder} holds the data of the file itself, and the rehearsal's would replace it: give `rehearsal`"
            " a storage.dataset of its own"
        )


def _of_a_file(folder: Path, config: JobConfig) -> bool:
    """Whether the dataset that is there was made from a file or folder of the user's, which is not named again."""
    if not (folder / prepare.MANIFEST).is_file():
        return False
    return config.is_own_data(str((atomic.read_object(folder / prepare.MANIFEST) or {}).get("source")))


def _agrees(definition: StackDefinition, root: Path) -> None:
    """Raises GpufleetError where the dataset is not what the file's settings ask for: nothing could train on it."""
    if reason := dataset_differs(definition, root):
        raise GpufleetError(
            f"{root / definition.storage.dataset} {reason}: change job.parameters, or prepare it anew,"
            f" `{_prepare_command(definition)}`"
        )


def _prepare_command(definition: StackDefinition) -> str:
    """The command that makes a dataset of the user's own file anew."""
    return f"gpufleet prepare {definition.argument} {definition.job.parameters.file_argument(own=True)}".rstrip()


def _say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
