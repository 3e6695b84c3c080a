"""What goes out beside checkpoints: exports while nothing is more urgent, TensorBoard's files as they grow."""

from __future__ import annotations

from pathlib import Path

import pytest
from supervisor_world import Bench, FaultyStore, Queue, commit

from job.supervisor import publish
from job.supervisor.publish import Publisher
from job.supervisor.store import GivenUpError
from job.supervisor.uploads import Uploader


def exported(workdir: Path, name: str, content: bytes = b"weights") -> None:
    folder = workdir / "exports" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "meta.json").write_text("{}")


def idle(bench: Bench) -> tuple[Uploader, Queue, Publisher]:
    publisher = Publisher(store=bench.store, workdir=bench.folder / "w", stamp=dict, say=lambda line: None)
    queue = Queue()
    return Uploader(publisher, queue, bench.clock, lambda line: None, lambda size: 0.0), queue, publisher


def test_a_complete_export_is_sent_once_nothing_is_more_urgent(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    uploader, queue, _publisher = idle(bench)
    exported(tmp_path / "w", "phase1_end")
    (tmp_path / "w" / "exports" / "phase1_end" / ".model.safetensors.part").write_bytes(b"half")
    (tmp_path / "w" / "exports" / "phase2_start").mkdir()
    (tmp_path / "w" / "exports" / "phase2_start" / "model.safetensors").write_bytes(b"half")
    commit(tmp_path / "w", 3, "c")
    uploader.poll()
    queue.run()
    assert bench.manifests() == [3]
    assert bench.store.get_bytes("exports/phase1_end/model.safetensors") is None
    uploader.poll()
    queue.run()
    assert bench.store.get_bytes("exports/phase1_end/model.safetensors") == b"weights"
    assert bench.store.get_bytes("exports/phase1_end/.model.safetensors.part") is None
    assert bench.store.get_bytes("exports/phase2_start/model.safetensors") is None  # no meta.json yet
    uploader.poll()
    assert not queue.waiting
    assert uploader.idle


def test_an_export_written_anew_is_sent_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    uploader, queue, _publisher = idle(bench)
    for content in (b"first", b"second"):
        exported(tmp_path / "w", "phase1_end", content)
        uploader.poll()
        queue.run()
        uploader.poll()
        assert bench.store.get_bytes("exports/phase1_end/model.safetensors") == content


def test_an_export_that_is_replaced_while_it_is_listed_stops_no_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(folder: Path) -> list[Path]:
        found = real(folder)
        (folder / "meta.json").unlink()
        return found

    real = publish._files
    *_, publisher = idle(Bench(tmp_path))
    exported(tmp_path / "w", "phase1_end")
    monkeypatch.setattr(publish, "_files", listed)
    assert [path.name for path in publisher.exported()] == ["model.safetensors"]


def test_in_a_hurry_an_export_makes_room_for_a_checkpoint_and_none_is_begun(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    uploader, queue, publisher = idle(bench)
    exported(tmp_path / "w", "phase1_end")
    uploader.poll()  # the export is on its way
    uploader.hurry(bench.clock() + 120)
    assert uploader.idle  # nobody waits for it
    commit(tmp_path / "w", 3, "c")
    assert not uploader.idle
    uploader.poll()
    assert publisher._cancel.is_set()
    queue.run(error=GivenUpError("publication given up"))
    uploader.poll()
    queue.run()
    assert bench.manifests() == [3]
    uploader.poll()
    assert not queue.waiting


def test_tensorboards_files_go_with_the_metrics_when_they_have_grown(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    puts: list[str] = []
    store = FaultyStore(bench.store, lambda put, key: puts.append(key))
    publisher = Publisher(store=store, workdir=tmp_path / "w", stamp=dict, say=lambda line: None)
    (tmp_path / "w" / "tb").mkdir(parents=True)
    events = tmp_path / "w" / "tb" / "events.1"
    for content in (b"one", b"one", b"onetwo"):
        events.write_bytes(content)
        publisher.metrics()
    assert puts == ["tb/events.1"] * 2
    assert bench.store.get_bytes("tb/events.1") == b"onetwo"
