"""The page of a campaign: the best run, what was varied, and all receipts as one."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.definition.campaign import CampaignFile, write_values
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.report import campaign, charts
from gpufleet.job.contract import metrics
from tests.infra.report.test_report import Seen
from tests.receipt_tree import receipt

NIGHT = CampaignFile(
    name="night",
    files=("mine",),
    max_usd=Decimal(11),
    metric="val_loss",
    direction="minimize",
    pruner="asha",
    every=100,
)
RUNS = {  # the figure, the reason of the end, and the values
    "night-1": (2.5, "finished", {"--lr": "1e-3", "job.parameters.width": "64", "--seed": "1"}),
    "night-2": (1.5, "finished", {"--lr": "1e-5", "job.parameters.width": "64", "--seed": "1"}),
    "night-3": (1.2, "stopped", {"--lr": "3e-3", "job.parameters.width": "128", "--seed": "1"}),
}


def write_documents(folder: Path) -> Path:
    """The documents of three runs."""
    for at, (name, (figure, reason, values)) in enumerate(RUNS.items()):
        own = folder / name
        own.mkdir(parents=True)
        (own / "values.json").write_bytes(write_values(values))
        (own / "receipt.json").write_text(json.dumps(receipt(f"{at + 1}.0000", stack=name)))
        (own / "done.json").write_text(json.dumps({"schema": 1, "reason": reason}))
        steps = [{"ts": 1.0 + step, "phase": "p", "step": step, "val_loss": figure + 1 / step} for step in (100, 200)]
        (own / "metrics.jsonl").write_bytes(b"".join(map(metrics.write, steps)))
    return folder


def test_the_best_whole_run_is_first_and_all_receipts_are_one(tmp_path: Path) -> None:
    found = campaign.read(NIGHT, write_documents(tmp_path))
    assert [each.name for each in found.trials] == ["night-2", "night-1", "night-3"]  # which was stopped
    tree = found.to_json()
    assert tree["best"] == "night-2"
    assert tree["usd"] == {"estimate": "3.0000", "actual": "6.0000"}
    assert sum(Decimal(line["actual"]) for line in tree["lines"]) == 6
    assert [each["ended"] for each in tree["trials"]] == ["finished", "finished", "stopped"]
    assert (tree["trials"][0]["step"], tree["trials"][0]["figure"]) == (200, 1.505)
    most = campaign.read(
        CampaignFile(name="n", files=("m",), max_usd=Decimal(1), metric="val_loss", direction="maximize"), tmp_path
    )
    assert most.trials[0].name == "night-1"


def test_the_page_shows_each_run_over_what_was_varied(tmp_path: Path) -> None:
    page = campaign.html(campaign.read(NIGHT, write_documents(tmp_path)))
    seen = Seen(page)
    assert all(each.startswith(("#", "data:")) for each in seen.loads)
    assert "--lr=1e-5, width=64, --seed=1" in page
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", page)
    assert heads[:4] == ["run", "--lr", "width", "figure"]  # the seed is the same in all
    assert page.count("<svg") == 3
    (parallel,) = re.findall(r'aria-label="runs over [^"]*"', page)
    assert parallel == 'aria-label="runs over --lr, width, val_loss"'
    assert "1 ended before" in page


def test_numbers_a_hundredfold_apart_stand_by_their_logarithms() -> None:
    heights, marked = charts._axis(["1e-5", "1e-3", None, "1e-4"])
    assert heights[:2] == pytest.approx([0.0, 1.0])
    assert heights[2] != heights[2]
    assert heights[3] == pytest.approx(0.5)
    assert marked == {0.0: "1e-5", 1.0: "1e-3"}
    assert charts._axis(["2", "4", "3"]) == ([0.0, 1.0, 0.5], {0.0: "2", 1.0: "4"})
    assert charts._axis(["rms", "layer", "rms"]) == ([1.0, 0.0, 1.0], {0.0: "layer", 1.0: "rms"})
    assert charts._axis(["7", "7"]) == ([0.0, 0.0], {0.0: "7"})


def test_a_run_without_receipt_or_metric_is_on_the_page_and_said(tmp_path: Path) -> None:
    folder = write_documents(tmp_path)
    (folder / "night-1" / "receipt.json").unlink()
    (folder / "night-1" / "metrics.jsonl").write_text("{torn")
    found = campaign.read(NIGHT, folder)
    assert found.trials[-1].name == "night-1"
    assert found.total("actual") == 5
    assert "1 run left no receipt" in campaign.html(found)
    plain = campaign.read(CampaignFile(name="night", files=("mine",), max_usd=Decimal(11)), folder)
    assert plain.best is None
    assert "night-2" in campaign.html(plain)


def test_without_a_run_that_has_ended_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(GpufleetError, match="no run of night has ended"):
        campaign.read(NIGHT, tmp_path)


def test_values_and_names_from_a_bucket_are_text_on_the_page(tmp_path: Path) -> None:
    folder = write_documents(tmp_path)
    (folder / "night-2" / "values.json").write_bytes(write_values({"--lr": "<script>alert(1)</script>"}))
    assert "<script>" not in campaign.html(campaign.read(NIGHT, folder))
