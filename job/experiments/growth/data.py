"""tinystories-growth's stories: downloaded, generated, or from a user's text."""

from __future__ import annotations

from pathlib import Path

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset.prepared import PreparedDataset
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.experiments.spec import too_short
from gpufleet.job.kind.dataset import Given


class Stories(PreparedDataset[GrowthConfig]):
    """Windows of tokens."""

    def prepare(self, folder: Path, supplied: Given) -> DatasetManifest:
        from gpufleet.job.experiments.dataset import prepare, sources  # imported here, because a bill reads no data

        config = self.config
        ids = sources.TextTokenizer(
            model_vocab=config.model.vocab, cache=folder.parent / "cache", file=supplied.tokenizer, say=supplied.say
        )
        source: sources.Source
        if supplied.text is not None:
            source = sources.TextFile(path=supplied.text, text_tokenizer=ids)
        elif config.data.source == "generated-stories":
            source = sources.Generated(count=config.data.stories, seed=config.seed)
        else:
            source = sources.TinyStories(
                count=config.data.stories, text_tokenizer=ids, cache=ids.cache, say=supplied.say
            )
        return prepare.prepare(folder, source, model_vocab=config.model.vocab, say=supplied.say)

    def is_own(self, made_from: str) -> bool:
        from gpufleet.job.experiments.dataset import sources

        return self.config.data.source == "tinystories" and made_from.startswith(sources.OWN_TEXT)

    def argument(self, *, own: bool = False) -> str:
        return "FILE.txt" if own else ""

    def differs(self, manifest: DatasetManifest, weights: Path | None) -> str:
        ids, sequence = manifest.facts["tokenizer"]["vocab"], self.config.data.sequence
        if ids > (known := self.config.model.vocab):
            return f"has {ids} ids, but model.vocab is {known}: raise it to {ids} or more, or prepare again"
        notes = {"validation": " (1 % of the stories)"}
        return too_short(manifest.facts["tokens"], "tokens", sequence + 1, sequence, notes)

    def read_by_steps(self, manifest: DatasetManifest) -> tuple[int, str, str]:
        return manifest.facts["tokens"]["train"], "token", "steps_per_phase"
