"""Our decoders against those of `transformers`: same weights, batches and AdamW; the largest difference of the losses.

    pip install -e '.[hf]'; python bench/decoder_parity.py [--steps 100] [--width 64]

fp32 on the CPU, every family; `control`: our decoder against itself with every weight moved to the next representable
number, so that what rounding alone does is seen beside it.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from job.models import hf
from job.models.decoder import build
from job.spec.common import DecoderConfig as Shape

LR = 2e-4  # sft-h100's


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    a = parser.parse_args()
    worst = 0.0
    for family in get_args(get_type_hints(Shape)["family"]):
        difference, control = compare(family, a.steps, a.width)
        worst = max(worst, difference)
        print(f"{family}: {difference:.1e} over {a.steps} steps, control {control:.1e}", flush=True)  # noqa: T201
    return 0 if worst < 1e-4 else 1


def compare(family: str, steps: int, width: int) -> tuple[float, float]:
    """Largest differences of the losses in nats: theirs, and the control's."""
    shape = Shape(
        family=family,  # type: ignore[arg-type]
        vocab=512,
        layers=3,
        width=width,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn=3 * width,
        tied=family == "qwen3",
        rope_scaling="llama3" if family == "llama" else "none",
    )
    ours = build(shape, compute=torch.float32, generator=torch.Generator().manual_seed(3))
    moved = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
    modules: list[Any] = [ours, moved, theirs(ours)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=0.0) for m in modules]
    source = torch.Generator().manual_seed(5)
    furthest = [0.0, 0.0]
    for _ in range(steps):
        tokens = torch.randint(512, (4, 65), generator=source)
        losses = [module(tokens[:, :-1], tokens[:, 1:]).loss_sum / (4 * 64) for module in modules[:2]]
        losses.append(modules[2](input_ids=tokens, labels=tokens).loss)
        for i, loss in enumerate((losses[2], losses[1])):
            furthest[i] = max(furthest[i], abs(loss.item() - losses[0].item()))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return furthest[0], furthest[1]


def theirs(ours: Any) -> Any:
    """Their model with our weights, through our own files."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        hf.write(Path(folder), ours.named_parameters(), ours.shape, torch.float32)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


if __name__ == "__main__":
    sys.exit(main())
