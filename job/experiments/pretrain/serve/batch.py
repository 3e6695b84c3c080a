"""Generates several texts at once: one thread runs the model, and each step reads every weight only once for all texts.
Texts begin and end between two steps (continuous batching). A step always has ROWS rows, so that a text does not depend
on the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from gpufleet.job.experiments.models.blocks import any_length
from gpufleet.job.experiments.pretrain.model import CharGpt, CharRows, Kept, Text

ROWS = 4  # texts at once


@dataclass(eq=False, slots=True)
class _Writing:
    """A text that is being generated, and its reader."""

    text: Text
    # None means that the text is complete
    made: SimpleQueue[int | Exception | None] = field(default_factory=SimpleQueue)
    left: bool = False  # whether its reader has left


class TextWriter:
    """Writes texts in the rows of one model. The writing thread exists while a text is being written."""

    def __init__(self, module: CharGpt, window: int) -> None:
        """Takes memory for ROWS texts of `window` positions: 1 MB per position in fp32 at full size."""
        self._module, self._cache = module, CharRows(module, ROWS, window)
        self._lock = threading.Lock()
        self._waiting: list[_Writing] = []
        self._rows: list[_Writing | None] = [None] * ROWS
        self._runs = False

    def write(self, text: Text) -> Iterator[int]:
        """The text's ids, one by one, from any thread. Raises the errors of the model."""
        writing = _Writing(text)
        with self._lock:
            self._waiting.append(writing)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="texts", daemon=True).start()
        try:
            while (made := writing.made.get()) is not None:
                if isinstance(made, Exception):
                    raise made
                yield made
        finally:
            writing.left = True

    def _run(self) -> None:
        while self._admit():
            try:
                with torch.no_grad(), any_length():
                    self._step()
            except Exception as error:  # noqa: BLE001 - each reader raises it
                for writing in filter(None, self._rows):
                    writing.made.put(error)
                self._rows = [None] * ROWS

    def _admit(self) -> bool:
        """Frees the rows of texts that are complete or whose reader has left, and gives these rows to waiting texts.
        Returns False if there is no text to write; then the thread ends.
        """
        with self._lock:
            for number, writing in enumerate(self._rows):
                if writing is None or writing.left or not writing.text.left:
                    if writing is not None:
                        writing.made.put(None)
                    self._rows[number] = self._waiting.pop(0) if self._waiting else None
            self._runs = any(self._rows)
            return self._runs

    def _step(self) -> None:
        """Writes one character of each text. Texts that begin (again) are computed one by one, and the others
        together.
        """
        together = []
        for number, writing in enumerate(self._rows):
            if writing is None:
                continue
            if writing.text.length:
                together.append((number, writing))
            else:
                cache = self._cache.row(number)
                writing.made.put(writing.text.take(self._read([writing.text.new], cache)[0]))
        if together:
            # This also writes to rows without a text, after the positions that are used.
            self._cache.place([writing.text.length if writing else 0 for writing in self._rows])
            tokens = [writing.text.new[-1:] if writing else [0] for writing in self._rows]
            logits_BV = self._read(tokens, self._cache)
            for number, writing in together:
                writing.made.put(writing.text.take(logits_BV[number]))

    def _read(self, tokens: list[list[int]], cache: Kept) -> Tensor:
        """The logits after the last of each row's tokens, fp32 on the CPU."""
        device = self._module.embed.weight.device
        logits: Tensor = self._module(torch.tensor(tokens, device=device), cache=cache).logits
        return logits[:, -1].float().cpu()
