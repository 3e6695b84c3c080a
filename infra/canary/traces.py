"""Compares what a canary's run has written (records of nodes, the log, checkpoints, outputs) with what AWS says."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gpufleet.infra.account import aws
from gpufleet.infra.account.run_folder import RunFolder, find_log_groups
from gpufleet.infra.canary.observations import FlightFacts
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.contract import bucket
from gpufleet.job.contract.attempt import record
from gpufleet.job.contract.codes import AttemptExit
from gpufleet.job.contract.reading import epoch
from gpufleet.job.contract.workdir import FINAL

# the line that job/supervisor/metadata.py logs when it sees the notice
_NOTICE = re.compile(r"spot notice: \w+ in (-?\d+) s")


@dataclass(kw_only=True, slots=True)
class ObservedNode:
    """A node, as AWS showed it."""

    id: str
    number: int
    launched: datetime
    step: int  # the newest published checkpoint when the node started
    noticed: bool = False  # whether the canary asked AWS to interrupt the node with a notice
    gone_at: float = 0.0


def add_node(facts: FlightFacts, folder: RunFolder, node: ObservedNode, ended: datetime | None) -> None:
    """Adds facts that compare the node's own record with what AWS says about the node."""
    add = facts.add
    content = folder.read(bucket.attempt_key(node.id))
    add("node.record", content is not None)
    attempt = record(content, lambda line: None)
    add("node.clock_s", abs(attempt.launched - node.launched.timestamp()))
    if node.number > 1:
        add("node.resumed", bool(attempt.resumed_step) and int(attempt.resumed_step or 0) >= node.step)
    if attempt.exit and attempt.exit.code == AttemptExit.CRASHED:
        add("loss.noticed", attempt.exit.notice)
    if node.noticed:
        add("notice.seen", bool(attempt.exit and attempt.exit.notice))
        ends = epoch(attempt.exit.ends_at or "") if attempt.exit else None
        if ends is not None and ended is not None:
            add("notice.kept_s", ended.timestamp() - ends)


def add_outputs(facts: FlightFacts, results: Path, *, gpu: bool) -> None:
    """Adds the facts that the script wrote about its container. `gpu`: whether the node had a GPU."""
    for path in (results / FINAL).rglob("seen.json"):
        seen = json.loads(path.read_text(encoding="utf-8"))
        facts.add("script.metadata", seen["metadata"])
        if gpu:
            facts.add("script.gpu", seen["gpu"])


def add_log(facts: FlightFacts, logs: Any, stack: StackDefinition, folder: RunFolder) -> None:
    """Compares the log in CloudWatch with what the script printed, and with the times of checkpoints."""
    printed, lag = dict[int, list[float]](), list[float]()
    for group in find_log_groups(logs, stack.name):
        for event in aws.pages(logs, "filter_log_events", "events", logGroupName=group["logGroupName"]):
            for remaining_s in _NOTICE.findall(event["message"]):
                facts.add("notice.left_s", int(remaining_s))
            if match := re.search(r"\bstep (\d+) loss", event["message"]):
                printed.setdefault(int(match[1]), []).append(event["timestamp"] / 1000)
                if "ingestionTime" in event:
                    lag.append((event["ingestionTime"] - event["timestamp"]) / 1000)
    steps = published(folder)
    newest = max(steps, default=0)
    if newest:
        facts.add("log.share", sum(1 for step in range(1, newest + 1) if step in printed) / newest)
    if lag:
        facts.add("log.lag_s", max(lag))
    for step, at in steps.items():
        # S3's times are whole seconds
        before = [moment for moment in printed.get(step, []) if moment <= at.timestamp() + 1]
        if before:
            facts.add("save.published_s", max(at.timestamp() - max(before), 0.0))


def published(folder: RunFolder) -> dict[int, datetime]:
    """The steps of the published checkpoints, with their times."""
    entries = folder.objects(bucket.CHECKPOINTS)
    matches = ((bucket.MANIFEST_KEY.fullmatch(entry.name), entry.written) for entry in entries)
    return {int(match[1]): written for match, written in matches if match}
