"""The node's access to its machine and to AWS: other programs, the metadata service, the run's objects."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from gpufleet.job.contract.aws import ENDED, FLEET_TAG, LAUNCHED, THERE
from gpufleet.job.contract.bucket import FLEETS
from gpufleet.job.contract.reading import epoch, iso
from gpufleet.job.contract.spent import History

LOOK_S = 1.0  # seconds between two looks at a running program
# Time limits, so that a node without a network fails within minutes instead of an hour.
NOT_REACHED = ("--cli-connect-timeout", "10", "--cli-read-timeout", "60")
_DOCKERS_ADVICE = re.compile(r"See '|Run '|\s*$")


def utc_now() -> str:
    """The time in UTC, in whole seconds, with a Z."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def log(words: str) -> None:
    """Writes text into the boot log."""
    with suppress(OSError):  # the process that keeps the log may have ended during a shutdown
        sys.stdout.write(words)
        sys.stdout.flush()


def say(words: str) -> None:
    """Writes a line with the time into the boot log."""
    log(f"{utc_now()} {words}\n")


def tries(times: int) -> Iterator[int]:
    """Yields 1 to `times`, and waits 3, 6, 9 ... s in between."""
    for number in range(1, times + 1):
        yield number
        if number < times:
            time.sleep(3 * number)


def retry(times: int, act: Callable[[], bool]) -> bool:
    """Calls `act` until it succeeds, at most `times` times with the waits of `tries`; returns whether it succeeded."""
    return any(act() for _ in tries(times))


def bounded(seconds: int, *command: str) -> tuple[str, ...]:
    """The command with a time limit (exit code 124).

    If the program `timeout` is not installed, there is no limit; nodes have it.
    """
    return ("timeout", "-k", "10", str(seconds), *command) if shutil.which("timeout") else command


def call(*command: str) -> bool:
    """Runs a command; returns whether it succeeds. The command's output goes to the boot log."""
    return code(*command) == 0


def code(*command: str) -> int:
    """Runs a command; returns its exit code, or 127 if there is no such command, as a shell does."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        return 127


@dataclass(frozen=True)
class Said:
    """A program's exit code, its standard output, and its last error message, which may be empty."""

    code: int
    out: str
    why: str


def ask(*command: str) -> Said:
    """Runs a command; the boot log gets its error output, but not its standard output, which may be a secret. A signal
    that arrives while the program begins is handled within LOOK_S; during a single long wait, it would be handled only
    when the program ends.
    """
    try:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        return Said(127, "", f"{command[0]}: {error.strerror}")
    try:
        printed = _printed(program)
    except BaseException:
        program.kill()
        raise
    out, err = (output.decode(errors="replace") for output in printed)
    log(err)
    return Said(program.returncode, out.strip(), last_line(f"{out}\n{err}") if program.returncode else "")


def _printed(program: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Waits until the program has ended; returns its output and its error output."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return program.communicate(timeout=LOOK_S)


def answer(*command: str) -> str | None:
    """The output of a command; None if the command fails."""
    result = ask(*command)
    return result.out if result.code == 0 else None


def complaint(seconds: int, *command: str) -> str | None:
    """Runs a command. Returns None if it succeeds within `seconds`, and otherwise the reason, which may be empty. The
    command's output goes to the boot log.
    """
    result = ask(*bounded(seconds, *command))
    log(f"{result.out}\n" if result.out else "")
    if result.code == 0:
        return None
    return f"no answer in {seconds} s" if result.code == 124 else result.why


def last_line(output: str) -> str:
    """The last line of a program's output, which serves as a reason, without docker's advice about where to
    read more.
    """
    lines = [line for line in output.splitlines() if not _DOCKERS_ADVICE.match(line)]
    return re.sub(r'[\x00-\x1f"\\]', "", lines[-1])[:300] if lines else ""


def aws(*words: str) -> str | None:
    """What the AWS CLI prints; None if it fails."""
    return answer("aws", *words, *NOT_REACHED)


def history(fleets: Sequence[str], since: float) -> History | None:
    """The events of these fleets' nodes since that time (epoch seconds); None if AWS does not answer."""
    events: dict[str, dict[str, float]] = {LAUNCHED: {}, ENDED: {}}
    for fleet in fleets:
        output = aws(
            *("ec2", "describe-fleet-history", "--fleet-id", fleet, "--start-time", iso(since), "--output", "text"),
            *("--event-type", "instance-change", "--query"),
            "HistoryRecords[].[EventInformation.EventSubType,EventInformation.InstanceId,Timestamp]",
        )
        if output is None:
            return None
        for line in output.splitlines():
            kind, name, at = (*line.split(), "", "", "")[:3]
            moment = epoch(at)
            if kind in events and moment is not None:
                events[kind][name] = moment
    return History(launched=events[LAUNCHED], ended=events[ENDED], there=nodes_there(*fleets))


def nodes_there(*fleets: str) -> set[str] | None:
    """The fleets' nodes that have not ended; None if AWS does not say."""
    output = aws(
        *("ec2", "describe-instances", "--output", "text", "--query", "Reservations[].Instances[].[InstanceId]"),
        *(
            "--filters",
            f"Name=tag:{FLEET_TAG},Values={','.join(fleets)}",
            f"Name=instance-state-name,Values={','.join(THERE)}",
        ),
    )
    return None if output is None else set(output.split()) - {"None"}


def spot_nodes(tags: Mapping[str, str]) -> dict[str, str] | None:
    """The spot nodes with these tags that have not ended, each with its fleet (or empty); None if AWS does not say."""
    named = [f"Name=tag:{key},Values={value}" for key, value in tags.items()]
    fleet = f"Tags[?Key=='{FLEET_TAG}']|[0].Value"
    output = aws(
        *("ec2", "describe-instances", "--output", "text"),
        *("--query", f"Reservations[].Instances[] | [?InstanceLifecycle=='spot'].[InstanceId,{fleet}]"),
        *("--filters", *named, f"Name=instance-state-name,Values={','.join(THERE)}"),
    )
    if output is None:
        return None
    rows = [(*line.split(), "", "")[:2] for line in output.splitlines() if line.split()]
    return {name: fleet if fleet.startswith("fleet-") else "" for name, fleet in rows if name != "None"}


class MetadataService:
    """The instance metadata service, version 2."""

    def __init__(self, endpoint: str) -> None:
        self._base = f"{(endpoint or 'http://169.254.169.254').rstrip('/')}/latest"

    def get(self, path: str) -> str | None:
        """The text at a path; None if there is no text, or no answer within 5 s."""
        curl = ("curl", "-sf", "-m", "5")
        lived = "X-aws-ec2-metadata-token-ttl-seconds: 300"
        token = answer(*curl, "-X", "PUT", "-H", lived, f"{self._base}/api/token")
        if token is None:
            return None
        return answer(*curl, "-H", f"X-aws-ec2-metadata-token: {token}", f"{self._base}/{path}")


class Objects:
    """The objects of the run, below its prefix of the bucket."""

    def __init__(self, bucket: str, run: str) -> None:
        self.uri = f"s3://{bucket}/{run}"
        self._bucket, self._prefix = bucket, f"{run}/"

    def keys(self) -> list[str] | None:
        """The keys of all objects below the prefix; None if they cannot be listed."""
        listed = aws(
            *("s3api", "list-objects-v2", "--bucket", self._bucket, "--prefix", self._prefix),
            *("--query", "Contents[].[Key]", "--output", "text"),
        )
        if listed is None:
            return None
        return [key[len(self._prefix) :] for key in listed.split("\n") if key.startswith(self._prefix)]

    def fleets(self) -> list[str] | None:
        """The fleets that the stack's state names; empty if there is no bucket. None if S3 does not answer."""
        prefix = self._prefix + FLEETS
        result = ask(
            *("aws", "s3api", "list-objects-v2", "--bucket", self._bucket, "--prefix", prefix),
            *("--query", "Contents[].[Key]", "--output", "text", *NOT_REACHED),
        )
        if result.code != 0:
            return [] if "NoSuchBucket" in result.why else None
        return [key[len(prefix) :] for key in result.out.split("\n") if key.startswith(prefix)]

    def put(self, file: Path, key: str) -> bool:
        """Uploads a file. Returns whether it succeeded."""
        return aws("s3", "cp", str(file), f"{self.uri}/{key}", "--only-show-errors") is not None

    def get(self, key: str, file: Path, sha256: str = "") -> bool:
        """Downloads a file. Returns whether it arrived and has the declared hash."""
        if aws("s3", "cp", f"{self.uri}/{key}", str(file), "--only-show-errors") is None:
            return False
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if sha256 and digest != sha256:
            say(f"{file}: sha256 is {digest}, expected {sha256}")
        return digest == (sha256 or digest)

    def get_folder(self, prefix: str, folder: Path) -> bool:
        """Makes the objects below the prefix equal to the folder's files. Returns whether that succeeded."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        copied = aws("s3", "cp", f"{self.uri}/{prefix}", f"{folder}/", "--recursive", "--only-show-errors")
        return copied is not None
