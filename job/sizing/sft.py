"""sft-h100: LoRA or all weights of a decoder on packed rows. A micro-batch counts rows of `data.row` tokens.

With a frozen base a token costs 4 FLOP per base parameter (forward, and the gradient of the input), 6 per adapter
parameter, and attention within its own example.
"""

from __future__ import annotations

from job.dataset.rendering import TEMPLATES
from job.sizing import decoder
from job.sizing.common import Memory, PhaseSize, Rung, cuts, in_gb, processes
from job.spec.sft import SftConfig

VALIDATION_ROWS = 32  # compared in fp32 after the merge, adapter against merged weights
ANSWERS_AT_ONCE, ANSWERED_TOKENS = 20, 23_040  # prompts that are answered side by side by every rank, and their tokens
BASE_BYTES = 2  # of a frozen parameter: bf16, whatever the products are in
FP32_COST = 15  # of a token in true fp32 against bf16 tensor cores: H100 989 over 67 TFLOP/s


def problems(config: SftConfig) -> list[tuple[str, str]]:
    found = decoder.problems(config.model)
    if config.data.longest > config.data.row:
        found.append(("data.longest", f"at most data.row, {config.data.row}: examples are packed whole"))
    found += decoder.batch_problems(config.batch, config.data.row, config.optim.betas)
    return found


def ranks(config: SftConfig, gpu_count: int) -> int:
    """Never more than there are rows in a step."""
    return processes(config.device, config.gpus, gpu_count, config.batch.tokens // config.data.row)


def trained(config: SftConfig) -> int:
    """Parameters with gradients and moments."""
    m = config.model
    if config.method == "full":
        return decoder.parameters(m)
    rows = len(TEMPLATES[m.family].specials) * (1 if m.tied else 2) if config.lora.template_tokens else 0
    return decoder.lora_parameters(m, config.lora.rank) + rows * m.width


def trains_head(config: SftConfig) -> bool:
    """Whether the head's table has a gradient: all of it is made, also where a few rows are trained."""
    return config.method == "full" or config.lora.template_tokens


def flops_per_token(config: SftConfig) -> int:
    """Useful training work of one token."""
    matmul = decoder.matmul_parameters(config.model)
    context = example_tokens(config) if config.measures.packing else config.data.row
    attention = decoder.attention_flops(config.model, context)
    if config.method == "full":
        return 6 * matmul + attention
    return 4 * matmul + 6 * trained(config) + _head_flops(config) + attention


def _head_flops(config: SftConfig) -> int:
    """What one token adds with adapters to the gradient of the head, where some of its rows are trained."""
    return 2 * config.model.vocab * config.model.width if trains_head(config) else 0


def forward_share(config: SftConfig) -> float:
    """Of a token's work in training. Nearly half with a frozen base, whose weights get no gradients."""
    matmul, own, whole = decoder.matmul_parameters(config.model), trained(config), flops_per_token(config)
    if config.method == "full":
        return 1 / 3
    attention = whole - 4 * matmul - 6 * own - _head_flops(config)
    return (2 * (matmul + own) + attention / 3) / whole


def example_tokens(config: SftConfig) -> float:
    """Of the mean example, cut where `data.longest` cuts it."""
    return min(config.data.tokens_per_example, config.data.longest)


def fill(config: SftConfig) -> float:
    """Share of a row that is text, the rest being padding."""
    return config.data.fill if config.measures.packing else example_tokens(config) / config.data.row


def phases(config: SftConfig) -> tuple[PhaseSize, ...]:
    """`train`, then `merge`: five validation losses and the stored answers."""
    m, rows = config.model, config.batch.tokens // config.data.row
    train_tokens = config.epochs * config.data.examples * (1 - config.data.held_out) * example_tokens(config)
    count = decoder.steps(train_tokens, rows * config.data.row * fill(config))
    total = decoder.parameters(m)
    sharded = config.method == "full"
    adapters = 0 if sharded else trained(config)
    evaluation = config.eval.rows * config.data.row
    sizes = {
        "params_total": total + adapters,
        "params_active": total + adapters,
        "params_trained": trained(config),
        "flops_per_token": flops_per_token(config),
        "state_bytes_per_param": 16,
        "optimizer_traffic_bytes_per_param": 28,
        "tokens_per_step": config.batch.tokens,
        "forward_share": forward_share(config),
        "launch_ms": decoder.LAUNCH_MS,
        "micro_launch_ms": m.layers * (decoder.LAYER_LAUNCH_MS if sharded else decoder.LORA_LAUNCH_MS),
        "sharded": sharded,
    }
    train = PhaseSize(
        name="train",
        steps=count,
        evaluations=-(-count // config.eval.every),
        evaluation_tokens=evaluation,
        **sizes,  # type: ignore[arg-type]
    )
    exact = 2 * min(VALIDATION_ROWS, config.eval.rows) * FP32_COST * config.data.row
    merge = PhaseSize(
        name="merge",
        steps=0,
        forward_tokens=0 if sharded else 3 * evaluation + exact,  # all weights: the last evaluation was the one loss
        decode_steps=config.eval.sample_tokens * -(-config.eval.prompts // answers_at_once(config)),
        **sizes,  # type: ignore[arg-type]
    )
    return (train, merge)


def answers_at_once(config: SftConfig) -> int:
    """Prompts and answers of one batch: its cache and first pass hold less than a step of training."""
    return min(ANSWERS_AT_ONCE, max(1, ANSWERED_TOKENS // (config.data.longest + config.eval.sample_tokens)))


def memory(
    config: SftConfig, phase_index: int, micro_batch: int, *, checkpointing: bool = False, ranks: int = 1
) -> Memory:
    """LoRA: base in bf16, adapters with fp32 state, on every rank; products in fp32 cast the base's matrices, which
    stays until backward (with checkpointing one layer's). Full: fp32 state cut over the ranks, and the gathered weights
    of the compute dtype (two layers with ZeRO-3, all of them with ZeRO-2).
    """
    m = config.model
    compute = 2 if config.precision.compute == "bf16" else 4
    total, own = decoder.parameters(m), trained(config)
    if config.method == "lora":
        layers = 0 if compute == BASE_BYTES else 1 if checkpointing else m.layers
        cast = layers * decoder.layer_matmul(m) + (m.vocab * m.width if layers else 0)
        base = total * BASE_BYTES + own * 4
        base += m.vocab * m.width * compute if trains_head(config) else 0  # a copy of the head with its trained rows
        weights, gradients, moments = float(base + cast * compute), float(own * 4), float(own * 8)
        rank = config.lora.rank
    else:
        weights, gradients, moments = decoder.whole_state(
            m, compute, ranks, reshard=config.reshard_after_forward, checkpointing=checkpointing
        )
        rank = 0
    tokens = micro_batch * config.data.row if phase_index == 0 else config.data.row
    activations = decoder.activations(m, tokens, compute, checkpointing=checkpointing, adapters=rank)
    if phase_index == 1:
        gradients = moments = 0.0
        activations = tokens * decoder.layer_activation_bytes(  # of one layer at a time
            m, compute, checkpointing=checkpointing, adapters=rank
        )
        weights = base if config.method == "lora" else total * compute
    logits = decoder.loss_bytes(m, tokens, trained=trains_head(config) and phase_index == 0)
    return in_gb(weights=weights, gradients=gradients, moments=moments, activations=activations, logits=logits)


def rows_per_rank(config: SftConfig, ranks: int) -> int:
    """In a step."""
    return -(-(config.batch.tokens // config.data.row) // ranks)


def ladder(config: SftConfig, ranks: int = 1) -> tuple[Rung, ...]:
    """8192 tokens, 4096, and so on: rows per rank and forward, halved."""
    whole = rows_per_rank(config, ranks)
    most = min(whole, max(1, 8192 // config.data.row))
    start = config.batch.micro_tokens // config.data.row if config.batch.micro_tokens else most
    return cuts(whole, min(start, whole), [most, most // 2, most // 4])


def checkpoint_bytes(config: SftConfig, phase_index: int) -> int:
    return 12 * trained(config)


def end_bytes(config: SftConfig, phase_index: int) -> int:
    return 4 * trained(config)


def export_bytes(config: SftConfig) -> dict[str, int]:
    return {}


def final_bytes(config: SftConfig) -> dict[str, int]:
    """The adapter in bf16, and the merged model: fp32 at worst, when bf16 would round too much of the adapter away."""
    total = decoder.parameters(config.model)
    if config.method == "lora":
        return {"adapter": 2 * trained(config), "merged": 4 * total}
    return {"merged": 2 * total}


def cut_bytes(config: SftConfig, phase_index: int) -> int:
    """Of an adapter's run the adapter alone."""
    return next(iter(final_bytes(config).values()))


def dataset_bytes(config: SftConfig) -> int:
    """A token and what it belongs to: 4 bytes, or 6 where an id needs more than two."""
    each = 6 if config.model.vocab > 1 << 16 else 4
    return int(config.data.examples * example_tokens(config) * each / fill(config))


def weights_bytes(config: SftConfig) -> int:
    """bf16, as they are published."""
    return 2 * decoder.parameters(config.model)
