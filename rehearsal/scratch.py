"""A scratch project: what a user's own checkout would be, in a folder that lives and dies with one embedded AWS.

The program is the same (`infra` and the virtual environment are links), the definition, the engine's state and its
settings are the scratch's own. Nothing of the user's environment that names AWS or Pulumi gets in.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import infra
from rehearsal.cloud import Cloud

PASSPHRASE = "rehearsal"  # encrypts nothing worth hiding: the state dies with the folder


def make(folder: Path, definitions: Mapping[str, str]) -> Path:
    """A project in the empty or new `folder`, with these definition files (text by stack name)."""
    package = Path(infra.__file__).parent
    (folder / "stacks").mkdir(parents=True)
    (folder / "state").mkdir()
    shutil.copyfile(package.parent / "Pulumi.yaml", folder / "Pulumi.yaml")
    for name, text in definitions.items():
        (folder / "stacks" / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "infra").symlink_to(package, target_is_directory=True)
    (folder / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    return folder


def settings(folder: Path, cloud: Cloud, provider_port: int) -> dict[str, str]:
    """The variables with which `pulumi`, SDKs and our commands use this project and this embedded AWS, and no other."""
    return {
        **cloud.environment(),
        "PULUMI_BACKEND_URL": f"file://{folder / 'state'}",
        "PULUMI_CONFIG_PASSPHRASE": PASSPHRASE,
        "PULUMI_DEBUG_PROVIDERS": f"aws:{provider_port}",
        "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
        "PULUMI_SKIP_UPDATE_CHECK": "1",
    }


def environment(folder: Path, cloud: Cloud, provider_port: int) -> dict[str, str]:
    """The whole environment of a command in the project: the user's, without a word about AWS or Pulumi, and ours."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PULUMI_", "GPUFLEET_"))}
    return {**mine, **settings(folder, cloud, provider_port)}
