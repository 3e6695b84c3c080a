"""Reads and writes decoder weights in the published layout: config.json and safetensors, in one file or sharded.

The module does not use the `transformers` package. Before a byte of weights is read, names and shapes of all tensors
are checked, and that config.json describes the run config's model (hf_config.py). User mistakes raise ValueError with
what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gpufleet.job import atomic
from gpufleet.job.experiments.models import lora
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.experiments.models.config import Lora
from gpufleet.job.experiments.models.decoder import Decoder
from gpufleet.job.experiments.models.hf_config import ADAPTER_CONFIG, CONFIG, check, config_tree, published

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
# Files that `transformers` reads in addition to tokenizer.json: the chat template, and the tokens for beginning and
# end.
TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
ADAPTER = "adapter_model.safetensors"
SHARD_BYTES = 5_000_000_000  # the most bytes of a file, as in published weights


@torch.no_grad()
def load(folder: Path, module: Decoder, fill: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
    """Copies the published weights into the module's own tensors. The module keeps its dtype and device; adapters are
    left out. `fill` writes a whole tensor into a parameter.

    Raises ValueError if the weights belong to a model of a different shape, if a file is damaged, or if a tensor is
    missing, unknown or has a wrong shape.
    """
    held = check(folder, module.shape)
    trained = lora.weights(module)
    targets = {published(name): p for name, p in module.named_parameters() if name not in trained}
    for path in sorted({stored.file for stored in held.values()}):
        try:
            with safe_open(path, framework="pt") as file:
                for name, stored in held.items():
                    if stored.file == path:
                        fill(targets[name], file.get_tensor(stored.name))
        except SafetensorError as error:
            raise ValueError(f"{path}: {error}; download it again") from error


def write(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shape: Shape, dtype: torch.dtype, shard: int = SHARD_BYTES
) -> list[Path]:
    """Writes weights by our names into `folder`, as `dtype`: model.safetensors, or numbered files of at most `shard`
    bytes with an index; and config.json. Returns the files of weights. Replaces existing files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("model*.safetensors"), folder / INDEX):
        old.unlink(missing_ok=True)
    parts: list[Path] = []
    held: dict[str, Tensor] = {}
    where: dict[str, int] = {}
    total = size = 0

    def flush() -> None:
        nonlocal held, size
        parts.append(folder / f".part-{len(parts):05d}")
        save_file(held, parts[-1], metadata={"format": "pt"})
        held, size = {}, 0

    for name, tensor in tensors:
        ready = tensor.detach().to("cpu", dtype).contiguous()
        if held and size + ready.nbytes > shard:
            flush()
        held[published(name)], where[published(name)] = ready, len(parts)
        size, total = size + ready.nbytes, total + ready.nbytes
    flush()
    count = len(parts)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [WEIGHTS]
    paths = [part.replace(folder / name) for part, name in zip(parts, names, strict=True)]
    if count > 1:
        weight_map = {name: names[part] for name, part in where.items()}
        atomic.write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    atomic.write_json(folder / CONFIG, config_tree(shape, str(dtype).removeprefix("torch.")))
    return paths


def complete(folder: Path, base: Path | None, dtype: torch.dtype, stop: int) -> None:
    """Writes the files that other programs need to generate with the weights in `folder`: the config.json of the
    published weights in `base` with the new dtype (if `base` is None, the config.json from `write` stays), and a
    generation_config.json whose end tokens are `stop`. The latter is made from the file in `base`, if there is one.
    """
    published = None if base is None else atomic.read_object(base / CONFIG)
    tree = published or {**(atomic.read_object(folder / CONFIG) or {}), "eos_token_id": stop}
    for key in [key for key in ("torch_dtype", "dtype") if key in tree] or ["torch_dtype"]:
        tree[key] = str(dtype).removeprefix("torch.")
    atomic.write_json(folder / CONFIG, tree)
    generation = None if base is None else atomic.read_object(base / GENERATION)
    if generation is None:  # without this file, `transformers` takes the settings from config.json
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
        generation = {key: tree[key] for key in tokens if tree.get(key) is not None}
    ends = generation.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if stop not in known:
        generation["eos_token_id"] = [*known, stop] if known else stop
    atomic.write_json(folder / GENERATION, generation)


def write_adapter(folder: Path, module: nn.Module, config: Lora, base: str | None) -> None:
    """Writes the adapter in PEFT's format, bf16. `base` names its weights; None means unknown, as in PEFT."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, layer in lora.layers(module):
        key = f"base_model.model.{published(name)}"
        tensors[f"{key}.lora_A.weight"] = layer.lora_a.detach().to("cpu", torch.bfloat16)
        tensors[f"{key}.lora_B.weight"] = layer.lora_b.detach().to("cpu", torch.bfloat16)
    # the name in PEFT contains `delta`, but the rows themselves are stored, and not a difference
    for name, table in lora.tables(module):
        rows = table.trained_rows.detach().to("cpu", torch.bfloat16)
        tensors[f"base_model.model.{published(name)}.token_adapter.trainable_tokens_delta"] = rows
    temporary = folder / f".{ADAPTER}"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(folder / ADAPTER)
    tree = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": [f"{name}_proj" for name in lora.PROJECTIONS],
        "trainable_token_indices": {
            published(name).rpartition(".")[2]: table.ids.tolist() for name, table in lora.tables(module)
        }
        or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
