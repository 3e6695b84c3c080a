"""Keys in a stack's bucket: a run's objects are below <run>/, and shared objects are beside that folder. The names that
are the same in bucket and work folder are in workdir.py, and the names of a checkpoint's parts in commit.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from gpufleet.job.contract import workdir

# Keys below the run's prefix.
DONE = workdir.DONE  # the object that is written last, which says that the run is over
ASKED = workdir.STOP  # `gpufleet stop` writes this object to ask the run to end
# written by the first on-demand node, which takes the run over; spot nodes then save and end
FALLBACK = "fallback.json"
# The names of the manifest of a published checkpoint, and of the manifest of a checkpoint whose files do not match it.
MANIFEST, REJECTED = "manifest.json", "rejected.txt"
ATTEMPTS, HEARTBEATS, BOOT_LOGS = "attempts/", "heartbeat/", "boot/"
GANG = "gang/"  # for a run on several nodes: which nodes exist, and which train together
# an object with the fleet's id exists here after the program has made the fleet, so that the stack's state names it
FLEETS = "known_fleet/"
CHECKPOINTS, EXPORTS, FINAL, STAGES, SCALARS = (
    f"{folder}/" for folder in (workdir.CHECKPOINTS, workdir.EXPORTS, workdir.FINAL, workdir.STAGES, workdir.SCALARS)
)
MANIFEST_KEY = re.compile(rf"{CHECKPOINTS}step_(\d{{8}})/(?:g(\d{{6}})/)?{re.escape(MANIFEST)}")
_CHECKPOINT_KEY = re.compile(rf"{CHECKPOINTS}step_(\d{{8}})/(?:g(\d{{6}})/)?.+")
GENERATION_KEY = re.compile(rf"{GANG}(\d{{6}})\.json")
LET_GO_KEY = re.compile(rf"{GANG}(\d{{6}})\.let_go_(\d{{3}})\.json")
PRESENCE_KEY = re.compile(rf"{GANG}nodes/([\w.-]+)\.json")
_NODE_KEY = re.compile(rf"{ATTEMPTS}([\w.-]+)\.json|{HEARTBEATS}([\w.-]+)\.jsonl")

# Keys beside the folders of runs. No run may have one of these names.
INPUTS, GRAPHS = workdir.INPUTS, workdir.GRAPHS
ARCHIVE, CODE = "job.tar.gz", "code.tar.gz"  # gpufleet's job package and a command's code, below inputs/<its sha256>/


def stage_of(run: str, stage: str) -> str:
    """The folder of another stage, from the folder of one stage."""
    return f"{run.partition('/')[0]}/{stage}"


def attempt_key(instance: str) -> str:
    return f"{ATTEMPTS}{instance}.json"


def heartbeat_key(instance: str) -> str:
    return f"{HEARTBEATS}{instance}.jsonl"


def boot_log_key(instance: str) -> str:
    """The key of the boot log that a node leaves when it ends."""
    return f"{BOOT_LOGS}{instance}.log"


def node_log_key(instance: str) -> str:
    """The key of the log of a node that did not lead its generation."""
    return f"log/{instance}.log"


def presence_key(instance: str) -> str:
    return f"{GANG}nodes/{instance}.json"


def generation_key(number: int) -> str:
    return f"{GANG}{number:06d}.json"


def let_go_key(number: int, count: int) -> str:
    """The key of the message that waiting nodes will end, by generation and by the number of such messages."""
    return f"{GANG}{number:06d}.let_go_{count:03d}.json"


def fleet_key(fleet: str) -> str:
    """The key of a fleet that the stack's state names."""
    return f"{FLEETS}{fleet}"


def node_of(key: str) -> str | None:
    """The instance whose record or heartbeats lie at `key`; None for any other key."""
    match = _NODE_KEY.fullmatch(key)
    return match and (match[1] or match[2])


class CheckpointPlace(NamedTuple):
    """The place of a checkpoint's files. With several nodes, each generation has its own folder below the step's, so
    that no generation overwrites the files of another. With one node, the number is 0, which stands for the step's own
    folder; if a node has already published the same step, it is one more than that node's number.
    """

    step: int
    generation: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of the checkpoint's keys."""
        inner = f"g{self.generation:06d}/" if self.generation else ""
        return f"{CHECKPOINTS}{workdir.step_folder(self.step)}/{inner}"

    @property
    def manifest(self) -> str:
        """The key of the manifest that publishes the checkpoint."""
        return self.prefix + MANIFEST

    def part_prefix(self, node: int) -> str:
        """The prefix of the files that one of several nodes has written; `node` is its rank."""
        return f"{self.prefix}node_{node:03d}/" if node else self.prefix

    def part(self, node: int) -> str:
        """The key of the list of that node's files; a file that is in no list does not belong to the checkpoint."""
        return f"{self.prefix}node_{node:03d}.json"


def checkpoint_place(key: str) -> CheckpointPlace | None:
    """The checkpoint to which an object belongs; None if it belongs to none."""
    match = _CHECKPOINT_KEY.fullmatch(key)
    return match and CheckpointPlace(int(match[1]), int(match[2] or 0))


def published(keys: Iterable[str]) -> list[CheckpointPlace]:
    """The checkpoints with a manifest, lowest step first, and within a step the lowest generation."""
    matches = filter(None, map(MANIFEST_KEY.fullmatch, keys))
    return sorted(CheckpointPlace(int(match[1]), int(match[2] or 0)) for match in matches)


def has_one_writer(key: str) -> bool:
    """Whether only one node ever writes this key, so that a put needs no condition. This is so if the key contains that
    node's name, or is in the folder of a generation, which has only one leader.
    """
    place = checkpoint_place(key)
    is_file = place is not None and place.generation > 0 and key != place.manifest
    return is_file or key.startswith((GANG, ATTEMPTS, HEARTBEATS, "log/"))


def input_key(sha256: str, file: str = "") -> str:
    """The key of a file of an input. The key contains the input's hash, so that runs share the file. If no `file` is
    given, the input's prefix.
    """
    return f"{INPUTS}/{sha256}/{file}"
