"""docs/bill.md, docs/compare.md and docs/experiments.md name every key that programs get."""

from __future__ import annotations

import re

from gpufleet.infra.bill import record
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare.cheaper import cheaper
from gpufleet.infra.compare.columns import record_row
from gpufleet.infra.compare.rows import Study
from gpufleet.infra.risk import deadline
from gpufleet.job.contract.metrics import KEYS
from tests.infra.cost_definitions import definition
from tests.repository import ROOT

CATALOG = load_catalog()


def documented(page: str) -> set[str]:
    """Every word in backticks; `a.b` counts as a and as b, `x[]` as x."""
    text = (ROOT / "docs" / page).read_text()
    return {part for words in re.findall(r"`([^`\n]+)`", text) for part in re.split(r"[.\[\] ]+", words) if part}


def test_each_key_of_the_bill_is_in_its_page() -> None:
    tree = record.to_json(price(definition(), CATALOG, runs=100))
    keys = set(tree)
    for name in ("cadence", "hazard", "cap", "kept", "spot"):
        keys |= set(tree[name])
    for name in ("lines", "types", "fits", "notice", "phases"):
        keys |= set(tree[name][0])
    dear = definition(capacity="on-demand")  # so that spot is certainly cheaper
    options = cheaper(dear, price(dear, CATALOG), Study(CATALOG))
    assert options is not None
    tree = options.to_json()
    keys |= {"cheaper", *tree, *tree["options"][0]}
    assert keys - documented("bill.md") == set()


def test_each_key_of_a_comparison_is_in_its_page() -> None:
    plan = definition()
    (row,) = ranking.scenarios(plan, [], Study(CATALOG), runs=100)
    tree = record_row(row)
    keys = set(tree) | set(tree["claim"]) | set(deadline.DeadlinePlan.__dataclass_fields__)
    assert keys - documented("compare.md") == set()


def test_each_key_of_the_metrics_is_in_the_page_about_what_a_run_leaves() -> None:
    assert set(KEYS) - documented("experiments.md") == set()


def test_each_option_of_the_comparison_is_in_its_page() -> None:
    page = (ROOT / "docs" / "compare.md").read_text()
    for option in ("--scenario", "--within", "--all", "--plot", "--json"):
        assert f"`{option}" in page
