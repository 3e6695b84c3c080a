"""How full packed rows are on a realistic mix of lengths, how many examples they hold, and how long packing takes.

    python bench/packing.py [--examples 600000] [--row 4096] [--longest 1024] [--mean 361] [--sigma 0.7]

Lengths are log-normal with the mean of 600 k instruction examples in 870 MB (361 tokens; its spread, sigma 0.7, is
ours), cut at `longest`.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from gpufleet.job.experiments.dataset.packing import evened, first_fit_decreasing

SIGMA = 0.7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=600_000)
    parser.add_argument("--row", type=int, default=4096)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--mean", type=float, default=361.0)
    parser.add_argument("--sigma", type=float, default=SIGMA)
    a = parser.parse_args()
    drawn = np.random.default_rng(20261121).lognormal(np.log(a.mean) - a.sigma**2 / 2, a.sigma, a.examples)
    lengths = np.clip(np.rint(drawn), 8, a.longest).astype(np.int64)
    began = time.perf_counter()
    first = first_fit_decreasing(lengths, a.row)
    row_of = evened(lengths, first)
    seconds = time.perf_counter() - began
    rows = int(row_of.max()) + 1
    fill = lengths.sum() / (rows * a.row)
    before, most = int(np.bincount(first).max()), int(np.bincount(row_of).max())
    one_each = lengths.mean() / a.longest
    print(  # noqa: T201
        f"{a.examples:,} examples, mean {lengths.mean():.0f}, p95 {np.percentile(lengths, 95):.0f} tokens, "
        f"{(drawn > a.longest).mean():.1%} cut at {a.longest}: {rows:,} rows of {a.row}, fill {fill:.2%} in "
        f"{seconds:.1f} s; one example per row of {a.longest}: {one_each:.1%}; "
        f"{len(lengths) / rows:.0f} examples a row, at most {most} ({before} before crowded rows trade)"
    )
    return 0 if fill >= 0.98 else 1


if __name__ == "__main__":
    sys.exit(main())
