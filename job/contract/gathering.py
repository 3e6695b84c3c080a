"""How long a run's nodes wait for missing nodes before they leave, and for how long AWS is then asked for no node.

Waiting nodes are billed. Usually all nodes come soon, and sometimes very late. So the first wait covers the usual case
(infra/risk/hazard.py); a later one lasts until all that AWS launched together have booted, and follows a pause without
bills, twice as long each time.

The node's own Python reads this file: nothing newer than 3.9 here.
"""

from __future__ import annotations

MOST_NODES = 16  # the most nodes in one run
LATER_S = 600.0  # seconds within which nodes that boot together become ready
PAUSE_S, LONGEST_PAUSE_S = 3600.0, 14400.0
LET_GO = "let go"  # reason of the exit of a node that waited in vain
TOLD_S = 900.0  # a message is sent after a wait of so many seconds


def wait_s(gather_s: float, let_go: int) -> float:
    """How long a node waits, if nodes have waited in vain `let_go` times since they last trained."""
    return min(gather_s, LATER_S) if let_go else gather_s


def pause_s(let_go: int) -> float:
    """How long AWS is asked for no node after the `let_go`th wait in vain, counted from 1."""
    return min(PAUSE_S * 2.0 ** (let_go - 1), LONGEST_PAUSE_S)
