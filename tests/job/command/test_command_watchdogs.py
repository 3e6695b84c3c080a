"""What is said of a command that costs money and does nothing, and when it counts as stuck."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.command.watchdogs import StartWatch
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.gpus import Sample, Sampler


class WatchedStart:
    """A start that is watched on a clock of its own, at one dollar an hour."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, every_s: float | None = 600.0) -> None:
        monkeypatch.setenv("PATH", "")  # no nvidia-smi
        self.now, self.said = 1_000_000.0, list[str]()
        self.gpus = Sampler(gpus=1, clock=lambda: self.now)
        self.use(50.0)
        self.watch = StartWatch(
            silence_s=1800.0,
            every_s=lambda: every_s,
            own=ForeignFolder(folder),
            folders=[folder],
            gpus=self.gpus,
            spent=lambda: self.now / 3600,
            say=self.said.append,
            note=lambda _: None,
            clock=lambda: self.now,
        )
        self.committed_at = self.step_at = self.output_at = self.now

    def use(self, percent: float) -> None:
        self.gpus.see(Sample(use=percent, busiest=percent, memory_gb=None, temperature_c=None))

    def minutes(self, count: int, **at: Any) -> str:
        """So many minutes of which each is looked at; `at`: what goes on meanwhile. Why it counts as stuck, or not."""
        for _ in range(count):
            self.now += 60.0
            for name in at:
                setattr(self, name, self.now)
            self.watch.look(self.committed_at, self.step_at)
            if why := self.watch.stuck(self.output_at, self.step_at):
                return why
        return ""


def test_gpus_that_nobody_uses_are_told_once_with_what_they_have_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = WatchedStart(tmp_path, monkeypatch)
    watched.use(0.0)
    alive = {"committed_at": True, "step_at": True, "output_at": True}
    watched.minutes(29, **alive)
    assert not watched.said
    watched.minutes(20, **alive)
    (said,) = watched.said
    assert said == "warning: no GPU has been used for 30 min, which have cost $0.48"
    watched.use(80.0)
    watched.minutes(5, **alive)
    watched.use(0.0)
    watched.minutes(40, **alive)
    assert len(watched.said) == 2


@pytest.mark.parametrize(("every_s", "minutes"), [(600.0, 30), (120.0, 6), (None, 30)])
def test_checkpoints_that_do_not_come_are_told_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float | None, minutes: int
) -> None:
    watched = WatchedStart(tmp_path, monkeypatch, every_s)
    assert watched.minutes(minutes - 1, step_at=True, output_at=True) == ""
    assert not watched.said
    assert watched.minutes(60, step_at=True, output_at=True) == ""
    (said,) = watched.said
    assert said == f"warning: no complete checkpoint for {minutes} min, 3 times its interval"


def test_a_silent_command_is_stuck_unless_a_gpu_works_or_a_file_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = WatchedStart(tmp_path, monkeypatch)
    silent.use(0.0)
    assert "no output, no step, no file for 30 min, and no GPU in use" in silent.minutes(60)
    busy = WatchedStart(tmp_path, monkeypatch)
    for _ in range(90):
        busy.use(70.0)
        assert busy.minutes(1) == ""
    assert any("nothing printed for" in line and "70 % busy" in line for line in busy.said)
    grows = WatchedStart(tmp_path, monkeypatch)
    grows.use(0.0)
    for number in range(45):  # whatever clock its times are of
        (tmp_path / "file").write_text("x")
        os.utime(tmp_path / "file", (number, number))
        assert grows.minutes(2) == ""
    assert "no output, no step, no file for 30 min" in grows.minutes(60)
