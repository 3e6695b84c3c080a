"""docs/node.md explains how a job may end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import infra
from job.contract.codes import AttemptExit

PAGE = (Path(infra.__file__).parent.parent / "docs/node.md").read_text()


@pytest.mark.parametrize(
    "code", [AttemptExit.FINISHED, AttemptExit.FAILED, AttemptExit.REFUSED, AttemptExit.INTERRUPTED]
)
def test_each_exit_code_of_a_job_is_explained(code: int) -> None:
    assert re.search(rf"^\| {code} \|", PAGE, re.MULTILINE)
