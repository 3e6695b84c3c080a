"""What AWS does that node, supervisor and bill all count on; the embedded AWS states it anew, to be held against."""

from __future__ import annotations

FREE_S = 3600  # AWS does not charge compute when it takes a spot instance back in its first hour (EC2 User Guide)
MINIMUM_S = 60  # billed for each start at least
NOTICE_S = 120  # before AWS takes a node: best effort
NOTICE_PATH = "meta-data/spot/instance-action"  # of the metadata service
OWN_TAGS = (
    "gpufleet:stack",
    "gpufleet:run",
    "gpufleet:owner",
)  # of all that a run owns (infra: tags.py)
FLEET_TAG = "aws:ec2:fleet-id"  # that AWS gives a fleet's instances
THERE = ("pending", "running", "shutting-down", "stopping", "stopped")  # states of an instance that has not ended
LAUNCHED, ENDED = "launched", "terminated"  # in a fleet's history, of a node (EC2 API, EventInformation)
# The switch to on demand comes before the last moment for it by one interval between checkpoints and by the margin: the
# hand-over of a spot node that still trains, and the five minutes by which a push of its hour may lag.
HANDOVER_S, SWITCH_MARGIN_S = 600, 900
SWITCH = "switch"  # the schedule that begins on demand, beside it
SILENCE = "silence"  # the schedule beside the one that ends the fleet: it tells that nothing has trained for long
