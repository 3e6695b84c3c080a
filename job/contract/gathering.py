"""Defines how long a run's nodes wait for missing nodes before they end, and how long the pause is before nodes are
requested from AWS again. Waiting nodes are billed. Usually all nodes come soon, but sometimes they come very late. So
the first wait is long enough for the usual case (infra/risk/hazard.py). A later wait lasts until all nodes that AWS
launched together have booted. Before it there is a pause without costs, which is twice as long each time. The node's
own Python reads this file, so it must work with Python 3.9.
"""

from __future__ import annotations

MOST_NODES = 16  # the most nodes in one run
LATER_S = 600.0  # seconds within which nodes that boot together become ready
PAUSE_S, LONGEST_PAUSE_S = 3600.0, 14400.0
LET_GO = "let go"  # reason of the exit of a node that waited in vain
TOLD_S = 900.0  # a message is sent after a wait of this many seconds


def wait_s(gather_s: float, let_go: int) -> float:
    """Seconds for which a node waits, if nodes have waited in vain `let_go` times since they last trained."""
    return min(gather_s, LATER_S) if let_go else gather_s


def pause_s(let_go: int) -> float:
    """Seconds for which no node is requested from AWS after the `let_go`th wait in vain; the first one is number 1."""
    return min(PAUSE_S * 2.0 ** (let_go - 1), LONGEST_PAUSE_S)
