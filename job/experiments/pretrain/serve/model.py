"""Loads a model from its exported folder, from `model.safetensors` and `meta.json` alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gpufleet.job import atomic
from gpufleet.job.experiments.engine.export import META, WEIGHTS
from gpufleet.job.experiments.pretrain import characters
from gpufleet.job.experiments.pretrain.model import CharGpt, Text
from gpufleet.job.experiments.pretrain.serve.batch import TextWriter
from gpufleet.job.experiments.pretrain.serve.request import GenerateRequest
from gpufleet.job.experiments.pretrain.spec import SYMBOLS, CharModel

EXPERIMENT = "pretrain-d64"


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A model in memory. Every answer has `name`; `sequence` is the length on which the model was trained."""

    module: CharGpt
    name: str
    sequence: int
    meta: dict[str, Any]
    writer: TextWriter

    def generate(self, asked: GenerateRequest) -> Iterator[str]:
        """The characters that follow the prompt, one by one."""
        text = Text(
            list(characters.encode(asked.prompt.encode())),
            allowed=len(SYMBOLS),
            max_tokens=asked.max_tokens,
            window=self.sequence,
            temperature=asked.temperature,
            top_k=asked.top_k,
            seed=asked.seed,
            stop=[SYMBOLS.index("\n")] if asked.stop_on_newline else (),
        )
        return (SYMBOLS[i] for i in self.writer.write(text))

    def info(self) -> dict[str, Any]:
        shape = self.module.model
        return {
            "model": self.name,
            "step": self.meta.get("step"),
            "tokens": self.meta.get("tokens"),
            "val_loss": self.meta.get("val_loss"),
            "layers": shape.layers,
            "width": shape.width,
            "heads": shape.width // shape.head_dim,
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "vocabulary": list(SYMBOLS),
            "sequence": self.sequence,
            "device": str(self.module.embed.weight.device),
        }


def open_model(folder: Path, *, device: torch.device | str = "cpu") -> Served:
    """The model in `folder`: on a GPU with weights and products in bf16, otherwise in fp32. Raises ValueError if the
    folder is not that of a character model, if it is damaged, or if the model does not fit on the device.
    """
    meta = atomic.read_object(folder / META)
    if meta is None or not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder}: no exported model: {META} and {WEIGHTS} are needed, as in a run's final/"
            " (gpufleet results STACK downloads it)"
        )
    if meta.get("experiment") != EXPERIMENT:
        raise ValueError(
            f"{folder}: a model of {meta.get('experiment', 'an unknown experiment')}; only the character models of "
            f"{EXPERIMENT} can be served"
        )
    try:
        shape = CharModel(**{f.name: meta["shape"][f.name] for f in fields(CharModel)})
        sequence, entry = int(meta["sequence"]), meta["files"][0]
        if (size := (folder / WEIGHTS).stat().st_size) != int(entry["bytes"]):
            raise ValueError(f"{WEIGHTS} is {size} bytes, {META} says {entry['bytes']}: copy it again")
        # Reads the bytes that are mapped below, which takes about 1 s per GiB.
        if atomic.sha256(folder / WEIGHTS) != entry["sha256"]:
            raise ValueError(f"{WEIGHTS} is damaged: its sha256 is not the one in {META}; copy it again")
        with torch.device("meta"):
            module = CharGpt(shape)
        module.load_state_dict(load_file(folder / WEIGHTS), assign=True)
    except (KeyError, IndexError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder}: damaged export ({type(error).__name__}: {error}); copy it again") from error
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    module.eval().requires_grad_(False)
    try:
        if torch.device(device).type == "cuda":  # in bf16, because every weight is read for each character
            module.compute_dtype = torch.bfloat16
        module.to(device, module.compute_dtype)  # fails for the device `meta`, which accepts weights but cannot compute
        module(torch.zeros(1, 1, dtype=torch.int64, device=device)).logits.cpu()
        writer = TextWriter(module, sequence)
    # The device, its driver or enough memory do not exist, torch was built without it, or a dtype is not supported.
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{folder}: cannot be put on device {str(device)!r} ({reason}); try --device cpu") from error
    name = f"m{shape.layers}x{shape.width} step {meta.get('step')}"
    return Served(module=module, name=name, sequence=sequence, meta=meta, writer=writer)
