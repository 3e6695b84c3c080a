"""Uploads beside training: what goes first, what is tried again, and exports while nothing is more urgent."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpufleet.job.contract.attempt import Beat
from gpufleet.job.supervisor import publish
from gpufleet.job.supervisor.publish import Publisher
from gpufleet.job.supervisor.store import GivenUpError, StoreError
from gpufleet.job.supervisor.uploads import Pulse, Uploader
from tests.job.supervisor_world import STEPS, Bench, FakeClock, FaultyStore, Inline, Queue, commit, publisher
from tests.waiting import HANG_S


def at_once(size: int) -> float:
    """Seconds that an upload takes."""
    return 0.0


def test_a_commit_that_lost_a_file_is_given_up_and_the_next_goes_on(tmp_path: Path) -> None:
    bench, said = Bench(tmp_path), list[str]()
    damaged = commit(tmp_path / "w", 3, "c", reason="boundary")
    (damaged / "w.bin").write_bytes(b"cut")
    commit(tmp_path / "w", 6, "c")
    uploader = Uploader(publisher(bench), Inline(), FakeClock(), said.append, at_once)
    for _ in range(4):
        uploader.poll()
    assert uploader.idle
    assert bench.manifests() == [6]
    assert "step 3 cannot be published" in said[0]


def test_in_a_hurry_the_newest_goes_first_and_a_better_older_one_after_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    commit(tmp_path / "w", 3, "c", reason="best", val_loss=1.0)
    commit(tmp_path / "w", 5, "c", reason="boundary")
    commit(tmp_path / "w", 6, "c", reason="stop")
    keys: list[str] = []
    store = FaultyStore(bench.store, lambda _, key: keys.append(key))
    uploader = Uploader(publisher(bench, store), Inline(), FakeClock(), lambda text: None, at_once)
    uploader.hurry(FakeClock()() + 120)
    while not uploader.idle:
        uploader.poll()
    assert [key for key in keys if key.endswith("manifest.json")] == [
        "ckpt/step_00000006/manifest.json",
        "ckpt/step_00000003/manifest.json",
    ]
    assert bench.json("best.json")["step"] == 3


def test_a_hurry_lets_the_newest_go_on_and_ends_it_only_for_a_newer_one(tmp_path: Path) -> None:
    bench, queue = Bench(tmp_path), Queue()
    commit(tmp_path / "w", 3, "c")
    made = publisher(bench)
    uploader = Uploader(made, queue, FakeClock(), lambda text: None, at_once)
    uploader.poll()
    uploader.hurry(FakeClock()() + 120)
    uploader.poll()
    assert not made._cancel.is_set()  # half an upload is worth more than none
    commit(tmp_path / "w", 6, "c", reason="stop")
    uploader.poll()
    assert made._cancel.is_set()
    queue.run(GivenUpError("given up"))
    uploader.poll()
    queue.run()
    assert bench.manifests() == [6]


def test_a_hurry_does_not_end_an_upload_for_a_newer_one_that_cannot_arrive(tmp_path: Path) -> None:
    bench, queue, clock = Bench(tmp_path), Queue(), FakeClock()
    commit(tmp_path / "w", 3, "c")
    made = publisher(bench)
    uploader = Uploader(made, queue, clock, lambda text: None, lambda size: 60.0)
    uploader.poll()
    uploader.hurry(clock() + 100)
    clock.sleep(50)
    commit(tmp_path / "w", 6, "c", reason="stop")
    uploader.poll()
    assert not made._cancel.is_set()
    queue.run()
    uploader.poll()  # and then the newer one, for what it is worth
    queue.run()
    assert bench.manifests() == [3, 6]


def test_a_hurry_waits_for_no_pause_after_failures(tmp_path: Path) -> None:
    bench, queue, clock = Bench(tmp_path), Queue(), FakeClock()
    commit(tmp_path / "w", 3, "c")
    uploader = Uploader(publisher(bench), queue, clock, lambda text: None, at_once)
    for pause in (2, 4, 8):
        uploader.poll()
        queue.run(StoreError("503 slow down"))
        uploader.poll()
        clock.sleep(pause - 1)
        uploader.poll()
        assert not queue.waiting
        clock.sleep(1)
    uploader.poll()
    queue.run(StoreError("503 slow down"))  # again in 16 s
    uploader.poll()
    uploader.hurry(clock() + 120)
    for _ in range(3):
        uploader.poll()
        queue.run(StoreError("503 slow down"))
        uploader.poll()
        clock.sleep(2)  # and never longer between two more
    uploader.poll()
    queue.run()
    assert bench.manifests() == [3]


def test_what_nobody_foresaw_delays_an_upload_and_stops_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    store = FaultyStore(bench.store, lambda put, _: RuntimeError("can't start new thread") if put == 9 else None)
    assert bench.attempt(store=store).run() == 0
    assert bench.manifests()[-1] == STEPS
    assert "can't start new thread" in bench.said


def test_failures_are_tried_again_ever_longer_apart(tmp_path: Path) -> None:
    bench, clock = Bench(tmp_path), FakeClock(0)
    commit(tmp_path / "w", 3, "c")
    tries: list[float] = []

    def refuse(put: int, key: str) -> StoreError | None:
        if key.endswith(".metadata"):
            tries.append(clock.now)
        return StoreError("503") if clock.now < 100 else None

    uploader = Uploader(publisher(bench, FaultyStore(bench.store, refuse)), Inline(), clock, lambda text: None, at_once)
    while not uploader.idle:
        uploader.poll()
        clock.sleep(0.5)
    gaps = [round(after - before) for before, after in itertools.pairwise(tries)]
    assert gaps[:5] == sorted(gaps[:5])
    assert len(tries) <= 8
    assert bench.manifests() == [3]


def exported(workdir: Path, name: str, content: bytes = b"weights") -> None:
    folder = workdir / "exports" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "meta.json").write_text("{}")


def idle(bench: Bench) -> tuple[Uploader, Queue, Publisher]:
    made, queue = publisher(bench), Queue()
    return Uploader(made, queue, bench.clock, lambda line: None, at_once), queue, made


def test_a_complete_export_is_sent_once_nothing_is_more_urgent(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    uploader, queue, _ = idle(bench)
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
    uploader, queue, _ = idle(bench)
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
    made = publisher(Bench(tmp_path))
    exported(tmp_path / "w", "phase1_end")
    monkeypatch.setattr(publish, "_files", listed)
    assert [path.name for path in made.exported()] == ["model.safetensors"]


def test_in_a_hurry_an_export_makes_room_for_a_checkpoint_and_none_is_begun(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    uploader, queue, made = idle(bench)
    exported(tmp_path / "w", "phase1_end")
    uploader.poll()  # the export is on its way
    uploader.hurry(bench.clock() + 120)
    assert uploader.idle  # nobody waits for it
    commit(tmp_path / "w", 3, "c")
    assert not uploader.idle
    uploader.poll()
    assert made._cancel.is_set()
    queue.run(error=GivenUpError("publication given up"))
    uploader.poll()
    queue.run()
    assert bench.manifests() == [3]
    uploader.poll()
    assert not queue.waiting


def test_the_last_heartbeat_is_put_after_the_one_before_it(tmp_path: Path) -> None:
    bench, begun, may_end = Bench(tmp_path), threading.Event(), threading.Event()

    def slow(put: int, _: str) -> None:
        if put == 1:
            begun.set()
            assert may_end.wait(HANG_S)

    store = FaultyStore(bench.store, slow)
    with ThreadPoolExecutor(1) as executor:
        pulse = Pulse(
            store=store,
            instance="i-1",
            log=tmp_path / "job.log",
            publisher=publisher(bench),
            executor=executor,
            also=lambda: None,
            say=print,
        )
        pulse.beat(Beat(step=1))
        assert begun.wait(HANG_S)
        threading.Timer(0.05, may_end.set).start()
        pulse.last(Beat(step=2))
    lines = (bench.store.get_bytes("heartbeat/i-1.jsonl") or b"").splitlines()
    assert [Beat.from_json(json.loads(line)) for line in lines] == [Beat(step=1), Beat(step=2)]


def test_a_command_s_tensorboard_files_are_sent_from_the_disk_but_for_one_that_is_too_large(tmp_path: Path) -> None:
    """One larger than memory kept anything more from being published, its manifest and the run's end."""
    bench, said = Bench(tmp_path), list[str]()
    folder = tmp_path / "w" / "user" / "outputs" / "tb"
    folder.mkdir(parents=True)
    (folder / "deep").mkdir()
    (folder / "deep" / "events.1").write_bytes(b"one")
    with (folder / "events.2").open("wb") as file:
        file.truncate(1 << 42)
    (tmp_path / "secret").write_text("not the command's")
    (folder / "link").symlink_to(tmp_path / "secret")
    made = Publisher(run="r1", store=bench.store, workdir=tmp_path / "w", published=pytest.fail, say=said.append)
    for _ in range(3):
        made.metrics()
    assert [each.key for each in bench.store.entries("")] == ["tb/events.1"]
    assert said == ["tb/events.2 has 4,398,046,511,104 bytes, and is not sent: 1,073,741,824 are the most"]
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path)
    made.metrics()
    assert [each.key for each in bench.store.entries("")] == ["tb/events.1"]


def test_tensorboards_files_go_with_the_metrics_when_they_have_grown(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    puts: list[str] = []
    store = FaultyStore(bench.store, lambda put, key: puts.append(key))
    made = publisher(bench, store)
    (tmp_path / "w" / "tb").mkdir(parents=True)
    events = tmp_path / "w" / "tb" / "events.1"
    for content in (b"one", b"one", b"onetwo"):
        events.write_bytes(content)
        made.metrics()
    assert puts == ["tb/events.1"] * 2
    assert bench.store.get_bytes("tb/events.1") == b"onetwo"
