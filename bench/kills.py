"""Kills `up` and `destroy` of the real engine at each of their calls to AWS, or gives them no answers from that call
on. Then it runs `pulumi cancel`, `pulumi destroy` and one `gpufleet sweep --delete`. Call it as `bench/kills.py
[up|destroy]`; `--way block` is for a stack that buys its capacity in this way (`--way all`: in every way), `--calls 20`
for 20 of the calls.

A seed draws the order of the calls, so that the first ones are a sample of all moments at which a command can be
interrupted. Writes the table of bench/results/kills.md to standard output, each kill to standard error. The account is
the embedded AWS, in which other people have resources too (tests/rehearsal/killed_calls.py).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.rehearsal.killed import Mode  # noqa: E402 - a module of the tests
from tests.rehearsal.killed_calls import WAYS, KilledCall, SharedAccount, shared_account  # noqa: E402

MODES: tuple[Mode, ...] = ("killed", "no answer")
NEVER = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("commands", nargs="*", default=["up", "destroy"])
    parser.add_argument("--way", choices=[*WAYS, "all"], default="spot")
    parser.add_argument("--calls", type=int, default=NEVER)
    given, say = parser.parse_args(), sys.stdout.write
    engine = subprocess.run(["pulumi", "version"], capture_output=True, text=True, check=True).stdout.strip()
    say(
        "# `up` and `destroy`, killed at each of their calls to AWS\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}, Pulumi {engine}, embedded AWS. `python bench/kills.py` wrote this.\n\n"
        "After each: `pulumi cancel`, `pulumi destroy`, one `gpufleet sweep --delete`. It holds where then nothing of "
        "the stack is left, nothing of others was touched, and no node ran behind an exit code 0 of `destroy`.\n\n"
        "| Bought as | Command | | Calls | Killed at | Held | `destroy` ended with 0 | with another code | of these, a "
        "node still ran | whose fleet the bucket did not name: it ends itself |\n"
        f"|{'---|' * 10}\n"
    )
    ways = WAYS if given.way == "all" else (given.way,)
    for way, command, mode in itertools.product(ways, given.commands, MODES):
        found, whole = list[KilledCall](), list[int]()
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
            found.extend(kills(Path(folder), way, command, mode, given.calls, whole.append))
        ran = [each for each in found if each.running]
        numbers = (
            sum(whole),
            len(found),
            sum(each.holds for each in found),
            sum(each.destroyed for each in found),
            sum(not each.destroyed for each in found),
            len(ran),
            sum(each.running > each.known for each in ran),
        )
        say(f"| {way} | `{command}` | {mode} | {' | '.join(map(str, numbers))} |\n")
        sys.stdout.flush()


def kills(
    folder: Path, way: str, command: str, mode: Mode, most: int, tell: Callable[[int], None]
) -> Iterator[KilledCall]:
    """A KilledCall for each call that the command makes, for `most` of them at most; `tell` is called with the number
    of all calls.
    """
    with shared_account(folder, way) as account:
        calls = kill(account, command, mode, NEVER).calls
        tell(calls)
        for at in random.Random(f"{command} {mode}").sample(range(1, calls + 1), min(calls, most)):
            yield kill(account, command, mode, at)


def kill(account: SharedAccount, command: str, mode: Mode, at: int) -> KilledCall:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = account.kill(command, mode, at)
    sys.stderr.write(f"{command} {mode} {at} {found}\n{'' if found.holds else said.getvalue()}")
    return found


if __name__ == "__main__":
    main()
