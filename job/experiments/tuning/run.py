"""Fine-tunes a published decoder on packed rows: the common part of sft-h100 and kernel-sft.

The module compares the dataset with the run config, loads the weights with which training starts, sets the rate,
handles stops after training, and writes final/.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from gpufleet.job import atomic
from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.contract.workdir import FINAL
from gpufleet.job.experiments.dataset.rendering import (
    CHAT_TEMPLATE,
    TEMPLATES,
    FileTokenizer,
    Renderer,
    chat_template,
    file_id,
    jinja,
    open_chat_tokenizer,
)
from gpufleet.job.experiments.engine import export, optimizer, parallel
from gpufleet.job.experiments.engine.experiment import Session
from gpufleet.job.experiments.models import decoder, float8, hf, lora
from gpufleet.job.experiments.models.blocks import DTYPES
from gpufleet.job.experiments.models.config import Lora
from gpufleet.job.experiments.models.decoder import Decoder
from gpufleet.job.experiments.spec import CosineAdamW
from gpufleet.job.experiments.tuning.spec import TuningConfig

TOKENIZERS = ("tokenizer.json", "words.json")
TRAINED_TEMPLATE = "trained_chat_template.jinja"


def check_dataset(session: Session, manifest: DatasetManifest, config: TuningConfig) -> None:
    """Raises ValueError if the prepared rows do not match the run config."""
    if manifest.kind != "packed":
        raise ValueError(
            f"{session.data}: a dataset of {manifest.kind}, but this experiment needs packed rows; prepare it"
        )
    facts = manifest.facts
    if facts["vocab"] > config.model.vocab:
        raise ValueError(
            f"{session.data}: {facts['vocab']} ids, the model's vocabulary (model.vocab) is "
            f"{config.model.vocab}; prepare the dataset with the tokenizer of the base weights"
        )
    beside = None if config.data.source.startswith("generated-") else _tokenizer_id(session)
    if beside not in (None, facts["tokenizer_id"]):
        raise ValueError(
            f"{session.data} was prepared with {facts['tokenizer_id']}, and {beside} is the tokenizer beside the base "
            "weights, to which the dataset's ids mean other words; prepare it again, without --tokenizer"
        )
    wanted = config.dataset_facts().items()
    differing = [f"{key} {facts[key]}, the run config {value}" for key, value in wanted if facts[key] != value]
    if differing:
        raise ValueError(f"{session.data} was prepared with {'; '.join(differing)}: prepare it again")


def _tokenizer_id(session: Session) -> str | None:
    """The id of the tokenizer.json beside the base weights; None if there is none."""
    path = None if session.inputs is None else session.inputs / FileTokenizer.kind
    return file_id(path.read_bytes()) if path is not None and path.is_file() else None


def renderer(session: Session, manifest: DatasetManifest, config: TuningConfig) -> Renderer:
    """A renderer with the dataset's own tokenizer and the model's template."""
    return Renderer(TEMPLATES[config.model.family], open_chat_tokenizer(manifest.facts["tokenizer"], session.data))


def template_ids(session: Session, manifest: DatasetManifest, config: TuningConfig) -> list[int]:
    """The ids of the tokens that the chat template writes."""
    tokenizer = open_chat_tokenizer(manifest.facts["tokenizer"], session.data)
    return [tokenizer.special(name) for name in TEMPLATES[config.model.family].specials]


def base(
    session: Session,
    config: TuningConfig,
    dtype: torch.dtype,
    *,
    written: bool = True,
    spread: bool = False,
    adapters: Lora | None = None,
    narrow: bool = False,
) -> Decoder:
    """A decoder on the device with the weights with which training starts: published weights, or, for generated data,
    random weights from the seed. If not `written`, the weights are only allocated. `spread`: whether each rank gets
    only a part, so that no device ever has all weights. `adapters` are added to the decoder; they are complete on every
    rank, and not initialised. `narrow`: whether the matrices beside them are stored in fp8. Raises ValueError.
    """
    if session.inputs is None and not config.data.source.startswith("generated-"):
        raise ValueError(
            "no base weights: storage.base_weights must name a folder with config.json and safetensors "
            "(a job starts from random weights only if its data.source is a generated one)"
        )
    compute = DTYPES[config.precision.compute]
    module = decoder.build(config.model, compute=compute, dtype=dtype, device="meta")
    if adapters is not None:
        lora.attach(module, adapters)
    if narrow:
        float8.require(session.device.torch)
        lora.store(module, float8.DTYPE)
    if spread:
        whole = list(lora.weights(module).values())
        reshard = bool(whole) or config.reshard_after_forward
        parallel.shard(module, session.world, module.blocks, compute=compute, reshard=reshard, whole=whole)
    module.to_empty(device=session.device.torch)
    if written:
        fill(session, config, module)
    return module


def fill(session: Session, config: TuningConfig, module: Decoder) -> None:
    """Writes the weights with which training starts into the module; adapters stay unchanged. Raises ValueError."""
    if session.inputs is not None:
        hf.load(session.inputs, module, lora.filling(module))
    else:
        decoder.initialise(module, torch.Generator().manual_seed(config.seed), lora.filling(module))


def trained_whole(session: Session, config: TuningConfig, *, written: bool) -> Decoder:
    """The base with fp32 weights, which are all trained, sharded over the ranks."""
    return base(session, config, torch.float32, written=written, spread=True)


def cosine(config: CosineAdamW, step: int, steps: int) -> float:
    """The rate of the step that follows `step` steps: it rises over `warmup` steps, and then follows a cosine that ends
    at floor x lr.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, steps - config.warmup)
    return optimizer.cosine(config.lr, config.floor, share)


def of_weights(step: int, val_loss: float | None) -> str:
    """The name under which results of the weights at `step` are kept. Equal weights have equal names: if a node lost
    its last steps, training them again on a GPU may give other weights.
    """
    return f"{step} {val_loss!r}"


def leave(
    session: Session, manifest: DatasetManifest, config: TuningConfig, module: nn.Module, meta: Mapping[str, Any]
) -> None:
    """Writes final/ for a run that a limit ends: the weights of the module in bf16. Must be called by all ranks."""
    tensors = gathered(session, module, heed=False)
    deliver(session, manifest, config, tensors, torch.bfloat16, meta)


def gathered(session: Session, module: nn.Module, *, heed: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight of a sharded module, one at a time, on rank 0. Every rank must iterate. If `heed`, raises
    Stopped when a stop was requested.
    """
    for name, parameter in module.named_parameters():
        if heed:
            session.check_stop()
        yield from parallel.gather({name: parameter}, session.world).items()


def deliver(
    session: Session,
    manifest: DatasetManifest,
    config: TuningConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    meta: Mapping[str, Any],
) -> str:
    """Writes final/: the weights with the other files of published weights, the dataset's tokenizer, and at last
    meta.json, which also lists an adapter/ in final/. Returns the (first) weights file's sha256, on rank 0.
    """
    if not session.world.first:
        for _ in tensors:  # all ranks gather sharded tensors together
            pass
        return ""
    folder = session.workdir / FINAL
    export.begin(folder)
    paths = hf.write(folder, tensors, config.model, dtype)
    hf.complete(folder, session.inputs, dtype, int(manifest.facts["stop"]))
    for name in TOKENIZERS:
        if (session.data / name).exists():
            shutil.copyfile(session.data / name, folder / name)
    if session.inputs is not None and _tokenizer_id(session) == manifest.facts["tokenizer_id"]:
        for name in hf.TOKENIZER:
            if (session.inputs / name).exists():
                shutil.copyfile(session.inputs / name, folder / name)
        names = (TRAINED_TEMPLATE,) if chat_template(session.inputs) else (TRAINED_TEMPLATE, CHAT_TEMPLATE)
        for name in names:
            (folder / name).write_text(jinja(TEMPLATES[config.model.family]), encoding="utf-8")
    exported = (*paths, *sorted((folder / "adapter").glob("adapter*")))
    files = [export.entry(folder, path.relative_to(folder).as_posix()) for path in exported]
    tree = {
        "schema": 1,
        **meta,
        "tokens": meta["step"] * config.batch.tokens,  # includes padding, as in metrics.jsonl
        "shape": asdict(config.model),
        "dtype": str(dtype).removeprefix("torch."),
        "tokenizer": {key: manifest.facts[key] for key in ("tokenizer", "tokenizer_id", "vocab", "template")},
        "dataset_sha256": manifest.sha256,
        "config_sha256": session.config_sha256,
        "files": files,
    }
    atomic.write_json(folder / export.META, tree)
    return str(files[0]["sha256"])
