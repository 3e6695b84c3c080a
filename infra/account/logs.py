"""Prints the job's output for `gpufleet logs`: from CloudWatch while the job runs, or from the copy in the bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gpufleet.infra.account import aws, results
from gpufleet.infra.account.run_folder import RunFolder, find_folder, find_log_groups, no_run
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused
from gpufleet.job.contract import bucket
from gpufleet.job.contract.workdir import LOG

POLL_S = 3.0
GONE_POLLS = 20  # polls between two checks whether the run still has a fleet: S3 charges for listings
# wait after the run's end: docker's log driver sends lines every 5 s, and CloudWatch shows them seconds later
LAST_S = 10.0


@dataclass(kw_only=True, slots=True)
class Reader:
    """Reads one run's output. `sleep` is a parameter, so that a test does not have to wait."""

    definition: StackDefinition
    logs: Any
    s3: Any
    ec2: Any
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], None] = print
    seen: set[str] = field(default_factory=set)
    since_ms: int = 0

    def print_all(self) -> int:
        """Prints all lines, the oldest first. Raises AwsRefused if there are none."""
        if self._cloudwatch(self._group()) or self._bucket(LOG):
            return 0
        raise AwsRefused(self._silence())

    def follow(self) -> int:
        """Prints lines as they come. Returns 0 once the run is done, and 1 if it is not done and no node will continue
        it. Raises AwsRefused if there is no such run, or if its stack is destroyed, because no line would ever come.
        """
        has_said_why, polls, folder = False, 0, None
        while True:
            folder = folder or self._folder()  # looked up once: S3 charges for listings
            group = self._group()
            over = folder.read_done() if folder else None
            self._cloudwatch(group)
            if over:
                if polls:  # CloudWatch may not show the last lines yet, which have the receipt
                    self.sleep(LAST_S)
                    self._cloudwatch(group)
                if not self.seen:
                    self._bucket(LOG)
                self.say(f"-- the run is done: {over.reason}")
                return 0
            if group is None or not (self.seen or folder):
                raise AwsRefused(self._silence())
            if not self.seen and not has_said_why:
                has_said_why = True
                self.say(f"-- {self._silence()} To stop waiting, press Ctrl-C.")
            if folder and polls % GONE_POLLS == 0 and (gone := self._end_detail(folder)):
                again = self.definition.run_argument
                self.say(f"-- nothing goes on with the run: {gone}. `gpufleet results {again}` makes its receipt.")
                return 1
            polls += 1
            self.sleep(POLL_S)

    def _end_detail(self, folder: RunFolder) -> str | None:
        objects = [stored for sign in results.SIGNS for stored in folder.objects(sign)]
        end = results.cut_off(self.definition, folder.owner, objects, self.ec2, datetime.now(UTC))
        return end.detail if end else None

    def _silence(self) -> str:
        """A sentence about why nothing is printed."""
        name, run = self.definition.run_argument, self.definition.run.id
        if self._folder() is None:
            return str(no_run(self.s3, self.definition))
        if self._group() is None:
            return (
                f"the stack of run {run} is destroyed, and its log group with it. `gpufleet results {name}` downloads "
                "the run's files from its bucket."
            )
        return (
            f"run {run} has printed nothing yet. A node first boots, pulls the image and stages its data: "
            f"`gpufleet status {name}` shows its progress, `gpufleet logs {name} --boot` shows what ended nodes did."
        )

    def boot(self) -> int:
        """Prints the boot logs in the bucket; each node writes its own when it ends."""
        folder = self._folder()
        if folder is None:
            raise no_run(self.s3, self.definition)
        names = [stored.name for stored in folder.objects(bucket.BOOT_LOGS)]
        if not names:
            raise AwsRefused(
                f"there is no boot log of run {self.definition.run.id} yet: a node writes it when the node ends."
            )
        for name in names:
            self.say(f"-- {name}")
            self._bucket(name)
        return 0

    def _cloudwatch(self, group: str | None) -> bool:
        """Prints every new event. Returns whether any event has been printed, now or before."""
        if group is None:
            return False
        events = aws.pages(
            self.logs,
            "filter_log_events",
            "events",
            logGroupName=group,
            logStreamNamePrefix=f"{self.definition.run.id}/",
            startTime=self.since_ms,
        )
        for event in sorted(events, key=lambda event: int(event["timestamp"])):
            # CloudWatch filters by the prefix, but an embedded AWS may not
            if event["eventId"] in self.seen or not event["logStreamName"].startswith(f"{self.definition.run.id}/"):
                continue
            self.seen.add(event["eventId"])
            # Events of several nodes arrive late and out of order, so each poll looks a minute back.
            self.since_ms = max(self.since_ms, int(event["timestamp"]) - 60_000)
            moment = datetime.fromtimestamp(int(event["timestamp"]) / 1000, UTC)
            self.say(f"{moment:%H:%M:%S} {event['message'].rstrip()}")
        return bool(self.seen)

    def _group(self) -> str | None:
        """The stack's log group; if several people run the same stack, the group of the file's owner."""
        groups = find_log_groups(self.logs, self.definition.name)
        candidates = [
            (aws.owner_of(group) != self.definition.run.owner, str(group["logGroupName"])) for group in groups
        ]
        return min(candidates)[1] if candidates else None

    def _folder(self) -> RunFolder | None:
        return find_folder(self.s3, self.definition)

    def _bucket(self, name: str) -> bool:
        folder = self._folder()
        raw = folder.read(name) if folder else None
        if raw is None:
            return False
        self.say(raw.decode("utf-8", "replace").rstrip("\n"))
        return True
