"""Makes sft-h100's dataset: packed rows of a user's or of generated conversations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset.chat import SHOWN, GeneratedPairs, JsonlChats
from gpufleet.job.experiments.dataset.packed import prepare_packed
from gpufleet.job.experiments.dataset.packing import Packing
from gpufleet.job.experiments.dataset.rendering import TEMPLATES, FileTokenizer, WordTokenizer, own_tokenizer
from gpufleet.job.experiments.dataset.untrained import untrained
from gpufleet.job.experiments.sft import verdicts
from gpufleet.job.experiments.sft.spec import JUDGE_BASE, SftConfig
from gpufleet.job.text import counted


def prepare_sft(
    folder: Path,
    config: SftConfig,
    *,
    text: Path | None = None,
    tokenizer: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> DatasetManifest:
    """sft-h100's dataset from a JSONL file (`text`), or generated pairs. `tokenizer`: the tokenizer.json of the base
    weights; if there is none, each word of generated pairs gets one id. Raises ValueError.
    """
    data, template = config.data, TEMPLATES[config.model.family]
    how = Packing(
        row=data.row,
        longest=min(data.longest, data.row),
        loss_on=data.loss_on,
        held_out=data.held_out,
        packing=config.measures.packing,
        prompts=config.eval.prompts,
        texts=not config.measures.pretokenised,
        seed=config.seed,
    )
    if data.source == "generated-pairs" and text is None:
        pairs = GeneratedPairs(data.examples, config.seed)
        words = pairs.text() + (verdicts.WORDS if config.eval.judge == JUDGE_BASE else "")
        ids = WordTokenizer.from_text(words, template) if tokenizer is None else FileTokenizer(tokenizer)
        return prepare_packed(folder, pairs, ids, template, how, model_vocab=config.model.vocab, say=say)
    if text is None:
        raise ValueError("data.source is jsonl: name the file, gpufleet prepare STACK examples.jsonl")
    own, chats = own_tokenizer(tokenizer), JsonlChats(text)
    manifest = prepare_packed(folder, chats, own, template, how, model_vocab=config.model.vocab, say=say)
    warn_of_untrained(config, own, say)
    if chats.left_out:
        keys = ", ".join(f"{key} ({counted(f'{n:,}', 'line')})" for key, n in chats.left_out.most_common(SHOWN))
        say(f"not used in training: {keys}; only instruction, response and system, or messages, are read")
    return manifest


def warn_of_untrained(config: SftConfig, tokenizer: FileTokenizer, say: Callable[[str], None]) -> None:
    """Warns if the base weights beside the tokenizer could not learn from an adapter how to end an answer."""
    if config.method == "full" or config.lora.template_tokens:
        return
    if odd := untrained(tokenizer, TEMPLATES[config.model.family]):
        say(
            f"warning: {tokenizer.file.parent}: rows of the chat template's tokens look untrained ({odd}), and "
            "adapters train neither embedding nor head: the tuned model may never stop. Set "
            "job.parameters.lora.template_tokens: true, which trains these rows, or start from weights that were tuned "
            "on this template"
        )
