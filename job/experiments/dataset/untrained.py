"""Finds whether the base weights know the tokens of the chat template: the rows of these tokens were often never
trained.

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
ALIKE = 0.99  # cosine of two rows
SHORT = 0.1  # share of the median row's length
LOOKED_AT = 8192  # rows of a table, evenly spread: untrained tokens lie side by side


def untrained(tokenizer: FileTokenizer, template: Template) -> str:
    """What is odd about the rows of the template's tokens in the weights beside the tokenizer; "" if nothing is, or if
    there are no weights. Raises ValueError for weights that cannot be read.
    """
    folder = tokenizer.file.parent
    if not weights.present(folder):
        return ""
    odd_tokens: dict[str, list[str]] = defaultdict(list)
    held = weights.check(folder)
    # the embedding reads these rows, the head writes with them
    for name, tokens in ((weights.EMBED, template.specials), (weights.HEAD, (template.end,))):
        if name in held:
            for token, why in _odd(held[name], {token: tokenizer.special(token) for token in tokens}):
                odd_tokens[f"{why} in {name}"].append(token)
    return "; ".join(f"{', '.join(tokens)} {why}" for why, tokens in odd_tokens.items())


def _odd(table: weights.Stored, ids: dict[str, int]) -> list[tuple[str, str]]:
    """(token, a description of its row) for each row that looks untrained."""
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
