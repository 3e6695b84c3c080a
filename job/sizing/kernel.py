"""kernel-sft: all weights on packed rows, then generation, then the funnel. A micro-batch counts rows.

The funnel's seconds per candidate are assumptions until a run has measured them, but for the judge's own work on a CPU.
Compilation is spread over all vCPUs: seconds to tens of seconds of one core. The rest is done by one worker per GPU,
one thing after another: it starts a process, sends inputs, and compares tens of megabytes per input in one thread. Most
of that time the GPU waits, and is paid for.
"""

from __future__ import annotations

from job.sizing import decoder
from job.sizing.common import GB, Memory, PhaseSize, Rung, cuts, in_gb, processes
from job.spec.kernel import KernelConfig

COMPILE_CORE_S = 20.0  # one Triton kernel with its variants, on one core
# Of a worker, for each candidate: a new process (4 CPU-s to import torch and triton), its driver and its tiny run.
STARTED_GPU_S = 6.0
# For a correct one besides: stages 4 and 5. Of that 29 s are the judge's own in one thread at a GPU's sizes, inputs
# kept: 10 s for stage 4 (8 of float16, 9 to 10 of one argument, 12 of two, 17 of three), 7 s for each try of stage 5 (6
# to 9), taken 1.4 times, and 9 s for what is checked once more as it is timed (8 of one argument, 10 of two). Measured:
# thread CPU time of funnel.Judge on four tasks, the last of packing and comparing alone, torch on the CPU in the
# candidate's place; 2 shared cores of an Intel Xeon, 2026-11-22. The rest, copies to the GPU and kernels, is assumed.
CORRECT_GPU_S = 35.0
FULL_RUN_S, INPUTS, ADVERSARIAL = 10.0, 5, 9  # of that stage 4; its random inputs then, and job/kernels/tasks.py's
INTERPRETED_S = 0.3  # of a rank, for a candidate in Triton's interpreter: 1,300 in 190 s on two (rehearsal, 2026-11-22)
CORRECT_SHARE = 0.2  # KernelLLM-8B reports pass@1 20.2
CHEATS = 56  # job/kernels/adversarial.py (of 57 one needs a CPU)
# The funnel and two rows without one of its extensions, on the same candidates; two rows without its rules, on those
# that are known. An upper bound: two rows carry over what was wrong before.
RULED_ROWS, OTHER_ROWS = 3, 2
AT_ONCE = 32  # sequences of a rank generated together, and lost together when it is stopped
TRIED = 4  # candidates per task of a curriculum's evaluation
HELD_OUT = 0.02  # share of the pairs that each evaluation runs over (job/dataset/kernel_pairs.py)


def problems(config: KernelConfig) -> list[tuple[str, str]]:
    found = decoder.problems(config.model)
    found += decoder.batch_problems(config.batch, config.data.row, config.optim.betas)
    if config.data.curriculum != "off" and config.epochs < 2:
        found.append(("data.curriculum", "off unless epochs is 2 or more: it acts upon what is tried between them"))
    return found


def ranks(config: KernelConfig, gpu_count: int) -> int:
    return processes(config.device, config.gpus, gpu_count, config.batch.tokens // config.data.row)


def candidates(config: KernelConfig) -> int:
    """Generated and known."""
    return config.generate.tasks * config.generate.candidates + known(config)


def known(config: KernelConfig) -> int:
    """Planted, and for the ablation those that cheat."""
    return config.funnel.planted + (CHEATS if config.funnel.ablations else 0)


def correct_s(config: KernelConfig) -> float:
    """Of a worker, for a correct candidate besides."""
    return CORRECT_GPU_S + FULL_RUN_S * (config.funnel.inputs - INPUTS) / (INPUTS + ADVERSARIAL)


def per_candidate(config: KernelConfig) -> dict[str, float]:
    """What the funnel's time in the bill is made of: core-seconds of a compilation, a worker's seconds for the stages
    after it, and the share of candidates taken to be correct, where that has a part in these.
    """
    if config.device != "cuda":
        return {"compile_s": 0.0, "judge_s": INTERPRETED_S}
    judge_s = STARTED_GPU_S + CORRECT_SHARE * correct_s(config)
    return {"compile_s": COMPILE_CORE_S, "judge_s": judge_s, "correct": CORRECT_SHARE}


def trainings(config: KernelConfig) -> tuple[str, ...]:
    """Names of the phases that train, each from the base weights. The last one's are kept."""
    return ("sft-uniform", "sft-adaptive") if config.data.curriculum == "compare" else ("sft",)


def phases(config: KernelConfig) -> tuple[PhaseSize, ...]:
    """`sft`, or `sft-uniform` and `sft-adaptive`; `generate`, `verify`. A run generates at the end of each training."""
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
        "launch_ms": decoder.LAUNCH_MS,
        "micro_launch_ms": m.layers * decoder.LAYER_LAUNCH_MS,
        "sharded": True,
        "workers": config.funnel.workers,
    }
    names, each = trainings(config), per_candidate(config)
    compile_s, judge_s = each["compile_s"], each["judge_s"]  # compiled once: the ablations share the cache
    judged = candidates(config)
    if config.funnel.ablations:
        judged = RULED_ROWS * judged + OTHER_ROWS * known(config)
    others = (len(names) - 1) * config.generate.tasks * config.generate.candidates  # judged in one row

    def training(name: str) -> PhaseSize:
        adaptive = config.data.curriculum != "off" and name == names[-1]
        tries = config.epochs - 1 if adaptive else 0
        tried = tries * config.generate.tasks * TRIED
        return PhaseSize(
            name=name,
            steps=decoder.steps(tokens, config.batch.tokens),
            forward_tokens=int(HELD_OUT * tokens),  # an evaluation after each epoch
            decode_steps=tries * config.generate.max_tokens,
            decode_sequences=config.generate.tasks * TRIED,
            decode_at_once=AT_ONCE,
            cpu_core_s=tried * compile_s,
            gpu_s=tried * judge_s,
            **sizes,  # type: ignore[arg-type]
        )

    return (
        *map(training, names),
        PhaseSize(
            name="generate",
            steps=0,
            decode_steps=len(names) * config.generate.max_tokens,
            decode_sequences=config.generate.tasks * config.generate.candidates,
            decode_at_once=AT_ONCE,
            **sizes,  # type: ignore[arg-type]
        ),
        PhaseSize(
            name="verify",
            steps=0,
            cpu_core_s=(candidates(config) + others) * compile_s,
            gpu_s=(judged + others) * judge_s,
            **sizes,  # type: ignore[arg-type]
        ),
    )


def memory(
    config: KernelConfig, phase_index: int, micro_batch: int, *, checkpointing: bool = False, ranks: int = 1
) -> Memory:
    """Training: fp32 state cut over the ranks, gathered weights of two layers. generate: the trained weights still cut,
    whole ones of the compute dtype on each GPU, and the cache of its share of the sequences. verify: what a candidate
    may take.
    """
    m, first = config.model, len(trainings(config))
    compute = 2 if config.precision.compute == "bf16" else 4
    total = decoder.parameters(m)
    weights = gradients = moments = activations = logits = 0.0
    if phase_index < first:
        weights, gradients, moments = decoder.whole_state(
            m, compute, ranks, reshard=config.reshard_after_forward, checkpointing=checkpointing
        )
        tokens = micro_batch * config.data.row
        activations = decoder.activations(m, tokens, compute, checkpointing=checkpointing)
        logits = decoder.loss_bytes(m, tokens, trained=True)
    elif phase_index == first:
        weights = total * (compute + 4 / ranks)
        sequences = min(AT_ONCE, -(-config.generate.tasks * config.generate.candidates // ranks))
        cache = 2 * m.layers * m.kv_heads * m.head_dim * compute
        activations = sequences * cache * (config.generate.max_tokens + 1024)
        logits = sequences * m.vocab * 8
    else:
        activations = config.funnel.memory_gb * GB
    return in_gb(weights=weights, gradients=gradients, moments=moments, activations=activations, logits=logits)


def rows_per_rank(config: KernelConfig, ranks: int) -> int:
    """In a step of training."""
    return -(-(config.batch.tokens // config.data.row) // ranks)


def ladder(config: KernelConfig, ranks: int = 1) -> tuple[Rung, ...]:
    """Two rows of 8192 tokens, one, then activation checkpointing."""
    whole = rows_per_rank(config, ranks)
    most = min(whole, 2)
    start = config.batch.micro_tokens // config.data.row if config.batch.micro_tokens else most
    return cuts(whole, min(start, whole), [most, most // 2])


def checkpoint_bytes(config: KernelConfig, phase_index: int) -> int:
    """Full state while training; afterwards nothing but results, which are small."""
    return 12 * decoder.parameters(config.model) if phase_index < len(trainings(config)) else 0


def end_bytes(config: KernelConfig, phase_index: int) -> int:
    """fp32 weights, which the stages after training start from again."""
    return checkpoint_bytes(config, phase_index) // 3


def export_bytes(config: KernelConfig) -> dict[str, int]:
    return {}


def final_bytes(config: KernelConfig) -> dict[str, int]:
    return {"weights": 2 * decoder.parameters(config.model)}


def cut_bytes(config: KernelConfig, phase_index: int) -> int:
    return final_bytes(config)["weights"]


def dataset_bytes(config: KernelConfig) -> int:
    each = 6 if config.model.vocab > 1 << 16 else 4
    return int(config.data.samples * config.data.tokens_per_sample * each)


def weights_bytes(config: KernelConfig) -> int:
    """bf16, as they are published."""
    return 2 * decoder.parameters(config.model)
