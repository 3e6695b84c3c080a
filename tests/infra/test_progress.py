"""The progress of long work is shown on a terminal, now and then in a log, and not at all on request."""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import pty
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gpufleet.infra import cli, progress
from gpufleet.infra.commands import prices
from gpufleet.infra.inputs import folders
from gpufleet.job import atomic
from gpufleet.job import progress as work
from gpufleet.job.contract import inputs
from gpufleet.job.experiments.dataset import chat


class Told:
    """The progress that the work reported."""

    def __init__(self) -> None:
        self.told = list[tuple[str, int | None, str]]()
        self.done = 0

    def show(self, what: str, total: int | None, unit: str) -> Told:
        self.told.append((what, total, unit))
        return self

    def advance(self, amount: int) -> None:
        self.done += amount

    def close(self) -> None:
        self.told.append(("closed", None, ""))


def test_a_log_gets_a_line_with_rate_and_time_left_only_now_and_then() -> None:
    now, said = [0.0], list[str]()
    lines = progress.Lines("hashing data", 4_000_000_000, "B", said.append, lambda: now[0])
    for _ in range(38):
        now[0] += 1
        lines.advance(100_000_000)
    assert said == ["hashing data: 1.00G/4.00G, 100MB/s, 00:30 left"]
    now[0] += 2
    lines.advance(200_000_000)
    assert said[1:] == ["hashing data: 4.00G/4.00G, 100MB/s, 00:00 left"]


def test_of_what_nobody_knows_the_end_there_is_no_time_left() -> None:
    now, said = [0.0], list[str]()
    lines = progress.Lines("fetching", None, "B", said.append, lambda: now[0])
    now[0] = 20.0
    lines.advance(3_000_000)
    assert said == ["fetching: 3.00M, 150kB/s"]


def terminal(work_on: Callable[[progress.Screen], None]) -> str:
    """The text that a terminal receives."""
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (24, 100))
    with os.fdopen(there, "w") as stream:
        work_on(progress.Screen(stream))
    sent = b""
    with suppress(OSError):  # read to its end
        while part := os.read(here, 65536):
            sent += part
    os.close(here)
    return sent.decode()


def test_a_terminal_gets_a_bar_that_lines_do_not_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "BAR_S", 0.0)

    def hash_and_say(screen: progress.Screen) -> None:
        bar = screen.show("hashing \x1b[2Jdata", 1000, "B")
        assert bar is not None
        bar.advance(500)
        screen.write(screen._stream, "data/a is there\n")
        bar.close()

    sent = terminal(hash_and_say)
    assert "\\x1b[2Jdata:  50%" in sent
    assert "500/1.00k [" in sent
    assert "B/s]" in sent
    before, after = sent.split("data/a is there")
    assert before.endswith("\r")  # the bar was taken away, not written over
    assert "50%" in after  # and drawn again


def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hash_and_say(screen: progress.Screen) -> None:
        screen.quiet = True
        assert screen.show("hashing", 10, "B") is None
        screen.write(screen._stream, "-")

    assert terminal(hash_and_say) == "-"


def test_work_inside_of_other_work_is_not_shown_by_itself() -> None:
    seen = Told()
    with work.shown_by(seen.show), work.shown("rehearsing", 2, "stacks") as advance:
        with work.shown("hashing", 10) as inner:
            inner(10)
        advance(1)
    assert seen.told == [("rehearsing", 2, "stacks"), ("closed", None, "")]
    assert seen.done == 1


def test_work_that_nobody_shows_is_done_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    parts = list[int]()
    assert atomic.sha256(tmp_path / "a", parts.append) == hashlib.sha256(b"x" * 3_000_000).hexdigest()
    assert sum(parts) == 3_000_000
    assert len(parts) > 1
    assert atomic.sha256(tmp_path / "a") == hashlib.sha256(b"x" * 3_000_000).hexdigest()


def test_hashing_tells_the_bytes_of_what_is_new(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in "ab":
        (data / name).write_bytes(b"x" * 1000)
    for wanted in (2000, 0):  # the second time nothing has changed
        seen = Told()
        with work.shown_by(seen.show):
            folders._hashed(data, tmp_path)
        assert seen.told[0] == (f"hashing {data}", wanted, "B")
        assert seen.done == wanted
    seen = Told()
    with work.shown_by(seen.show):
        inputs.hashed([data / "a"], data)
    assert seen.done == 1000


def test_reading_a_long_file_tells_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"instruction": "a", "response": "b"}\n' * 20)
    seen = Told()
    with work.shown_by(seen.show):
        assert len(list(chat.JsonlChats(path).conversations())) == 20
    assert (seen.told[0], seen.done) == ((f"reading {path}", path.stat().st_size, "B"), path.stat().st_size)


def test_a_command_shows_long_work_unless_it_is_asked_to_be_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINES_S", (0.0, 0.0))
    monkeypatch.setattr(prices, "arguments", progress.argument)

    def run(args: argparse.Namespace) -> int:
        with work.shown("hashing data", 10) as advance:
            advance(10)
        say = progress.say(args)
        say("data is there")
        say("warning: it is old")
        return 0

    monkeypatch.setattr(prices, "run", run)
    for words, said, answered in (
        (["prices"], "hashing data: 10.0/10.0, ", "data is there\nwarning: it is old\n"),
        (["prices", "--quiet"], "", "warning: it is old\n"),
    ):
        monkeypatch.setattr(sys, "stdout", out := io.StringIO())
        monkeypatch.setattr(sys, "stderr", err := io.StringIO())
        assert cli.main(words) == 0
        assert err.getvalue().startswith(said)
        assert bool(err.getvalue()) is bool(said)
        assert out.getvalue() == answered
