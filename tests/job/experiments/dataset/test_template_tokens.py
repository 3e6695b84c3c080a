"""The chat template's tokens in weights that never trained them: `prepare` says so, and their rows can be trained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gpufleet.job.experiments.dataset import weights
from gpufleet.job.experiments.dataset.rendering import TEMPLATES
from gpufleet.job.experiments.kernel.pairs import byte_tokenizer
from gpufleet.job.experiments.models import hf, lora
from gpufleet.job.experiments.models.config import Lora
from gpufleet.job.experiments.models.decoder import Decoder, build
from gpufleet.job.experiments.sft.conversations import prepare_sft
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.kind import from_json
from tests.job import sft_world as sft
from tests.job import train_world as world
from tests.job.decoder_models import generator
from tests.job.train_world import StopAt

IDS = list(range(256, 260))  # of Llama's four, in a tokenizer of bytes
END = IDS[-1]
ROWS = [{"instruction": f"what is {i}?", "response": "two"} for i in range(60)]
TRAINED = {"template_tokens": True}


def typed(**changed: Any) -> SftConfig:
    config = from_json("sft-h100", sft.config(**{"data": {"source": "jsonl"}, **changed}))
    assert isinstance(config, SftConfig)
    return config


def base(folder: Path, config: SftConfig, change: Callable[[Tensor, Tensor], object]) -> Path:
    """Random weights whose tables (the head may be the embedding) are changed, and their tokenizer."""
    module = build(config.model, compute=torch.float32, generator=generator())
    head = module.embed if module.head is None else module.head
    with torch.no_grad():
        for table in {module.embed, head}:
            table.weight.mul_(20)
        change(module.embed.weight, head.weight)
    hf.write(folder, module.named_parameters(), config.model, torch.bfloat16)
    (folder / "tokenizer.json").write_bytes(byte_tokenizer(TEMPLATES["llama"]).files["tokenizer.json"])
    return folder / "tokenizer.json"


def zeros(embed: Tensor, head: Tensor) -> None:
    embed[IDS], head[IDS] = 0, 0


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (lambda embed, head: None, {}, ""),
        (zeros, {}, r"<\|start_header_id\|>, .* zeros in model\.embed_tokens\.weight; <\|eot_id\|> zeros in lm_head"),
        (lambda embed, head: embed[END].copy_(embed[IDS[1]]), {}, "as another token's in model.embed_tokens.weight"),
        (lambda embed, head: head[END].copy_(1.5 * head[300]), {}, "eot_id.> as another token's in lm_head.weight"),
        (lambda embed, head: embed[END].mul_(0.01), {}, "eot_id.> less than 0.1 of the usual length in model.embed"),
        (lambda embed, head: head[IDS[:-1]].zero_(), {}, ""),  # an answer holds none of them
        (lambda embed, head: embed[END].zero_(), {"model": {"tied": True}}, "eot_id.> zeros in model.embed"),
        (zeros, {"lora": TRAINED}, ""),
        (zeros, {"method": "full"}, ""),
    ],
)
def test_rows_that_adapters_would_never_mend_are_said(
    change: Callable[[Tensor, Tensor], object], config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    wanted, said = typed(**config), list[str]()
    tokenizer = base(tmp_path / "base", wanted, change)
    prepare_sft(tmp_path / "data", wanted, text=sft.jsonl(tmp_path, *ROWS), tokenizer=tokenizer, say=said.append)
    warned = [line for line in said if "look untrained" in line]
    assert bool(warned) == bool(words)
    if words:
        assert re.search(words, warned[0])


def test_a_tokenizer_by_itself_tells_nothing_of_rows(tmp_path: Path) -> None:
    assert not weights.present(tmp_path)


@pytest.mark.parametrize(("longest", "warned"), [(128, False), (24, True)])
def test_answers_that_are_cut_before_they_end_are_said(longest: int, warned: bool, tmp_path: Path) -> None:
    said: list[str] = []
    config = typed(data={"source": "jsonl", "longest": longest})
    tokenizer = sft.bpe(tmp_path, *sft.LLAMA)
    rows = [{"instruction": "what is it", "response": "the answer is " + "two " * 30}] * 9 + ROWS[:1]
    found = prepare_sft(
        tmp_path / "data", config, text=sft.jsonl(tmp_path, *rows), tokenizer=tokenizer, say=said.append
    )
    assert found.facts["unclosed"] == (9 if warned else 0)
    assert any("9 of 10 examples are cut before their answer's closing token" in line for line in said) is warned


def adapted(tied: bool) -> tuple[Decoder, Decoder]:
    """A base, and the same with trained rows of other numbers."""
    config = typed(model={"tied": tied})
    plain = build(config.model, compute=torch.float32, generator=generator())
    module = build(config.model, compute=torch.float32, generator=generator())
    lora.attach(module, Lora(rank=2, dropout=0.0, template_tokens=True), generator(), IDS)
    with torch.no_grad():
        for _, table in lora.tables(module):
            table.trained_rows.add_(1.0)
    return plain, module


@pytest.mark.parametrize("tied", [False, True])
def test_trained_rows_are_the_tables_own_in_every_mode(tied: bool) -> None:
    plain, module = adapted(tied)
    tokens = torch.tensor([[END, 1, 2, IDS[0]]])
    with torch.no_grad():
        answers = {}
        for mode in ("base", "adapter"):
            lora.set_mode(module, mode)
            answers[mode] = module(tokens).logits
        torch.testing.assert_close(answers["base"], plain(tokens).logits, rtol=0, atol=0)
        for name, tensor in lora.merged_weights(module):
            plain.get_parameter(name).copy_(tensor)
        torch.testing.assert_close(answers["adapter"], plain(tokens).logits, rtol=0, atol=0)
    changed = (plain.embed.weight != module.embed.weight).any(1).nonzero().flatten().tolist()
    assert changed == IDS


@pytest.mark.parametrize("tied", [False, True])
def test_trained_rows_are_counted_checkpointed_and_written_as_peft_writes_them(tied: bool, tmp_path: Path) -> None:
    _, module = adapted(tied)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained == set(lora.weights(module))
    config = typed(model={"tied": tied}, lora={"rank": 2, **TRAINED})
    assert config.phases()[0].params_trained == sum(p.numel() for p in lora.weights(module).values())
    hf.write_adapter(tmp_path, module, config.lora, None)
    tables = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    told = json.loads((tmp_path / "adapter_config.json").read_text())["trainable_token_indices"]
    assert told == dict.fromkeys(tables, IDS)
    written = load_file(tmp_path / hf.ADAPTER)
    rows = written["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    torch.testing.assert_close(rows, module.embed.rows(torch.bfloat16)[IDS], rtol=0, atol=0)


def test_a_base_without_these_rows_learns_to_stop_and_a_stop_in_between_changes_nothing(tmp_path: Path) -> None:
    changed = {"lora": {"rank": 8, "dropout": 0.0, **TRAINED}, "data": {"source": "jsonl"}, "epochs": 8}
    changed |= {"optim": {"lr": 0.02}, "eval": {"every": 1000, "sample_tokens": 4}}
    deliveries = []
    for name in ("straight", "stopped"):
        workdir = tmp_path / name
        tokenizer = base(workdir / "inputs", typed(**changed), zeros)
        prepare_sft(workdir / "data", typed(**changed), text=sft.jsonl(tmp_path, *ROWS), tokenizer=tokenizer)
        tree = {"schema": 1, "job": {"experiment": "sft-h100", "parameters": sft.config(**changed)}, "predicted": []}
        (workdir / "run.json").write_text(json.dumps(tree))
        if name == "stopped":
            assert world.train(workdir, StopAt(workdir, 7)) == 75
        assert world.train(workdir) == 0
        assert {item["answer"] for item in sft.results(workdir)["answers"]} == {"two"}
        deliveries.append(sft.hashes(workdir))
    assert deliveries[0] == deliveries[1]
