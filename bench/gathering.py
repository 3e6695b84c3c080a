"""What waiting for the others costs over 1,000 drawn fleets, minute by minute: `python bench/gathering.py`.

One of two nodes has gone, and until all are to be had at once a time passes that is drawn as the bill draws it. The
node that is left waits, billed, as its rule says (job/contract/gathering.py), and lets go; after each pause one boots,
finds nobody for as long as the rule says, and lets go again. Compared with one that waits for ever.
"""

from __future__ import annotations

import random
import sys

from gpufleet.infra.risk.hazard import GANG_WAIT_H, GANG_WAIT_SIGMA, gather
from gpufleet.job.contract.gathering import pause_s, wait_s

FLEETS, BOOT_MIN = 1000, 9  # image, inputs and checkpoint of a p5 in its region


def waited(needed_min: float, gather_min: float) -> tuple[int, int]:
    """Minutes that a node is billed and minutes that pass until both are there, which takes `needed_min`."""
    billed, passed, let_go = 0, 0, 0
    until = passed + wait_s(gather_min * 60, let_go) / 60
    while passed < needed_min:
        if passed < until:
            billed, passed = billed + 1, passed + 1
            continue
        let_go += 1
        passed += round(pause_s(let_go) / 60)
        if passed >= needed_min:
            break
        billed, passed = billed + BOOT_MIN, passed + BOOT_MIN
        until = passed + wait_s(gather_min * 60, let_go) / 60
    return billed, passed


def main() -> None:
    """A line for each length of the first wait."""
    drawn = random.Random(7)
    needed = [60 * GANG_WAIT_H * 2.718281828 ** drawn.gauss(0, GANG_WAIT_SIGMA) for _ in range(FLEETS)]
    for_ever = sum(-(-each // 1) for each in needed)
    default = 60 * gather(GANG_WAIT_H)
    heads = "| gather_minutes | billed, h | of waiting for ever | until all are there, h |"
    sys.stdout.write(f"{heads}\n|---|---|---|---|\n")
    sys.stdout.write(f"| for ever | {for_ever / FLEETS / 60:.2f} | 1.00 | {for_ever / FLEETS / 60:.2f} |\n")
    for minutes in (6, 12, 18, 30, 60):
        billed, passed = (sum(each) for each in zip(*(waited(each, minutes) for each in needed), strict=True))
        name = f"{minutes}{', the default' if minutes == default else ''}"
        sys.stdout.write(
            f"| {name} | {billed / FLEETS / 60:.2f} | {billed / for_ever:.2f} | {passed / FLEETS / 60:.2f} |\n"
        )


if __name__ == "__main__":
    main()
