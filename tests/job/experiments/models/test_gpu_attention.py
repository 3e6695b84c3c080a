"""Which attention kernels generation may take, seen in torch's own switches: no GPU is needed to look at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpufleet.job.experiments.growth import model as growth
from gpufleet.job.experiments.growth.run import TinystoriesGrowth
from gpufleet.job.experiments.models import decoder
from gpufleet.job.experiments.models.blocks import any_length
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.experiments.models.generate import generate
from gpufleet.job.experiments.pretrain import model as char_gpt
from gpufleet.job.experiments.pretrain.spec import CharModel
from tests.job import train_world as world

SHAPE = Shape(
    vocab=32, layers=1, width=16, heads=4, kv_heads=2, head_dim=4, ffn=16, rope_theta=1e4, rope_scaling="none"
)


def allowed() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())


@contextmanager
def planned(module: nn.Module) -> Iterator[list[bool]]:
    """For every forward pass: whether attention may take cuDNN's kernels, which need a plan for each length."""
    seen: list[bool] = []
    hook = module.register_forward_pre_hook(lambda *_: seen.append(allowed()))
    try:
        yield seen
    finally:
        hook.remove()


def fine_tuned(tmp_path: Path) -> tuple[nn.Module, Callable[[], Any]]:
    module = decoder.build(SHAPE, compute=torch.float32, generator=torch.Generator().manual_seed(1))
    return module, lambda: generate(module, [[1, 2]], 3)


def pretrained(tmp_path: Path) -> tuple[nn.Module, Callable[[], Any]]:
    module = char_gpt.CharGpt(CharModel(vocab=32, layers=1, width=16, head_dim=8))
    return module, lambda: list(char_gpt.generate(module, char_gpt.Text([1, 2], allowed=17, max_tokens=3, window=8)))


def grown(tmp_path: Path) -> tuple[nn.Module, Callable[[], Any]]:
    experiment = world.experiment(world.make(tmp_path))
    assert isinstance(experiment, TinystoriesGrowth)
    module = growth.build(experiment.config, 0)
    return module, lambda: experiment._continue(module, "One day")


@pytest.mark.parametrize("made", [fine_tuned, pretrained, grown])
def test_no_length_of_a_generated_text_waits_for_a_plan_of_its_own(
    made: Callable[[Path], tuple[nn.Module, Callable[[], Any]]], tmp_path: Path
) -> None:
    module, write = made(tmp_path)
    before = allowed()
    with planned(module) as seen:
        write()
    assert before
    assert seen
    assert not any(seen)
    assert allowed()


def test_threads_that_generate_at_once_leave_training_its_kernels() -> None:
    first, second = any_length(), any_length()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not allowed()
    second.__exit__(None, None, None)
    assert allowed()
