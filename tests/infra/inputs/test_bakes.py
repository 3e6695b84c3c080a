"""An AMI of `gpufleet bake` that does not hold what the job needs, or not for as long, is refused; its bill says after
how many starts it pays.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.bill import bake as bill
from gpufleet.infra.cli import main
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs import bakes, folders
from gpufleet.infra.inputs.bakes import Bake, BakedData
from gpufleet.infra.inputs.readiness import not_ready
from gpufleet.infra.program import plan
from gpufleet.infra.program.run_guard import Previous
from tests.rehearsal.engine_world import AMI, IMAGE, edit, pinned, project

BAKED = "ami-0ba0ba0ba0ba0ba0b"
NOW = datetime.now(UTC)
GOOD = Bake(
    ami=BAKED,
    region="us-east-2",
    base_ami=AMI,
    images=(IMAGE,),
    made="2026-11-30T12:00:00Z",
    until=f"{NOW + timedelta(days=30):%Y-%m-%dT%H:%M:%SZ}",
    usd_per_month=Decimal("5.00"),
    builder_usd=Decimal("0.06"),
    pulled_s=Decimal(600),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file whose nodes start from the bake."""
    made = pinned(project(tmp_path / "project"))
    edit(made, f"  ami: {AMI}", f"  baked_ami: {BAKED}\n  ami: {AMI}")
    return made


def definition(file: Path) -> StackDefinition:
    return load(file, now=NOW)


def said(file: Path, bake: Bake | None) -> list[str]:
    if bake is not None:
        bakes.write(bake, file.parents[1])
    return not_ready(definition(file), file.parents[1])


def test_a_bake_with_the_job_s_images_is_taken(file: Path) -> None:
    assert said(file, GOOD) == []
    assert bakes.read(definition(file), file.parents[1]) == GOOD


OTHER = IMAGE.replace("5" * 64, "6" * 64)


@pytest.mark.parametrize(
    ("bake", "why"),
    [
        (None, f"has no bakes/{BAKED}.json, so its images are unknown"),
        (replace(GOOD, images=(OTHER,)), f"contains {OTHER}, but the job needs {IMAGE}"),
        (replace(GOOD, base_ami="ami-01234567"), f"was made from ami-01234567, but fleet.ami is {AMI}"),
        (replace(GOOD, region="us-west-2"), "is in us-west-2, but fleet.region is us-east-2"),
    ],
)
def test_a_bake_of_something_else_is_refused(file: Path, bake: Bake | None, why: str) -> None:
    (sentence,) = said(file, bake)
    stack = file.stem
    assert sentence == (
        f"fleet.baked_ami, {BAKED}, {why}: run `gpufleet bake {definition(file).argument} --delete`, then"
        f" `gpufleet bake {stack}`, or remove fleet.baked_ami."
    )
    with pytest.raises(GpufleetError, match="not ready for up"):
        plan.make(file.parents[1], file.stem, now=NOW, previous=Previous(outputs={}), preview=False)


SNAPSHOT = "snap-0ba0ba0ba0ba0ba0b"


def data_of(root: Path, folder: Path) -> BakedData:
    content = folders.content(str(folder), root)
    assert content is not None
    return BakedData(
        snapshot=SNAPSHOT,
        region="us-east-2",
        place=str(folder),
        sha256=content.sha256,
        size_gib=2,
        made=GOOD.made,
        until=GOOD.until,
        usd_per_month=Decimal("0.11"),
        builder_usd=Decimal("0.06"),
    )


@pytest.fixture
def with_data(tmp_path: Path) -> Path:
    """A file whose nodes have a volume from a snapshot of a model."""
    made = pinned(project(tmp_path / "project"))
    edit(made, "storage:\n", f"storage:\n  data: {{size_gib: 2, snapshot: {SNAPSHOT}}}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(b"trained")
    return made


def test_a_snapshot_is_taken_while_its_place_has_the_same_files_or_is_gone(with_data: Path, tmp_path: Path) -> None:
    root, model = with_data.parents[1], tmp_path / "model"
    assert not_ready(definition(with_data), root) == []  # one that no bake made is its owner's affair
    bakes.write(data_of(root, model), root)
    assert not_ready(definition(with_data), root) == []
    (model / "weights.bin").write_bytes(b"trained again")
    (sentence,) = not_ready(definition(with_data), root)
    assert f"storage.data.snapshot, {SNAPSHOT}, was made of {model} as it was at {GOOD.made}" in sentence
    assert f"`gpufleet bake {with_data.stem} --data {model} --delete`" in sentence
    with pytest.raises(GpufleetError, match="its files have changed"):
        plan.make(root, with_data.stem, now=NOW, previous=Previous(outputs={}), preview=False)
    (model / "weights.bin").unlink()
    assert not_ready(definition(with_data), root) == []


def test_a_snapshot_that_is_deleted_too_early_or_elsewhere_is_refused(with_data: Path, tmp_path: Path) -> None:
    root = with_data.parents[1]
    good = data_of(root, tmp_path / "model")
    bakes.write(replace(good, region="us-west-2"), root)
    assert "is in us-west-2, and fleet.region is us-east-2" in not_ready(definition(with_data), root)[0]
    soon = definition(with_data).expiry(NOW) - timedelta(seconds=2)
    bakes.write(replace(good, until=f"{soon:%Y-%m-%dT%H:%M:%SZ}"), root)
    with pytest.raises(GpufleetError, match=f"{SNAPSHOT}, is deleted at"):
        plan.make(root, with_data.stem, now=NOW, previous=Previous(outputs={}), preview=False)


def test_the_bill_names_a_snapshot_s_price_and_its_place(
    with_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = with_data.parents[1]
    bakes.write(replace(data_of(root, tmp_path / "model"), until="2026-12-30T22:00:00Z"), root)
    monkeypatch.chdir(root)
    main(["cost", with_data.stem])
    told = " ".join(capsys.readouterr().out.split())
    assert f"{SNAPSHOT} of `gpufleet bake` costs 0.11 USD a month until 2026-12-30." in told
    assert f"It is a copy of {tmp_path / 'model'}, and costs 0.17 in all." in told
    main(["cost", with_data.stem, "--json"])
    (baked,) = json.loads(capsys.readouterr().out)["baked"]
    assert (baked["id"], baked["usd"], baked["usd_per_month"]) == (SNAPSHOT, "0.1700", "0.11")


def test_a_run_that_may_outlive_the_bake_is_refused(file: Path) -> None:
    root, end = file.parents[1], definition(file).expiry(NOW)

    def begin(until: datetime) -> plan.Plan:
        bakes.write(replace(GOOD, until=f"{until:%Y-%m-%dT%H:%M:%SZ}"), root)
        return plan.make(root, file.stem, now=NOW, previous=Previous(outputs={}), preview=False)

    assert begin(end + timedelta(seconds=2)).warnings == ()
    with pytest.raises(GpufleetError, match=f"{BAKED}, is deleted at .*, but the fleet may launch nodes until"):
        begin(end - timedelta(seconds=2))


def test_a_file_that_no_bake_wrote_is_an_error(file: Path) -> None:
    path = bakes.write(GOOD, file.parents[1])
    path.write_text(json.dumps({**json.loads(path.read_text()), "usd_per_month": "free"}))
    with pytest.raises(GpufleetError, match="usd_per_month"):
        said(file, None)


def test_the_bill_says_what_it_costs_and_after_how_many_starts_it_pays(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bakes.write(GOOD, file.parents[1])
    monkeypatch.chdir(file.parents[1])
    assert main(["cost", file.stem]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"{BAKED} of `gpufleet bake` costs 5.00 USD a month until {GOOD.until[:10]}." in told
    assert "Its builder pulled the images in 10.0 min: if a start here saves as much," in told


def test_it_pays_once_the_pulls_have_cost_as_much_as_builder_and_snapshot() -> None:
    month = replace(GOOD, until="2026-12-30T22:00:00Z")  # 730 hours, AWS's month
    assert bill.usd(month) == Decimal("5.06")
    assert "0.50 USD, its 5.06 USD are paid after 11 starts" in bill.pays_after(month, Decimal(3))
    assert "0.51 USD, its 5.06 USD are paid after 10 starts" in bill.pays_after(month, Decimal("3.036"))
    assert (
        bill.pays_after(replace(month, pulled_s=Decimal(0)), Decimal(3)) == "Its builder pulled the images in no time."
    )
