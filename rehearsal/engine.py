"""Runs the unmodified program against the embedded AWS: with the real `pulumi` if it is on PATH, otherwise without it.

with Engine.open(folder, cloud.environment(), "tinystories-growth", say=print) as engine:
        engine.preview(); engine.up(); engine.destroy()

All files are in `folder`, a scratch project: Pulumi.yaml, stacks/, state, the engine's own home. Files outside of it
are neither read nor written, so that a forgotten variable cannot change a real stack.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufleet.infra.program import project
from gpufleet.infra.program.pulumi_cli import streamed as streamed
from gpufleet.job import ledger
from gpufleet.rehearsal import provider
from gpufleet.rehearsal.environment import scratch
from gpufleet.rehearsal.handlers import handler
from gpufleet.rehearsal.handlers.table import Aws

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One operation on one resource: create, update, replace, delete, same, read, refresh ..."""

    operation: str
    type: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one command of the engine."""

    ok: bool
    # Resources by operation; an unchanged one is `same`, or `kept` in InProcess's destroy.
    changes: Mapping[str, int]
    steps: tuple[EngineStep, ...]
    diagnostics: str  # the text below the heading Diagnostics
    outputs: Mapping[str, Any]  # after a preview, only outputs that are known before anything exists
    text: str = ""  # the whole output

    def affected(self, operation: str) -> set[str]:
        """Names of the resources with this operation."""
        return {step.name for step in self.steps if step.operation == operation}


class Engine(ABC):
    """One stack of one scratch project."""

    name: str  # the engine's name in the report

    @abstractmethod
    def preview(self) -> Result: ...

    @abstractmethod
    def up(self) -> Result: ...

    @abstractmethod
    def refresh(self) -> Result: ...

    @abstractmethod
    def destroy(self) -> Result: ...

    @abstractmethod
    def outputs(self) -> dict[str, Any]: ...

    @staticmethod
    @contextmanager
    def open(
        folder: Path, environment: Mapping[str, str], stack: str, *, say: Say | None = None, real: bool | None = None
    ) -> Iterator[Engine]:
        """Opens an engine. If `real` is None, it uses the `pulumi` on PATH if there is one, and otherwise the
        in-process runner. `say` is called with every line as it is printed.
        """
        write_project(folder)
        say = say or (lambda line: None)
        if real if real is not None else shutil.which("pulumi") is not None:
            with provider.serve(environment) as port:
                yield Pulumi(folder, {**environment, **settings(folder, port)}, stack, say)
        else:
            yield InProcess(folder, environment, stack, say)


def write_project(folder: Path) -> None:
    """Writes the project files of `gpufleet init`, for the Python that runs this process."""
    python = {"toolchain": "pip", "virtualenv": sys.prefix}
    for file, text in project.files(folder, "gpufleet", python).items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def settings(folder: Path, port: int) -> dict[str, str]:
    """Variables that make a `pulumi` in any shell use only the scratch folder's state and the embedded AWS."""
    state = folder / "state"
    state.mkdir(parents=True, exist_ok=True)
    return {
        "PULUMI_HOME": str(folder / "home"),
        "PULUMI_BACKEND_URL": f"{state.resolve().as_uri()}?metadata=skip",  # the same value as in the README
        "PULUMI_CONFIG_PASSPHRASE": "rehearsal",  # nothing in a rehearsal is secret
        "PULUMI_DEBUG_PROVIDERS": f"aws:{port}",
        "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
        "PULUMI_SKIP_UPDATE_CHECK": "1",
    }


class Pulumi(Engine):
    """The real engine."""

    def __init__(self, folder: Path, environment: Mapping[str, str], stack: str, say: Say) -> None:
        self._folder = folder
        self._stack = stack
        self._say = say
        # The event log is a hidden option, meant for programs that drive the engine.
        self._environment = scratch({**environment, "NO_COLOR": "1", "PULUMI_DEBUG_COMMANDS": "1"})
        version = self._run(["pulumi", "version"]).strip()
        self.name = f"pulumi {version.removeprefix('v')}"
        self._run(["pulumi", "stack", "select", "--create", "--non-interactive", "--stack", stack])

    def preview(self) -> Result:
        return self._command("preview")

    def up(self) -> Result:
        return self._command("up", "--yes", "--skip-preview")

    def refresh(self) -> Result:
        return self._command("refresh", "--yes", "--skip-preview")

    def destroy(self) -> Result:
        return self._command("destroy", "--yes", "--skip-preview")

    def outputs(self) -> dict[str, Any]:
        text = self._run(["pulumi", "stack", "output", "--json", "--non-interactive", "--stack", self._stack])
        return dict(json.loads(text))

    def _command(self, command: str, *options: str) -> Result:
        log = self._folder / "events.jsonl"
        log.unlink(missing_ok=True)
        common = ["--non-interactive", "--color", "never", "--stack", self._stack, "--event-log", str(log)]
        code, text = streamed(
            ["pulumi", command, *options, *common], folder=self._folder, environment=self._environment, say=self._say
        )
        return _result(code == 0, text, ledger.read(log) if log.exists() else [])

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
        return done.stdout


def _result(ok: bool, text: str, events: Iterable[dict[str, Any]]) -> Result:
    """The effects of a command, from the engine's event log (pulumi sdk/go/common/apitype/events.go)."""
    changes: dict[str, int] = {}
    steps: list[EngineStep] = []
    diagnostics = ""
    outputs: dict[str, Any] = {}
    for event in events:
        if diagnostic := event.get("diagnosticEvent"):
            if not diagnostic.get("ephemeral") and diagnostic["severity"] != "debug":
                prefix = "" if diagnostic["severity"] == "info" else f"{diagnostic['severity']}: "
                diagnostics += prefix + diagnostic["message"].removeprefix(prefix).rstrip("\n") + "\n"
        elif summary := event.get("summaryEvent"):
            changes = dict(summary["resourceChanges"])
        elif before := event.get("resourcePreEvent"):
            metadata = before["metadata"]
            steps.append(EngineStep(metadata["op"], metadata["type"], metadata["urn"].split("::")[3]))
        elif after := event.get("resOutputsEvent"):
            metadata = after["metadata"]
            if metadata["type"] == "pulumi:pulumi:Stack" and metadata.get("new"):
                outputs = dict(metadata["new"].get("outputs") or {})
    return Result(ok=ok, changes=changes, steps=tuple(steps), diagnostics=diagnostics, outputs=outputs, text=text)


class InProcess(Engine):
    """Runs the program without the engine. This runner only creates resources, records options, and deletes the
    resources that are not retained. A second up, a new run id, refresh and replacement need the real engine; here they
    are refused.
    """

    name = "in-process runner (engine behaviour not tested)"

    def __init__(self, folder: Path, environment: Mapping[str, str], stack: str, say: Say) -> None:
        self._folder = folder.absolute()
        self._environment = environment
        self._stack = stack
        self._say = say
        self._state = folder / "in-process.json"
        self._report = self._state  # the report of the program's last run

    def preview(self) -> Result:
        return self._program("preview")

    def up(self) -> Result:
        if self._state.exists():
            raise RuntimeError("a second up needs the Pulumi engine: the in-process runner only creates")
        return self._program("up")

    def refresh(self) -> Result:
        raise RuntimeError("refresh needs the Pulumi engine")

    def destroy(self) -> Result:
        """Deletes in reverse order of creation; skips resources that no longer exist, as with `refresh: always`."""
        deleted, retained, regions = [], 0, dict[str, Aws]()
        created = json.loads(self._state.read_text())["resources"] if self._state.exists() else []
        for resource in reversed(created):
            if not resource["id"] or resource["options"]["retain_on_delete"]:
                retained += bool(resource["id"])
                continue
            region = resource["region"]
            aws = regions.setdefault(region, Aws(environment=self._environment, region=region))
            if handler(resource["type"]).read(aws, resource["id"], resource["state"]) is None:
                continue
            self._say(f"delete {resource['type']} {resource['name']}")
            handler(resource["type"]).delete(aws, resource["id"], resource["state"])
            deleted.append(EngineStep("delete", resource["type"], resource["name"]))
        self._state.unlink(missing_ok=True)
        changes = {"delete": len(deleted), **({"kept": retained} if retained else {})}
        return Result(ok=True, changes=changes, steps=tuple(deleted), diagnostics="", outputs={}, text="")

    def outputs(self) -> dict[str, Any]:
        return dict(json.loads(self._state.read_text())["outputs"]) if self._state.exists() else {}

    def declared(self) -> list[dict[str, Any]]:
        """What the last preview or up declared: type, name, inputs, state, options with dependencies."""
        return list(json.loads(self._report.read_text())["resources"])

    def _program(self, mode: str) -> Result:
        self._report = report = self._folder / f"in-process.{mode}.json"
        report.unlink(missing_ok=True)
        _, text = streamed(
            [sys.executable, "-m", "gpufleet.rehearsal.inprocess", mode, str(self._folder), self._stack, str(report)],
            folder=self._folder,
            environment=scratch(self._environment),
            say=self._say,
        )
        if not report.exists():
            raise RuntimeError(f"the in-process runner stopped:\n{text}")
        document = json.loads(report.read_text())
        if mode == "up" and document["resources"]:
            shutil.copy(report, self._state)
        steps = tuple(EngineStep("create", resource["type"], resource["name"]) for resource in document["resources"])
        return Result(
            ok=document["ok"],
            changes={"create": len(steps)},
            steps=steps,
            diagnostics=document["diagnostics"],
            outputs=document["outputs"],
            text=text,
        )
