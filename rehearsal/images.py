"""Runs a command in its own image, with this machine's docker instead of the stand-in.

Docker gets the node's own command line, without the log driver, because the daemon has no keys for the embedded AWS;
the stand-in forwards the output instead (rehearsal/standins/docker.py). No GPU is requested, because a rehearsal uses
the CPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.job.node import container, jobs
from gpufleet.job.node.outside import last_line

ANSWERS_S = 120.0
# torchrun kills its workers after this many seconds, unless its torch reads a different number from the environment.
TORCHRUN_S = 30.0
LAUNCHED = re.compile(r"torchrun|torch\.distributed|accelerate\s+launch")
# Prints an image's torch version and whether its launcher reads that variable; prints nothing if the image has no
# torch.
LOOK = """
import importlib.util, pathlib, re
found = importlib.util.find_spec("torch")
if found and found.origin:
    folder = pathlib.Path(found.origin).parent
    version = re.search("__version__ *= *.([0-9.]+)", (folder / "version.py").read_text())[1]
    launchers = (folder / "distributed").glob("*/api.py")
    print(version, any("TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in each.read_text() for each in launchers))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Docker:
    """This machine's docker. `digests` are those of pulled images; `supervisor` is gpufleet's own image."""

    program: str
    digests: Mapping[str, str]
    supervisor: str

    def environment(self) -> dict[str, str]:
        """Variables for the stand-in, which say which docker it must run, and with which settings of the user (host,
        context, logins).
        """
        own = {name: value for name, value in os.environ.items() if name.startswith("DOCKER_")}
        config = own.pop("DOCKER_CONFIG", "") or str(Path.home() / ".docker")
        return {**own, "GPUFLEET_DOCKER": self.program, "GPUFLEET_DOCKER_CONFIG": config}

    def require_reach(self, endpoint: str) -> None:
        """Raises GpufleetError if a container in the host's network runs on another machine."""
        address = urlsplit(endpoint)
        look = f"import socket; socket.create_connection(({address.hostname!r}, {address.port}), 10)"
        words = ("run", "--rm", "--network", "host", "--entrypoint", "python", self.supervisor, "-c", look)
        if refusal := _refused(self.program, *words):
            raise GpufleetError(
                f"docker: a container in the host's network does not reach the embedded AWS at {endpoint} ({refusal})."
                " Docker Desktop and a rootless docker run containers elsewhere: --image needs Docker Engine on Linux"
            )

    def impatience(self, definition: StackDefinition) -> str:
        """A sentence if the image's torchrun kills its workers before `stop.grace_s` is over; empty if it does not.

        The node sets an environment variable with the right time, but only torch since 2026 reads this variable.
        """
        config = definition.job.parameters
        if not LAUNCHED.search(getattr(config, "command", "")) or config.grace_s <= TORCHRUN_S:
            return ""
        image = definition.job.images[0].partition("@")[0]
        shell = 'for each in python3 python; do command -v $each >/dev/null && exec $each -c "$LOOK"; done'
        pinned = f"{image}@{self.digests[image]}"
        words = ("run", "--rm", "-e", f"LOOK={LOOK}", "--entrypoint", "sh", pinned, "-c", shell)
        try:
            done = subprocess.run(
                [self.program, *words], capture_output=True, text=True, timeout=ANSWERS_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        version, _, reads = done.stdout.strip().partition(" ")
        if reads != "False":
            return ""
        return (
            f"torch {version} of {image} ends the workers of torchrun after {TORCHRUN_S:.0f} s, whatever"
            f" job.stop.grace_s ({config.grace_s:g} s) says: a save that takes longer is lost. Take an image with a"
            f" torch of 2026 or newer, or write job.stop.grace_s: {TORCHRUN_S:.0f}"
        )

    def remove(self, instance: str) -> None:
        """Ends a node's containers at once."""
        named = (container.name(instance), jobs.name(instance), jobs.watcher_name(instance))
        _refused(self.program, "rm", "-f", *named)

    def hold(self, instance: str) -> None:
        """Stops all processes of a node's command until `go` is called."""
        _refused(self.program, "pause", jobs.name(instance))

    def go(self, instance: str) -> None:
        """Lets a node's command go on."""
        _refused(self.program, "unpause", jobs.name(instance))

    def give_back(self, folder: Path) -> None:
        """Makes the user the owner of files that containers have written there as root, so that the user can remove
        them.
        """
        owner = f"{os.getuid()}:{os.getgid()}"
        mounted = ("--rm", "-v", f"{folder}:/nodes", "--entrypoint", "chown")
        _refused(self.program, "run", *mounted, self.supervisor, "-R", owner, "/nodes")


def require(definition: StackDefinition, out: Callable[[str], None]) -> Docker:
    """This machine's docker with the definition's images pulled. Raises GpufleetError if there is no docker, or if an
    image cannot be pulled.
    """
    program = shutil.which("docker")
    if program is None:
        raise GpufleetError("--image runs your image, but there is no docker on PATH: install Docker Engine")
    if refusal := _refused(program, "version", "-f", "{{.Server.Version}}"):
        raise GpufleetError(f"--image runs your image, but docker's daemon does not answer ({refusal}): start it")
    digests = {image.partition("@")[0]: _pulled(program, image, out) for image in definition.job.images}
    named = (definition.job.supervisor_image or "").partition("@")[0]
    return Docker(program=program, digests=digests, supervisor=f"{named}@{digests[named]}")


def _pulled(program: str, image: str, out: Callable[[str], None]) -> str:
    """Pulls an image and returns its digest. Docker's output goes to the terminal."""
    out(f"docker pull {image}")
    pulled = subprocess.run([program, "pull", image], stderr=subprocess.PIPE, text=True, check=False)
    if pulled.returncode:
        raise GpufleetError(f"docker cannot pull {image}: {last_line(pulled.stderr)}")
    asked = ("image", "inspect", "-f", '{{.Size}} {{join .RepoDigests " "}}', image)
    size, *digests = subprocess.run([program, *asked], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    if not digests:
        raise GpufleetError(f"{image} is in no registry, so no node could pull it: push it to a registry")
    out(f"{image}: {int(size) / 1e9:.2f} GB unpacked")
    return digests[0].partition("@")[2]


def _refused(program: str, *words: str) -> str:
    """Runs docker. Returns an empty text if it succeeds, else the end of its output."""
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=ANSWERS_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (last_line(done.stderr) or f"exit code {done.returncode}") if done.returncode else ""
