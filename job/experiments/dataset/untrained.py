"""Checks whether the base weights were trained on the tokens of the chat template. Often the rows of these tokens never
were.

An adapter trains neither embedding nor head. So rows of zeros (Llama-3's base), equal rows of two tokens, or rows far
shorter than those of words stay unchanged, and the tuned model cannot stop. numpy is imported only here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from gpufleet.job.experiments.dataset import weights
from gpufleet.job.experiments.dataset.rendering import FileTokenizer, Template

# Trained rows are far from both thresholds, so a warning is seldom wrong and a slightly odd row passes. The thresholds
# are chosen, not measured on published weights.
ALIKE = 0.99  # two rows are alike if their cosine is above this
SHORT = 0.1  # a row is short if its length is below this share of the median length
# number of rows that are read for the median, evenly spread over the table, because untrained tokens are next to each
# other
LOOKED_AT = 8192


def untrained(tokenizer: FileTokenizer, template: Template) -> str:
    """A sentence about odd rows of the template's tokens, in the weights beside the tokenizer; empty if no row is odd,
    or if there are no weights. Raises ValueError for weights that cannot be read.
    """
    folder = tokenizer.file.parent
    if not weights.present(folder):
        return ""
    odd_tokens: dict[str, list[str]] = defaultdict(list)
    held = weights.check(folder)
    # Both tables are checked: the embedding, which reads tokens, and the head, which predicts them.
    for name, tokens in ((weights.EMBED, template.specials), (weights.HEAD, (template.end,))):
        if name in held:
            for token, why in _odd(held[name], {token: tokenizer.special(token) for token in tokens}):
                odd_tokens[f"{why} in {name}"].append(token)
    return "; ".join(f"{', '.join(tokens)} {why}" for why, tokens in odd_tokens.items())


def _odd(table: weights.Stored, ids: dict[str, int]) -> list[tuple[str, str]]:
    """For each row that looks untrained, its token and a description of the row."""
    import numpy as np

    places = np.unique([*range(0, table.shape[0], max(1, table.shape[0] // LOOKED_AT)), *ids.values()])
    rows: Any = table.rows(places.tolist())
    lengths = np.linalg.norm(rows, axis=1)
    typical = np.median(lengths)
    odd_rows = []
    for token, number in ids.items():
        own = int(np.searchsorted(places, number))
        cosines = rows @ rows[own] / np.maximum(lengths * lengths[own], np.finfo(np.float32).tiny)
        cosines[own] = 0.0
        if lengths[own] == 0:
            odd_rows.append((token, "zeros"))
        elif lengths[own] < SHORT * typical:
            odd_rows.append((token, f"less than {SHORT:g} of the usual length"))
        elif cosines.max() > ALIKE:
            odd_rows.append((token, "as another token's"))
    return odd_rows
