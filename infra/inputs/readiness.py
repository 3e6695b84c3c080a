"""What has to be there before `pulumi up`: pinned AMI and images, a prepared dataset, base weights, code, inputs."""

from __future__ import annotations

from pathlib import Path

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError, Problem
from gpufleet.job.contract.inputs import DATASET, WEIGHTS, other_size, read_dataset, read_weights


def not_ready(definition: StackDefinition, root: Path) -> list[str]:
    """What `pulumi up` needs first, one sentence each. Not errors: the bill and the preview work without."""
    name, sentences = definition.argument, [*definition.fleet.market.not_ready()]
    if definition.fleet.ami == "unpinned":
        sentences.append(f"fleet.ami is unpinned: run `gpufleet doctor {name} --pin`.")
    for key, image in (("image", definition.job.image), ("supervisor_image", definition.job.supervisor_image)):
        if image is not None and "@sha256:" not in image:
            sentences.append(f"job.{key} has a tag but no digest: run `gpufleet doctor {name} --pin`.")
    dataset, folder = definition.storage.dataset, definition.storage.dataset_folder(root)
    if folder is not None and (reason := _unprepared(definition, folder, root)):
        sentences.append(f"storage.dataset, {dataset}, {reason}: run `{command(definition)}`.")
    weights, folder = definition.storage.base_weights, definition.storage.weights_folder(root)
    if folder is not None:
        if not folder.is_dir():
            sentences.append(f"storage.base_weights, {weights}, is not there: download the weights into that folder.")
        elif reason := _unlisted(folder):
            sentences.append(f"storage.base_weights, {weights}, {reason}: run `gpufleet prepare {name}`.")
        elif reason := definition.job.parameters.dataset.weights_differ(folder):
            sentences.append(f"storage.base_weights, {weights}, {reason}")
    sentences += map(str, code_problems(definition, root))
    if definition.storage.inputs:
        from gpufleet.infra.inputs import folders  # here: most callers have none

        sentences += folders.missing(definition, root)
    return sentences


def code_problems(definition: StackDefinition, root: Path) -> list[Problem]:
    """What is wrong with the folder of a command's code: it is not there, is empty or cannot be shipped."""
    if definition.job.parameters.demands.code is None:
        return []
    from gpufleet.infra.inputs import code  # here: most callers ship none

    try:
        code.read(definition, root)
    except DefinitionError as error:
        return list(error.problems)
    return []


def image_problems(definition: StackDefinition) -> list[Problem]:
    """An image of several nodes without a digest: its tag may move between two pulls. A scenario is there to be priced;
    whoever runs it hears the same of `not_ready`.
    """
    image = definition.job.image
    if not definition.fleet.is_gang or definition.scenario or "@sha256:" in image:
        return []
    allowed = f"{image}@sha256:..., its digest, where fleet.nodes is {definition.nodes}"
    hint = f"A tag may move between the pulls of two nodes: `gpufleet doctor {definition.argument} --pin` writes it."
    return [definition.problem("job.image", image, allowed, hint)]


def command(definition: StackDefinition) -> str:
    """The `gpufleet prepare` that makes its dataset; sources that are files are named by hand."""
    return f"gpufleet prepare {definition.argument} {definition.job.parameters.dataset.argument()}".rstrip()


def _unlisted(folder: Path) -> str:
    """Why these weights cannot be declared yet, or nothing."""
    if not (folder / WEIGHTS).is_file():
        return f"are not listed in {WEIGHTS}"
    try:
        read_weights(folder)
    except ValueError as error:
        return f"are not as listed ({error})"
    return ""


def _unprepared(definition: StackDefinition, folder: Path, root: Path) -> str:
    """Why the folder is not the prepared dataset that the file asks for, or nothing. Its files are hashed by whoever
    uploads them, not here.
    """
    if not (folder / DATASET).is_file():
        return "is not prepared"
    try:
        manifest = read_dataset(folder, definition.job.parameters.dataset_checks)
    except ValueError as error:
        return f"is damaged ({error})"
    if (other := other_size(folder, manifest)) is not None:
        return f"is incomplete ({other})"
    return dataset_differs(definition, root)


def dataset_differs(definition: StackDefinition, root: Path) -> str:
    """How the prepared dataset is another than the file's settings ask for, in words that follow its name; or nothing.

    The node asks the same before it trains, when its set-up is paid for already. Raises ValueError for a folder that is
    no prepared dataset.
    """
    config = definition.job.parameters
    manifest = read_dataset(root / definition.storage.dataset, config.dataset_checks)
    if manifest.kind != config.dataset_kind:
        return f"is a dataset of {manifest.kind}, {definition.job.experiment} needs {config.dataset_kind}"
    return config.dataset.differs(manifest, definition.storage.weights_folder(root))
