"""The dataset of pretrain-d64: characters of a text of 17 symbols, or of generated sums."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset.prepared import PreparedDataset
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.experiments.spec import too_short
from gpufleet.job.kind.dataset import Given


class Characters(PreparedDataset[PretrainConfig]):
    """A dataset with one byte per character."""

    arguments: ClassVar[dict[str, str]] = {"text": "FILE.txt"}
    takes_tokenizer: ClassVar[bool] = False

    def prepare(self, folder: Path, supplied: Given) -> DatasetManifest:
        # imported here: a bill reads no data
        from gpufleet.job.experiments.pretrain.characters import prepare_characters

        return prepare_characters(folder, self.config.data, seed=self.config.seed, text=supplied.text, say=supplied.say)

    def differs(self, manifest: DatasetManifest, weights: Path | None) -> str:
        data = self.config.data
        held = manifest.facts.get("held_out", data.held_out)
        if held != data.held_out:
            return f"was prepared with data.held_out {held:g}, the file says {data.held_out:g}"
        counts = {split: manifest.facts.get(f"{split}_characters") for split in ("train", "validation")}
        return too_short(counts, "characters", 2 * data.sequence + 1, data.sequence)

    def read_by_steps(self, manifest: DatasetManifest) -> tuple[int, str, str]:
        return manifest.facts["train_characters"], "character", "steps"
