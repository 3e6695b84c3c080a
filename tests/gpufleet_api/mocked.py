"""`python mocked.py FOLDER preview|up`: a program under Pulumi's mocks; what it declared and exported, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
from typing import Any

import pulumi
from pulumi.runtime import mocks, settings
from pulumi.runtime.stack import run_pulumi_func

DECLARED: list[dict[str, Any]] = []


class RememberingMonitor(mocks.MockMonitor):
    """Remembers under which parent each resource was declared."""

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802 - the protocol's name
        parent, provider = request.parent.rpartition("::")[2], request.provider.split("::")[-2:-1]
        declared = {"type": request.type, "name": request.name, "parent": parent, "provider": provider}
        declared["tags"] = dict(request.object["tags"]) if "tags" in request.object else {}
        declared["boundary"] = dict(request.object).get("permissionsBoundary")
        DECLARED.append(declared)  # whole: several threads are here at once
        return super().RegisterResource(request)  # type: ignore[no-untyped-call]


class AwsMocks(mocks.Mocks):
    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        named = {"bucket": f"{args.name}-1234567", "name": args.name, "arn": f"arn:{args.name}", "latestVersion": 1}
        return f"{args.name}-id", {**named, **args.inputs}

    def call(self, args: mocks.MockCallArgs) -> Any:
        return {}


def main(folder: str, mode: str) -> None:
    os.chdir(folder)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    aws = AwsMocks()
    pulumi.runtime.set_mocks(
        aws, project="platform", stack="dev", preview=mode == "preview", monitor=RememberingMonitor(aws)
    )
    settings.SETTINGS.root_directory = folder
    error = ""

    def program() -> None:
        runpy.run_path("__main__.py", run_name="__main__")

    try:
        loop.run_until_complete(run_pulumi_func(program))
    except pulumi.RunError as refused:
        error = str(refused)

    async def outputs() -> dict[str, Any]:
        root: Any = settings.get_root_resource()
        return {name: await pulumi.Output.from_input(value).future() for name, value in root.outputs.items()}

    print(json.dumps({"declared": DECLARED, "error": error, "outputs": loop.run_until_complete(outputs())}))


main(*sys.argv[1:])
