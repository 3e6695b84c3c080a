"""A work folder of sft-h100 at rehearsal shape: two layers, 600 generated pairs, forty steps or fewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpufleet.job import atomic
from gpufleet.job.experiments.sft.conversations import prepare_sft
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.kind import from_json

PARAMETERS: dict[str, Any] = {
    "epochs": 1,
    "device": "cpu",
    "model": {
        "vocab": 512,
        "layers": 2,
        "width": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 176,
        "rope_scaling": "none",
    },
    "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
    "data": {"source": "generated-pairs", "examples": 120, "row": 128, "longest": 128, "held_out": 0.1},
    "batch": {"tokens": 512, "micro_tokens": 256},
    "optim": {"lr": 3e-3, "warmup": 2},
    "precision": {"compute": "fp32"},
    "checkpoint": {"interval_s": 3600.0},
    "eval": {"every": 4, "rows": 3, "prompts": 3, "sample_tokens": 4},
    "log": {"every": 1},
}


def bpe(tmp_path: Path, *specials: str) -> Path:
    """A byte-level BPE with a family's special tokens, as tokenizer.json."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from tokenizers.decoders import ByteLevel

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system\n\nwhat is the sum of two numbers\n the answer"] * 9, trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML = ("<|im_start|>", "<|im_end|>")


def jsonl(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "examples.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def config(**changed: Any) -> dict[str, Any]:
    """PARAMETERS with sections laid over them."""
    parameters: dict[str, Any] = json.loads(json.dumps(PARAMETERS))
    for key, value in changed.items():
        if isinstance(value, dict):
            parameters.setdefault(key, {}).update(value)
        else:
            parameters[key] = value
    return parameters


def make(workdir: Path, **changed: Any) -> Path:
    """A fresh work folder with its dataset."""
    parameters = config(**changed)
    typed = from_json("sft-h100", parameters)
    assert isinstance(typed, SftConfig)
    workdir.mkdir(parents=True, exist_ok=True)
    prepare_sft(workdir / "data", typed)
    tree = {"schema": 1, "job": {"experiment": "sft-h100", "parameters": parameters}, "predicted": []}
    (workdir / "run.json").write_text(json.dumps(tree))
    return workdir


def results(workdir: Path) -> dict[str, Any]:
    found = atomic.read_object(workdir / "results.json")
    assert found is not None
    return found


def hashes(workdir: Path) -> dict[str, str]:
    """Of every file of final/ that holds weights."""
    meta = atomic.read_object(workdir / "final" / "meta.json")
    assert meta is not None
    return {file["name"]: file["sha256"] for file in meta["files"]}
