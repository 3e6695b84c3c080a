"""The phases after an adapter's training: the merge in fp32, its validation, stored answers, and the files to keep.

Casting merged weights to bf16 rounds part of the adapter's effect away, so these losses judge the merge first:

| loss         | weights                     | products | rows               |
| ------------ | --------------------------- | -------- | ------------------ |
| base         | base                        | bf16     | all of validation  |
| adapter      | base and adapter            | bf16     | all of validation  |
| merged_bf16  | merged in fp32, then bf16   | bf16     | all of validation  |
| adapter_fp32 | base and adapter            | fp32     | 32 of them         |
| merged_fp32  | merged in fp32              | fp32     | the same 32        |

The fp32 merge must match the adapter within 1e-5 nats. Otherwise no merge is delivered, and the run fails; its adapter
and losses are kept. The bf16 merge is delivered if it is within 0.002 nats of the adapter; otherwise the fp32 merge is.
stages/sft.jsonl has finished results, so a restart repeats neither a validation nor an answer. With `method: full`
there is nothing to merge: one loss, answers, weights in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from gpufleet.job import ledger
from gpufleet.job.contract import reading
from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.contract.reading import Fields
from gpufleet.job.contract.workdir import FINAL, STAGES
from gpufleet.job.experiments.dataset import weights as base_weights
from gpufleet.job.experiments.dataset.packed import PROMPTS
from gpufleet.job.experiments.dataset.rendering import open_chat_tokenizer
from gpufleet.job.experiments.engine.experiment import Phase, Session, Weights
from gpufleet.job.experiments.engine.packed_rows import PackedBatches
from gpufleet.job.experiments.models import hf, lora
from gpufleet.job.experiments.models.blocks import DTYPES
from gpufleet.job.experiments.models.decoder import Decoder
from gpufleet.job.experiments.models.generate import generate
from gpufleet.job.experiments.sft.spec import VALIDATION_ROWS, SftConfig, answers_at_once
from gpufleet.job.experiments.tuning import run as tuning
from gpufleet.job.text import counted

MATCH = 1e-5  # nats by which the fp32 merge may differ from the adapter
CLOSE = 0.002  # nats by which the bf16 merge may differ from the adapter
DONE = Path(STAGES) / "sft.jsonl"


class SftRun(Protocol):
    """The parts of the experiment that the phases after training need."""

    session: Session
    config: SftConfig
    manifest: DatasetManifest
    batches: PackedBatches
    phases: Sequence[Phase]
    trained: Weights
    module: Decoder | None
    outcome: Mapping[str, Any]


class MergeDiffersError(ValueError):
    """The merged weights differ from the trained weights by the stated nats. The adapter itself is correct."""

    def __init__(self, nats: float) -> None:
        super().__init__(
            f"the weights merged in fp32 differ from base and adapter by {nats:.1e} nats, more than {MATCH:g}: no"
            " merged weights were written. The trained adapter is correct: it is in final/adapter/, losses and"
            " answers are in results.json. Load base and adapter together, as PEFT does, or merge them elsewhere"
        )


class MergeVariant(NamedTuple):
    """One line of the table above."""

    name: str
    mode: lora.Mode
    compute: torch.dtype
    all_rows: bool


VARIANTS = (
    MergeVariant("base", "base", torch.bfloat16, True),
    MergeVariant("adapter", "adapter", torch.bfloat16, True),
    MergeVariant("merged_bf16", "merged", torch.bfloat16, True),
    MergeVariant("adapter_fp32", "adapter", torch.float32, False),
    MergeVariant("merged_fp32", "merged", torch.float32, False),
)


class FinishedVariants:
    """The finished results of this and earlier attempts for these weights, by name. The file is on rank 0."""

    def __init__(self, path: Path, session: Session, weights: str) -> None:
        self._session, self._weights = session, weights
        self._ledger = ledger.Ledger(path) if session.world.first else None
        entries = self._ledger.read(_entry) if self._ledger is not None else []
        self._kept = {name: value for name, of, value in entries if of == weights}

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """The kept result with this name. If there is none, calls `make` on all ranks, and keeps and returns its
        result. The result may be None on ranks other than 0.
        """
        if self._session.world.agree(name in self._kept):
            return self._kept.get(name)
        value = make()
        if self._ledger is not None:
            self._kept[name] = value
            self._ledger.append({"name": name, "weights": self._weights, "value": value})
        return value


def finish(sft: SftRun, module: Decoder) -> dict[str, Any]:
    """Does all phases after training; returns the entries for results.json (on rank 0). Merged weights that do not
    match are not written. Raises Stopped between two micro-batches or tokens.
    """
    session, adapter = sft.session, sft.config.method == "lora"
    trained = tuning.of_weights(*sft.trained)
    done = FinishedVariants(session.workdir / DONE, session, trained)
    module.eval()
    if adapter:  # written first, so that the trained adapter exists even if something fails later
        keep_adapter(sft, module)
    losses: dict[str, Any] = {}
    for variant in VARIANTS if adapter else ():
        losses[variant.name] = done.get(f"loss {variant.name}", partial(_loss, sft, module, variant))
    answers = _answers(sft, module, done)
    report: dict[str, Any] | None = None
    dtype: torch.dtype | None = torch.bfloat16
    if not adapter:
        losses = {"trained": {"loss": sft.trained.val_loss, "rows": len(sft.batches.fixed(sft.config.eval.rows))}}
        tensors = tuning.gathered(session, module)
    else:
        if session.world.first:
            report, dtype = _judge(losses, session.say)
        if not sft.config.lora.shard_base:
            if not session.world.first:
                return {}  # every rank has all tensors, and only the first rank writes them
        elif not session.world.agree(dtype is not None):
            dtype = None
        tensors = lora.merged_weights(module)
    entries = {"losses": losses, "merge": report}
    if dtype is None:
        return {**entries, "answers": answers}
    meta = {"experiment": "sft-h100", "phase": sft.phases[0].name, **sft.trained._asdict(), **sft.outcome}
    meta |= {"trained": trained, **entries}
    digest = tuning.deliver(session, sft.manifest, sft.config, tensors, dtype, meta)
    return {**entries, "answers": answers, "weights_sha256": digest}


def keep_adapter(sft: SftRun, module: Decoder) -> None:
    if sft.session.world.first:
        base = base_weights.name_of(sft.session.inputs)
        hf.write_adapter(sft.session.workdir / FINAL / "adapter", module, sft.config.lora, base)


@torch.no_grad()
def _entry(tree: dict[str, Any]) -> tuple[str, str, Any]:
    """Name, weights and value of a line of the file. Raises DoubtError."""
    fields = Fields(tree)
    value = fields.need("value", reading.anything)
    return fields.need("name", reading.text), fields.need("weights", reading.text), value


def _loss(sft: SftRun, module: Decoder, variant: MergeVariant) -> dict[str, Any]:
    """Mean loss in nats of one line of the table, over all ranks."""
    rows = sft.batches.fixed(sft.config.eval.rows if variant.all_rows else min(VALIDATION_ROWS, sft.config.eval.rows))
    ladder = sft.config.ladder(sft.session.world.size)
    micro_rows = ladder[min(sft.session.rung, len(ladder) - 1)].micro if variant.compute == torch.bfloat16 else 1
    work = sft.batches.work("validation", rows, micro_rows)
    total = torch.zeros((), dtype=torch.float64, device=sft.session.device.torch)
    before = module.compute_dtype
    module.compute_dtype = variant.compute
    lora.set_mode(module, variant.mode)
    try:
        sft.session.check_stop()
        for micro in sft.session.evaluation(work):
            loss_sum = module(*micro.inputs).loss_sum
            assert loss_sum is not None
            total += loss_sum.double()
    finally:
        module.compute_dtype = before
        lora.set_mode(module, "adapter")
    loss = sft.session.world.sum(total).item() / work.total
    compute = str(variant.compute).removeprefix("torch.")
    sft.session.say(
        f"validation of {variant.name}: {loss:.6f} nats ({counted(len(rows), 'row')}, products in {compute})"
    )
    return {"loss": loss, "rows": len(rows), "compute": compute}


def _judge(losses: dict[str, Any], say: Callable[[str], None]) -> tuple[dict[str, Any], torch.dtype | None]:
    """The report on the merge, and the dtype to deliver; None to deliver no merge."""
    exact = abs(losses["merged_fp32"]["loss"] - losses["adapter_fp32"]["loss"])
    rounded = abs(losses["merged_bf16"]["loss"] - losses["adapter"]["loss"])
    matches, close = exact <= MATCH, rounded <= CLOSE
    name = None if not matches else "bf16" if close else "fp32"
    say(
        f"merge: fp32 differs from the adapter by {exact:.1e} nats (limit {MATCH:g}: "
        f"{'matches' if matches else 'DOES NOT MATCH'}), bf16 by {rounded:.1e} (limit {CLOSE:g}); "
        f"the deliverable is {name or 'the adapter alone'}"
    )
    report = {
        "fp32_difference": exact,
        "fp32_matches": matches,
        "bf16_difference": rounded,
        "bf16_close": close,
        "deliverable": name,
    }
    return report, None if name is None else DTYPES[name]


def _answers(sft: SftRun, module: Decoder, done: FinishedVariants) -> list[dict[str, Any]]:
    """Answers to held-out questions, generated greedily by base and adapter."""
    session, config = sft.session, sft.config
    asked = ledger.read(session.data / PROMPTS)[: config.eval.prompts]
    if not asked or not config.eval.sample_tokens:
        return []
    tokenizer = open_chat_tokenizer(sft.manifest.facts["tokenizer"], session.data)
    stop = {int(sft.manifest.facts["stop"])}
    answers: list[dict[str, Any]] = []
    together = answers_at_once(config)
    for start in range(0, len(asked), together):
        part = asked[start : start + together]

        def answer(part: list[dict[str, Any]] = part) -> list[dict[str, Any]]:
            prompts = [item["tokens"] for item in part]
            written = generate(
                module,
                prompts,
                config.eval.sample_tokens,
                stop=stop,
                heed=session.check_stop,
                agree=session.world.agree,
            )
            return [
                {"prompt": item["prompt"], "answer": tokenizer.decode(ids), "reference": item["reference"]}
                for item, ids in zip(part, written, strict=True)
            ]

        answers += done.get(f"answers {start}", answer) or []
        session.say(f"answers: {start + len(part)} of {len(asked)}")
    for item in answers[:3]:
        session.say(f"  {item['prompt']!r} -> {item['answer']!r}")
    return answers
