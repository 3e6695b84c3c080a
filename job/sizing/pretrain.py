"""pretrain-d64: a character-level GPT, cut over the GPUs of one node. A micro-batch counts rows per rank.

FLOPs are `full`: 6 x matmul parameters (head included, embedding look-up not) + 12 x layers x width x sequence, as
nanochat and llm-foundry count them.
"""

from __future__ import annotations

from job.dataset.characters import SYMBOLS
from job.sizing.common import GB, Memory, PhaseSize, Rung, cuts, processes
from job.spec.pretrain import CharModel, PretrainConfig

LOGIT_BYTES = 16  # per token and symbol: bf16 product, fp32 capped logits, log-probabilities, gradient
ADAMW_LR = 0.01  # of hidden matrices; AdamW moves every weight by about that much at each step, whatever the gradient
# Of the host, launching a compiled block of a micro-batch: 53 launches and 6 gradients added up, counted and timed as
# a decoder's are (decoder.py). Muon's own are left out.
LAYER_LAUNCH_MS, LAUNCH_MS = 1.5, 3.0
BACKWARD = 10  # tensors of the width that one block's backward pass holds besides (counted on the CPU, 2026-11-21)


def problems(config: PretrainConfig) -> list[tuple[str, str]]:
    m, found = config.model, []
    if m.width % m.head_dim:
        found.append(("model.head_dim", f"a divisor of the width, {m.width}"))
    if m.head_dim % 2:
        found.append(("model.head_dim", f"an even number (rotary positions turn pairs), not {m.head_dim}"))
    if m.kv_heads is not None and heads(m) % m.kv_heads:
        found.append(("model.kv_heads", f"a divisor of the number of heads, {heads(m)}"))
    if config.optim.kind == "adamw" and config.optim.lr > ADAMW_LR:
        found.append(
            ("optim.lr", f"at most {ADAMW_LR:g} with kind: adamw, not {config.optim.lr:g}: 0.02 is Muon's, try 3e-4")
        )
    for name, values in (("optim.betas", config.optim.betas), ("optim.momentum", config.optim.momentum)):
        if len(values) != 2:
            found.append((name, f"two numbers, not {len(values)}"))
    if not config.eval.prompts:
        found.append(("eval.prompts", "at least one prompt; sample_tokens: 0 switches samples off"))
    for prompt in config.eval.prompts:
        if not 1 <= len(prompt) <= config.data.sequence or set(prompt) - set(SYMBOLS):
            found.append(("eval.prompts", f"1 to {config.data.sequence} characters of {SYMBOLS!r}, not {prompt!r}"))
    return found


def heads(m: CharModel) -> int:
    """Query heads."""
    return m.width // m.head_dim


def layer_matmul(m: CharModel) -> int:
    """Parameters of one block: 12 x width squared with as many KV heads as heads."""
    kv = (m.kv_heads or heads(m)) * m.head_dim
    return 2 * m.width * m.width + 2 * m.width * kv + 8 * m.width * m.width


def parameters(m: CharModel) -> int:
    """All of them; norms have none."""
    return m.layers * layer_matmul(m) + 2 * m.vocab * m.width


def flops_per_token(config: PretrainConfig) -> int:
    """Training FLOPs of one character, full attention."""
    m = config.model
    return 6 * (m.layers * layer_matmul(m) + m.vocab * m.width) + 12 * m.layers * m.width * config.data.sequence


def ranks(config: PretrainConfig, gpu_count: int) -> int:
    return processes(config.device, config.gpus, gpu_count, config.batch.rows)


def phases(config: PretrainConfig) -> tuple[PhaseSize, ...]:
    """One phase. Early stop can only shorten it."""
    total = parameters(config.model)
    return (
        PhaseSize(
            name="train",
            params_total=total,
            params_active=total,
            params_trained=total,
            flops_per_token=flops_per_token(config),
            attention="full",
            state_bytes_per_param=16,
            optimizer_traffic_bytes_per_param=28,
            steps=config.steps,
            tokens_per_step=config.batch.rows * config.data.sequence,
            evaluations=-(-config.steps // config.eval.every),
            evaluation_tokens=config.eval.windows * config.data.sequence,
            decode_steps=len(config.eval.prompts) * config.eval.sample_tokens,
            launch_ms=LAUNCH_MS,
            micro_launch_ms=config.model.layers * LAYER_LAUNCH_MS,
            sharded=True,
        ),
    )


def memory(
    config: PretrainConfig, phase_index: int, micro_batch: int, *, checkpointing: bool = False, ranks: int = 1
) -> Memory:
    """All characters; fp32 weights, gradients and moments cut over the ranks; the gathered weights in the compute dtype
    (all of them with ZeRO-2, two blocks with ZeRO-3). Gradients are reduced at every micro-step, so none stays whole.
    Where the batch is one micro-batch alone the gradients come as the activations go: the peak is a little lower.
    """
    m = config.model
    compute = 2 if config.precision.compute == "bf16" else 4
    total = parameters(m)
    block = layer_matmul(m)
    copies = total * compute
    if ranks == 1:  # casts are part of a block's forward pass, and recomputed with it
        copies = 0 if compute == 4 else block * compute if checkpointing else copies
    elif config.reshard_after_forward:
        copies = 2 * block * compute
    weights, gradients = total * 4 / ranks + copies, total * 4 / ranks
    moments = (checkpoint_bytes(config, phase_index) - 4 * total) / ranks
    # on its way: one block's whole gradient, and what is reduced of it in fp32; alone only the largest matrix's
    reduced = block * (compute + 4) if ranks > 1 else 4 * m.width * m.width * 4
    tokens = micro_batch * config.data.sequence
    full, kept = (_layer_bytes(m, compute, checkpointing=on) for on in (False, checkpointing))
    activations = tokens * (m.layers * kept + full - kept + (3 + BACKWARD) * m.width * compute)
    logits = tokens * m.vocab * LOGIT_BYTES
    return Memory(
        weights_gb=weights / GB,
        gradients_gb=(gradients + reduced) / GB,
        moments_gb=moments / GB,
        activations_gb=activations / GB,
        logits_gb=logits / GB,
        total_gb=(weights + gradients + reduced + moments + activations + logits + dataset_bytes(config)) / GB,
    )


def rows_per_rank(config: PretrainConfig, ranks: int) -> int:
    """In a step."""
    return -(-config.batch.rows // ranks)


def ladder(config: PretrainConfig, ranks: int = 1) -> tuple[Rung, ...]:
    """4, 2, 1 rows per rank, then activation checkpointing."""
    whole = rows_per_rank(config, ranks)
    most = min(whole, 4)
    start = config.batch.micro or most
    return cuts(whole, min(start, whole), [most, most // 2, most // 4])


def checkpoint_bytes(config: PretrainConfig, phase_index: int) -> int:
    """fp32 weights and two moments; Muon keeps one moment of the hidden matrices."""
    m = config.model
    hidden, tables = m.layers * layer_matmul(m), 2 * m.vocab * m.width
    return (8 if config.optim.kind == "muon" else 12) * hidden + 12 * tables


def end_bytes(config: PretrainConfig, phase_index: int) -> int:
    return 4 * parameters(config.model)


def export_bytes(config: PretrainConfig) -> dict[str, int]:
    return {}


def final_bytes(config: PretrainConfig) -> dict[str, int]:
    return {"best": 4 * parameters(config.model)}


def cut_bytes(config: PretrainConfig, phase_index: int) -> int:
    return final_bytes(config)["best"]


def dataset_bytes(config: PretrainConfig) -> int:
    """One byte a character."""
    return config.data.characters


def weights_bytes(config: PretrainConfig) -> int:
    """It starts from nothing."""
    return 0


def _layer_bytes(m: CharModel, compute: int, *, checkpointing: bool) -> float:
    """What autograd keeps of one token in one block. With checkpointing its input, all products and attention."""
    kv = (m.kv_heads or heads(m)) * m.head_dim
    products = 2 * m.width + 2 * kv + 4 * m.width  # q, attention, k, v; the FFN's up-projection
    if checkpointing:
        return compute * (3 * m.width + products) + 4 * heads(m)  # o's and down's are products too
    rest = 4 * m.width + m.width + kv + 4 * m.width  # norms' inputs and outputs, q and k before their norm, ReLU^2
    return compute * (products + rest) + 4 * heads(m)
