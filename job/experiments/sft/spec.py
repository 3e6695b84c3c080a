"""sft-h100: LoRA or all weights of a decoder on packed rows. A micro-batch counts rows of `data.row` tokens.

With a frozen base, a token needs 4 FLOP per base parameter (for the forward pass, and the gradient of the input), 6 per
adapter parameter, and those of attention within its own example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from gpufleet.job.experiments.models.config import FP8_CAPABILITY, DecoderConfig, Lora
from gpufleet.job.experiments.spec import CosineAdamW, rate_in_words, warmup_doubts
from gpufleet.job.experiments.tuning import spec as tuning
from gpufleet.job.experiments.tuning.spec import TokenBatch, TuningConfig
from gpufleet.job.kind import common

VALIDATION_ROWS = 32  # rows on which adapter and merged weights are compared in fp32
# number of prompts that each rank answers in one batch, and of tokens in that batch
ANSWERS_AT_ONCE, ANSWERED_TOKENS = 20, 23_040
BASE_BYTES = 2  # bytes of a frozen parameter in bf16, whatever the dtype of the products
# Compiled steps keep this share of the memory that autograd keeps, without that of adapters (measured with 8 B on an
# H100 and an H200; bench/results/gpu.md).
COMPILED_KEEPS = 0.885
# How much longer a step takes if it is not compiled: 630 instead of 533 ms on an H100, 576 instead of 506 on an H200
# (bench/results/gpu.md).
EAGER = 1.18
# Tokens that one core of a host tokenises in a millisecond during training (bench/results/sft.md); and bytes per token
# of the text that is stored beside the ids: 600 k instruction examples of 361 tokens are 870 MB.
TOKENS_PER_MS, TEXT_BYTES = 540, 4.0
JUDGE_BASE = "base"  # the value of `eval.judge` for the base weights
# Tokens of the judge's own text and chat template, by the tokenizers of the three families; and bytes per token of a
# forward pass without gradients: keys and values of all layers, and one layer's results (570 kB with 72 B).
JUDGE_TOKENS, JUDGE_TOKEN_BYTES = 250, 1_000_000
LOAD_GB_S = 1.0  # assumed rate at which the files of a judge, or of the base again, reach the GPU
FP32_COST = 15  # how much longer a token takes in true fp32 than with bf16 tensor cores: an H100 has 67 and 989 TFLOP/s


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatData:
    """Instruction and response pairs, tokenised once and packed whole into rows."""

    source: Literal["jsonl", "generated-pairs"] = "jsonl"  # what `gpufleet prepare` reads or generates
    # the expected number, which that of the prepared dataset replaces
    examples: int = common.bounded(600_000, 1, 100_000_000)
    # the expected number, which that of the prepared dataset replaces
    tokens_per_example: float = common.bounded(361.0, 1.0, 131072.0)
    row: int = common.bounded(4096, 8, 131072)  # tokens per packed row
    # expected share of text in a packed row, which that of the prepared dataset replaces
    fill: float = common.bounded(0.98, 0.01, 1.0)
    # the most tokens of an example; further tokens are cut off, and this is reported
    longest: int = common.bounded(1024, 8, 131072)
    loss_on: Literal["response", "all"] = "response"
    held_out: float = common.bounded(0.01, 0.001, 0.5)  # share of examples, at least one example


@dataclass(frozen=True, kw_only=True, slots=True)
class RowEval:
    """Each validation uses the same packed rows. After training, the model continues prompts greedily, and the answers
    are stored.
    """

    every: int = common.bounded(1500, 1, 10_000_000)  # steps between two evaluations; about half an hour on one H100
    rows: int = common.bounded(512, 1, 1_000_000)
    prompts: int = common.bounded(100, 0, 10_000)  # number of held-out instructions that are answered after training
    sample_tokens: int = common.bounded(128, 0, 4096)
    # The model that compares each answer with that of the data: `base` for the base weights, or the name of an input or
    # of an earlier stage. If empty, the answers are only stored.
    judge: str = common.added_later("")
    judge_parameters: float = common.added_later(8e9, 1.0, 1e12)  # the number of parameters of a judge that is an input


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """The options of the experiment that make it faster. Each can be switched off for the ablation table
    (docs/sft.md).
    """

    # whether rows of ids are read; if not, texts are tokenised during training (then prepare the dataset again)
    pretokenised: bool = True
    # whether rows are filled with whole examples; if not, each row is one padded example (then prepare the dataset
    # again)
    packing: bool = True
    async_checkpoints: bool = True  # whether training goes on while a save is written
    compile: bool = True  # whether each block and the loss are compiled on a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class SftPrecision(common.Compute):
    """`base`: how the matrices of a frozen base are stored during training. With fp8, each output row has a scale, and
    a GPU quantises the activations of each token. The adapter is merged into the base in bf16.
    """

    base: Literal["bf16", "fp8"] = common.added_later("bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig(TuningConfig):
    """sft-h100: an adapter (or all weights) trained on instructions, then merged and validated five ways."""

    trainer: ClassVar[str] = "gpufleet.job.experiments.sft.run:Sft"
    dataset_class: ClassVar[str] = "gpufleet.job.experiments.sft.data:Conversations"
    leaves_speed: ClassVar[tuple[str, ...]] = (
        "epochs", "data.examples", "data.held_out", "lora.alpha", "eval.judge", "eval.judge_parameters",
    )  # fmt: skip

    epochs: int = common.bounded(3, 1, 1000)
    seed: int = common.bounded(1337, 0, 2**31 - 1)
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int | None = common.bounded(None, 1, 8)  # GPUs of the node; None = all
    method: Literal["lora", "full"] = "lora"
    model: DecoderConfig = DecoderConfig()
    lora: Lora = Lora()
    data: ChatData = ChatData()
    batch: TokenBatch = TokenBatch()
    optim: CosineAdamW = CosineAdamW()
    precision: SftPrecision = SftPrecision()
    measures: Measures = Measures()
    reshard_after_forward: bool = True  # only with `method: full`: True for ZeRO-3, False for ZeRO-2
    deliver: common.Deliver = common.added_later("best", version="0.1.0")
    checkpoint: common.Checkpoint = common.Checkpoint()
    guard: common.Guard = common.added_later(common.Guard(), version="0.1.0")
    eval: RowEval = RowEval()
    log: common.Log = common.Log()

    @property
    def demands(self) -> common.Demands:  # type: ignore[override]
        return common.Demands(
            inputs=(("eval.judge", self.eval.judge),) if judge_is_input(self) else (),
            capability=FP8_CAPABILITY if narrow_base(self) else 0.0,
        )

    def problems(self) -> list[tuple[str, str]]:
        problems = tuning.problems(self.model)
        if self.eval.judge and not (self.eval.prompts and self.eval.sample_tokens):
            problems.append(("eval.judge", "none unless eval.prompts and eval.sample_tokens are above 0"))
        if self.data.longest > self.data.row:
            problems.append(("data.longest", f"at most data.row, {self.data.row}: examples are packed whole"))
        if self.lora.shard_base and (self.method == "full" or self.lora.template_tokens):
            whole = "all weights are cut over the GPUs anyway" if self.method == "full" else "not with template_tokens"
            problems.append(("lora.shard_base", f"false here: {whole}"))
        if narrow_base(self) and (self.method == "full" or self.lora.shard_base):
            whole = "all weights are trained" if self.method == "full" else "lora.shard_base does not split fp8 weights"
            problems.append(("precision.base", f"bf16 here: {whole}"))
        problems += tuning.batch_problems(self.batch, self.data.row, self.optim.betas)
        return problems

    @common.remembered
    def phases(self) -> tuple[common.PhaseSize, ...]:
        """`train`, then `merge`: five validation losses and the stored answers. With a judge, then `judge`, whose work
        is counted in tokens of the trained model.
        """
        m, rows = self.model, self.batch.tokens // self.data.row
        train_tokens = self.epochs * self.data.examples * (1 - self.data.held_out) * example_tokens(self)
        count = tuning.steps(train_tokens, rows * self.data.row * fill(self))
        total = tuning.parameters(m)
        sharded = self.method == "full"
        adapters = 0 if sharded else trained(self)
        evaluation = self.eval.rows * self.data.row
        sizes = {
            "kind": "all weights" if sharded else "adapter",
            "params_total": total + adapters,
            "params_active": total + adapters,
            "params_trained": trained(self),
            "flops_per_token": flops_per_token(self),
            "optimizer_traffic_bytes_per_param": 28,
            "tokens_per_step": self.batch.tokens,
            "forward_share": forward_share(self),
            "launch_ms": tuning.LAUNCH_MS,
            "row_host_ms": 0.0 if self.measures.pretokenised else self.data.row * fill(self) / TOKENS_PER_MS,
            "waits_for_saves": self.waits_for_saves(),
            "slower": 1.0 if self.measures.compile or self.device == "cpu" else EAGER,
            "micro_launch_ms": m.layers * (tuning.LAYER_LAUNCH_MS if sharded else tuning.LORA_LAUNCH_MS),
            "sharded": sharded,
            "gathered_bytes": tuning.gathered_bytes(m, self.precision.compute, again=self.reshard_after_forward)
            if sharded
            else tuning.gathered_bytes(m, "bf16", again=True) * self.lora.shard_base,
        }
        train = common.PhaseSize(
            name="train",
            steps=count,
            evaluations=-(-count // self.eval.every),
            evaluation_tokens=evaluation,
            **sizes,  # type: ignore[arg-type]
        )
        exact = 2 * min(VALIDATION_ROWS, self.eval.rows) * FP32_COST * self.data.row
        merge = common.PhaseSize(
            name="merge",
            steps=0,
            forward_tokens=0
            if sharded
            else 3 * evaluation + exact,  # with all weights there is only one loss, and the last evaluation gave it
            decode_steps=self.eval.sample_tokens * -(-self.eval.prompts // answers_at_once(self)),
            # every GPU reads the base again in bf16
            gpu_s=BASE_BYTES * total / common.GB / LOAD_GB_S * narrow_base(self),
            workers=1,
            **sizes,  # type: ignore[arg-type]
        )
        if not self.eval.judge:
            return (train, merge)
        pairs = 2 * self.eval.prompts * (example_tokens(self) + _compared_tokens(self))
        judge = common.PhaseSize(
            name="judge",
            steps=0,
            forward_tokens=int(pairs * judge_parameters(self) / total),
            gpu_s=BASE_BYTES * judge_parameters(self) / common.GB / LOAD_GB_S * judge_is_loaded(self),
            workers=1,
            **sizes,  # type: ignore[arg-type]
        )
        return (train, merge, judge)

    @common.remembered
    def memory(self, phase_index: int, rung: common.Rung, ranks: int = 1) -> common.Memory:
        """The memory needed. With LoRA: the base in bf16 on every rank, or sharded, with gathered tables and two
        gathered layers; and the adapters with fp32 state. If products are in fp32, the base's matrices are cast, and
        the casts stay in memory until the backward pass (with checkpointing, only those of one layer). A base in
        fp8 is smaller during training, but not afterwards, when it is bf16 again. With all weights: the fp32 state,
        sharded over the ranks, and the gathered weights in the compute dtype (two layers with ZeRO-3, all layers with
        ZeRO-2). A judge takes the place of the trained model, except of parts that are sharded.
        """
        m = self.model
        compute = 2 if self.precision.compute == "bf16" else 4
        total, own = tuning.parameters(m), trained(self)
        if self.method == "lora":
            layers = 0 if compute == BASE_BYTES else 1 if rung.checkpointing else m.layers
            cast = layers * tuning.layer_matmul(m) + (m.vocab * m.width if layers else 0)
            base = tuning.frozen_bytes(m, ranks if self.lora.shard_base else 1) + own * 4
            base += m.vocab * m.width * compute if trains_head(self) else 0  # a copy of the head with its trained rows
            if narrow_base(self) and phase_index == 0:
                base -= tuning.fp8_saves(m)
                # one matrix at a time is dequantised, and none is kept
                cast += m.width * max(m.ffn, m.heads * m.head_dim) - layers * tuning.layer_matmul(m)
            weights, gradients, moments = float(base + cast * compute), float(own * 4), float(own * 8)
            adapters = self.lora.rank
        else:
            weights, gradients, moments = tuning.whole_state(
                m, compute, ranks, reshard=self.reshard_after_forward, checkpointing=rung.checkpointing
            )
            adapters = 0
        if phase_index == 2:
            beside = weights if self.method == "full" else base if self.lora.shard_base else 0.0
            weights = beside + BASE_BYTES * judge_parameters(self) if judge_is_loaded(self) else base
            activations = float(JUDGE_TOKEN_BYTES * (self.longest() + _compared_tokens(self)))
            return common.in_gb(weights=weights, gradients=0.0, moments=0.0, activations=activations, logits=0.0)
        tokens = rung.micro * self.data.row if phase_index == 0 else self.data.row
        activations = tuning.activations(m, tokens, compute, rung, adapters=adapters)
        if phase_index == 1:
            gradients = moments = 0.0
            activations = tokens * tuning.layer_activation_bytes(  # only one layer at a time
                m, compute, replace(rung, products_too=False), adapters=adapters
            )
            weights = base if self.method == "lora" else total * compute
        if self.method == "lora" and phase_index == 0 and self.runs_compiled() and not rung.checkpointing:
            activations *= COMPILED_KEEPS
        logits = tuning.loss_bytes(m, tokens, trained=trains_head(self) and phase_index == 0)
        return common.in_gb(
            weights=weights, gradients=gradients, moments=moments, activations=activations, logits=logits
        )

    @common.remembered
    def ladder(self, ranks: int = 1) -> tuple[common.Rung, ...]:
        return tuning.ladder(self, ranks)

    def with_facts(self, facts: Mapping[str, Any]) -> SftConfig:
        if "rows" not in facts:
            return self
        data = replace(
            self.data,
            examples=facts["examples"] + facts["held_out_examples"],
            tokens_per_example=facts["tokens"] / facts["examples"],
            held_out=facts["held_out_examples"] / (facts["examples"] + facts["held_out_examples"]),
            fill=facts["tokens"] / (facts["rows"] * facts["row"]),
        )
        rows, prompts = min(self.eval.rows, facts["held_out_rows"]), min(self.eval.prompts, facts["prompts"])
        return replace(self, data=data, eval=replace(self.eval, rows=rows, prompts=prompts))

    def waits_for_saves(self) -> bool:
        return not self.measures.async_checkpoints

    def compiles(self) -> bool:
        return self.measures.compile

    def doubts(self, steps: int) -> Iterator[str]:
        lr = self.optim.lr
        yield from warmup_doubts("warmup", self.optim.warmup, steps, lr, "the whole run", "batch.tokens")
        if not self.measures.packing:
            longer = f" Let data.row be data.longest, {self.longest():,}." if self.data.row > self.longest() else ""
            yield (
                f"measures.packing is off: a row of {self.data.row:,} tokens holds one example of"
                f" {example_tokens(self):,.0f}, and {1 - fill(self):.0%} of the work is padding.{longer}"
            )
        if self.method == "full" and lr == CosineAdamW().lr:
            yield (
                f"method: full at an adapter's optim.lr, {rate_in_words(lr)}, which is the default: set it, for"
                " instance to 1e-5"
            )

    def longest(self) -> int:
        return min(self.data.longest, self.data.row)

    def dataset_facts(self) -> dict[str, Any]:
        facts = super(SftConfig, self).dataset_facts()
        facts |= {"loss_on": self.data.loss_on, "packing": self.measures.packing}
        return facts if self.measures.pretokenised else {**facts, "texts": True}

    @common.remembered
    def sizes(self) -> common.Sizes:
        """The sizes of files. final/ has the adapter in bf16 and the merged model, which is in fp32 if too much of the
        adapter would be lost in bf16. If a limit ends the run, a run with an adapter leaves only the adapter. Each
        token of the dataset has its example's mark beside it: 4 bytes, or 6 if an id needs more than two.
        """
        total, own = tuning.parameters(self.model), trained(self)
        final = {"adapter": 2 * own, "merged": 4 * total} if self.method == "lora" else {"merged": 2 * total}
        count = len(self.phases())
        token_bytes, texts = 6 if self.model.vocab > 1 << 16 else 4, 0.0 if self.measures.pretokenised else TEXT_BYTES
        return common.Sizes(
            checkpoints=(12 * own,) * count,
            phase_ends=(4 * own,) * count,
            exports={},
            final=final,
            final_if_cut=(next(iter(final.values())),) * count,
            dataset=int(self.data.examples * example_tokens(self) * (token_bytes / fill(self) + texts)),
            base_weights=2 * total,  # bf16, the published dtype
            inputs=int(BASE_BYTES * judge_parameters(self)) if judge_is_input(self) else 0,
        )


def trained(config: SftConfig) -> int:
    """The number of parameters that have gradients and moments."""
    m = config.model
    if config.method == "full":
        return tuning.parameters(m)
    adapter = tuning.lora_parameters(m, config.lora.rank)
    if not config.lora.template_tokens:
        return adapter
    from gpufleet.job.experiments.dataset.rendering import (
        TEMPLATES,  # imported here, because most adapters do not train a template's tokens
    )

    return adapter + len(TEMPLATES[m.family].specials) * (1 if m.tied else 2) * m.width


def narrow_base(config: SftConfig) -> bool:
    """Whether the base's matrices are fp8 during training."""
    return config.precision.base == "fp8"


def trains_head(config: SftConfig) -> bool:
    """Whether the head's table has a gradient: all of it is computed, even if only a few rows are trained."""
    return config.method == "full" or config.lora.template_tokens


def flops_per_token(config: SftConfig) -> int:
    """Useful training FLOPs of one token."""
    matmul = tuning.matmul_parameters(config.model)
    context = example_tokens(config) if config.measures.packing else config.data.row
    attention = tuning.attention_flops(config.model, context)
    if config.method == "full":
        return 6 * matmul + attention
    return 4 * matmul + 6 * trained(config) + _head_flops(config) + attention


def _head_flops(config: SftConfig) -> int:
    """FLOPs per token for the gradient of the head, with adapters that train some of its rows."""
    return 2 * config.model.vocab * config.model.width if trains_head(config) else 0


def forward_share(config: SftConfig) -> float:
    """The share of the forward pass in the work for a token. The share is nearly half if the base is frozen, because
    the base then needs no gradients.
    """
    matmul, own, whole = tuning.matmul_parameters(config.model), trained(config), flops_per_token(config)
    if config.method == "full":
        return 1 / 3
    attention = whole - 4 * matmul - 6 * own - _head_flops(config)
    return (2 * (matmul + own) + attention / 3) / whole


def example_tokens(config: SftConfig) -> float:
    """Tokens of the mean example, cut at `data.longest`."""
    return min(config.data.tokens_per_example, config.data.longest)


def fill(config: SftConfig) -> float:
    """The share of text in a row. The other part of the row is padding."""
    return config.data.fill if config.measures.packing else example_tokens(config) / config.data.row


def answers_at_once(config: SftConfig) -> int:
    """How many prompts are answered in one batch, whose cache and first pass take less memory than a training step."""
    return min(ANSWERS_AT_ONCE, max(1, ANSWERED_TOKENS // (config.data.longest + config.eval.sample_tokens)))


def judge_is_input(config: SftConfig) -> bool:
    """Whether the judge is a model that a node downloads beside the base weights."""
    return config.eval.judge not in ("", JUDGE_BASE)


def judge_is_loaded(config: SftConfig) -> bool:
    """Whether the judge is read from files after training. With an adapter, the base is there already."""
    return judge_is_input(config) or config.method == "full"


def judge_parameters(config: SftConfig) -> float:
    return config.eval.judge_parameters if judge_is_input(config) else tuning.parameters(config.model)


def _compared_tokens(config: SftConfig) -> int:
    """The tokens that a judge reads beside the question: two answers, and the text that asks for a verdict."""
    return 2 * config.eval.sample_tokens + JUDGE_TOKENS
