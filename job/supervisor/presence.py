"""Writes a node's presence below the run's prefix, and reads the presences of the other nodes. gang.py makes decisions
from them.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from gpufleet.job.contract import bucket, reading
from gpufleet.job.contract.gang import GangGeneration, Presence
from gpufleet.job.contract.reading import DoubtError
from gpufleet.job.supervisor.gang import BEAT_S, SLOW_LOOKS, WAITING_BEAT_S, Sight, View
from gpufleet.job.supervisor.store import ABSENT, ANY, Entry, Store, StoreError, SupersededError, create

T = TypeVar("T")


class Lookout:
    """What one node knows about the others. `look` asks the store in a thread; the other methods use its result."""

    def __init__(self, store: Store, own: Presence, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self._store, self._clock, self._say = store, clock, say
        self._own, self._seen = own, View(own=own)
        self._reached_at, self._steady_since = clock(), clock()
        # for each key the etag, the time and the bytes of the object that was read
        self._bodies: dict[str, tuple[str, float, bytes]] = {}
        self._lock, self._looking = threading.Lock(), threading.Lock()
        # Set if the other nodes must get news of this node before the next regular write.
        self.changed = threading.Event()
        self._complaint, self._has_left = "", False
        self._took: deque[float] = deque(maxlen=SLOW_LOOKS)  # seconds that the last looks took

    def tell(self, **news: Any) -> None:
        """Changes what this node reports about itself. `view` shows it at once, and other nodes can read it after the
        next look.
        """
        with self._lock:
            changed = replace(self._own, **news)
            if changed != self._own:
                self._own = replace(changed, since=self._clock()) if changed.state != self._own.state else changed
                self.changed.set()

    @property
    def own(self) -> Presence:
        """This node's own report about itself."""
        return self._own

    @property
    def pause_s(self) -> float:
        """Seconds until the next regular look."""
        return WAITING_BEAT_S if self._own.state == "ready" else BEAT_S

    @property
    def view(self) -> View:
        """The result of the newest look, with the present ages."""
        now = self._clock()
        return replace(
            self._seen, own=self._own, age_s=now - self._reached_at, steady_s=self._reached_at - self._steady_since
        )

    def leave(self) -> None:
        """Tells the other nodes that this node has ended. Raises no errors, because a node that does not get the
        message will notice it anyway.
        """
        self.tell(state="gone")
        with self._looking, suppress(StoreError):
            self._has_left = True
            self._send(self._own)

    def look(self) -> None:
        """Sends this node's presence, and reads the others'. Raises no errors: an outage of the store is only logged,
        and only once.
        """
        self.changed.clear()
        began = self._clock()
        with self._looking:  # an older presence must not replace a newer one
            if self._has_left:
                return
            try:
                own = self._own
                self._send(own)
                entries = {entry.key: entry for entry in self._store.entries(bucket.GANG)}
                seen = self._read(own, entries, is_over=self._store.size(bucket.DONE) is not None)
            except StoreError as error:
                if not self._complaint:
                    self._say(f"the other nodes cannot be seen: {error}")
                self._complaint = str(error)
                return
            if self._complaint or began - self._reached_at > 3 * BEAT_S:
                self._steady_since = self._clock()
            self._complaint = ""
            self._seen, self._reached_at = seen, self._clock()
            self._took.append(self._reached_at - began)
            with self._lock:  # so that the next look sends the presence
                self._own = replace(self._own, look_s=round(min(self._took)) if len(self._took) == SLOW_LOOKS else 0.0)

    def propose(self, generation: GangGeneration) -> None:
        """Creates the generation's object, unless another node has created it. The next look reads it. Raises no
        errors.
        """
        content = json.dumps(generation.to_json(), sort_keys=True).encode()
        try:
            create(self._store, content, bucket.generation_key(generation.number))
        except StoreError as error:
            self._say(f"generation {generation.number} is not proposed: {error}")
        self.look()

    def let_go(self) -> None:
        """Tells all waiting nodes to end, unless another node has done so. The next look reads the message. Raises no
        errors.
        """
        number, count = self._seen.newest.number if self._seen.newest else 0, (self._seen.let_go or 0) + 1
        try:
            create(self._store, json.dumps({"by": self._own.instance}).encode(), bucket.let_go_key(number, count))
        except StoreError as error:
            self._say(f"the message that waiting nodes leave could not be sent: {error}")
        self.look()

    def _send(self, own: Presence) -> None:
        tree = replace(own, at=self._clock()).to_json()
        self._store.put_bytes(json.dumps(tree, sort_keys=True).encode(), bucket.presence_key(own.instance))

    def _read(self, own: Presence, entries: dict[str, Entry], *, is_over: bool) -> View:
        now = entries[bucket.presence_key(own.instance)].at if bucket.presence_key(own.instance) in entries else None
        if now is None:
            raise StoreError("this node's own presence is not listed")
        others = {}
        for key, entry in entries.items():
            named = bucket.PRESENCE_KEY.fullmatch(key)
            if named and named[1] != own.instance:
                presence = self._object(entry, Presence.from_json)
                if presence is not None and presence.instance == named[1]:
                    others[named[1]] = Sight(presence=presence, age_s=now - entry.at)
        numbers = (int(match[1]) for key in entries if (match := bucket.GENERATION_KEY.fullmatch(key)))
        newest = self._newest(numbers, entries)
        since, matches = newest.number if newest else 0, map(bucket.LET_GO_KEY.fullmatch, entries)
        counts = [int(let_go[2]) for let_go in matches if let_go is not None and int(let_go[1]) == since]
        return View(own=own, others=others, newest=newest, is_over=is_over, let_go=max(counts, default=0))

    def _newest(self, numbers: Iterable[int], entries: dict[str, Entry]) -> GangGeneration | None:
        number = max(numbers, default=None)
        return (
            None if number is None else self._object(entries[bucket.generation_key(number)], GangGeneration.from_json)
        )

    def _object(self, entry: Entry, kind: Callable[[dict[str, Any]], T]) -> T | None:
        """The object of `entry`; None if it does not exist any more or is damaged."""
        etag, at, content = self._bodies.get(entry.key, ("", 0.0, b""))
        if (etag, at) != (entry.etag, entry.at):
            content = self._store.get_bytes(entry.key) or b""
            self._bodies[entry.key] = (entry.etag, entry.at, content)
        try:
            return kind(reading.parse(content))
        except DoubtError:
            return None


class LookoutThread:
    """A thread that looks regularly, and at once if there is news to send. The thread ends with the `with` block."""

    def __init__(self, watch: Lookout) -> None:
        self._watch, self._ended = watch, threading.Event()
        self._thread = threading.Thread(target=self._run, name="gang", daemon=True)

    def __enter__(self) -> Lookout:
        self._thread.start()
        return self._watch

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watch.changed.set()
        self._thread.join(timeout=BEAT_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._watch.look()
            self._watch.changed.wait(self._watch.pause_s)


def newest_generation(store: Store) -> int:
    """The number of the newest generation; 0 if there is none. Raises StoreError."""
    matches = (bucket.GENERATION_KEY.fullmatch(entry.key) for entry in store.entries(bucket.GANG))
    return max((int(match[1]) for match in matches if match), default=0)


class ConditionalStore:
    """The run's store for one of several nodes. With it, a leader that hung and goes on later overwrites nothing.
    Objects of the leader (metrics, outputs, the run's end) replace only the object that existed when the leader was
    certainly still the leader; otherwise the put fails. Objects that only one node writes, and the files of a
    generation's checkpoints, need no such condition. A manifest that arrives too late in spite of this is skipped
    (gang.timely), or set aside if its files do not exist any more.
    """

    def __init__(self, inner: Store) -> None:
        self._inner, self.uri = inner, inner.uri
        self.generation = 0  # the generation whose leader this node is, or was last

    def put_bytes(self, content: bytes, key: str, over: str = ANY) -> None:
        """Raises TakenError, SupersededError."""
        self._inner.put_bytes(content, key, self._condition(key, over))

    def put_file(self, path: Path, key: str, over: str = ANY) -> None:
        self._inner.put_file(path, key, self._condition(key, over))

    def _condition(self, key: str, over: str) -> str:
        if bucket.has_one_writer(key):
            return over
        etag = next((entry.etag for entry in self._inner.entries(key) if entry.key == key), ABSENT)
        # Whether this node still leads is checked after this read. So every object of a later leader has a different
        # etag.
        if (newest := newest_generation(self._inner)) > self.generation:
            raise SupersededError(f"{key} was not written: generation {newest} has taken over")
        return etag if over == ANY else over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
