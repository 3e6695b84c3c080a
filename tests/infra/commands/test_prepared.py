"""Differences between local folders and the file's settings are reported before a node is paid for."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.inputs.prepare import prepared
from gpufleet.infra.inputs.readiness import not_ready
from gpufleet.job.experiments.dataset import weights
from gpufleet.job.experiments.models import hf_config
from gpufleet.job.experiments.models.config import DecoderConfig
from gpufleet.job.experiments.sft.spec import SftConfig
from tests.repository import ROOT

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SHIPPED = ROOT / "stacks"


def project(folder: Path, stack: str, **smaller: str) -> Path:
    """Writes a stack's rehearsal as its own stack; returns the file."""
    (folder / "stacks").mkdir()
    file = folder / "stacks" / f"{stack}.yaml"
    file.write_text(rehearsal_text(SHIPPED / f"{stack}.yaml"))
    for old, new in smaller.items():
        edit(file, old, new)
    return file


def edit(file: Path, key: str, new: str) -> None:
    """Changes the value of `key`, which occurs once in the file."""
    lines = file.read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.strip().startswith(f"{key}:")]
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines[at] = f"{indent}{key}: {new}"
    file.write_text("\n".join(lines) + "\n")


def said(file: Path, root: Path) -> list[str]:
    """The problems of the stack, without those about pins."""
    return [line for line in not_ready(load(file, now=NOW), root) if line.startswith("storage.")]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chats")
    file = project(root, "sft-h100", examples="40")
    prepared(load(file, now=NOW), root)
    return root


@pytest.mark.parametrize(
    ("key", "new", "words"),
    [
        ("row", "256", "was prepared with data.row 128, the file says 256"),
        ("held_out", "0.05\n      loss_on: all", "was prepared with data.loss_on response, the file says all"),
        ("held_out", "0.5", "was prepared with 2 examples held out, data.held_out in the file says 20"),
        ("family", "qwen3", "was prepared with the chat template llama-3, the file says chatml"),
        ("vocab", "64", "ids, but model.vocab is 64: raise it to "),
    ],
)
def test_rows_of_other_settings_are_said(chats: Path, tmp_path: Path, key: str, new: str, words: str) -> None:
    root = shutil.copytree(chats, tmp_path / "project")
    file = root / "stacks" / "sft-h100.yaml"
    assert said(file, root) == []
    if key == "family":
        key, new = "rope_scaling", "none\n      family: qwen3"
    edit(file, key, new)
    (sentence,) = said(file, root)
    assert sentence.startswith("storage.dataset, data/generated-pairs, ")
    assert words in sentence
    assert sentence.endswith(": run `gpufleet prepare sft-h100`.")


def test_another_share_of_the_characters_to_hold_out_is_said(tmp_path: Path) -> None:
    file = project(tmp_path, "pretrain-d64")
    prepared(load(file, now=NOW), tmp_path)
    assert said(file, tmp_path) == []
    edit(file, "sequence", "64\n      held_out: 0.2")
    (sentence,) = said(file, tmp_path)
    assert "was prepared with data.held_out 0.05, the file says 0.2: run `gpufleet prepare pretrain-d64`." in sentence


def test_epochs_in_which_a_curriculum_would_never_act_are_said(tmp_path: Path) -> None:
    file = project(tmp_path, "kernel-sft")
    edit(file, "row", "1024\n      curriculum: on")
    edit(file, "epochs", "2")
    prepared(load(file, now=NOW), tmp_path)
    assert said(file, tmp_path) == []
    edit(file, "tokens", "1048576")
    (sentence,) = said(file, tmp_path)
    assert "rows, of which 2 epochs are one step of 1024, and data.curriculum on acts between two" in sentence
    assert "lower batch.tokens" in sentence


def test_a_dataset_of_another_experiment_is_said(chats: Path, tmp_path: Path) -> None:
    file = project(tmp_path, "tinystories-growth")
    shutil.copytree(chats / "data" / "generated-pairs", tmp_path / "data" / "generated-stories")
    (sentence,) = said(file, tmp_path)
    assert "is a dataset of packed, but tinystories-growth needs windows: run `gpufleet prepare" in sentence


def test_more_ids_than_the_model_has_are_said(tmp_path: Path) -> None:
    file = project(tmp_path, "tinystories-growth", stories="100")
    (tmp_path / "mine.txt").write_text("\n\n".join(f"Story {n}, and some more of it." for n in range(400)))
    prepared(load(file, now=NOW), tmp_path, text=tmp_path / "mine.txt")
    assert said(file, tmp_path) == []
    edit(file, "vocab", "128")
    assert "has 257 ids, but model.vocab is 128: raise it to 257 or more" in said(file, tmp_path)[0]
    edit(file, "vocab", "300")
    edit(file, "sequence", "4096")
    assert "for validation (1 % of the stories), data.sequence 4096 needs at least 4097" in said(file, tmp_path)[0]


def test_base_weights_and_their_tokenizer_are_held_against_the_file(chats: Path, tmp_path: Path) -> None:
    root = shutil.copytree(chats, tmp_path / "project")
    file = root / "stacks" / "sft-h100.yaml"
    edit(file, "base_weights", "data/base")
    config = load(file, now=NOW).job.parameters
    assert isinstance(config, SftConfig)
    folder = root / "data" / "base"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"not looked at")
    (folder / "tokenizer.json").write_text("{}")
    assert isinstance(config.model, DecoderConfig)
    (folder / "config.json").write_text(json.dumps(hf_config.config_tree(config.model, "bfloat16")))
    assert said(file, root) == [
        "storage.base_weights, data/base, are not listed in weights.json: run `gpufleet prepare sft-h100`."
    ]
    weights.describe(folder)
    assert said(file, root) == []  # generated pairs bring their own words
    edit(file, "layers", "4")
    assert said(file, root) == [
        "storage.base_weights, data/base, are of another model: model.layers 2, the file says 4. Make"
        " job.parameters.model agree, or name other weights."
    ]
    edit(file, "layers", "2")
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"hidden_act": "gelu"}))
    weights.describe(folder)
    assert "hidden_act 'gelu' is not silu" in said(file, root)[0]
    (folder / "config.json").write_text(json.dumps(tree))
    weights.describe(folder)
    edit(file, "source", "jsonl")
    (sentence,) = said(file, root)
    assert "is the tokenizer.json of storage.base_weights: run `gpufleet prepare sft-h100 FILE.jsonl`." in sentence
