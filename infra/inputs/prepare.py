"""Makes the dataset in storage.dataset, and checks an existing dataset before money is spent on a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs import code, folders
from gpufleet.infra.inputs.readiness import dataset_differs
from gpufleet.job import atomic
from gpufleet.job.contract.inputs import DATASET, DatasetManifest
from gpufleet.job.kind import JobConfig
from gpufleet.job.kind.common import Say
from gpufleet.job.kind.dataset import Dataset, Given
from gpufleet.job.text import counted

# if a run passes over the data more often than this, there is a warning; the shipped pretraining passes over them 8
# times
OFTEN = 50


def prepare_inputs(
    definition: StackDefinition, root: Path, *, text: Path | None, tokenizer: Path | None, say: Say
) -> DatasetManifest:
    """Makes the definition's dataset, as `prepared` does, and weights.json in a local folder of base weights.
    Afterwards both match the definition file. Raises GpufleetError.
    """
    dataset = definition.job.parameters.dataset
    try:
        if (folder := definition.storage.weights_folder(root)) is not None:
            dataset.check_weights(folder, say)  # checked first, because tokenising may take an hour
        for place in definition.storage.input_folders(root).values():
            dataset.check_input(place)
    except (ValueError, ImportError) as error:
        raise _as_user_error(error) from error
    made = prepared(definition, root, text=text, tokenizer=tokenizer, say=say)
    _agrees(definition, root)
    try:
        dataset.check(root / definition.storage.dataset, say)
        if folder is not None:
            dataset.list_weights(folder, say)
    except ValueError as error:
        raise GpufleetError(str(error)) from error
    return made


def prepare_folders(definition: StackDefinition, root: Path, s3: Any, say: Say) -> None:
    """Lists and hashes a command's inputs, and prints which code would be uploaded. Raises GpufleetError."""
    tree = code.read(definition, root)
    if tree is not None:
        changed = " and later changes" if tree.changed else ""
        commit = f", commit {tree.commit[:12]}{changed}" if tree.commit else ""
        say(f"code: {counted(len(tree.files), 'file')}, {tree.bytes / 1e6:.1f} MB of {tree.folder}{commit}")
    for place in (definition.storage.inputs or {}).values():
        if place.startswith("s3://"):
            folders.listed(place, root, s3)
    if lacking := list(folders.missing(definition, root)):
        raise GpufleetError("\n".join(lacking))
    for name, files in folders.read(definition, root).items():
        say(f"{name}: {counted(files.count, 'file')}, {files.bytes / 1e6:.1f} MB of {files.uri or files.folder}")


def prepared(
    definition: StackDefinition,
    root: Path,
    *,
    text: Path | None = None,
    tokenizer: Path | None = None,
    say: Say = lambda line: None,
) -> DatasetManifest:
    """The definition's dataset under `root`. Makes it if it does not exist. Raises GpufleetError."""
    name = definition.storage.dataset
    if name.startswith("s3://"):
        raise GpufleetError(f"storage.dataset is {name}, already prepared; name a local folder to prepare one here")
    dataset = definition.job.parameters.dataset
    # a pipe, such as <(zcat ...) or /dev/stdin
    if text is not None and text.exists() and not (text.is_file() or text.is_dir()):
        raise GpufleetError(f"{text} is a pipe or device, but is read more than once: write it to a file first")
    if tokenizer is not None and not dataset.takes_tokenizer:
        raise GpufleetError(f"{definition.job.experiment} takes no tokenizer: leave out --tokenizer")
    folder = root / name
    supplied = Given(text=text, tokenizer=tokenizer, weights=definition.storage.weights_folder(root), say=say)
    try:
        if text is None and tokenizer is None and _is_of_a_file(folder, dataset):
            try:
                return dataset.accept(folder, supplied)
            except ValueError as error:  # its advice to prepare the dataset again would be useless here
                raise ValueError(f"{error}: `{_prepare_command(definition)}`") from error
        return dataset.prepare(folder, supplied)
    except (ValueError, ImportError) as error:
        raise _as_user_error(error) from error


def repeated(config: JobConfig, made: DatasetManifest) -> str:
    """A sentence that says how often a run whose length is given in steps reads this dataset; empty if less
    than twice.
    """
    read = config.dataset.read_by_steps(made)
    if read is None:
        return ""
    there, unit, key = read
    asked = sum(phase.steps * phase.tokens_per_step for phase in config.phases())
    if asked < 2 * there:
        return ""
    warning = "warning: " if asked > OFTEN * there else ""
    return f"{warning}training reads each {unit} about {asked / there:,.0f} times: job.parameters.{key} says how long"


def require_another_folder(plain: StackDefinition, rehearsal: StackDefinition, root: Path) -> None:
    """Raises GpufleetError if generated data would replace a dataset made from a user's file."""
    folder = root / plain.storage.dataset
    if plain.storage.dataset != rehearsal.storage.dataset or not _is_of_a_file(folder, plain.job.parameters.dataset):
        return
    if not str((atomic.read_object(folder / DATASET) or {}).get("source")).startswith("generated "):
        raise GpufleetError(
            f"{folder} has the data of the run itself, which the rehearsal's data would replace: give `rehearsal` its"
            " own storage.dataset"
        )


def _as_user_error(error: ValueError | ImportError) -> GpufleetError:
    """The error that `prepare` shows for a mistake in the data or for a missing package."""
    if isinstance(error, ValueError):
        return GpufleetError(str(error))
    return GpufleetError(f"this data needs a package that is missing ({error}): pip install 'gpufleet[job]'")


def _is_of_a_file(folder: Path, dataset: Dataset[Any]) -> bool:
    """Whether the existing dataset was made from a file or folder of the user."""
    if not (folder / DATASET).is_file():
        return False
    return dataset.is_own(str((atomic.read_object(folder / DATASET) or {}).get("source")))


def _agrees(definition: StackDefinition, root: Path) -> None:
    """Raises GpufleetError if the dataset does not match the file's settings, because nothing could train on it."""
    if reason := dataset_differs(definition, root):
        raise GpufleetError(
            f"{root / definition.storage.dataset} {reason}: change job.parameters, or prepare it again by "
            f"`{_prepare_command(definition)}`"
        )


def _prepare_command(definition: StackDefinition) -> str:
    """The command that makes the dataset again, from the user's file."""
    return f"gpufleet prepare {definition.argument} {definition.job.parameters.dataset.argument(own=True)}".rstrip()
