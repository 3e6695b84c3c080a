"""The receipt of a run whose end no supervisor has seen.

Its node's script wrote it, the timer or the third failed boot in a row: the supervisor, which writes every other, was
hung, or never began; and what a bare node has (Python 3.9, no container) does not run the job's code. Or nobody did:
its fleet was deleted, or expired while no node was there. So it is made here, of the same records and by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from infra.account import aws
from infra.account.fleet import fleets_of, is_over, nodes_of
from infra.account.run_folder import RunFolder, Stored
from infra.definition.model import StackDefinition
from job.contract import bucket, reading
from job.contract.done import FLEET_GONE, Done
from job.contract.reading import DoubtError, Fields
from job.contract.run import load
from job.contract.workdir import RUN
from job.supervisor import attempts, fleet, receipt
from job.supervisor.store import S3Store
from job.text import stamp

SIGNS = (bucket.ATTEMPTS, bucket.HEARTBEATS)  # what a node writes of itself while it lives
GOES_ON = Done("", "", "", "")


def cut_off(definition: StackDefinition, owner: str, objects: Iterable[Stored], ec2: Any, now: datetime) -> Done | None:
    """What done.json would be of a run without one that nothing goes on with: no fleet that launches, no node, of its
    bucket's `owner`; another's have a bucket of their own. It ended when its nodes last wrote. Without a reason while
    it may go on, and of a run that no node has begun; None where AWS does not say.
    """
    written = [each.written for each in objects if each.name.startswith(SIGNS)]
    if not written:
        return GOES_ON
    try:
        nodes = [node for node in nodes_of(ec2, definition) if node["State"]["Name"] != "terminated"]
        fleets = [fleet for fleet in fleets_of(ec2, definition) if not is_over(fleet, now)]
        if any(aws.owner_of(each) in ("", owner) or not owner for each in (*nodes, *fleets)):
            return GOES_ON
    except (BotoCoreError, ClientError):
        return None
    detail = "its fleet was deleted or has expired, and it has no node"
    return Done(FLEET_GONE, detail, "", stamp(max(written)))


def make(
    definition: StackDefinition,
    folder: RunFolder,
    ec2: Any,
    target: Path,
    done: Done,
    now: float,
    before: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The object of receipt.json, `now` in epoch seconds; run.json is in `target`. `before`: the one made earlier of
    this end, empty without; what the fleet said then stands, since AWS forgets. Raises ValueError with what keeps it
    from being made.
    """
    try:
        run, store = load(target / RUN), S3Store(f"s3://{folder.bucket}/{folder.run}", client=folder.s3)
        found = attempts.read(store, run, done=done, say=say)
        if not found:
            raise ValueError("no node has left a record")
        found = attempts.with_reclaims(found, _said(before))
        found = attempts.judged(found, _changes(definition, ec2), now)
        return receipt.build(run, found, done)
    except (OSError, ArithmeticError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _said(receipt: Mapping[str, Any]) -> dict[str, bool]:
    """What a receipt says of who took each of its nodes, where that was known."""
    try:
        nodes = Fields(dict(receipt)).sections("attempts")
        said = {node.need("instance", reading.text): node.take("reclaimed", reading.flag, None) for node in nodes}
    except DoubtError:
        return {}
    return {name: taken for name, taken in said.items() if taken is not None}


def _changes(definition: StackDefinition, ec2: Any) -> fleet.Changes:
    """Of the run's fleet, while AWS shows it: two days after it was deleted. Where an `up` that was killed has left a
    second one, of both: which of them a node was of is not known any more.
    """

    def ask(since: float) -> list[float] | None:
        try:
            found = fleets_of(ec2, definition)
            ids = [each["FleetId"] for each in found if aws.owner_of(each) == aws.owner_of(found[0])]
            return [at for each in ids for at in fleet.changes(ec2, each, since)] if ids else None
        except (BotoCoreError, ClientError):
            return None

    return ask
