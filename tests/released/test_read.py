"""What every released version has written is read by this one: nothing refused, set aside or lost."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from recorded import RELEASES, RecordedRun, opened, place
from repository import ROOT

from gpufleet.infra.catalog import files, load_catalog
from gpufleet.infra.cli import main
from gpufleet.infra.definition.loader import load
from gpufleet.infra.evidence import calibration, outcomes, receipts, traces
from gpufleet.infra.program.run_guard import creation_digest
from gpufleet.job.contract import attempt, done, metrics
from gpufleet.job.contract.commit import Best, Manifest, Published
from gpufleet.job.contract.run import load as load_run
from gpufleet.job.dataset import prepare, weights

RUNS = [
    pytest.param(RecordedRun(each / name), id=f"{name} of {each.name}")
    for each in RELEASES
    for name in ("growth", "command")
]
every_release = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
every_run = pytest.mark.parametrize("run", RUNS)
NOW = datetime(2026, 11, 27, tzinfo=UTC)


def assert_says(found: Any, recorded: Any) -> None:
    """What has been read and is written again says all that the recorded document says; it may say more."""
    assert part(json.loads(json.dumps(found)), recorded) == recorded


def part(tree: Any, of: Any) -> Any:
    """The values of `tree` for the keys of `of`."""
    if isinstance(tree, dict) and isinstance(of, dict):
        return {key: part(tree[key], of[key]) for key in of if key in tree}
    if isinstance(tree, list) and isinstance(of, list) and len(tree) == len(of):
        return [part(one, other) for one, other in zip(tree, of, strict=True)]
    return tree


def matching(objects: Mapping[str, bytes], pattern: str) -> list[bytes]:
    found = [content for key, content in objects.items() if re.fullmatch(pattern, key)]
    assert found, pattern
    return found


def set_aside(sentence: str) -> None:
    pytest.fail(f"set aside: {sentence}")


def test_each_version_of_the_change_log_is_recorded_and_this_one_is_the_newest() -> None:
    told = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sorted(told) == [each.name for each in RELEASES]
    assert told[0] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@every_run
def test_what_a_run_leaves_says_the_same_as_when_it_was_written(run: RecordedRun, tmp_path: Path) -> None:
    path = place({"run.json": run.ended["r1/run.json"]}, tmp_path) / "run.json"
    tree, found = json.loads(path.read_text()), load_run(path)
    assert (found.run, found.stack, found.experiment) == ("r1", run.name, tree["job"]["experiment"])
    assert_says(asdict(found.config), tree["job"]["parameters"])
    assert str(found.limits.max_usd) == tree["limits"]["max_usd"]
    assert {name: str(usd) for name, usd in found.hourly.items()} == tree["extras"]["hourly_usd"]
    assert [line.name for line in found.estimate.lines] == [line["name"] for line in tree["estimate"]["lines"]]
    given = {"dataset": found.dataset, "code": found.code, **found.folders}
    for name, data in {**tree["inputs"], **tree["inputs"].get("folders", {})}.items():
        if name not in ("archive", "folders"):
            assert_says([asdict(file) for file in given[name].files], data["files"])

    for content in matching(run.interrupted, r"r1/ckpt/step_\d+/manifest\.json"):
        manifest = Manifest.from_json(json.loads(content))
        assert manifest.commit.config_sha256 == found.config_sha256  # else it would not be resumed
        shown = {
            key: json.loads(content)[key] for key in (*(each.name for each in fields(Published)), "required_files")
        }
        files = [asdict(file) for file in manifest.files]
        assert_says({**manifest.commit.to_json(), "files": files, "run": manifest.run, **shown}, json.loads(content))

    reason = {"growth": done.FINISHED, "command": done.STOPPED}[run.name]
    for name, read in READERS.items():
        if f"r1/{name}" in run.ended:
            assert_says(read(run.ended[f"r1/{name}"]).to_json(), json.loads(run.ended[f"r1/{name}"]))
    receipt = receipts.parse(run.ended["r1/receipt.json"])
    assert (receipt.reason, receipt.with_notice, len(receipt.attempts)) == (reason, 1, 2)


READERS: dict[str, Callable[[bytes], Any]] = {
    "done.json": done.read,
    "stop.json": done.read_asked,
    "best.json": Best.from_bytes,
    "receipt.json": receipts.parse,
}
SUPERVISORS = {"attempt", "supervised_at", "ranks", "gpu", "gpu_count", "gpu_memory_gb", "driver", "cpus", "python"}
SHOWN_ALONE = SUPERVISORS | {"versions", "preflight", "compiled"}  # of a record: read by nobody


@every_run
def test_records_heartbeats_and_metrics_are_read_to_the_last_line(run: RecordedRun) -> None:
    for content in matching(run.ended, r"r1/attempts/.*"):
        tree = json.loads(content)
        again = attempt.record(content, set_aside).to_json()
        read = {key: value for key, value in tree.items() if key not in SHOWN_ALONE}
        assert {key: again.get(key, 0) for key in read} == read
    for content in matching(run.ended, r"r1/heartbeat/.*"):
        for line in content.splitlines():
            tree = json.loads(line)
            beat = attempt.last_beat(line, set_aside)
            assert beat is not None
            assert_says(beat.to_json(), tree)
    (content,) = matching(run.ended, r"r1/metrics\.jsonl")
    lines = content.splitlines()
    assert_says(metrics.records(lines), [json.loads(line) for line in lines])
    assert any(metrics.saves(record) for record in metrics.records(lines))


@every_release
def test_every_file_of_its_time_is_accepted_and_its_run_goes_on(release: Path, tmp_path: Path) -> None:
    """Under the run's id `pulumi up` refuses a file whose digest is another one: a key that is new does not count while
    it has its default (creation_digest).
    """
    place(opened(release / "definitions.tar.gz"), tmp_path)
    digests = json.loads((release / "digests.json").read_text())
    assert {path.name: creation_digest(load(path, now=NOW)) for path in tmp_path.iterdir()} == digests


@every_run
def test_a_project_s_bill_stands_on_what_an_earlier_version_measured(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = run.project(tmp_path / "project")
    place({f"calibrations/{run.name}/cpu.json": (run.folder / "calibration.json").read_bytes()}, project)
    place({f"receipts/{run.name}/r1.json": run.ended["r1/receipt.json"]}, project)
    monkeypatch.chdir(project)
    assert main(["cost", run.argument]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found = calibration.find(
        load(project / run.definition, now=NOW), load_catalog(project).instances["g5.2xlarge"], project
    )
    assert found is not None
    if isinstance(found, calibration.RefusedCalibration):  # read, and no longer believed: docs/calibration.md
        assert run.name == "growth"
        assert "does not count any more: the code that trains" in found.why
    elif run.name == "command":
        assert "measured on" in shown
    assert main(["receipts"]) == 0
    assert capsys.readouterr().err == ""
    kept, damaged = receipts.read(project)
    assert ([each.run for each in kept], damaged) == (["r1"], [])


@every_release
def test_what_a_project_keeps_is_read(release: Path, tmp_path: Path) -> None:
    growth = RecordedRun(release / "growth")
    place({name.replace("r1/", "results/growth/r1/"): content for name, content in growth.ended.items()}, tmp_path)
    (ended,) = outcomes.read(tmp_path, "growth")
    assert (ended.run, ended.types) == ("r1", ("g5.2xlarge", "g5.2xlarge"))
    dataset = growth.project(tmp_path / "project") / "data" / "stories"
    prepare.verify(dataset, prepare.read_manifest(dataset))
    assert len(weights.read(release / "weights").files) == 4
    (prices,) = files.folders(release / "prices")
    assert ("g5.2xlarge", "us-east-2") in files.read(prices).spot
    for trace in (release / "traces").iterdir():
        assert traces.read(trace).interruptions == 1
