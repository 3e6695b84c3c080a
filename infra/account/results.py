"""Downloads a run's files from its bucket to results/<stack>/<run>/, and keeps its receipt for later bills in
receipts/<stack>/.

Transfer out of AWS costs money, so the price is printed first.

Usually the supervisor writes a run's receipt. If the supervisor did not see the run's end, this module makes the
receipt from the same records and by the same code. There are two such cases. Either the node ended the run (by its
timer, or after the third failed boot in a row) while the supervisor hung or had not begun; the node itself (Python 3.9,
no container) cannot run the job's code. Or nobody recorded an end: the fleet was deleted, or expired while it had no
node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from gpufleet.infra.account import aws
from gpufleet.infra.account.fleet import fleets_of, is_over, market, nodes_of
from gpufleet.infra.account.run_folder import RunFolder, StoredObject, find_folder, no_run
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused
from gpufleet.infra.evidence import receipts
from gpufleet.infra.market import INTERRUPTED
from gpufleet.job import atomic, progress
from gpufleet.job.contract import bucket
from gpufleet.job.contract.bucket import CHECKPOINTS, EXPORTS, FINAL
from gpufleet.job.contract.done import EARLY, FINISHED, FLEET_GONE, NODE_ENDED, Done
from gpufleet.job.contract.goal import results_in
from gpufleet.job.contract.receipt import Receipt, parse
from gpufleet.job.contract.results import refusal
from gpufleet.job.contract.run import load
from gpufleet.job.contract.spent import KEPT_S, History
from gpufleet.job.contract.workdir import RECEIPT, RESULTS, RUN
from gpufleet.job.supervisor import attempts, fleet, receipt
from gpufleet.job.supervisor.receipt import text as receipt_text
from gpufleet.job.supervisor.store import S3Store
from gpufleet.job.text import counted, stamp

WEIGHTS = (".safetensors", ".pt", ".bin")  # files of other types are small, or prove the figures in the run's tables


def keep(definition: StackDefinition, s3: Any, receipt: Path, root: Path) -> str:
    """Keeps the receipt of a run on AWS in the project, and returns a sentence about it. The receipt of a rehearsal is
    not kept, because it would distort the score of past bills.
    """
    host = urlsplit(s3.meta.endpoint_url).hostname or ""
    if not host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return "The receipt is not kept for later bills: the run was not on AWS."
    try:
        path = receipts.keep(receipt.read_bytes(), root, definition.name, definition.run.id)
    except ValueError as error:
        return f"The receipt is not kept for later bills: {error}."
    return f"Kept for later bills; commit it: {path.relative_to(root)}"


def fetch(
    definition: StackDefinition,
    s3: Any,
    ec2: Any,
    target: Path,
    *,
    light: bool,
    exports: bool,
    say: Callable[[str], None] = print,
) -> int:
    """Downloads the results, checks their sizes, and prints what is missing. Returns 0 if all files exist that a run
    with this kind of end leaves; otherwise 1. Every run leaves a receipt, or the records from which this module makes
    one. A run that a limit or `gpufleet stop` ended may have no results.json. By default it downloads the files that
    the bill's line `transfer of results` prices.
    """
    folder = find_folder(s3, definition)
    if folder is None:
        raise no_run(s3, definition)
    folders = (*(() if exports else (EXPORTS,)), *((FINAL,) if light else ()))
    objects = [
        stored
        for stored in folder.objects()
        if not stored.name.startswith((CHECKPOINTS, bucket.FLEETS)) and _is_file(stored.name, say)
    ]
    wanted = [stored for stored in objects if not (stored.name.startswith(folders) and stored.name.endswith(WEIGHTS))]
    remaining = sum(stored.bytes for stored in objects) - sum(stored.bytes for stored in wanted)
    missing = [stored for stored in wanted if not _same(target / stored.name, stored)]
    total = sum(stored.bytes for stored in missing)
    cost = Decimal(total) / 10**9 * load_catalog().price("transfer_out", definition.fleet.region).amount
    whose = "" if folder.is_of(definition.run.owner) else f" (owner {folder.owner})"
    say(f"s3://{folder.bucket}/{folder.run}/{whose} to {target}")
    if folder.others:
        say(f"A run of this name lies elsewhere too: {folder.others}, {definition.run.owner}.")
    say(f"{counted(len(missing), 'file')}, {_readable(total)}; transfer out of AWS costs about ${cost:.2f}")
    if remaining:
        say(f"left in the bucket: {_readable(remaining)} of weights{'' if light else ' (--exports brings them)'}")
    with progress.shown("downloading", total) as advance:
        for stored in missing:
            _download(folder, stored, target / stored.name, advance)
            say(f"  {stored.name}  {_readable(stored.bytes)}")
    names = {stored.name for stored in wanted}
    lacking = [name for name in (RESULTS, RECEIPT) if name not in names]
    done: Done | None = folder.read_done() if lacking else None
    if RECEIPT in lacking:
        done, made = _late(definition, folder, objects, ec2, target, done, say)
        if made:
            lacking.remove(RECEIPT)
    reason, detail = (done.reason, done.detail) if done else ("", "")
    if lacking == [RESULTS] and reason == FINISHED and not definition.job.parameters.sizes().results:
        lacking = []
    if lacking == [RESULTS] and reason in EARLY:
        if definition.job.parameters.sizes().final_if_cut[0] and not any(
            stored.name.startswith(FINAL) for stored in objects
        ):
            checkpoints_uri = f"s3://{folder.bucket}/{folder.run}/{CHECKPOINTS}"
            say(f"The run left no {FINAL} either. If it has trained, its checkpoints are in {checkpoints_uri}")
        say(f"Complete for a run that ended with {reason}, which left no results.json. Its cost: {target / RECEIPT}")
        return 0
    if lacking:
        state = f"it ended with {reason}{f' ({detail})' if detail else ''}" if reason else "it is not done"
        if RECEIPT in lacking and done is None:
            state += ", and AWS does not say whether it goes on"
        again = definition.run_argument
        more = f"`gpufleet status {again}` says more"
        if reason in NODE_ENDED:
            more = f"`gpufleet logs {again} --boot` says what its nodes did. Mend that; a new run.id begins anew"
        say(f"The run has no {' and no '.join(lacking)}: {state}. {more}.")
        return 1
    say(f"Complete. Its cost beside the estimate: {target / RECEIPT}")
    return 0


def _late(
    definition: StackDefinition,
    folder: RunFolder,
    objects: Sequence[StoredObject],
    ec2: Any,
    target: Path,
    done: Done | None,
    say: Callable[[str], None],
) -> tuple[Done | None, bool]:
    """For a run without a receipt, returns two values. First, how the run ended, by done.json or by its fleet; None if
    AWS does not say whether the run goes on. Second, whether a receipt could be made and is now in `target`.
    """
    done = done or cut_off(definition, folder.owner, objects, ec2, datetime.now(UTC))
    if done is None:  # an earlier receipt in `target` stays, because the run may never have another one
        return None, False
    before = earlier_receipt(target / RECEIPT)
    if before is None or before.at != done.at:  # the receipt is from an earlier run with this id
        before = None
        (target / RECEIPT).unlink(missing_ok=True)
    if not done.reason:
        return done, False
    try:
        made = make_receipt(definition, folder, ec2, target, done, time.time(), before, say)
    except ValueError as error:
        say(f"No receipt can be made from the files of this run: {error}.")
        return done, False
    atomic.write_json(target / RECEIPT, made.to_json())
    say(receipt_text(made))
    return done, True


def earlier_receipt(path: Path) -> Receipt | None:
    """The receipt at `path`; None if there is no readable one."""
    with suppress(FileNotFoundError, ValueError):
        return parse(path.read_bytes())
    return None


def _download(folder: RunFolder, stored: StoredObject, target: Path, advance: progress.Advance) -> None:
    """Downloads an object under a temporary name first, so that a file with the final name is always complete. The file
    gets the object's time, which `_same` compares.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        folder.s3.download_file(folder.bucket, f"{folder.run}/{stored.name}", str(part), Callback=advance)
    except OSError as error:  # on a full disk, the error of a write names no file
        error.filename = error.filename or str(part.parent)
        raise
    size = part.stat().st_size
    if size != stored.bytes:  # a run that still trains rewrites its logs each minute, so the object may have changed
        stored = next((now for now in folder.objects(stored.name) if now.name == stored.name), stored)
    if size != stored.bytes:
        part.unlink()
        raise AwsRefused(
            f"{stored.name} came with {size} bytes instead of {stored.bytes}: it changed meanwhile. Run the command"
            " again."
        )
    os.utime(part, (stored.written.timestamp(),) * 2)
    part.replace(target)


def _is_file(name: str, say: Callable[[str], None]) -> bool:
    """Whether a file here can have the object's name. If it cannot, prints so; the object stays in the bucket."""
    if why := refusal(name):
        say(f"left in the bucket: an object whose name {why}")
    return not why


def _same(path: Path, stored: StoredObject) -> bool:
    """Whether the file at `path` already is this object. The size alone does not show it: an earlier run may have had
    the same id.
    """
    if path.suffix not in WEIGHTS or not path.is_file():
        return False
    status = path.stat()
    return status.st_size == stored.bytes and int(status.st_mtime) == int(stored.written.timestamp())


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


SIGNS = (bucket.ATTEMPTS, bucket.HEARTBEATS)  # objects that a node writes while it runs
GOES_ON = Done("", "", "", "")


def cut_off(
    definition: StackDefinition, owner: str, objects: Iterable[StoredObject], ec2: Any, now: datetime
) -> Done | None:
    """The end of a run that has no done.json. The run is over if its owner has neither a node nor a fleet that
    launches; it then ended when its nodes last wrote. Returns GOES_ON, whose reason is empty, if the run may go on or
    no node has begun it. Returns None if AWS does not say. (A run of another owner has its own bucket.)
    """
    written = [stored.written for stored in objects if stored.name.startswith(SIGNS)]
    if not written:
        return GOES_ON
    try:
        nodes = [node for node in nodes_of(ec2, definition) if node["State"]["Name"] != "terminated"]
        fleets = [fleet for fleet in fleets_of(ec2, definition) if not is_over(fleet, now)]
        if any(aws.owner_of(resource) in ("", owner) or not owner for resource in (*nodes, *fleets)):
            return GOES_ON
    except (BotoCoreError, ClientError):
        return None
    detail = "its fleet was deleted or has expired, and it has no node"
    return Done(FLEET_GONE, detail, "", stamp(max(written)))


def make_receipt(
    definition: StackDefinition,
    folder: RunFolder,
    ec2: Any,
    target: Path,
    done: Done,
    now: float,
    before: Receipt | None,
    say: Callable[[str], None],
) -> Receipt:
    """Makes the receipt. run.json is in `target`; `now` is in epoch seconds. `before` is an earlier receipt of the same
    run: its facts about the fleet are kept, because AWS soon stops showing them. Raises ValueError with the reason if
    the receipt cannot be made.
    """
    try:
        run, store = load(target / RUN), S3Store(f"s3://{folder.bucket}/{folder.run}", client=folder.s3)
        history = _history(definition, ec2, now - KEPT_S)
        known = attempts.reclaimed(before.attempts if before else ())
        records = attempts.read_ended(store, run, done, history, now, known=known, say=say)
        if not records:
            raise ValueError("no node has left a record")
        objects = {stored.name: stored.bytes for stored in folder.objects()}
        return receipt.build(run, records, done, objects=objects, results=results_in(target))
    except (OSError, ArithmeticError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _history(definition: StackDefinition, ec2: Any, since: float) -> History | None:
    """The history of the run's fleet, which AWS shows for two days after the fleet's deletion. If a killed `up` has
    left a second fleet, the history has both fleets, because it is no longer known to which fleet a node belonged.
    """
    try:
        fleets = fleets_of(ec2, definition)
        own = [described for described in fleets if aws.owner_of(described) == aws.owner_of(fleets[0])]
        histories = [fleet.history(ec2, described["FleetId"], since) for described in own]
    except (BotoCoreError, ClientError):
        return None
    noticed = [
        history for history, of in zip(histories, own, strict=True) if len(own) == 1 or market(of) in INTERRUPTED
    ]
    return fleet.merged(histories, (at for history in noticed for at in history.changes)) if histories else None
