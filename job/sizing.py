"""What a run config costs before anything runs: parameters, FLOPs, bytes. Pure: no torch, so the bill can import it.

Decides how the micro-batch ladder looks and which rung is predicted to fit. Does not decide speed: throughput comes
from a peak and an MFU, or from a calibration, and those belong to the bill.

FLOPs are `causal`: 6 x matmul parameters (head included, embedding look-up not) + 6 x layers x width x sequence.
Recompute is never counted as useful. 1 GB = 1e9 bytes throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

from job.config import GrowthModel, JobConfig

GB = 1e9
PART_BYTES = 64 * 1024 * 1024  # of an upload to S3: each part is a billed request
CAPACITY = 1.25  # rows per expert over the even share, where the expert product is padded (GPUs before sm_90)
DEVICE_RESERVE_GB = 1.0  # CUDA context, cuBLAS workspace, fragmentation: an estimate, on top of what torch allocates
LOGIT_BYTES = 12  # per token and vocabulary entry at the peak: fp32 log-probabilities and two fp32 gradients
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSize:
    """One phase in numbers. `flops_per_token` is for training: forward and backward, causal attention."""

    name: str
    params_total: int
    params_active: int
    flops_per_token: int
    state_bytes_per_param: int  # weights + gradients + two moments
    optimizer_traffic_bytes_per_param: int  # read and written by one AdamW step
    steps: int
    tokens_per_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes one GPU holds, in GB. `total_gb` is the peak, not the sum: without accumulation the gradients appear in
    backward while the activations go, so the two share room; with accumulation all of them are live at once.
    """

    weights_gb: float  # master weights, and their copy in the compute dtype where that differs
    gradients_gb: float
    moments_gb: float
    activations_gb: float
    logits_gb: float
    total_gb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to cut the global batch: micro-batches of `micro` windows, the last one smaller if need be."""

    micro: int
    checkpointing: bool = False


def problems(config: JobConfig) -> list[tuple[str, str]]:
    """What no field's own range can say, as (path under job.parameters, sentence)."""
    model, found = config.model, []
    if model.width % (2 * model.heads):
        found.append(
            ("model.heads", f"width {model.width} must be a multiple of 2 x heads ({2 * model.heads}): rotary")
        )
    if model.top_k > model.experts:
        found.append(
            ("model.top_k", f"{model.top_k} experts per token out of {model.experts}: at most {model.experts}")
        )
    for name, values in (("optim.lr", config.optim.lr), ("optim.betas", config.optim.betas)):
        wanted = len(_PHASES) if name == "optim.lr" else 2
        if len(values) != wanted:
            found.append((name, f"{len(values)} values; {wanted} are needed"))
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


def state_dtype(config: JobConfig, phase_index: int) -> str:
    """fp32 or bf16: weights, gradients and moments alike. A key of the run config, never chosen from the GPU found."""
    return config.precision.phase3_state if phase_index == 2 else "fp32"


def phases(config: JobConfig) -> tuple[PhaseSize, ...]:
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
                flops_per_token=flops_per_token(s, config.data.sequence),
                state_bytes_per_param=8 if narrow else 16,
                optimizer_traffic_bytes_per_param=14 if narrow else 28,
                steps=config.steps_per_phase,
                tokens_per_step=config.batch.sequences * config.data.sequence,
            )
        )
    return tuple(sizes)


def total_steps(config: JobConfig) -> int:
    """Optimizer steps of all phases together."""
    return len(_PHASES) * config.steps_per_phase


def memory(config: JobConfig, phase_index: int, micro_batch: int, *, checkpointing: bool = False) -> Memory:
    """Predicted bytes on one GPU with micro-batches of `micro_batch` windows. Assumes that gradients are freed between
    optimizer steps and that every activation which eager autograd keeps is kept: compile can only keep fewer.
    """
    s = shape(config.model, phase_index)
    total, _ = parameters(s)
    state = 2 if state_dtype(config, phase_index) == "bf16" else 4
    compute = 2 if config.precision.compute == "bf16" else 4
    micro = min(micro_batch, config.batch.sequences)
    tokens = micro * config.data.sequence

    weights = total * (state + (compute if compute < state else 0))
    gradients = total * state
    moments = 2 * total * state
    layer = tokens * _layer_bytes(s, compute, checkpointing=checkpointing)
    activations = s.layers * layer + tokens * 2 * s.width * compute  # + the final norm's input and output
    logits = tokens * s.vocab * LOGIT_BYTES
    if micro < config.batch.sequences:
        shared = gradients + activations + logits
    else:
        head = s.vocab * s.width * state  # the tied table's gradient comes first, beside all activations
        shared = max(activations + max(logits, head), gradients + layer)
    return Memory(
        weights_gb=weights / GB,
        gradients_gb=gradients / GB,
        moments_gb=moments / GB,
        activations_gb=activations / GB,
        logits_gb=logits / GB,
        total_gb=(weights + moments + shared) / GB,
    )


def ladder(config: JobConfig) -> tuple[Rung, ...]:
    """Ways to cut the batch, largest first: all of it, 3/4, 1/2, 1/4 (16, 12+4, 8+8, 4+4+4+4), then activation
    checkpointing from the last of these down to one window. `batch.micro` starts it lower. The global batch, and with
    it the result, never changes.
    """
    whole = config.batch.sequences
    start = min(config.batch.micro or whole, whole)
    plain = [m for m in (whole, whole * 3 // 4, whole // 2, whole // 4) if 1 <= m <= start]
    if start not in plain:
        plain.insert(0, start)
    plain = list(dict.fromkeys(plain))
    kept = []
    micro = plain[-1]
    while micro >= 1:
        kept.append(micro)
        micro //= 2
    return tuple([Rung(micro=m) for m in plain] + [Rung(micro=m, checkpointing=True) for m in kept])


def fits(config: JobConfig, rung: Rung, gpu_memory_gb: float, phase_index: int | None = None) -> bool:
    """Whether the predicted peak and the reserve fit, in one phase or in all of them."""
    chosen = range(len(_PHASES)) if phase_index is None else (phase_index,)
    return all(
        memory(config, i, rung.micro, checkpointing=rung.checkpointing).total_gb + DEVICE_RESERVE_GB <= gpu_memory_gb
        for i in chosen
    )


def choose_rung(config: JobConfig, gpu_memory_gb: float, phase_index: int | None = None) -> Rung | None:
    """The highest rung predicted to fit (in every phase when `phase_index` is None). None: nothing fits."""
    return next((rung for rung in ladder(config) if fits(config, rung, gpu_memory_gb, phase_index)), None)


def lower_rung(config: JobConfig, rung: Rung, phase_index: int) -> Rung | None:
    """Where to go after a real out-of-memory: the next rung that is predicted to need less, so that a cut which
    starts to accumulate, and therefore keeps gradients beside activations, is passed over. None: the end.
    """
    rungs = ladder(config)
    now = memory(config, phase_index, rung.micro, checkpointing=rung.checkpointing).total_gb
    for lower in rungs[rungs.index(rung) + 1 :]:
        if memory(config, phase_index, lower.micro, checkpointing=lower.checkpointing).total_gb < now:
            return lower
    return None


def checkpoint_bytes(config: JobConfig, phase_index: int) -> int:
    """Weights and two moments: 12 B per parameter in fp32, 6 in bf16."""
    width = 2 if state_dtype(config, phase_index) == "bf16" else 4
    return 3 * width * parameters(shape(config.model, phase_index))[0]


def export_bytes(config: JobConfig) -> dict[str, int]:
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


def _layer_bytes(s: Shape, compute: int, *, checkpointing: bool) -> float:
    """What autograd keeps of one token in one layer. With checkpointing only the products' and attention's results."""
    d, h = s.width, s.ffn
    rows = s.top_k * CAPACITY if s.experts else 1.0
    products = 4 * d + rows * h  # q, k, v, attention; the FFN's up-projection
    if s.experts:
        products += s.top_k * d  # the experts' results, weighted per token
    if checkpointing:
        return compute * (d + products) + 4 * s.heads
    rest = 4 * d + rows * h  # two norms' inputs and outputs; after GELU
    if s.experts:
        rest += rows * d  # rows gathered by expert
    wide = 4 * d if s.experts and compute < 4 else 0  # the router's input in fp32
    return compute * (products + rest) + wide + 4 * s.heads + 16 + 8 * s.experts
