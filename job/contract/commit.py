"""A checkpoint's documents: commit.json on the disk, manifest.json and best.json in the bucket.

commit.json is the last file that the trainer writes into a folder. The supervisor adds hashes, run and cost to it and
publishes it as manifest.json. When the supervisor downloads a checkpoint, it turns the manifest back into commit.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpufleet.job import atomic
from gpufleet.job.contract import inputs, reading
from gpufleet.job.contract.bucket import CheckpointPlace, published
from gpufleet.job.contract.inputs import InputFile
from gpufleet.job.contract.reading import DoubtError, Fields, Name, Step
from gpufleet.job.contract.workdir import step_folder

Reason = Literal["timed", "best", "stop", "boundary", "final"]
COMMIT, BEST = "commit.json", "best.json"
# The supervisor writes this mark into a checkpoint's folder during an upload, so that the trainer does not change the
# folder.
HELD = ".uploading"
SCHEMA = 1
OF_COMMANDS = ("lines", "node", "borrowed", "named_by")  # fields that are omitted if they are empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Training diverged at one step, and resumed from the checkpoint of another step with lower learning rates."""

    lost_at: Step
    from_step: Step
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """commit.json. `val_loss` is set only if exactly this step was evaluated."""

    step: int
    config_sha256: str
    files: tuple[tuple[str, int], ...] = ()  # names relative to the checkpoint's folder, with sizes in bytes
    reason: Reason = "timed"
    phase: str = ""
    # the step from which training continues: `step`, or, if the phase ended early, the last step that the phase could
    # have had
    goes_on_from: int
    tokens: int = 0
    val_loss: float | None = None
    determinism: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, str] = field(default_factory=dict)  # the dataset's sha256 and source
    requires: tuple[Name, ...] = ()  # exports that must be uploaded before this checkpoint is valid
    base_weights: str | None = None
    retries: tuple[Retry, ...] = ()  # divergences in the run so far, oldest first
    torch: str = ""
    world_size: int = 1
    # For a command: the facts from its output (job/command/lines.py).
    lines: dict[str, Any] = field(default_factory=dict)
    # Fields for a command on several nodes.
    node: int = 0  # rank of the node whose part this is; 0 for the leader's part, and for a whole checkpoint
    borrowed: tuple[Name, ...] = ()  # names of files that other nodes wrote
    named_by: str = ""  # the leader's file by whose name the other nodes find their own files

    @property
    def folder(self) -> str:
        """The name of the checkpoint's folder, on the disk and in the bucket, below ckpt/."""
        return step_folder(self.step)

    @property
    def changing(self) -> tuple[Any, ...]:
        """The fields that may change after the checkpoint's files are written."""
        return self.val_loss, self.retries

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(size for _, size in self.files)

    def to_json(self) -> dict[str, Any]:
        files = [{"name": name, "bytes": size} for name, size in self.files]
        tree = {**asdict(self), "schema": SCHEMA, "files": files}
        return {key: tree[key] for key in tree if tree[key] or key not in OF_COMMANDS}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Commit:
        """Reads the JSON object. Raises DoubtError."""
        fields = Fields(tree)
        fields.schema(SCHEMA)
        step = fields.need("step", reading.step)
        files = tuple(
            (section.need("name", reading.name), section.need("bytes", reading.whole_number))
            for section in fields.sections("files")
        )
        if not files and not tree.get("node"):
            raise DoubtError("it names no files")
        goes_on_from = fields.take("goes_on_from", reading.step, step)
        val_loss = finite(tree.get("val_loss"))
        return reading.filled(cls, fields, step=step, files=files, goes_on_from=goes_on_from, val_loss=val_loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """Facts in a manifest for people: which attempt wrote it, when, and the run's cost by then."""

    code_sha256: str | None
    attempt: int
    instance: str
    spent_usd: str
    spent_s: str
    published_at: str  # in UTC, in ISO format


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The parts of a published checkpoint's manifest.json that a resume needs."""

    commit: Commit
    run: str
    files: tuple[InputFile, ...]
    parts: tuple[tuple[InputFile, ...], ...] = ()  # the other nodes' files, by their ranks from 1 on
    generation: int = 0  # the generation that wrote the checkpoint's folder: bucket.CheckpointPlace

    @property
    def place(self) -> CheckpointPlace:
        return CheckpointPlace(self.commit.step, self.generation)

    @property
    def objects(self) -> dict[str, InputFile]:
        """The checkpoint's files by their keys."""
        parts = enumerate((self.files, *self.parts))
        return {self.place.part_prefix(node) + file.name: file for node, files in parts for file in files}

    def read_by(self, node: int, of_rank: Callable[[str], bool]) -> dict[str, InputFile]:
        """The files that a node needs, by key: its own files, and those files of other nodes that are not only for one
        rank. If two nodes have a file with the same name, the node gets its own file.
        """
        own = node if node <= len(self.parts) else 0
        by_name: dict[str, tuple[str, InputFile]] = {}
        for other, files in sorted(enumerate((self.files, *self.parts)), key=lambda pair: (pair[0] == own, -pair[0])):
            for file in files:
                if other == own or not of_rank(file.name):
                    by_name[file.name] = (self.place.part_prefix(other) + file.name, file)
        return dict(by_name.values())

    def to_json(self, published: Published, required: Iterable[tuple[str, int]]) -> dict[str, Any]:
        """The JSON object, with the facts of its publication and the bytes of the exports that the checkpoint needs."""
        parts = [{"files": [asdict(file) for file in files]} for files in self.parts]
        return {
            **self.commit.to_json(),
            **asdict(published),
            "run": self.run,
            "files": [asdict(file) for file in self.files],
            "required_files": [{"name": name, "bytes": size} for name, size in required],
            **({"nodes": len(parts) + 1, "parts": parts} if parts else {}),
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any], generation: int = 0) -> Manifest:
        """Reads the JSON object. Raises DoubtError."""
        fields = Fields(tree)
        return cls(
            commit=Commit.from_json(tree),
            run=fields.need("run", reading.text),
            files=inputs.files(fields),
            parts=tuple(inputs.files(section) for section in (fields.sections("parts") if "parts" in tree else ())),
            generation=generation,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """best.json: the published step with the lowest validation loss of the newest phase."""

    place: CheckpointPlace
    phase: str
    val_loss: float | None

    @property
    def step(self) -> int:
        return self.place.step

    def to_json(self) -> dict[str, Any]:
        position = {"step": self.step, "phase": self.phase, "val_loss": self.val_loss}
        return {**position, "schema": SCHEMA, "manifest": self.place.manifest}

    @classmethod
    def from_bytes(cls, content: bytes | None) -> Best | None:
        """The document; None if it is missing or damaged. The next better step replaces a damaged document."""
        try:
            tree = reading.parse(content or b"")
            fields = Fields(tree)
            step = fields.need("step", reading.step)
            named = published([str(tree.get("manifest"))])
            return cls(
                place=named[0] if named and named[0].step == step else CheckpointPlace(step),
                phase=fields.take("phase", reading.text, ""),
                val_loss=finite(tree.get("val_loss")),
            )
        except DoubtError:
            return None


def read(folder: Path) -> Commit | None:
    """The commit of a checkpoint's folder. None if there is no valid commit; then the checkpoint does not exist."""
    try:
        return Commit.from_json(atomic.read_object(folder / COMMIT) or {})
    except DoubtError:
        return None


def finite(value: Any) -> float | None:
    """A validation loss that can be compared with others; None for anything else."""
    try:
        return reading.number(value)
    except DoubtError:
        return None
