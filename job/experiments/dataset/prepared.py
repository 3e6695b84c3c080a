"""The common part of the ready-made jobs' datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast, get_args, get_type_hints

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.kind.common import Say
from gpufleet.job.kind.dataset import Dataset, Given
from gpufleet.job.kind.job import JobConfig

C = TypeVar("C", bound=JobConfig)


class PreparedDataset(Dataset[C]):
    """A folder with a dataset.json, written by prepare.py."""

    arguments: ClassVar[dict[str, str]] = {}  # the argument of `gpufleet prepare`, by data.source

    def accept(self, folder: Path, supplied: Given) -> DatasetManifest:
        # imported here, because a bill uses this class but reads no data
        from gpufleet.job.experiments.dataset import prepare

        manifest = prepare.checked(folder)
        supplied.say(f"{folder} is prepared already: {prepare.describe(manifest)}")
        return manifest

    def is_own(self, made_from: str) -> bool:
        return not self.source.startswith("generated-")

    def argument(self, *, own: bool = False) -> str:
        return self.arguments.get(self.source, "")

    def list_weights(self, folder: Path, say: Say) -> None:
        from gpufleet.job.experiments.dataset import weights

        manifest = weights.describe(folder)
        say(f"{folder}: {len(manifest.files)} files of base weights, {manifest.bytes / 1e9:.2f} GB")
        if omitted := weights.left_out(folder):
            say(f"{folder}: not needed and left out: {', '.join(omitted)}, {sum(omitted.values()) / 1e9:.2f} GB")

    @property
    def generated(self) -> str:  # type: ignore[override]
        return str(get_args(get_type_hints(type(self._data))["source"])[-1])

    @property
    def source(self) -> str:
        """The parameter data.source."""
        return str(self._data.source)

    @property
    def _data(self) -> Any:
        """The section `data` of the parameters."""
        return cast(Any, self.config).data
