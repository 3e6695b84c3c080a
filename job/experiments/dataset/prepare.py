"""Prepares a dataset from text: a folder of token shards, the tokenizer's files, and `dataset.json`.

    dataset.json as job/contract/inputs.py has it; facts.py has the facts of each kind
    train_00000.bin, validation_00000.bin
    tokenizer.json   (gpt2) or vocab.json (words)

`publish` and `read_manifest` serve every kind: windows (here), packed, characters and ranking (in modules of their
own).

The same input gives the same bytes; a dataset contains no time and no path. User mistakes raise ValueError with the
choice to make.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpufleet.job import atomic, progress
from gpufleet.job.contract import inputs
from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset.facts import FACTS
from gpufleet.job.experiments.dataset.shards import write_shard
from gpufleet.job.experiments.dataset.sources import Source
from gpufleet.job.experiments.dataset.tokenizer import Gpt2, Tokenizer, Words

MANIFEST = inputs.DATASET
HELD_OUT = 0.01  # the share of a text's stories that is held out for validation; these are its last stories
SHARD_TOKENS = 1 << 25
BATCH = 1000  # number of stories that are tokenised at once


def read_manifest(folder: Path) -> DatasetManifest:
    """The content of dataset.json in `folder`. Raises ValueError if it is missing or damaged. Hashes no other file."""
    return inputs.read_dataset(folder, FACTS)


def checked(folder: Path) -> DatasetManifest:
    """The dataset in `folder`, with every file checked. Raises ValueError if there is no dataset, or a damaged one."""
    manifest = _read_existing(folder)
    inputs.verify(folder, manifest)
    return manifest


def prepare(
    folder: Path, source: Source, *, model_vocab: int, say: Callable[[str], None] = lambda line: None
) -> DatasetManifest:
    """The prepared dataset in `folder`, which is made if it does not exist. The dataset appears complete or not at all.
    Raises ValueError if the text is empty or not UTF-8, if the vocabulary is larger than that of the model, or if there
    are too few stories to hold any out.
    """
    tokenizer, kind, tokenizer_id = source.tokenizer()
    if tokenizer.vocab > model_vocab:
        raise ValueError(
            f"tokenizer {kind} has {tokenizer.vocab} ids, the model's vocabulary (job.parameters.model.vocab) is "
            f"{model_vocab}: raise model.vocab to at least {tokenizer.vocab}, or choose a smaller tokenizer"
        )
    existing = existing_dataset(folder)
    own = (
        None if existing is None or existing.kind != "windows" else (existing.source, existing.facts["tokenizer"]["id"])
    )
    if existing is not None and own == (source.name, tokenizer_id):
        say(f"{folder} is prepared already: {describe(existing)}")
        return existing
    return _appear(folder, lambda made: _write(made, source, tokenizer, kind, tokenizer_id), say)


def publish(
    folder: Path,
    *,
    kind: str,
    source: str,
    facts: dict[str, Any],
    write: Callable[[Path], None],
    train: tuple[str, ...] = (),
    validation: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda line: None,
) -> DatasetManifest:
    """A prepared dataset of any kind in `folder`: the files that `write` puts into the temporary folder passed to it,
    and a dataset.json that lists every file with its hash. The dataset appears complete or not at all; an existing
    identical dataset stays. `facts` (JSON) is read after `write` has run. Raises ValueError if `folder` contains
    something else.
    """
    existing_dataset(folder)

    def fill(made: Path) -> dict[str, Any]:
        write(made)
        return {"kind": kind, "source": source, "facts": facts, "train": list(train), "validation": list(validation)}

    return _appear(folder, fill, say)


def describe(manifest: DatasetManifest) -> str:
    """One line about the dataset, for people."""
    size, facts = f"{manifest.bytes / 1e6:.1f} MB", manifest.facts
    if manifest.kind != "windows":
        words = ", ".join(
            f"{name} {value:,}" if isinstance(value, int | float) else f"{name} {value}"
            for name, value in facts.items()
            if isinstance(value, int | float) or (isinstance(value, str) and value not in manifest.source)
        )
        # the first digits of a hash are enough for people
        source = re.sub(r"(?<=sha256 [0-9a-f]{12})[0-9a-f]+", "", manifest.source)
        return f"{manifest.kind} from {source}: {words}; {size}"
    tokenizer = facts["tokenizer"]
    return (
        f"{facts['stories']['train']:,} stories, {facts['tokens']['train']:,} tokens to train on, "
        f"{facts['tokens']['validation']:,} held out; {tokenizer['kind']}, {tokenizer['vocab']:,} ids; {size}"
    )


def _appear(folder: Path, fill: Callable[[Path], dict[str, Any]], say: Callable[[str], None]) -> DatasetManifest:
    """Fills a temporary folder, writes dataset.json from the fields of `fill`, and moves the folder to its place."""
    place = folder.resolve()  # the link's target is replaced, so that a link, perhaps to a larger disk, stays a link
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as scratch:
        made = Path(scratch) / "dataset"
        made.mkdir()
        fields = fill(made)
        paths = [path for path in sorted(made.rglob("*")) if path.is_file()]
        files = [asdict(file) for file in inputs.hashed(paths, made)]
        tree = json.dumps({"schema": 1, **fields, "files": files}, indent=1)
        atomic.write_bytes(made / MANIFEST, f"{tree}\n".encode())
        # This is checked only now, because another preparation may have finished meanwhile. Only folders of datasets
        # are replaced.
        existing = existing_dataset(folder)
        if existing is not None and existing.sha256 == atomic.sha256(made / MANIFEST):
            say(f"{folder} is prepared already: {describe(existing)}")
            return existing
        if place.exists():
            place.rename(Path(scratch) / "replaced")
        made.rename(place)
    manifest = read_manifest(folder)
    say(f"{folder}: {describe(manifest)}")
    return manifest


def existing_dataset(folder: Path) -> DatasetManifest | None:
    """The dataset in `folder`; None if there is none, or if a file of it is damaged, so that the caller makes the
    dataset again. Raises ValueError if the folder has other content too, or its dataset.json is unreadable.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: exists and is not a prepared dataset; move it away or name another folder")
    manifest = _read_existing(folder)
    if strangers := _strangers(folder, manifest):
        raise ValueError(
            f"{folder}: holds {', '.join(strangers[:3])} besides the dataset, and is replaced as a whole; move "
            f"{'it' if len(strangers) == 1 else 'them'} away"
        )
    try:
        inputs.verify(folder, manifest)
    except ValueError:
        return None
    return manifest


def _read_existing(folder: Path) -> DatasetManifest:
    """The manifest in `folder`. Raises the ValueError of `read_manifest`, without the advice to prepare again."""
    try:
        return read_manifest(folder)
    except ValueError as error:
        if not (folder / MANIFEST).is_file():
            raise
        why = str(error).removeprefix(f"{folder / MANIFEST}: ").removesuffix("; prepare the dataset again")
        raise ValueError(
            f"{folder}: {MANIFEST} does not show what the folder contains ({why}); move it away, then prepare again"
        ) from error


def _strangers(folder: Path, manifest: DatasetManifest) -> list[str]:
    """Files in the folder that gpufleet did not write, except hidden files, which file managers make."""
    own = {MANIFEST, *(file.name for file in manifest.files)}
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in names if name not in own and not name.rpartition("/")[2].startswith(".")]


def _write(folder: Path, source: Source, tokenizer: Tokenizer, kind: str, tokenizer_id: str) -> dict[str, Any]:
    """Writes shards and tokenizer of windows; returns dataset.json's fields. A source has at least two stories."""
    stories = source.stories()
    held_out = max(1, round(len(stories) * HELD_OUT))
    splits = {"train": stories[:-held_out], "validation": stories[-held_out:]}
    names: dict[str, list[str]] = {}
    tokens: dict[str, int] = {}
    for split, texts in splits.items():
        names[split], tokens[split] = _write_split(folder, split, texts, tokenizer)
    if isinstance(tokenizer, Words):
        words = json.dumps(tokenizer.words, ensure_ascii=False)
        atomic.write_bytes(folder / "vocab.json", f"{words}\n".encode())
    if isinstance(tokenizer, Gpt2):
        shutil.copyfile(tokenizer.file, folder / "tokenizer.json")
    return {
        "kind": "windows",
        "source": source.name,
        "tokenizer": {"kind": kind, "vocab": tokenizer.vocab, "id": tokenizer_id},
        **names,
        "tokens": tokens,
        "stories": {split: len(texts) for split, texts in splits.items()},
    }


def _write_split(folder: Path, split: str, texts: list[str], tokenizer: Tokenizer) -> tuple[list[str], int]:
    """Writes the shards of one split; returns their names, and the number of tokens."""
    names: list[str] = []
    total = 0
    with progress.shown(f"tokenising the {split} split", len(texts), "stories") as advance:
        stream = _ids(texts, tokenizer, advance)
        while shard := list(itertools.islice(stream, SHARD_TOKENS)):
            names.append(f"{split}_{len(names):05d}.bin")
            write_shard(folder / names[-1], shard, tokenizer.vocab)
            total += len(shard)
    return names, total


def _ids(texts: Iterable[str], tokenizer: Tokenizer, advance: progress.Advance) -> Iterator[int]:
    stream = iter(texts)
    while batch := list(itertools.islice(stream, BATCH)):
        encoded = tokenizer.encode_batch(batch) if isinstance(tokenizer, Gpt2) else map(tokenizer.encode, batch)
        for ids in encoded:
            yield from ids
            yield tokenizer.end
        advance(len(batch))
