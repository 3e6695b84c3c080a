"""Computes the bounds on the speed of a phase: from the GPU's data sheet, the host's kernel launches, and the exchange
between several GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpufleet.infra.catalog import Instance
from gpufleet.job.kind import JobConfig, batch
from gpufleet.job.kind.common import GB, PhaseSize, Rung

# Share of a link's rate in the data sheet that an all-reduce over eight GPUs reaches: 231 of 300 GB/s on p4d.24xlarge
# (github.com/NVIDIA/nccl/issues/527, 2022), 28 of 63 over PCIe 5.0 (issues/1639 there, 2025).
REACHED: Mapping[str, float] = {"nvlink": 0.77, "pcie": 0.45}
NETWORK_REACHED = 0.8  # share of a node's baseline network rate; an assumption
# Share of the time of a step's own work during which ranks can exchange gradients at the same time. With this share,
# the computed losses of 1B to 13B models over 16 to 128 H100s are within 2 % of the published ones (llm-foundry
# scripts/train/benchmarking, 2025-07).
BESIDE = 0.8
GRADIENT_BYTES = 4  # gradients are summed over ranks in fp32


def limit_ms(index: int, instance: Instance, config: JobConfig, ranks: int) -> float | None:
    """Milliseconds of a step of phase `index` at the rates of the data sheet; None if the sheet lacks one."""
    parts = limits_ms(index, instance, config, ranks)
    return None if parts is None else sum(parts)


def limits_ms(index: int, instance: Instance, config: JobConfig, ranks: int) -> tuple[float, float] | None:
    """Milliseconds of a step of phase `index`: for its matrix products at the dense peak of `ranks` GPUs, and for its
    memory traffic at their bandwidth. None if the data sheet lacks one of these rates. Activation checkpointing repeats
    reads and writes, but no matrix products (job/experiments/models/selective.py), except on a rung that keeps no
    products, which needs one more forward pass.
    """
    size, gpu, share = config.phases()[index], instance.gpu, instance.gpu_share
    peak, bandwidth = gpu.peak_tflops(config.products()), gpu.bandwidth_gb_s
    if peak is None or bandwidth is None:
        return None
    tokens = size.tokens_per_step * (1 + batch.empty_rows(config, ranks) / (config.rows() or 1))
    rung = _rung(instance, config, ranks)
    again = size.forward_share if rung.products_too and size.steps else 0.0
    shared_by = size.shared_by(ranks)
    compute_s = tokens * size.flops_per_token * (1 + again) / (peak * share * shared_by * 1e12)
    cut = shared_by if size.sharded or size.models else 1
    traffic = size.params_trained * size.optimizer_traffic_bytes_per_param / cut
    if rung.checkpointing and size.steps:
        held = (config.memory(index, option, ranks) for option in (Rung(micro=rung.micro), rung))
        whole, kept_gb = (0.0 if memory is None else memory.activations_gb for memory in held)
        made = max(0.0, whole - kept_gb) * GB
        traffic += 2 * batch.micro_batches(config, rung, ranks) * made
    return compute_s * 1e3, traffic / (bandwidth * share * 1e9) * 1e3


def launch_ms(size: PhaseSize, instance: Instance, config: JobConfig, ranks: int) -> float:
    """Milliseconds that the host needs for a step: to load the batch, and to launch the kernels of all micro-batches
    that fit on the GPUs.
    """
    prepared = size.launch_ms + batch.rows_per_rank(config, ranks) * size.row_host_ms
    if not size.micro_launch_ms:
        return prepared
    return prepared + batch.micro_batches(config, _rung(instance, config, ranks), ranks) * size.micro_launch_ms


def exchange_ms(
    size: PhaseSize, instance: Instance, config: JobConfig, ranks: int, nodes: int = 1, cards: str = "one"
) -> tuple[float, float]:
    """Milliseconds of a step's exchange on the link between a node's GPUs, and on the network between nodes."""
    nodes = min(nodes, ranks)
    per_node = ranks // nodes
    gradients = size.params_trained * GRADIENT_BYTES
    link_rate = instance.gpu.link_gb_s * REACHED[instance.gpu.link] * 1e9
    within = 0.0
    if per_node > 1 and size.models is None:
        micros = batch.micro_batches(config, _rung(instance, config, ranks), ranks)
        summed = micros * gradients if size.sharded else 2 * gradients
        within = (per_node - 1) / per_node * (micros * size.gathered_bytes + summed) / link_rate
    between = between_nodes_bytes(size, nodes) / (instance.between_nodes_gbps(cards) / 8 * NETWORK_REACHED * 1e9)
    return within * 1e3, between * 1e3


def between_nodes_bytes(size: PhaseSize, nodes: int) -> float:
    """Bytes that each node sends per step: every gradient twice, except those of its own part."""
    return 2 * (nodes - 1) / nodes * size.params_trained * GRADIENT_BYTES


def with_exchange(work_ms: float, within_ms: float, between_ms: float) -> float:
    """Milliseconds of a step with its exchange: within a node the exchange overlaps the work, and between nodes it
    follows the work.
    """
    return work_ms + max(0.0, within_ms - BESIDE * work_ms) + between_ms


def _rung(instance: Instance, config: JobConfig, ranks: int) -> Rung:
    return batch.choose_rung(config, instance.gpu_memory_gb, ranks=ranks) or config.ladder(ranks)[-1]
