"""docs/interruptions.md explains how a job may end."""

from __future__ import annotations

import re

import pytest

from gpufleet.job.contract.codes import AttemptExit
from tests.repository import ROOT

PAGE = (ROOT / "docs/interruptions.md").read_text()


@pytest.mark.parametrize(
    "code", [AttemptExit.FINISHED, AttemptExit.FAILED, AttemptExit.REFUSED, AttemptExit.INTERRUPTED]
)
def test_each_exit_code_of_a_job_is_explained(code: int) -> None:
    assert re.search(rf"^\| {code} \|", PAGE, re.MULTILINE)
