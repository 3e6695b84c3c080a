"""Figures that stand twice, because the job may import nothing of infra, are the same figures."""

from __future__ import annotations

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.evidence.calibration import is_gpu
from gpufleet.job.experiments.engine.device import DATA_SHEETS


def test_the_bill_and_the_job_measure_against_the_same_data_sheets() -> None:
    catalog = load_catalog()
    gpus = {found.gpu for found in catalog.instances.values()}
    priced = {
        gpu.name: (gpu.bf16_tflops, gpu.bandwidth_gb_s, gpu.memory_gb)
        for gpu in gpus
        if gpu.bf16 and gpu.bf16_tflops and gpu.bandwidth_gb_s
    }
    known = {gpu.name: sheet for board, sheet in DATA_SHEETS.items() for gpu in gpus if is_gpu(board, gpu.name)}
    assert known == priced
