"""Passes a run's metric values to W&B or MLflow, if `log.tracker` names one of them, for every kind of job.

The library works in a process of its own (tracker_process.py), beside the supervisor, because the container of a
ready-made job has no network. If a tracker is missing, offline or stuck, it gets no metric values, but the training
goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from gpufleet.job.command.given import Mask, secrets
from gpufleet.job.contract import environment, metrics, reading
from gpufleet.job.contract.run import RunFile
from gpufleet.job.contract.workdir import METRICS, RESULTS, TRACKED

MODULE = "gpufleet.job.supervisor.tracker_process"
_OF_THE_NODE = ("AWS_", "GPUFLEET_")  # variables that only the supervisor needs


def variables(run: RunFile, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the tracker's process, without secrets. The run's id is the same in every attempt; project and
    experiment are named after the stack, unless `log.env` says otherwise.
    """
    own = {name: value for name, value in environ.items() if not name.startswith(_OF_THE_NODE)}
    names = {"WANDB_PROJECT": run.stack, "MLFLOW_EXPERIMENT_NAME": run.stack}
    return own | names | (run.config.log.env or {}) | {"WANDB_RUN_ID": environment.tracker_id(run.stack, run.run)}


class Tracker:
    """Sends the metric values of one attempt. Only `wait` waits for the tracker."""

    def __init__(self, run: RunFile, workdir: Path, write: Callable[[bytes], None], say: Callable[[str], None]) -> None:
        self._run, self._workdir, self._write, self._say = run, workdir, write, say
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def take(self, record: dict[str, Any]) -> None:
        """Sends a line of metrics.jsonl. The first line starts the process; before it, the lines of earlier attempts
        are sent.
        """
        if self._run.config.log.tracker == "none" or self._ended:
            return
        if self._thread.ident is None:
            parameters = {"run": self._run.run, "owner": self._run.owner, "parameters": self._run.parameters}
            self._lines.put({"config": parameters})
            with suppress(OSError):  # the process leaves out lines that the tracker already has
                before = metrics.records((self._workdir / METRICS).read_bytes().splitlines())
                for earlier in before:
                    if earlier["step"] < record["step"]:
                        self._lines.put({"record": earlier})
            self._thread.start()
        self._lines.put({"record": record})

    def wait(self, seconds: float) -> bool:
        """Waits for at most `seconds` seconds; returns whether the tracker has sent everything."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self, reason: str = "") -> None:
        """Sends the results, if the run has some, and the `reason` of its end; after that nothing is sent. If there is
        no reason, the next attempt continues the tracker's run.
        """
        if self._ended:
            return
        self._ended = True
        results: dict[str, Any] | None = None
        with suppress(OSError, reading.DoubtError):
            results = reading.parse((self._workdir / RESULTS).read_bytes())
        if reason:
            self._lines.put({"reason": reason, "results": results or {}})
        self._lines.put(None)

    def kill(self) -> None:
        """Ends the tracker's process at once. The method may be called again."""
        self._ended = True
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _work(self) -> None:
        kind = self._run.config.log.tracker
        try:
            values = secrets(self._run.config.log.secrets or {})
            folder = self._workdir / TRACKED
            folder.mkdir(exist_ok=True)
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, kind],
                cwd=folder,
                env=variables(self._run, os.environ) | values,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            mask = Mask(values.values())
            reading_thread = threading.Thread(
                target=self._pass_on, args=(self._process.stdout, mask), name="tracker output", daemon=True
            )
            reading_thread.start()
            with suppress(BrokenPipeError), self._process.stdin as lines:
                while (line := self._lines.get()) is not None:
                    lines.write(json.dumps(line).encode() + b"\n")
                    lines.flush()
            code = self._process.wait()
            # an end by `kill` is no failure, because the next attempt sends the rest
            if code not in (0, -signal.SIGKILL):
                self._say(f"warning: log.tracker, {kind}, ended with {code}: its further metrics are not sent")
            reading_thread.join()
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on without a tracker
            self._say(f"warning: no metrics are sent to {kind}: {type(error).__name__}: {error}")
        finally:
            self._ended = True  # otherwise later lines would wait in memory for a process that has ended

    def _pass_on(self, output: IO[bytes], mask: Mask) -> None:
        with output:
            for line in output:
                self._write(b"tracker: " + mask(line))
        self._lines.put(None)  # tells the other thread that the process has ended
