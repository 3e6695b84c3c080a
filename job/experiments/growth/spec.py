"""tinystories-growth: trains a dense model, then with experts, then twice as wide and deeper. A micro-batch counts
windows.

FLOPs are `causal`: 6 x matmul parameters (head included, embedding look-up not) + 6 x layers x width x sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from gpufleet.job.experiments.models.config import CAPACITY, Shape
from gpufleet.job.experiments.spec import BELOW_ONE, ExperimentConfig, cuts, warmup_doubts
from gpufleet.job.kind import common
from gpufleet.job.kind.batch import rows_per_rank
from gpufleet.job.kind.job import Alternative

# bytes per token and vocabulary entry at the peak of memory: fp32 log-probabilities and two fp32 gradients
LOGIT_BYTES = 12
# Measured on compiled steps with an H100 and an H200 (bench/results/gpu.md): the share of a layer's activations that
# remains, and bytes per logit. At 16, 32 and 128 windows all three phases come within 7 % of the peaks measured there.
COMPILED_KEEPS, COMPILED_LOGIT_BYTES = 0.8, 5
# The host's ms to launch a compiled step: per layer of each micro-batch, dense and with experts; then for embedding,
# loss, clipping and AdamW. At 16 windows an H100 and an H200 waited for their hosts: 15.6 and 17.6 ms of a step in the
# first phase, of 7 layers, 24.4 and 25.5 in the second (bench/results/gpu.md); an empty launch takes 26 us on a core of
# 2.8 GHz, a launch of these steps 36.
LAYER_LAUNCH_MS, LAUNCH_MS = (1.9, 3.1), 3.0
# The same times with CUDA graphs. They are fitted to 10.9 and 21.8 ms on an H100 with the compiler's graphs, of which
# there is one for each block. With one graph for all passes of a step the host has less to launch, but this was not
# measured.
LAYER_GRAPH_MS = (1.1, 2.7)
GROWTH_PASSES = 5  # passes over the new fp32 weights at 1 GB/s: grow, check before and after, export, read back
COMPILE_S = 40.0  # seconds for each grown phase, only on CUDA; the first phase compiles within the set-up minutes
BYTES_PER_STORY = 444  # 50,000 stories = 11,091,575 GPT-2 tokens of 2 bytes
_PHASES = ("dense", "moe", "grown")


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthModel:
    """The dense model of phase 1 and how it grows: experts in phase 2, width x2 and new layers in phase 3."""

    vocab: int = common.bounded(50257, 2, 1_000_000)
    layers: int = common.bounded(7, 1, 200)
    width: int = common.bounded(832, 8, 65536)
    heads: int = common.bounded(8, 1, 512)
    ffn: int = common.bounded(3328, 8, 262144)
    experts: int = common.bounded(8, 2, 256)
    top_k: int = common.bounded(2, 1, 64)
    new_layers: int = common.bounded(4, 0, 200)  # appended in phase 3
    router_std: float = common.bounded(0.02, 1e-6, 1.0)  # if it were 0, every token would go to the same experts
    # as a multiple of a matrix's standard deviation; with opposite signs in the two halves of the inputs
    symmetry_noise: float = common.bounded(0.1, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """Windows of tokens, chosen at random by (seed, step). storage.dataset names the prepared dataset."""

    sequence: int = common.bounded(256, 8, 131072)  # tokens per window
    # what `gpufleet prepare` downloads or generates
    source: Literal["tinystories", "generated-stories"] = "tinystories"
    stories: int = common.bounded(50_000, 100, 3_000_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Windows per optimizer step. `micro`: None for the highest rung of the ladder that fits."""

    sequences: int = common.bounded(16, 1, 65536)
    micro: int | None = common.bounded(None, 1, 65536)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """AdamW, one learning rate per phase, constant after a linear re-warm-up at the start of each grown phase."""

    lr: tuple[float, ...] = common.bounded((3e-4, 1e-4, 8e-5), 1e-9, 1.0)
    weight_decay: float = common.bounded(0.01, 0.0, 1.0)
    betas: tuple[float, ...] = common.bounded((0.9, 0.95), 0.0, BELOW_ONE)
    eps: float = common.bounded(1e-8, 1e-16, 1e-2)  # if it were 0, the update of a row without gradient would be 0 / 0
    clip: float = common.bounded(1.0, 0.0, 1e6)
    warmup_after_growth: int = common.bounded(20, 0, 100_000)
    load_balance: float = common.bounded(0.01, 0.0, 10.0)  # coefficient of the router's load-balance term, phases 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision(common.Compute):
    """`compute` is the dtype of the matmuls; `phase3_state` that of weights, gradients and moments in phase 3."""

    phase3_state: Literal["bf16", "fp32"] = "bf16"  # bf16 is needed for any fleet with a type of 24 GB


@dataclass(frozen=True, kw_only=True, slots=True)
class Eval:
    """Validation, which always uses the same windows, and greedy samples at the end of each phase."""

    every: int = common.bounded(50, 1, 1_000_000)  # steps
    windows: int = common.bounded(32, 1, 65536)
    prompts: tuple[str, ...] = ("Once upon a time", "The little girl", "One day, a dog")
    sample_tokens: int = common.bounded(40, 0, 4096)


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthConfig(ExperimentConfig):
    """tinystories-growth: train dense, upcycle to experts, grow width and depth; verified at each boundary."""

    trainer: ClassVar[str] = "gpufleet.job.experiments.growth.run:TinystoriesGrowth"
    dataset_class: ClassVar[str] = "gpufleet.job.experiments.growth.data:Stories"
    demands: ClassVar[common.Demands] = common.Demands(one_node="it trains in one process")
    dataset_kind: ClassVar[str] = "windows"
    leaves_speed: ClassVar[tuple[str, ...]] = (
        "steps_per_phase",
        "data.stories",
        "model.router_std",
        "model.symmetry_noise",
    )

    steps_per_phase: int = common.bounded(1000, 1, 10_000_000)
    seed: int = common.bounded(1337, 0, 2**31 - 1)
    # if there is no CUDA device, `cuda` is an error, and the run does not use the CPU instead
    device: Literal["cuda", "cpu"] = "cuda"
    model: GrowthModel = GrowthModel()
    data: TextData = TextData()
    batch: Batch = Batch()
    optim: AdamW = AdamW()
    precision: Precision = Precision()
    deliver: common.Deliver = common.added_later("last", version="0.1.0")
    cuda_graphs: bool = common.added_later(True)  # on a GPU, a step's passes are one graph
    checkpoint: common.Checkpoint = common.Checkpoint()
    guard: common.Guard = common.added_later(common.Guard(), version="0.1.0")
    eval: Eval = Eval()
    log: common.Log = common.Log()

    def problems(self) -> list[tuple[str, str]]:
        """Problems beyond a field's range, as (path under job.parameters, sentence)."""
        model, batch, problems = self.model, self.batch, []
        head_width, rest = divmod(model.width, model.heads)
        if rest:
            fitting = [heads for heads in range(1, model.width + 1) if model.width % (2 * heads) == 0]
            nearest = f"; nearest: {min(fitting, key=lambda heads: abs(heads - model.heads))}" if fitting else ""
            problems.append(("model.heads", f"a divisor of the width, {model.width}{nearest}"))
        elif head_width % 2:
            problems.append(("model.heads", f"an even width per head (rotary positions turn pairs), not {head_width}"))
        if model.top_k > model.experts:
            problems.append(("model.top_k", f"at most the number of experts, {model.experts}"))
        if batch.micro is not None and batch.micro > batch.sequences:
            problems.append(("batch.micro", f"at most the global batch, {batch.sequences} sequences"))
        if len(self.optim.lr) != len(_PHASES):
            problems.append(("optim.lr", f"{len(_PHASES)} learning rates, one per phase, not {len(self.optim.lr)}"))
        if len(self.optim.betas) != 2:
            problems.append(("optim.betas", f"two numbers, beta1 and beta2, not {len(self.optim.betas)}"))
        if not self.eval.prompts:
            problems.append(("eval.prompts", "at least one prompt; sample_tokens: 0 switches samples off"))
        if not all(prompt.strip() for prompt in self.eval.prompts):
            problems.append(("eval.prompts", "an empty prompt cannot be continued: give it a word, or leave it out"))
        return problems

    @common.remembered
    def phases(self) -> tuple[common.PhaseSize, ...]:
        sizes = []
        for index, name in enumerate(_PHASES):
            s = shape(self.model, index)
            total, active = parameters(s)
            narrow = self.state_dtype(index) == "bf16"
            sizes.append(
                common.PhaseSize(
                    name=name,
                    kind="mixture" if s.experts else "from scratch",
                    params_total=total,
                    params_active=active,
                    params_trained=total,
                    flops_per_token=flops_per_token(s, self.data.sequence),
                    optimizer_traffic_bytes_per_param=14 if narrow else 28,
                    steps=self.steps_per_phase,
                    tokens_per_step=self.batch.sequences * self.data.sequence,
                    evaluations=-(-self.steps_per_phase // self.eval.every),
                    evaluation_tokens=self.eval.windows * self.data.sequence,
                    decode_steps=len(self.eval.prompts) * self.eval.sample_tokens,
                    launch_ms=_launch_ms(self, s),
                    growth_s=_growth_s(self, total) if index else 0.0,
                )
            )
        return tuple(sizes)

    @common.remembered
    def memory(self, phase_index: int, rung: common.Rung, ranks: int = 1) -> common.Memory:
        s = shape(self.model, phase_index)
        total, _ = parameters(s)
        state = 2 if self.state_dtype(phase_index) == "bf16" else 4
        compute = 2 if self.precision.compute == "bf16" else 4
        micro, checkpointing = min(rung.micro, self.batch.sequences), rung.checkpointing
        tokens = micro * self.data.sequence

        # A matrix product casts the weights to its own dtype. The weights of q, k and v are always joined for one
        # product. The cast and joined copies stay in memory until the backward pass. With checkpointing these copies
        # are freed with their layer and made again.
        table, cast = s.vocab * s.width, compute != state
        made = (total - table) / s.layers if cast else 3 * s.width * (s.width + 1)
        made *= 1 if checkpointing else s.layers
        weights = total * state + (made + cast * table) * compute
        gradients = total * state
        moments = 2 * total * state
        fused = self.runs_compiled() and not checkpointing
        layer = tokens * _layer_bytes(s, compute, checkpointing=checkpointing) * (COMPILED_KEEPS if fused else 1)
        activations = s.layers * layer + tokens * 2 * s.width * compute  # and the input and output of the final norm
        logits = tokens * s.vocab * (COMPILED_LOGIT_BYTES if fused else LOGIT_BYTES)
        # The first micro-batch allocates the gradients. Later micro-batches, of which the last may be smaller, add to
        # them.
        head = s.vocab * s.width * state  # the tied table's gradient comes first, beside all activations
        first = max(activations + max(logits, head), gradients + layer)
        second = min(micro, self.batch.sequences - micro) / micro
        shared = max(first, gradients + second * (activations + logits))
        if self.device == "cuda" and self.records():
            # A graph keeps its memory between steps, so an evaluation needs memory of its own: for one layer, and for
            # the logits.
            rows = min(micro, self.eval.windows) * self.data.sequence
            layers_own = rows * _layer_bytes(s, compute, checkpointing=False) + cast * made / s.layers * compute
            logits_own = rows * s.vocab * (compute if fused else compute + 8) + cast * table * compute
            activations, logits, shared = (
                activations + layers_own,
                logits + logits_own,
                shared + layers_own + logits_own,
            )
        held = {"weights": weights, "gradients": gradients, "moments": moments}
        return common.in_gb(**held, activations=activations, logits=logits, peak=weights + moments + shared)

    @common.remembered
    def ladder(self, ranks: int = 1) -> tuple[common.Rung, ...]:
        """All of the batch, 3/4, 1/2, 1/4 (16, 12+4, 8+8, 4+4+4+4), then activation checkpointing down to one."""
        whole = rows_per_rank(self, ranks)
        return cuts(whole, self.batch.micro, [whole, whole * 3 // 4, whole // 2, whole // 4])

    def state_dtype(self, phase_index: int) -> str:
        """fp32 or bf16, the same for weights, gradients and moments. The dtype never depends on the GPU."""
        return self.precision.phase3_state if phase_index == 2 else "fp32"

    def records(self) -> bool:
        return self.cuda_graphs

    def state_in_words(self) -> str:
        states = ", ".join(f"{name} {self.state_dtype(index)}" for index, name in enumerate(_PHASES))
        return f"{states} (run config); loss, norms and router in fp32"

    def variants(self) -> Iterator[Alternative]:
        if self.precision.phase3_state != "bf16":
            narrow = replace(self, precision=replace(self.precision, phase3_state="bf16"))
            yield Alternative("job.parameters.precision.phase3_state: bf16", narrow, narrower=True)

    def doubts(self, steps: int) -> Iterator[str]:
        key, whole, instead = "warmup_after_growth", "each grown phase", "raise steps_per_phase"
        yield from warmup_doubts(key, self.optim.warmup_after_growth, steps, self.optim.lr[-1], whole, instead)

    def shortened(self, steps: int) -> GrowthConfig:
        return replace(self, steps_per_phase=min(self.steps_per_phase, -(-steps // len(_PHASES))))

    def rows(self) -> int:
        """Windows of a step."""
        return self.batch.sequences

    @common.remembered
    def sizes(self) -> common.Sizes:
        """A checkpoint has weights and two moments: 12 B per parameter in fp32, 6 in bf16. The first weights of a phase
        are exported as the verified fp32 file, whatever dtype training uses; a phase's end is exported in the training
        dtype.
        """
        totals = [parameters(shape(self.model, i))[0] for i in range(len(_PHASES))]
        widths = [2 if self.state_dtype(i) == "bf16" else 4 for i in range(len(_PHASES))]
        ends = [width * total for width, total in zip(widths, totals, strict=True)]
        exports = {
            "phase1_end": 4 * totals[0],
            "phase2_start": 4 * totals[1],
            "phase2_end": 4 * totals[1],
            "phase3_start": 4 * totals[2],
            "phase3_end": ends[2],
        }
        return common.Sizes(
            checkpoints=tuple(3 * end for end in ends),
            phase_ends=tuple(ends),
            exports=exports,
            final={"weights": ends[2]},  # a copy of the last export
            final_if_cut=tuple(exports[f"phase{i + 1}_end"] for i in range(len(_PHASES))),
            dataset=self.data.stories * BYTES_PER_STORY,
        )


def shape(model: GrowthModel, phase_index: int) -> Shape:
    """The model of phase 0 (dense), 1 (experts) or 2 (twice as wide, `new_layers` deeper; head_dim stays)."""
    if phase_index not in range(len(_PHASES)):
        raise ValueError(f"phase {phase_index} does not exist; phases are 0 to {len(_PHASES) - 1}")
    grown = phase_index == 2
    scale = 2 if grown else 1
    return Shape(
        vocab=model.vocab,
        layers=model.layers + (model.new_layers if grown else 0),
        width=model.width * scale,
        heads=model.heads * scale,
        ffn=model.ffn * scale,
        experts=model.experts if phase_index else 0,
        top_k=model.top_k if phase_index else 0,
    )


def parameters(s: Shape) -> tuple[int, int]:
    """The number of all parameters, and of those that are active for a token. The router has no bias; all other Linear
    layers and both norms have one; the head is tied.
    """
    d, h = s.width, s.ffn
    fixed = s.vocab * d + 2 * d + s.layers * (4 * d * d + 4 * d + 4 * d)
    ffn = 2 * d * h + h + d
    if not s.experts:
        return fixed + s.layers * ffn, fixed + s.layers * ffn
    router = d * s.experts
    return fixed + s.layers * (router + s.experts * ffn), fixed + s.layers * (router + s.top_k * ffn)


def flops_per_token(s: Shape, sequence: int) -> int:
    """Training FLOPs of one token, causal attention."""
    d, h = s.width, s.ffn
    ffns = s.top_k if s.experts else 1
    matmul = s.vocab * d + s.layers * (4 * d * d + ffns * 2 * d * h + d * s.experts)
    return 6 * matmul + 6 * s.layers * d * sequence


def _launch_ms(config: GrowthConfig, s: Shape) -> float:
    """Milliseconds of the host for one step; if `batch.micro` is not set, the whole batch is one micro-batch."""
    micros = -(-config.batch.sequences // (config.batch.micro or config.batch.sequences))
    layer_ms = LAYER_GRAPH_MS if config.records() else LAYER_LAUNCH_MS
    return micros * s.layers * layer_ms[1 if s.experts else 0] + LAUNCH_MS


def _growth_s(config: GrowthConfig, parameters: int) -> float:
    """Seconds from the end of a phase to the first step of the grown phase. `parameters`: the number of its
    parameters.
    """
    return GROWTH_PASSES * parameters * 4 / 1e9 + (COMPILE_S if config.device == "cuda" else 0.0)


def _layer_bytes(s: Shape, compute: int, *, checkpointing: bool) -> float:
    """Bytes that autograd keeps of a token in a layer; with checkpointing only products' and attention's results."""
    d, h = s.width, s.ffn
    rows = s.top_k * CAPACITY if s.experts else 1.0
    products = 4 * d + rows * h  # results of q, k, v and attention, and of the FFN's up-projection
    if s.experts:
        products += s.top_k * d  # the experts' results, weighted per token
    if checkpointing:
        return compute * (d + products) + 4 * s.heads
    rest = 6 * d + rows * h  # inputs and outputs of two norms; q and k after rotation; the result of GELU
    if s.experts:
        rest += rows * d  # rows gathered by expert
    wide = 4 * d if s.experts and compute < 4 else 0  # the router's input in fp32
    return compute * (products + rest) + wide + 4 * s.heads + 16 + 8 * s.experts
