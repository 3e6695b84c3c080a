"""What the stages after training append outlives the node, line by line."""

from __future__ import annotations

import json
from pathlib import Path

from gpufleet.job.supervisor.publish import Mirror
from gpufleet.job.supervisor.store import FolderStore
from tests.job.supervisor_world import Bench, FakeTrainer


def append(workdir: Path, content: str) -> None:
    path = workdir / "stages" / "verdicts.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(content)


def test_a_line_that_is_half_written_is_neither_sent_nor_restored(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "bucket")
    append(tmp_path, '{"a": 1}\n{"a": ')
    Mirror(store, tmp_path).send()
    assert store.get_bytes("stages/verdicts.jsonl") == b'{"a": 1}\n'
    store.put_bytes(b'{"a": 1}\n{"a', "stages/verdicts.jsonl")
    assert Mirror(store, tmp_path).restore() == 1
    assert (tmp_path / "stages" / "verdicts.jsonl").read_bytes() == b'{"a": 1}\n'


def test_only_what_grew_is_sent_again(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "bucket")
    mirror = Mirror(store, tmp_path)
    append(tmp_path, "{}\n")
    mirror.send()
    store.delete(["stages/verdicts.jsonl"])
    mirror.send()
    assert store.get_bytes("stages/verdicts.jsonl") is None
    append(tmp_path, "{}\n")
    mirror.send()
    assert store.get_bytes("stages/verdicts.jsonl") == b"{}\n{}\n"


def test_what_no_attempt_has_published_does_not_survive_on_a_used_disk(tmp_path: Path) -> None:
    append(tmp_path, "{}\n")
    assert Mirror(FolderStore(tmp_path / "bucket"), tmp_path).restore() == 0
    assert not (tmp_path / "stages").exists()


def test_the_next_attempt_finds_the_lines_of_one_that_crashed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    found: list[str] = []

    def work(trainer: FakeTrainer) -> int | None:
        path = trainer.workdir / "stages" / "verdicts.jsonl"
        found.append(path.read_text() if path.exists() else "")
        append(trainer.workdir, json.dumps({"of": trainer.workdir.name}) + "\n")
        return 1 if len(found) == 1 else None

    assert bench.attempt("i-1", script={5: work}).run() == 1
    assert bench.attempt("i-2", script={5: work}).run() == 0
    assert found == ["", '{"of": "i-1"}\n']
    assert bench.json("attempts/i-1.json")["results"] is True  # else three lost nodes would end the run
    assert bench.store.get_bytes("stages/verdicts.jsonl") == b'{"of": "i-1"}\n{"of": "i-2"}\n'


def test_lines_of_earlier_attempts_are_no_progress_of_this_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.put_bytes(b"{}\n", "stages/verdicts.jsonl")
    assert bench.attempt().run() == 0
    assert "results" not in bench.json("attempts/i-1.json")
