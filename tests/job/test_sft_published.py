"""The way of a user: published weights and their tokenizer, a JSONL file, a tuned model that others can read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sft_world as sft
import torch
import train_world as world
from sft_world import CHATML, bpe, jsonl

from job import ledger
from job.config import from_json
from job.config.sft import SftConfig
from job.dataset.packed import PROMPTS, prepare_sft
from job.models import hf
from job.models.decoder import build
from job.models.generate import generate
from job.train import __main__ as trainer

FAMILY = {"family": "qwen3", "tied": True, "norm_eps": 1e-6, "rope_theta": 1e6}
CHANGED = {
    "epochs": 6,
    "model": FAMILY,
    "data": {"source": "jsonl", "longest": 96, "held_out": 0.05},
    "optim": {"lr": 1e-2},
    "lora": {"rank": 8, "dropout": 0.0},
    "eval": {"prompts": 2, "sample_tokens": 8, "every": 100},
}
PAIRS = [  # with three characters that end a line for str.splitlines, but not in JSON
    {"system": "be brief", "instruction": f"what\u2028is\u2029{i}\u0085?", "response": "the answer"} for i in range(60)
]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a qwen3 whose weights lie in two files."""
    workdir = tmp_path_factory.mktemp("tuned")
    parameters = sft.config(**CHANGED)
    config = from_json("sft-h100", parameters)
    assert isinstance(config, SftConfig)
    inputs = workdir / "inputs"
    inputs.mkdir()
    base = build(config.model, compute=torch.float32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        base.embed.weight.mul_(20)  # the head too: at initialisation its logits are too small to learn from
    paths = hf.write(inputs, base.named_parameters(), config.model, torch.bfloat16, shard=150_000)
    assert len(paths) > 1
    tokenizer = bpe(inputs, *CHATML)
    prepare_sft(workdir / "data", config, text=jsonl(workdir, *PAIRS), tokenizer=tokenizer)
    tree = {"schema": 1, "job": {"experiment": "sft-h100", "parameters": parameters}, "predicted": []}
    (workdir / "run.json").write_text(json.dumps(tree))
    assert world.train(workdir) == 0
    return workdir


def test_a_dataset_of_another_tokenizer_than_the_base_weights_own_is_refused(tuned: Path, tmp_path: Path) -> None:
    shutil.copytree(tuned / "inputs", tmp_path / "inputs")
    shutil.copy(tuned / "run.json", tmp_path)
    (tmp_path / "other").mkdir()
    small = bpe(tmp_path / "other", *CHATML, "<|one more|>")  # as large, and every id means another word
    config = from_json("sft-h100", sft.config(**CHANGED))
    assert isinstance(config, SftConfig)
    prepare_sft(tmp_path / "data", config, text=jsonl(tmp_path, *PAIRS), tokenizer=small)
    assert world.train(tmp_path) == trainer.FATAL
    assert "is the tokenizer beside the base weights" in (tmp_path / "fatal.json").read_text()


def test_it_starts_from_those_weights_and_learns_the_answer(tuned: Path) -> None:
    table = sft.results(tuned)
    assert table["losses"]["base"]["loss"] > 5
    assert table["losses"]["adapter"]["loss"] < 1.5
    assert table["merge"]["fp32_matches"] is True
    assert table["dataset"]["template"] == "chatml"
    assert [item["answer"] for item in table["answers"]] == ["the answer"] * 2


def test_the_merged_model_alone_gives_the_stored_answers(tuned: Path) -> None:
    module = build(hf.read_shape(tuned / "final"), compute=torch.float32, dtype=torch.bfloat16)
    hf.load(tuned / "final", module)
    asked = [item["tokens"] for item in ledger.read(tuned / "data" / PROMPTS)]
    stop = sft.results(tuned)["dataset"]["stop"]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tuned / "final" / "tokenizer.json"))
    written = generate(module, asked, 8, stop={stop})
    assert [tokenizer.decode(ids) for ids in written] == [item["answer"] for item in sft.results(tuned)["answers"]]


@pytest.mark.filterwarnings("ignore")  # theirs
def test_transformers_reads_the_merged_model(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="parity needs the optional extra `hf`")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tuned / "final", dtype=torch.float32)
    ours = build(hf.read_shape(tuned / "final"), compute=torch.float32)
    hf.load(tuned / "final", ours)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
