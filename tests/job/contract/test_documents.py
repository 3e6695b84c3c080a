"""What another process wrote is read with doubt: no name leads out of its folder, no value ends a run."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.job import measured
from gpufleet.job.contract import inputs, metrics, reading
from gpufleet.job.contract.attempt import AttemptRecord
from gpufleet.job.contract.commit import Best, Commit, Manifest
from gpufleet.job.contract.done import FINISHED, Done
from gpufleet.job.contract.inputs import read_weights
from gpufleet.job.contract.run import RunFile, load
from gpufleet.job.experiments.dataset import prepare, weights
from gpufleet.job.experiments.engine.committed import Committed
from gpufleet.job.experiments.engine.metrics import MetricsFile
from gpufleet.job.experiments.kernel import stages
from gpufleet.job.experiments.kernel.judge.verdict import Verdict
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.ledger import Ledger
from gpufleet.job.supervisor import attempts, receipt, staging
from gpufleet.job.supervisor.child import MetricsFollower
from gpufleet.job.supervisor.forecast import Forecast
from gpufleet.job.supervisor.publish import commits
from gpufleet.job.supervisor.store import Entry
from tests import mutations
from tests.job import runs
from tests.job.supervisor_world import Bench

DONE = Done(FINISHED, "", "i-1", "2027-01-15T09:00:00Z")
OUTSIDE = ["/usr/x", "../run.json", "a/../../x", "", ".", "a//b", "a/", "./a", "a\0b", "a\x1b[2Jb", "\ud800", "x" * 256]


def listing(name: Any) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": 1, "sha256": "0" * 64}]


def of_manifest(name: Any, folder: Path) -> object:
    return Manifest.from_json({"schema": 1, "step": 3, "run": "r1", "config_sha256": "c", "files": listing(name)})


def of_commit(name: Any, folder: Path) -> object:
    return Commit.from_json({"schema": 1, "step": 3, "config_sha256": "c", "files": listing(name)})


def of_requirement(name: Any, folder: Path) -> object:
    tree = {"schema": 1, "step": 3, "config_sha256": "c", "files": listing("w.bin"), "requires": [name]}
    return Commit.from_json(tree)


def of_dataset(name: Any, folder: Path) -> object:
    facts = {"train_characters": 9, "validation_characters": 1, "vocab": 17}
    tree = {"schema": 1, "kind": "characters", "source": "x", "facts": facts, "files": listing(name)}
    (folder / prepare.MANIFEST).write_text(json.dumps(tree))
    return prepare.read_manifest(folder)


def of_a_shard(name: Any, folder: Path) -> object:
    facts = {"train_characters": 9, "validation_characters": 1, "vocab": 17}
    tree = {"schema": 1, "kind": "characters", "source": "x", "facts": facts, "files": listing("a"), "train": [name]}
    (folder / prepare.MANIFEST).write_text(json.dumps(tree))
    return prepare.read_manifest(folder)


def of_weights(name: Any, folder: Path) -> object:
    (folder / weights.MANIFEST).write_text(json.dumps({"schema": 1, "name": "w", "files": listing(name)}))
    return read_weights(folder)


def of_run_json(name: Any, folder: Path) -> object:
    tree = runs.tree()
    tree["inputs"]["dataset"]["files"] = listing(name)
    return load(runs.place(folder, tree))


def of_a_prefix(manifest: str) -> Any:
    def read(name: Any, folder: Path) -> None:
        bench = Bench(folder)
        place = bench.bucket / "inputs" / bench.tree["inputs"]["dataset"]["sha256"]
        given: dict[str, object] = {"uri": str(place), "sha256": None, "files": []}
        bench.tree["inputs"]["dataset" if manifest == inputs.DATASET else "base_weights"] = given
        (place / manifest).write_text(json.dumps({"schema": 1, "files": listing(name)}))
        run = load(runs.place(folder / "next", bench.tree))
        before = sorted(folder.rglob("*"))
        try:
            staging.inputs(staging.Stage(store=bench.store, run=run, workdir=folder / "next", say=lambda text: None))
        finally:
            added = set(folder.rglob("*")) - set(before)
            assert all(path.is_relative_to(folder / "next") for path in added)

    return read


PLACES = {
    "manifest.json": of_manifest,
    "commit.json": of_commit,
    "what a commit requires": of_requirement,
    "dataset.json": of_dataset,
    "a shard of dataset.json": of_a_shard,
    "weights.json": of_weights,
    "run.json": of_run_json,
    "dataset.json of a prefix": of_a_prefix(inputs.DATASET),
    "weights.json of a prefix": of_a_prefix(inputs.WEIGHTS),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [*OUTSIDE, 7, None], ids=ascii)
def test_no_name_leads_out_of_its_folder(name: Any, place: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(name|requires|train)[^ ]* (is|names) .*(name|text|longer|one of)"):
        PLACES[place](name, tmp_path)


def test_a_run_goes_on_where_another_node_left_what_cannot_be(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    record = {"type": "g5.2xlarge", "launched_at": "2027-01-15T07:00:00Z", "floor": "high", "started_s": [], "exit": 7}
    bench.store.put_bytes(json.dumps(record).encode(), "attempts/i-odd.json")
    beats = [
        {"step": 3, "attempt_s": "600", "compute_usd": "0.06"},
        {"step": 4, "attempt_s": "six", "compute_usd": "0.07"},
    ]
    bench.store.put_bytes("\n".join(map(json.dumps, beats)).encode(), "heartbeat/i-odd.jsonl")
    bench.store.put_bytes(b"[7]", "attempts/i-none.json")
    assert bench.attempt().run() == 0
    for said in (
        "attempts/i-odd.json: set aside: floor is 'high', not a whole number",
        "attempts/i-odd.json: set aside: started_s is a list, not an amount",
        "heartbeat/i-odd.jsonl: set aside: a line: attempt_s is 'six', not an amount",
        "attempts/i-none.json: set aside: it is a list",
    ):
        assert said in bench.said
    odd = next(each for each in bench.json("receipt.json")["attempts"] if each["instance"] == "i-odd")
    assert (odd["seconds"], odd["last_step"]) == ("3600.000", 3)  # until the next node's launch; step by its heartbeat


# Whatever a document says: it is read, set aside, or refused in a sentence, and ends no process with a traceback.


def committed(content: bytes, folder: Path) -> None:
    (folder / "ckpt" / "step_00000003").mkdir(parents=True)
    (folder / "ckpt" / "step_00000003" / "commit.json").write_bytes(content)
    commits(folder)
    Committed(folder / "ckpt", "c").best("dense")


def published(content: bytes, folder: Path) -> None:
    Manifest.from_json(reading.parse(content))


def best(content: bytes, folder: Path) -> None:
    Best.from_bytes(content)


def run_json(content: bytes, folder: Path) -> None:
    """What is accepted serves whoever asks it."""
    (folder / "run.json").write_bytes(content)
    run = load(folder / "run.json")
    run.rates("g5.2xlarge", "us-east-2a")
    run.gpus("g5.2xlarge")
    told = run.estimate
    Forecast(run.config, "g5.2xlarge", phases=told.phases, notice=told.notice).end_s(3, None)
    receipt.text(receipt.build(run, [], DONE))
    assert run.code_sha256 is None or run.code_sha256.isascii()


def dataset_json(content: bytes, folder: Path) -> None:
    (folder / prepare.MANIFEST).write_bytes(content)
    found = prepare.read_manifest(folder)
    prepare.describe(found)
    SftConfig().with_facts(found.facts)


def weights_json(content: bytes, folder: Path) -> None:
    (folder / weights.MANIFEST).write_bytes(content)
    read_weights(folder)


@cache
def a_run(folder: Path) -> RunFile:
    return load(runs.place(folder, runs.tree()))


def attempted(key: str) -> Any:
    def read(content: bytes, folder: Path) -> None:
        there = {
            "attempts/i-1.json": json.dumps(RECORD).encode(),
            "heartbeat/i-1.jsonl": json.dumps(BEAT).encode(),
            key: content,
        }
        store: Any = SimpleNamespace(
            get_bytes=there.get, entries=lambda prefix: [Entry(key=k, bytes=1) for k in there if k.startswith(prefix)]
        )
        run, said = a_run(folder.parent), list[str]()
        found = attempts.read_ended(store, run, DONE, None, 0.0, say=said.append)
        made = receipt.build(run, found, DONE)
        receipt.text(made)
        assert made.actual.is_finite()

    return read


def metrics_line(content: bytes, folder: Path) -> None:
    run = a_run(folder.parent)
    good = metrics.write(LINE)
    (folder / "metrics.jsonl").write_bytes(good + content + b"\n" + good)
    progress = MetricsFollower(folder / "metrics.jsonl", lambda: 0.0)
    progress.poll()
    assert progress.step_s is None or progress.step_s < 2**53
    MetricsFile(folder / "metrics.jsonl").resume(10)
    assert receipt.measure(run, [], folder, AttemptRecord(ranks=1), at="2027-01-15T09:00:00Z") is None  # of no node
    measured.phases(metrics.records(content.split(b"\n")))


def ledger(read: Any) -> Any:
    def read_kept(content: bytes, folder: Path) -> None:
        (folder / "kept.jsonl").write_bytes(content.replace(b"\n", b" ") + b"\n")
        Ledger(folder / "kept.jsonl").read(read)

    return read_kept


LISTED = [{"name": "w.bin", "bytes": 3, "sha256": "0" * 64}, {"name": "x.bin", "bytes": 3, "sha256": "0" * 64}]
COMMITTED = {
    "schema": 1, "step": 3, "phase": "dense", "goes_on_from": 3, "tokens": 7, "val_loss": 0.5, "config_sha256": "c",
    "determinism": {"ranks": 1}, "dataset": {"sha256": "d", "source": "s"}, "requires": ["final/x"], "reason": "timed",
    "base_weights": None, "torch": "2", "world_size": 1, "files": LISTED,
}  # fmt: skip
RECORD = {
    "instance": "i-1", "type": "g5.2xlarge", "zone": "us-east-2a", "launched_at": "2027-01-15T08:00:00Z",
    "booted_at": "2027-01-15T08:01:00Z", "started_s": 99.5, "resumed_step": 3, "rung": 0, "floor": 0,
    "reclaimed": {"i-0": True},
    "exit": {
        "code": 75, "reason": "notice", "notice": True, "at": "2027-01-15T08:30:00Z", "ends_at": "2027-01-15T08:32:00Z",
    },
}  # fmt: skip
BEAT = {
    "ts": "2027-01-15T08:29:00Z", "step": 7, "phase": "dense", "loss": 0.5, "tok_s": 9.0, "step_s": 0.1,
    "spent_usd": "0.5", "attempt_usd": "0.4", "attempt_s": "1700.000", "lived_s": "1700.000", "compute_usd": "0.3",
    "usd_per_hour": "0.36", "ceiling_s": "0",
}  # fmt: skip
LINE = {
    "ts": 1.5, "phase": "dense", "step": 7, "tokens": 70, "loss": 0.5, "val_loss": 0.4, "step_ms": 100.0, "tok_s": 9.0,
    "mem_gb": 0.1, "event": "a save is on its way already", "resumed": 5,
    "saves": [{"step": 5, "reason": "timed", "bytes": 12_000_000, "blocked_s": 0.5}],
}  # fmt: skip
WINDOWS = {
    "schema": 1, "kind": "windows", "source": "tales", "tokenizer": {"kind": "bytes", "vocab": 257, "id": "bytes"},
    "train": ["w.bin"], "validation": ["x.bin"], "tokens": {"train": 10, "validation": 2},
    "stories": {"train": 3, "validation": 1}, "files": LISTED,
}  # fmt: skip
PACKED = {
    "schema": 1, "kind": "packed", "source": "pairs", "train": ["w.bin"], "validation": ["x.bin"], "files": LISTED,
    "facts": {
        "row": 8, "longest": 8, "most_examples": 2, "rows": 4, "examples": 5, "tokens": 30, "vocab": 99,
        "held_out_examples": 1, "held_out_rows": 1, "loss_tokens": 9, "prompts": 1, "stop": 2, "loss_on": "response",
        "template": "llama-3", "tokenizer": "words.json", "tokenizer_id": "w", "packing": True, "texts": False,
    },
}  # fmt: skip
VERDICT = {
    "row": "full", "candidate": "a", "task": "relu", "origin": "planted", "label": "", "source_sha256": "0",
    "passed": True, "stage": 6, "reason": "", "seconds": {"rules": 0.5}, "cpu_s": 1.0, "isolated": True, "speedup": 1.5,
    "suspicious": False, "kernel_s": [1.0, 2.0, 3.0], "reference_s": [1.0, 2.0, 3.0],
}  # fmt: skip
MANIFEST = {**COMMITTED, "run": "r1", "spent_usd": "1"}
CANDIDATE = {"name": "a", "weights": "4 0.5", "task": "relu", "source": "pass", "answer": "pass"}
DOCUMENTS: dict[str, tuple[Any, Any]] = {
    "commit.json": (COMMITTED, committed),
    "manifest.json": (MANIFEST, published),
    "best.json": ({"schema": 1, "step": 3, "val_loss": 0.5, "manifest": "m"}, best),
    "run.json": (runs.tree(), run_json),
    "dataset.json of windows": (WINDOWS, dataset_json),
    "dataset.json of packed rows": (PACKED, dataset_json),
    "weights.json": ({"schema": 1, "name": "w", "files": LISTED}, weights_json),
    "attempts/<instance>.json": (RECORD, attempted("attempts/i-1.json")),
    "heartbeat/<instance>.jsonl": (BEAT, attempted("heartbeat/i-1.jsonl")),
    "metrics.jsonl": (LINE, metrics_line),
    "stages/verdicts.jsonl": (VERDICT, ledger(Verdict.from_json)),
    "stages/candidates.jsonl": (CANDIDATE, ledger(stages.candidate)),
}
REFUSED = (
    "manifest.json",
    "run.json",
    "dataset.json of windows",
    "dataset.json of packed rows",
    "weights.json",
)  # in a sentence


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_document_ends_a_process_with_a_traceback(document: str, tmp_path: Path) -> None:
    tree, read = DOCUMENTS[document]
    for number, content in enumerate(mutations.mutations(tree)):
        folder = tmp_path / str(number)
        folder.mkdir()
        said = ""
        try:
            read(content, folder)
        except ValueError as error:
            said = str(error).replace(str(folder), "")
        except Exception as error:
            raise AssertionError(content[:2000]) from error
        assert not said or document in REFUSED, (content[:500], said)
        assert len(said) < 500, said
        assert said.isprintable(), said
        shutil.rmtree(folder)
