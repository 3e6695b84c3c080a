"""What the model keeps between forward and backward: as predicted, and less with activation checkpointing."""

from __future__ import annotations

import collections
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpufleet.job.experiments.growth.model import Growth, build, load
from gpufleet.job.experiments.growth.spec import Precision
from gpufleet.job.experiments.models import decoder, float8, lora
from gpufleet.job.experiments.models.blocks import DTYPES, rotations
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.experiments.models.config import Lora
from gpufleet.job.experiments.sft.spec import SftConfig, SftPrecision
from gpufleet.job.experiments.tuning.spec import TokenBatch, layer_activation_bytes
from gpufleet.job.kind.common import Rung
from tests.job.growth_models import CONFIG, PROBE, dense, moe
from tests.job.memory_count import Alive

pytestmark = pytest.mark.xdist_group("growth")

TOKENS, TARGETS = PROBE[:, :-1], PROBE[:, 1:]


def gradients(module: Growth) -> dict[str, Tensor]:
    module.zero_grad()
    output = module(TOKENS, TARGETS)
    (output.loss_sum / TARGETS.numel()).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


class Counter(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("phase", "dispatch"), [(0, "grouped"), (1, "grouped"), (1, "padded")])
def test_activation_checkpointing_recomputes_no_product_and_changes_no_gradient(phase: int, dispatch: str) -> None:
    module = load(CONFIG, phase, (dense, moe)[phase](torch.float32))
    module.set_dispatch(dispatch)  # type: ignore[arg-type]
    module.train()
    found, seen = [], []
    for on in (False, True):
        module.checkpointing = on
        with Counter() as counter:
            found.append(gradients(module))
        seen.append(counter.seen)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    for product in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "topk"):
        assert seen[0][product] == seen[1][product]
    before, after = ([n for name, n in counted.items() if "attention" in name] for counted in seen)
    assert sum(before) == sum(after)
    assert seen[1]["gelu"] == 2 * seen[0]["gelu"] > 0
    assert seen[1]["native_layer_norm"] > seen[0]["native_layer_norm"]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("phase", [0, 1, 2])
def test_predicted_activations_are_what_autograd_keeps(phase: int, compute: str) -> None:
    config = replace(CONFIG, precision=Precision(compute=compute, phase3_state="fp32"))  # type: ignore[arg-type]
    module = build(config, phase)
    module.set_dispatch("padded")
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = module.embed(TOKENS[:, :63]).to(module.compute_dtype).detach().requires_grad_()
    cos, sin = rotations(63, 16, x)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        for block in module.blocks:
            x, _ = block(x, cos, sin)
        module.norm(x)
    kept = sum(t.untyped_storage().nbytes() for pointer, t in held.items() if pointer not in own)
    if compute == "bf16":  # the weights' bf16 copies are counted with the weights
        kept -= 2 * sum(p.numel() for name, p in module.named_parameters() if name != "embed.weight")
    else:  # and so are q, k and v, put together
        projections = (f"attention.{part}." for part in "qkv")
        kept -= 4 * sum(p.numel() for part in projections for name, p in module.named_parameters() if part in name)
    config = replace(config, data=replace(config.data, sequence=63))
    assert config.memory(phase, Rung(micro=8)).activations_gb * 1e9 == pytest.approx(kept, rel=0.04)


@pytest.mark.parametrize(
    ("compute", "state", "checkpointing"),
    [("fp32", "bf16", False), ("bf16", "fp32", False), ("bf16", "fp32", True), ("bf16", "bf16", False)],
)
def test_a_steps_peak_has_the_weights_that_products_cast_to_their_own_dtype(
    compute: str, state: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(
        CONFIG,
        precision=Precision(compute=compute, phase3_state=state),  # type: ignore[arg-type]
        data=replace(CONFIG.data, sequence=TOKENS.shape[1]),
    )
    module = build(config, 2)
    module.set_dispatch("padded")
    monkeypatch.setattr(Growth, "look_up", lambda self, tokens: self.embed(tokens))  # as on a GPU, whose memory this is
    module.checkpointing = checkpointing
    parameters = list(module.parameters())
    with Alive(parameters) as alive:
        (module(TOKENS, TARGETS).loss_sum / TARGETS.numel()).backward()
    found = alive.peak + sum(parameter.nbytes for parameter in parameters)
    predicted = config.memory(2, Rung(micro=len(TOKENS), checkpointing=checkpointing))
    assert (predicted.total_gb - predicted.moments_gb) * 1e9 == pytest.approx(found, rel=0.05)


def test_checkpointed_layers_with_adapters_hold_each_product_once() -> None:
    shape = Shape(vocab=64, layers=1, width=512, heads=8, kv_heads=8, head_dim=64, ffn=1024, rope_scaling="none")
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    held = []
    for layers in (1, 2):
        drawn = torch.Generator().manual_seed(1)
        base = decoder.build(
            replace(shape, layers=layers), compute=torch.bfloat16, dtype=torch.bfloat16, generator=drawn
        )
        module = lora.attach(base, Lora(rank=16, dropout=0.1), drawn)
        module.train()
        module.checkpointing = True
        with Alive(list(module.parameters())) as alive:
            loss = module(tokens, tokens).loss_sum
        held.append(alive.live_bytes())
        assert loss is not None
    counted = layer_activation_bytes(shape, 2, Rung(micro=1, checkpointing=True), adapters=16)
    results = 2 * 2 * shape.width  # of o and down, which are held without need
    assert (held[1] - held[0]) / tokens.numel() == pytest.approx(counted + results, rel=0.02)


KEPT = [Rung(micro=1), Rung(micro=1, checkpointing=True), Rung(micro=1, checkpointing=True, products_too=True)]


@pytest.mark.parametrize("rung", KEPT, ids=["all", "products", "inputs"])
@pytest.mark.parametrize(
    ("compute", "rows", "stored"),
    [
        ("bf16", (), "bf16"),
        ("fp32", (), "bf16"),
        ("bf16", (5, 6, 7, 8), "bf16"),
        ("bf16", (), "fp8"),
        ("fp32", (), "fp8"),
    ],
)
def test_a_frozen_base_is_bf16_or_fp8_and_what_fp32_products_cast_of_bf16_stays_until_backward(
    compute: str, rows: tuple[int, ...], stored: str, rung: Rung
) -> None:
    shape = Shape(
        vocab=4096 if rows else 512,
        layers=4,
        width=256,
        heads=4,
        kv_heads=4,
        head_dim=64,
        ffn=1024,
        rope_scaling="none",
    )
    config = replace(
        SftConfig(),
        model=shape,
        lora=Lora(rank=8, dropout=0.1, template_tokens=bool(rows)),
        data=replace(SftConfig().data, row=64, longest=64),
        batch=TokenBatch(tokens=64),
        precision=SftPrecision(compute=compute, base=stored),  # type: ignore[arg-type]
    )
    drawn = torch.Generator().manual_seed(1)
    base = decoder.build(shape, compute=DTYPES[compute], dtype=torch.bfloat16, generator=drawn)
    module = lora.attach(base, config.lora, drawn, rows)
    if stored == "fp8":
        lora.store(module, float8.DTYPE)
        for _, layer in lora.layers(module):
            lora.filling(module)(layer.weight, torch.randn(layer.weight.shape))
    module.train()
    module.recompute(rung.checkpointing, products_too=rung.products_too)
    tokens, parameters = torch.zeros(1, 64, dtype=torch.int64), [*module.parameters(), *module.buffers()]
    with Alive(parameters) as alive:
        torch.autograd.backward(module(tokens, tokens).loss_sum)
    found = alive.peak + sum(parameter.nbytes for parameter in parameters)
    predicted = config.memory(0, rung)
    near = 0.11 if rung.products_too else 0.1  # the loss and the layer that is made again are not at once
    if stored == "fp8" and rung.checkpointing:
        near = 0.15  # about as many bytes too much, beside a smaller base
    assert (predicted.total_gb - predicted.moments_gb) * 1e9 == pytest.approx(found, rel=near)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_all_weights_on_one_gpu_are_cast_and_with_checkpointing_layer_by_layer(checkpointing: bool) -> None:
    shape = Shape(vocab=512, layers=8, width=256, heads=4, kv_heads=4, head_dim=64, ffn=1024, rope_scaling="none")
    config = replace(
        SftConfig(),
        method="full",
        model=shape,
        data=replace(SftConfig().data, row=64, longest=64),
        batch=TokenBatch(tokens=64),
    )
    module = decoder.Decoder(shape, torch.bfloat16)
    module.train()
    module.checkpointing = checkpointing
    tokens, parameters = torch.zeros(1, 64, dtype=torch.int64), list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with Alive([*parameters, *gradients]) as alive:
        torch.autograd.backward(module(tokens, tokens).loss_sum)
    found = alive.peak + sum(tensor.nbytes for tensor in (*parameters, *gradients))
    predicted = config.memory(0, Rung(micro=1, checkpointing=checkpointing))
    assert (predicted.total_gb - predicted.moments_gb) * 1e9 == pytest.approx(found, rel=0.05)
