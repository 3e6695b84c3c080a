"""The trainer as the supervisor sees it: a process, its output, its progress in metrics.jsonl."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import IO, Any, Protocol

from gpufleet.job.contract import metrics
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.contract.messages import Ended, Start
from gpufleet.job.supervisor.leash import ABOVE
from gpufleet.job.supervisor.rendezvous import Rendezvous
from gpufleet.job.text import printable

# the longest time in seconds without a sign of life, during imports, data, compilation or a growth
FIRST_SIGN_S = 1800.0
QUIET_MIN_S = 900.0
SHUTDOWN = "--shutdown-timeout"  # an option of torchrun
KILL_S = 5.0  # the most seconds until a killed process ends


class JobLog:
    """Writes to job.log and standard output, without terminal escapes, because the job may print text that strangers
    wrote. A full disk or a closed pipe does not stop the training.
    """

    def __init__(self, path: Path, stream: IO[bytes] | None = None) -> None:
        self.path = path
        self._stream = stream if stream is not None else sys.stdout.buffer
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """Writes one line of the supervisor itself."""
        self.write(f"{time.strftime('%H:%M:%S', time.gmtime())} supervisor: {text}\n".encode())

    def write(self, line: bytes) -> None:
        line = printable(line.decode("utf-8", "replace")).encode()
        with self._lock:
            with suppress(OSError, ValueError):
                self._stream.write(line)
                self._stream.flush()
            with suppress(OSError), open(self.path, "ab", opener=_open_no_link) as file:
                file.write(line)


def _open_no_link(path: str, flags: int) -> int:
    """Opens a file, but no link, because by a link the training process could redirect the log into other files."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


class TrainerProcess(Protocol):
    """A training process, wherever it runs. `kill` ends it and everything that it has started, and does not wait for
    long.
    """

    @property
    def stdout(self) -> IO[bytes]: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


class GroupedProcess:
    """A child of this process, in its own process group."""

    def __init__(self, argv: list[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        assert self._process.stdout is not None
        self.stdout = self._process.stdout
        self.poll, self.pid = self._process.poll, self._process.pid

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a lost GPU cannot be killed
            self._process.wait(timeout=KILL_S)


class Child:
    """A trainer, which `begin` starts. The trainer's output goes to the log, line by line.

    `ended`: the file into which ranks write the exit code that torchrun cannot pass on. `waits`: the file for which a
    trainer waits after it has imported everything. `go` writes this file, and the output is read from then on.
    """

    def __init__(
        self,
        begin: Callable[[], TrainerProcess],
        log: JobLog,
        clock: Callable[[], float],
        ended: Path | None = None,
        waits: Path | None = None,
    ) -> None:
        self._ended, self._waits = ended, waits
        for path in (ended, waits):
            if path is not None:
                path.unlink(missing_ok=True)
        self.output_at = clock()
        self._killed = False
        self._clock = clock
        self._log = log
        self._process = begin()
        self._reader = threading.Thread(target=self._read, name="trainer output", daemon=True)
        if waits is None:
            self._reader.start()

    def go(self, rung: int) -> None:
        """Lets a waiting trainer train. Raises OSError."""
        assert self._waits is not None
        self.output_at = self._clock()
        self._reader.start()
        Start(rung=rung).write(self._waits.parent)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the trainer runs. If there is a code, no process of the
        trainer exists any more.
        """
        code = self._process.poll()
        if code is None and self._killed:
            return -signal.SIGKILL
        if code is not None:
            self.kill()
            if self._ended is not None and code >= 0:
                ended = Ended.read(self._ended.parent)
                code = (code or TrainerExit.CRASHED) if ended is None else ended.code
        return code

    def kill(self) -> None:
        """Ends all processes of the trainer now, and does not wait for long. The method may be called again."""
        if self._killed:
            return
        self._killed = True
        self._process.kill()
        if self._reader.ident is not None:  # the thread runs only if the trainer was started
            self._reader.join(timeout=KILL_S)
        if not self._reader.is_alive():  # otherwise closing would wait for the thread that reads
            self._process.stdout.close()

    def _read(self) -> None:
        with suppress(ValueError):  # `kill` may have closed the pipe
            for line in self._process.stdout:
                self.output_at = self._clock()
                self._log.write(line)


def trainer(
    workdir: Path, rung: int | None, ranks: int, module: str, place: Rendezvous | None = None, parent: str = ""
) -> list[str]:
    """The command line of a job's `module`: one process, or torchrun with one process for each of this node's `ranks`.
    If no rung is given, the trainer waits for it. `place`: how the trainer reaches the trainers of other nodes.
    `parent`: the process with which the trainer dies (leash.py); if it is empty, this process.
    """
    leash = ["-m", "gpufleet.job.supervisor.leash"]
    train = ["-m", module, str(workdir), *(["--wait"] if rung is None else ["--rung", str(rung)])]
    alone = [sys.executable, *leash, parent or str(os.getpid())]
    if ranks == 1 and place is None:
        return [*alone, *train]
    meeting = ["--standalone"] if place is None else place.torchrun
    several = [*meeting, "--nproc-per-node", str(ranks), *_patience()]
    return [*alone, "-m", "torch.distributed.run", *several, *leash, ABOVE, *train]


def _patience() -> list[str]:
    """The option of torchrun that sets how long it waits for its ranks. By default torchrun kills its ranks 30 s after
    a SIGTERM, but docker stop waits 115 s. Torch 2.11 does not have the option (2.13 has it). To find out, this reads
    torch's source, because importing torch takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    known = SHUTDOWN in (Path(spec.origin).parent / "distributed" / "run.py").read_text(encoding="utf-8")
    return [SHUTDOWN, "110"] if known else []


class MetricsFollower:
    """Follows metrics.jsonl: its newest record, the time per step, and the time at which it last grew."""

    def __init__(
        self, path: Path, clock: Callable[[], float], tell: Callable[[dict[str, Any]], None] = lambda record: None
    ) -> None:
        """`tell` is called with each new record."""
        self.record: dict[str, Any] = {}
        self.step = 0
        self.first_at: float | None = None  # the time of this attempt's first new record
        self.grew_at = clock()
        self._path = path
        self._clock = clock
        self._tell = tell
        self._offset = 0
        self._gaps: list[float] = []
        self._step_s: list[float] = []

    def skip(self, step: int) -> None:
        """Skips the existing records, which are from earlier attempts."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0
        self.step = step

    def poll(self) -> None:
        """Reads the records written since the last call."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return
        if size < self._offset:  # the trainer has removed records that a resume repeats
            self._offset = size
        if size == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if (record := metrics.line(line)) is not None:
                self._take(record)
                self._tell(record)

    def _take(self, record: dict[str, Any]) -> None:
        now = self._clock()
        if self.first_at is not None:
            self._gaps = [*self._gaps[-49:], now - self.grew_at]
        self.first_at = now if self.first_at is None else self.first_at
        self.grew_at = now
        self.record = {**self.record, **{key: value for key, value in record.items() if value is not None}}
        self.step = record["step"]
        if record["step_ms"] is not None:
            self._step_s = [*self._step_s[-19:], float(record["step_ms"]) / 1000]

    @property
    def step_s(self) -> float | None:
        """Seconds per step: the slowest of the last 20 logged values."""
        return max(self._step_s, default=None)

    @property
    def usual_step_s(self) -> float | None:
        """Seconds per step: the median of the newest steps, because one step that stalled is not typical."""
        return median(self._step_s) if self._step_s else None

    def quiet_limit_s(self) -> float:
        """The seconds for which it is normal that no record comes: 20 median gaps between records, but at least 15
        minutes, and at most 30 minutes or 3 such gaps.
        """
        if not self._gaps:
            return FIRST_SIGN_S
        gap = median(self._gaps)
        return min(max(20 * gap, QUIET_MIN_S), max(FIRST_SIGN_S, 3 * gap))
