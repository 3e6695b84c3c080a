"""How often the divergence guard stops a healthy run, and how soon a diverged one: `python bench/guard_stops.py`.

Losses are drawn, not trained: easy rows fall from 10 nats to 1 within the first tenth, hard rows have thirty times the
loss of the easy ones, a step's loss is the mean over its rows. A divergence lifts the easy rows to 7 nats, in one step
or over many. Validation losses follow the easy rows. Writes bench/results/guard.md to standard output.
"""

from __future__ import annotations

import itertools
import platform
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from statistics import median

import numpy as np

from gpufleet.job.experiments.engine.guard import LossSpikeError, SpikeGuard
from gpufleet.job.kind import Guard

STEPS, SEEDS, EVERY = 20_000, 60, 10
EASY, HARD, DIVERGED = 1.0, 30.0, 7.0
FALLS = STEPS // 10
EVALUATED = 500  # steps between two evaluations
SINCE = 12_000  # the step at which a divergence begins


def easy(*, diverges_over: int | None = None) -> np.ndarray:
    """[STEPS] nats of an easy row. `diverges_over`: so many steps, from SINCE on, to DIVERGED."""
    step = np.arange(1, STEPS + 1)
    healthy = EASY + 9 * np.exp(-step / (FALLS / 5))
    if diverges_over is None:
        return healthy
    return healthy + (DIVERGED - EASY) * np.clip((step - SINCE) / max(1, diverges_over), 0, 1)


def losses(level: np.ndarray, *, seed: int, share: float, rows: int) -> np.ndarray:
    """[STEPS] logged losses: each of a step's `rows` is a hard one with the probability `share`."""
    drawn = np.random.default_rng(seed)
    hard = drawn.binomial(rows, share, STEPS)
    spread = 0.3 / np.sqrt(rows)
    easy_rows = level * np.exp(drawn.normal(0, spread, STEPS)) * (rows - hard)
    return (easy_rows + HARD * np.exp(drawn.normal(0, spread, STEPS)) * hard) / rows


def watched(level: np.ndarray, logged: np.ndarray, *, every: int, validation: bool = True) -> tuple[int, int | None]:
    """(looks at the validation loss outside its turn, the step at which the guard stopped the run or None)."""
    guard, looks = SpikeGuard(Guard()), 0
    for step in range(every, STEPS + 1, every):
        val_loss = float(level[step - 1]) if validation and step % EVALUATED == 0 else None
        if guard.see(float(logged[step - 1]), step, val_loss):
            looks += val_loss is None
            try:
                guard.judge(float(level[step - 1]) if validation else None, step)
            except LossSpikeError:
                return looks, step
    return looks, None


def main() -> None:
    say = sys.stdout.write
    say(
        "# False stops of the divergence guard, and real divergences\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, numpy {np.__version__}. "
        "`python bench/guard_stops.py` wrote this.\n\n"
        f"Drawn losses, {SEEDS} runs of {STEPS:,} steps each, evaluated every {EVALUATED}; hard rows have thirty times "
        "the loss of the easy ones. Guard: the defaults.\n\n"
        "## Healthy runs\n\n"
        "| Hard rows | Rows a step | Logged every | Stopped | Stopped where nothing is held out | Looks at the "
        "validation loss, all runs |\n|---|---|---|---|---|---|\n"
    )
    for line in healthy():
        say(line)
    say(
        "\n## Planted divergences\n\n"
        f"From step {SINCE:,} on, easy rows rise from {EASY:g} to {DIVERGED:g} nats; logged every {EVERY} steps.\n\n"
        "| Hard rows | Rows a step | Rise takes | Stopped | Steps from the beginning of the rise, median (most) |\n"
        "|---|---|---|---|---|\n"
    )
    for line in planted():
        say(line)


def healthy() -> Iterator[str]:
    level = easy()
    for share, rows, every in itertools.product((0.0, 0.01, 0.02, 0.05), (4, 16, 64), (EVERY, 1)):
        looks = stops = blind = 0
        for seed in range(SEEDS):
            logged = losses(level, seed=seed, share=share, rows=rows)
            found, stopped = watched(level, logged, every=every)
            looks, stops = looks + found, stops + (stopped is not None)
            blind += watched(level, logged, every=every, validation=False)[1] is not None
        yield f"| {share:.0%} | {rows} | {every} | {stops} of {SEEDS} | {blind} of {SEEDS} | {looks} |\n"


def planted() -> Iterator[str]:
    for share, rows, over in itertools.product((0.0, 0.01, 0.02, 0.05), (4, 16, 64), (1, 500, 2000)):
        level, delays = easy(diverges_over=over), []
        for seed in range(SEEDS):
            _, stopped = watched(level, losses(level, seed=seed, share=share, rows=rows), every=EVERY)
            if stopped is not None and stopped > SINCE:
                delays.append(stopped - SINCE)
        late = f"{median(delays):,.0f} ({max(delays):,})" if delays else "-"
        yield f"| {share:.0%} | {rows} | {over:,} steps | {len(delays)} of {SEEDS} | {late} |\n"


if __name__ == "__main__":
    main()
