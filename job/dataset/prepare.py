"""From text to a prepared dataset: a folder of token shards, what the tokenizer needs, and `dataset.json`.

    dataset.json     schema, source, tokenizer {kind, vocab, id}, train [file..], validation [file..],
                     tokens {train, validation}, stories {train, validation}, files [{name, bytes, sha256}]
    train_00000.bin, validation_00000.bin
    tokenizer.json   (gpt2) or vocab.json (words)

The same input gives the same bytes; nothing in it is a time or a path. Standard library only, because the program that
declares the upload reads manifests too. User mistakes raise ValueError with the choice to make.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from job.dataset.shards import write_shard
from job.dataset.sources import Source
from job.dataset.tokenizer import Gpt2, Tokenizer, Words

MANIFEST = "dataset.json"
HELD_OUT = 0.01  # the last stories of a text, for validation
SHARD_TOKENS = 1 << 25
BATCH = 1000  # stories tokenised at once


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFile:
    """One file of a prepared dataset."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetManifest:
    """A prepared dataset. `files` are all that a node must have, dataset.json included; `sha256` is dataset.json's,
    which names the others by hash.
    """

    sha256: str
    files: tuple[DatasetFile, ...]
    tokenizer: str  # gpt2, bytes or words
    vocab: int
    tokenizer_id: str
    source: str
    train: tuple[str, ...]
    validation: tuple[str, ...]
    tokens: dict[str, int]
    stories: dict[str, int]


def read_manifest(folder: Path) -> DatasetManifest:
    """What `folder/dataset.json` says. Raises ValueError when there is none or it is damaged. Hashes no other file."""
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{folder}: not a prepared dataset, there is no {MANIFEST}") from error
    try:
        tree = json.loads(content)
        if tree["schema"] != 1:
            raise ValueError(f"{path}: schema {tree['schema']}, this code reads 1; prepare the dataset again")
        listed = tuple(DatasetFile(**file) for file in tree["files"])
        digest = hashlib.sha256(content).hexdigest()
        return DatasetManifest(
            sha256=digest,
            files=(*listed, DatasetFile(name=MANIFEST, bytes=len(content), sha256=digest)),
            tokenizer=tree["tokenizer"]["kind"],
            vocab=int(tree["tokenizer"]["vocab"]),
            tokenizer_id=tree["tokenizer"]["id"],
            source=tree["source"],
            train=tuple(tree["train"]),
            validation=tuple(tree["validation"]),
            tokens=dict(tree["tokens"]),
            stories=dict(tree["stories"]),
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: damaged ({type(error).__name__}: {error}); prepare the dataset again") from error


def verify(folder: Path, manifest: DatasetManifest) -> None:
    """Every file's size and hash. Raises ValueError naming the first that differs."""
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file():
            raise ValueError(f"{path}: missing; prepare the dataset again")
        if path.stat().st_size != file.bytes or _sha256(path) != file.sha256:
            raise ValueError(f"{path}: not the file that {MANIFEST} names; prepare the dataset again")


def prepare(
    folder: Path, source: Source, *, model_vocab: int, say: Callable[[str], None] = lambda line: None
) -> DatasetManifest:
    """The prepared dataset in `folder`, made now or found there. Appears whole or not at all.

    Raises ValueError: empty text, not UTF-8, a vocabulary larger than the model's, too few stories to hold any out.
    """
    tokenizer, kind, tokenizer_id = source.tokenizer()
    if tokenizer.vocab > model_vocab:
        raise ValueError(
            f"tokenizer {kind} has {tokenizer.vocab} ids, the model's vocabulary (job.parameters.model.vocab) is "
            f"{model_vocab}: raise model.vocab to at least {tokenizer.vocab}, or choose a smaller tokenizer"
        )
    if kept := _already(folder, source.name, tokenizer_id):
        say(f"{folder} is prepared already: {describe(kept)}")
        return kept
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        made = Path(scratch) / "dataset"
        made.mkdir()
        _write(made, source, tokenizer, kind, tokenizer_id)
        if folder.exists():  # another preparation's; only ever our own kind of folder
            _already(folder, source.name, tokenizer_id, any_source=True)
            folder.rename(Path(scratch) / "replaced")
        made.rename(folder)
    manifest = read_manifest(folder)
    say(f"{folder}: {describe(manifest)}")
    return manifest


def describe(manifest: DatasetManifest) -> str:
    """One line for people."""
    size = sum(file.bytes for file in manifest.files)
    return (
        f"{manifest.stories['train']:,} stories, {manifest.tokens['train']:,} tokens to train on, "
        f"{manifest.tokens['validation']:,} held out; {manifest.tokenizer}, {manifest.vocab:,} ids; {size / 1e6:.1f} MB"
    )


def _already(folder: Path, source: str, tokenizer_id: str, any_source: bool = False) -> DatasetManifest | None:
    """The dataset in `folder` when it is the wanted one. Raises ValueError when the folder is something else's."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: exists and is not a prepared dataset; move it away or name another folder")
    try:
        manifest = read_manifest(folder)
        if any_source or (manifest.source, manifest.tokenizer_id) != (source, tokenizer_id):
            return None
        verify(folder, manifest)
    except ValueError:  # damaged: made again
        return None
    return manifest


def _write(folder: Path, source: Source, tokenizer: Tokenizer, kind: str, tokenizer_id: str) -> None:
    stories = source.stories()
    held_out = max(1, round(len(stories) * HELD_OUT))
    if len(stories) <= held_out:
        raise ValueError(f"{source.name}: {len(stories)} story; at least 2 are needed, the last 1 % is held out")
    splits = {"train": stories[:-held_out], "validation": stories[-held_out:]}
    names: dict[str, list[str]] = {}
    tokens: dict[str, int] = {}
    for split, texts in splits.items():
        names[split], tokens[split] = _write_split(folder, split, texts, tokenizer)
    if isinstance(tokenizer, Words):
        _write_text(folder / "vocab.json", json.dumps(tokenizer.words, ensure_ascii=False) + "\n")
    if isinstance(tokenizer, Gpt2):
        shutil.copyfile(tokenizer.file, folder / "tokenizer.json")
    files = [
        DatasetFile(name=path.name, bytes=path.stat().st_size, sha256=_sha256(path))
        for path in sorted(folder.iterdir())
    ]
    manifest: dict[str, Any] = {
        "schema": 1,
        "source": source.name,
        "tokenizer": {"kind": kind, "vocab": tokenizer.vocab, "id": tokenizer_id},
        **names,
        "tokens": tokens,
        "stories": {split: len(texts) for split, texts in splits.items()},
        "files": [asdict(file) for file in files],
    }
    _write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _write_split(folder: Path, split: str, texts: list[str], tokenizer: Tokenizer) -> tuple[list[str], int]:
    """Shards of one split: (names, tokens)."""
    names: list[str] = []
    total = 0
    stream = _ids(texts, tokenizer)
    while shard := list(itertools.islice(stream, SHARD_TOKENS)):
        names.append(f"{split}_{len(names):05d}.bin")
        write_shard(folder / names[-1], shard, tokenizer.vocab)
        total += len(shard)
    return names, total


def _ids(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[int]:
    stream = iter(texts)
    while batch := list(itertools.islice(stream, BATCH)):
        encoded = tokenizer.encode_batch(batch) if isinstance(tokenizer, Gpt2) else map(tokenizer.encode, batch)
        for ids in encoded:
            yield from ids
            yield tokenizer.end


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
