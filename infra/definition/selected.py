"""Finds the definition that a stack runs, from the stack's Pulumi configuration, for the program and for the commands.
If the stack and its file have different names, the setting `definition` names the file. The setting `scenario` names
one of the file's scenarios. The engine keeps both in Pulumi.STACK.yaml, under the project's name, so that the commands
need no engine to read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from gpufleet.infra.definition.loader import find, is_path, load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.scenarios import scenario as one_scenario
from gpufleet.infra.errors import GpufleetError

DEFINITION, SCENARIO = "definition", "scenario"
# the setting in the stack of a bake: as JSON, the AMI or snapshot that the stack keeps after its builder is deleted
BAKE = "bake"


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """A definition file and the scenario to run; the scenario is empty if the file itself runs."""

    path: Path
    scenario: str = ""
    asked: str = ""  # the stack as the user named it

    def load(self, *, now: datetime, past_deadline: bool = False, staged: bool = False) -> StackDefinition:
        """The definition, after the checks that a run needs. Raises the errors of loader.load and
        scenarios.scenario.
        """
        if not self.scenario:
            definition = load(self.path, now=now, past_deadline=past_deadline, staged=staged)
        else:
            definition = one_scenario(self.path, self.scenario, now=now, past_deadline=past_deadline)
        return definition.changed(lambda part: replace(part, asked=self.asked))


def selected(stack: str, root: Path) -> Selected:
    """The definition file and the scenario that the program would run. `stack`: the name of a stack, or the path of a
    file. If it is a path, the configuration of the stack with the file's name is used only if that stack runs this
    file. Raises GpufleetError.
    """
    name = Path(stack).stem if is_path(stack) else stack
    config = _config(root / f"Pulumi.{name}.yaml", root / "Pulumi.yaml")
    theirs = config.get(DEFINITION) or name
    if not is_path(stack):
        return Selected(path=find(theirs, root), scenario=config.get(SCENARIO, ""), asked=stack)
    path = find(stack, root)
    with suppress(GpufleetError):
        if path.samefile(find(theirs, root)):
            return Selected(path=path, scenario=config.get(SCENARIO, ""), asked=stack)
    return Selected(path=path, asked=stack)


def refuse_unread(keys: Iterable[str], project: str) -> None:
    """Raises GpufleetError if the configuration has a setting that gpufleet does not read. Otherwise a misspelled
    `scenario` would run the file itself, and an AWS profile set there would make the program use another account than
    the commands.
    """
    for key in keys:
        namespace, _, name = key.partition(":")
        remove = f"`pulumi config rm {key}` takes it away"
        if namespace == "aws":
            raise GpufleetError(
                f"{key} in the Pulumi configuration is not followed. The region comes from the definition file and the "
                "credentials come from the shell, for the program and every command: AWS_PROFILE names a profile, "
                f"which may assume a role. {remove}"
            )
        if namespace == project and name not in (DEFINITION, SCENARIO, BAKE):
            raise GpufleetError(
                f"{key} in the Pulumi configuration is not a setting; allowed: {DEFINITION}, {SCENARIO}. {remove}"
            )


def _config(path: Path, of_project: Path) -> dict[str, str]:
    """The settings of the project `of_project` in the stack's configuration file."""
    config = _tree(path).get("config")
    if not isinstance(config, dict):
        return {}
    project = _project(of_project)
    refuse_unread(config, project)
    settings = {key: config[f"{project}:{key}"] for key in (DEFINITION, SCENARIO) if f"{project}:{key}" in config}
    for key, value in settings.items():
        if not isinstance(value, str):
            raise GpufleetError(f"{path}: {key} is not plain text; `pulumi config set {key} NAME` writes it as text")
    return settings


def _project(path: Path) -> str:
    """The project's name, which the user chose in `pulumi new`."""
    return str(_tree(path).get("name") or "gpufleet")


def _tree(path: Path) -> dict[str, Any]:
    """A file of the Pulumi engine as a tree of text; empty if the file does not exist."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise GpufleetError(f"{path} cannot be read: {error}") from None
    return tree if isinstance(tree, dict) else {}
