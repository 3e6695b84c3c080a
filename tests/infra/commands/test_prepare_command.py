"""`gpufleet prepare` makes the definition's dataset in the folder that the definition names."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from gpufleet.infra.bill import prediction
from gpufleet.infra.bill import project as known
from gpufleet.infra.bill.answer import headline
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.lines import weights_gb
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.cli import main
from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.evidence.observation import Observation
from gpufleet.infra.inputs import prepare as inputs
from gpufleet.infra.program.plan import make
from gpufleet.infra.program.run_guard import Previous
from gpufleet.job.contract.inputs import read_weights
from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.dataset.rendering import TEMPLATES
from gpufleet.job.experiments.kernel.pairs import byte_tokenizer
from gpufleet.job.experiments.models import hf_config
from gpufleet.job.experiments.models.config import DecoderConfig
from gpufleet.job.experiments.tuning.spec import parameters
from gpufleet.job.experiments.two_tower.folds import fold_of
from tests.repository import ROOT

STACK = "tinystories-growth"
SMALL: dict[str, Any] = {"vocab": 32, "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 8}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stacks").mkdir()
    shutil.copy(ROOT / "stacks" / f"{STACK}.yaml", tmp_path / "stacks")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_rehearsals_dataset_is_made_without_a_network(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", STACK, "--rehearsal"]) == 0
    manifest = read_manifest(project / "data" / "generated-stories")
    assert manifest.facts["stories"]["train"] == 1980
    assert "1,980 stories" in capsys.readouterr().out


def test_a_text_of_ones_own_becomes_the_dataset(project: Path) -> None:
    (project / "mine.txt").write_text("\n\n".join(f"Story {n}." for n in range(900)))
    assert main(["prepare", STACK, "mine.txt", "--rehearsal"]) == 0
    assert read_manifest(project / "data" / "generated-stories").facts["tokenizer"]["kind"] == "bytes"


OWN_DATA = {  # by stack: the arguments, a key that the rehearsal must have, and a change that needs other data
    "tinystories-growth": ("\n\n".join(f"Story {n}." for n in range(900)), "tinystories", "sequence", "500"),
    "pretrain-d64": ("1+1\n2\n\n" * 1000, "text", "sequence", "4000"),
    "sft-h100": ('{"instruction": "what is 2", "response": "2"}\n' * 9, "jsonl", "row", "256"),
}


def test_a_package_that_bills_do_without_is_named_with_how_it_comes(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    shutil.copy(ROOT / "stacks" / "kernel-sft.yaml", project / "stacks")
    assert main(["prepare", "kernel-sft", "--rehearsal"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gpufleet: this data needs a package that is missing (import of tokenizers")
    assert said.endswith("pip install 'gpufleet[job]'\n")


def test_a_rehearsal_that_shares_the_files_folder_does_not_replace_its_data(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "stacks" / "pretrain-d64.yaml").read_text().replace("data/generated-sums", "data/numbers")
    (project / "stacks" / "pretrain-d64.yaml").write_text(text)
    assert main(["prepare", "pretrain-d64", "--rehearsal"]) == 0
    assert main(["prepare", "pretrain-d64", "--rehearsal"]) == 0  # only the command's own data
    (project / "mine").write_text("1+1\n2\n\n" * 20_000)
    assert main(["prepare", "pretrain-d64", "mine"]) == 0
    made = read_manifest(project / "data" / "numbers")
    assert main(["prepare", "pretrain-d64", "--rehearsal"]) == 2
    assert "give `rehearsal` its own storage.dataset" in capsys.readouterr().err
    assert read_manifest(project / "data" / "numbers") == made


@pytest.mark.parametrize("stack", OWN_DATA)
def test_data_of_ones_own_are_named_once_and_stay_until_the_settings_want_others(
    project: Path, capsys: pytest.CaptureFixture[str], stack: str
) -> None:
    text, source, key, other = OWN_DATA[stack]
    file = project / "stacks" / f"{stack}.yaml"
    written = re.sub("source: generated-[a-z]+", f"source: {source}", rehearsal_text(ROOT / "stacks" / f"{stack}.yaml"))
    if source == "jsonl":
        written = written.replace("base_weights: null", "base_weights: s3://models/small")
    file.write_text(written)
    (project / "mine").write_text(text)
    (project / "tokenizer.json").write_bytes(byte_tokenizer(TEMPLATES["llama"]).files["tokenizer.json"])
    tokenizer = ["--tokenizer", "tokenizer.json"] if source == "jsonl" else []
    assert main(["prepare", stack, "mine", *tokenizer]) == 0
    folder = project / load(file, now=datetime.now(UTC)).storage.dataset
    made = read_manifest(folder)
    assert main(["prepare", stack]) == 0
    assert read_manifest(folder) == made
    assert "is prepared already" in capsys.readouterr().out
    file.write_text(re.sub(rf"\b{key}: \d+", f"{key}: {other}", written))
    assert main(["prepare", stack]) == 2
    assert f"prepare it again by `gpufleet prepare {stack} FILE" in capsys.readouterr().err
    assert read_manifest(folder) == made
    (folder / made.files[0].name).write_bytes(b"damaged")
    assert main(["prepare", stack]) == 2
    assert f"prepare the dataset again: `gpufleet prepare {stack} FILE" in capsys.readouterr().err


def test_it_is_said_how_often_counted_steps_read_a_small_text(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project / "stacks" / "pretrain-d64.yaml"
    file.write_text((ROOT / "stacks" / "pretrain-d64.yaml").read_text())
    (project / "mine").write_text("12+30\n42\n" * 40_000)
    assert main(["prepare", "pretrain-d64", "mine"]) == 0  # 5,000 steps of 524,288 characters, 342,000 to train on
    assert "warning: training reads each character about 7,665 times: job.parameters.steps" in capsys.readouterr().out
    config = load(file, now=datetime.now(UTC)).job.parameters
    plan = read_manifest(project / "data" / "numbers")
    many = replace(plan, facts=plan.facts | {"train_characters": 332_500_000})
    assert inputs.repeated(config, many).startswith("training reads each character about 8 times")
    assert inputs.repeated(config, replace(plan, facts={"train_characters": 2_000_000_000})) == ""


@pytest.mark.parametrize(("share", "code"), [(Decimal("1.05"), 0), (Decimal("0.9"), 2)])
def test_a_run_that_its_cap_may_cut_short_is_warned_of_and_one_that_it_will_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], share: Decimal, code: int
) -> None:
    file = project / "stacks" / "pretrain-d64.yaml"
    text = (ROOT / "stacks" / "pretrain-d64.yaml").read_text()
    file.write_text(text)
    (project / "mine").write_text("12+30\n42\n" * 40_000)
    bill = price(load(file, now=datetime.now(UTC)), load_catalog(project))
    cap = round(bill.chosen.metered_usd.p50 * share, 2)
    file.write_text(text.replace("max_usd: 1000", f"max_usd: {cap}"))
    assert main(["prepare", "pretrain-d64", "mine"]) == code
    said = capsys.readouterr()
    assert ("warning: limits.max_usd" in said.out) == (code == 0)
    assert ("limits.max_usd" in said.err) == (code == 2)
    assert read_manifest(project / "data" / "numbers")


def test_a_text_that_is_not_utf8_ends_with_code_2(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine.txt").write_bytes(b"\xff\xfe")
    assert main(["prepare", STACK, "--rehearsal", "mine.txt"]) == 2  # the lines may come in any order
    assert "gpufleet: mine.txt: not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("stack", ["pretrain-d64", "two-tower"])
def test_a_tokenizer_for_what_takes_none_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], stack: str
) -> None:
    (project / "stacks" / f"{stack}.yaml").write_text((ROOT / "stacks" / f"{stack}.yaml").read_text())
    assert main(["prepare", stack, "mine", "--tokenizer", "tokenizer.json"]) == 2
    assert f"{stack} takes no tokenizer: leave out --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("judged", "code", "said"),
    [
        (range(8), 0, ""),
        (range(6), 0, "warning: no query of fold 3 has a label 1 or 2: the model that watches"),
        (range(1), 2, "gpufleet: labels.csv: none of 4 queries that the honest model of fold"),
    ],
)
def test_folds_without_a_relevant_model_are_said_before_a_node_is_paid_for(
    project: Path, capsys: pytest.CaptureFixture[str], judged: range, code: int, said: str
) -> None:
    """`judged`: the number of queries with a relevant model in each fold."""
    tree = yaml.safe_load(rehearsal_text(ROOT / "stacks" / "two-tower.yaml"))
    tree["job"]["parameters"]["data"] = {"queries": 8, "models": 2, "folds": 4}
    (project / "stacks" / "two-tower.yaml").write_text(yaml.safe_dump(tree))
    order = np.argsort(fold_of(8, 4, seed=42), kind="stable")
    (project / "mine").mkdir()
    lines = [json.dumps({"id": n, "text": f"query {n}"}) + "\n" for n in range(8)]
    (project / "mine" / "queries.jsonl").write_text("".join(lines))
    rows = [f"{query},a,{int(place in judged)}\n{query},b,0\n" for place, query in enumerate(order)]
    (project / "mine" / "labels.csv").write_text("query,model,label\n" + "".join(rows))
    assert main(["prepare", "two-tower", "mine"]) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert bool(said) == ("label 1 or 2" in printed.out + printed.err)


def test_a_dataset_in_s3_is_prepared_already(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project / "stacks" / f"{STACK}.yaml"
    file.write_text(file.read_text().replace("dataset: data/tinystories", "dataset: s3://bucket/stories"))
    assert main(["prepare", STACK]) == 2
    assert "storage.dataset is s3://bucket/stories" in capsys.readouterr().err


def test_what_it_predicts_is_what_the_bill_says_with_all_that_the_project_knows(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = Observation(type="g5.2xlarge", zone=None, node_hours=1e6, interruptions=0, source="planted", as_of=None)
    monkeypatch.setattr(known, "observations", lambda root, but=(): [calm])
    definition = load(project / "stacks" / f"{STACK}.yaml", now=datetime.now(UTC))
    prediction.predict(definition, project, datetime.now(UTC), print)
    said = capsys.readouterr().out
    known_bill = known.bill_of(definition, project, load_catalog())
    told = known_bill.chosen
    assert " ".join(said.split()).startswith(f"{STACK}: {headline(known_bill)} The whole bill: ")
    alone = price(definition, load_catalog()).chosen
    assert (
        alone.interruptions.mean > 3 * told.interruptions.mean / 2
    )  # without the project's measurements the bill differs
    assert alone.needed_hours.p90 != told.needed_hours.p90
    assert headline(price(definition, load_catalog())) not in " ".join(said.split())


@pytest.fixture
def tuning(project: Path) -> Path:
    """A project with a small sft-h100 and twenty examples; its base weights are not there."""
    text = (ROOT / "stacks" / "sft-h100.yaml").read_text()
    small = ", ".join(f"{key}: {value}" for key, value in SMALL.items())
    (project / "stacks" / "sft-h100.yaml").write_text(text.replace("method: lora", f"model: {{{small}}}", 1))
    lines = [json.dumps({"instruction": f"what is {i}", "response": "a number"}) for i in range(20)]
    (project / "examples.jsonl").write_text("\n".join(lines) + "\n")
    return project


def test_missing_base_weights_are_said_before_anything_is_tokenised(
    tuning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", "sft-h100", "examples.jsonl"]) == 2
    assert "llama-3.1-8b-instruct: no such folder; download the base weights" in capsys.readouterr().err
    assert not (tuning / "data").exists()


def published(project: Path, **changed: int) -> Path:
    """The folder of base weights, with the files that are read before a node gets it."""
    folder = project / "data" / "llama-3.1-8b-instruct"
    folder.mkdir(parents=True)
    shape = DecoderConfig(**SMALL | changed)
    tensors = {name: np.ones(size, np.float16) for name, size in hf_config.tensors(shape).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config.config_tree(shape, "bfloat16")))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_other_base_weights_than_the_experiments_are_said_before_anything_is_tokenised(
    tuning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published(tuning, width=24)
    assert main(["prepare", "sft-h100", "examples.jsonl"]) == 2
    assert "another model than the run config: model.width is 16, there 24" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(hf_config.config_tree(DecoderConfig(**SMALL), "bfloat16")))
    assert main(["prepare", "sft-h100", "examples.jsonl"]) == 2
    assert "lm_head.weight is [32, 24], the model needs [32, 16]" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs")
    assert main(["prepare", "sft-h100", "examples.jsonl"]) == 2
    assert "not a safetensors file that the library can open" in capsys.readouterr().err
    assert not (tuning / "data" / "sft").exists()


def test_base_weights_are_listed_for_the_upload_and_what_is_left_out_is_said(
    tuning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tuning / "stacks" / "sft-h100.yaml"
    file.write_text(file.read_text().replace("vocab: 32", "vocab: 512"))
    folder = published(tuning, vocab=512)
    (folder / "tokenizer.json").write_bytes(byte_tokenizer(TEMPLATES["llama"]).files["tokenizer.json"])
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.pth").touch()
    assert main(["prepare", "sft-h100", "examples.jsonl"]) == 0
    needed = ["config.json", "model.safetensors", "tokenizer.json", "weights.json"]
    assert sorted(each.name for each in read_weights(folder).files) == needed
    assert "not needed and left out: original/, 0.00 GB" in capsys.readouterr().out


def test_what_is_odd_about_base_weights_is_said_again_where_the_data_is_prepared_already(
    tuning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tuning / "stacks" / "sft-h100.yaml"
    file.write_text(file.read_text().replace("vocab: 32", "vocab: 512"))
    folder = published(tuning, vocab=512)  # all rows of the weights' tables are equal
    (folder / "tokenizer.json").write_bytes(byte_tokenizer(TEMPLATES["llama"]).files["tokenizer.json"])
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"max_position_embeddings": 512}))
    for again in (["examples.jsonl"], []):
        assert main(["prepare", "sft-h100", *again]) == 0
        said = capsys.readouterr().out
        assert "rows of the chat template's tokens look untrained" in said
        assert "made for 512 positions (max_position_embeddings), but examples may have 1,024" in said


@pytest.mark.parametrize(
    ("name", "content", "warned"),
    [
        ("chat_template.jinja", "{{ m.role }} {{ m.content }}<|im_end|>", True),  # Hermes-3's, of Llama's family
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": "<|im_end|>"}]}', True),
        ("tokenizer_config.json", '{"chat_template": "{{ m.content }}<|eot_id|>"}', False),
        ("tokenizer_config.json", "{}", False),
    ],
)
def test_base_weights_that_were_tuned_on_other_turns_are_warned_of(
    name: str, content: str, warned: bool, tuning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (published(tuning) / name).write_text(content)
    assert main(["prepare", "sft-h100", "examples.jsonl"]) == 2  # the file beside these weights is no tokenizer
    assert ("never writes <|eot_id|>, which closes a turn of llama-3" in capsys.readouterr().out) is warned


def test_a_tokenizer_that_is_not_the_base_weights_own_is_refused(
    tuning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(tuning)
    (tuning / "small.json").write_text("[]")
    assert main(["prepare", "sft-h100", "examples.jsonl", "--tokenizer", "small.json"]) == 2
    assert "the tokenizer of the base weights; leave out --tokenizer" in capsys.readouterr().err
    assert not (tuning / "data" / "sft").exists()


@pytest.fixture
def judged(tuning: Path) -> Path:
    """The same project with a judge among its inputs, which is complete."""
    file = tuning / "stacks" / "sft-h100.yaml"
    text = file.read_text().replace("vocab: 32", "vocab: 512")
    text = text.replace("    epochs: 3\n", "    epochs: 3\n    eval: {judge: open, judge_parameters: 17584}\n", 1)
    file.write_text(text.replace("  root:\n", "  inputs: {open: data/judge}\n  root:\n", 1))
    folder, tokenizer = published(tuning, vocab=512), byte_tokenizer(TEMPLATES["llama"]).files["tokenizer.json"]
    (folder / "tokenizer.json").write_bytes(tokenizer)
    shutil.copytree(folder, tuning / "data" / "judge")
    return tuning


def test_a_judge_is_hashed_as_an_input_and_listed_for_the_nodes(
    judged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", "sft-h100", "examples.jsonl"]) == 0
    assert "open: 3 files" in capsys.readouterr().out
    previous = Previous(outputs={})
    plan = make(judged, "sft-h100", now=datetime.now(UTC), previous=previous, preview=True)
    folders = json.loads(plan.run_config)["inputs"]["folders"]
    assert [file["name"] for file in folders["open"]["files"]] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert plan.verdict.run.dataset.split()[1:] == [plan.inputs["open"].sha256]  # another judge needs another run.id


def test_a_judge_that_a_node_would_refuse_is_refused_before_anything_is_tokenised(
    judged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (("tokenizer.json", "cannot be read"), ("config.json", "missing or not JSON")):
        (judged / "data" / "judge" / name).unlink()
        assert main(["prepare", "sft-h100", "examples.jsonl"]) == 2
        assert words in capsys.readouterr().err
    assert not (judged / "data" / "sft").exists()


def test_the_bill_stores_a_local_judge_and_has_its_phase(judged: Path) -> None:
    definition = load(judged / "stacks" / "sft-h100.yaml", now=datetime.now(UTC))
    assert weights_gb(definition) * 1e9 == pytest.approx(
        2 * (parameters(DecoderConfig(**SMALL | {"vocab": 512})) + 17584)
    )
    assert [fit.phase for fit in price(definition, load_catalog()).fits] == ["train", "merge", "judge"]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            "{open: data/judge, more: data/x}",
            "storage.inputs.more: 'more' is not accepted; allowed: only what eval.judge",
        ),
        (
            "{other: data/judge}",
            "job.parameters.eval.judge: 'open' is not accepted; allowed: an input of storage.inputs",
        ),
    ],
)
def test_inputs_of_a_ready_made_job_are_those_that_its_parameters_name(inputs: str, words: str, judged: Path) -> None:
    file = judged / "stacks" / "sft-h100.yaml"
    file.write_text(file.read_text().replace("{open: data/judge}", inputs))
    with pytest.raises(DefinitionError, match=re.escape(words)):
        load(file, now=datetime.now(UTC))
