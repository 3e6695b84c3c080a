"""What AWS does that node, supervisor and bill all count on; the embedded AWS states it anew, to be held against."""

from __future__ import annotations

FREE_S = 3600  # AWS does not charge compute when it takes a spot instance back in its first hour (EC2 User Guide)
MINIMUM_S = 60  # billed for each start at least
NOTICE_S = 120  # before AWS takes a node: best effort
NOTICE_PATH = "meta-data/spot/instance-action"  # of the metadata service
FLEET_TAG = "aws:ec2:fleet-id"  # that AWS gives a fleet's instances
ENDED = (
    "terminated"  # sub-type of the event in a fleet's history that a node of it has ended (EC2 API, EventInformation)
)
