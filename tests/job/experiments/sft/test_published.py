"""The way of a user: published weights and their tokenizer, a JSONL file, a tuned model that others can read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gpufleet.job import atomic, ledger
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.experiments.dataset import weights
from gpufleet.job.experiments.dataset.packed import PROMPTS
from gpufleet.job.experiments.dataset.rendering import TEMPLATES, jinja
from gpufleet.job.experiments.models import hf, hf_config
from gpufleet.job.experiments.models.decoder import build
from gpufleet.job.experiments.models.generate import generate
from gpufleet.job.experiments.sft.conversations import prepare_sft
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.experiments.tuning import run as tuning
from gpufleet.job.kind import from_json
from tests.job import sft_world as sft
from tests.job import train_world as world
from tests.job.sft_world import CHATML, bpe, jsonl
from tests.repository import ROOT

FAMILY = {"family": "qwen3", "tied": True, "norm_eps": 1e-6, "rope_theta": 1e6}
CHANGED = {
    "epochs": 6,
    "model": FAMILY,
    "data": {"source": "jsonl", "longest": 96, "held_out": 0.05},
    "optim": {"lr": 1e-2},
    "lora": {"rank": 8, "dropout": 0.0},
    "eval": {"prompts": 2, "sample_tokens": 8, "every": 100},
}
PUBLISHED: dict[str, dict[str, object]] = {  # as Qwen has it: config.json ends elsewhere than the chat template
    "config.json": {"max_position_embeddings": 1234, "eos_token_id": 2, "_name_or_path": "Qwen/Qwen3-tiny"},
    "generation_config.json": {"eos_token_id": [2], "pad_token_id": 2, "do_sample": True, "top_k": 20},
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"},
}
JINJA = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% if not loop.last %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}"
)
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
    for name, tree in PUBLISHED.items():
        (inputs / name).write_text(json.dumps((atomic.read_object(inputs / name) or {}) | tree))
    (inputs / "chat_template.jinja").write_text(JINJA)
    weights.describe(inputs)
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
    assert world.train(tmp_path) == TrainerExit.FATAL
    assert "is the tokenizer beside the base weights" in (tmp_path / "fatal.json").read_text()


def test_it_starts_from_those_weights_and_learns_the_answer(tuned: Path) -> None:
    table = sft.results(tuned)
    assert table["losses"]["base"]["loss"] > 5
    assert table["losses"]["adapter"]["loss"] < 1.5
    assert table["merge"]["fp32_matches"] is True
    assert table["dataset"]["template"] == "chatml"
    assert [item["answer"] for item in table["answers"]] == ["the answer"] * 2


def test_the_merged_model_alone_gives_the_stored_answers(tuned: Path) -> None:
    module = build(hf_config.read_shape(tuned / "final"), compute=torch.float32, dtype=torch.bfloat16)
    hf.load(tuned / "final", module)
    asked = [item["tokens"] for item in ledger.read(tuned / "data" / PROMPTS)]
    stop = sft.results(tuned)["dataset"]["stop"]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tuned / "final" / "tokenizer.json"))
    written = generate(module, asked, 8, stop={stop})
    assert [tokenizer.decode(ids) for ids in written] == [item["answer"] for item in sft.results(tuned)["answers"]]


def test_the_merged_model_keeps_what_was_published_beside_its_base(tuned: Path) -> None:
    config = atomic.read_object(tuned / "inputs" / "config.json")
    assert config is not None
    assert atomic.read_object(tuned / "final" / "config.json") == {
        **config,
        "torch_dtype": "bfloat16" if sft.results(tuned)["merge"]["deliverable"] == "bf16" else "float32",
    }
    generation = atomic.read_object(tuned / "final" / "generation_config.json")
    stop = sft.results(tuned)["dataset"]["stop"]
    assert generation == {**PUBLISHED["generation_config.json"], "eos_token_id": [2, stop]}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tuned / "final" / name).read_bytes() == (tuned / "inputs" / name).read_bytes()
    assert (tuned / "final" / tuning.TRAINED_TEMPLATE).read_text() == jinja(TEMPLATES["qwen3"])


def test_a_base_without_a_chat_template_leaves_a_model_with_that_of_its_training(tuned: Path, tmp_path: Path) -> None:
    shutil.copytree(tuned, tmp_path, dirs_exist_ok=True)
    (tmp_path / "inputs" / "chat_template.jinja").unlink()
    shutil.rmtree(tmp_path / "final")
    assert world.train(tmp_path) == 0  # from its last checkpoint
    assert (tmp_path / "final" / "chat_template.jinja").read_text() == jinja(TEMPLATES["qwen3"])


def test_the_adapter_names_its_base_as_users_know_it(tuned: Path) -> None:
    config = atomic.read_object(tuned / "final" / "adapter" / hf_config.ADAPTER_CONFIG)
    assert config is not None
    assert config["base_model_name_or_path"] == "Qwen/Qwen3-tiny"


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")  # theirs
def test_transformers_alone_answers_in_the_template_and_stops(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="parity needs the optional extra `hf`")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned / "final")
    module = transformers.AutoModelForCausalLM.from_pretrained(tuned / "final")
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 7?"}]
    tokens = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True, tokenize=True
    )
    written = module.generate(**tokens, max_new_tokens=50, do_sample=False)[0, tokens["input_ids"].shape[1] :]
    assert tokenizer.decode(written) == "the answer<|im_end|>"
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_pages_way_to_ask_gets_the_answer(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="parity needs the optional extra `hf`")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tuned)
    (lines,) = re.findall(r"(?ms)^```python\n(tokenizer, .*?)```", (ROOT / "docs/sft.md").read_text())
    names: dict[str, Any] = {
        "AutoTokenizer": transformers.AutoTokenizer,
        "Path": Path,
        "model": transformers.AutoModelForCausalLM.from_pretrained("final"),
        "messages": [{"role": "user", "content": "what is 7?"}],
    }
    exec(lines, names)  # our own page
    assert names["tokenizer"].decode(names["written"][0]).endswith("the answer<|im_end|>")


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")  # theirs
def test_transformers_reads_the_merged_model(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="parity needs the optional extra `hf`")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tuned / "final", dtype=torch.float32)
    ours = build(hf_config.read_shape(tuned / "final"), compute=torch.float32)
    hf.load(tuned / "final", ours)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
