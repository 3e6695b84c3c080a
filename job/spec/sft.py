"""sft-h100's run config: LoRA or full fine-tuning of a Llama- or Qwen-class model on packed chat examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from job.spec.common import Checkpoint, Compute, CosineAdamW, Decoder, Deliver, Guard, Log, TokenBatch, bounded


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Adapters on q, k, v, o, gate, up and down of every layer; scale = alpha / rank. With `template_tokens` also the
    rows of the chat template's tokens in embedding and head, which many a base has never trained.
    """

    rank: int = bounded(64, 1, 4096)
    alpha: float = bounded(16.0, 1e-3, 65536.0)  # at 0 nothing trains
    dropout: float = bounded(0.05, 0.0, 0.9)
    template_tokens: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatData:
    """Instruction and response pairs, tokenised once and packed whole into rows."""

    source: Literal["jsonl", "generated-pairs"] = "jsonl"  # what `gpufleet prepare` reads or makes
    examples: int = bounded(600_000, 1, 100_000_000)  # expected; the prepared dataset's own count replaces it
    tokens_per_example: float = bounded(361.0, 1.0, 131072.0)  # the same
    row: int = bounded(4096, 8, 131072)  # tokens per packed row
    fill: float = bounded(0.98, 0.01, 1.0)  # share of a packed row that is expected to be text; the same
    longest: int = bounded(1024, 8, 131072)  # tokens of one example, the rest is cut off and reported
    loss_on: Literal["response", "all"] = "response"
    held_out: float = bounded(0.01, 0.001, 0.5)  # share of examples, at least one of them


@dataclass(frozen=True, kw_only=True, slots=True)
class RowEval:
    """Validation on the same fixed packed rows; prompts are continued greedily at the end and stored."""

    every: int = bounded(1500, 1, 10_000_000)  # steps: about half an hour on one H100
    rows: int = bounded(512, 1, 1_000_000)
    prompts: int = bounded(100, 0, 10_000)  # held-out instructions to answer after training
    sample_tokens: int = bounded(128, 0, 4096)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """What the experiment does for speed, each switchable for the ablation table (docs/sft.md)."""

    pretokenised: bool = True  # packed ids; False: texts beside them, tokenised while training (prepare again)
    packing: bool = True  # rows filled with whole examples; False: one padded example per row (prepare again)
    async_checkpoints: bool = True  # training goes on while a save is written
    compile: bool = True  # of each block and the loss, on a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig:
    """sft-h100: an adapter (or all weights) trained on instructions, then merged and validated five ways."""

    epochs: int = bounded(3, 1, 1000)
    seed: int = bounded(1337, 0, 2**31 - 1)
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int | None = bounded(None, 1, 8)  # of the node; None = all of them
    method: Literal["lora", "full"] = "lora"
    model: Decoder = Decoder()
    lora: Lora = Lora()
    data: ChatData = ChatData()
    batch: TokenBatch = TokenBatch()
    optim: CosineAdamW = CosineAdamW()
    precision: Compute = Compute()
    measures: Measures = Measures()
    reshard_after_forward: bool = True  # full weights only: True = ZeRO-3, False = ZeRO-2
    deliver: Deliver = "best"
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    eval: RowEval = RowEval()
    log: Log = Log()
