"""Uploads files while the job trains: one checkpoint at a time, exports when there is no checkpoint to send, and
regularly the heartbeat, the metrics and the log. Errors here do not stop the training: a failed upload is repeated
later, after pauses that become longer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from gpufleet.job.contract import bucket
from gpufleet.job.contract.attempt import Beat
from gpufleet.job.contract.commit import Commit
from gpufleet.job.contract.workdir import LOG
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.supervisor.publish import LackingError, Publisher
from gpufleet.job.supervisor.store import GivenUpError, Store, StoreError

BACKOFF_S = (2.0, 60.0)  # the first and the longest pause after a failure, in seconds
PART_S = 2.0  # seconds between two checks whether other nodes have sent their parts


class Uploader:
    """Publishes the trainer's commits. Exports are sent only when there is no commit to publish, because in the last
    seconds before a machine is taken away the checkpoint is more important. `poll` may be called often, and never
    waits.
    """

    def __init__(
        self,
        publisher: Publisher,
        executor: Executor,
        clock: Callable[[], float],
        say: Callable[[str], None],
        upload_s: Callable[[int], float],  # returns the seconds that an upload of this many bytes takes
    ) -> None:
        self.publisher = publisher
        self._executor, self._clock, self._say, self._upload_s = executor, clock, say, upload_s
        # the running upload; its commit is None for exports
        self._running: tuple[Commit | None, Future[None]] | None = None
        self._pause_s, self._not_before = BACKOFF_S[0], 0.0
        self._until: float | None = None
        self.lacking: tuple[int, ...] = ()  # the nodes whose parts are missing, if the upload waits only for them

    def poll(self) -> None:
        """Notes uploads that have ended, and starts the next one."""
        if self._running is not None:
            commit, future = self._running
            if not future.done():
                self._make_way(commit)
                return
            self._running, self.lacking = None, ()
            self._settle(commit, future.exception())
        if self._clock() < self._not_before:
            return
        pending = self.publisher.pending()
        if pending:
            commit = pending[0 if self._until is None else -1]
            self._running = (commit, self._executor.submit(self._publish, commit))
        elif self._until is None and self.publisher.exported():
            self._running = (None, self._executor.submit(self.publisher.send_exports))

    def hurry(self, until: float) -> None:
        """To be called when the machine is about to be taken away. From then on the newest commit is sent first and at
        once, even after failures. The upload of an older commit is abandoned if a newer commit can still arrive by
        `until`.
        """
        self._until, self._pause_s, self._not_before = until, BACKOFF_S[0], 0.0

    def abandon(self, wait: Callable[[], None]) -> None:
        """Abandons the running upload; `wait` is called until it has ended."""
        while self._running is not None and not self._running[1].done():
            self.publisher.cancel()
            wait()
        self._running = None

    def calm(self) -> None:
        """Lets uploads go on at their normal pace: the notice was for another machine, so this machine has time."""
        self._until = None

    @property
    def idle(self) -> bool:
        """Whether no upload runs or waits. After a notice, exports are not considered."""
        running = self._running is not None and not (self._until is not None and self._running[0] is None)
        return not running and not self.publisher.pending()

    def _make_way(self, running: Commit | None) -> None:
        """After a notice, abandons the running upload if a newer commit waits. In all other cases the upload goes on,
        because otherwise it would have to begin again.
        """
        if self._until is None:
            return
        left_s, step = self._until - self._clock(), -1 if running is None else running.step
        newer = [commit for commit in self.publisher.pending() if commit.step > step]
        if newer and (running is None or self._upload_s(newer[-1].bytes) <= left_s):
            self.publisher.cancel()

    def _publish(self, commit: Commit) -> None:
        self.publisher.publish(commit)
        try:
            self.publisher.prune()
        except StoreError as error:
            self._say(f"old checkpoints stay for now: {error}")

    def _settle(self, commit: Commit | None, error: BaseException | None) -> None:
        title = "exports" if commit is None else f"step {commit.step}"
        if isinstance(error, LackingError):
            self.lacking, self._not_before = error.nodes, self._clock() + PART_S
        elif error is None:
            self._pause_s, self._not_before = BACKOFF_S[0], 0.0
        elif isinstance(error, GivenUpError):
            self._say(f"{title}: the upload is abandoned for a newer checkpoint")
        elif isinstance(error, OSError | KeyError | TypeError | ValueError) and not isinstance(error, StoreError):
            self._say(f"{title} cannot be published: {type(error).__name__}: {error}")
            if commit is None:  # the export was replaced while it was sent; it is sent later
                self._not_before = self._clock() + self._pause_s
            else:
                self.publisher.give_up(commit)
        else:  # the store failed, or there was an unexpected error, such as a lack of threads
            self._say(f"{title} not published: {error}; again in {self._pause_s:.0f} s")
            self._not_before = self._clock() + self._pause_s
            self._pause_s = BACKOFF_S[0] if self._until is not None else min(2 * self._pause_s, BACKOFF_S[1])


def send_log(store: Store, log: Path, key: str) -> None:
    """Sends the written part of job.log from the disk, because the log may be larger than memory. Raises StoreError."""
    try:
        with ForeignFolder(log.parent).hold(log) as held:
            store.put_file(held, key)
    except FileNotFoundError:
        store.put_bytes(b"", key)


class Pulse:
    """Sends heartbeat/<instance>.jsonl, metrics.jsonl and job.log, each time as a whole: S3 cannot append."""

    def __init__(
        self,
        *,
        store: Store,
        instance: str,
        log: Path,
        publisher: Publisher,
        executor: Executor,
        also: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._store, self._instance, self._log, self._publisher = store, instance, log, publisher
        self._executor, self._also, self._say = executor, also, say
        self.leads = True  # whether this node leads; the output of other nodes is not the run's log
        self._beats: list[str] = []
        self._running: Future[None] | None = None

    def beat(self, beat: Beat) -> None:
        """Adds a heartbeat and sends it. If the last upload is still running, the next one includes the heartbeat."""
        self._beats.append(json.dumps(beat.to_json(), sort_keys=True))
        if self._running is not None:
            if not self._running.done():
                return
            if (error := self._running.exception()) is not None:
                self._say(f"heartbeat not sent: {error}")
        self._running = self._executor.submit(self._send)

    def last(self, beat: Beat) -> None:
        """Sends the last heartbeat, and waits for it. Raises StoreError."""
        self._beats.append(json.dumps(beat.to_json(), sort_keys=True))
        if self._running is not None:
            self._running.exception()
        self._send()

    def _send(self) -> None:
        self._store.put_bytes(("\n".join(self._beats) + "\n").encode(), bucket.heartbeat_key(self._instance))
        if self.leads:
            self._publisher.metrics()
        send_log(self._store, self._log, LOG if self.leads else bucket.node_log_key(self._instance))
        self._also()
