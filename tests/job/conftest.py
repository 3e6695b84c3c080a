"""What several files of these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from job.kernels.worker import Workers


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """The kernel funnel's servers on a CPU, started once for all files: each has torch and Triton to import."""
    from job.kernels.worker import Workers  # brings torch, which not every file here needs

    with Workers(tmp_path_factory.mktemp("judge") / "scratch", gpus=False) as made:
        yield made
