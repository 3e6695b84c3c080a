"""sft-h100 with its base in fp8: what training loses by it, what is stored and merged, memory, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.experiments.models import float8, hf, hf_config, lora
from gpufleet.job.experiments.models.decoder import Decoder, build
from gpufleet.job.experiments.sft.run import Sft
from gpufleet.job.experiments.sft.spec import SftConfig, SftPrecision
from gpufleet.job.experiments.tuning import run as tuning
from gpufleet.job.experiments.tuning import spec as sizes
from gpufleet.job.kind import batch, from_json
from gpufleet.job.kind.common import GB, Rung
from tests.job import sft_world as sft
from tests.job import train_world as world
from tests.job.train_world import StopAt

pytestmark = pytest.mark.xdist_group("ranks")
LIMIT = 0.002  # nats; at most 0.0004 was seen
FP8: dict[str, Any] = {"precision": {"compute": "fp32", "base": "fp8"}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = sft.make(tmp_path_factory.mktemp("fp8"), **FP8)
    assert world.train(workdir) == 0
    return workdir


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = sft.make(tmp_path_factory.mktemp("bf16"))
    assert world.train(workdir) == 0
    return workdir


def begun(workdir: Path) -> tuple[Sft, Decoder]:
    experiment = world.experiment(workdir)
    assert isinstance(experiment, Sft)
    module = experiment.begin(experiment.phases[0], None)
    assert isinstance(module, Decoder)
    return experiment, module


def test_a_run_loses_little_by_its_base(finished: Path, plain: Path) -> None:
    ours, theirs = (world.records(workdir) for workdir in (finished, plain))
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)]
    assert 0 < max(differences) < LIMIT
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.05
    assert abs(ours[-1]["val_loss"] - theirs[-1]["val_loss"]) < LIMIT


def test_the_adapter_is_merged_into_the_base_as_it_was_published(finished: Path) -> None:
    experiment, _ = begun(finished)
    adapter, merged = (load_file(finished / "final" / name) for name in (f"adapter/{hf.ADAPTER}", hf.WEIGHTS))
    for name, layer in tuning.base(experiment.session, experiment.config, torch.bfloat16).named_parameters():
        key = f"base_model.model.{hf_config.published(name).removesuffix('.weight')}"
        weight = layer.detach().float()
        if f"{key}.lora_A.weight" in adapter:
            a, b = (adapter[f"{key}.lora_{x}.weight"].float() for x in "AB")
            weight = weight + 8 / 4 * b @ a
        torch.testing.assert_close(merged[hf_config.published(name)].float(), weight, rtol=1e-2, atol=2e-4)
    table = sft.results(finished)
    assert table["merge"]["fp32_matches"] is True
    # the loss during training is that of the base in fp8; the table has those of the base in bf16
    difference = abs(table["losses"]["adapter_fp32"]["loss"] - table["phases"][0]["val_loss"])
    assert 0 < difference < LIMIT


def test_a_resumed_run_quantises_again_and_ends_alike(finished: Path, tmp_path: Path) -> None:
    workdir = sft.make(tmp_path, **FP8)
    assert world.train(workdir, StopAt(workdir, 3)) == TrainerExit.STOPPED
    assert world.train(workdir) == 0
    assert sft.hashes(workdir) == sft.hashes(finished)
    for key in ("losses", "merge", "answers"):
        assert sft.results(workdir)[key] == sft.results(finished)[key]


def test_a_checkpoint_has_nothing_of_the_base(finished: Path) -> None:
    experiment, module = begun(finished)
    assert {layer.weight.dtype for _, layer in lora.layers(module)} == {float8.DTYPE}
    assert all(name.endswith(("lora_a", "lora_b")) for name in experiment.weights(module))
    blank = experiment.blank(experiment.phases[0])
    for (_, ours), (_, theirs) in zip(lora.layers(blank), lora.layers(module), strict=True):
        assert ours.row_scales is not None
        assert theirs.row_scales is not None
        assert torch.equal(ours.weight.float(), theirs.weight.float())
        assert torch.equal(ours.row_scales, theirs.row_scales)


def test_published_weights_are_quantised_as_they_are_read(tmp_path: Path) -> None:
    workdir = sft.make(tmp_path, **FP8)
    config = from_json("sft-h100", sft.config())
    assert isinstance(config, SftConfig)
    base = build(config.model, compute=torch.float32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(9))
    hf.write(workdir / "inputs", base.named_parameters(), config.model, torch.bfloat16)
    _, module = begun(workdir)
    for name, layer in lora.layers(module):
        weight, scales = float8.quantise(base.get_parameter(f"{name}.weight"))
        assert torch.equal(layer.weight.float(), weight.float())
        assert layer.row_scales is not None
        assert torch.equal(layer.row_scales, scales)


def test_template_rows_are_trained_beside_it(tmp_path: Path) -> None:
    _, module = begun(sft.make(tmp_path, **FP8, lora={"template_tokens": True}))
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == set(lora.weights(module))
    assert "embed.trained_rows" in trained
    assert isinstance(module.embed, lora.TrainedRows)
    assert torch.equal(module.embed.trained_rows, module.embed.weight[module.embed.ids].float())


def test_its_matrices_take_half_the_memory_while_it_trains_and_all_of_it_afterwards() -> None:
    bf16 = SftConfig()
    fp8 = replace(bf16, precision=SftPrecision(base="fp8"))
    m, rung = bf16.model, Rung(micro=1)
    matrices = m.layers * sizes.layer_matmul(m)
    scales = 4 * m.layers * (m.heads * 128 + 2 * m.kv_heads * 128 + 2 * m.width + 2 * m.ffn)
    dequantised = 2 * m.width * m.ffn
    before, after = (config.memory(0, rung) for config in (bf16, fp8))
    fewer = (before.weights_gb - after.weights_gb) * GB
    assert fewer == pytest.approx(matrices - scales - dequantised, abs=1)
    assert 6.8e9 < fewer < 7.0e9
    assert after.parts | {"weights": 0} == before.parts | {"weights": 0}
    assert fp8.memory(1, rung) == bf16.memory(1, rung)
    picked = [batch.choose_rung(config, 48.0) for config in (bf16, fp8)]
    assert all(picked)
    assert picked[1].micro > picked[0].micro or picked[0].checkpointing > picked[1].checkpointing  # type: ignore[union-attr]


def test_the_bill_claims_no_speed_but_has_the_base_read_once_more() -> None:
    bf16 = SftConfig()
    fp8 = replace(bf16, precision=SftPrecision(base="fp8"))
    (train, merge), (train8, merge8) = bf16.phases(), fp8.phases()
    assert train8 == train
    assert replace(merge8, gpu_s=0.0) == merge
    assert merge8.gpu_s == pytest.approx(16.06, abs=0.01)  # 8.03 B parameters of two bytes, a gigabyte a second


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"method": "full"}, "all weights are trained"),
        ({"lora": {"shard_base": True}}, "shard_base does not split fp8"),
    ],
)
def test_a_job_that_cannot_use_it_is_refused(changed: dict[str, Any], words: str) -> None:
    config = from_json("sft-h100", sft.config(**FP8, **changed))
    assert [path for path, sentence in config.problems() if words in sentence] == ["precision.base"]
