"""How long a step takes a node before it needs the others, by which a slow one of several is found."""

from __future__ import annotations

import time

import torch


class OwnTime:
    """The time of each step from its batch to its last backward pass, in which gradients cross the network. A GPU's is
    known once it has come so far, which nobody waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._began, self._open = 0.0, list[tuple[torch.cuda.Event, torch.cuda.Event]]()
        self._begun: torch.cuda.Event | None = None
        self.seconds = 0.0  # of the newest step that is known; 0: none

    def begin(self) -> None:
        """A step begins."""
        if self._is_cuda:
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()
        self._began = time.perf_counter()

    def end(self) -> None:
        """All is asked of the device that no other node takes part in."""
        if self._begun is None:
            self.seconds = time.perf_counter() - self._began
            return
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._open.append((self._begun, ended))
        while self._open and self._open[0][1].query():
            began, last = self._open.pop(0)
            self.seconds = began.elapsed_time(last) / 1e3
