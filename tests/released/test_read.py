"""What every released version has written is read by this one: nothing refused, set aside or lost."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.catalog import files, load_catalog
from gpufleet.infra.cli import main
from gpufleet.infra.definition.loader import load
from gpufleet.infra.evidence import calibration, receipts, traces
from gpufleet.job.contract import attempt, done, metrics
from gpufleet.job.contract.commit import Best, Manifest
from gpufleet.job.contract.inputs import read_weights, verify
from gpufleet.job.contract.run import load as load_run
from gpufleet.job.experiments.dataset import prepare
from tests.released.recorded import RELEASES, RecordedRun, place
from tests.repository import ROOT

RUNS = [
    pytest.param(RecordedRun(each / name), id=f"{name} of {each.name}")
    for each in RELEASES
    for name in ("growth", "command")
]
every_release = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
every_run = pytest.mark.parametrize("run", RUNS)
NOW = datetime(2026, 11, 27, tzinfo=UTC)


OTHERS: tuple[Any, ...] = (1, 7.25, "another", True, [], {}, None)


def unread(read: Callable[[bytes], Any], content: bytes, shown: str = "-") -> set[str]:
    """Keys of a document, by dotted path, that `read` makes nothing of: it gives the same whatever stands there. Those
    that begin as one of `shown` does are left out.
    """
    before, tree = read(content), json.loads(content)
    paths = {".".join(map(str, path)): path for path in leaves(tree)}
    return {
        name
        for name, path in paths.items()
        if not name.startswith(tuple(shown.split()))
        and all(gives_the_same(read, before, changed(tree, path, other)) for other in OTHERS)
    }


def gives_the_same(read: Callable[[bytes], Any], before: Any, tree: Any) -> bool:
    try:
        return bool(read(json.dumps(tree).encode()) == before)
    except (ValueError, KeyError, TypeError):
        return False


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value; of a list to those of its first."""
    if isinstance(tree, dict | list) and tree:
        for key, value in tree.items() if isinstance(tree, dict) else [(0, tree[0])]:
            yield from leaves(value, (*path, key))
    else:
        yield path


def changed(tree: Any, path: Sequence[Any], value: Any) -> Any:
    copied = at = copy.deepcopy(tree)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copied


def matching(objects: Mapping[str, bytes], pattern: str) -> list[bytes]:
    found = [content for key, content in objects.items() if re.fullmatch(pattern, key)]
    assert found, pattern
    return found


def test_each_version_of_the_change_log_is_recorded_and_this_one_is_the_newest() -> None:
    told = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sorted(told) == [each.name for each in RELEASES]
    assert told[0] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


# What a document tells people, and no reader of ours asks for.
SHOWN = {
    "attempt": "attempt supervised_at ranks gpu gpu_count gpu_memory_gb driver cpus python versions preflight compiled",
    "manifest": "attempt code_sha256 instance published_at required_files spent_s spent_usd",
    "receipt": "error_percent grade inside_range usd.difference",
    "calibration": "commit cpu_s seconds stack image device versions settings "
    "phases.0.memory_gb phases.0.rung phases.0.steps",
    "best": "schema manifest",
    "done": "schema",
}
RUN_SHOWN = "run.owner run.experiment region predicted inputs.archive.bytes inputs.code.commit inputs.code.changed"
RUN_READ = (  # of the bill
    "usd.p10 usd.p50 usd.p90 hours.p10 hours.p50 hours.p90 interruptions_expected phases.0.phase phases.0.step_ms "
    "phases.0.steps notice.0.type notice.0.phase notice.0.seconds lines.0.kind lines.0.name lines.0.amount "
    "lines.0.unit_price lines.0.quantity"
)
READERS: dict[str, tuple[str, Callable[[bytes], Any]]] = {  # by the end of a key
    r"attempts/[^/]+\.json": ("attempt", lambda content: attempt.record(content, set_aside)),
    r"heartbeat/[^/]+\.jsonl": ("beat", lambda content: attempt.last_beat(content, set_aside)),
    r"manifest\.json": ("manifest", lambda content: Manifest.from_json(json.loads(content))),
    r"done\.json": ("done", done.read),
    r"stop\.json": ("stop", done.read_asked),
    r"best\.json": ("best", Best.from_bytes),
    r"receipt\.json": ("receipt", lambda content: receipts.parse(content).to_json()),
}


def set_aside(sentence: str) -> None:
    raise ValueError(f"set aside: {sentence}")


@every_run
def test_every_key_of_what_a_run_leaves_is_read(run: RecordedRun) -> None:
    found = set()
    for key, content in {**run.interrupted, **run.ended}.items():
        for pattern, (kind, read) in READERS.items():
            if not re.fullmatch(f"r1/(.*/)?{pattern}", key):
                continue
            found.add(kind)
            for line in content.splitlines() if kind == "beat" else [content]:
                assert unread(read, line, SHOWN.get(kind, "-")) == set(), key
    assert found == {kind for kind, _ in READERS.values()} - {"stop" if run.name == "growth" else "best"}
    measured = (run.folder / "calibration.json").read_bytes()
    assert unread(lambda content: calibration.parse(json.loads(content)), measured, SHOWN["calibration"]) == set()


@every_run
def test_every_key_of_its_run_file_is_read(run: RecordedRun, tmp_path: Path) -> None:
    def read(content: bytes) -> Any:
        return load_run(place({"run.json": content}, tmp_path) / "run.json")

    tree = json.loads(run.ended["r1/run.json"])
    asked = {key: tree["estimate"][key] for key in (path.partition(".")[0] for path in RUN_READ.split())}
    content = json.dumps({**tree, "estimate": asked}).encode()
    assert unread(read, content, f"{RUN_SHOWN} estimate") == set()
    assert unread(read, content) & {f"estimate.{key}" for key in RUN_READ.split()} == set()


@every_run
def test_what_a_run_leaves_means_what_it_meant(run: RecordedRun, tmp_path: Path) -> None:
    config = load_run(place({"run.json": run.ended["r1/run.json"]}, tmp_path) / "run.json")
    assert (config.run, config.stack) == ("r1", run.name)
    for content in matching(run.interrupted, r"r1/ckpt/step_\d+/manifest\.json"):
        manifest = Manifest.from_json(json.loads(content))
        assert manifest.commit.config_sha256 == config.config_sha256  # else it would not be resumed
    reason = {"growth": done.FINISHED, "command": done.STOPPED}[run.name]
    ended, receipt = done.read(run.ended["r1/done.json"]), receipts.parse(run.ended["r1/receipt.json"])
    assert ended is not None
    assert ended.reason == receipt.reason == reason
    assert receipt.to_json() == {**receipt.to_json(), **json.loads(run.ended["r1/receipt.json"])}
    assert [each.interrupted for each in receipt.attempts] == [True, False]
    for content in matching(run.ended, r"r1/heartbeat/.*"):
        assert all(attempt.last_beat(line, set_aside) for line in content.splitlines())
    (content,) = matching(run.ended, r"r1/metrics\.jsonl")
    lines = [json.loads(line) for line in content.splitlines()]
    assert metrics.records(content.splitlines()) == [{**dict.fromkeys(metrics.KEYS), **line} for line in lines]
    assert all(line.keys() <= set(metrics.KEYS) for line in lines)
    saving = next(line for line in lines if line["saves"])
    assert (
        unread(lambda line: metrics.saves(json.loads(line)), json.dumps({"saves": saving["saves"]}).encode()) == set()
    )


@every_run
def test_a_project_s_bill_stands_on_what_an_earlier_version_measured(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = run.project(tmp_path / "project")
    place({f"calibrations/{run.name}/cpu.json": (run.folder / "calibration.json").read_bytes()}, project)
    place({f"receipts/{run.name}/r1.json": run.ended["r1/receipt.json"]}, project)
    monkeypatch.chdir(project)
    assert main(["cost", run.argument, "--all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found = calibration.find(
        load(project / run.definition, now=NOW), load_catalog(project).instances["g5.2xlarge"], project
    )
    assert found is not None
    if isinstance(found, calibration.RefusedCalibration):  # read, and no longer believed: docs/calibration.md
        assert run.name == "growth"
        assert "no longer counts: job.parameters.cuda_graphs was absent" in found.why
    elif run.name == "command":
        assert "measured on" in shown
    assert main(["receipts"]) == 0
    assert capsys.readouterr().err == ""
    kept, damaged = receipts.read(project)
    assert ([each.run for each in kept], damaged) == (["r1"], [])


@every_release
def test_what_a_project_keeps_is_read(release: Path, tmp_path: Path) -> None:
    growth = RecordedRun(release / "growth")
    dataset = growth.project(tmp_path / "project") / "data" / "stories"
    verify(dataset, prepare.read_manifest(dataset))
    assert len(read_weights(release / "weights").files) == 4
    (prices,) = files.folders(release / "prices")
    assert ("g5.2xlarge", "us-east-2") in files.read(prices).spot
    for trace in (release / "traces").iterdir():
        assert traces.read(trace).interruptions == 1
