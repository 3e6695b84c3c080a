"""Student's t, for 95 % intervals of a mean over few folds or tasks. Standard library only."""

from __future__ import annotations

Z95 = 1.959964  # the same quantile of the normal distribution
# Two-sided 95% quantiles for 1 to 30 degrees of freedom, to three digits (any statistics table).
T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t95(degrees: int) -> float:
    """The two-sided 95 % quantile of t. Beyond the table it uses the first term of Cornish and Fisher's expansion."""
    return T95[degrees - 1] if degrees <= len(T95) else Z95 + (Z95**3 + Z95) / (4 * degrees)
