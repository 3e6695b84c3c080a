"""Prepares the folders, placeholders, environment and secrets of a command, and hides secrets in its output."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufleet.job.contract import environment
from gpufleet.job.contract.workdir import CODE, KEPT, NAMED, OUTPUTS, STATE, STOP, USER
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.kind.command import CommandConfig, filled

PROGRESS = "progress.jsonl"  # the file for lines of JSON in the user's folder, if the definition names no other file
HIDDEN = 8  # secrets with fewer characters are not hidden in the output
BLANK = b"***"
ALONE = {"nodes": "1", "node_rank": "0", "master": "127.0.0.1", "port": "29400"}  # values for a run on one node


@dataclass(frozen=True, kw_only=True, slots=True)
class Folders:
    """The user's folders. The folders' absolute paths are the same for the host and in the command's container."""

    user: Path

    @classmethod
    def from_workdir(cls, workdir: Path) -> Folders:
        return cls(user=workdir / USER)

    @property
    def own(self) -> ForeignFolder:
        """The folder that contains all of these folders. The running command cannot redirect a process that opens files
        in this folder.
        """
        return ForeignFolder(self.user)

    @property
    def code(self) -> Path:
        return self.user / CODE

    @property
    def written(self) -> tuple[Path, ...]:
        """The folders that the command writes."""
        return tuple(self.user / name for name in (KEPT, OUTPUTS, STATE))

    @property
    def outputs(self) -> Path:
        return self.user / OUTPUTS

    @property
    def stop_file(self) -> Path:
        """The file that gpufleet makes when it asks the command to stop, for scripts that look for a file instead of
        catching a signal.
        """
        return self.user / STOP

    def make(self) -> None:
        """Makes all of these folders. Any user can write into them, because the command's image may run as any user."""
        self.user.mkdir(parents=True, exist_ok=True)
        for folder in (self.user, self.code, *self.written):
            self.own.make(folder)

    def values(self, run: str, gpus: int) -> dict[str, str | int]:
        named = self.user / NAMED
        inputs = {f"inputs.{name}": str(named / name) for name in self.own.names(named)}
        meeting = {name: os.environ.get(environment.COMMAND[name], alone) for name, alone in ALONE.items()}
        return {
            "code": str(self.code),
            "checkpoints": str(self.user / KEPT),
            "outputs": str(self.outputs),
            "state": str(self.user / STATE),
            "gpus": gpus,
            "run": run,
            **meeting,
            "ranks": int(meeting["nodes"]) * gpus,
            **inputs,
        }

    def resolve_path(self, text: str, values: Mapping[str, str | int]) -> Path:
        """The path of a folder or file that the definition names; a relative name is below the code. Raises ValueError
        if the path is outside of the folders of the run.
        """
        path = Path(os.path.normpath(self.code / filled(text, dict(values))))
        if not path.is_relative_to(self.user) or path == self.user:
            raise ValueError(f"{text} is not below one of the run's folders: {{checkpoints}}, {{outputs}}, {{state}}")
        return path


def variables(
    config: CommandConfig, folders: Folders, values: Mapping[str, str | int], *, stack: str, attempt: int
) -> dict[str, str]:
    """The environment of each start, without secrets and without the variables that a resume adds."""
    facts = {
        **{name: str(values[name]) for name in ("run", "gpus", "checkpoints", "outputs", "state", "ranks", *ALONE)},
        "attempt": str(attempt),
        "progress": str(progress_file(config, folders, values)),
        "stop_file": str(folders.stop_file),
    }
    inputs = {
        environment.INPUT + re.sub(r"[^A-Z0-9]", "_", name.removeprefix("inputs.").upper()): str(value)
        for name, value in values.items()
        if name.startswith("inputs.")
    }
    some_gpus = config.device == "cuda" and config.gpus is not None
    return {
        "PYTHONUNBUFFERED": "1",  # otherwise Python writes its output into a pipe in blocks of 8 KB
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(config.stop.grace_s)),  # by default, torchrun waits only 30 s
        "WANDB_RUN_ID": environment.tracker_id(stack, str(values["run"])),
        "WANDB_RESUME": "allow",
        **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(config.gpus or 0)))} if some_gpus else {}),
        **inputs,
        **{environment.COMMAND[name]: value for name, value in facts.items()},
        **{name: filled(value, dict(values)) for name, value in (config.env or {}).items()},
    }


def progress_file(config: CommandConfig, folders: Folders, values: Mapping[str, str | int]) -> Path:
    """The file in which the host looks for the command's lines of JSON."""
    return folders.resolve_path(config.progress.file, values) if config.progress.file else folders.user / PROGRESS


def secrets(references: Mapping[str, str], ask: Callable[[str, str], str] | None = None) -> dict[str, str]:
    """The values of the secrets, from the places that the definition names; in a rehearsal, from the environment.
    Raises ValueError if a secret does not exist or cannot be read; the error's text never contains a value. Any other
    error is due to this node.
    """
    values = {}
    for name, reference in references.items():
        kind, _, place = reference.partition(":")
        rehearsed = os.environ.get(environment.SECRET + name)
        try:
            values[name] = rehearsed if rehearsed is not None else (ask or _asked)(kind, place)
        except LookupError as error:
            raise ValueError(f"job.secrets.{name}: {reference} cannot be read: {error}") from None
    return values


def _asked(kind: str, place: str) -> str:
    from botocore.exceptions import ClientError

    from gpufleet.job.supervisor.store import session

    try:
        if kind == "ssm":
            parameter: dict[str, Any] = session().client("ssm").get_parameter(Name=place, WithDecryption=True)
            return str(parameter["Parameter"]["Value"])
        return str(session().client("secretsmanager").get_secret_value(SecretId=place)["SecretString"])
    except ClientError as error:
        raise LookupError(str(error)) from None


class Mask:
    """Hides secret values in the output: each whole value, and each of its lines. If a value is JSON, each text and
    number in it is hidden too, unless the text is so short that other output may match it by chance. `longest`: number
    of bytes of the longest text that is hidden.
    """

    def __init__(self, values: Iterable[str]) -> None:
        parts = {part.strip() for value in values for part in _parts(value)}
        self._hidden = sorted((part.encode() for part in parts if len(part) >= HIDDEN), key=len, reverse=True)
        self.longest = len(self._hidden[0]) if self._hidden else 0

    def __call__(self, line: bytes) -> bytes:
        for part in self._hidden:
            line = line.replace(part, BLANK)
        return line


def _parts(value: str) -> Iterator[str]:
    """The parts of a secret that must be hidden even if they appear alone."""
    yield from (value, *value.splitlines())
    with suppress(ValueError, RecursionError):
        waiting = [json.loads(value)]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict | list):
                waiting += part.values() if isinstance(part, dict) else part
            elif isinstance(part, str):
                yield from _parts(part)
                yield from (json.dumps(part, ensure_ascii=ascii)[1:-1] for ascii in (True, False))  # as JSON prints it
            else:
                yield str(part)
