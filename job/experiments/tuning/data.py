"""The data for fine-tuning: packed rows, and the base weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, TypeVar

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset.prepared import PreparedDataset
from gpufleet.job.experiments.models import hf_config
from gpufleet.job.experiments.tuning.spec import TuningConfig
from gpufleet.job.kind.common import Say
from gpufleet.job.kind.dataset import Given

T = TypeVar("T", bound=TuningConfig)
_KEYS = {  # the parameter by the name of the fact about packed rows
    "row": "data.row",
    "longest": "data.longest",
    "loss_on": "data.loss_on",
    "packing": "measures.packing",
    "template": "the chat template",
}


class PackedData(PreparedDataset[T]):
    """Rows that contain whole examples. The modules that read text are imported only when they are used, because a bill
    reads no text.
    """

    arguments: ClassVar[dict[str, str]] = {"jsonl": "FILE.jsonl"}

    def accept(self, folder: Path, supplied: Given) -> DatasetManifest:
        from gpufleet.job.experiments.dataset import prepare
        from gpufleet.job.experiments.dataset.packed import report

        manifest = prepare.checked(folder)
        supplied.say(f"{folder} is prepared already")
        report(manifest, supplied.say)
        return manifest

    def differs(self, manifest: DatasetManifest, weights: Path | None) -> str:
        from gpufleet.job.experiments.dataset.rendering import FileTokenizer, file_id

        ids = manifest.facts.get("vocab", 0)
        if ids > (known := self.config.model.vocab):
            return f"has {ids} ids, but model.vocab is {known}: raise it to {ids} or more, or prepare again"
        beside = None if weights is None else weights / FileTokenizer.kind
        if not self.source.startswith("generated-") and beside is not None and beside.is_file():
            own, used = file_id(beside.read_bytes()), manifest.facts.get("tokenizer_id")
            if used != own:
                return f"was prepared with {used}, but {own} is the tokenizer.json of storage.base_weights"
        differing = "; ".join(self.facts_differ(manifest))
        return f"was prepared with {differing}" if differing else ""

    def facts_differ(self, manifest: DatasetManifest) -> Iterator[str]:
        """The differences between the prepared rows and the file."""
        for fact, wanted in self.config.dataset_facts().items():
            there = manifest.facts.get(fact, "unknown")
            if fact == "texts" and there is not wanted:
                yield "measures.pretokenised true, the file says false"
            elif there != wanted:
                yield f"{_KEYS[fact]} {_yaml(there)}, the file says {_yaml(wanted)}"

    def weights_differ(self, folder: Path) -> str:
        try:
            shape = hf_config.read_shape(folder)
        except ValueError as error:
            return f"cannot be used: {error}."
        words = ", ".join(
            f"model.{key} {there}, the file says {here}"
            for key, there, here in hf_config.differences(shape, self.config.model)
        )
        return (
            f"are of another model: {words}. Make job.parameters.model agree, or name other weights." if words else ""
        )

    def check_weights(self, folder: Path, say: Say) -> None:
        """Warns of weights that were tuned on another chat template."""
        from gpufleet.job.experiments.dataset.rendering import TEMPLATES, foreign

        config = self.config
        hf_config.check(folder, config.model)
        if config.longest() > (most := hf_config.positions(folder)):
            say(
                f"warning: {folder}: made for {most:,} positions (max_position_embeddings), but examples may have "
                f"{config.longest():,} (data.longest): the model has never seen later positions"
            )
        template = TEMPLATES[config.model.family]
        if foreign(template, folder):
            say(
                f"warning: the chat template in {folder} never writes {template.end}, which closes a turn of"
                f" {template.name}, in which this data is written: who asks the tuned model by that template asks in"
                " another form than it has learned"
            )


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
