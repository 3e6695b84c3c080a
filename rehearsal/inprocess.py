"""Runs the program without the Pulumi engine: `python -m gpufleet.rehearsal.inprocess preview|up FOLDER STACK REPORT`.

The program runs in a separate process because the SDK's settings are global. The mock monitor of the SDK replaces the
engine. When a resource is registered, it is really created, by the same handlers as in the gRPC provider. All requests,
with their options and dependencies, are written to REPORT.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import runpy
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pulumi
import yaml
from pulumi.runtime import mocks, settings
from pulumi.runtime.proto import resource_pb2
from pulumi.runtime.stack import run_pulumi_func

from gpufleet.rehearsal.handlers import handler, table
from gpufleet.rehearsal.handlers.table import Aws, UnsupportedError
from gpufleet.rehearsal.provider import plain, struct

STASH = "pulumi:index:Stash"  # this type exists only in the engine's own state


class Monitor(mocks.MockMonitor):
    """Creates what the program registers, and records the requests."""

    def __init__(self, environment: Mapping[str, str], *, preview: bool, previous: Mapping[str, Any]) -> None:
        super().__init__(_Invokes(previous))
        self._environment = environment
        self._preview = preview
        self._regions: dict[str, str] = {}  # by the provider's urn
        self._lock = threading.Lock()
        self.declared: list[dict[str, Any]] = []

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802 - the protocol's name
        urn = self.make_urn(request.parent, request.type, request.name)
        if request.type.startswith("pulumi:providers:"):
            self._regions[urn] = str(plain(request.object)["region"])
            return resource_pb2.RegisterResourceResponse(urn=urn, id="provider", object=request.object)
        if not request.custom:
            return resource_pb2.RegisterResourceResponse(urn=urn)
        if request.type == STASH:
            stashed = plain(request.object)["input"]
            return resource_pb2.RegisterResourceResponse(
                urn=urn, id="stash", object=struct({"input": stashed, "output": stashed})
            )
        region = self._regions[request.provider.rpartition("::")[0]]
        inputs = self._checked(request)
        resource_id, state = "", table.expected(handler(request.type), {}, inputs)
        if not self._preview:
            aws = Aws(environment=self._environment, region=region)
            resource_id = handler(request.type).create(aws, inputs)
            state = table.written(request.type, handler(request.type), aws, resource_id, inputs)
        with self._lock:
            self.declared.append(
                {
                    "type": request.type,
                    "name": request.name,
                    "urn": urn,
                    "region": region,
                    "id": resource_id,
                    "inputs": inputs,
                    "state": state,
                    "options": options(request),
                }
            )
        return resource_pb2.RegisterResourceResponse(urn=urn, id=resource_id, object=struct(state))

    def _checked(self, request: Any) -> dict[str, Any]:
        inputs, failures = table.check(
            request.type, handler(request.type), request.name, {}, plain(request.object), os.urandom(16)
        )
        if failures:
            raise UnsupportedError("; ".join(reason for _, reason in failures))
        return inputs


def options(request: Any) -> dict[str, Any]:
    """The resource options that the program uses in a request, in the form that the engine would get."""
    trigger = request.replacement_trigger
    return {
        "depends_on": sorted(request.dependencies),
        "retain_on_delete": bool(request.retainOnDelete),
        "delete_before_replace": bool(request.deleteBeforeReplace),
        "ignore_changes": list(request.ignoreChanges),
        "replacement_trigger": trigger.string_value if request.HasField("replacement_trigger") else None,
        "delete_timeout": request.customTimeouts.delete,
    }


class _Invokes(mocks.Mocks):
    """The two provider functions by which the program reads the earlier state of its stack."""

    def __init__(self, previous: Mapping[str, Any]) -> None:
        self._previous = dict(previous)

    def call(self, args: mocks.MockCallArgs) -> Any:
        if args.token == "pulumi:pulumi:readStackOutputs":
            return {"outputs": self._previous["outputs"]}
        if args.token == "pulumi:pulumi:readStackResourceOutputs":
            return {
                "outputs": {
                    resource["urn"]: {"type": resource["type"], "outputs": resource["state"]}
                    for resource in self._previous["resources"]
                }
            }
        raise UnsupportedError(f"the embedded AWS has no function {args.token}")

    def new_resource(self, args: mocks.MockResourceArgs) -> Any:
        raise UnsupportedError(f"{args.typ} {args.name} is read, not declared")


class _Diagnostics(logging.Handler):
    """Keeps what the program logs for the report, and prints it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        self.text += f"{prefix}{record.getMessage().rstrip()}\n"
        sys.stdout.write(f"{prefix}{record.getMessage().rstrip()}\n")
        sys.stdout.flush()


def run(mode: str, folder: Path, stack: str) -> dict[str, Any]:
    """Runs the program once; returns the report as JSON values."""
    project = yaml.safe_load((folder / "Pulumi.yaml").read_text())
    monitor = Monitor(os.environ, preview=mode == "preview", previous=_previous(folder))
    diagnostics = _Diagnostics()
    logger = logging.getLogger("program")
    logger.setLevel(logging.INFO)
    logger.addHandler(diagnostics)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # called before set_mocks, which makes the root stack
    mocks.set_mocks(
        monitor.mocks,
        project=project["name"],
        stack=stack,
        preview=mode == "preview",
        logger=logger,
        monitor=monitor,
        organization="organization",
    )
    settings.SETTINGS.root_directory = str(folder)
    settings.SETTINGS.engine.RequirePulumiVersion = lambda request: None
    os.chdir(folder / project["main"])
    outputs, ok = {}, True
    try:
        loop.run_until_complete(run_pulumi_func(lambda: _program()))
        outputs = loop.run_until_complete(_outputs())
    except SystemExit as stop:
        ok = not stop.code
    except Exception as error:  # noqa: BLE001 - whatever stopped the program is what the report must say
        ok = False
        logger.error("%s", error)
    return {"ok": ok, "outputs": outputs, "resources": monitor.declared, "diagnostics": diagnostics.text}


def _program() -> None:
    runpy.run_path(".", run_name="__main__")


async def _outputs() -> dict[str, Any]:
    """The stack's outputs that are known."""
    root = settings.get_root_resource()
    assert root is not None
    outputs = {}
    for name, value in root.outputs.items():  # type: ignore[attr-defined]
        output = pulumi.Output.from_input(value)
        if await output.is_known():
            outputs[name] = await output.future()
    return outputs


def _previous(folder: Path) -> dict[str, Any]:
    state = folder / "in-process.json"
    return dict(json.loads(state.read_text())) if state.exists() else {"outputs": {}, "resources": []}


if __name__ == "__main__":
    mode, folder, stack, report = sys.argv[1:]
    Path(report).write_text(json.dumps(run(mode, Path(folder), stack)))
