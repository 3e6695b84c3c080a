"""AWS's rules on which node, supervisor and bill rely; the embedded AWS states them separately, for comparison."""

from __future__ import annotations

FREE_S = 3600  # AWS does not charge compute when it takes a spot instance back in its first hour (EC2 User Guide)
MINIMUM_S = 60  # the least number of seconds that AWS bills for each start
NOTICE_S = 120  # seconds from AWS's notice to a node's end; AWS does not guarantee them
NOTICE_PATH = "meta-data/spot/instance-action"  # paths in the metadata service
OWN_TAGS = (
    "gpufleet:stack",
    "gpufleet:run",
    "gpufleet:owner",
)  # the tags of all resources of a run (infra: tags.py)
FLEET_TAG = "aws:ec2:fleet-id"  # a tag that AWS puts on a fleet's instances
THERE = ("pending", "running", "shutting-down", "stopping", "stopped")  # states of an instance that has not ended
LAUNCHED, ENDED = "launched", "terminated"  # a node's events in a fleet's history (EC2 API, EventInformation)
# The switch to on demand comes before the last possible moment: one interval between checkpoints earlier, and this
# margin. The margin is needed for two reasons: a spot node saves and leaves while it trains, and the time of the
# schedule may be moved up to five minutes late.
HANDOVER_S, SWITCH_MARGIN_S = 600, 900
SWITCH = "switch"  # the schedule that starts the on-demand fleet
SILENCE = "silence"  # the schedule that sends a message if no node has trained for a long time


def begins(stage: str) -> str:
    """What follows the schedule group's name in that of the state machine that begins this stage."""
    return f"-{stage}"


def asks_again(run: str) -> str:
    """What follows the schedule group's name in that of the state machine that asks for all nodes of the run, or of the
    stage RUN/STAGE, again. It is short, because AWS allows 80 characters for the whole name.
    """
    stage = run.partition("/")[2]
    return stage and f"_{stage}"
