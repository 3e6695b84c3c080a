"""Generates tokens in batches, with a key-value cache. The tokens of a sequence depend on its own seed, but not on
other sequences. The n-th token of a sequence is sampled with one uniform number, which is a hash of (seed, n), so that
no generator and no state are needed. Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from gpufleet.job.experiments.models.blocks import any_length
from gpufleet.job.experiments.models.decoder import Cache, Decoder

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # SplitMix64 (Steele, Lea, Flood 2014)


@torch.no_grad()
def generate(
    module: Decoder,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float = 0.0,
    seeds: Sequence[int] = (),
    stop: Collection[int] = (),
    heed: Callable[[], None] = lambda: None,
    agree: Callable[[bool], bool] = bool,
) -> list[list[int]]:
    """The ids that follow each prompt: at most `max_tokens`, and only those before the first id of `stop`. If
    `temperature` is 0, each token is the likeliest one; above 0, one seed per prompt is needed. `heed` is called before
    every token, and may raise an error, for example on a stop request. `agree` is called with whether this rank has
    finished, and returns the decision of all ranks. Without it, ranks whose GPUs differ in a last bit would stop at
    different tokens, and wait for each other for ever. Raises ValueError for an empty prompt. All prompts run as one
    batch.
    """
    if not prompts or max_tokens < 1:
        return [[] for _ in prompts]
    if not all(prompts):
        raise ValueError(f"prompt {next(i for i, p in enumerate(prompts) if not p)} is empty; give at least one token")
    if temperature > 0 and len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; sampling needs one seed per prompt")
    device, longest = module.embed.weight.device, max(map(len, prompts))
    padding_B = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    tokens_BT = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    cache = Cache(module, len(prompts), longest + max_tokens)
    written: list[list[int]] = [[] for _ in prompts]
    open_ = set(range(len(prompts)))
    training = module.training
    module.eval()
    for place in range(max_tokens):
        heed()
        with any_length():
            logits_B1V = module(tokens_BT, cache=cache, padding_R=padding_B).logits
        chosen_B = _choose(logits_B1V[:, 0], temperature, [uniform(seed, place) for seed in seeds])
        for row, token in enumerate(chosen_B.tolist()):
            if row in open_ and token in stop:
                open_.remove(row)
            elif row in open_:
                written[row].append(token)
        if agree(not open_):
            break
        tokens_BT = chosen_B[:, None]
    module.train(training)
    return written


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1), the same on every machine."""
    x = ((seed & MASK) * GOLDEN + (place + 1) * 0xBF58476D1CE4E5B9) & MASK
    for _ in range(2):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
    return (x >> 11) / (1 << 53)


def _choose(logits_BV: Tensor, temperature: float, uniforms: Sequence[float]) -> Tensor:
    """[B] int64. Samples by the inverse of the cumulative distribution. This is done in fp64, because a sum of 150,000
    terms in fp32 is not exact enough.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    cumulative_BV = torch.softmax(logits_BV.double() / temperature, -1).cumsum(-1)
    drawn_B1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, drawn_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
