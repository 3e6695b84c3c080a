"""Whether what lies in local folders, a prepared dataset and base weights, is what the definition's job wants.

The node asks the same before it trains (job.experiments, job.models.hf), when its set-up is paid for already. Here only
manifests and config.json are read, and nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from infra.definition import StackDefinition
from job import atomic
from job.config import GrowthConfig, JobConfig, KernelConfig, PretrainConfig, SftConfig, TwoTowerConfig
from job.config.common import Decoder
from job.dataset.prepare import DatasetManifest, read_manifest
from job.dataset.rendering import TEMPLATES, file_id

_KINDS: dict[type[JobConfig], str] = {
    GrowthConfig: "windows",
    SftConfig: "packed",
    KernelConfig: "packed",
    PretrainConfig: "characters",
    TwoTowerConfig: "ranking",
}


def dataset_differs(definition: StackDefinition, root: Path) -> str:
    """How the prepared dataset is another than the file's settings ask for, in words that follow its name; or nothing.

    Raises ValueError for a folder that is no prepared dataset.
    """
    config = definition.job.parameters
    manifest = read_manifest(root / definition.storage.dataset)
    if manifest.kind != _KINDS[type(config)]:
        return f"is a dataset of {manifest.kind}, {definition.job.experiment} needs {_KINDS[type(config)]}"
    if isinstance(config, TwoTowerConfig):
        return _other(_ranking(config, manifest))
    if isinstance(config, PretrainConfig):
        return _short(manifest, "characters", 2 * config.data.sequence + 1, config.data.sequence)
    windows = isinstance(config, GrowthConfig)
    ids = manifest.vocab if windows else manifest.facts.get("vocab", 0)
    if ids > config.model.vocab:
        return f"has {ids} ids, model.vocab is {config.model.vocab}: raise it to {ids} or more, or prepare anew"
    if isinstance(config, GrowthConfig):
        return _short(manifest, "tokens", config.data.sequence + 1, config.data.sequence)
    weights = definition.storage.base_weights
    beside = None if weights is None or weights.startswith("s3://") else root / weights / "tokenizer.json"
    if not config.data.source.startswith("generated-") and beside is not None and beside.is_file():
        own, used = file_id(beside.read_bytes()), manifest.facts.get("tokenizer_id")
        if used != own:
            return f"was prepared with {used}, and {own} is the tokenizer.json of storage.base_weights"
    return _other(_packed(config, manifest))


def command(definition: StackDefinition, name: str) -> str:
    """The `gpufleet prepare` that makes the dataset of the stack `name`; sources that are files are named by hand."""
    source = definition.job.parameters.data.source
    by_hand = {"jsonl": " FILE.jsonl", "text": " FILE.txt", "million-llms": " FOLDER"}
    return f"gpufleet prepare {name}{by_hand.get(source, '')}"


def weights_differ(definition: StackDefinition, root: Path) -> str:
    """How the local base weights are of another model than `model` says, or nothing. What config.json lacks, or says in
    a way that no decoder here has, is left to `gpufleet prepare`.
    """
    place, config = definition.storage.base_weights, definition.job.parameters
    if place is None or not isinstance(config, SftConfig | KernelConfig):
        return ""
    found = shape(atomic.read_object(root / place / "config.json") or {})
    wanted = {field.name: getattr(config.model, field.name) for field in fields(Decoder)}
    return ", ".join(
        f"model.{key} {value}, the file says {wanted[key]}" for key, value in found.items() if value != wanted[key]
    )


def shape(tree: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says of the keys of job.parameters.model, as job.models.hf.read_shape reads it."""
    rope = tree.get("rope_scaling") or tree.get("rope_parameters") or {}
    other = tree.get("rope_parameters") or {}
    heads, width = tree.get("num_attention_heads"), tree.get("hidden_size")
    if not isinstance(rope, dict) or not isinstance(other, dict) or not isinstance(heads, int) or not heads:
        return {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    thetas = (of["rope_theta"] for of in (rope, tree, other) if of.get("rope_theta"))
    found = {
        "family": tree.get("model_type"),
        "vocab": tree.get("vocab_size"),
        "layers": tree.get("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": tree.get("num_key_value_heads") or heads,
        "head_dim": tree.get("head_dim") or (width // heads if isinstance(width, int) else None),
        "ffn": tree.get("intermediate_size"),
        "tied": bool(tree.get("tie_word_embeddings", False)),
        "norm_eps": tree.get("rms_norm_eps"),
        "rope_theta": next(thetas, 10_000.0),
        "rope_scaling": "llama3" if kind == "llama3" else "none",
    }
    return {key: value for key, value in found.items() if value is not None}


def _packed(config: SftConfig | KernelConfig, manifest: DatasetManifest) -> Iterator[tuple[str, object, object]]:
    """(key of the run config, of the dataset, of the file), where they differ."""
    data, facts = config.data, manifest.facts
    wanted: list[tuple[str, str, object]] = [("data.row", "row", data.row)]
    if isinstance(config, SftConfig):
        wanted.append(("data.longest", "longest", min(config.data.longest, data.row)))
        wanted.append(("data.loss_on", "loss_on", config.data.loss_on))
        wanted.append(("measures.packing", "packing", config.measures.packing))
    wanted.append(("the chat template", "template", TEMPLATES[config.model.family].name))
    for key, fact, value in wanted:
        if facts.get(fact, "unknown") != value:
            yield key, facts.get(fact, "unknown"), value
    if isinstance(config, SftConfig) and not config.measures.pretokenised and not facts.get("texts"):
        yield "measures.pretokenised", True, False


def _ranking(config: TwoTowerConfig, manifest: DatasetManifest) -> Iterator[tuple[str, object, object]]:
    wanted = (
        ("data.queries", "queries", config.data.queries),
        ("data.models", "models", config.data.models),
        ("towers.sentence", "width", config.towers.sentence),
    )
    for key, fact, value in wanted:
        if manifest.facts.get(fact, "unknown") != value:
            yield key, manifest.facts.get(fact, "unknown"), value


def _other(differing: Iterator[tuple[str, object, object]]) -> str:
    words = "; ".join(f"{key} {_yaml(there)}, the file says {_yaml(here)}" for key, there, here in differing)
    return f"was prepared with {words}" if words else ""


def _short(manifest: DatasetManifest, unit: str, least: int, sequence: int) -> str:
    for split in ("train", "validation"):
        count = manifest.tokens.get(split) if unit == "tokens" else manifest.facts.get(f"{split}_{unit}")
        if count is not None and count < least:
            return f"has {count} {unit} for {split}, data.sequence {sequence} needs at least {least}"
    return ""


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
