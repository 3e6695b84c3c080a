"""A rehearsal of stages on one node: each stage's watch counts only what happens in its stage."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.node import NodeRunner
from gpufleet.rehearsal.timeline import Timeline
from gpufleet.rehearsal.watch import Planned, Watch
from tests.rehearsal.declared import fleet, template

LOG = "opt/gpufleet/run/metrics.jsonl"
NODE = f"""#!/bin/bash
mkdir -p "$GPUFLEET_ROOT/opt/gpufleet/run"
echo '{{"step": 5, "ts": '$(date +%s.%N)'}}' >"$GPUFLEET_ROOT/{LOG}"
echo "0 starting the container"
sleep 5000
"""
LOST = Planned(step=0, kind="loss", place="hand_over")


def trains(watch: Watch) -> bool:
    return any(view.first_step for view in watch.views.values())


class WatchedNode:
    """A fleet of one node, watched in one stage after another."""

    def __init__(self, cloud: Cloud, folder: Path) -> None:
        self.cloud, self.runner = cloud, NodeRunner(cloud, folder / "nodes")
        self.timeline = Timeline(folder / "timeline.jsonl", out=lambda _: None)
        self.s3 = cloud.client("s3")
        self.s3.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "us-east-2"})
        fleet(cloud, template(cloud, user_data=NODE))

    def watch(
        self,
        stage: str,
        *planned: Planned,
        before: Watch | None = None,
        until: Callable[[Watch], bool] = trains,
    ) -> Watch:
        """The watch of a stage that is done when `until` is true."""
        here = (self.cloud, self.runner, self.timeline, planned, "bucket", f"r1/{stage}")
        watch = Watch(*here, fleet_run="r1", before=before, hands_over=True)

        def end_stage() -> None:
            if until(watch):
                self.s3.put_object(Bucket="bucket", Key=f"r1/{stage}/done.json", Body=b"{}")

        watch.run(check=end_stage)
        return watch


@pytest.fixture
def node(tmp_path: Path) -> Iterator[WatchedNode]:
    with Cloud(tmp_path, habits=Habits(relaunch_s=0.2)) as cloud:
        watched = WatchedNode(cloud, tmp_path)
        yield watched
        watched.runner.close()


def test_a_stage_ends_when_it_is_done_and_its_node_goes_on(node: WatchedNode) -> None:
    first = node.watch("t1")
    (machine,) = node.cloud.instances()
    assert machine.ended_at is None
    with (node.runner.nodes[machine.id].root / LOG).open("a") as log:  # the first stage's last line comes late
        log.write(json.dumps({"step": 6, "ts": time.time()}) + "\n")
    second = node.watch("t2", before=first, until=lambda watch: bool(watch.views))
    (view,) = second.views.values()
    assert (view.node.instance.id, view.number, view.first_step) == (machine.id, 1, None)
    assert [moment.facts["node"] for moment in node.timeline.select("launched")] == [machine.id]
    assert len(node.timeline.select("boot")) == 1  # its log is read on, not again


def test_a_node_that_is_lost_between_two_stages_is_in_neither_of_the_later_ones(node: WatchedNode) -> None:
    first = node.watch("t1")
    second = node.watch("t2", LOST, before=first, until=lambda _: True)
    assert [view.interrupted for view in second.views.values()] == [LOST]
    assert node.cloud.instances()[0].ended_at is not None
    third = node.watch("t3", before=second)
    assert [view.number for view in third.views.values()] == [2]
