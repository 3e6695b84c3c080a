"""What a judge reads, and what its verdicts say together. The module imports no torch.

For each question the judge compares the trained model's answer with the answer of the data, which is cut at as many
tokens. It writes nothing: its verdict is the likelier one of the two words that may follow its prompt, so that the same
weights always give the same verdict. Judges tend to prefer an answer for its place (MT-Bench, arXiv 2306.05685).
Therefore each pair is judged in both orders. An answer wins if it is preferred in both of them; otherwise it is a tie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpufleet.job.experiments.dataset.chat import Turn
from gpufleet.job.experiments.dataset.rendering import TEMPLATES, FileTokenizer, Renderer
from gpufleet.job.experiments.models import hf_config
from gpufleet.job.experiments.models.config import DecoderConfig
from gpufleet.job.experiments.sft.spec import JUDGE_TOKENS, SftConfig
from gpufleet.job.experiments.tuning.spec import parameters

# the prompt of MT-Bench for pairs (pair-v2), shortened, because the judge writes no explanation
TEXT = """Please act as an impartial judge of the answers that two assistants gave to the question of a user. \
Choose the assistant that follows the instructions of the user and answers the question better. Consider how helpful, \
relevant, accurate and detailed the answers are. Do not let the order or the length of the answers influence you.

[Question]
{question}

[Answer of assistant A]
{a}
[End of the answer of assistant A]

[Answer of assistant B]
{b}
[End of the answer of assistant B]"""
BEGUN, SIDES = "The better answer is that of assistant", ("A", "B")  # the judge's answer begins thus, and ends with one
WORDS = " ".join((TEXT, BEGUN, *SIDES))
NEARLY = 0.05  # by what share a judge may have other parameters than `eval.judge_parameters` says
Z = 1.959964  # the 97.5 % quantile of the normal distribution


class Choice(NamedTuple):
    """The natural logarithms of the probabilities of both words after one prompt."""

    a: float
    b: float


class JudgeReader:
    """The prompts of a judge in the ids of its own tokenizer. Raises ValueError if the tokenizer cannot tell the
    verdicts apart.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        ends = renderer.tokenizer.encode_batch([f"{BEGUN} {side}" for side in SIDES])
        same = sum(1 for _ in itertools.takewhile(lambda ids: ids[0] == ids[1], zip(*ends, strict=False)))
        if same == min(map(len, ends)):
            raise ValueError(
                "job.parameters.eval.judge: the judge's tokenizer reads the verdicts A and B as the same tokens; name"
                " another judge, or, with generated data, prepare the dataset again"
            )
        self._begun = ends[0][:same]
        self.words = ends[0][same], ends[1][same]  # the tokens that decide

    def prompts(self, question: str, ours: str, theirs: str) -> list[list[int]]:
        """Two prompts about a question and its two answers: in the first `ours` is A, in the second B."""
        texts = (TEXT.format(question=question, a=a, b=b) for a, b in ((ours, theirs), (theirs, ours)))
        return [self._renderer.prompt([Turn("user", text), Turn("assistant", "")]) + self._begun for text in texts]


def open_judge(folder: Path, config: SftConfig) -> tuple[DecoderConfig, JudgeReader]:
    """The shape and the reader of the judge in `folder`. Raises ValueError if it cannot be used, or is not as large as
    the bill takes it to be.
    """
    try:
        shape = hf_config.read_shape(folder)
        hf_config.check(folder, shape)
        reader = JudgeReader(Renderer(TEMPLATES[shape.family], FileTokenizer(folder / FileTokenizer.kind)))
    except ValueError as error:
        raise ValueError(f"the judge of job.parameters.eval.judge: {error}") from error
    count, priced = parameters(shape), config.eval.judge_parameters
    if abs(count / priced - 1) > NEARLY:
        raise ValueError(
            f"{folder}: the judge has {count:,} parameters, but job.parameters.eval.judge_parameters is {priced:g}, and"
            f" the bill uses this number: write {count:.3g}"
        )
    longest = config.longest() + 2 * config.eval.sample_tokens + JUDGE_TOKENS
    if longest > (most := hf_config.positions(folder)):
        raise ValueError(
            f"{folder}: the judge was made for {most:,} positions, but a question with two answers may have {longest:,}"
            " tokens: lower eval.sample_tokens or data.longest, or name another judge"
        )
    return shape, reader


def verdict(first: Choice, second: Choice) -> str:
    """The verdict on the trained model's answer, which is A in the first prompt and B in the second."""
    if first.a > first.b and second.b > second.a:
        return "win"
    return "loss" if first.b > first.a and second.a > second.b else "tie"


def entry(first: Choice, second: Choice) -> dict[str, Any]:
    """What results.json says of one question. `log_odds`: by how much the judge prefers the trained model's answer, in
    each order.
    """
    return {"verdict": verdict(first, second), "log_odds": [first.a - first.b, second.b - second.a]}


def table(pairs: Sequence[tuple[Choice, Choice]]) -> dict[str, Any]:
    """All verdicts together. A tie is half a win, so that the rate of a judge that decides nothing is 0.5. `decided`:
    the share of questions without ties. `first_place`: the share of prompts in which A is preferred, 0.5 for a judge
    without a preference for a place. `certain`: the mean probability that the judge says A or B at all.
    """
    outcomes = [verdict(*pair) for pair in pairs]
    counts = {name: outcomes.count(word) for name, word in (("wins", "win"), ("losses", "loss"), ("ties", "tie"))}
    choices = [choice for pair in pairs for choice in pair]
    rate = (counts["wins"] + counts["ties"] / 2) / len(pairs)
    low, high = interval(rate, len(pairs))
    return {
        "questions": len(pairs),
        **counts,
        "win_rate": rate,
        "win_rate_low": low,
        "win_rate_high": high,
        "decided": 1 - counts["ties"] / len(pairs),
        "first_place": sum((a > b) + (a == b) / 2 for a, b in choices) / len(choices),
        "certain": sum(math.exp(a) + math.exp(b) for a, b in choices) / len(choices),
    }


def sentence(table: dict[str, Any]) -> str:
    """The figures of a table in words."""
    counts = ", ".join(f"{table[name]} {name}" for name in ("wins", "losses", "ties"))
    rate, low, high, first = (
        f"{table[key]:.1%}" for key in ("win_rate", "win_rate_low", "win_rate_high", "first_place")
    )
    return (
        f"{counts} against the answers of the data; win rate {rate}, 95 % interval {low} to {high}; the answer shown"
        f" first is preferred in {first} of the prompts"
    )


def interval(rate: float, count: int) -> tuple[float, float]:
    """The 95 % interval of Wilson (1927), which does not shrink to a point if all verdicts agree. It assumes that there
    are no ties, and is too wide if there are many.
    """
    squared = Z * Z / count
    centre = (rate + squared / 2) / (1 + squared)
    half = Z / (1 + squared) * math.sqrt(rate * (1 - rate) / count + squared / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)
