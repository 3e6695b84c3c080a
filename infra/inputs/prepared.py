"""The prepared dataset that lies in the project, and the definition as it counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.contract.inputs import DatasetManifest, read_dataset


def prepared_dataset(definition: StackDefinition, root: Path) -> DatasetManifest | None:
    """What the dataset folder under `root` holds; None for one in S3, or that is not there or damaged: not_ready says
    so.
    """
    folder = definition.storage.dataset_folder(root)
    if folder is None or not folder.is_dir():
        return None
    try:
        return read_dataset(folder, definition.job.parameters.dataset_checks)
    except ValueError:
        return None


def as_prepared(definition: StackDefinition, root: Path) -> StackDefinition:
    """The definition with what the dataset folder under `root` counts instead of what `job.parameters.data` expects; as
    it is where there is none, or the dataset lies in S3.
    """
    return counted_by(definition, prepared_dataset(definition, root))


def counted_by(definition: StackDefinition, dataset: DatasetManifest | None) -> StackDefinition:
    """The definition with the counts of `dataset`; unchanged without one."""
    if dataset is None:
        return definition
    parameters = definition.job.parameters.with_facts(dataset.facts)
    return replace(definition, job=replace(definition.job, parameters=parameters))
