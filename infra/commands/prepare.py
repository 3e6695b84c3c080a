"""`gpufleet prepare STACK [TEXT]`: makes the dataset that storage.dataset names from its source, or from a text."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from infra.commands import stack
from infra.definition import StackDefinition
from infra.errors import GpufleetError
from infra.loader import load, project_root
from job.config import GrowthConfig, KernelConfig, PretrainConfig, SftConfig, TwoTowerConfig
from job.dataset import characters, prepare, sources, weights


def arguments(parser: argparse.ArgumentParser) -> None:
    """STACK, TEXT and where the tokenizer is."""
    stack.argument(parser)
    parser.add_argument(
        "text",
        metavar="TEXT",
        nargs="?",
        type=Path,
        help="a text or JSONL file, or a folder of queries and labels, instead of the source",
    )
    parser.add_argument("--rehearsal", action="store_true", help="the dataset of the definition's rehearsal section")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        type=Path,
        help="tokenizer.json: the base weights', or GPT-2's where it cannot be fetched",
    )


def run(args: argparse.Namespace) -> int:
    """Prepares, or says that it is prepared already."""
    path = stack.path_of(args)
    definition = load(path, now=datetime.now(UTC), rehearsal=args.rehearsal, past_deadline=True)
    root = project_root(Path.cwd())
    prepared(definition, root, text=args.text, tokenizer=args.tokenizer)
    listed(definition, root)
    return 0


def listed(definition: StackDefinition, root: Path) -> None:
    """Writes weights.json into a local folder of base weights; nothing without one. Raises GpufleetError."""
    place = definition.storage.base_weights
    if place is None or place.startswith("s3://"):
        return
    try:
        found = weights.describe(root / place)
    except ValueError as error:
        raise GpufleetError(str(error)) from error
    _say(f"{root / place}: {len(found.files)} files of base weights, {found.bytes / 1e9:.2f} GB")


def prepared(
    definition: StackDefinition, root: Path, *, text: Path | None = None, tokenizer: Path | None = None
) -> prepare.DatasetManifest:
    """The definition's dataset under `root`, made now or found there. Raises GpufleetError."""
    name = definition.storage.dataset
    if name.startswith("s3://"):
        raise GpufleetError(f"storage.dataset is {name}, prepared already; name a local folder to prepare one here")
    config = definition.job.parameters
    folder = root / name
    try:
        if isinstance(config, PretrainConfig):
            return characters.prepare_characters(folder, config.data, seed=config.seed, text=text, say=_say)
        if isinstance(config, SftConfig):
            from job.dataset.packed import prepare_sft  # brings numpy

            beside = tokenizer or _tokenizer_of(definition.storage.base_weights, root)
            return prepare_sft(folder, config, text=text, tokenizer=beside, say=_say)
        if isinstance(config, KernelConfig):
            from job.dataset.kernel_pairs import prepare_kernels  # brings numpy

            beside = tokenizer or _tokenizer_of(definition.storage.base_weights, root)
            return prepare_kernels(folder, config, text=text, tokenizer=beside, say=_say)
        if isinstance(config, TwoTowerConfig):
            from job.dataset.ranking import prepare_ranking  # brings numpy

            return prepare_ranking(folder, config, text=text, say=_say)
        source = _source(config, folder.parent / "cache", text, tokenizer)
        return prepare.prepare(folder, source, model_vocab=config.model.vocab, say=_say)
    except ValueError as error:
        raise GpufleetError(str(error)) from error


def _tokenizer_of(weights: str | None, root: Path) -> Path | None:
    """The base weights' own tokenizer.json, where they are a local folder that has one."""
    if weights is None or weights.startswith("s3://"):
        return None
    found = root / weights / "tokenizer.json"
    return found if found.is_file() else None


def _source(config: GrowthConfig, cache: Path, text: Path | None, tokenizer: Path | None) -> sources.Source:
    chosen = sources.TextTokenizer(model_vocab=config.model.vocab, cache=cache, file=tokenizer, say=_say)
    if text is not None:
        return sources.TextFile(path=text, text_tokenizer=chosen)
    if config.data.source == "generated-stories":
        return sources.Generated(count=config.data.stories, seed=config.seed)
    return sources.TinyStories(count=config.data.stories, text_tokenizer=chosen, cache=cache, say=_say)


def _say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
