"""Counts the bytes that a step of the character model holds, operator by operator; as a program for 8 pretended ranks
at full size, without memory or GPU: one JSON line each.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpufleet.job.experiments.engine.parallel import World, shard
from gpufleet.job.experiments.models.config import DecoderConfig
from gpufleet.job.experiments.models.decoder import Decoder
from gpufleet.job.experiments.pretrain.model import CharGpt
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.kind.common import Memory, Rung
from tests.job import pretrain_world as pretrain

SHAPES: tuple[dict[str, Any], ...] = (
    {"layers": 4, "width": 64, "head_dim": 32},
    {"layers": 3, "width": 192, "head_dim": 32, "kv_heads": 1},
)


def small(**changed: Any) -> PretrainConfig:
    """A config with sequences long enough for activations to count."""
    return pretrain.config(data={"sequence": 128}, **changed)


class Alive(TorchDispatchMode):
    """Bytes of the storages that operators gave and that are still there, looked at after every `every` operators."""

    def __init__(self, known: Sequence[torch.Tensor], every: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self._operators, self._every = 0, 0, every
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._held: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._held[storage._cdata] = StorageWeakRef(storage)
        self._operators += 1
        if self._operators % self._every == 0:
            self.peak = max(self.peak, self.live_bytes())
        return out

    def live_bytes(self) -> int:
        """Also where a storage was emptied meanwhile, as FSDP does."""
        total = 0
        for key, kept in list(self._held.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(kept.cdata)
            if storage is None:
                del self._held[key]
            else:
                total += storage.nbytes()
        return total


def one_rank(config: PretrainConfig, micro: int, *, checkpointing: bool) -> float:
    """Peak bytes of forward and backward, besides weights and gradients; as a GPU would hold them."""
    module = _module(config, checkpointing)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [tensor for parameter in module.parameters() for tensor in (parameter, parameter.grad)]
    with Alive([tensor for tensor in known if tensor is not None]) as alive:
        _pass(module, config, micro)
    return float(alive.peak) - in_fp32_on_a_cpu(config, micro, checkpointing=checkpointing)


def many_ranks(config: PretrainConfig, micro: int, *, checkpointing: bool, ranks: int, every: int) -> float:
    """The same of one of several ranks, weights and gradients included: tensors and communication are pretended."""
    with _pretended(ranks) as world:
        module = _module(config, checkpointing)
        compute = module.compute_dtype
        shard(module, world, module.blocks, compute=compute, reshard=config.reshard_after_forward)
        with Alive([], every) as alive:
            for _ in range(2):  # the second one beside the gradients of the first
                _pass(module, config, micro)
    return float(alive.peak) - in_fp32_on_a_cpu(config, micro, checkpointing=checkpointing)


def whole_decoder(config: SftConfig, rows: int, *, ranks: int) -> float:
    """Of one of several ranks that train all weights of a decoder, `rows` rows at once."""
    with _pretended(ranks) as world:
        module = Decoder(config.model, torch.bfloat16)
        shard(module, world, module.blocks, compute=torch.bfloat16, reshard=config.reshard_after_forward)
        with Alive([]) as alive:
            for _ in range(2):
                tokens = torch.randint(100, (rows, config.data.row))
                torch.autograd.backward(module(tokens, tokens).loss_sum)
    return float(alive.peak)


@contextmanager
def _pretended(ranks: int) -> Iterator[World]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        world = World(size=ranks, mesh=init_device_mesh("cpu", (ranks,)))
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield world
    finally:
        dist.destroy_process_group()


def in_fp32_on_a_cpu(config: PretrainConfig, micro: int, *, checkpointing: bool) -> float:
    """Without CUDA a norm keeps its bf16 input as fp32: bytes that a GPU, whose norm is one kernel, does not hold."""
    if config.precision.compute == "fp32" or checkpointing:
        return 0.0
    model = config.model
    shared = (model.kv_heads or model.width // model.head_dim) * model.head_dim
    per_layer = 3 * model.width + shared  # inputs of two norms, q and k
    return micro * config.data.sequence * 2 * (model.layers * per_layer + 2 * model.width)


def _module(config: PretrainConfig, checkpointing: bool) -> CharGpt:
    compute = torch.bfloat16 if config.precision.compute == "bf16" else torch.float32
    module = CharGpt(config.model, compute).train()
    module.checkpointing = checkpointing
    return module


def _pass(module: CharGpt, config: PretrainConfig, micro: int) -> None:
    tokens, targets = torch.randint(17, (2, micro, config.data.sequence))
    loss = module(tokens, targets).loss_sum
    assert loss is not None
    torch.autograd.backward(loss)


def main() -> None:
    """m44x2816 with ZeRO-2; 16 of d64-true's 64 blocks with ZeRO-3 and activation checkpointing. 4 rows of 2048 on each
    of 8 ranks. Then 2 of Llama-3.1-8B's 32 layers, all weights trained, 2 rows of 4096.
    """
    warnings.simplefilter("ignore")
    for layers, width, deep in ((44, 2816, False), (16, 4096, True)):
        config = pretrain.config(
            model={"layers": layers, "width": width, "head_dim": 128},
            data={"sequence": 2048},
            batch={"rows": 256, "micro": 4},
            precision={"compute": "bf16"},
            reshard_after_forward=deep,
        )
        measured = many_ranks(config, 4, checkpointing=deep, ranks=8, every=29)
        _say(f"{layers} x {width}", measured, config.memory(0, Rung(micro=4, checkpointing=deep), 8))
    tuned = SftConfig(method="full", model=replace(DecoderConfig(), layers=2))
    _say("decoder, 2 layers", whole_decoder(tuned, 2, ranks=8), tuned.memory(0, Rung(micro=2), 8))


def _say(model: str, measured: float, memory: Memory) -> None:
    row = {
        "model": model,
        "measured_gb": round(measured / 1e9, 2),
        "predicted_gb": round(memory.total_gb - memory.moments_gb, 2),
        "moments_gb": round(memory.moments_gb, 2),
    }
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
