"""What holds for every test."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

# A shell starts what it puts in the background with Ctrl-C ignored, and every process started from there inherits it.
# The tests press Ctrl-C themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: the garbage collector need not look at it, a fifth of a worker's start."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
