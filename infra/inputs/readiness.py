"""Checks what `pulumi up` needs: pinned AMI and images, a prepared dataset, base weights, code, inputs."""

from __future__ import annotations

from pathlib import Path

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError, Problem
from gpufleet.infra.inputs import bakes
from gpufleet.job.contract.inputs import DATASET, WEIGHTS, other_size, read_dataset, read_weights


def not_ready(definition: StackDefinition, root: Path) -> list[str]:
    """A sentence for each thing that `pulumi up` needs and that is missing. These are not errors, because bill and
    preview work without these things.
    """
    name, sentences = definition.argument, [*definition.fleet.market.not_ready()]
    if definition.fleet.ami == "unpinned":
        sentences.append(f"fleet.ami is unpinned: run `gpufleet doctor {name} --pin`.")
    for key, image in (("image", definition.job.image), ("supervisor_image", definition.job.supervisor_image)):
        if image is not None and "@sha256:" not in image:
            sentences.append(f"job.{key} has a tag but no digest: run `gpufleet doctor {name} --pin`.")
    sentences += bakes.not_ready(definition, root)
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
        from gpufleet.infra.inputs import folders  # imported here, because most definitions have no command

        sentences += folders.missing(definition, root)
    return sentences


def code_problems(definition: StackDefinition, root: Path) -> list[Problem]:
    """Problems of the folder of a command's code: the folder is missing or empty, or cannot be uploaded."""
    if definition.job.parameters.demands.code is None:
        return []
    from gpufleet.infra.inputs import code  # imported here, because most definitions ship no code

    try:
        code.read(definition, root)
    except DefinitionError as error:
        return list(error.problems)
    return []


def image_problems(definition: StackDefinition) -> list[Problem]:
    """A problem if several nodes have an image without a digest, because the image of a tag may change between two
    pulls. For a scenario this is not a problem, because it is usually only priced; if it is run, `not_ready` has a
    sentence about it.
    """
    image = definition.job.image
    if not definition.fleet.is_gang or definition.scenario or "@sha256:" in image:
        return []
    allowed = f"{image}@sha256:..., its digest, where fleet.nodes is {definition.nodes}"
    hint = f"A tag may move between the pulls of two nodes: `gpufleet doctor {definition.argument} --pin` writes it."
    return [definition.problem("job.image", image, allowed, hint)]


def command(definition: StackDefinition) -> str:
    """The `gpufleet prepare` command for the definition's dataset. If the source is a file, the user has to add its
    path.
    """
    return f"gpufleet prepare {definition.argument} {definition.job.parameters.dataset.argument()}".rstrip()


def _unlisted(folder: Path) -> str:
    """A sentence about why the weights in `folder` cannot be declared yet; empty if they can be."""
    if not (folder / WEIGHTS).is_file():
        return f"are not listed in {WEIGHTS}"
    try:
        read_weights(folder)
    except ValueError as error:
        return f"differ from their list ({error})"
    return ""


def _unprepared(definition: StackDefinition, folder: Path, root: Path) -> str:
    """Why the folder is not the prepared dataset that the definition file asks for; empty if it is. The files are
    hashed only when they are uploaded.
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
    """How the prepared dataset differs from the file's settings, as a phrase after its name; empty if it does not. The
    node checks the same before it trains, but then its set-up is already paid for. Raises ValueError if the folder is
    not a prepared dataset.
    """
    config = definition.job.parameters
    manifest = read_dataset(root / definition.storage.dataset, config.dataset_checks)
    if manifest.kind != config.dataset_kind:
        return f"is a dataset of {manifest.kind}, but {definition.job.experiment} needs {config.dataset_kind}"
    return config.dataset.differs(manifest, definition.storage.weights_folder(root))
