"""kernel-sft: all weights on packed rows, then generation, then the funnel. A micro-batch counts rows.

The funnel's seconds per candidate are assumptions until a run has measured them: real compilation takes seconds to
tens of seconds of one core, a candidate occupies a GPU for about 4 s, a correct one 1 to 2 s more for its timing.
"""

from __future__ import annotations

from job.config.kernel import KernelConfig
from job.sizing import decoder
from job.sizing.common import GB, Memory, PhaseSize, Rung, cuts, in_gb, processes

COMPILE_CORE_S = 20.0  # one Triton kernel with its variants, on one core
CANDIDATE_GPU_S = 4.0  # tiny and full run
TIMING_GPU_S = 2.0  # of a correct one
INTERPRETED_S = 0.13  # of a candidate in Triton's interpreter, all stages: 7.5 a second on two cores (bench/funnel.py)
CORRECT_SHARE = 0.2  # KernelLLM-8B reports pass@1 20.2
TASKS, PLANTED = 20, 200  # job/kernels/catalog.py and planted.py
ABLATION_ROWS = 5  # the funnel and four rows without one or all of its extensions, on the same candidates


def problems(config: KernelConfig) -> list[tuple[str, str]]:
    found = decoder.problems(config.model)
    found += decoder.batch_problems(config.batch, config.data.row, config.optim.betas)
    if config.generate.tasks > TASKS:
        found.append(("generate.tasks", f"at most {TASKS}: there are no more tasks"))
    if config.funnel.planted > PLANTED:
        found.append(("funnel.planted", f"at most {PLANTED}: {TASKS} tasks x 5 kinds x 2"))
    return found


def ranks(config: KernelConfig, gpu_count: int) -> int:
    return processes(config.device, config.gpus, gpu_count, config.batch.tokens // config.data.row)


def candidates(config: KernelConfig) -> int:
    """Generated and planted."""
    return config.generate.tasks * config.generate.candidates + config.funnel.planted


def phases(config: KernelConfig) -> tuple[PhaseSize, ...]:
    """`sft`, `generate`, `verify`."""
    m = config.model
    total = decoder.parameters(m)
    context = min(config.data.tokens_per_sample, config.data.row)
    tokens = config.epochs * config.data.samples * config.data.tokens_per_sample
    sizes = {
        "params_total": total,
        "params_active": total,
        "params_trained": total,
        "flops_per_token": 6 * decoder.matmul_parameters(m) + decoder.attention_flops(m, context),
        "state_bytes_per_param": 16,
        "optimizer_traffic_bytes_per_param": 28,
        "tokens_per_step": config.batch.tokens,
        "sharded": True,
    }
    count = candidates(config)
    rows, on_gpu = ABLATION_ROWS if config.funnel.ablations else 1, config.device == "cuda"
    return (
        PhaseSize(name="sft", steps=decoder.steps(tokens, config.batch.tokens), **sizes),  # type: ignore[arg-type]
        PhaseSize(name="generate", steps=0, decode_steps=config.generate.max_tokens, **sizes),  # type: ignore[arg-type]
        PhaseSize(
            name="verify",
            steps=0,
            cpu_core_s=count * COMPILE_CORE_S if on_gpu else 0.0,  # once: the ablations share the cache
            gpu_s=rows * count * (CANDIDATE_GPU_S + CORRECT_SHARE * TIMING_GPU_S if on_gpu else INTERPRETED_S),
            **sizes,  # type: ignore[arg-type]
        ),
    )


def memory(
    config: KernelConfig, phase_index: int, micro_batch: int, *, checkpointing: bool = False, ranks: int = 1
) -> Memory:
    """sft: fp32 state cut over the ranks, gathered weights of two layers. generate: bf16 weights on each GPU and the
    cache of its share of the sequences. verify: what a candidate may take.
    """
    m = config.model
    compute = 2 if config.precision.compute == "bf16" else 4
    total = decoder.parameters(m)
    weights = gradients = moments = activations = logits = 0.0
    if phase_index == 0:
        weights, gradients, moments = decoder.whole_state(m, compute, ranks, reshard=config.reshard_after_forward)
        tokens = micro_batch * config.data.row
        activations = decoder.activations(m, tokens, compute, checkpointing=checkpointing)
        logits = decoder.loss_bytes(m, tokens)
    elif phase_index == 1:
        weights = total * compute
        sequences = -(-config.generate.tasks * config.generate.candidates // ranks)
        cache = 2 * m.layers * m.kv_heads * m.head_dim * compute
        activations = sequences * cache * (config.generate.max_tokens + 1024)
        logits = sequences * m.vocab * 8
    else:
        activations = config.funnel.memory_gb * GB
    return in_gb(weights=weights, gradients=gradients, moments=moments, activations=activations, logits=logits)


def ladder(config: KernelConfig, ranks: int = 1) -> tuple[Rung, ...]:
    """Two rows of 8192 tokens, one, then activation checkpointing."""
    whole = -(-(config.batch.tokens // config.data.row) // ranks)
    most = min(whole, 2)
    start = config.batch.micro_tokens // config.data.row if config.batch.micro_tokens else most
    return cuts(whole, min(start, whole), [most, most // 2])


def checkpoint_bytes(config: KernelConfig, phase_index: int) -> int:
    """Full state while training; afterwards nothing but results, which are small."""
    return 12 * decoder.parameters(config.model) if phase_index == 0 else 0


def export_bytes(config: KernelConfig) -> dict[str, int]:
    return {"weights": 2 * decoder.parameters(config.model)}


def dataset_bytes(config: KernelConfig) -> int:
    each = 6 if config.model.vocab > 1 << 16 else 4
    return int(config.data.samples * config.data.tokens_per_sample * each)


def weights_bytes(config: KernelConfig) -> int:
    """bf16, as they are published."""
    return 2 * decoder.parameters(config.model)
