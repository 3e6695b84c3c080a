"""The files that results are appended to: what is read from them after any ending, and which characters end a line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gpufleet.job import ledger
from gpufleet.job.experiments.engine.experiment import Session
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.sft.merge import FinishedVariants
from gpufleet.job.ledger import Ledger

ENTRIES = [{"name": "a\u2028b\u2029c\u0085d", "value": "Z\u00fcrich"}, {"name": "b"}]


def test_what_was_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "stages" / "x.jsonl"
    for entry in ENTRIES:
        Ledger(path).append(entry)
    assert Ledger(path).entries == ledger.read(path) == ENTRIES


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "1\u20282\u20293\u00854"}\n{"a": "5"}\n', encoding="utf-8")
    assert ledger.read(path) == Ledger(path).entries == [{"a": "1\u20282\u20293\u00854"}, {"a": "5"}]


@pytest.mark.parametrize("torn", ['{"na', '{"name": "Z\u00fc'], ids=["inside a word", "inside a character"])
def test_a_last_line_that_was_cut_is_cut_off(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    Ledger(path).append(ENTRIES[1])
    whole = path.read_bytes()
    path.write_bytes(whole + torn.encode()[:-1])
    assert Ledger(path).entries == ENTRIES[1:]
    assert path.read_bytes() == whole


def test_a_line_that_is_no_object_is_passed_over_and_what_follows_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"name": "a"}\n\0\0\0\n{"name": "Z\xc3\n{"name": "b"}\n')
    assert [entry["name"] for entry in Ledger(path).entries] == ["a", "b"]


def test_an_answer_with_any_character_is_made_once(tmp_path: Path) -> None:
    made: list[str] = []
    session = cast(Session, SimpleNamespace(world=World()))  # all that Done asks of one

    def make() -> list[dict[str, str]]:
        made.append("once")
        return [{"answer": "a\u2028b\u0085c"}]

    for _ in range(2):
        assert FinishedVariants(tmp_path / "sft.jsonl", session, "w").get("answers 0", make) == [
            {"answer": "a\u2028b\u0085c"}
        ]
    assert made == ["once"]
