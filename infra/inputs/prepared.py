"""Finds the prepared dataset in the project, and writes its sizes into the definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.contract.inputs import DatasetManifest, read_dataset


def prepared_dataset(definition: StackDefinition, root: Path) -> DatasetManifest | None:
    """The manifest of the dataset folder under `root`; None if it is in S3, or missing or damaged (see not_ready)."""
    folder = definition.storage.dataset_folder(root)
    if folder is None or not folder.is_dir():
        return None
    try:
        return read_dataset(folder, definition.job.parameters.dataset_checks)
    except ValueError:
        return None


def as_prepared(definition: StackDefinition, root: Path) -> StackDefinition:
    """The definition with the real sizes of the dataset folder under `root` instead of those that `job.parameters.data`
    expects; unchanged if there is no dataset, or if it is in S3.
    """
    return counted_by(definition, prepared_dataset(definition, root))


def counted_by(definition: StackDefinition, dataset: DatasetManifest | None) -> StackDefinition:
    """The definition with the sizes of `dataset`; unchanged if `dataset` is None."""
    if dataset is None:
        return definition
    parameters = definition.job.parameters.with_facts(dataset.facts)
    return replace(definition, job=replace(definition.job, parameters=parameters))
