"""One training step of each model on a GPU that is not there: shapes and devices flow, values do not. A tensor made on
the CPU that meets one of the GPU is an error here, as it would be there. Backward needs a driver and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.engine import optimizer
from gpufleet.job.experiments.engine.data import TokenDataset
from gpufleet.job.experiments.engine.experiment import Micro
from gpufleet.job.experiments.engine.packed_rows import PackedBatches
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.growth import model as growth
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.experiments.models import decoder, lora
from gpufleet.job.experiments.pretrain import characters
from gpufleet.job.experiments.pretrain import model as char_gpt
from gpufleet.job.experiments.pretrain.rows import Rows
from gpufleet.job.experiments.pretrain.run import make_optimizer
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.kind import from_json
from tests.job import pretrain_world as pretrain
from tests.job import sft_world as sft
from tests.job import train_world as growing

GPU = torch.device("cuda", 0)
Made = tuple[nn.Module, Callable[[], Iterable[Micro]], Callable[[nn.Module], torch.optim.Optimizer]]


def grown(tmp_path: Path, dispatch: str) -> Made:
    folder = growing.make(tmp_path, precision={"compute": "bf16"})
    config = from_json("tinystories-growth", {**growing.PARAMETERS, "precision": {"compute": "bf16"}})
    assert isinstance(config, GrowthConfig)
    module = growth.build(config, 1)
    module.set_dispatch(dispatch)  # type: ignore[arg-type]

    def batch() -> Iterable[Micro]:
        data = TokenDataset(folder / "data", vocab=config.model.vocab, sequence=config.data.sequence, device=GPU)
        return data.batch(config.seed, 0, 4, 3, World()).micros

    def opt(module: nn.Module) -> torch.optim.Optimizer:
        return optimizer.make(optimizer.groups(module, growth.decays, config.optim.weight_decay), config.optim, seed=1)

    return module, batch, opt


def adapted(tmp_path: Path) -> Made:
    parameters = sft.config(precision={"compute": "bf16"})
    config = from_json("sft-h100", parameters)
    assert isinstance(config, SftConfig)
    folder = sft.make(tmp_path, precision={"compute": "bf16"})
    base = decoder.build(config.model, compute=torch.bfloat16, dtype=torch.bfloat16)
    module = lora.attach(base, config.lora, torch.Generator().manual_seed(1))

    def batch() -> Iterable[Micro]:
        data = PackedBatches(folder / "data", read_manifest(folder / "data"), World(), GPU)
        return data.work("train", data.step(1, 0, 3, 1), 2).micros

    def opt(module: nn.Module) -> torch.optim.Optimizer:
        return optimizer.make([{"params": list(lora.weights(module).values())}], config.optim, seed=1)

    return module, batch, opt


def pretrained(tmp_path: Path) -> Made:
    config: PretrainConfig = pretrain.config(precision={"compute": "bf16"})
    folder = pretrain.make(tmp_path)
    module = char_gpt.CharGpt(config.model, torch.bfloat16)
    starts = Rows(folder / "data" / characters.TRAIN, sequence=32, device=torch.device("cpu")).step(1, 0, 3)

    def batch() -> Iterable[Micro]:
        rows = Rows(folder / "data" / characters.TRAIN, sequence=32, device=GPU)
        return rows.work(starts, World(), 2).micros

    return module, batch, lambda module: make_optimizer(module, config)


MODELS: dict[str, Callable[[Path], Made]] = {
    "grouped experts": lambda path: grown(path, "grouped"),
    "padded experts": lambda path: grown(path, "padded"),
    "adapter": adapted,
    "characters": pretrained,
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("made", MODELS)
def test_a_step_meets_no_tensor_of_another_device(made: str, checkpointing: bool, tmp_path: Path) -> None:
    module, batch, make = MODELS[made](tmp_path)
    module.checkpointing = checkpointing  # type: ignore[assignment]
    with FakeTensorMode(allow_non_fake_inputs=True):
        place(module)
        opt = make(module)
        module.train()
        sizes = set()
        for micro in batch():
            assert {given.device for given in micro.inputs if isinstance(given, torch.Tensor)} == {GPU}
            sizes.add(micro.inputs[0].shape[0])
            output: Any = module(*micro.inputs)
            assert output.loss_sum.device == GPU
            assert output.loss_sum.requires_grad
            assert all(figure.device == GPU for figure in output.aux.values())
        assert len(sizes) == 2  # the last one is smaller
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        assert optimizer.clip(opt, 1.0).device == GPU
        opt.step()
        states = [kept for state in opt.state.values() for kept in state.values()]
        assert states
        assert {kept.device for kept in states} == {GPU}


@pytest.mark.parametrize("made", MODELS)
def test_attention_gets_what_its_fast_kernels_take(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bits, all three alike: else the varlen kernel refuses, and torch's choice falls on a slow one, silently. And
    no mask: with one cuDNN, torch's choice on Hopper, gives gradients that are NaN at some lengths (pytorch issue
    196678).
    """
    seen: list[tuple[torch.dtype, ...]] = []

    def watched(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert kwargs.get("attn_mask") is None
            seen.append((q.dtype, k.dtype, v.dtype))
            return kernel(q, k, v, *args, **kwargs)

        return attend

    monkeypatch.setattr(varlen, "varlen_attn", watched(varlen.varlen_attn))
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched(F.scaled_dot_product_attention))
    module, batch, _ = MODELS[made](tmp_path)
    with FakeTensorMode(allow_non_fake_inputs=True):
        place(module)
        module(*next(iter(batch())).inputs)
    assert seen
    assert set(seen) == {(torch.bfloat16,) * 3}


def test_a_tensor_left_on_the_cpu_is_seen(tmp_path: Path) -> None:
    module, batch, _ = pretrained(tmp_path)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="device"):
        module(*next(iter(batch())).inputs)  # its weights were not placed


def place(module: nn.Module) -> None:
    """Every parameter anew on the GPU; nn.Module.to cannot swap pretended ones."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                there = torch.zeros(parameter.shape, dtype=parameter.dtype, device=GPU)
                part._parameters[name] = nn.Parameter(there, requires_grad=parameter.requires_grad)
