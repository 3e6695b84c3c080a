"""sft-h100's instructions and responses, from a JSONL file or generated, packed into rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.experiments.tuning.data import PackedData
from gpufleet.job.kind.dataset import Given
from gpufleet.job.text import counted


class Conversations(PackedData[SftConfig]):
    """Packed rows of conversations. Modules that read text are imported only when they are used, because a bill uses
    this class too.
    """

    def prepare(self, folder: Path, supplied: Given) -> DatasetManifest:
        from gpufleet.job.experiments.dataset.rendering import tokenizer_of
        from gpufleet.job.experiments.sft.conversations import prepare_sft

        own = tokenizer_of(supplied.weights, supplied.tokenizer)
        return prepare_sft(folder, self.config, text=supplied.text, tokenizer=own, say=supplied.say)

    def accept(self, folder: Path, supplied: Given) -> DatasetManifest:
        from gpufleet.job.experiments.dataset.rendering import FileTokenizer, tokenizer_of
        from gpufleet.job.experiments.sft.conversations import warn_of_untrained

        manifest = super().accept(folder, supplied)
        if (own := tokenizer_of(supplied.weights)) is not None:
            warn_of_untrained(self.config, FileTokenizer(own), supplied.say)
        return manifest

    def check_input(self, folder: Path) -> None:
        from gpufleet.job.experiments.sft.verdicts import open_judge

        open_judge(folder, self.config)

    def facts_differ(self, manifest: DatasetManifest) -> Iterator[str]:
        from gpufleet.job.experiments.dataset.packing import held_out_of

        yield from super().facts_differ(manifest)
        if held := manifest.facts.get("held_out_examples", 0):
            share = held_out_of(held + manifest.facts.get("examples", 0), self.config.data.held_out)
            if held != share:
                yield f"{counted(f'{held:,}', 'example')} held out, data.held_out in the file says {share:,}"
