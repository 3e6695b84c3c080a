"""Uploads checkpoints: first the files, in parallel and with a check of their sizes, and the manifest last. Then it
writes best.json, and removes old checkpoints.

A checkpoint without a manifest does not exist, so a crash in this module leaves the last published one valid. No object
of a published checkpoint is overwritten or deleted for another checkpoint of the same step, because that one gets its
own folder (bucket.CheckpointPlace). The best, the last and the last but one are kept, in the store and on the disk;
older ones are removed only after the newer manifest.

If each of several nodes writes a part of a checkpoint, each uploads its part, and then the list of its files. The
leader waits for the lists of all nodes before it writes the manifest, which includes them. So a checkpoint without one
of its parts does not exist either. The module also uploads finished results of phases after training:
<workdir>/stages/*.jsonl, copied to <run>/stages/. Such a phase appends one JSON object per line and never changes a
line, so the work behind a line in the store is not repeated by a later attempt. S3 cannot append: a file that has grown
is sent again from its beginning to its last complete line.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpufleet.job import atomic
from gpufleet.job.contract import bucket, inputs, reading
from gpufleet.job.contract.bucket import CheckpointPlace, checkpoint_place
from gpufleet.job.contract.commit import BEST, HELD, Best, Commit, Manifest, Published
from gpufleet.job.contract.commit import read as read_commit
from gpufleet.job.contract.inputs import InputFile
from gpufleet.job.contract.reading import Fields
from gpufleet.job.contract.results import refusal
from gpufleet.job.contract.workdir import (
    CHECKPOINTS,
    EXPORTS,
    FINAL,
    HANDED_ON,
    METRICS,
    OUTPUTS,
    OWN,
    SCALARS,
    STAGES,
    STEPS,
    USER,
    step_of,
)
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.supervisor.store import GivenUpError, Store, StoreError


def commits(workdir: Path) -> list[Commit]:
    """Complete checkpoints on disk, lowest step first. A folder without a valid commit.json is not one."""
    pairs = [(path, read_commit(path)) for path in sorted((workdir / CHECKPOINTS).glob(STEPS))]
    return [commit for path, commit in pairs if commit is not None and commit.folder == path.name]


@contextmanager
def upload_mark(folder: Path) -> Iterator[None]:
    """Marks a checkpoint as being uploaded, so that the trainer, which removes old checkpoints at the same time, does
    not remove it. Without the mark, an upload that takes longer than two saves would always lose its files, and no
    checkpoint would ever be published.
    """
    mark = folder / HELD
    try:
        mark.touch()
    except FileNotFoundError:
        raise StoreError(f"{folder.name} was pruned meanwhile") from None
    except OSError:
        pass  # the disk is too full for a mark, so the upload goes on without it
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)


class Mirror:
    """Copies the files stages/*.jsonl to the store, for one attempt. Call `restore` first, and then `send`."""

    def __init__(self, store: Store, workdir: Path) -> None:
        self._store, self._folder = store, workdir / STAGES
        self._sent: dict[str, int] = {}  # the bytes that were sent, by file
        self._sending = threading.Lock()
        self.added = 0  # lines that this attempt has added to the store

    def restore(self) -> int:
        """Replaces <workdir>/stages by the files of earlier attempts; returns the number of lines. Raises
        StoreError.
        """
        lines = 0
        with self._sending:
            shutil.rmtree(self._folder, ignore_errors=True)
            for entry in self._store.entries(bucket.STAGES):
                name = entry.key.removeprefix(bucket.STAGES)
                if "/" in name or not name.endswith(".jsonl"):
                    continue
                content = whole_lines(self._store.get_bytes(entry.key) or b"")
                atomic.write_bytes(self._folder / name, content)
                self._sent[name] = len(content)
                lines += content.count(b"\n")
        return lines

    def send(self) -> None:
        """Sends every file that grew since the last call. This may be called from any thread: older content never
        replaces newer content. Raises StoreError, also if a file cannot be read; the caller tries again.
        """
        with self._sending:
            for path in sorted(self._folder.glob("*.jsonl")):
                try:
                    with ForeignFolder(self._folder).open(path) as file:
                        content = whole_lines(file.read())
                except OSError as error:
                    raise StoreError(f"{path.name} cannot be read: {error}") from error
                sent = self._sent.get(path.name, 0)
                if len(content) != sent:
                    self._store.put_bytes(content, f"{bucket.STAGES}{path.name}")
                    self._sent[path.name] = len(content)
                    self.added += content[sent:].count(b"\n")


def whole_lines(content: bytes) -> bytes:
    """The content without a last line that is incomplete."""
    return content[: content.rfind(b"\n") + 1]


class LackingError(StoreError):
    """Only the parts of the named nodes are missing for a checkpoint."""

    def __init__(self, step: int, nodes: Iterable[int]) -> None:
        self.nodes = tuple(nodes)
        super().__init__(f"step {step} lacks the part of node {', '.join(map(str, self.nodes))}")


PARALLEL = 8
FREE_FACTOR = 1.2  # free disk space that a save needs, as a multiple of its predicted size
# larger TensorBoard files are not sent, because a file that has grown is sent again from its beginning
MOST_SCALARS = 1024**3


class Publisher:
    """Publishes the commits of one work folder; `published` restricts the checkpoints that may be published."""

    def __init__(
        self, *, run: str, store: Store, workdir: Path, published: Callable[[], Published], say: Callable[[str], None]
    ) -> None:
        self.newest = CheckpointPlace(-1)  # the highest step in the store that this attempt published or resumed from
        # If there are several nodes: this node's generation, its rank in it, and the number of nodes that write parts.
        self.generation, self.node, self.parts = 0, 0, 1
        # The step of the newest commit that is to be sent, while the publisher waits for parts of another one.
        self.newest_wanted: int | None = None
        self.measured: tuple[int, float] | None = None  # bytes and seconds of the last publication
        self._store, self._workdir, self._say = store, workdir, say
        self._run, self._published, self._own = run, published, ForeignFolder(workdir)
        self._best: Best | None = None
        self._told: tuple[Any, ...] = ()  # the fields of the newest manifest that may change
        self._given_up: set[int] = set()
        self._sent: dict[str, int] = {}  # the time of writing of each export that was sent
        self._scalars: dict[str, int] = {}  # the bytes that were sent of each TensorBoard file
        self._place = CheckpointPlace(-1)  # the place of the commit that is being sent, or was sent last
        # The files of that commit that were sent: their time of writing and sha256.
        self._arrived: dict[str, tuple[int, str]] = {}
        # The time at which the sending of these files began; None if a try has failed since then.
        self._began: float | None = None
        self._cancel = threading.Event()
        self.stages = Mirror(store, workdir)
        self._reading = threading.Lock()

    def resumed(self, manifest: Manifest | None) -> None:
        """Notes that this manifest is that of the store's newest good checkpoint; None if training begins without a
        checkpoint. A best checkpoint of a later step, or one that does not exist any more, is forgotten.
        """
        self.newest = self._place = CheckpointPlace(-1) if manifest is None else manifest.place
        self._told = () if manifest is None else manifest.commit.changing
        self._given_up, self._arrived, self._best = set(), {}, None
        if self.node or manifest is None:
            return
        # so that no file is sent again if only the checkpoint's evaluation is new
        self._arrived = self._staged(manifest)
        best = Best.from_bytes(self._store.get_bytes(BEST))
        there = best is not None and best.place <= self.newest and self._store.size(best.place.manifest) is not None
        self._best = best if there else None
        # written again, because the earlier node may have ended between the manifest and best.json
        self._offer(manifest.commit, manifest.place)

    def forget_best(self, manifest: Manifest) -> None:
        """Forgets a best checkpoint that is lost. After that, checkpoints of the trainer that are not older than the
        resumed `manifest` may become the best.
        """
        self._best = None
        self._offer(manifest.commit, manifest.place)

    def join(self, generation: int, node: int, parts: int) -> None:
        """Makes this node publish for the generation, and forget everything about earlier generations."""
        self.generation, self.node, self.parts = generation, node, parts
        self.newest_wanted = -1 if parts > 1 else None
        self._place, self._arrived = CheckpointPlace(-1), {}

    def pending(self) -> list[Commit]:
        """The commits that are to be published, lowest step first. Of the commits that were made only because of the
        time, only the newest is included. The newest published commit is included again if its evaluation was added
        later, or if the run has resumed from it again.
        """
        most = self.newest_wanted
        waiting = [
            commit
            for commit in commits(self._workdir)
            if commit.step not in self._given_up and (most is None or commit.step <= most)
        ]
        return [
            commit
            for commit in waiting
            if self._improves(commit)
            or (commit.step == self.newest.step and commit.changing != self._told)
            or (commit.step > self.newest.step and (commit is waiting[-1] or commit.reason != "timed"))
        ]

    def give_up(self, commit: Commit) -> None:
        """Notes that this commit must not be tried again."""
        self._given_up.add(commit.step)

    def cancel(self) -> None:
        """Makes a running publication raise GivenUpError soon. The next publication starts from the beginning."""
        self._cancel.set()
        self._store.cancel()

    def publish(self, commit: Commit) -> None:
        """Publishes a commit; raises StoreError (GivenUpError, LackingError), or OSError if files changed."""
        self._cancel.clear()
        with upload_mark(self._path(commit)):
            try:
                self._publish(commit)
            except LackingError:
                raise
            except BaseException:
                self._began = None
                raise

    def _publish(self, commit: Commit) -> None:
        for name, size in commit.files:
            if self._own.stat(path := self._path(commit) / name).st_size != size:
                raise FileNotFoundError(f"{path} is not {size} bytes long")
        required = self._require(commit.requires)
        digests = self._send_all(commit)
        files = tuple(InputFile(name=name, bytes=size, sha256=digests[name]) for name, size in commit.files)
        if self.node:
            part = {"files": [asdict(file) for file in files]}
            self._store.put_bytes(atomic.json_bytes(part), self._place.part(self.node))
            self.newest, self._told = self._place, commit.changing
            self._say(f"node {self.node} has sent its part of step {commit.step}, {commit.bytes / 1e6:.1f} MB")
            return
        parts = self._read_parts()
        self.stages.send()  # sent first, because the checkpoint of a later phase needs the lines in stages/
        try:
            self.metrics(patience_s=5.0)
        except OSError as error:  # every heartbeat sends the log again; the checkpoint must not wait for the log
            self._say(f"metrics not sent: {error}")
        made = Manifest(commit=commit, run=self._run, files=files, parts=parts, generation=self.generation)
        manifest = made.to_json(self._published(), required)
        self._store.put_bytes(atomic.json_bytes(manifest), self._place.manifest)
        self._offer(commit, self._place)
        if commit.step >= self.newest.step:
            self.newest, self._told = self._place, commit.changing
        if self._began is not None:
            self.measured = (commit.bytes, time.monotonic() - self._began)
        self._began = None
        others = sum(file.bytes for part in parts for file in part)
        self._say(f"published step {commit.step} ({commit.reason}), {(commit.bytes + others) / 1e6:.1f} MB")

    def _read_parts(self) -> tuple[tuple[InputFile, ...], ...]:
        """The other nodes' lists of files of the checkpoint, by rank. Raises LackingError."""
        if self.parts == 1:
            return ()
        there = {entry.key for entry in self._store.entries(self._place.prefix)}
        lacking = [node for node in range(1, self.parts) if self._place.part(node) not in there]
        if lacking:
            raise LackingError(self._place.step, lacking)
        lists = [self._store.get_bytes(self._place.part(node)) or b"" for node in range(1, self.parts)]
        return tuple(inputs.files(Fields(reading.parse(content))) for content in lists)

    def _send_all(self, commit: Commit) -> dict[str, str]:
        """Sends the commit's files, except those that arrived earlier. Returns the sha256 of all files by name."""
        paths = {name: self._path(commit) / name for name, _ in commit.files}
        written = {name: self._own.stat(path).st_mtime_ns for name, path in paths.items()}
        there = {entry.key for entry in self._store.entries(CheckpointPlace(commit.step).prefix)}
        # If two nodes exist at the same time, the other one may have removed files that looked like an incomplete
        # upload.
        self._arrived = {
            name: arrival
            for name, arrival in self._arrived.items()
            if self._place.step == commit.step and written.get(name) == arrival[0] and self._key(name) in there
        }
        is_another = self._place.manifest in there and len(self._arrived) < len(paths)
        if self._place.step != commit.step or is_another:
            self._place, self._arrived = self._new_place(commit.step, there), {}
        if len(self._arrived) < len(paths):
            self._began = None if self._arrived else time.monotonic()
        with ThreadPoolExecutor(2 * PARALLEL) as pool:  # so that some files are hashed while others are sent
            waiting = [
                (name, pool.submit(self._hash, path), pool.submit(self._send, path, self._key(name)))
                for name, path in paths.items()
                if name not in self._arrived
            ]
            failed = None
            for name, digest, sent in waiting:
                failed = failed or sent.exception()
                if sent.exception() is None:
                    self._arrived[name] = (written[name], digest.result())
        if failed is not None:
            raise failed
        return {name: self._arrived[name][1] for name in paths}

    def _key(self, name: str) -> str:
        return self._place.part_prefix(self.node) + name

    def _new_place(self, step: int, there: Iterable[str]) -> CheckpointPlace:
        """A place for a checkpoint that has no manifest yet. Raises FileExistsError if this generation has published
        another checkpoint of the step.
        """
        published = [place.generation for place in bucket.published(there)]
        if not self.generation:
            return CheckpointPlace(step, max(published, default=-1) + 1)
        if self.generation in published:
            raise FileExistsError(f"step {step} of generation {self.generation} is published already, with other files")
        return CheckpointPlace(step, self.generation)

    def _path(self, commit: Commit) -> Path:
        return self._workdir / CHECKPOINTS / commit.folder

    def _staged(self, manifest: Manifest) -> dict[str, tuple[int, str]]:
        """Time of writing and hash, by name, of the manifest's files that were downloaded to this disk and verified."""
        paths = {file: self._path(manifest.commit) / file.name for file in manifest.files}
        return {file.name: (path.stat().st_mtime_ns, file.sha256) for file, path in paths.items() if path.is_file()}

    def prune(self) -> None:
        """Removes checkpoints except the best, the last and the last but one, and what is left of incomplete uploads or
        saves before the last. Files of a later generation are not removed, and a node that is not the leader removes
        nothing.
        """
        if self.node:
            self._prune_disk({commit.step for commit in commits(self._workdir)[-2:]})
            return
        keys = {entry.key: checkpoint_place(entry.key) for entry in self._store.entries(bucket.CHECKPOINTS)}
        later = {place for place in keys.values() if place and 0 < self.generation < place.generation}
        by_step = {place.step: place for place in bucket.published(keys) if place not in later}
        keep = {*list(by_step.values())[-2:], *self._needed()}
        old = [key for key, place in keys.items() if place and place < self.newest and place not in keep | later]
        if old:
            self._store.delete(old)
        steps = {place.step for place in keep}
        self._prune_disk(steps | {commit.step for commit in self.pending()})
        last = [commit for commit in commits(self._workdir) if commit.step == self.newest.step]
        if last and shutil.disk_usage(self._workdir).free < FREE_FACTOR * last[0].bytes:
            self._say("the disk is short of room for another checkpoint: only the last and the best stay on it")
            self._prune_disk({place.step for place in self._needed()})

    def metrics(self, patience_s: float = -1) -> None:
        """Sends the new lines in stages/, and the present metrics.jsonl up to its last complete line. If another thread
        is still sending after `patience_s` seconds, the method returns without sending; -1 means to wait for ever.
        """
        self.stages.send()
        if not self._reading.acquire(timeout=patience_s):
            return
        try:  # the pulse and the uploads call this: an older content must not be put last
            content = b""
            with suppress(FileNotFoundError), self._own.open(self._workdir / METRICS) as file:
                content = whole_lines(file.read())
            if content:
                self._store.put_bytes(content, METRICS)
            user = self._workdir / USER
            for own, folder in ((self._own, self._workdir), (ForeignFolder(user), user / OUTPUTS)):
                for name in sorted(name for name, _ in own.files(folder / SCALARS)):
                    self._send_scalars(own, folder / SCALARS / name)
        finally:
            self._reading.release()

    def exported(self) -> list[Path]:
        """Files of complete exports (meta.json is written last) that are missing in the store, or are older there."""
        folders = [meta.parent for meta in sorted((self._workdir / EXPORTS).glob("*/meta.json"))]
        return [path for folder in folders for path in _files(folder) if not self._is_sent(path)]

    def send_exports(self) -> None:
        """Sends the exports. Raises StoreError (GivenUpError after `cancel`)."""
        self._cancel.clear()
        for path in self.exported():
            self._export(path)

    def outputs(self) -> None:
        """Sends all files of the trainer other than checkpoints."""
        for name in (EXPORTS, FINAL):
            for path in _files(self._workdir / name):
                self._export(path)
        for path in sorted(self._workdir.glob("*")):
            is_result = path.suffix in (".json", ".csv", ".txt", ".png", ".md") and path.name not in OWN
            if is_result and not refusal(path.name) and self._own.is_file(path):
                self._send(path, path.name)
        if "/" in self._run:
            self._hand_on()
        self.metrics()

    def _hand_on(self) -> None:
        """Writes the list of a stage's outputs, so that later stages, which begin only after it, can verify them."""
        folder = self._workdir / FINAL
        files = [
            {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": self._hash(path)}
            for path in _files(folder)
        ]
        self._store.put_bytes(atomic.json_bytes({"schema": 1, "files": files}), f"{FINAL}/{HANDED_ON}")

    def _require(self, names: Iterable[str]) -> list[tuple[str, int]]:
        """Sends the exports that a checkpoint needs, unless an earlier attempt has sent them; returns names and
        sizes.
        """
        sizes = []
        for name in names:
            prefix = name.rstrip("/")
            for path in _files(self._workdir / prefix) or sorted(self._workdir.glob(prefix + ".*")):
                self._export(path)
            there = [e for e in self._store.entries(prefix) if e.key.startswith((f"{prefix}/", f"{prefix}."))]
            if not there:
                raise FileNotFoundError(f"{prefix} is required, but is neither on this disk nor in the store")
            sizes += [(entry.key, entry.bytes) for entry in there]
        return sizes

    def _export(self, path: Path) -> None:
        """Sends a file once, and again after it has changed, even if an earlier attempt has put an object with the
        file's key.
        """
        if not self._is_sent(path):
            key, written = path.relative_to(self._workdir).as_posix(), self._own.stat(path).st_mtime_ns
            self._send(path, key)
            self._sent[key] = written

    def _is_sent(self, path: Path) -> bool:
        """Whether the file was sent, or was removed after the listing because its export is being replaced."""
        try:
            written = self._own.stat(path).st_mtime_ns
        except FileNotFoundError:
            return True
        return self._sent.get(path.relative_to(self._workdir).as_posix()) == written

    def _send(self, path: Path, key: str) -> None:
        self._check_cancel()
        with self._own.hold(path) as held:
            size = held.stat().st_size
            self._store.put_file(held, key)
        if (stored_bytes := self._store.size(key)) != size:
            raise StoreError(f"{key} arrived with {stored_bytes} bytes, not {size}")

    def _hash(self, path: Path) -> str:
        with self._own.hold(path) as held:
            return atomic.sha256(held)

    def _send_scalars(self, own: ForeignFolder, path: Path) -> None:
        """Sends the written part of a TensorBoard file, if the file has grown."""
        name = path.name
        try:
            size = own.stat(path).st_size
        except OSError:  # the file was removed meanwhile, or is a link that leads out of the folder
            return
        if size == self._scalars.get(name) or refusal(name):
            return
        if size <= MOST_SCALARS:
            with own.hold(path) as held:
                self._store.put_file(held, f"{bucket.SCALARS}{name}")
        elif name not in self._scalars:
            self._say(f"{SCALARS}/{name} has {size:,} bytes, and is not sent: {MOST_SCALARS:,} are the most")
        self._scalars[name] = size

    def _check_cancel(self) -> None:
        if self._cancel.is_set():
            raise GivenUpError("publication given up")

    def _improves(self, commit: Commit) -> bool:
        """Whether the commit is better than the best one of its phase, or belongs to a later phase than the
        best one.
        """
        best = self._best
        if commit.val_loss is None or best is None or best.val_loss is None:
            return commit.val_loss is not None
        return commit.val_loss < best.val_loss if commit.phase == best.phase else commit.step > best.step

    def _offer(self, commit: Commit, place: CheckpointPlace) -> None:
        """Writes this published checkpoint into best.json if it is better than the checkpoint that best.json names."""
        if self._improves(commit):
            best = Best(place=place, phase=commit.phase, val_loss=commit.val_loss)
            self._store.put_bytes(atomic.json_bytes(best.to_json()), BEST)
            self._best = best

    def _needed(self) -> set[CheckpointPlace]:
        return {self.newest, *([self._best.place] if self._best else [])}

    def _prune_disk(self, keep: set[int]) -> None:
        for path in (self._workdir / CHECKPOINTS).glob(STEPS):
            step = step_of(path.name)
            if step is not None and step < self.newest.step and step not in keep:
                shutil.rmtree(path, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """The files below the folder that may be downloaded, without links that lead outside of it."""
    own = ForeignFolder(folder)
    return sorted(folder / name for name, _ in own.files(folder) if not refusal(name) and own.is_file(folder / name))
