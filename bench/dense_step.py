"""Times one eager training step (forward, backward, fused AdamW), in fp32 on the CPU or bf16 on a GPU, for pairs of
models in turn.

    python bench/dense_step.py [--nanogpt PATH_OF_A_CHECKOUT] [--layers 7] [--sequences N] [--pairs 7] [--device cpu]

N sequences of 256 tokens: 2, or 32 on a GPU, where launching the kernels of 2 would take longer than running them.

- our dense model against nanoGPT of the same shape (nanoGPT has learned positions and a fused q, k, v; ours rotates);
- the mixture's forward pass, loss and backward pass against those of a dense model with as many active parameters,
  without the optimizer, because a mixture has more weights to update;
- only the mixture's FFN with its routing, against a dense FFN of equal active size;
- with `--launches` the program times nothing, and counts on the CPU how many kernels each step launches on a GPU.

The ratio is the median over pairs. The two models of a pair are timed one after the other, and each goes first in turn,
so that a noisy machine disturbs both alike. The brackets hold 95 % of such medians.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.profiler
from torch import Tensor, nn

from gpufleet.job.experiments.engine import device
from gpufleet.job.experiments.engine.optimizer import groups
from gpufleet.job.experiments.growth.model import build, decays
from gpufleet.job.experiments.growth.spec import GrowthConfig, GrowthModel, Precision, shape
from gpufleet.job.experiments.models.blocks import Experts, FeedForward

# Operators that launch one kernel on a GPU, though a CPU makes several of them.
ONE_LAUNCH = {
    *("aten::mul", "aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::div", "aten::copy_", "aten::roll"),
    *("aten::addmm", "aten::mm", "aten::bmm", "aten::cat", "aten::stack", "aten::_fused_adamw_", "aten::topk"),
    *("aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::gelu", "aten::gelu_backward"),
    *("aten::_log_softmax", "aten::_log_softmax_backward_data", "aten::_softmax", "aten::_softmax_backward_data"),
    *("aten::index_select", "aten::cumsum", "aten::sort", "aten::sum", "aten::mean", "aten::_grouped_mm"),
    *("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"),
    *("aten::embedding_dense_backward", "aten::embedding_sparse_backward", "aten::nll_loss_forward", "aten::zeros"),
    *("aten::zeros_like", "aten::zero_", "aten::arange", "aten::eq", "aten::nll_loss_backward", "aten::roll"),
}
# Operators that launch no kernel: they allocate memory, or make another view of it.
NO_LAUNCH = {
    "aten::view",
    "aten::_unsafe_view",
    "aten::reshape",
    "aten::transpose",
    "aten::t",
    "aten::expand",
    "aten::as_strided",
    "aten::split",
    "aten::split_with_sizes",
    "aten::unsqueeze",
    "aten::select",
    "aten::slice",
    "aten::detach",
    "aten::detach_",
    "aten::chunk",
    "aten::unflatten",
    "aten::flatten",
    "aten::permute",
    "aten::squeeze",
    "aten::narrow",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty_strided",
    "aten::alias",
    "aten::resolve_conj",
    "aten::resolve_neg",
    "aten::to",
    "aten::_to_copy",
    "aten::contiguous",
    "aten::result_type",
    "aten::view_as",
    "aten::_reshape_alias",
    "aten::expand_as",
    "aten::lift_fresh",
    "aten::resize_",
    "aten::resize_as_",
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::promote_types",
    "aten::sparse_dim",
    "aten::_nnz",
    "aten::_values",
    "aten::_indices",
    "aten::numel",
    "aten::is_coalesced",
    "aten::_sparse_coo_tensor_with_dims_and_tensors",
    "aten::can_cast",
    "aten::stride",
    "aten::size",
    "aten::unbind",
    "aten::dropout",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--sequences", type=int, help="of 256 tokens; default 2, on a GPU 32")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--launches", action="store_true")
    a = parser.parse_args()
    if a.launches:
        return count_launches(a.layers, a.nanogpt)
    found = device.choose(a.device, bf16=True)
    compute = "bf16" if found.is_cuda else "fp32"
    sequences = a.sequences or (32 if found.is_cuda else 2)
    config = replace(
        GrowthConfig(),
        model=replace(GrowthModel(), layers=a.layers),
        precision=Precision(compute=compute, phase3_state="fp32"),  # type: ignore[arg-type]
    )
    print(  # noqa: T201
        f"{found.name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {compute}, "
        f"{sequences} x 256 tokens"
    )
    tokens = torch.randint(config.model.vocab, (sequences, 257), device=found.torch)
    if a.nanogpt:
        ours = our_step(config, tokens)
        report("dense step / nanoGPT's", *paired(ours, nanogpt_step(a.nanogpt, config, tokens), a.pairs, found))
    steps = passes_of_models(config, tokens)
    report("mixture's step / dense model's of equal active size", *paired(*steps, a.pairs, found))
    x = torch.randn(sequences, 256, config.model.width, device=found.torch)
    x = x if compute == "fp32" else x.bfloat16()
    for dispatch in ("grouped", "padded"):
        report(f"experts ({dispatch}) / dense FFN", *paired(*ffns(config, x, dispatch), a.pairs, found))
    return 0


def count_launches(layers: int, nanogpt: Path | None) -> int:
    """Prints the launches of each step in bf16, of a small model: their number does not depend on the width."""
    small = GrowthModel(layers=layers, vocab=512, width=64, ffn=256)
    precision = Precision(compute="bf16", phase3_state="fp32")
    config = replace(GrowthConfig(), model=small, precision=precision)
    tokens = torch.randint(small.vocab, (2, 257))
    mixture, dense = passes_of_models(config, tokens)
    steps = {
        "our dense step": our_step(config, tokens),
        "the mixture's passes": mixture,
        "those of a dense model": dense,
    }
    if nanogpt:
        steps["nanoGPT's step"] = nanogpt_step(nanogpt, config, tokens, narrow=True)
    for name, step in steps.items():
        print(f"{name}: {sum(launches(step).values())} launches")  # noqa: T201
    return 0


def launches(step: Callable[[], None]) -> Counter[str]:
    """The operators of a step, by name, that launch a kernel on a GPU: those that neither only look at memory in
    another way nor are part of another one. A list's operator is one launch, and so is one that casts what it reads.
    """
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    found: Counter[str] = Counter()

    def visit(event: Any) -> None:
        whole = event.name.startswith("aten::_foreach_") or event.name in ONE_LAUNCH
        if whole or (event.name.startswith("aten::") and not event.cpu_children and event.name not in NO_LAUNCH):
            found[event.name] += 1
            return
        for child in event.cpu_children:
            visit(child)

    for event in profile.events():
        if event.cpu_parent is None:
            visit(event)
    return found


def our_step(config: GrowthConfig, tokens: Tensor) -> Callable[[], None]:
    """Our dense model's whole step."""
    module = build(config, 0, device=tokens.device)
    optimizer = torch.optim.AdamW(groups(module, decays, config.optim.weight_decay), lr=1e-4, fused=True)

    def step() -> None:
        out = module(tokens[:, :-1], tokens[:, 1:])
        (out.loss_sum / tokens[:, 1:].numel()).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def nanogpt_step(folder: Path, config: GrowthConfig, tokens: Tensor, *, narrow: bool = False) -> Callable[[], None]:
    """A step of nanoGPT's model, with autocast on a GPU, or if `narrow`, as in its train.py. The model is read from the
    checkout's model.py, which is not installed.
    """
    sys.path.insert(0, str(folder))
    theirs, m = importlib.import_module("model"), config.model
    module = theirs.GPT(
        theirs.GPTConfig(block_size=256, vocab_size=m.vocab, n_layer=m.layers, n_head=m.heads, n_embd=m.width)
    ).to(tokens.device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    x, y, cuda = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), tokens.device.type == "cuda"

    def step() -> None:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=cuda or narrow):
            _, loss = module(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def passes_of_models(config: GrowthConfig, tokens: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward, loss and backward of phase 2's mixture, and of a dense model as wide as its active experts."""
    wide = replace(config, model=replace(config.model, ffn=config.model.top_k * config.model.ffn))
    modules = build(config, 1, device=tokens.device), build(wide, 0, device=tokens.device)

    def passes(module: nn.Module) -> Callable[[], None]:
        for p in module.parameters():
            p.grad = torch.zeros_like(p)  # as between two micro-batches: no memory is asked for in the timed part

        def run() -> None:
            out = module(tokens[:, :-1], tokens[:, 1:])
            loss = out.loss_sum / tokens[:, 1:].numel()
            (loss if out.aux_loss is None else loss + config.optim.load_balance * out.aux_loss).backward()

        return run

    return passes(modules[0]), passes(modules[1])


def ffns(config: GrowthConfig, x_BTd: Tensor, dispatch: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """A mixture's FFN, and a dense one with as many active parameters."""
    mixture = shape(config.model, 1)
    dense = replace(shape(config.model, 0), ffn=mixture.top_k * mixture.ffn)
    modules = Experts(mixture).to(x_BTd.device), FeedForward(dense).to(x_BTd.device)
    for p in [*modules[0].parameters(), *modules[1].parameters()]:
        nn.init.normal_(p, 0.0, 0.02)
    modules[0].dispatch = dispatch  # type: ignore[assignment]

    def passes(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            leaf = x_BTd.clone().requires_grad_()
            y, _ = module(leaf)
            y.backward(torch.ones_like(y))
            module.zero_grad(set_to_none=True)

        return run

    return passes(modules[0]), passes(modules[1])


def paired(
    first: Callable[[], None], second: Callable[[], None], pairs: int, found: device.Device
) -> tuple[list[float], list[float]]:
    """The milliseconds of each call of `first` and of `second`, called in turn, after one unmeasured pair."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        for run, seen in list(zip((first, second), times, strict=True))[:: 1 if pair % 2 else -1]:
            start = time.perf_counter()
            run()
            found.synchronize()
            if pair:
                seen.append((time.perf_counter() - start) * 1e3)
    return times


def report(name: str, ours: list[float], theirs: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    # Ranks of the sorted pairs between which the median lies, by the sign test's normal approximation.
    low = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    print(  # noqa: T201
        f"{name}: {statistics.median(ratios):.3f} ({ratios[low]:.3f} to {ratios[-1 - low]:.3f}, {len(ratios)} pairs; "
        f"{statistics.median(ours):.1f} against {statistics.median(theirs):.1f} ms)"
    )


if __name__ == "__main__":
    sys.exit(main())
