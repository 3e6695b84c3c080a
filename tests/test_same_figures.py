"""Figures that stand twice, because the job may import nothing of infra, are the same figures."""

from __future__ import annotations

import pytest

from infra.catalog import load_catalog
from job.train.device import PEAK_TFLOPS, peak_tflops


def test_the_bill_and_the_job_measure_mfu_against_the_same_peaks() -> None:
    catalog = load_catalog()
    gpus = {found.gpu for kind in catalog.instance_types() if (found := catalog.instance(kind)) is not None}
    priced = {gpu.name: gpu.bf16_tflops for gpu in gpus if gpu.bf16 and gpu.bf16_tflops}
    known = {name: peak for name, peak in priced.items() if name.split()[0] in PEAK_TFLOPS}
    assert {name.split()[0] for name in known} == set(PEAK_TFLOPS)
    for name, peak in known.items():
        assert peak_tflops(f"NVIDIA {name}") == pytest.approx(peak), name
