"""Checkpoints out of the node: files in parallel, sizes checked, the manifest last. Then best.json, then pruning.

A checkpoint without a manifest does not exist, so whatever dies in here leaves the last published one in force.
Kept are best, last and last but one, in the store and on the disk; older ones go only after the newer manifest.

What stages have finished goes out too: <workdir>/stages/*.jsonl, mirrored to <run>/stages/. A stage appends one JSON
object per line and never changes a line, so a line that is in the store is work that no later attempt repeats. S3
cannot append: a file that grew is sent anew as a whole, up to its last whole line.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpufleet.job import atomic
from gpufleet.job.contract import bucket
from gpufleet.job.contract.bucket import manifest_key
from gpufleet.job.contract.commit import BEST, HELD, Best, Commit, Manifest, Published
from gpufleet.job.contract.commit import read as read_commit
from gpufleet.job.contract.inputs import InputFile
from gpufleet.job.contract.results import refusal
from gpufleet.job.contract.workdir import (
    CHECKPOINTS,
    EXPORTS,
    FINAL,
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
    """Complete checkpoints on disk, lowest step first. What has no valid commit.json is none."""
    found = [(path, read_commit(path)) for path in sorted((workdir / CHECKPOINTS).glob(STEPS))]
    return [each for path, each in found if each is not None and each.folder == path.name]


@contextmanager
def upload_mark(folder: Path) -> Iterator[None]:
    """Marks a checkpoint as under way: the trainer, which prunes beside us, leaves it alone. Without the mark an upload
    slower than two saves would lose its files each time, and nothing would ever be published.
    """
    mark = folder / HELD
    try:
        mark.touch()
    except FileNotFoundError:
        raise StoreError(f"{folder.name} was pruned meanwhile") from None
    except OSError:
        pass  # a disk too full for a mark: as without one
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)


class Mirror:
    """One per attempt: `restore` first, then sends what grew."""

    def __init__(self, store: Store, workdir: Path) -> None:
        self._store, self._folder = store, workdir / STAGES
        self._sent: dict[str, int] = {}  # bytes
        self._sending = threading.Lock()
        self.added = 0  # lines of this attempt that are in the store

    def restore(self) -> int:
        """Replaces <workdir>/stages by what earlier attempts left. The number of lines. Raises StoreError."""
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
        """Every file that grew since the last call. From any thread: an older reading is never put last. Raises
        StoreError, also where the disk does not give a file: it is tried again.
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
    """Without a last line that was not written to its end."""
    return content[: content.rfind(b"\n") + 1]


PARALLEL = 8
FREE_FACTOR = 1.2  # of the predicted size must be free before a save
MOST_SCALARS = 1024**3  # bytes of a file of TensorBoard's, which goes again as a whole whenever it has grown


class Publisher:
    """Publishes commits of one work folder, as `published` says them to be."""

    def __init__(
        self,
        *,
        run: str,
        store: Store,
        workdir: Path,
        published: Callable[[], Published],
        say: Callable[[str], None],
    ) -> None:
        self.newest = -1  # highest step with a manifest in the store, as far as we put it there or resumed from it
        self.measured: tuple[int, float] | None = None  # bytes and seconds of the last publication
        self._store, self._workdir, self._say = store, workdir, say
        self._run, self._published, self._own = run, published, ForeignFolder(workdir)
        self._best: Best | None = None
        self._told: tuple[Any, ...] = ()  # what the newest one's manifest tells that may change
        self._given_up: set[int] = set()
        self._sent: dict[str, int] = {}  # exports, with their time of writing
        self._scalars: dict[str, int] = {}  # TensorBoard's files, with the bytes that were sent
        self._arrived: dict[str, tuple[int, str]] = {}  # of the commit under way: time of writing and sha256
        self._cancel = threading.Event()
        self.stages = Mirror(store, workdir)
        self._reading = threading.Lock()

    def resumed(self, manifest: Manifest) -> None:
        """The store's newest good checkpoint is this manifest's; a best of a later step, or one that is gone, is
        nobody's.
        """
        step = manifest.commit.step
        self.newest, self._told = step, manifest.commit.changing
        self._given_up = set()
        self._arrived = self._staged(step, manifest.files)  # where only its evaluation is new, nothing goes again
        best = Best.from_bytes(self._store.get_bytes(BEST))
        there = best is not None and best.step <= step and self._store.size(manifest_key(best.step)) is not None
        self._best = best if there else None
        self._offer(manifest.commit)  # a node may end between the two

    def forget_best(self, manifest: Manifest) -> None:
        """The best cannot be had any more: what the trainer has, from the resumed `manifest` on, is all there is."""
        self._best = None
        self._offer(manifest.commit)

    def pending(self) -> list[Commit]:
        """Commits that should be published, lowest step first. Of the merely timed ones only the newest matters. The
        newest published goes again where its evaluation has been made up for, or the run goes on from it once more.
        """
        waiting = [commit for commit in commits(self._workdir) if commit.step not in self._given_up]
        return [
            commit
            for commit in waiting
            if self._improves(commit)
            or (commit.step == self.newest and commit.changing != self._told)
            or (commit.step > self.newest and (commit is waiting[-1] or commit.reason != "timed"))
        ]

    def give_up(self, commit: Commit) -> None:
        """Never tries this one again."""
        self._given_up.add(commit.step)

    def cancel(self) -> None:
        """Makes a publication under way raise GivenUpError soon. The next one starts afresh."""
        self._cancel.set()
        self._store.cancel()

    def publish(self, commit: Commit) -> None:
        """Raises StoreError (GivenUpError after `cancel`), or OSError when the files are not there as committed."""
        self._cancel.clear()
        with upload_mark(self._path(commit)):
            self._publish(commit)

    def _publish(self, commit: Commit) -> None:
        folder = f"{bucket.CHECKPOINTS}{commit.folder}"
        for name, size in commit.files:
            if self._own.stat(path := self._path(commit) / name).st_size != size:
                raise FileNotFoundError(f"{path} is not {size} bytes long")
        required = self._require(commit.requires)
        started = time.monotonic()  # exports go once, and do not tell how long a checkpoint takes
        digests, whole = self._send_all(commit, folder)
        self.stages.send()  # what a later phase's checkpoint relies on
        try:
            self.metrics(patience_s=5.0)
        except OSError as error:  # the log goes again with every heartbeat; the checkpoint must not wait for it
            self._say(f"metrics not sent: {error}")
        files = tuple(InputFile(name=name, bytes=size, sha256=digests[name]) for name, size in commit.files)
        manifest = Manifest(commit=commit, run=self._run, files=files).to_json(self._published(), required)
        self._store.put_bytes(atomic.json_bytes(manifest), manifest_key(commit.step))
        self._offer(commit)
        if commit.step >= self.newest:
            self.newest, self._told = commit.step, commit.changing
        if whole:
            self.measured = (commit.bytes, time.monotonic() - started)
        self._say(f"published step {commit.step} ({commit.reason}), {commit.bytes / 1e6:.1f} MB")

    def _send_all(self, commit: Commit, folder: str) -> tuple[dict[str, str], bool]:
        """Every file of the commit, those apart that arrived before a try of it failed. Their sha256 by name, and
        whether all were sent now.
        """
        paths = {f"{folder}/{name}": self._path(commit) / name for name, _ in commit.files}
        written = {key: self._own.stat(path).st_mtime_ns for key, path in paths.items()}
        same = {key: kept for key, kept in self._arrived.items() if written.get(key) == kept[0]}
        # Another node, where two overlap, may have swept up what seemed to be torn.
        there = {entry.key for entry in self._store.entries(f"{folder}/")} if same else set()
        self._arrived = {key: kept for key, kept in same.items() if key in there}
        whole = not self._arrived
        if len(self._arrived) < len(paths):  # never new files under an old manifest: a node that went late has left one
            self._store.delete([manifest_key(commit.step)])
        with ThreadPoolExecutor(2 * PARALLEL) as pool:  # a file is hashed while it is sent
            waiting = [
                (key, pool.submit(self._hash, path), pool.submit(self._send, path, key))
                for key, path in paths.items()
                if key not in self._arrived
            ]
            failed = None
            for key, digest, sent in waiting:
                failed = failed or sent.exception()
                if sent.exception() is None:
                    self._arrived[key] = (written[key], digest.result())
        if failed is not None:
            raise failed
        return {name: self._arrived[f"{folder}/{name}"][1] for name, _ in commit.files}, whole

    def _path(self, commit: Commit) -> Path:
        return self._workdir / CHECKPOINTS / commit.folder

    def _staged(self, step: int, files: Iterable[InputFile]) -> dict[str, tuple[int, str]]:
        """Size and hash of the manifest's files that are on this disk, which were downloaded and verified, by name."""
        folder, found = manifest_key(step).removesuffix(bucket.MANIFEST), {}
        for file in files:
            path = self._workdir / folder / file.name
            if path.is_file():
                found[folder + file.name] = (path.stat().st_mtime_ns, file.sha256)
        return found

    def prune(self) -> None:
        """Removes what is neither best, last nor last but one, and what a torn upload or save left below the last."""
        entries = self._store.entries(bucket.CHECKPOINTS)
        steps = sorted(int(match[1]) for entry in entries if (match := bucket.MANIFEST_KEY.fullmatch(entry.key)))
        keep = self._kept_steps(steps)
        old = [entry.key for entry in entries if self._is_old(entry.key.split("/")[1], keep)]
        self._store.delete(old)
        self._prune_disk(keep | {commit.step for commit in self.pending()})
        last = [commit for commit in commits(self._workdir) if commit.step == self.newest]
        if last and shutil.disk_usage(self._workdir).free < FREE_FACTOR * last[0].bytes:
            self._say("the disk is short of room for another checkpoint: only the last and the best stay on it")
            self._prune_disk(self._kept_steps([]))

    def metrics(self, patience_s: float = -1) -> None:
        """What the stages after training appended, and metrics.jsonl as it is now, up to its last whole line. Where
        somebody else is at it for longer than `patience_s`, it is theirs; -1 waits.
        """
        self.stages.send()
        if not self._reading.acquire(timeout=patience_s):
            return
        try:  # the pulse and the uploads call this: an older reading must not be put last
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
        """Files of complete exports (their meta.json is written last) that are not in the store as they are here."""
        folders = [meta.parent for meta in sorted((self._workdir / EXPORTS).glob("*/meta.json"))]
        return [path for folder in folders for path in _files(folder) if not self._is_sent(path)]

    def send_exports(self) -> None:
        """Sends them. Raises StoreError (GivenUpError after `cancel`)."""
        self._cancel.clear()
        for path in self.exported():
            self._export(path)

    def outputs(self) -> None:
        """Everything the trainer leaves besides checkpoints."""
        for name in (EXPORTS, FINAL):
            for path in _files(self._workdir / name):
                self._export(path)
        for path in sorted(self._workdir.glob("*")):
            is_result = path.suffix in (".json", ".csv", ".txt", ".png", ".md") and path.name not in OWN
            if is_result and not refusal(path.name) and self._own.is_file(path):
                self._send(path, path.name)
        self.metrics()

    def _require(self, names: Iterable[str]) -> list[tuple[str, int]]:
        """Sends the exports that a checkpoint relies on, unless an earlier attempt has; gives what is there."""
        found = []
        for name in names:
            prefix = name.rstrip("/")
            for path in _files(self._workdir / prefix) or sorted(self._workdir.glob(prefix + ".*")):
                self._export(path)
            there = [e for e in self._store.entries(prefix) if e.key.startswith((f"{prefix}/", f"{prefix}."))]
            if not there:
                raise FileNotFoundError(f"{prefix} is required, but neither here nor in the store")
            found += [(entry.key, entry.bytes) for entry in there]
        return found

    def _export(self, path: Path) -> None:
        """Sends a file once; again when it was written anew, whatever an earlier attempt has left in its place."""
        if not self._is_sent(path):
            key, written = path.relative_to(self._workdir).as_posix(), self._own.stat(path).st_mtime_ns
            self._send(path, key)
            self._sent[key] = written

    def _is_sent(self, path: Path) -> bool:
        """Nor is there anything to send of a file that has gone since it was listed: its export is being replaced."""
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
        if (found := self._store.size(key)) != size:
            raise StoreError(f"{key} arrived with {found} bytes, not {size}")

    def _hash(self, path: Path) -> str:
        with self._own.hold(path) as held:
            return atomic.sha256(held)

    def _send_scalars(self, own: ForeignFolder, path: Path) -> None:
        """A file of TensorBoard's as far as it is written, where it has grown."""
        name = path.name
        try:
            size = own.stat(path).st_size
        except OSError:  # removed meanwhile, or a link to elsewhere
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
        """It is better than the best of its phase, or of a later phase than the best."""
        best = self._best
        if commit.val_loss is None or best is None or best.val_loss is None:
            return commit.val_loss is not None
        return commit.val_loss < best.val_loss if commit.phase == best.phase else commit.step > best.step

    def _offer(self, commit: Commit) -> None:
        """best.json names this published step, if it is better than the one it names."""
        if self._improves(commit):
            best = Best(step=commit.step, phase=commit.phase, val_loss=commit.val_loss)
            self._store.put_bytes(atomic.json_bytes(best.to_json()), BEST)
            self._best = best

    def _kept_steps(self, steps: list[int]) -> set[int]:
        return {*steps[-2:], *([self._best.step] if self._best else []), self.newest}

    def _is_old(self, folder: str, keep: set[int]) -> bool:
        step = step_of(folder)
        return step is not None and step < self.newest and step not in keep

    def _prune_disk(self, keep: set[int]) -> None:
        for path in (self._workdir / CHECKPOINTS).glob(STEPS):
            if self._is_old(path.name, keep):
                shutil.rmtree(path, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """Those below the folder that may come home, without what links outside of it lead to."""
    own = ForeignFolder(folder)
    return sorted(folder / name for name, _ in own.files(folder) if not refusal(name) and own.is_file(folder / name))
