"""Text becomes shards the same way every time, whole or not at all, and what is wrong with it is said."""

from __future__ import annotations

import bz2
import hashlib
import json
from array import array
from pathlib import Path

import pytest
import tokenizers

from gpufleet.job.contract.inputs import verify
from gpufleet.job.experiments.dataset import prepare, sources
from gpufleet.job.experiments.dataset.prepare import existing_dataset, read_manifest
from gpufleet.job.experiments.dataset.shards import HEADER, read_header
from gpufleet.job.experiments.dataset.sources import Generated, TextFile, TextTokenizer
from gpufleet.job.experiments.dataset.tokenizer import Bytes, Words, open_tokenizer

STORIES = [f"Story number {n}. It ends well." for n in range(150)]


@pytest.fixture
def said() -> list[str]:
    return []


def text_file(tmp_path: Path, content: bytes, said: list[str] | None = None, vocab: int = 300) -> TextFile:
    path = tmp_path / "stories.txt"
    path.write_bytes(content)
    say = list[str]().append if said is None else said.append
    return TextFile(path=path, text_tokenizer=TextTokenizer(model_vocab=vocab, cache=tmp_path / "cache", say=say))


def tokens(folder: Path, name: str) -> list[int]:
    header = read_header(folder / name)
    flat = array("H" if header.token_bytes == 2 else "I", (folder / name).read_bytes()[HEADER.size :])
    assert hashlib.sha256(flat.tobytes()).hexdigest() == header.sha256
    return flat.tolist()


@pytest.mark.parametrize("separator", ["\n\n", "\n \t\n\n", "<|endoftext|>", "\n<|endoftext|>\n"])
def test_a_text_becomes_stories_by_blank_line_or_end_of_text(separator: str, tmp_path: Path) -> None:
    source = text_file(tmp_path, separator.join(STORIES).encode())
    manifest = prepare.prepare(tmp_path / "set", source, model_vocab=300)
    assert manifest.facts["stories"] == {"train": 148, "validation": 2}
    held_out = tokens(tmp_path / "set", "validation_00000.bin")
    assert held_out == [*STORIES[148].encode(), 256, *STORIES[149].encode(), 256]


def test_blank_lines_inside_a_story_do_not_end_it_where_end_of_text_does() -> None:
    assert sources.split("One.\n\nStill one.<|endoftext|>\nTwo.\n<|endoftext|>") == ["One.\n\nStill one.", "Two."]


def test_the_same_text_gives_the_same_bytes_anywhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        prepare.prepare(tmp_path / name / "set", Generated(count=100, seed=3), model_vocab=300)
    assert read_manifest(tmp_path / "a" / "set") == read_manifest(tmp_path / "b" / "set")


def test_the_manifest_lists_every_file_with_its_hash_itself_too(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    manifest = prepare.prepare(folder, Generated(count=100, seed=3), model_vocab=300)
    assert {file.name for file in manifest.files} == {path.name for path in folder.iterdir()}
    for file in manifest.files:
        content = (folder / file.name).read_bytes()
        assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert manifest.sha256 == hashlib.sha256((folder / "dataset.json").read_bytes()).hexdigest()


def test_the_rehearsals_stories_are_small_and_their_words_fit_its_model(tmp_path: Path) -> None:
    manifest = prepare.prepare(tmp_path / "set", Generated(count=2000, seed=1337), model_vocab=512)
    facts = manifest.facts
    assert (facts["tokenizer"]["kind"], facts["stories"]) == ("words", {"train": 1980, "validation": 20})
    assert 55_000 < sum(facts["tokens"].values()) < 75_000
    tokenizer = open_tokenizer("words", tmp_path / "set")
    for prompt in ("Once upon a time", "The little girl", "One day, a dog"):
        assert tokenizer.decode(tokenizer.encode(prompt)) == prompt


def test_preparing_twice_writes_once(tmp_path: Path, said: list[str]) -> None:
    folder = tmp_path / "set"
    prepare.prepare(folder, Generated(count=100, seed=3), model_vocab=300)
    before = folder.stat().st_ino
    prepare.prepare(folder, Generated(count=100, seed=3), model_vocab=300, say=said.append)
    assert folder.stat().st_ino == before
    assert "prepared already" in said[0]


def test_another_source_replaces_the_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    first = prepare.prepare(folder, Generated(count=100, seed=3), model_vocab=300)
    second = prepare.prepare(folder, Generated(count=100, seed=4), model_vocab=300)
    assert first.sha256 != second.sha256
    assert read_manifest(folder) == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


def test_a_damaged_dataset_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    manifest = prepare.prepare(folder, Generated(count=100, seed=3), model_vocab=300)
    shard = folder / "train_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\xff\xff")
    with pytest.raises(ValueError, match=r"train_00000\.bin: not the file"):
        verify(folder, manifest)
    prepare.prepare(folder, Generated(count=100, seed=3), model_vocab=300)
    verify(folder, manifest)


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="exists and is not a prepared dataset"):
        prepare.prepare(folder, Generated(count=100, seed=3), model_vocab=300)
    assert (folder / "thesis.tex").read_text() == "x"


def test_what_somebody_put_beside_a_dataset_is_never_replaced_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    prepare.prepare(folder, Generated(count=100, seed=3), model_vocab=300)
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("x")
    (folder / ".DS_Store").write_text("")
    with pytest.raises(ValueError, match=r"holds notes/mine\.txt besides the dataset.*move it away"):
        prepare.prepare(folder, Generated(count=100, seed=4), model_vocab=300)
    (folder / "dataset.json").write_text("{")
    with pytest.raises(ValueError, match=r"dataset\.json"):
        prepare.prepare(folder, Generated(count=100, seed=4), model_vocab=300)
    assert (folder / "notes" / "mine.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty; give a text with stories"),
        (b" \n\n\t\n", "empty; give a text with stories"),
        (bz2.compress(b"a story") + b"\xff", r"it is compressed; unpack it first: bunzip2"),
        (
            bz2.compress(b"a story").decode("latin-1").encode(),
            r"characters \d+ do not occur in texts: was it compressed",
        ),
        ("Füchse".encode("latin-1"), r"not UTF-8 \(byte 1\); convert the file first.* iconv -f LATIN1 "),
        (b"\x1f\x8b\x08\x00", r"not UTF-8 \(byte 1\); it is compressed; unpack it first: gunzip"),
        (b"Only one story.", "stories.txt: 1 story; at least 2 are needed"),
    ],
)
def test_a_text_that_cannot_be_used_says_why(content: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        prepare.prepare(tmp_path / "set", text_file(tmp_path, content), model_vocab=300)
    assert not (tmp_path / "set").exists()


def test_a_text_as_windows_writes_it_gives_the_same_stories(tmp_path: Path) -> None:
    plain = text_file(tmp_path, b"One day\na dog.\n\nOne cat.\n").stories()
    assert text_file(tmp_path, b"\xef\xbb\xbfOne day\r\na dog.\r\n\r\nOne cat.\r\n").stories() == plain


def test_a_missing_text_says_so(tmp_path: Path) -> None:
    source = TextFile(path=tmp_path / "nowhere.txt", text_tokenizer=TextTokenizer(model_vocab=300, cache=tmp_path))
    with pytest.raises(ValueError, match=r"nowhere\.txt: cannot be read"):
        prepare.prepare(tmp_path / "set", source, model_vocab=300)


def test_a_vocabulary_larger_than_the_models_says_what_to_change(tmp_path: Path) -> None:
    source = text_file(tmp_path, "\n\n".join(STORIES).encode(), vocab=100)
    with pytest.raises(
        ValueError, match=r"257 ids, the model's vocabulary .* is 100: raise model.vocab to at least 257"
    ):
        prepare.prepare(tmp_path / "set", source, model_vocab=100)


def test_a_small_model_gets_bytes_and_is_told_why(tmp_path: Path, said: list[str]) -> None:
    source = text_file(tmp_path, "\n\n".join(STORIES).encode(), said)
    assert prepare.prepare(tmp_path / "set", source, model_vocab=300).facts["tokenizer"]["kind"] == "bytes"
    assert said == ["tokenizer: bytes, 257 ids, because the model's vocabulary, 300, is below GPT-2's 50257"]


def test_gpt2s_file_given_by_hand_travels_with_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    words = ["<|endoftext|>", "[UNK]", *sorted({word for story in STORIES for word in story.split()})]
    monkeypatch.setattr("gpufleet.job.experiments.dataset.tokenizer.GPT2_VOCAB", len(words))
    bpe = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "stories.txt").write_text("\n\n".join(STORIES))
    chosen = TextTokenizer(model_vocab=300, cache=tmp_path, file=tmp_path / "tokenizer.json", say=said.append)
    source = TextFile(path=tmp_path / "stories.txt", text_tokenizer=chosen)
    manifest = prepare.prepare(tmp_path / "set", source, model_vocab=300)
    assert manifest.facts["tokenizer"]["kind"] == "gpt2"
    assert "tokenizer.json" in {file.name for file in manifest.files}
    ids = tokens(tmp_path / "set", "validation_00000.bin")
    opened = open_tokenizer("gpt2", tmp_path / "set")
    assert opened.decode(ids[: ids.index(opened.end)]) == STORIES[148]


def test_a_tokenizer_file_that_is_not_gpt2s_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    chosen = TextTokenizer(model_vocab=60_000, cache=tmp_path, file=tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"not a tokenizer.json"):
        chosen.choose()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"schema": 1}', json.dumps({"schema": 2}), '{"schema": 1, "files": [{"name": "a"}]}']
)
def test_a_damaged_manifest_is_a_value_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(ValueError, match="prepare the dataset again"):
        read_manifest(tmp_path)
    with pytest.raises(
        ValueError, match=r"does not show what the folder contains \(.*\); move it away, then prepare again$"
    ):
        existing_dataset(tmp_path)
    assert (tmp_path / "dataset.json").read_text() == content


def test_bytes_and_words_give_the_text_back() -> None:
    text = "Was it Füchse? No, foxes."
    assert Bytes().decode(Bytes().encode(text)) == text
    words = Words.from_text(text)
    assert words.decode(words.encode(text)) == text
    assert words.decode(words.encode("Was it wolves?")) == "Was it <unk>?"
