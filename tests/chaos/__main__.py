"""Seeded faults for some minutes, and one table: `make chaos`, or `python -m tests.chaos --minutes 10 --seed 1`.

Every kind comes at least once; then the one that has had the least time is next. A kind's runs have the seeds SEED,
SEED + 1, and so on, so that `--kind` with a failed run's seed repeats that run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gpufleet.rehearsal.environment import forget_account

SHOWN = 4000  # bytes of what a failed run has printed
Kind = Callable[[int, Path], int]


@dataclass(kw_only=True, slots=True)
class Tally:
    """What a kind's runs came to."""

    injected: int = 0
    held: int = 0
    failed: dict[int, str] = field(default_factory=dict)  # by seed, why
    seconds: float = 0.0

    @property
    def runs(self) -> int:
        return self.held + len(self.failed)


def inject(kinds: Mapping[str, Kind], *, minutes: float, seed: int, clock: Callable[[], float]) -> dict[str, Tally]:
    """Runs them until the time is over. A run in which no fault came has failed."""
    tallies = {name: Tally() for name in kinds}
    end = clock() + 60 * minutes
    while True:
        name = min(tallies, key=lambda each: (tallies[each].runs > 0, tallies[each].seconds))
        if tallies[name].runs and clock() >= end:
            return tallies
        tally, began = tallies[name], clock()
        at = seed + tally.runs
        with tempfile.TemporaryFile() as said:
            try:
                with tempfile.TemporaryDirectory(prefix="gpufleet-chaos-") as folder, _quiet(said):
                    injected = kinds[name](at, Path(folder))
                assert injected > 0, "no fault came"
            except Exception:  # noqa: BLE001 - whatever it is, it did not hold, and the table says so
                said.seek(max(0, said.seek(0, os.SEEK_END) - SHOWN))
                tally.failed[at] = f"{said.read().decode(errors='replace')}\n{traceback.format_exc()}"
            else:
                tally.injected += injected
                tally.held += 1
        tally.seconds += clock() - began


@contextlib.contextmanager
def _quiet(said: IO[bytes]) -> Iterator[None]:
    """What this process and its children print goes to `said`."""
    kept = [os.dup(each) for each in (1, 2)]
    try:
        for each in (1, 2):
            os.dup2(said.fileno(), each)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for each, before in zip((1, 2), kept, strict=True):
            os.dup2(before, each)
            os.close(before)


def table(tallies: Mapping[str, Tally]) -> Iterator[str]:
    """One line for each kind, and what repeats a run that did not hold."""
    yield f"{'kind':<18}{'faults':>8}{'runs':>7}{'held':>7}{'seconds':>9}  seeds that failed"
    for name, tally in tallies.items():
        failed = ", ".join(map(str, tally.failed)) or "-"
        yield f"{name:<18}{tally.injected:>8}{tally.runs:>7}{tally.held:>7}{tally.seconds:>9.0f}  {failed}"
    for name, tally in tallies.items():
        for seed, why in tally.failed.items():
            yield f"\n{name}, seed {seed}: make chaos KIND='{name}' SEED={seed} MINUTES=0\n{why}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="no run begins after so many (10)")
    parser.add_argument("--seed", type=int, default=None, help="of the first run of each kind (drawn)")
    parser.add_argument("--kind", default="", help="only this one")
    args = parser.parse_args(argv)
    forget_account()
    from tests.chaos import kinds

    if args.kind and args.kind not in kinds.KINDS:
        parser.error(f"--kind {args.kind}: one of {', '.join(kinds.KINDS)}")
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    sys.stdout.write(f"seed {seed}, {args.minutes:g} min\n")
    sys.stdout.flush()
    chosen = {name: kind for name, kind in kinds.KINDS.items() if args.kind in ("", name)}
    tallies = inject(chosen, minutes=args.minutes, seed=seed, clock=time.monotonic)
    sys.stdout.write("\n".join(table(tallies)) + "\n")
    return int(any(tally.failed for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
