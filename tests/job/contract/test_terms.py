"""What of run.json money depends on."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.job.contract import terms
from gpufleet.job.contract.reading import DoubtError, Fields
from tests.job import runs


def test_a_run_that_does_not_say_otherwise_trains_on_one_node() -> None:
    assert terms.read(Fields(runs.tree())).nodes == 1
    assert terms.read(Fields(runs.tree(nodes=4))).nodes == 4


@pytest.mark.parametrize("nodes", [0, 17, True, "2", 2.0])
def test_a_number_of_nodes_that_no_run_has_is_refused(nodes: Any) -> None:
    with pytest.raises(DoubtError, match=r"nodes is .*, not one of 1, 2"):
        terms.read(Fields(runs.tree(nodes=nodes)))
