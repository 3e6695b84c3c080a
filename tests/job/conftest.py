"""What several files of these tests share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gpufleet.job.experiments.kernel.judge.worker import Workers


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Whatever ran before in this process; a tolerance that holds for some draws only would fail now and then."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """The kernel funnel's servers on a CPU, started once for all files: each has torch and Triton to import."""
    from gpufleet.job.experiments.kernel.judge.worker import Workers  # brings torch, which not every file here needs

    with Workers(tmp_path_factory.mktemp("judge") / "scratch", gpus=False) as made:
        yield made


@pytest.fixture(scope="module")
def one_judge(workers: Workers) -> Iterator[None]:
    """kernel-sft runs of this process use those servers; ranks of their own start their own."""
    from gpufleet.job.experiments.kernel import stages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "_workers", lambda kernel: contextlib.nullcontext(workers))
        yield
