"""Fine-tuning a published decoder on packed rows: what sft-h100 and kernel-sft answer alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from job.dataset.rendering import TEMPLATES, FileTokenizer, file_id, foreign
from job.spec.common import DecoderConfig, Say, TokenBatch
from job.spec.job import JobConfig

if TYPE_CHECKING:
    from job.dataset.prepare import DatasetManifest

_KEYS = {  # of the parameters, by the fact of packed rows
    "row": "data.row",
    "longest": "data.longest",
    "loss_on": "data.loss_on",
    "packing": "measures.packing",
    "template": "the chat template",
}


class TuningConfig(JobConfig):
    """Base weights, a batch of tokens, rows that hold whole examples."""

    __slots__ = ()

    model: DecoderConfig
    batch: TokenBatch

    several_ranks: ClassVar[bool] = True
    dataset_kind: ClassVar[str] = "packed"
    file_arguments: ClassVar[dict[str, str]] = {"jsonl": "FILE.jsonl"}

    def longest(self) -> int:
        """Tokens of one example."""
        row: int = self.data.row
        return row

    def rows(self) -> int:
        """Packed rows of a step."""
        row: int = self.data.row
        return self.batch.tokens // row

    def micro_setting(self) -> tuple[str, int]:
        return "micro_tokens", self.data.row

    def dataset_facts(self) -> dict[str, Any]:
        """The facts that dataset.json must state of rows that this job may train on."""
        return {"row": self.data.row, "longest": self.longest(), "template": TEMPLATES[self.model.family].name}

    def dataset_differs(self, manifest: DatasetManifest, weights: Path | None) -> str:
        ids = manifest.facts.get("vocab", 0)
        if ids > self.model.vocab:
            return f"has {ids} ids, model.vocab is {self.model.vocab}: raise it to {ids} or more, or prepare anew"
        beside = None if weights is None else weights / FileTokenizer.kind
        if not self.data.source.startswith("generated-") and beside is not None and beside.is_file():
            own, used = file_id(beside.read_bytes()), manifest.facts.get("tokenizer_id")
            if used != own:
                return f"was prepared with {used}, and {own} is the tokenizer.json of storage.base_weights"
        differing = "; ".join(self.facts_differ(manifest))
        return f"was prepared with {differing}" if differing else ""

    def facts_differ(self, manifest: DatasetManifest) -> Iterator[str]:
        """What prepared rows are of, and what the file says."""
        for fact, wanted in self.dataset_facts().items():
            there = manifest.facts.get(fact, "unknown")
            if fact == "texts" and there is not wanted:
                yield "measures.pretokenised true, the file says false"
            elif there != wanted:
                yield f"{_KEYS[fact]} {_yaml(there)}, the file says {_yaml(wanted)}"

    def report_found(self, folder: Path, manifest: DatasetManifest, weights: Path | None, say: Say) -> None:
        from job.dataset.packed import report  # brings numpy

        say(f"{folder} is prepared already")
        report(manifest, say)

    def weights_differ(self, folder: Path) -> str:
        from job.models import hf_config

        try:
            found = hf_config.read_shape(folder)
        except ValueError as error:
            return f"cannot be used: {error}."
        words = ", ".join(
            f"model.{key} {there}, the file says {here}"
            for key, there, here in hf_config.differences(found, self.model)
        )
        return (
            f"are of another model: {words}. Make job.parameters.model agree, or name other weights." if words else ""
        )

    def check_weights(self, folder: Path, say: Say) -> None:
        """Warns of weights that were tuned on other turns."""
        from job.models import hf_config

        hf_config.check(folder, self.model)
        if self.longest() > (most := hf_config.positions(folder)):
            say(
                f"warning: {folder}: made for {most:,} positions (max_position_embeddings), and examples may have "
                f"{self.longest():,} (data.longest): it has never seen those beyond"
            )
        template = TEMPLATES[self.model.family]
        if foreign(template, folder):
            say(
                f"warning: the chat template in {folder} never writes {template.end}, which closes a turn of"
                f" {template.name}, in which this data is written: who asks the tuned model by that template asks in"
                " another form than it has learned"
            )


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
