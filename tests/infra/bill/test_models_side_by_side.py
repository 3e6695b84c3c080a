"""The bill of models that train side by side: the rank with the most of them decides how long a step takes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.job.kind.common import PhaseSize
from tests.repository import ROOT

FULL = "    epochs: 35\n    weak: {similarity: 0.25, confidence: 0.3, neighbours: 15, queries: 14950}\n"


def bill(folder: Path, gpus: int) -> Bill:
    text = (ROOT / "stacks" / "two-tower.yaml").read_text()
    text = text.replace("    epochs: 35\n", f"{FULL}    gpus: {gpus}\n", 1).replace("[g5.xlarge]", "[g5.12xlarge]", 1)
    (folder / "two-tower.yaml").write_text(text)
    return price(load(folder / "two-tower.yaml", now=datetime(2026, 12, 1, tzinfo=UTC)), load_catalog())


def test_four_gpus_take_a_quarter_of_the_folds_step_and_all_of_the_refit_s(tmp_path: Path) -> None:
    alone, three, four = (bill(tmp_path, gpus).chosen.runtime for gpus in (1, 3, 4))
    assert (alone.ranks, four.ranks) == (1, 4)
    assert four.phases[0].step_ms == pytest.approx(alone.phases[0].step_ms / 4)
    assert three.phases[0].step_ms == pytest.approx(alone.phases[0].step_ms * 7 / 20)  # seven, seven and six folds
    assert four.phases[1].step_ms == alone.phases[1].step_ms
    assert four.work_s < alone.work_s


@pytest.mark.parametrize(("ranks", "by"), [(1, 1), (4, 4), (7, 20 / 3), (20, 20)])
def test_the_rank_with_the_most_models_decides(ranks: int, by: float, tmp_path: Path) -> None:
    folds: PhaseSize = load(ROOT / "stacks" / "two-tower.yaml", now=datetime.now(UTC)).job.parameters.phases()[0]
    assert folds.models == 20
    assert folds.shared_by(ranks) == by
    assert replace(folds, models=None).shared_by(ranks) == ranks
