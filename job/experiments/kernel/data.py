"""kernel-sft's pairs of a PyTorch program and a Triton kernel, from the user or generated."""

from __future__ import annotations

from pathlib import Path

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.experiments.tuning.data import PackedData
from gpufleet.job.kind.dataset import Given


class KernelPairs(PackedData[KernelConfig]):
    """Packed rows of pairs."""

    def prepare(self, folder: Path, supplied: Given) -> DatasetManifest:
        from gpufleet.job.experiments.dataset.rendering import tokenizer_of
        from gpufleet.job.experiments.kernel.pairs import prepare_kernels

        own = tokenizer_of(supplied.weights, supplied.tokenizer)
        return prepare_kernels(folder, self.config, text=supplied.text, tokenizer=own, say=supplied.say)

    def differs(self, manifest: DatasetManifest, weights: Path | None) -> str:
        """The other differences, and that a dataset is too short for a curriculum. A curriculum changes the data
        between two epochs, so an epoch must have at least one step; the trainer would refuse a shorter dataset.
        """
        if differs := super().differs(manifest, weights):
            return differs
        config = self.config
        rows, per_step = int(manifest.facts.get("rows", 0)), config.rows()
        if config.data.curriculum == "off" or not rows or rows * config.epochs > per_step:
            return ""
        return (
            f"has {rows} rows, of which {config.epochs} epochs are one step of {per_step}, and data.curriculum "
            f"{config.data.curriculum} acts between two steps: lower batch.tokens"
        )
