"""Pairs of programs as packed rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufleet.job.experiments.dataset.packing import PackedRows
from gpufleet.job.experiments.dataset.rendering import TEMPLATES
from gpufleet.job.experiments.kernel.judge import planted, rules
from gpufleet.job.experiments.kernel.judge.catalog import TASKS
from gpufleet.job.experiments.kernel.pairs import GeneratedKernels, PairsFile, admitted, byte_tokenizer, prepare_kernels
from tests.job import kernel_world as world


def written(folder: Path, *pairs: object) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(pair if isinstance(pair, str) else json.dumps(pair) for pair in pairs) + "\n")
    return path


def test_generated_answers_are_programs_that_the_rules_allow() -> None:
    pairs = list(GeneratedKernels(64, seed=1).conversations())
    assert len(pairs) == 64
    assert [rules.problem(answer.text) for _, answer in pairs] == [None] * 64
    assert {question.text for question, _ in pairs} == {task.prompt for task in TASKS}
    assert list(GeneratedKernels(64, seed=1).conversations()) == pairs
    assert list(GeneratedKernels(64, seed=2).conversations()) != pairs


def test_bytes_are_read_back_as_they_were() -> None:
    tokenizer = byte_tokenizer(TEMPLATES["qwen3"])
    text = "def f(x):\n\treturn 'é' + \"\\n\"  # <|im_end|>\n"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())  # what looks like a special token is plain text
    assert tokenizer.vocab == 258
    assert tokenizer.special("<|im_end|>") >= 256
    assert byte_tokenizer(TEMPLATES["qwen3"]).id == tokenizer.id


def test_the_loss_counts_the_answer_and_nothing_else(tmp_path: Path) -> None:
    manifest = prepare_kernels(tmp_path / "data", world.typed())
    rows, tokenizer = PackedRows(tmp_path / "data", manifest, "train"), byte_tokenizer(TEMPLATES["qwen3"])
    for tokens, marks in zip(rows.tokens, rows.marks, strict=True):
        counted = tokenizer.decode([int(token) for token, mark in zip(tokens, marks, strict=True) if mark & 1])
        assert counted.startswith("import torch")
        assert counted.endswith("return out\n")
    assert manifest.facts["examples"] == 11  # one of twelve is held out


def test_the_file_gives_as_many_pairs_as_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, *({"prompt": f"p{i}", "answer": f"a{i}", "level": 1} for i in range(50)), "")
    chosen = [question.text for question, _ in PairsFile(path, 10, seed=1).conversations()]
    assert len(chosen) == 10
    assert chosen == sorted(chosen, key=lambda name: int(name[1:]))
    assert chosen != [question.text for question, _ in PairsFile(path, 10, seed=2).conversations()]
    assert len(list(PairsFile(path, 100, seed=1).conversations())) == 50
    assert PairsFile(path, 10, seed=1).name != PairsFile(path, 11, seed=1).name


def test_every_line_that_is_no_pair_is_named(tmp_path: Path) -> None:
    path = written(
        tmp_path, {"prompt": "p", "answer": "a"}, {"prompt": "p"}, "{", [1], {"prompt": "\ud83d", "answer": "a"}
    )
    with pytest.raises(
        ValueError,
        match=r":2: answer: missing; it has prompt\n.*:3: not JSON .*\n.*:4: not an object.*\n.*:5: prompt: .ud83d at",
    ):
        list(PairsFile(path, 10, seed=1).conversations())
    with pytest.raises(ValueError, match=":1: prompt: ' ' is not a text, or empty"):
        list(PairsFile(written(tmp_path, {"prompt": " ", "answer": "a"}), 10, seed=1).conversations())
    array = tmp_path / "array.json"
    array.write_text(json.dumps([{"prompt": "p", "answer": "a"}] * 3, indent=1))
    with pytest.raises(
        ValueError, match=r"this is a JSON array; write one object per line: `jq -c '\.\[\]' array\.json"
    ):
        list(PairsFile(array, 10, seed=1).conversations())
    array.write_bytes('{"prompt": "é", "answer": "a"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r":1: not UTF-8 \(byte 12\); convert the file first"):
        list(PairsFile(array, 10, seed=1).conversations())
    with pytest.raises(ValueError, match="empty; give one JSON object"):
        list(PairsFile(written(tmp_path, ""), 10, seed=1).conversations())


def test_a_file_and_its_tokenizer_are_asked_for(tmp_path: Path) -> None:
    asked = world.typed(data={"source": "jsonl"})
    with pytest.raises(ValueError, match="name the file"):
        prepare_kernels(tmp_path / "data", asked)
    path = written(tmp_path, {"prompt": "p", "answer": "a"})
    with pytest.raises(ValueError, match="no tokenizer"):
        prepare_kernels(tmp_path / "data", asked, text=path)
    with pytest.raises(ValueError, match="cannot be read"):
        prepare_kernels(tmp_path / "data", asked, text=tmp_path / "no", tokenizer=_tokenizer(tmp_path))


def test_a_file_of_pairs_becomes_rows(tmp_path: Path) -> None:
    pairs = [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(40)]
    asked = world.typed(data={"source": "jsonl", "samples": 40, "row": 256})
    path, tokenizer = written(tmp_path, *pairs), _tokenizer(tmp_path)
    manifest = prepare_kernels(tmp_path / "data", asked, text=path, tokenizer=tokenizer)
    assert (manifest.kind, manifest.facts["examples"], manifest.facts["row"]) == ("packed", 39, 256)
    assert manifest.facts["fill"] > 0.8


def test_a_curriculum_that_would_find_no_practice_is_refused_before_a_node_is_paid_for(tmp_path: Path) -> None:
    asked = world.typed(epochs=2, data={"source": "jsonl", "row": 2048, "curriculum": "on"})
    tokenizer = _tokenizer(tmp_path)
    strange = written(tmp_path, *({"prompt": f"sort list {i}", "answer": "a"} for i in range(9)))
    with pytest.raises(ValueError, match=r"pairs\.jsonl: .*curriculum is on, but no pair asks for one of the 2 tasks"):
        prepare_kernels(tmp_path / "data", asked, text=strange, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="cannot be read"):
        prepare_kernels(tmp_path / "data", asked, text=tmp_path / "no", tokenizer=tokenizer)
    plain = world.typed(epochs=2, data={"source": "jsonl", "row": 2048})
    assert prepare_kernels(tmp_path / "plain", plain, text=strange, tokenizer=tokenizer).kind == "packed"
    pairs = written(tmp_path, *({"prompt": TASKS[0].prompt, "answer": "a"} for _ in range(9)))
    assert prepare_kernels(tmp_path / "data", asked, text=pairs, tokenizer=tokenizer).kind == "packed"


def test_it_is_said_how_many_answers_the_rules_admit(tmp_path: Path) -> None:
    good, bad = planted.source(TASKS[0]), "import torch\n\n\ndef kernel_function(x):\n    return torch.relu(x)\n"
    fenced = f"Here:\n```python\n{good}\nif __name__ == '__main__':\n    print(1)\n```"
    asked = world.typed(data={"source": "jsonl", "samples": 40, "row": 2048})
    lines: list[str] = []
    for folder, texts in (("most", (good, fenced, bad)), ("few", (good, bad, bad))):
        pairs = [{"prompt": "p", "answer": text} for text in texts]
        (tmp_path / folder).mkdir()
        path = written(tmp_path / folder, *pairs)
        prepare_kernels(tmp_path / folder / "data", asked, text=path, tokenizer=_tokenizer(tmp_path), say=lines.append)
    assert [line for line in lines if "rules admit" in line] == [
        "2 of 3 answers are programs that the funnel's rules admit; most often refused: torch.relu (1)",
        "WARNING: 1 of 3 answers are programs that the funnel's rules admit; most often refused: torch.relu (2)",
    ]
    path = written(tmp_path, {"prompt": "p", "answer": "import triton"})
    assert admitted(PairsFile(path=path, samples=1, seed=1)).endswith("refused: there is no @triton.jit kernel (1)")


def _tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_bytes(byte_tokenizer(TEMPLATES["qwen3"]).files["tokenizer.json"])
    return path
