"""A checkpoint as it is told: commit.json on the disk, manifest.json and best.json in the bucket.

The trainer writes commit.json last of a folder. The supervisor publishes it with sha256, run and money as
manifest.json, and makes commit.json of a manifest where it stages one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gpufleet.job import atomic
from gpufleet.job.contract import inputs, reading
from gpufleet.job.contract.bucket import manifest_key
from gpufleet.job.contract.inputs import InputFile
from gpufleet.job.contract.reading import DoubtError, Fields
from gpufleet.job.contract.workdir import step_folder

Reason = Literal["timed", "best", "stop", "boundary", "final"]
COMMIT, BEST = "commit.json", "best.json"
HELD = ".uploading"  # the supervisor's mark in a checkpoint's folder that it is sending: the trainer leaves it alone
SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Training was lost at one step, and went on from the checkpoint of another at lower rates (job/train/loop.py)."""

    lost_at: int
    from_step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """commit.json. `val_loss` only where exactly this step was evaluated."""

    step: int
    config_sha256: str
    files: tuple[tuple[str, int], ...] = ()  # names below the checkpoint's folder, and their bytes
    reason: Reason = "timed"
    phase: str = ""
    goes_on_from: int  # the same step but where the phase ended early: the last one that it could have had
    tokens: int = 0
    val_loss: float | None = None
    determinism: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, str] = field(default_factory=dict)  # sha256, source
    requires: tuple[str, ...] = ()  # what must be uploaded before this counts
    base_weights: str | None = None  # job/train/committed.py
    retries: tuple[Retry, ...] = ()  # of the run so far, oldest first
    torch: str = ""
    world_size: int = 1
    lines: dict[str, Any] = field(default_factory=dict)  # of a command: what its output had told, job/command/lines.py

    @property
    def folder(self) -> str:
        """Its name, on the disk and in the bucket, below ckpt/."""
        return step_folder(self.step)

    @property
    def changing(self) -> tuple[Any, ...]:
        """What may change after its files are written."""
        return self.val_loss, self.retries

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(size for _, size in self.files)

    def to_json(self) -> dict[str, Any]:
        files = [{"name": name, "bytes": size} for name, size in self.files]
        tree = {**asdict(self), "schema": SCHEMA, "files": files}
        return tree if self.lines else {key: tree[key] for key in tree if key != "lines"}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Commit:
        """Raises DoubtError."""
        fields = Fields(tree)
        fields.schema(SCHEMA)
        step = fields.need("step", reading.step)
        files = tuple(
            (each.need("name", reading.name), each.need("bytes", reading.whole_number))
            for each in fields.sections("files")
        )
        if not files:
            raise DoubtError("it names no files")
        return cls(
            step=step,
            config_sha256=fields.need("config_sha256", reading.text),
            files=files,
            reason=fields.take("reason", reading.choice(*get_args(Reason)), "timed"),
            phase=fields.take("phase", reading.text, ""),
            goes_on_from=fields.take("goes_on_from", reading.step, step),
            tokens=fields.take("tokens", reading.whole_number, 0),
            val_loss=finite(tree.get("val_loss")),
            determinism=fields.take("determinism", reading.mapping(reading.anything), {}),
            dataset=fields.take("dataset", reading.mapping(reading.text), {}),
            requires=fields.take("requires", reading.listed(reading.name), ()),
            base_weights=fields.take("base_weights", reading.text, None),
            retries=tuple(
                Retry(
                    lost_at=each.need("lost_at", reading.step),
                    from_step=each.need("from_step", reading.step),
                    reason=each.need("reason", reading.text),
                )
                for each in (fields.sections("retries") if "retries" in tree else ())
            ),
            torch=fields.take("torch", reading.text, ""),
            world_size=fields.take("world_size", reading.whole_number, 1),
            lines=fields.take("lines", reading.mapping(reading.anything), {}),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What a manifest tells people: which attempt wrote it, when, and what the run had cost by then."""

    code_sha256: str | None
    attempt: int
    instance: str
    spent_usd: str
    spent_s: str
    published_at: str  # UTC, ISO


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """manifest.json of a published checkpoint, as far as a resume needs it."""

    commit: Commit
    run: str
    files: tuple[InputFile, ...]

    def to_json(self, published: Published, required: Iterable[tuple[str, int]]) -> dict[str, Any]:
        """With who has published it, and the bytes of the exports that it relies on."""
        return {
            **self.commit.to_json(),
            **asdict(published),
            "run": self.run,
            "files": [asdict(file) for file in self.files],
            "required_files": [{"name": name, "bytes": size} for name, size in required],
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Manifest:
        """Raises DoubtError."""
        fields = Fields(tree)
        return cls(commit=Commit.from_json(tree), run=fields.need("run", reading.text), files=inputs.files(fields))


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """best.json: the published step with the lowest validation loss of the newest phase."""

    step: int
    phase: str
    val_loss: float | None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "schema": SCHEMA, "manifest": manifest_key(self.step)}

    @classmethod
    def from_bytes(cls, content: bytes | None) -> Best | None:
        """None where there is no such object, or one that says nothing: the next better step replaces it."""
        try:
            tree = reading.parse(content or b"")
            fields = Fields(tree)
            return cls(
                step=fields.need("step", reading.step),
                phase=fields.take("phase", reading.text, ""),
                val_loss=finite(tree.get("val_loss")),
            )
        except DoubtError:
            return None


def read(folder: Path) -> Commit | None:
    """The commit of a checkpoint's folder. None: there is none to be believed, so that checkpoint does not exist."""
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
