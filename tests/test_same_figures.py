"""Figures that stand twice, because the job may import nothing of infra, are the same figures."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from infra.calibration import gpu_name
from infra.catalog import load_catalog
from infra.prepared import shape
from job.config.common import QWEN3_8B, Decoder
from job.models import hf
from job.train.device import DATA_SHEETS


def test_the_bill_and_the_job_measure_against_the_same_data_sheets() -> None:
    catalog = load_catalog()
    gpus = {found.gpu for kind in catalog.instance_types() if (found := catalog.instance(kind)) is not None}
    priced = {
        gpu.name: (gpu.bf16_tflops, gpu.bandwidth_gb_s, gpu.memory_gb)
        for gpu in gpus
        if gpu.bf16 and gpu.bf16_tflops and gpu.bandwidth_gb_s
    }
    known = {name: figures for board, figures in DATA_SHEETS.items() if (name := gpu_name(board)) is not None}
    assert known == priced


@pytest.mark.parametrize("model", [Decoder(), QWEN3_8B, replace(Decoder(), rope_scaling="none", tied=True, layers=2)])
def test_the_readiness_list_and_the_job_read_the_same_model_from_config_json(model: Decoder, tmp_path: Path) -> None:
    tree = hf.config_tree(model, "bfloat16")
    bare = {key: value for key, value in tree.items() if key not in ("head_dim", "num_key_value_heads", "rope_theta")}
    for each in (tree, bare, {**bare, "rope_parameters": {"rope_theta": 7.0}}):
        (tmp_path / "config.json").write_text(json.dumps(each))
        assert shape(each) == asdict(hf.read_shape(tmp_path))
