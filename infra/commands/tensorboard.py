"""`gpufleet tensorboard STACK`: shows a run's metric values in TensorBoard on this machine, as they come. The command
reads metrics.jsonl in the run's bucket again and again. So it needs no connection to a node, and also works for a run
of a user's command and for a run that has ended.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from gpufleet.infra.account import aws
from gpufleet.infra.account.run_folder import find_folder, no_run
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.job.contract import metrics
from gpufleet.job.contract.workdir import METRICS

EVERY_S = 30.0  # seconds between two reads; a node uploads its lines with each heartbeat


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)
    parser.add_argument("--port", type=int, default=6006, help="the port of localhost (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs TensorBoard until Ctrl-C."""
    definition = stack.definition_of(args)
    return serve(definition, aws.client("s3", definition.fleet.region), port=args.port)


class Board:
    """An event file in `folder` with the metric values of metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))
        self._seen = set[tuple[float, int]]()
        self._step = -1

    def follow(self, content: bytes) -> int:
        """Writes the new lines of `content`, which is the whole file so far, and returns their number. If a later node
        repeats steps, its values replace the earlier ones.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        new = [
            record
            for record in metrics.records(content.split(b"\n"))
            if (record["ts"], record["step"]) not in self._seen
        ]
        for record in new:
            at, step = record["ts"], record["step"]
            if step <= self._step:
                log = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=at, step=step, session_log=log))
            self._step = step
            self._seen.add((at, step))
            values = [Summary.Value(tag=tag, simple_value=number) for tag, number in metrics.scalars(record)]
            self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        self._writer.flush()
        return len(new)

    def close(self) -> None:
        self._writer.close()


def serve(
    definition: StackDefinition,
    s3: Any,
    *,
    port: int,
    say: Callable[[str], None] = print,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Runs TensorBoard at localhost until Ctrl-C or until it ends, and returns its exit code. Raises GpufleetError if
    TensorBoard is not installed, and AwsRefused if there is no such run.
    """
    if find_spec("tensorboard") is None:
        raise GpufleetError("TensorBoard is not installed here: pip install tensorboard")
    if (folder := find_folder(s3, definition)) is None:
        raise no_run(s3, definition)
    with tempfile.TemporaryDirectory(prefix="gpufleet-tensorboard-") as scratch:
        place = Path(scratch) / definition.name / folder.run
        board = Board(place)
        count = board.follow(folder.read(METRICS) or b"")
        say(f"{count} lines of s3://{folder.bucket}/{folder.run}/{METRICS}; more as they come. Ctrl-C ends this.")
        words = ("--logdir", scratch, "--host", "localhost", "--port", str(port), "--reload_interval", "10")
        server = Popen([sys.executable, "-m", "tensorboard.main", *words], stdin=DEVNULL)
        try:
            while server.poll() is None:
                sleep(EVERY_S)
                board.follow(folder.read(METRICS) or b"")
            return server.returncode
        finally:
            server.terminate()
            server.wait()
            board.close()
