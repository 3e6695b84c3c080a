"""`gpufleet prices` and `gpufleet prices refresh` as they are typed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.catalog import SHIPPED, Price, SpotPrice, files, load_catalog, regions
from gpufleet.infra.cli import main
from gpufleet.infra.commands import prices
from gpufleet.infra.errors import AwsRefused, GpufleetError
from gpufleet.infra.prices import aws, coverage
from gpufleet.infra.prices.refresh import renew
from tests.infra.aws_prices import Ec2, PriceList, announced, refused
from tests.repository import ROOT

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
TODAY = NOW.date()


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    prices.arguments(parser)
    return prices.run(parser.parse_args(words))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stacks").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


Refresh = Callable[[PriceList, Ec2], int]


@pytest.fixture
def refresh(project: Path) -> Refresh:
    def asked(pricing: PriceList, ec2: Ec2) -> int:
        catalog = load_catalog()
        folder = project / "prices"
        return renew(catalog, ["us-east-2"], folder, pricing=pricing, ec2_in=lambda region: ec2, now=NOW)

    return asked


def listed(**more: Any) -> PriceList:
    """A Price List with every type of the catalog at its old price in us-east-2."""
    known = {key: str(p.amount) for key, p in load_catalog().on_demand_prices.items() if key[1] == "us-east-2"}
    return PriceList(nodes=known, **more)


def test_a_refresh_writes_a_folder_of_today_that_the_next_bill_stands_on(
    refresh: Refresh, capsys: pytest.CaptureFixture[str]
) -> None:
    pricing = listed()
    pricing.nodes["g5.2xlarge", "us-east-2"] = "1.30"
    assert refresh(pricing, Ec2()) == 0
    catalog = load_catalog()
    assert (catalog.name, catalog.as_of) == ("prices/2026-11-21", TODAY)
    assert catalog.on_demand("g5.2xlarge", "us-east-2").amount == Decimal("1.30")
    assert "written to" in capsys.readouterr().out


def test_a_partial_failure_is_exit_1_with_every_kept_figure_named(
    refresh: Refresh, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refresh(listed(errors={"g5.2xlarge": refused("ThrottlingException")}), Ec2()) == 1
    printed = capsys.readouterr().out
    assert "on-demand price of g5.2xlarge in us-east-2: GetProducts: ThrottlingException" in printed
    assert "the old one is of 2026-01-21" in printed


def test_when_nothing_can_be_read_nothing_is_written(refresh: Refresh, project: Path) -> None:
    denied = refused("AccessDeniedException")
    pricing = PriceList(errors=dict.fromkeys(load_catalog().instances, denied))
    with pytest.raises(AwsRefused, match=r"nothing was written: GetProducts: AccessDenied.*pricing:GetProducts"):
        refresh(pricing, Ec2(error=refused("UnauthorizedOperation", "DescribeSpotPriceHistory")))
    assert not (project / "prices").exists()


def test_an_embedded_aws_makes_prices_up_and_is_not_asked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with pytest.raises(
        GpufleetError, match=r"asked at 127\.0\.0\.1, whose prices may be made up: unset AWS_ENDPOINT_URL"
    ):
        run("refresh")
    assert not (project / "prices").exists()


def test_without_credentials_nothing_is_asked_and_the_way_to_them_is_said(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert main(["prices", "refresh"]) == 2
    said = capsys.readouterr()
    assert "there are no AWS credentials. Run `aws configure sso`" in said.err
    assert "Asking AWS" not in said.out


def test_a_place_that_no_folder_can_have_is_an_error_before_anything_is_asked(project: Path) -> None:
    (project / "file").write_text("")
    with pytest.raises(GpufleetError, match="is not a writable folder"):
        renew(load_catalog(), ["us-east-2"], project / "file", pricing=None, ec2_in=lambda region: None, now=NOW)


def test_a_row_of_regions_and_a_refresh_are_all_that_a_new_region_takes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`path` is a stack's file, and its project is the current directory."""
    added = tmp_path / "regions.csv"
    added.write_text(regions.FILE.read_text() + "eu-west-3,abc,EUW3-,ew3,a test,2026-11-21\n")
    path.write_text(path.read_text().replace("us-east-2", "eu-west-3"))
    assert main(["prices", "refresh", "--region", "eu-west-3"]) == 2
    assert "--region eu-west-3: the catalog covers us-east-1, " in capsys.readouterr().err

    monkeypatch.setattr(regions, "FILE", added)
    assert main(["cost", "small-growth"]) == 2  # the region is known, but has no prices
    assert "fleet.region: 'eu-west-3' is not accepted" in capsys.readouterr().err
    assert main(["compare", "small-growth"]) == 2

    pricing = PriceList(nodes={("g5.2xlarge", "eu-west-3"): "1.516"})
    row = {"InstanceType": "g5.2xlarge", "AvailabilityZone": "eu-west-3a", "SpotPrice": "0.5", "Timestamp": NOW}
    ec2 = Ec2(rows=[row], zones={"eu-west-3a": "euw3-az2"})
    monkeypatch.setattr(aws, "client", lambda service, region: pricing if service == "pricing" else ec2)
    assert main(["prices", "refresh", "--region", "eu-west-3"]) == 0
    assert {each["usagetype"][:5] for each in pricing.asked if "usagetype" in each} == {"EUW3-"}
    capsys.readouterr()

    assert main(["prices", "--region", "eu-west-3", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["regions"]
    assert (found["on_demand"]["priced"], found["spot"]["priced"]) == (1, 1)
    assert main(["cost", "small-growth", "--json"]) == 0
    assert Decimal(json.loads(capsys.readouterr().out)["usd"]["p90"]) > 0
    assert main(["compare", "small-growth", "--all"]) == 0
    assert "OD ew3" in capsys.readouterr().out


def test_a_refresh_brings_what_a_shipped_region_lacks_and_the_next_bill_stands_on_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No public source has the prices of disks and requests in eu-south-2."""
    path.write_text(path.read_text().replace("us-east-2", "eu-south-2").replace("g5.2xlarge", "g6.2xlarge"))
    assert main(["cost", "small-growth"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "No price there of ebs_gp3_storage, " in said
    assert "`gpufleet prices refresh --region eu-south-2` reads them from AWS." in said

    pricing = PriceList(nodes={("g6.2xlarge", "eu-south-2"): "1.03"})
    monkeypatch.setattr(aws, "client", lambda service, region: pricing if service == "pricing" else Ec2())
    assert main(["prices", "refresh", "--region", "eu-south-2"]) == 0
    assert {each["usagetype"][:5] for each in pricing.asked if "usagetype" in each} == {"EUS2-"}
    capsys.readouterr()

    assert load_catalog().on_demand("g6.2xlarge", "eu-south-2").amount == Decimal("1.03")
    assert main(["cost", "small-growth", "--json"]) == 0
    bill = json.loads(capsys.readouterr().out)
    assert (bill["region"], len(bill["spot"]["zone"])) == ("eu-south-2", 3)


def test_an_announced_price_is_written_down_and_counts_from_its_day_on(project: Path) -> None:
    changing = announced("1.212", then="1.1", begin="2026-12-01T00:00:00Z")
    pricing = listed(products={("g5.2xlarge", "us-east-2"): changing})
    folder = project / "prices"
    assert renew(load_catalog(), ["us-east-2"], folder, pricing=pricing, ec2_in=lambda _: Ec2(), now=NOW) == 0
    for day, usd in ((TODAY, "1.212"), (date(2026, 11, 30), "1.212"), (date(2026, 12, 1), "1.1")):
        assert load_catalog(day=day).on_demand("g5.2xlarge", "us-east-2").amount == Decimal(usd)
    told = coverage.render(load_catalog(day=TODAY), ["us-east-2"], TODAY)
    assert "us-east-2: g5.2xlarge costs 1.1 on demand from 2026-12-01 on" in told

    # A later refresh that is not answered keeps both; one that is answered puts the new price in its place.
    later = datetime(2026, 12, 2, tzinfo=UTC)
    failing = listed(errors={"g5.2xlarge": refused("ThrottlingException")})
    renew(load_catalog(), ["us-east-2"], folder, pricing=failing, ec2_in=lambda _: Ec2(), now=later)
    assert load_catalog(day=later.date()).on_demand("g5.2xlarge", "us-east-2").amount == Decimal("1.1")
    settled = listed()
    settled.nodes["g5.2xlarge", "us-east-2"] = "1.1"
    renew(load_catalog(), ["us-east-2"], folder, pricing=settled, ec2_in=lambda _: Ec2(), now=later)
    assert load_catalog(day=TODAY).on_demand("g5.2xlarge", "us-east-2").amount == Decimal("1.1")
    newest = files.folders(folder)[-1]
    assert (newest / "on_demand.csv").read_text().startswith("type,regions,usd_per_hour,source,as_of,status\n")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("Frankfurt,abc,EUW3-,ew3,a test,2026-11-21", "'Frankfurt' is no region"),
        ("eu-west-3,aab,EUW3-,ew3,a test,2026-11-21", "zones 'aab'; allowed: the letters"),
        ("eu-west-3,abc,,ew3,a test,2026-11-21", "must not be empty"),
        ("us-east-2,abc,USE2-,e2,a test,2026-11-21", "us-east-2 is there twice"),
    ],
)
def test_a_row_that_is_no_region_is_refused_with_its_line(
    row: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = tmp_path / "regions.csv"
    added.write_text(regions.FILE.read_text() + row + "\n")
    monkeypatch.setattr(regions, "FILE", added)
    line = len(added.read_text().splitlines())
    with pytest.raises(GpufleetError, match=rf"regions\.csv, line {line}: .*{said}"):
        regions.known_regions()


def test_a_region_that_is_named_twice_is_one_region(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--region", "us-east-2", "--region", "us-east-2", "--json") == 0
    assert [each["region"] for each in json.loads(capsys.readouterr().out)["regions"]] == ["us-east-2"]


def test_two_refreshes_of_a_day_are_two_folders_and_the_second_counts(refresh: Refresh, project: Path) -> None:
    first = listed()
    first.nodes["g5.2xlarge", "us-east-2"] = "1.30"
    refresh(first, Ec2())
    second = listed()
    second.nodes["g5.2xlarge", "us-east-2"] = "1.40"
    refresh(second, Ec2())
    assert [folder.name for folder in files.folders(project / "prices")] == ["2026-11-21", "2026-11-21-2"]
    assert load_catalog().on_demand("g5.2xlarge", "us-east-2").amount == Decimal("1.40")


def test_a_failed_question_after_a_good_day_keeps_the_good_days_figure(refresh: Refresh, project: Path) -> None:
    first = listed()
    first.nodes["g5.2xlarge", "us-east-2"] = "1.30"
    refresh(first, Ec2())
    refresh(listed(errors={"g5.2xlarge": refused("ThrottlingException")}), Ec2())
    kept = files.read(project / "prices" / "2026-11-21-2").on_demand["g5.2xlarge", "us-east-2"]
    assert kept.amount == Decimal("1.30")
    assert kept.source == "AWS Price List, published 2026-11-19"


def test_a_failed_question_keeps_the_projects_figure_wherever_the_new_ones_go(refresh: Refresh, project: Path) -> None:
    pricing = listed()
    pricing.nodes["g5.2xlarge", "us-east-2"] = "1.30"
    assert refresh(pricing, Ec2()) == 0
    failing = listed(errors={"g5.2xlarge": refused("ThrottlingException")})
    beside = project / "elsewhere"
    later = NOW + timedelta(days=1)
    code = renew(load_catalog(), ["us-east-2"], beside, pricing=failing, ec2_in=lambda _: Ec2(), now=later)
    kept = files.read(beside / "2026-11-22").on_demand["g5.2xlarge", "us-east-2"]
    assert (code, kept.amount, kept.as_of) == (1, Decimal("1.30"), TODAY)


def test_moves_and_zones_that_are_gone_are_printed(refresh: Refresh, capsys: pytest.CaptureFixture[str]) -> None:
    pricing = listed()
    pricing.nodes["g5.2xlarge", "us-east-2"] = "9.99"
    row = {"AvailabilityZoneId": "use2-az1", "InstanceType": "g6.xlarge", "SpotPrice": "0.27", "Timestamp": NOW}
    assert refresh(pricing, Ec2(rows=[row])) == 0
    printed = capsys.readouterr().out
    assert "on-demand price of g5.2xlarge in us-east-2: 1.212 (2026-01-21) to 9.99" in printed
    assert "g6.xlarge in us-east-2 az2" in printed


def test_a_folder_of_a_later_day_hides_the_refresh_and_is_named(
    refresh: Refresh, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(files.read(SHIPPED), project / "prices", date(2031, 1, 1))
    refresh(listed(), Ec2())
    assert "Bills still use" in (said := capsys.readouterr().out)
    assert "2031-01-01, whose name has a later date: delete that folder." in said


def test_prices_of_the_future_are_not_called_young(project: Path) -> None:
    ahead = load_catalog()
    assert "20 days in the future: it cannot have been read" in coverage.render(
        ahead, ["us-east-2"], ahead.as_of - timedelta(days=20)
    )


def test_showing_gives_age_and_coverage_of_every_region(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    printed = capsys.readouterr().out
    for word in ("us-east-1", "us-east-2", "us-west-2", "sa-east-1", "days old", "logs_ingestion", "inferred"):
        assert word in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_a_region_without_a_price_that_bills_need_is_told_with_the_command_that_reads_it(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    printed = " ".join(capsys.readouterr().out.split())
    assert "eu-north-1: no bill until there is a price of s3_write_requests" in printed
    assert "`gpufleet prices refresh --region eu-north-1` reads it" in printed
    assert "eu-central-1: no bill until" not in printed


def test_a_family_without_a_price_is_one_word(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--region", "us-west-2")
    printed = " ".join(capsys.readouterr().out.split())
    assert "us-west-2: no spot price of g6f.2xlarge, g6f.4xlarge, g7.*, g7e.*, " in printed


def test_json_counts_what_is_priced_inferred_and_missing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--region", "us-east-2") == 0
    (region,) = json.loads(capsys.readouterr().out)["regions"]
    found = region["on_demand"]
    assert found["priced"] + len(found["missing"]) == region["types"]
    assert 0 < found["inferred"] < found["priced"]
    assert (found["oldest"], found["newest"]) == ("2026-01-21", "2026-07-20")
    assert region["spot"]["zones"] == 3
    assert "p5.4xlarge" in region["spot"]["missing"]  # no spot price was ever seen
    assert "p5e.48xlarge" in found["missing"]  # a spot price without an on-demand price to compare
    assert "p3.2xlarge" not in found["missing"]  # left EC2


def test_one_region_is_shown_type_by_type_with_shares_of_a_gpu(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--region", "us-east-2") == 0
    printed = capsys.readouterr().out
    assert "1/8 of one L4" in printed
    assert " 0 x " not in printed


def test_a_region_of_many_zones_and_a_weeks_extremes_fit_a_page_and_all_are_shown() -> None:
    catalog = load_catalog()
    zones = catalog.spot_prices["g5.xlarge", "us-east-1"]
    dear = tuple(replace(zone, low=Decimal("10.1234"), high=Decimal("99.8765")) for zone in zones)
    week = replace(catalog, spot_prices={**catalog.spot_prices, ("g5.xlarge", "us-east-1"): dear})
    lines = coverage.render(week, ["us-east-1"], TODAY).splitlines()
    assert max(map(len, lines)) <= 100
    at = next(number for number, line in enumerate(lines) if line.startswith("g5.xlarge"))
    shown = " ".join(lines[at : at + 4])
    assert all(f"{zone.zone} {zone.price.amount:f}" in shown for zone in zones)
    assert "7 days: 10.1234 to 99.8765" in shown


def test_an_unknown_region_is_an_error_that_names_the_known(project: Path) -> None:
    with pytest.raises(GpufleetError, match="--region me-south-1: the catalog covers us-east-1"):
        run("--region", "me-south-1")


@pytest.mark.parametrize("words", [("--to", "x"), ("refresh", "--json")])
def test_an_option_of_the_other_action_is_an_error(project: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(GpufleetError):
        run(*words)


def zone(name: str, usd: str) -> SpotPrice:
    return SpotPrice(zone=name, price=priced(usd))


def priced(usd: str) -> Price:
    return Price(amount=Decimal(usd), unit="node-hour", source="x", as_of=date(2026, 1, 1), status="verified")


@pytest.mark.parametrize(
    ("on_demand", "spot", "said"),
    [
        ("1.00", [("az1", "0.40"), ("az2", "1.00")], ["spot costs as much as on demand (1.00) in az2"]),
        ("1.00", [("az1", "0.40"), ("az2", "1.01")], ["spot costs more than on demand (1.00) in az2"]),
        ("27.43298", [("az1", "27.433")], ["spot costs as much as on demand (27.43298) in az1"]),
        ("5.00", [("az1", "0.40"), ("az2", "1.20")], ["zones differ by 3.0x, 0.40 (az1) to 1.20 (az2)"]),
        ("5.00", [("az1", "0.41"), ("az2", "1.20")], []),
        (None, [("az1", "0.40")], ["has a spot price and no on-demand price"]),
        ("1.00", [], []),
    ],
)
def test_spot_as_dear_as_on_demand_zones_apart_and_nothing_to_compare_with(
    on_demand: str | None, spot: list[tuple[str, str]], said: list[str]
) -> None:
    instance = load_catalog().instances["g5.2xlarge"]
    zones = [zone(name, usd) for name, usd in spot]
    found = list(coverage.doubts(instance, priced(on_demand) if on_demand else None, zones))
    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence


def test_the_page_documents_every_key_of_the_json(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "prices.md").read_text()
    run("--json")
    found = json.loads(capsys.readouterr().out)
    region = found["regions"][0]
    for part in (
        found,
        found["catalog"],
        region,
        region["on_demand"],
        region["spot"],
        region["services"],
        found["items"][0],
    ):
        for key in part:
            assert f"`{key}" in page, key
