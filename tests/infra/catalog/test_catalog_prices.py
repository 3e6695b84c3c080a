"""The newest prices count, of the shipped prices and a project's `prices/`, wherever the program runs."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.catalog import SHIPPED, Price, SpotPrice, files, load_catalog
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program.plan import make
from gpufleet.infra.program.run_guard import Previous
from gpufleet.rehearsal import scratch
from tests.repository import ROOT

KEY = ("g5.2xlarge", "us-east-2")


def priced(amount: str, day: str, source: str = "AWS Price List") -> Price:
    return Price(
        amount=Decimal(amount), unit="node-hour", source=source, as_of=date.fromisoformat(day), status="verified"
    )


def refreshed(on_demand: Price, spot: tuple[SpotPrice, ...] = ()) -> files.Prices:
    """The shipped prices with a new price for one type."""
    prices = files.read(SHIPPED)
    prices.on_demand[KEY] = on_demand
    if spot:
        prices.spot[KEY] = spot
    return prices


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "infra").mkdir()
    return tmp_path


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    shipped = files.read(SHIPPED)
    spot = (SpotPrice(zone="az1", price=priced("0.4", "2026-11-20"), low=Decimal("0.31"), high=Decimal("0.55")),)
    shipped.spot[KEY] = spot
    folder = files.write(shipped, tmp_path / "prices", date(2026, 11, 21))
    assert folder.name == "2026-11-21"
    assert files.read(folder) == shipped


def test_the_same_prices_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (files.write(files.read(SHIPPED), tmp_path / "prices", date(2026, 11, 21)) for _ in range(2))
    assert [path.read_bytes() for path in sorted(first.iterdir())] == [
        path.read_bytes() for path in sorted(second.iterdir())
    ]


def test_a_second_refresh_of_a_day_leaves_the_first_alone_and_counts_after_it(tmp_path: Path) -> None:
    parent = tmp_path / "prices"
    for _ in range(11):
        files.write(files.Prices(), parent, date(2026, 11, 21))
    files.write(files.Prices(), parent, date(2026, 11, 3))
    names = [folder.name for folder in files.folders(parent)]
    assert names[:3] == ["2026-11-03", "2026-11-21", "2026-11-21-2"]
    assert names[-1] == "2026-11-21-11"


def test_a_folder_half_written_is_not_there(tmp_path: Path) -> None:
    broken = files.Prices(on_demand={KEY: "not a price"})  # type: ignore[dict-item]
    with pytest.raises(AttributeError):
        files.write(broken, tmp_path / "prices", date(2026, 11, 21))
    assert list((tmp_path / "prices").iterdir()) == []


def test_the_project_root_and_the_programs_own_folder_see_the_projects_prices(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(refreshed(priced("1.5", "2026-11-21")), project / "prices", date(2026, 11, 21))
    for folder in (project, project / "infra"):
        monkeypatch.chdir(folder)
        catalog = load_catalog()
        assert catalog.on_demand(*KEY).amount == Decimal("1.5")
        assert (catalog.as_of, catalog.name) == (date(2026, 11, 21), "prices/2026-11-21")


def test_a_scratch_project_has_the_prices_of_the_project_it_is_made_from(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program runs in the repository's own infra/, so the plan asks for the prices of the project's root."""
    for day in ("2026-11-20", "2026-11-21"):
        files.write(refreshed(priced("1.5", day)), project / "prices", date.fromisoformat(day))
    monkeypatch.chdir(project)
    text = (ROOT / "stacks" / "tinystories-growth.yaml").read_text()
    made = scratch.make(tmp_path_factory.mktemp("scratch") / "made", {"tinystories-growth": text})
    monkeypatch.chdir(SHIPPED.parent)
    now = datetime(2026, 11, 21, tzinfo=UTC)
    nothing = Previous(outputs={})
    plan = make(made, "tinystories-growth", now=now, previous=nothing, preview=True)
    listed = {each.type: each.on_demand for each in plan.bill.types}
    assert listed["g5.2xlarge"] is not None
    assert listed["g5.2xlarge"].amount == Decimal("1.5")


def test_another_project_and_no_project_do_not(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(refreshed(priced("1.5", "2026-11-21")), project / "prices", date(2026, 11, 21))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert load_catalog().name == "shipped"
    assert load_catalog(project).on_demand(*KEY).amount == Decimal("1.5")


def test_the_newest_folder_counts_and_a_newer_shipped_figure_beats_it(project: Path) -> None:
    shipped = load_catalog(project)
    for day, amount in (("2026-11-21", "1.5"), ("2026-11-03", "1.4")):
        files.write(refreshed(priced(amount, day)), project / "prices", date.fromisoformat(day))
    assert load_catalog(project).on_demand(*KEY).amount == Decimal("1.5")
    files.write(refreshed(priced("9", "2020-01-01")), project / "prices", date(2026, 12, 1))
    assert load_catalog(project).on_demand(*KEY) == shipped.on_demand(*KEY)


def test_what_a_refreshed_folder_lacks_comes_from_the_shipped_prices(project: Path) -> None:
    only = files.Prices(on_demand={KEY: priced("1.5", "2026-11-21")})
    files.write(only, project / "prices", date(2026, 11, 21))
    catalog = load_catalog(project)
    assert catalog.on_demand("g5.xlarge", "us-east-2") == load_catalog(project / "x").on_demand(
        "g5.xlarge", "us-east-2"
    )
    assert catalog.spot(*KEY) == load_catalog(project / "x").spot(*KEY)


def test_spot_zones_come_cheapest_first_whatever_their_order_in_the_file(project: Path) -> None:
    zones = tuple(SpotPrice(zone=f"az{n}", price=priced(usd, "2026-11-21")) for n, usd in ((1, "0.9"), (2, "0.3")))
    files.write(refreshed(priced("1.5", "2026-11-21"), zones), project / "prices", date(2026, 11, 21))
    assert [zone.zone for zone in load_catalog(project).spot(*KEY)] == ["az2", "az1"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.526,", "free,", r"on_demand\.csv, line 2: not a price \('free' is no number of USD; allowed: above 0"),
        ("0.526,", ",", r"on_demand\.csv, line 2: not a price \('' is no number of USD"),
        ("0.526,", "-1,", r"on_demand\.csv, line 2: not a price \(-1 USD; allowed: above 0"),
        ("0.526,", "0,", r"on_demand\.csv, line 2: not a price \(0 USD; allowed"),
        ("0.526,", "1e99,", r"line 2: not a price \(1e99 USD; allowed"),
        ("us-east-1,", "us-east-9,", "line 2: not a price .region 'us-east-9' is none of us-east-1, us-east-2"),
        ("us-east-1,", "us-east-1 us-east-1,", "g4dn.xlarge in us-east-1 is there twice"),
        ("g4dn.xlarge,", ",", "it names nothing"),
        ("verified", "verified,more", "more cells than columns"),
        ("2026-07-20,verified", "2026-07-20,sure", "neither verified nor inferred"),
        ("2026-07-20,verified", "July,verified", r"line 2: not a price \(as_of 'July' is no date; allowed: year"),
        ("type,regions", "type,region", r"on_demand\.csv, line 1: the columns"),
    ],
)
def test_a_broken_price_file_is_an_error_with_its_line(project: Path, old: str, new: str, said: str) -> None:
    folder = files.write(files.read(SHIPPED), project / "prices", date(2026, 11, 21))
    path = folder / "on_demand.csv"
    lines = [
        "type,regions,usd_per_hour,source,as_of,status",
        "g4dn.xlarge,us-east-1,0.526,karpenter,2026-07-20,verified",
    ]
    path.write_text("\n".join(lines).replace(old, new))
    with pytest.raises(GpufleetError, match=said):
        load_catalog(project)


def test_a_service_priced_in_another_unit_than_bills_count_in_is_an_error(project: Path) -> None:
    folder = files.write(files.read(SHIPPED), project / "prices", date(2026, 11, 21))
    path = folder / "services.csv"
    path.write_text(path.read_text().replace("GB-month,infracost", "TB-month,infracost", 1))
    with pytest.raises(GpufleetError, match=r"services\.csv: \S+ in us-east-1: its price is for one 'TB-month'"):
        load_catalog(project)


def test_a_price_file_that_a_spreadsheet_wrote_is_read(project: Path) -> None:
    folder = files.write(files.read(SHIPPED), project / "prices", date(2026, 11, 21))
    for name in ("on_demand.csv", "spot.csv", "services.csv"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes().replace(b"\n", b"\r\n"))
    assert files.read(folder) == files.read(SHIPPED)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("az1,0.4,,", None),
        ("az1,0.4,0.3,0.5", None),
        ("az1,0,,", "0 USD"),
        ("az1,0.4,NaN,", "NaN USD"),
        ("az1,0.4,0.5,0.6", "0.4 USD is not within 0.5 to 0.6"),
        ("us-east-2a,0.4,,", "is not like az1"),
        ("az2,0.4,,", "g5.2xlarge in us-east-2 az2 is there twice"),
    ],
)
def test_a_broken_spot_row_is_an_error_with_its_line(project: Path, row: str, said: str | None) -> None:
    folder = files.write(files.Prices(), project / "prices", date(2026, 11, 21))
    head = (folder / "spot.csv").read_text()
    rows = [f"g5.2xlarge,us-east-2,{cells},a test,2026-11-20,verified\n" for cells in ("az2,0.5,,", row)]
    (folder / "spot.csv").write_text(head + "".join(rows))
    if said is None:
        assert len(load_catalog(project).spot("g5.2xlarge", "us-east-2")) == 2
        return
    with pytest.raises(GpufleetError, match=rf"spot\.csv, line 3: not a price \(.*{said}"):
        load_catalog(project)


def test_prices_that_could_not_be_read_back_are_not_written(tmp_path: Path) -> None:
    free = files.Prices(on_demand={KEY: priced("0", "2026-11-20")})
    with pytest.raises(GpufleetError, match="0 USD"):
        files.write(free, tmp_path / "prices", date(2026, 11, 21))
    assert list((tmp_path / "prices").iterdir()) == []


def test_a_folder_without_its_files_is_an_error(project: Path) -> None:
    (files.write(files.read(SHIPPED), project / "prices", date(2026, 11, 21)) / "spot.csv").unlink()
    with pytest.raises(GpufleetError, match=r"a price folder has on_demand\.csv, spot\.csv, services\.csv"):
        load_catalog(project)


def test_empty_folders_and_those_of_other_names_are_not_read(project: Path) -> None:
    (project / "prices" / "2026-11-21").mkdir(parents=True)
    (project / "prices" / ".2026-11-21.77").mkdir(parents=True)
    (project / "prices" / "notes").mkdir()
    assert load_catalog(project).name == "shipped"


def test_slices_of_a_gpu_are_written_as_such() -> None:
    catalog = load_catalog()
    shown = {type_: catalog.instances[type_].gpus for type_ in ("g6f.large", "gr6f.4xlarge", "p5.48xlarge")}
    assert shown == {"g6f.large": "1/8 of one L4", "gr6f.4xlarge": "1/2 of one L4", "p5.48xlarge": "8 x H100"}


def test_merging_keeps_the_newer_figure_of_each() -> None:
    old, new = priced("1", "2026-01-01"), priced("2", "2026-02-01")
    base, over = files.Prices(on_demand={KEY: new}), files.Prices(on_demand={KEY: old})
    assert files.newer(base, over).on_demand[KEY] == new
    assert files.newer(over, base).on_demand[KEY] == new
    same = replace(old, amount=Decimal(3))
    assert files.newer(over, files.Prices(on_demand={KEY: same})).on_demand[KEY] == same


CHANGE = replace(priced("1.1", "2026-11-21"), valid_from=date(2026, 12, 1))


def test_a_price_from_a_day_on_counts_from_that_day_on(project: Path) -> None:
    prices = refreshed(priced("1.5", "2026-11-21"))
    prices.dated[KEY] = (CHANGE, replace(CHANGE, amount=Decimal("1.0"), valid_from=date(2027, 1, 1)))
    folder = files.write(prices, project / "prices", date(2026, 11, 21))
    assert files.read(folder) == prices
    for day, usd in (("2026-11-30", "1.5"), ("2026-12-01", "1.1"), ("2026-12-31", "1.1"), ("2027-01-01", "1.0")):
        assert load_catalog(project, day=date.fromisoformat(day)).on_demand(*KEY).amount == Decimal(usd)


def test_the_bill_of_a_day_stands_on_the_price_of_that_day(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = refreshed(priced("1.5", "2026-11-21"))
    prices.dated[KEY] = (CHANGE,)
    files.write(prices, project / "prices", date(2026, 11, 21))
    monkeypatch.chdir(project)
    text = (ROOT / "stacks" / "tinystories-growth.yaml").read_text()
    made = scratch.make(tmp_path_factory.mktemp("scratch") / "made", {"tinystories-growth": text})
    found = []
    for now in (datetime(2026, 11, 30, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)):
        plan = make(made, "tinystories-growth", now=now, previous=Previous(outputs={}), preview=True)
        found += [each.on_demand.amount for each in plan.bill.types if each.type == KEY[0] and each.on_demand]
    assert found == [Decimal("1.5"), Decimal("1.1")]


def test_a_file_without_such_rows_has_the_columns_of_before(project: Path) -> None:
    folder = files.write(refreshed(priced("1.5", "2026-11-21")), project / "prices", date(2026, 11, 21))
    assert (folder / "on_demand.csv").read_text().partition("\n")[0] == "type,regions,usd_per_hour,source,as_of,status"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("1.5,a,2026-11-21,verified,", "1.1,a,2026-11-21,verified,2026-12-01"), None),
        (("1.1,a,2026-11-21,verified,2026-12-01",), None),
        (("1.1,a,2026-11-21,verified,soon",), "line 2: .*valid_from 'soon' is no date"),
        (("1.1,a,2026-11-21,verified,2026-12-01",) * 2, "line 3: .*is there twice from 2026-12-01 on"),
    ],
)
def test_rows_from_a_day_on_are_read_beside_the_others(project: Path, rows: tuple[str, ...], said: str | None) -> None:
    folder = files.write(files.Prices(), project / "prices", date(2026, 11, 21))
    lines = [(folder / "on_demand.csv").read_text().strip() + ",valid_from"]
    (folder / "on_demand.csv").write_text("\n".join((*lines, *(f"g5.2xlarge,us-east-2,{row}" for row in rows))) + "\n")
    if said is not None:
        with pytest.raises(GpufleetError, match=said):
            load_catalog(project)
        return
    assert load_catalog(project, day=date(2026, 12, 24)).on_demand(*KEY).amount == Decimal("1.1")


def test_a_newer_reading_takes_the_place_of_a_price_and_of_its_announced_change() -> None:
    old = files.Prices(on_demand={KEY: priced("1.5", "2026-11-21")}, dated={KEY: (CHANGE,)})
    new = files.Prices(on_demand={KEY: priced("1.4", "2026-11-22")})
    assert files.newer(old, new).dated == {}
    assert files.newer(new, old).on_demand[KEY].amount == Decimal("1.4")
    assert files.newer(new, old).dated == {}
