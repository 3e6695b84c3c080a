"""two-tower's dataset: queries, the models that may answer these queries, and the models that were judged good.

    dataset.json     kind "ranking"; facts: queries, models, discovery, width, labels (that were given), unjudged
                     (queries without label 1 or 2), relevant, best, encoder
    queries.npy      float32 [Q, S], length 1       judged queries
    discovery.npy    float32 [N, S], length 1       queries without labels
    labels.npy int8 [Q, M] 0 irrelevant, 1 best, 2 good; pairs that were not judged are 0
    names.json       queries [Q], models [M], discovery [N]: ids in the order of the arrays

From a folder (`gpufleet prepare STACK FOLDER`), UTF-8:

    queries.jsonl    one {"id": "...", "text": "..."} per line      judged queries
    labels.csv       header query,model,label; then one line per judgement, label 0, 1 or 2
    discovery.jsonl like queries.jsonl; the file may be missing

or from a seed. Embeddings are made here, once for all runs. The same input gives the same bytes. User mistakes raise
ValueError.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset import prepare
from gpufleet.job.experiments.dataset.chat import require_characters, require_lines
from gpufleet.job.experiments.dataset.encodings import not_utf8
from gpufleet.job.experiments.two_tower.arrays import Floats, Labels, unit_rows
from gpufleet.job.experiments.two_tower.sentences import Encoder, choose
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig, variants

QUERIES, DISCOVERY, LABELS, NAMES = "queries.npy", "discovery.npy", "labels.npy", "names.json"
GAINS = (0.0, 1.0, 0.7)  # the gains of labels 0, 1 and 2; in the TREC files, 1 is the best label
DISCOVERY_MADE = 40  # the least number of discovery queries in a generated dataset
LATENT = 6  # the rank of the matrix of generated relevance
# The weight of generated models' skills, where popularity has a spread of 1. With it, popularity alone reaches an
# nDCG@10 of 0.6.
LENGTHENED = 0.75
RELEVANT, BEST = 0.08, 0.02  # shares of a generated query's models with a label, and with label 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """A dataset in memory; arrays as in the files."""

    queries: Floats
    labels: Labels
    discovery: Floats
    names: dict[str, list[str]]
    encoder: str  # the name of the encoder; empty if there was no text
    judged: int  # number of judgements in the file, including those with label 0


def prepare_ranking(
    folder: Path, config: TwoTowerConfig, *, text: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> DatasetManifest:
    """The prepared dataset in `folder`. The dataset is made if it does not exist. `text` is the folder of a
    million-llms dataset. Raises ValueError if there is no text, if lines are damaged, or if counts differ from the
    counts in `data`.
    """
    data, width = config.data, config.towers.sentence
    if text is None and data.source == "generated-relevance":
        made = generate(
            data.queries,
            data.models,
            max(DISCOVERY_MADE, *(family.weak.queries for _, family in variants(config))),
            width,
            seed=config.seed,
        )
        source = (
            f"generated relevance: {data.queries} queries x {data.models} models, {len(made.discovery)} discovery "
            f"queries, {width} wide, from seed {config.seed}"
        )
    elif text is not None:
        # raises an error if the folder has other files, before an encoding that takes minutes
        prepare.existing_dataset(folder)
        made = read_folder(text, choose(width, say), config, say)
        source = f"million-llms: sha256 {_folder_hash(text)}, sentences by {made.encoder}"
    else:
        raise ValueError(
            f"{folder}: not prepared, and job.parameters.data.source is million-llms: name the folder that holds "
            "queries.jsonl, labels.csv and discovery.jsonl (gpufleet prepare STACK FOLDER), or set data.source: "
            "generated-relevance"
        )
    return prepare.publish(
        folder,
        kind="ranking",
        source=source,
        facts={
            "queries": len(made.queries),
            "models": made.labels.shape[1],
            "discovery": len(made.discovery),
            "width": made.queries.shape[1],
            "labels": made.judged,
            "unjudged": unjudged(made.labels),
            "relevant": int((made.labels > 0).sum()),
            "best": int((made.labels == 1).sum()),
            "encoder": made.encoder or "none: vectors were generated",
        },
        write=lambda temporary: _write(temporary, made),
        say=say,
    )


def read(folder: Path) -> Tables:
    """A prepared dataset's arrays. Raises ValueError if the dataset is of another kind."""
    manifest = prepare.read_manifest(folder)
    if manifest.kind != "ranking":
        raise ValueError(f"{folder}: a dataset of kind {manifest.kind}; two-tower needs ranking: prepare it again")
    return Tables(
        queries=np.load(folder / QUERIES, allow_pickle=False),
        labels=np.load(folder / LABELS, allow_pickle=False),
        discovery=np.load(folder / DISCOVERY, allow_pickle=False),
        names=json.loads((folder / NAMES).read_text(encoding="utf-8")),
        encoder=manifest.facts["encoder"],
        judged=manifest.facts["labels"],
    )


def unjudged(labels: Labels) -> int:
    """Queries without a relevant model (label 1 or 2). Such a query scores 0 with every order of the models."""
    return int((labels == 0).all(axis=1).sum())


def mismatches(config: TwoTowerConfig, queries: tuple[int, ...], labels: tuple[int, ...]) -> list[str]:
    """A sentence for each key of the config that does not fit arrays of these shapes; it says how to change the key."""
    wanted = (
        ("data.queries", config.data.queries, queries[0]),
        ("data.models", config.data.models, labels[1]),
        ("towers.sentence", config.towers.sentence, queries[1]),
    )
    return [
        f"job.parameters.{key} is {asked}, the data has {actual}" for key, asked, actual in wanted if asked != actual
    ]


def generate(queries: int, models: int, discovery: int, width: int, *, seed: int) -> Tables:
    """Relevance from a seed, of low rank plus a popularity term, so that popularity alone is a strong baseline.

    A query's sentence vector is a linear function of the query's latent taste, plus noise. A tower can learn this
    function. The best-scored models of each query get labels: a share RELEVANT gets a label, and a share BEST gets
    label 1.
    """
    draw = np.random.default_rng(seed)
    tastes = draw.standard_normal((queries + discovery, LATENT))
    tastes /= np.linalg.norm(tastes, axis=1, keepdims=True)
    skills = LENGTHENED * draw.standard_normal((models, LATENT))
    scores = tastes @ skills.T + draw.standard_normal(models)  # adds the same popularity for every query
    scores += 0.3 * draw.standard_normal(scores.shape)
    mixed = tastes @ draw.standard_normal((LATENT, width)) / np.sqrt(width)
    vectors = unit_rows((mixed + 0.3 * draw.standard_normal(mixed.shape) / np.sqrt(width)).astype(np.float32))
    order = np.argsort(-scores[:queries], axis=1, kind="stable")
    labels = np.zeros((queries, models), dtype=np.int8)
    rows = np.arange(queries)[:, None]
    labels[rows, order[:, : max(2, round(RELEVANT * models))]] = 2
    labels[rows, order[:, : max(1, round(BEST * models))]] = 1
    return Tables(
        queries=vectors[:queries],
        labels=labels,
        discovery=vectors[queries:],
        names={
            "queries": [f"q{i}" for i in range(queries)],
            "models": [f"m{i}" for i in range(models)],
            "discovery": [f"d{i}" for i in range(discovery)],
        },
        encoder="",
        judged=labels.size,
    )


def read_folder(
    folder: Path, encoder: Encoder, config: TwoTowerConfig, say: Callable[[str], None] = lambda line: None
) -> Tables:
    """The tables of a million-llms folder with its sentences encoded, which takes minutes. Counts that differ from
    `config` are reported before that. Raises ValueError with file, line and mistake.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: not a folder; it must contain queries.jsonl and labels.csv, and may contain discovery.jsonl"
        )
    queries = _sentences(folder / "queries.jsonl")
    path = folder / "discovery.jsonl"
    discovery = _sentences(path) if path.exists() else {}
    if (asked := max(family.weak.queries for _, family in variants(config))) > len(discovery):
        few = f"discovery queries: {len(discovery):,}, training has weak labels only for these"
        none = "no discovery.jsonl: training has no weak labels"
        say(f"{few if discovery else none}, though job.parameters.weak.queries is {asked}")
    labels, models, judged = _labels(folder / "labels.csv", list(queries))
    if problems := mismatches(config, (len(queries), config.towers.sentence), labels.shape):
        raise ValueError(f"{folder}: " + "; ".join(problems))
    if empty := unjudged(labels):
        say(
            f"WARNING: queries without a relevant model, label 1 or 2: {empty} of {len(queries)}; each counts 0 in "
            f"every mean, and a perfect ranking has nDCG@10 {1 - empty / len(queries):.3f}: judge them, or leave them "
            "out"
        )
    say(f"sentences: {len(queries) + len(discovery):,} by {encoder.name}")
    vectors = encoder.encode([*queries.values(), *discovery.values()])
    # Equal texts are found by their text, because the vectors of the same text may differ in the last digits, if an
    # encoder reads them in batches of different lengths.
    distinct = min(len(set(queries.values())), len(np.unique(vectors[: len(queries)], axis=0)))
    if twice := len(queries) - distinct:
        say(
            f"WARNING: queries with the text or sentence vector of another: {twice} of {len(queries)}; where two lie "
            "in different folds, one is trained on and the other tested: keep only one in queries.jsonl"
        )
    return Tables(
        queries=vectors[: len(queries)],
        labels=labels,
        discovery=vectors[len(queries) :],
        names={"queries": list(queries), "models": models, "discovery": list(discovery)},
        encoder=encoder.name,
        judged=judged,
    )


def _sentences(path: Path) -> dict[str, str]:
    """The text of each id, in the file's order."""
    texts: dict[str, str] = {}
    lines = _open(path).split("\n")
    require_lines(path)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
            name, text = entry["id"], entry["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f'{path}:{number}: not {{"id": "...", "text": "..."}} ({line[:60]!r})') from error
        if type(name) is not int and not (isinstance(name, str) and name.strip()):
            raise ValueError(f"{path}:{number}: id {name!r:.60}; it must be a text or a whole number, as in labels.csv")
        name = str(name)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path}:{number}: query {name} has no text")
        require_characters(name, f"{path}:{number}: id")
        require_characters(text, f"{path}:{number}: text")
        if name in texts:
            raise ValueError(f"{path}:{number}: query {name} is there twice; ids must differ")
        texts[name] = text
    if not texts:
        raise ValueError(f"{path}: empty; at least one query is needed")
    return texts


def _labels(path: Path, queries: list[str]) -> tuple[Labels, list[str], int]:
    """Labels [Q, M], the models sorted by id, and the number of judgements."""
    rows = {name: row for row, name in enumerate(queries)}
    judged: dict[tuple[int, str], int] = {}
    reader = csv.DictReader(io.StringIO(_open(path), newline=""))
    try:
        names = reader.fieldnames
    except csv.Error as error:
        raise ValueError(f"{path}:1: {error}; is a double quote never closed?") from error
    if not {"query", "model", "label"} <= set(names or ()):
        header = f"header {names!r:.200}" if names else "empty"
        raise ValueError(f"{path}:1: {header}; it must name query, model and label, with commas between and no blanks")
    if twice := [name for name in ("query", "model", "label") if list(names or ()).count(name) > 1]:
        raise ValueError(f"{path}:1: header {names!r:.200} names {twice[0]} twice; keep one column of that name")
    for where, line in _lines(reader, path):
        # There are too many cells, for example because a model's name has a comma; csv would only keep the part before
        # it.
        if reader.restkey in line:
            raise ValueError(f"{where}: more values than the header names; put a name with a comma into double quotes")
        if line["query"] not in rows:
            raise ValueError(f"{where}: query {line['query']!r:.60} is not in queries.jsonl")
        if line["label"] not in ("0", "1", "2"):
            raise ValueError(f"{where}: label {line['label']!r:.60}; it must be 0 (irrelevant), 1 (best) or 2 (good)")
        if not line["model"]:
            raise ValueError(f"{where}: no model")
        if line["model"] != line["model"].strip():  # a name with blanks would otherwise be a second model
            raise ValueError(f"{where}: model {line['model']!r:.60} begins or ends with a blank; remove it")
        key = rows[line["query"]], line["model"]
        if judged.setdefault(key, int(line["label"])) != int(line["label"]):
            raise ValueError(f"{where}: query {line['query']} and model {line['model']} are judged twice, differently")
    if not any(judged.values()):
        raise ValueError(f"{path}: no judgement has label 1 or 2, so there is no relevant model to learn")
    models = sorted({model for _, model in judged})
    columns = {name: column for column, name in enumerate(models)}
    labels = np.zeros((len(queries), len(models)), dtype=np.int8)
    for (row, model), label in judged.items():
        labels[row, columns[model]] = label
    return labels, models, len(judged)


def _lines(reader: csv.DictReader[str], path: Path) -> Iterator[tuple[str, dict[str, str | Any]]]:
    """Each line with its place in the file."""
    try:
        for line in reader:
            yield f"{path}:{reader.line_num}", line
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: {error}; is a double quote never closed?") from error


def _open(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); docs/two-tower.md says what it holds") from error
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {not_utf8(content, error)}") from error


def _folder_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in ("queries.jsonl", "labels.csv", "discovery.jsonl"):
        path = folder / name
        digest.update(hashlib.sha256(path.read_bytes()).digest() if path.exists() else b"-")
    return digest.hexdigest()


def _write(folder: Path, tables: Tables) -> None:
    for name, array in ((QUERIES, tables.queries), (DISCOVERY, tables.discovery), (LABELS, tables.labels)):
        np.save(folder / name, np.ascontiguousarray(array), allow_pickle=False)
    (folder / NAMES).write_text(json.dumps(tables.names, ensure_ascii=False) + "\n", encoding="utf-8")
