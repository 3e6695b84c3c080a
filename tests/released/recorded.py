"""What a released version has recorded (record.py), opened: its files, its buckets, its states, its account."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from gpufleet.infra.definition.model import Account, Disk, Fleet, Limits, Notify, Run
from gpufleet.job.spec import KINDS
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.handlers import handler
from gpufleet.rehearsal.handlers.table import Aws

HERE = Path(__file__).parent
PROJECT = "<project>"  # stands for the folder in which it was recorded
RELEASES = sorted(path for path in HERE.glob("[0-9]*") if path.is_dir())
TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
# A checkout before the first version (b155bce, 2026-11-25), recorded by its own code: one run of a ready-made job.
BEFORE = HERE / "before-0.1.0"
RECORDS = [BEFORE, *RELEASES]
STACK, ROLE = "pulumi:pulumi:Stack", "aws:iam/role:Role"


@dataclass(frozen=True)
class RecordedRun:
    """`growth`, in gpufleet's own program, or `command`, in a user's; of one version."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def definition(self) -> str:
        """The definition file, seen from the project."""
        return {"growth": "stacks/growth.yaml", "command": "command.yaml"}[self.name]

    @property
    def argument(self) -> str:
        """What commands take for it."""
        return {"growth": "growth", "command": "command.yaml"}[self.name]

    @cached_property
    def interrupted(self) -> dict[str, bytes]:
        """The bucket while no node was there."""
        return opened(self.folder / "bucket-interrupted.tar.gz")

    @cached_property
    def ended(self) -> dict[str, bytes]:
        """What the run left below its prefix."""
        return opened(self.folder / "bucket-ended.tar.gz")

    @property
    def restored(self) -> int:
        """The step of the one checkpoint that is recorded, the newest."""
        (found,) = (key for key in self.interrupted if key.endswith("/manifest.json"))
        return int(json.loads(self.interrupted[found])["step"])

    def state(self, name: str) -> RecordedState:
        """The stack's: `up` while its run goes on, or `ended` after the `up` that followed its end."""
        return RecordedState(json.loads(gzip.decompress((self.folder / f"stack-{name}.json.gz").read_bytes())))

    def project(self, folder: Path) -> Path:
        """The user's project as the run left it, in a new `folder`; of the job archive the name alone."""
        inputs = {
            key.split("/", 2)[2]: content for key, content in self.interrupted.items() if key.startswith("inputs/")
        }
        definition = (self.folder / "definition.yaml").read_bytes()
        if self.name == "growth":
            scratch.make(folder, {self.name: definition.decode()})
            return place(inputs, folder / "data" / "stories").parents[1]
        code = inputs.pop("code.tar.gz")
        place({"command.yaml": definition, **{f"words/{name}": content for name, content in inputs.items()}}, folder)
        place({"code.tar.gz": code}, folder)
        with tarfile.open(folder / "code.tar.gz") as tar:
            tar.extractall(folder / "code", filter="data")
        program(folder)
        return folder


@dataclass(frozen=True)
class RecordedState:
    """A stack's deployment."""

    tree: dict[str, Any]

    @property
    def resources(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.tree["deployment"]["resources"]
        return found

    @property
    def content(self) -> bytes:
        """As `pulumi stack import` takes it."""
        return json.dumps(self.tree).encode()

    def one(self, kind: str) -> dict[str, Any]:
        """The resource of this type."""
        (found,) = (each for each in self.resources if each["type"] == kind)
        return found

    @property
    def run(self) -> dict[str, str]:
        """What it remembers of its run."""
        found: dict[str, str] = next(
            each["outputs"]["run"] for each in self.resources if "run" in each.get("outputs", {})
        )
        return found

    def replaced(self, words: Mapping[str, str]) -> RecordedState:
        """With other words for some of its own, wherever they stand."""
        text = json.dumps(self.tree)
        for old, new in words.items():
            text = text.replace(old, new)
        return RecordedState(json.loads(text))

    def begun(self, at: datetime) -> RecordedState:
        """As if its run had begun then: whatever time stands in it, a schedule's too, is as much later."""
        by = at - datetime.fromisoformat(self.run["began"])

        def moved(time: re.Match[str]) -> str:
            return f"{datetime.fromisoformat(time[0]) + by:%Y-%m-%dT%H:%M:%S}"

        return RecordedState(json.loads(TIME.sub(moved, json.dumps(self.tree))))

    def invoke(self, token: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What the engine answers to a program of this stack."""
        if token == "pulumi:pulumi:readStackOutputs":
            return {"outputs": self.one(STACK)["outputs"]}
        assert token == "pulumi:pulumi:readStackResourceOutputs"
        told = {each["urn"]: {"type": each["type"], "outputs": each.get("outputs", {})} for each in self.resources}
        return {"outputs": told}

    def restored(self, cloud: Cloud, project: Path) -> RecordedState:
        """Every resource made in the account, as it was declared. The state with the names that AWS gives them now, and
        with the files of `project`.
        """
        aws = Aws(environment=cloud.environment(), region=cloud.region)
        account = next(each["outputs"]["arn"] for each in self.resources if each["type"] == ROLE).split(":")[4]
        state = self.replaced({account: cloud.account, PROJECT: str(project)})
        for number in range(len(state.resources)):
            resource = state.resources[number]
            if not resource["type"].startswith("aws:"):
                continue
            declared = {key: value for key, value in resource["inputs"].items() if not key.startswith("__")}
            if "contentBase64" in declared:  # of checkouts before 0.1.0
                declared["content"] = base64.b64decode(declared.pop("contentBase64")).decode()
            if "source" in declared and not (file := Path(declared["source"]["path"])).exists():
                place({file.name: b""}, file.parent)
            made = handler(resource["type"]).create(aws, declared)
            state = state.replaced({resource["id"]: made})
        return state


SECTIONS: dict[str, type] = {
    **{"run": Run, "fleet": Fleet, "disk": Disk, "limits": Limits, "account": Account, "notify": Notify},
    **KINDS,
}


def definition_keys() -> dict[str, Field[Any]]:
    """Every key that counts in a run's digest, by its dotted path from its section, or from its kind of job."""
    return {f"{name}.{key}": field for name, kind in SECTIONS.items() for key, field in _keys(kind)}


def _keys(kind: Any) -> Iterator[tuple[str, Field[Any]]]:
    hints = get_type_hints(kind)
    for each in fields(kind):
        yield each.name, each
        types = [hints[each.name]]
        for hint in types:
            types += get_args(hint)
            if is_dataclass(hint):
                yield from ((f"{each.name}.{key}", below) for key, below in _keys(hint))


def program(folder: Path) -> None:
    """Writes a user's own program with one run, as the engine runs it here."""
    shutil.copy(HERE / "program" / "__main__.py", folder)
    project = yaml.safe_load((HERE / "program" / "Pulumi.yaml").read_text())
    project["runtime"]["options"] = {"virtualenv": sys.prefix}
    (folder / "Pulumi.yaml").write_text(yaml.safe_dump(project))


def opened(path: Path) -> dict[str, bytes]:
    """The files of a tar.gz by name."""
    with tarfile.open(path) as tar:
        return {entry.name: found.read() for entry in tar if (found := tar.extractfile(entry)) is not None}


def place(files: Mapping[str, bytes], folder: Path) -> Path:
    """Files below `folder`."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder
