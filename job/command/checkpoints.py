"""A command's checkpoints: the host finds complete checkpoints, copies and commits them, and restores one before a
start.

A checkpoint is complete when all of its files exist, none of them is open for writing, they did not change between two
looks a second apart, and no file is cut off as far as its format shows. A thread then copies the checkpoint into ckpt/
and looks at the original again. The thread commits the copy only if the checkpoint has not changed: if the command has
deleted or overwritten it meanwhile, the thread discards the copy.

The step of a checkpoint is the number in its name, if this number has the run's unit. Otherwise it is the step that the
command's output had shown when the checkpoint was written. A commit keeps both numbers, that of the name and that of
the output (Commit.lines), and never converts one into the other.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from gpufleet.job import atomic
from gpufleet.job.command.names import MOST_STEPS, FileState, FoundCheckpoint, Key, Names, place, torn
from gpufleet.job.command.progress import ToldProgress
from gpufleet.job.contract import commit
from gpufleet.job.contract.bucket import CheckpointPlace
from gpufleet.job.contract.commit import COMMIT, Commit, Reason
from gpufleet.job.contract.messages import LeaderSaved
from gpufleet.job.contract.metrics import Save
from gpufleet.job.contract.reading import NAME_BYTES
from gpufleet.job.contract.workdir import CHECKPOINTS, STEPS, step_folder
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.kind.command import PHASE, CommandConfig

FILES = "files"  # folder below ckpt/step_N/ for the command's files, so that their names cannot clash with gpufleet's
LOOK_S = 1.0  # seconds between two looks, which must find the same files
LEAVING_S = 0.1  # seconds between two looks after a stop was sent, because the command may end as soon as it has saved
# The first checkpoint must be unchanged for this many seconds if nothing else shows that it is complete.
FIRST_QUIET_S = 60.0
UNKNOWN_QUIET_S = 5.0  # a file must be unchanged for this many seconds if it is not known whether it is open
SAVING_S = 5.0  # the longest time between the writing of two files of one checkpoint
AGAIN_S = 30.0  # seconds from a failed copy to the next try
LEADER_S = 30.0  # seconds that a node at its end waits for the leader to announce its last checkpoint
# seconds for which the files of a part are kept open after the command has deleted them, until the leader names the
# part
HELD_S = 30.0
# the most parts of checkpoints whose files are kept open, and the most files of each part, because each open file needs
# a descriptor
MOST_HELD = 16
ARRIVAL_S = 0.02  # seconds until a line that the command has printed reaches the host

File = tuple[int, int]  # a file's device and inode


@dataclass(slots=True)
class Watched:
    """A checkpoint that the command has begun: its files at the last look, and the time since which they are unchanged.
    `still`: no process has one of the files open. `doubtful`: a process that may have had one open has ended.
    """

    found: FoundCheckpoint
    since: float
    begun: float
    still: bool = False
    doubtful: bool = False
    not_before: float = 0.0


@dataclass(slots=True)
class Held:
    """A node's part of a checkpoint. The part's files are open, so they can be copied even after the command has
    deleted them. `is_still`: two looks saw the same files.
    """

    found: FoundCheckpoint
    files: dict[str, BinaryIO]
    seen: float
    is_still: bool = False

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class LineReader(Protocol):
    """The facts from the command's output on which decisions about checkpoints depend."""

    @property
    def val(self) -> Mapping[int, float]: ...
    @property
    def spread(self) -> int: ...
    def told_by(self, moment: float) -> ToldProgress: ...
    def saved(self, save: Save, written: float, *, is_counted: bool) -> None: ...


class CommandCheckpoints:
    """The checkpoints of one command in `folder` below `user`, which the command may change at any time. `alive`
    returns its processes. `writing` returns the checkpoint files that a process has open for writing, or None if this
    is not known. `moment` converts a file's time to the time of `clock`. `run` is the run's id. On a `node` that is not
    the leader, a checkpoint is only the part that the node's own ranks have written. The part is taken after the
    `leader` has announced that the checkpoint is whole, and it may have no files.
    """

    def __init__(
        self,
        config: CommandConfig,
        folder: Path,
        user: Path,
        workdir: Path,
        *,
        run: str,
        digest: str,
        gpus: int,
        nodes: int = 1,
        node: int = 0,
        leader: Callable[[], LeaderSaved | None] = lambda: None,
        alive: Callable[[], Sequence[int]],
        lines: LineReader,
        say: Callable[[str], None],
        writing: Callable[[Iterable[FoundCheckpoint]], set[File] | None] | None = None,
        clock: Callable[[], float] = time.time,
        moment: Callable[[float], float] = lambda written: written,
    ) -> None:
        self.names = Names(config, f"{run}/{CheckpointPlace(0, 1).part_prefix(1)}{FILES}/")
        self._own = ForeignFolder(user)
        self.folder, self.newest, self.committed_at = folder, -1, clock()
        self.newest_is_on_signal = False  # whether the command made the newest commit because it was asked to stop
        # Why a checkpoint of a process that has ended is not valid: the process may have been ended in the middle of
        # writing.
        self.doubt = ""
        self.count = 0  # number of commits in this start
        self.counted = -1  # the newest step of a checkpoint that this start has made
        self._config, self._user, self._kept = config, user, workdir / CHECKPOINTS
        self._digest, self._gpus = digest, gpus
        self._nodes, self._node, self._leader = nodes, node, leader
        self._knows_parts = False  # whether it is known which files belong to a part
        self._leaders_step: dict[Key, int] = {}  # steps of the checkpoints that the leader has named
        # Parts that the leader may name. After the files of a part are closed, its key stays, with None.
        self._held: dict[Key, Held | None] = {}
        self._alive, self._writing, self._lines = alive, writing or self._find_written, lines
        self.moment = moment
        self._before: set[int] = set()  # the command's processes at the last look
        self._say, self._clock = say, clock
        self._watched: dict[Key, Watched] = {}
        # the restored checkpoints, with their files as they were before the start
        self._put_back: dict[Key, FoundCheckpoint] = {}
        # Committed or restored checkpoints, with their files at that time and their step.
        self._done: dict[Key, tuple[FoundCheckpoint, int]] = {}
        # The number in the name of the newest checkpoint, and the difference between the step and the number in a name.
        self._number, self._offset = -1, 0
        self._counts_else = False  # whether the numbers in names have turned out not to be the run's steps
        self._told: set[str] = set()
        self._evaluated = {-1}  # the steps whose commits contain an evaluation
        self._looked_at = 0.0
        self._copying: tuple[Watched, Future[None]] | None = None
        self._pool = ThreadPoolExecutor(1, "snapshot")
        self.reason: Reason = "timed"  # the reason that is written into commits from now on
        # The time of the signal by the clock of the file system, whose steps are some ms long; inf if no signal was
        # sent.
        self._signalled_at = math.inf
        self._begun_before: set[Key] = set()  # checkpoints that had begun before the signal and were not committed yet

    def restore(self) -> Commit | None:
        """Empties the command's folder and puts the newest commit into it. Returns None if there is no commit; the
        folder is then empty. Raises OSError.
        """
        self._settle()
        self._before = set()
        newest = self._newest()
        self._own.empty(self.folder)
        self._watched, self._done, self._put_back, self.newest = {}, {}, {}, -1
        self._let_go(self._held)
        self._held = {}
        self._number, self._offset, self.count, self.counted = -1, 0, 0, -1
        if newest is not None:
            self.copy_newest(self.folder)
            self._knows_parts = True
            borrowed = {name.removeprefix(f"{FILES}/") for name in newest.borrowed}
            self.newest = newest.step
            self._put_back = {checkpoint.key: checkpoint for checkpoint in self.names.find(self.folder, self._user)}
            self._done = {key: (checkpoint, newest.step) for key, checkpoint in self._put_back.items()}
            for checkpoint in self._put_back.values():
                self.names.learn(checkpoint.without_files(borrowed))
                self._number = max(self._number, checkpoint.number or 0)
                number = self._in_unit(checkpoint)
                apart = 0 if number is None else newest.step - number
                self._counts_else = self._config.unit == "step" and "step" in checkpoint.counts and apart != 0
                self._offset = 0 if self._counts_else else apart
        self._own.open_to_all(self.folder)
        self.committed_at = self._clock()
        return newest

    def _newest(self) -> Commit | None:
        commits = [committed for path in sorted(self._kept.glob(STEPS)) if (committed := commit.read(path)) is not None]
        return max(commits, key=lambda candidate: candidate.step, default=None)

    def copy_newest(self, target: Path) -> None:
        """Copies the files of the newest commit, if any, under the command's own names. Raises OSError."""
        if (newest := self._newest()) is not None:
            for name, _ in newest.files:
                self._own.copy(self._kept / newest.folder / name, target / name.removeprefix(f"{FILES}/"))

    @property
    def restored(self) -> FoundCheckpoint | None:
        """The checkpoint that was restored before this start; None if there was none."""
        return next(iter(self._put_back.values()), None)

    def place(self, restored: Commit) -> Path:
        """The path for the placeholder {checkpoint}."""
        if self.restored is not None:
            return self.folder / place(self.restored)
        return self.folder / sorted(name.removeprefix(f"{FILES}/") for name, _ in restored.files)[0]

    def counts(self, restored: Commit) -> dict[str, int]:
        """The values of the placeholders {step} and {epoch}: the numbers in the name of the restored checkpoint."""
        return {"step": restored.step, **(self.restored.counts if self.restored else {})}

    def saving(self) -> bool:
        """Whether a checkpoint is being written now, because one of its files is open or was written a moment ago."""
        new = [checkpoint for checkpoint in self.find() if self._is_new(checkpoint)]
        writing, recent = self._writing(new) or (), self._clock() - SAVING_S
        return any(
            any((look.device, look.inode) in writing for look in checkpoint.files.values())
            or (self.moment(checkpoint.written) > recent and (self._lacks(checkpoint) or not self._is_settled))
            for checkpoint in new
        )

    @property
    def _is_settled(self) -> bool:
        """Whether gpufleet knows which files a complete checkpoint has."""
        return self.names.are_known or bool(self.names.learned) or (self._node > 0 and self._knows_parts)

    def _lacks(self, checkpoint: FoundCheckpoint) -> str:
        return self.names.lacks(checkpoint, is_part=self._node > 0)

    def find(self) -> list[FoundCheckpoint]:
        """Every checkpoint that the command has begun to write, the newest last. Warns about each checkpoint that can
        never be published.
        """
        checkpoints = self.names.find(self.folder, self._user)
        for name, why in self.names.unfit.items():
            self._say_once(f"warning: {name} does not count, and is never published: {why}")
        return [self.names.newest(checkpoint, self._put_back.get(checkpoint.key)) for checkpoint in checkpoints]

    def written_anew(self, checkpoints: Iterable[FoundCheckpoint]) -> list[FoundCheckpoint]:
        """The checkpoints among `checkpoints` that this start has written."""
        return [
            checkpoint
            for checkpoint in checkpoints
            if (before := self._put_back.get(checkpoint.key)) is None or checkpoint.is_anew(before)
        ]

    def _find_part(self) -> list[FoundCheckpoint]:
        """For a node that is not the leader: its part of the checkpoint that was announced last. The part may have no
        files. The result is empty if there is no such part, or if the command has deleted the part before it was
        complete.
        """
        there = [checkpoint for checkpoint in self.find() if self._is_new(checkpoint)]
        if self._copying is None:
            self._hold(
                [
                    checkpoint
                    for checkpoint in there
                    if self._number < (checkpoint.number or 0) and len(checkpoint.files) <= MOST_HELD
                ]
            )
        leader = self._leader()
        named = None if leader is None or leader.step <= self.newest else self.names.named(leader.named_by)
        if leader is None or named is None:
            return []
        same = {checkpoint.key: checkpoint for checkpoint in there if checkpoint.number == named.number}
        held = {
            key: held_part.found
            for key, held_part in self._held.items()
            if held_part is not None and held_part.is_still
        }
        same |= {key: checkpoint for key, checkpoint in held.items() if checkpoint.number == named.number}
        if not same and any(key[1] == named.number for key in self._held):
            return []
        part = max(
            same.values(), key=lambda candidate: (candidate.folder == named.folder, candidate.written), default=named
        )
        self._leaders_step[part.key] = leader.step
        return [part]

    def _hold(self, there: Sequence[FoundCheckpoint]) -> None:
        """Opens the files of all existing parts. Files that the command deletes later stay readable, and still belong
        to their part.
        """
        now = self._clock()
        for checkpoint in there[-MOST_HELD:]:
            held = self._held.get(checkpoint.key) or Held(checkpoint.without_files(checkpoint.files), {}, now)
            is_same = {**held.found.files, **checkpoint.files} == held.found.files
            if not is_same:
                held.close()
                held = Held(checkpoint, {}, now)
                for name, look in checkpoint.files.items():
                    with suppress(OSError):
                        file = held.files[name] = self._own.open(self.folder / name)
                        if FileState.from_stat(os.fstat(file.fileno())) != look:
                            held.files.pop(name).close()
            held.is_still, held.seen = is_same and len(held.files) == len(held.found.files), now
            self._held[checkpoint.key] = held
        self._let_go(
            key for key, held in self._held.items() if held and (key in self._done or now > held.seen + HELD_S)
        )

    def _let_go(self, keys: Iterable[Key]) -> None:
        for key in list(keys):
            if (held := self._held.get(key)) is not None:
                held.close()
                self._held[key] = None

    def _find_again(self, checkpoint: FoundCheckpoint) -> FoundCheckpoint:
        """The checkpoint as it is on disk now. The checkpoint has no files if the command has deleted all of them."""
        nothing = checkpoint.without_files(checkpoint.files)
        return next((current for current in self.find() if current.key == checkpoint.key), nothing)

    def _waits_for_leader(self) -> bool:
        """Whether the leader may still name a checkpoint of which this node has a part."""
        if self._node == 0 or not self._config.parts.leaves:
            return False
        leader = self._leader()
        return leader is None or not leader.ended

    def look(self, checkpoints: list[FoundCheckpoint] | None = None) -> None:
        """Looks for new checkpoints, at most once a second (more often after a stop), and copies one at a time. This
        method may be called often, and never waits.
        """
        now = self._clock()
        if self._copying is not None and self._copying[1].done():
            self._settle()
        if now < self._looked_at + (LEAVING_S if self.reason == "stop" else LOOK_S):
            return
        self._looked_at = now
        self._take_evaluation()
        checkpoints = (self.find() if checkpoints is None else checkpoints) if self._node == 0 else self._find_part()
        for checkpoint in checkpoints:
            self._watch(checkpoint, now)
        self._watched = {
            checkpoint.key: self._watched[checkpoint.key]
            for checkpoint in checkpoints
            if checkpoint.key in self._watched
        }
        alive = set(self._alive())
        writing = self._writing([watched.found for watched in self._watched.values()]) if self._watched else set()
        # A process that ends during this look is treated as ended at this look and at the next one, because it may have
        # had a file open.
        gone, self._before = bool((self._before | alive) - set(self._alive())), alive
        for watched in (
            self._watched[checkpoint.key] for checkpoint in reversed(checkpoints) if checkpoint.key in self._watched
        ):
            ready = self._is_ready(watched, writing, now, gone=gone, latest=checkpoints[-1].number)
            if ready and self._copying is None:
                self._copying = (watched, self._pool.submit(self._snapshot, watched, True))

    def end(self, *, by_itself: bool) -> None:
        """Commits the complete checkpoints that exist after all processes of the command have ended. Waits until they
        are committed. `by_itself`: whether the command ended without an error, so that no file is cut off. If it did
        not, a file that was not seen closed at two looks is valid only if its format would show a cut.
        """
        self._settle()
        until = self._clock() + LEADER_S
        while self._waits_for_leader() and self._clock() < until:
            # The leader may have announced a checkpoint whose files are complete here, and its last message may come
            # late.
            self._take_whole(by_itself)
            time.sleep(LEAVING_S)
        self._take_whole(by_itself)

    def _take_whole(self, by_itself: bool) -> None:
        now = self._clock()
        there = self.find() if self._node == 0 else self._find_part()
        for candidate in there:
            self._watch(candidate, now)
        for watched in (
            self._watched[candidate.key] for candidate in reversed(there) if candidate.key in self._watched
        ):
            checkpoint = watched.found
            if self._lacks(checkpoint) or not (
                by_itself or self._node or self._is_settled or checkpoint is not there[-1]
            ):
                continue
            # If there was only one look at a checkpoint, the process that wrote it may have ended before that look.
            was_closed = watched.still and watched.since < self._looked_at
            if by_itself or was_closed or self._is_sure(checkpoint):
                self._copying = (watched, self._pool.submit(self._snapshot, watched, False))
                self._settle()
                if not self._is_new(checkpoint):
                    return  # an older checkpoint is not needed any more

    def signalled(self) -> None:
        """Notes that a signal is about to be sent. A save that has already begun is not an answer to this signal."""
        self._begun_before = {
            checkpoint.key for checkpoint in self.find() if self._done.get(checkpoint.key, (None,))[0] != checkpoint
        }
        self._signalled_at, mark = 0.0, self._kept.parent / ".signalled"
        with suppress(OSError):  # if the disk is full, there is no mark, and only the names of files can be compared
            mark.touch()  # written after the look, because the command may save during the look
            self._signalled_at = mark.stat().st_mtime_ns / 1e9

    def unanswered(self) -> None:
        """Notes that the signal has ended every process to which it was sent, so that no save is an answer to the
        signal.
        """
        self._signalled_at = math.inf

    def prune(self, published: int) -> None:
        """Deletes the command's older checkpoints, except the newest ones, of which the definition gives the number,
        and except unpublished ones.
        """
        keep = self._config.checkpoint.keep_on_disk
        if keep is None:
            return
        there = [checkpoint for checkpoint in self.find() if checkpoint.number is not None]
        for checkpoint in there[:-keep]:
            committed, step = self._done.get(checkpoint.key, (None, 0))
            if committed == checkpoint and step <= published:
                for name in checkpoint.files:
                    self._own.remove(self.folder / name)
                for name in checkpoint.files:
                    with suppress(OSError):  # removes only empty folders
                        self._own.remove_empty((self.folder / name).parent)

    def close(self) -> None:
        self._let_go(self._held)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_new(self, checkpoint: FoundCheckpoint) -> bool:
        """Whether the checkpoint differs from the one that was committed or put back."""
        return self._done.get(checkpoint.key, (None, 0))[0] != checkpoint

    def _watch(self, checkpoint: FoundCheckpoint, now: float) -> None:
        before = self._watched.get(checkpoint.key)
        number = -1 if checkpoint.number is None else checkpoint.number
        # The leader has named this checkpoint, so this node's file is new.
        is_before = self._node == 0 and -1 < number <= self._number
        if is_before and self._is_new(checkpoint) and self._begins_anew(checkpoint):
            self._offset, self._number, self._counts_else, is_before = self.newest, -1, False, False
        if is_before or not self._is_new(checkpoint):
            self._watched.pop(checkpoint.key, None)
        elif before is None:
            self._watched[checkpoint.key] = Watched(checkpoint, now, now)
        elif before.found != checkpoint:
            is_another = checkpoint.number is None and before.still  # the file was whole and is now being overwritten
            self._watched[checkpoint.key] = Watched(checkpoint, now, now if is_another else before.begun)

    def _begins_anew(self, checkpoint: FoundCheckpoint) -> bool:
        """Whether the numbers in names begin again in this start, which the definition allows."""
        before = self._put_back.get(checkpoint.key)
        is_anew = before is None or checkpoint.is_anew(before)
        return self._config.resume.check == "none" and self.count == 0 and bool(self._put_back) and is_anew

    def _is_ready(
        self, watched: Watched, writing: set[File] | None, now: float, *, gone: bool, latest: int | None
    ) -> bool:
        checkpoint, quiet = watched.found, now - watched.since
        if writing is not None:
            if any((look.device, look.inode) in writing for look in checkpoint.files.values()):
                watched.still, watched.since = False, now
                return False
            # If a process died while it wrote a file, the file looks as if it had been closed.
            watched.doubtful = watched.doubtful or (gone and not watched.still)
            watched.still = not watched.doubtful
        if quiet < (LOOK_S if writing is not None else UNKNOWN_QUIET_S) or now < watched.not_before:
            return False
        if lacking := self._lacks(checkpoint):
            if checkpoint.number is not None and latest is not None and checkpoint.number < latest:
                self._say_once(f"{checkpoint.title} does not count: {lacking}")
            return False
        if watched.doubtful and not self._is_sure(checkpoint):
            return False
        has_later = checkpoint.number is not None and latest is not None and checkpoint.number < latest
        # The leader names its first checkpoint only after its ranks have continued to train, or after FIRST_QUIET_S. By
        # then the ranks of other nodes have written their parts too, so that the other nodes need not wait during a
        # notice.
        return self._is_settled or has_later or quiet >= (SAVING_S if self._node else FIRST_QUIET_S)

    def _is_sure(self, checkpoint: FoundCheckpoint) -> bool:
        """Whether the format of a checkpoint whose writer has ended would show a cut. If it would not, prints a
        line.
        """
        with suppress(OSError):
            if self.names.shows_a_cut(lambda name: self._own.open(self.folder / name), checkpoint):
                return True
        self.doubt = (
            f"{checkpoint.title} does not count: the process that wrote it ended during the write, and may have left"
            " it cut. Files of torch.save, safetensors and JSON count, because they show a cut; others if the"
            " process lives for"
            " two more seconds"
        )
        self._say_once(self.doubt)
        return False

    def _find_written(self, checkpoints: Iterable[FoundCheckpoint]) -> set[File] | None:
        files = set()
        for checkpoint in checkpoints:
            for name, look in checkpoint.files.items():
                with suppress(OSError):  # the file may have been removed meanwhile
                    is_written = self._own.is_written(self.folder / name)
                    if is_written is None:
                        return None
                    if is_written:
                        files.add((look.device, look.inode))
        return files

    def _snapshot(self, watched: Watched, alive: bool) -> None:
        """Copies and commits a checkpoint. Raises OSError, or ValueError if the checkpoint has changed or is
        cut off.
        """
        checkpoint, started = watched.found, time.monotonic()
        begun, written = self.moment(checkpoint.first_written), self.moment(checkpoint.written)
        step, is_counted = self._step(checkpoint, self._lines.told_by(begun + ARRIVAL_S).step)
        if step >= MOST_STEPS:
            raise ValueError("its step has more than eight digits, and is never published: count in thousands")
        unfinished, folder = self._kept / ".snapshot", self._kept / step_folder(step)
        shutil.rmtree(unfinished, ignore_errors=True)
        also = self.names.companions(self.folder, self._user) if self._node == 0 else {}
        on_signal = checkpoint.written > self._signalled_at and checkpoint.key not in self._begun_before
        reason = self.reason
        if reason == "stop" and not on_signal:
            reason = "timed"  # the command would have made this checkpoint without the signal too
        held = self._held.get(checkpoint.key)
        opened = {} if held is None or not held.is_still else held.files
        try:
            for name in {**checkpoint.files, **also}:
                self._own.copy(opened.get(name, self.folder / name), unfinished / FILES / name)
            for name in also:
                self._point(unfinished / FILES / name, checkpoint)
            for name, look in checkpoint.files.items():
                made = unfinished / FILES / name
                if made.stat().st_size != look.bytes or (why := torn(made)):
                    raise ValueError(f"{name}: {why or 'another length than it had'}")
            again = self._find_again(checkpoint)
            is_same = again == checkpoint if not opened else {**checkpoint.files, **again.files} == checkpoint.files
            if not is_same or (alive and self._is_written(checkpoint)):
                raise ValueError("it was changed meanwhile")
            names = sorted(path.relative_to(unfinished).as_posix() for path in unfinished.rglob("*") if path.is_file())
            made_of = tuple((name, (unfinished / name).stat().st_size) for name in names)
            record = Commit(
                step=step,
                config_sha256=self._digest,
                files=made_of,
                reason=reason,
                phase=PHASE,
                goes_on_from=step,
                val_loss=self._lines.val.get(step),
                world_size=self._gpus * self._nodes,
                lines=self._lines.told_by(min(watched.begun, begun)).counting.to_json(),
                node=self._node,
                named_by=min(checkpoint.files, default="") if self._nodes > 1 else "",
            )
            unfinished.mkdir(parents=True, exist_ok=True)
            atomic.write_json(unfinished / COMMIT, record.to_json())
            if folder.exists():  # an earlier start has left this copy, from which no start will resume
                shutil.rmtree(folder)
            unfinished.replace(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self.names.learn(checkpoint)
        self._knows_parts = True
        self.newest, self.newest_is_on_signal, self.committed_at = step, on_signal, self._clock()
        self._begun_before.discard(checkpoint.key)
        self._number, self.count = max(self._number, checkpoint.number or 0), self.count + 1
        self.counted = step if is_counted else self.counted
        self._done[checkpoint.key] = checkpoint, step
        # The seconds for which the checkpoint was being written, as far as the looks have shown them.
        blocked_s = max(0.0, written - watched.begun)
        took = time.monotonic() - started
        took_s = round(blocked_s + took, 3)
        save = Save(step=step, reason=reason, bytes=record.bytes, blocked_s=round(blocked_s, 3), took_s=took_s)
        self._lines.saved(save, written, is_counted=is_counted)
        size = f"{len(made_of)} files, {record.bytes / 1e6:.1f} MB"
        title = f"this node's part of step {step:,}" if self._node else f"checkpoint of step {step:,}"
        self._say(f"{title} is whole: {size}, copied in {took:.1f} s")

    def _point(self, copied: Path, checkpoint: FoundCheckpoint) -> None:
        """If a companion file contains the name of a checkpoint, writes the name of this checkpoint into the
        companion's copy.
        """
        with suppress(UnicodeDecodeError):
            if copied.stat().st_size <= NAME_BYTES:
                text = copied.read_text()
                if (own := self.names.pointing(text, checkpoint, self.find())) != text:
                    copied.write_text(own)

    def _in_unit(self, checkpoint: FoundCheckpoint) -> int | None:
        """The number in the checkpoint's name, converted to the run's unit, without `_offset`; None if it cannot be
        converted.
        """
        steps_per_epoch = self._config.work.steps_per_epoch
        if (
            self._config.unit == "step"
            and "step" not in checkpoint.counts
            and steps_per_epoch is not None
            and "epoch" in checkpoint.counts
        ):
            return checkpoint.counts["epoch"] * steps_per_epoch
        return checkpoint.counts.get(self._config.unit)

    def _step(self, checkpoint: FoundCheckpoint, by_lines: int | None) -> tuple[int, bool]:
        """The checkpoint's step in the run, and whether a name or a line gives that step. If neither gives one, the
        step is that of the previous checkpoint plus one. `by_lines` is the step that lines had shown when the
        checkpoint's first file was complete.
        """
        if self._node:
            return self._leaders_step[checkpoint.key], True
        number, counts_epochs = self._in_unit(checkpoint), "step" not in checkpoint.counts
        if counts_epochs and checkpoint.number == 0 and not self.count and not self._put_back:
            # The number 0 in a name is that of the first epoch.
            self._offset = 1 if self._config.unit == "epoch" else self._config.work.steps_per_epoch or 0
        if number is not None:
            number += self._offset
            # A number in a name is taken for a step only if it is not far above the step at which the checkpoint was
            # begun.
            is_far = by_lines is not None and by_lines >= 2 * number and by_lines - number > 2 * self._lines.spread
            self._counts_else = self._counts_else or is_far
        known = by_lines if number is None or (self._counts_else and by_lines is not None) else number
        return max(-1 if known is None else known, self.newest + 1), known is not None

    def _take_evaluation(self) -> None:
        """Adds an evaluation that came after its checkpoint's commit; the supervisor then publishes the
        manifest again.
        """
        if self.newest in self._evaluated or (val := self._lines.val.get(self.newest)) is None:
            return
        self._evaluated.add(self.newest)
        folder = self._kept / step_folder(self.newest)
        written = commit.read(folder)
        if written is not None and written.val_loss is None:
            atomic.write_json(folder / COMMIT, replace(written, val_loss=val).to_json())

    def _is_written(self, checkpoint: FoundCheckpoint) -> bool:
        writing = self._writing([checkpoint])
        return any((look.device, look.inode) in (writing or ()) for look in checkpoint.files.values())

    def _settle(self) -> None:
        """Waits until the current copy is finished."""
        if self._copying is None:
            return
        (watched, copying), self._copying = self._copying, None
        error = copying.exception()
        if error is None:  # if the files are overwritten later, this is a change
            self._watched.pop(watched.found.key, None)
        else:
            watched.since = self._clock()
            watched.not_before = self._clock() + (AGAIN_S if isinstance(error, OSError) else 0.0)
            self._say_once(f"{watched.found.title} is not taken yet: {error}")

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)
