"""The compiler over what a run does with a model: two sizes of micro-batch, in training and evaluation, over and over.
`fullgraph` makes a break an error; the number of graphs is counted, because more than 8 of one block are an error too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from gpufleet.job.experiments.engine.step import compiled
from gpufleet.job.experiments.growth import model as growth
from gpufleet.job.experiments.growth.spec import Batch, GrowthConfig, GrowthModel, Precision, TextData
from gpufleet.job.experiments.models import decoder, float8, lora
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.experiments.models.config import Lora
from gpufleet.job.experiments.pretrain import model as char_gpt
from gpufleet.job.experiments.pretrain.spec import CharModel

ROW = 8
GROWTH = GrowthConfig(
    model=GrowthModel(vocab=32, layers=2, width=16, heads=2, ffn=32, experts=4, top_k=2, new_layers=1),
    data=TextData(sequence=ROW, source="generated-stories"),
    batch=Batch(sequences=3),
    precision=Precision(compute="bf16", phase3_state="fp32"),
)
SHAPE = Shape(
    vocab=32, layers=3, width=16, heads=2, kv_heads=1, head_dim=8, ffn=16, rope_theta=1e4, rope_scaling="none"
)


def experts(dispatch: str) -> nn.Module:
    module = growth.build(GROWTH, 1)
    module.set_dispatch(dispatch)  # type: ignore[arg-type]
    return module


def fine_tuned(adapter: bool) -> nn.Module:
    drawn = torch.Generator().manual_seed(1)
    module = decoder.build(replace(SHAPE, family="qwen3"), compute=torch.bfloat16, generator=drawn)
    return lora.attach(module, Lora(rank=2, dropout=0.1), drawn) if adapter else module


def over_fp8() -> nn.Module:
    module = fine_tuned(adapter=True)
    wide = {name: layer.weight for name, layer in lora.layers(module)}
    lora.store(module, float8.DTYPE)
    fill = lora.filling(module)
    for name, layer in lora.layers(module):
        fill(layer.weight, wide[name])
    return module


# And how many graphs: one for each size, in training and evaluation, and as many of a loss where there is one; with an
# adapter the first block's input needs no gradient in training, the others' does.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "dense": (lambda: growth.build(GROWTH, 0), 8),
    "grouped experts": (lambda: experts("grouped"), 8),
    "padded experts": (lambda: experts("padded"), 8),
    "characters": (
        lambda: char_gpt.CharGpt(CharModel(vocab=32, layers=2, width=16, head_dim=8, kv_heads=1), torch.bfloat16),
        8,
    ),
    "all weights": (lambda: fine_tuned(adapter=False), 8),
    "adapter": (lambda: fine_tuned(adapter=True), 10),
    "adapter over fp8": (over_fp8, 10),
}

LONG = ("padded experts", "all weights")  # each is like another, and takes seconds


def inputs(module: nn.Module, rows: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(32, (rows, ROW), generator=torch.Generator().manual_seed(rows))
    if not isinstance(module, decoder.Decoder):
        return tokens, tokens
    documents = torch.arange(ROW).div(3, rounding_mode="floor").expand(rows, ROW).contiguous()
    starts = torch.full((3 * rows + 1,), rows * ROW, dtype=torch.int32)
    return tokens, tokens, documents, starts


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "checkpointing", [pytest.param(False, id="kept"), pytest.param(True, id="checkpointed", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in MODELS]
)
def test_a_block_is_one_graph_for_each_size_and_never_compiled_again(
    name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, expected = MODELS[name]
    module: Any = make()
    module.checkpointing = checkpointing
    monkeypatch.setattr(float8, "multiplies", lambda x, weight: True)  # as on a GPU
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    with compiled(module, torch.device("cuda")):
        for _ in range(2):
            for rows in (2, 1):
                module.train()
                module(*inputs(module, rows)).loss_sum.backward()
                module.eval()
                with torch.no_grad():
                    module(*inputs(module, rows))
        assert counters["stats"]["unique_graphs"] == expected
    assert any(parameter.grad is not None for parameter in module.parameters())
