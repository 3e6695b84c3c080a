"""The tests as of other days: `make test-dates`, or `python -m tests.dates --day 'ten years ahead' tests/released`.

libfaketime moves the clock of the tests and of what they start. It does not reach the Pulumi engine, which asks the
kernel, nor the times of files, nor a container's processes, whose environment is their own: tests that stand on these
are skipped, and say so.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

ROOT = Path(__file__).parents[1]
# Of this process, where it runs the tests of such a day. The memory that the processes share is this one's: a process
# with one of its own takes it along when it ends, and what it has started fails then.
MOVED = ("LD_PRELOAD", "FAKETIME", "DONT_FAKE_MONOTONIC", "FAKETIME_SHARED")
MOVED_CLOCK = {name: os.environ[name] for name in MOVED if "FAKETIME" in os.environ}
MISSING = (
    "The days are moved by libfaketime, which is missing here or does not load: it is compiled when it is installed, by"
    " make and a C compiler (Debian: apt install gcc make). Then: make test-dates"
)


def days(now: datetime) -> dict[str, tuple[datetime, str]]:
    """When the tests begin, and in which time zone."""
    leap = next(
        year for year in range(now.year, now.year + 9) if is_leap(year) and datetime(year, 2, 29, tzinfo=UTC) > now
    )
    return {
        "a day ahead": (now + timedelta(days=1), "UTC"),
        "400 days ahead": (now + timedelta(days=400), "UTC"),
        "ten years ahead": (now + timedelta(days=3653), "UTC"),
        "29 February": (datetime(leap, 2, 29, 12, tzinfo=UTC), "UTC"),
        "31 December": (datetime(now.year + 1, 1, 1, tzinfo=UTC) - timedelta(minutes=3), "UTC"),
        **{f"summer time in {zone}": (summer_time(zone, now) - timedelta(minutes=3), zone) for zone in ZONES},
    }


ZONES = ("Europe/Berlin", "America/New_York")
FILES = (
    45  # of a session: libfaketime remembers every lock, and after hours a thread's turn takes it a tenth of a second
)

AGAIN = ["--lf"]


def is_leap(year: int) -> bool:
    return (datetime(year, 3, 1) - datetime(year, 2, 1)).days == 29


def summer_time(zone: str, now: datetime) -> datetime:
    """When clocks go forward there next."""

    def offset(hour: datetime) -> timedelta:
        return hour.astimezone(ZoneInfo(zone)).utcoffset() or timedelta()

    hours = (now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=number) for number in range(1, 366 * 24))
    return next(hour for hour in hours if offset(hour) > offset(hour - timedelta(hours=1)))


def library() -> Path | None:
    """libfaketime, where it is installed and does what it is here for. Debian 12's, 0.9.10, breaks time.sleep of Python
    3.11 and later, and with it next to every test.
    """
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).parent / "vendor/libfaketime/src/libfaketime.so.1"
    words = [sys.executable, "-c", "import time; time.sleep(0.01); print(int(time.time()))"]
    later = timedelta(days=400)
    moved = subprocess.run(words, env=environment(file, later, "UTC"), capture_output=True, text=True, check=False)
    shown = moved.stdout.strip()
    return file if shown.isdecimal() and int(shown) > (datetime.now(UTC) + later / 2).timestamp() else None


def environment(file: Path, ahead: timedelta, zone: str) -> dict[str, str]:
    """Of processes whose clock is so far ahead; waits are as long as ever."""
    moved = {"LD_PRELOAD": str(file), "FAKETIME": f"{ahead.total_seconds():+.0f}", "DONT_FAKE_MONOTONIC": "1"}
    return {**os.environ, **moved, "TZ": zone}


def sessions(tests: list[str]) -> list[list[str]]:
    """What each pytest runs: the tests that were named, or all of them in several sessions."""
    every = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py"))
    return [tests] if tests else [every[first : first + FILES] for first in range(0, len(every), FILES)]


def run(now: datetime, chosen: list[str], tests: list[str], file: Path) -> Iterator[str]:
    """Runs the tests on each day; the days on which one failed."""
    for name in chosen:
        begin, zone = days(now)[name]
        ahead = begin - datetime.now(UTC)
        sys.stdout.write(f"\n{name}: {begin.astimezone(ZoneInfo(zone)):%Y-%m-%d %H:%M %Z}\n")
        sys.stdout.flush()
        several = ["-n", str((os.cpu_count() or 1) + 1), "--dist", "loadgroup", "--no-loadscope-reorder"]
        workers = [] if tests else several  # each imports everything first
        failed = False
        for files in sessions(tests):
            words, moved = [sys.executable, "-m", "pytest", "-q", *workers, *files], environment(file, ahead, zone)
            # libfaketime reads variables in every thread, which can end a process that sets one: what failed is run
            # once more.
            attempts = (subprocess.run([*words, *more], cwd=ROOT, env=moved, check=False) for more in ([], AGAIN))
            failed |= all(attempt.returncode for attempt in attempts)
        if failed:
            yield name


def skip_where_the_clock_is_moved(why: str) -> None:
    """For a test that cannot hold there, though what it tests does."""
    if MOVED_CLOCK:
        pytest.skip(f"libfaketime {why}")


def main() -> int:
    now = datetime.now(UTC)
    parser = argparse.ArgumentParser(prog="make test-dates", description=__doc__)
    parser.add_argument("--day", choices=[*days(now)], action="append", help="this one; all by default")
    parser.add_argument("--or-skip", action="store_true", help="where libfaketime is missing, say so and end with 0")
    parser.add_argument("tests", nargs="*", help="files or folders; all by default")
    args = parser.parse_args()
    file = library()
    if file is None:
        sys.stderr.write(f"{'skipped: ' if args.or_skip else ''}{MISSING}\n")
        return 0 if args.or_skip else 2
    failed = list(run(now, args.day or [*days(now)], args.tests, file))
    sys.stdout.write(f"\nfailed: {', '.join(failed)}\n" if failed else "\nall days passed\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
