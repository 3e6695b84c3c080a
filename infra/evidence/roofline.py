"""What a GPU's data sheet allows a phase of a job at most, and what its host needs to launch it."""

from __future__ import annotations

from gpufleet.infra.catalog import Gpu, Instance
from gpufleet.job.spec import JobConfig
from gpufleet.job.spec.common import PhaseSize


def limit_ms(size: PhaseSize, gpu: Gpu, config: JobConfig, ranks: int, *, share: float = 1.0) -> float | None:
    """Milliseconds of a step at the dense peak of `ranks` GPUs and their memory's bandwidth; None where the data sheet
    lacks one. `share`: of one GPU, for a slice.
    """
    peak, bandwidth = gpu.peak_tflops(config.products()), gpu.bandwidth_gb_s
    if peak is None or bandwidth is None:
        return None
    tokens = size.tokens_per_step * (1 + config.empty_rows(ranks) / config.rows())
    compute_s = tokens * size.flops_per_token / (peak * share * ranks * 1e12)
    cut = ranks if size.sharded else 1
    traffic_s = size.params_trained * size.optimizer_traffic_bytes_per_param / cut
    return (compute_s + traffic_s / (bandwidth * share * 1e9)) * 1e3


def launch_ms(size: PhaseSize, instance: Instance, config: JobConfig, ranks: int) -> float:
    """Milliseconds in which the host launches a step's kernels, with the micro-batches that the node's GPUs hold."""
    if not size.micro_launch_ms:
        return size.launch_ms
    rung = config.choose_rung(instance.gpu_memory_gb, ranks=ranks) or config.ladder(ranks)[-1]
    return size.launch_ms + config.micro_batches(rung, ranks) * size.micro_launch_ms
