"""A definition as its prepared dataset is: what `job.parameters.data` could only expect is counted there.

For the bill alone: what a run is told, and what its identity is, stays what the file says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from infra.definition import StackDefinition
from job import sizing


def as_prepared(definition: StackDefinition, root: Path) -> StackDefinition:
    """With the facts of the dataset folder under `root`; as it is where there is none, or the dataset lies in S3."""
    dataset = definition.storage.dataset
    if dataset.startswith("s3://") or not (root / dataset / "dataset.json").is_file():
        return definition
    from job.dataset.prepare import read_manifest  # here: without a dataset there is nothing to read

    try:
        facts = read_manifest(root / dataset).facts
    except ValueError:  # damaged: not_ready says so
        return definition
    parameters = sizing.with_facts(definition.job.parameters, facts)
    return replace(definition, job=replace(definition.job, parameters=parameters))
