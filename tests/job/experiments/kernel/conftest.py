"""On a day to which libfaketime has moved the clock, no candidate can be compiled: nothing there knows a date."""

from __future__ import annotations

import pytest

from tests.dates import skip_where_the_clock_is_moved


@pytest.fixture(autouse=True)
def _the_clock_is_the_machine_s() -> None:
    skip_where_the_clock_is_moved("needs /dev/shm in every process, and a candidate's root has none")
