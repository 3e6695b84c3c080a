"""How long nodes of a run wait for missing ones before they let go, and how long nobody asks AWS for any then.

Whoever waits is billed, and waits for all nodes at once are mostly short and now and then very long. So the first wait
is long enough for the short ones (infra/risk/hazard.py); a later one only lasts until all that AWS launched
together have booted, and comes after a pause in which nothing is billed, twice as long each time.

The node's own Python reads this: no newer than 3.9 here.
"""

from __future__ import annotations

LATER_S = 600.0  # nodes that boot together are ready within this of one another
PAUSE_S, LONGEST_PAUSE_S = 3600.0, 14400.0
LET_GO = "let go"  # the exit's reason of a node that waited in vain
TOLD_S = 900.0  # somebody is told after so long a wait


def wait_s(gather_s: float, let_go: int) -> float:
    """For how long a node waits, once the run has let go so often since nodes trained last."""
    return min(gather_s, LATER_S) if let_go else gather_s


def pause_s(let_go: int) -> float:
    """For how long nobody asks after the run has let go for that time, from 1 on."""
    return min(PAUSE_S * 2.0 ** (let_go - 1), LONGEST_PAUSE_S)
