"""Whether what lies in local folders, a prepared dataset and base weights, is what the definition's job wants.

The node asks the same before it trains (job.experiments, job.models.hf), when its set-up is paid for already. Here only
manifests and config.json are read, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.definition import StackDefinition
from job.dataset import packed, ranking
from job.dataset.packing import held_out_of
from job.dataset.prepare import DatasetManifest, read_manifest
from job.dataset.rendering import FileTokenizer, file_id
from job.models import hf_config
from job.spec import GrowthConfig, JobConfig, KernelConfig, PretrainConfig, SftConfig, TwoTowerConfig
from job.text import counted

_KINDS: dict[type[JobConfig], str] = {
    GrowthConfig: "windows",
    SftConfig: "packed",
    KernelConfig: "packed",
    PretrainConfig: "characters",
    TwoTowerConfig: "ranking",
}
_KEYS = {  # of the run config, by the fact of packed rows
    "row": "data.row",
    "longest": "data.longest",
    "loss_on": "data.loss_on",
    "packing": "measures.packing",
    "template": "the chat template",
}


def dataset_differs(definition: StackDefinition, root: Path) -> str:
    """How the prepared dataset is another than the file's settings ask for, in words that follow its name; or nothing.

    Raises ValueError for a folder that is no prepared dataset.
    """
    config: Any = definition.job.parameters
    manifest = read_manifest(root / definition.storage.dataset)
    if manifest.kind != _KINDS[type(config)]:
        return f"is a dataset of {manifest.kind}, {definition.job.experiment} needs {_KINDS[type(config)]}"
    if isinstance(config, TwoTowerConfig):
        queries, models, width = (int(manifest.facts.get(fact, 0)) for fact in ("queries", "models", "width"))
        problems = ranking.mismatches(config, (queries, width), (queries, models))
        return f"is of other settings ({'; '.join(problems)})" if problems else ""
    if isinstance(config, PretrainConfig):
        held = manifest.facts.get("held_out", config.data.held_out)
        if held != config.data.held_out:
            return f"was prepared with data.held_out {held:g}, the file says {config.data.held_out:g}"
        return _short(manifest, "characters", 2 * config.data.sequence + 1, config.data.sequence)
    windows = isinstance(config, GrowthConfig)
    ids = manifest.vocab if windows else manifest.facts.get("vocab", 0)
    if ids > config.model.vocab:
        return f"has {ids} ids, model.vocab is {config.model.vocab}: raise it to {ids} or more, or prepare anew"
    if isinstance(config, GrowthConfig):
        return _short(manifest, "tokens", config.data.sequence + 1, config.data.sequence)
    weights = definition.storage.weights_folder(root)
    beside = None if weights is None else weights / FileTokenizer.kind
    if not config.data.source.startswith("generated-") and beside is not None and beside.is_file():
        own, used = file_id(beside.read_bytes()), manifest.facts.get("tokenizer_id")
        if used != own:
            return f"was prepared with {used}, and {own} is the tokenizer.json of storage.base_weights"
    if differing := "; ".join(_packed(config, manifest)):
        return f"was prepared with {differing}"
    return _too_short_for_a_curriculum(config, manifest) if isinstance(config, KernelConfig) else ""


def weights_differ(definition: StackDefinition, root: Path) -> str:
    """What config.json of the local base weights has against `model`, in words that follow their name; or nothing."""
    folder, config = definition.storage.weights_folder(root), definition.job.parameters
    if folder is None or not isinstance(config, SftConfig | KernelConfig):
        return ""
    try:
        found = hf_config.read_shape(folder)
    except ValueError as error:
        return f"cannot be used: {error}."
    words = ", ".join(
        f"model.{key} {there}, the file says {here}" for key, there, here in hf_config.differences(found, config.model)
    )
    return f"are of another model: {words}. Make job.parameters.model agree, or name other weights." if words else ""


def _packed(config: SftConfig | KernelConfig, manifest: DatasetManifest) -> Iterator[str]:
    """What prepared rows are of, and what the file says."""
    for fact, wanted in packed.wanted(config).items():
        there = manifest.facts.get(fact, "unknown")
        if fact == "texts" and there is not wanted:
            yield "measures.pretokenised true, the file says false"
        elif there != wanted:
            yield f"{_KEYS[fact]} {_yaml(there)}, the file says {_yaml(wanted)}"
    held = manifest.facts.get("held_out_examples", 0)
    if isinstance(config, SftConfig) and held:  # rows to train on they are, though not those that are asked for
        share = held_out_of(held + manifest.facts.get("examples", 0), config.data.held_out)
        if held != share:
            yield f"{counted(f'{held:,}', 'example')} held out, data.held_out in the file says {share:,}"


def _too_short_for_a_curriculum(config: KernelConfig, manifest: DatasetManifest) -> str:
    """The trainer refuses one that would never act: the model is tried between two epochs, so between two steps."""
    rows, per_step = int(manifest.facts.get("rows", 0)), config.batch.tokens // config.data.row
    if config.data.curriculum == "off" or not rows or rows * config.epochs > per_step:
        return ""
    return (
        f"has {rows} rows, of which {config.epochs} epochs are one step of {per_step}, and data.curriculum "
        f"{config.data.curriculum} acts between two: lower batch.tokens"
    )


def _short(manifest: DatasetManifest, unit: str, least: int, sequence: int) -> str:
    for split in ("train", "validation"):
        count = manifest.tokens.get(split) if unit == "tokens" else manifest.facts.get(f"{split}_{unit}")
        if count is not None and count < least:
            share = " (1 % of the stories)" if (unit, split) == ("tokens", "validation") else ""
            return f"has {count} {unit} for {split}{share}, data.sequence {sequence} needs at least {least}"
    return ""


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
