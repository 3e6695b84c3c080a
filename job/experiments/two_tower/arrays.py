"""Array types, and functions on arrays that several modules use. This module imports only numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Labels = NDArray[np.int8]


def unit_rows(rows: Floats) -> Floats:
    """The rows, scaled to length 1; a row of zeros stays zero."""
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit: Floats = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return unit
