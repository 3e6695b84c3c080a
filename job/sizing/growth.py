"""tinystories-growth: dense, then experts, then twice as wide and deeper. A micro-batch counts windows.

FLOPs are `causal`: 6 x matmul parameters (head included, embedding look-up not) + 6 x layers x width x sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from job.sizing.common import GB, Memory, PhaseSize, Rung, cuts
from job.spec.growth import GrowthConfig, GrowthModel

CAPACITY = 1.25  # rows per expert over the even share, where the expert product is padded (GPUs but sm_90)
LOGIT_BYTES = 12  # per token and vocabulary entry at the peak: fp32 log-probabilities and two fp32 gradients
# Of the host, launching a compiled step: a layer of each micro-batch, dense and with experts; embedding, loss, clipping
# and AdamW. Kernels that do nothing, torch 2.13.0, 2 shared cores of a Xeon at 2.8 GHz, 2026-11-23: 9 to 20, 14 to 29
# and 20 to 32 ms in the three phases of 7, 7 and 11 layers, as the neighbours let it; nearer the lower ends.
LAYER_LAUNCH_MS, LAUNCH_MS = (1.3, 2.2), 3.0
BYTES_PER_STORY = 444  # 50,000 stories = 11,091,575 GPT-2 tokens of 2 bytes
_PHASES = ("dense", "moe", "grown")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One phase's model. `experts` 0 = a dense FFN."""

    vocab: int
    layers: int
    width: int
    heads: int
    ffn: int
    experts: int
    top_k: int


def problems(config: GrowthConfig) -> list[tuple[str, str]]:
    """What no field's own range can say, as (path under job.parameters, sentence)."""
    model, batch, found = config.model, config.batch, []
    each, rest = divmod(model.width, model.heads)
    if rest:
        fitting = [heads for heads in range(1, model.width + 1) if model.width % (2 * heads) == 0]
        nearest = f"; nearest: {min(fitting, key=lambda heads: abs(heads - model.heads))}" if fitting else ""
        found.append(("model.heads", f"a divisor of the width, {model.width}{nearest}"))
    elif each % 2:
        found.append(("model.heads", f"an even width per head (rotary positions turn pairs), not {each}"))
    if model.top_k > model.experts:
        found.append(("model.top_k", f"at most the number of experts, {model.experts}"))
    if batch.micro is not None and batch.micro > batch.sequences:
        found.append(("batch.micro", f"at most the global batch, {batch.sequences} sequences"))
    if len(config.optim.lr) != len(_PHASES):
        found.append(("optim.lr", f"{len(_PHASES)} learning rates, one per phase, not {len(config.optim.lr)}"))
    if len(config.optim.betas) != 2:
        found.append(("optim.betas", f"two numbers, beta1 and beta2, not {len(config.optim.betas)}"))
    if not config.eval.prompts:
        found.append(("eval.prompts", "at least one prompt; sample_tokens: 0 switches samples off"))
    if not all(prompt.strip() for prompt in config.eval.prompts):
        found.append(("eval.prompts", "an empty prompt cannot be continued: give it a word, or leave it out"))
    return found


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
    """(total, active per token). Router without bias; every other Linear and both norms with bias; head tied."""
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


def state_dtype(config: GrowthConfig, phase_index: int) -> str:
    """fp32 or bf16: weights, gradients and moments alike. A key of the run config, never chosen from the GPU found."""
    return config.precision.phase3_state if phase_index == 2 else "fp32"


def phases(config: GrowthConfig) -> tuple[PhaseSize, ...]:
    """Every phase in order."""
    sizes = []
    for index, name in enumerate(_PHASES):
        s = shape(config.model, index)
        total, active = parameters(s)
        narrow = state_dtype(config, index) == "bf16"
        sizes.append(
            PhaseSize(
                name=name,
                params_total=total,
                params_active=active,
                params_trained=total,
                flops_per_token=flops_per_token(s, config.data.sequence),
                state_bytes_per_param=8 if narrow else 16,
                optimizer_traffic_bytes_per_param=14 if narrow else 28,
                steps=config.steps_per_phase,
                tokens_per_step=config.batch.sequences * config.data.sequence,
                evaluations=-(-config.steps_per_phase // config.eval.every),
                evaluation_tokens=config.eval.windows * config.data.sequence,
                decode_steps=len(config.eval.prompts) * config.eval.sample_tokens,
                launch_ms=_launch_ms(config, s),
            )
        )
    return tuple(sizes)


def memory(
    config: GrowthConfig, phase_index: int, micro_batch: int, *, checkpointing: bool = False, ranks: int = 1
) -> Memory:
    """Predicted bytes on one GPU with micro-batches of `micro_batch` windows. Assumes that gradients are freed between
    optimizer steps and that every activation which eager autograd keeps is kept: compile can only keep fewer.
    """
    s = shape(config.model, phase_index)
    total, _ = parameters(s)
    state = 2 if state_dtype(config, phase_index) == "bf16" else 4
    compute = 2 if config.precision.compute == "bf16" else 4
    micro = min(micro_batch, config.batch.sequences)
    tokens = micro * config.data.sequence

    # Products cast the weights to their own dtype, wider or narrower, and put q, k and v together anyway; that stays
    # until backward. With checkpointing it goes with its layer and is made again.
    table, cast = s.vocab * s.width, compute != state
    made = (total - table) / s.layers if cast else 3 * s.width * (s.width + 1)
    made *= 1 if checkpointing else s.layers
    weights = total * state + (made + cast * table) * compute
    gradients = total * state
    moments = 2 * total * state
    layer = tokens * _layer_bytes(s, compute, checkpointing=checkpointing)
    activations = s.layers * layer + tokens * 2 * s.width * compute  # + the final norm's input and output
    logits = tokens * s.vocab * LOGIT_BYTES
    # The first micro-batch makes the gradients; those after it, the last one smaller if need be, find them there.
    head = s.vocab * s.width * state  # the tied table's gradient comes first, beside all activations
    first = max(activations + max(logits, head), gradients + layer)
    second = min(micro, config.batch.sequences - micro) / micro
    shared = max(first, gradients + second * (activations + logits))
    return Memory(
        weights_gb=weights / GB,
        gradients_gb=gradients / GB,
        moments_gb=moments / GB,
        activations_gb=activations / GB,
        logits_gb=logits / GB,
        total_gb=(weights + moments + shared) / GB,
    )


def rows_per_rank(config: GrowthConfig, ranks: int) -> int:
    """Windows of a step."""
    return config.batch.sequences


def ladder(config: GrowthConfig, ranks: int = 1) -> tuple[Rung, ...]:
    """All of the batch, 3/4, 1/2, 1/4 (16, 12+4, 8+8, 4+4+4+4), then activation checkpointing down to one window."""
    whole = rows_per_rank(config, ranks)
    return cuts(whole, config.batch.micro, [whole, whole * 3 // 4, whole // 2, whole // 4])


def checkpoint_bytes(config: GrowthConfig, phase_index: int) -> int:
    """Weights and two moments: 12 B per parameter in fp32, 6 in bf16."""
    width = 2 if state_dtype(config, phase_index) == "bf16" else 4
    return 3 * width * parameters(shape(config.model, phase_index))[0]


def end_bytes(config: GrowthConfig, phase_index: int) -> int:
    return checkpoint_bytes(config, phase_index) // 3


def export_bytes(config: GrowthConfig) -> dict[str, int]:
    """Weights-only files kept beside the checkpoints. A phase's start is the verified fp32 file, whatever the state
    that training casts it to; a phase's end is in that state's dtype.
    """
    totals = [parameters(shape(config.model, i))[0] for i in range(len(_PHASES))]
    end = 2 if state_dtype(config, 2) == "bf16" else 4
    return {
        "phase1_end": 4 * totals[0],
        "phase2_start": 4 * totals[1],
        "phase2_end": 4 * totals[1],
        "phase3_start": 4 * totals[2],
        "phase3_end": end * totals[2],
    }


def cut_bytes(config: GrowthConfig, phase_index: int) -> int:
    return export_bytes(config)[f"phase{phase_index + 1}_end"]


def final_bytes(config: GrowthConfig) -> dict[str, int]:
    """A copy of the last export."""
    return {"weights": export_bytes(config)["phase3_end"]}


def dataset_bytes(config: GrowthConfig) -> int:
    """Of the prepared dataset, before it is: two bytes per token."""
    return config.data.stories * BYTES_PER_STORY


def weights_bytes(config: GrowthConfig) -> int:
    """It starts from nothing."""
    return 0


def ranks(config: GrowthConfig, gpu_count: int) -> int:
    """One process on one GPU."""
    return 1


def _launch_ms(config: GrowthConfig, s: Shape) -> float:
    """Milliseconds of the host for one step; with `batch.micro` unset the whole batch is one micro-batch."""
    micros = -(-config.batch.sequences // (config.batch.micro or config.batch.sequences))
    return micros * s.layers * LAYER_LAUNCH_MS[1 if s.experts else 0] + LAUNCH_MS


def _layer_bytes(s: Shape, compute: int, *, checkpointing: bool) -> float:
    """What autograd keeps of one token in one layer. With checkpointing only the products' and attention's results."""
    d, h = s.width, s.ffn
    rows = s.top_k * CAPACITY if s.experts else 1.0
    products = 4 * d + rows * h  # q, k, v, attention; the FFN's up-projection
    if s.experts:
        products += s.top_k * d  # the experts' results, weighted per token
    if checkpointing:
        return compute * (d + products) + 4 * s.heads
    rest = 6 * d + rows * h  # two norms' inputs and outputs; q and k turned; after GELU
    if s.experts:
        rest += rows * d  # rows gathered by expert
    wide = 4 * d if s.experts and compute < 4 else 0  # the router's input in fp32
    return compute * (products + rest) + wide + 4 * s.heads + 16 + 8 * s.experts
