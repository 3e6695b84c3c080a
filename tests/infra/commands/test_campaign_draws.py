"""Which values a campaign's drivers draw, and when: from the objects in the campaign's bucket alone."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.account.campaign_ledger import CampaignLedger
from gpufleet.infra.account.campaign_records import CampaignRecords
from gpufleet.infra.commands.trials import CampaignSearch
from gpufleet.infra.definition import campaign
from gpufleet.job.contract import metrics
from gpufleet.job.supervisor.store import FolderStore
from tests.infra.command_files import command_file

TEXT = """\
files: [mine]
max_usd: 20
at_once: 2
metric: loss
direction: minimize
pruner: asha
every: 100
sampler: tpe
trials: 4
draw: {--lr: {low: 1e-5, high: 1e-2, log: true}}
"""


@pytest.fixture
def records(tmp_path: Path) -> CampaignRecords:
    command_file(tmp_path, name="mine", command="python train.py --lr 0.1 --out={checkpoints}")
    (tmp_path / "campaigns").mkdir()
    (tmp_path / "campaigns" / "night.yaml").write_text(TEXT)
    return CampaignRecords(store=FolderStore(tmp_path / "bucket"))


def driver(records: CampaignRecords, root: Path) -> CampaignSearch:
    """One that has begun anew, and knows what is in the bucket."""
    return CampaignSearch(described=campaign.load("night", root), records=records, root=root)


def ledger(*names: str, ended: int = 0) -> CampaignLedger:
    """With reservations of these runs, of which the first so many have ended."""
    made = CampaignLedger(approved="0", max_usd=Decimal(20), at_once=2, began=0.0)
    for at, name in enumerate(names):
        made = made.reserved(name, Decimal(1), by="a", approved="0")
        made = made.settled(name, Decimal(1)) if at < ended else made
    return made


def names(
    search: CampaignSearch, held: CampaignLedger, refused: tuple[str, ...] = (), *, fits: bool = True
) -> list[str]:
    return [each.name for each in search.find_drawn([], held, refused, fits=fits)]


def test_one_value_is_drawn_when_a_run_could_begin_and_none_waits(records: CampaignRecords, tmp_path: Path) -> None:
    assert names(driver(records, tmp_path), ledger(), fits=False) == []
    (first,) = names(driver(records, tmp_path), ledger())
    assert names(driver(records, tmp_path), ledger()) == [first]  # it waits
    assert len(records.draws()) == 1
    _, second = names(driver(records, tmp_path), ledger(first))
    assert first != second
    assert names(driver(records, tmp_path), ledger(first, second)) == [first, second]  # two go on
    assert len(names(driver(records, tmp_path), ledger(first, second, ended=1))) == 3


def test_no_more_are_drawn_than_the_file_says(records: CampaignRecords, tmp_path: Path) -> None:
    found = list[str]()
    for _ in range(7):
        found = names(driver(records, tmp_path), ledger(*found, ended=len(found)))
    assert len(found) == len(set(found)) == 4


def test_of_two_drivers_one_makes_the_draw_of_a_number(records: CampaignRecords, tmp_path: Path) -> None:
    assert records.add_draw(0, {"--lr": "0.001"})
    assert not records.add_draw(0, {"--lr": "0.002"})
    assert records.draws() == [{"--lr": "0.001"}]


def test_values_that_no_definition_takes_count_as_failed_and_others_follow(
    records: CampaignRecords, tmp_path: Path
) -> None:
    (first,) = names(driver(records, tmp_path), ledger())
    found = names(driver(records, tmp_path), ledger(), (first,))
    assert found[0] == first
    assert len(found) == 2


def test_a_draw_that_cannot_be_read_is_left_out(records: CampaignRecords, tmp_path: Path) -> None:
    records.store.put_bytes(b"{torn", "drawn/0000.json")
    assert len(names(driver(records, tmp_path), ledger())) == 1
    assert campaign.read_values(b'{"schema": 1, "values": {"--lr": 5}}') == {}


def test_what_ended_runs_told_is_read_from_the_bucket(
    records: CampaignRecords, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here no run has a bucket of its own any more."""
    line = metrics.write({"ts": 1.0, "phase": "p", "step": 100, "loss": 2.5})
    records.keep("t0", {"metrics.jsonl": line, "done.json": b'{"reason": "finished"}'})
    records.keep("t1", {"metrics.jsonl": line.replace(b'"loss"', b'"cost"')})
    told = driver(records, tmp_path)._read_all(ledger("t0", "t1", "t2", ended=2), [])
    assert [(each.last, each.ended) for each in told] == [(2.5, "finished"), (None, ""), (None, None)]
    assert capsys.readouterr().err == "gpufleet: t1 reports no figure loss; it reports cost\n"


def test_only_documents_of_trials_are_brought(records: CampaignRecords, tmp_path: Path) -> None:
    records.keep("night-1", {"receipt.json": b"{}"})
    for key in ("trials/night-1/../x", "trials/../receipt.json", "trials/night-1/.bashrc", "trials/UP/receipt.json"):
        records.store.put_bytes(b"x", key)
    records.bring(tmp_path / "brought")
    assert [each.relative_to(tmp_path / "brought").as_posix() for each in (tmp_path / "brought").rglob("*.*")] == [
        "night-1/receipt.json"
    ]
