"""`gpufleet prepare STACK [TEXT]`: makes the dataset that storage.dataset names from its source, or from a text."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.catalog import load_catalog
from infra.commands import stack
from infra.cost import doubts, limits
from infra.cost.estimate import problems
from infra.definition import StackDefinition
from infra.errors import DefinitionError, GpufleetError
from infra.loader import load, project_root
from infra.pricing import bill_of
from infra.readiness import command
from job import atomic
from job.dataset import characters, prepare, rendering, sources, weights
from job.models import hf_config
from job.spec import GrowthConfig, JobConfig, KernelConfig, PretrainConfig, SftConfig, TwoTowerConfig
from job.text import counted

OFTEN = 50  # passes over the data; few are trained beyond: the shipped pretraining makes 8


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
    root = project_root(Path.cwd())
    if args.rehearsal:
        definition = load(stack.path_of(args), now=datetime.now(UTC), rehearsal=True, past_deadline=True)
        _require_another_folder(load(definition.source, now=datetime.now(UTC), past_deadline=True), definition, root)
    else:
        definition = stack.definition_of(args)
    try:
        _checked(definition, root)  # before an hour of tokenising is spent on a run that lacks its base weights
    except (ValueError, ImportError) as error:
        raise _told(error) from error
    made = prepared(definition, root, text=args.text, tokenizer=args.tokenizer)
    _agrees(definition, root)
    _folds(definition, root)
    listed(definition, root)
    if not args.rehearsal:
        if often := repeated(definition.job.parameters, made):
            _say(often)
        predict(definition, root)
    return 0


def repeated(config: JobConfig, made: prepare.DatasetManifest) -> str:
    """How often a run of so many steps, not epochs, reads this dataset; nothing where that is below twice."""
    if isinstance(config, GrowthConfig):
        there, unit, key = made.tokens["train"], "token", "steps_per_phase"
    elif isinstance(config, PretrainConfig):
        there, unit, key = made.facts["train_characters"], "character", "steps"
    else:
        return ""
    asked = sum(phase.steps * phase.tokens_per_step for phase in config.phases())
    if asked < 2 * there:
        return ""
    warning = "warning: " if asked > OFTEN * there else ""
    return f"{warning}training reads each {unit} about {asked / there:,.0f} times: job.parameters.{key} says how long"


def predict(definition: StackDefinition, root: Path) -> None:
    """Says what the run will take with this dataset, before a GPU starts. Raises DefinitionError when the bill's p50
    passes a limit, or the uninterrupted run the deadline; the dataset stays.
    """
    bill = bill_of(definition, root, load_catalog(root))
    usd, hours = bill.chosen.needed_usd, bill.chosen.needed_hours
    steps = sum(phase.steps for phase in bill.chosen.runtime.phases)
    _say(
        f"predicted on {bill.chosen.type}, {bill.capacity}: {counted(f'{steps:,}', 'optimizer step')},"
        f" {hours.p50:.2f} node-hours and {usd.p50:.2f} USD at p50, {hours.p90:.2f} and {usd.p90:.2f} at p90;"
        f" see gpufleet cost {definition.argument}"
    )
    for doubt in (*doubts.schedule(definition.job.parameters, bill.chosen.runtime), doubts.cut_short(bill)):
        if doubt:
            _say(f"warning: {doubt}")
    now = datetime.now(UTC)
    found = [*problems(definition, bill), *limits.deadline_problems(definition, bill, now)]
    if found:
        raise DefinitionError(str(definition.source), found)
    for late in limits.deadline_warnings(definition, bill, now):
        _say(f"warning: {late}")


def listed(definition: StackDefinition, root: Path) -> None:
    """Writes weights.json into a local folder of base weights; nothing without one. Raises GpufleetError."""
    folder = definition.storage.weights_folder(root)
    if folder is None:
        return
    try:
        found = weights.describe(folder)
    except ValueError as error:
        raise GpufleetError(str(error)) from error
    _say(f"{folder}: {len(found.files)} files of base weights, {found.bytes / 1e9:.2f} GB")
    if left := weights.left_out(folder):
        _say(f"{folder}: not needed and left out: {', '.join(left)}, {sum(left.values()) / 1e9:.2f} GB")


def prepared(
    definition: StackDefinition, root: Path, *, text: Path | None = None, tokenizer: Path | None = None
) -> prepare.DatasetManifest:
    """The definition's dataset under `root`, made now or found there. Raises GpufleetError."""
    name = definition.storage.dataset
    if name.startswith("s3://"):
        raise GpufleetError(f"storage.dataset is {name}, prepared already; name a local folder to prepare one here")
    config: Any = definition.job.parameters
    if text is not None and text.exists() and not (text.is_file() or text.is_dir()):  # <(zcat ...), /dev/stdin
        raise GpufleetError(f"{text}: a pipe or device, and it is read more than once: write it to a file first")
    if tokenizer is not None and isinstance(config, PretrainConfig | TwoTowerConfig):
        raise GpufleetError(f"{definition.job.experiment} takes no tokenizer: leave out --tokenizer")
    folder = root / name
    try:
        if text is None and tokenizer is None and _of_a_file(folder, config):
            try:
                found = _as_found(folder)
            except ValueError as error:  # prepare it again, it says to whoever has just done that
                raise ValueError(f"{error}: `{_again(definition)}`") from error
            own = _tokenizer(None, definition.storage.weights_folder(root))
            if isinstance(config, SftConfig) and own is not None:
                from job.dataset.packed import warn_of_untrained  # brings numpy

                warn_of_untrained(config, rendering.FileTokenizer(own), _say)
            return found
        if isinstance(config, PretrainConfig):
            return characters.prepare_characters(folder, config.data, seed=config.seed, text=text, say=_say)
        if isinstance(config, SftConfig):
            from job.dataset.packed import prepare_sft  # brings numpy

            own = _tokenizer(tokenizer, definition.storage.weights_folder(root))
            return prepare_sft(folder, config, text=text, tokenizer=own, say=_say)
        if isinstance(config, KernelConfig):
            from job.dataset.kernel_pairs import prepare_kernels  # brings numpy

            own = _tokenizer(tokenizer, definition.storage.weights_folder(root))
            return prepare_kernels(folder, config, text=text, tokenizer=own, say=_say)
        if isinstance(config, TwoTowerConfig):
            from job.dataset.ranking import prepare_ranking  # brings numpy

            return prepare_ranking(folder, config, text=text, say=_say)
        source = _source(config, folder.parent / "cache", text, tokenizer)
        return prepare.prepare(folder, source, model_vocab=config.model.vocab, say=_say)
    except (ValueError, ImportError) as error:
        raise _told(error) from error


def _told(error: ValueError | ImportError) -> GpufleetError:
    """The same for who prepares."""
    if isinstance(error, ValueError):
        return GpufleetError(str(error))
    return GpufleetError(f"this data needs a package that is missing ({error}): pip install -e '.[job]'")


def _require_another_folder(plain: StackDefinition, rehearsal: StackDefinition, root: Path) -> None:
    """Raises GpufleetError where generated data would replace what was made from a file of the user's."""
    folder = root / plain.storage.dataset
    if plain.storage.dataset != rehearsal.storage.dataset or not _of_a_file(folder, plain.job.parameters):
        return
    if not str((atomic.read_object(folder / prepare.MANIFEST) or {}).get("source")).startswith("generated "):
        raise GpufleetError(
            f"{folder} holds the data of the file itself, and the rehearsal's would replace it: give `rehearsal`"
            " a storage.dataset of its own"
        )


def _of_a_file(folder: Path, config: JobConfig) -> bool:
    """Whether the dataset that is there was made from a file or folder of the user's, which is not named again."""
    if not (folder / prepare.MANIFEST).is_file():
        return False
    if not isinstance(config, GrowthConfig):
        return not config.data.source.startswith("generated-")
    made_from = str((atomic.read_object(folder / prepare.MANIFEST) or {}).get("source"))
    return config.data.source == "tinystories" and made_from.startswith(sources.OWN_TEXT)


def _as_found(folder: Path) -> prepare.DatasetManifest:
    said: list[str] = []
    found = prepare.as_found(folder, said.append)
    if found.kind != "packed":
        _say(said[0])
        return found
    from job.dataset.packed import report  # brings numpy

    _say(f"{folder} is prepared already")
    report(found, _say)
    return found


def _agrees(definition: StackDefinition, root: Path) -> None:
    """Raises GpufleetError where the dataset is not what the file's settings ask for: nothing could train on it."""
    from infra.prepared import dataset_differs  # brings numpy

    if reason := dataset_differs(definition, root):
        raise GpufleetError(
            f"{root / definition.storage.dataset} {reason}: change job.parameters, or prepare it anew,"
            f" `{_again(definition)}`"
        )


def _again(definition: StackDefinition) -> str:
    """The command that makes a dataset of the user's own file anew."""
    own_text = isinstance(definition.job.parameters, GrowthConfig)
    return f"gpufleet prepare {definition.argument} FILE.txt" if own_text else command(definition)


def _folds(definition: StackDefinition, root: Path) -> None:
    """Says which folds can choose no epoch. Raises GpufleetError where a fold's model would have nothing to learn from:
    its node would find out.
    """
    config = definition.job.parameters
    if not isinstance(config, TwoTowerConfig):
        return
    from job.dataset.ranking import read  # brings numpy
    from job.experiments.two_tower_data import members, require_relevant, without_relevant

    labels = read(root / definition.storage.dataset).labels
    try:
        for member in members(config):
            require_relevant(member, labels)
    except ValueError as error:
        raise GpufleetError(str(error)) from error
    if empty := without_relevant(config, labels):
        _say(
            f"warning: no query of fold {', '.join(map(str, empty))} has a label 1 or 2: the model that watches such a"
            " fold keeps its first epoch, and the one tested on it scores 0; fewer folds (job.parameters.data.folds)"
            " have one each"
        )


def _checked(definition: StackDefinition, root: Path) -> None:
    """Raises ValueError where a node could not read the base weights, or would refuse them. Warns of weights that were
    tuned on other turns.
    """
    config, folder = definition.job.parameters, definition.storage.weights_folder(root)
    if folder is not None and isinstance(config, SftConfig | KernelConfig):
        hf_config.check(folder, config.model)
        longest = min(config.data.row, getattr(config.data, "longest", config.data.row))
        if longest > (most := hf_config.positions(folder)):
            _say(
                f"warning: {folder}: made for {most:,} positions (max_position_embeddings), and examples may have "
                f"{longest:,} (data.longest): it has never seen those beyond"
            )
        template = rendering.TEMPLATES[config.model.family]
        if rendering.foreign(template, folder):
            _say(
                f"warning: the chat template in {folder} never writes {template.end}, which closes a turn of"
                f" {template.name}, in which this data is written: who asks the tuned model by that template asks in"
                " another form than it has learned"
            )


def _tokenizer(given: Path | None, folder: Path | None) -> Path | None:
    """The tokenizer.json beside the base weights in `folder`, else the one given, if any. Raises ValueError where both
    are there and differ.
    """
    beside = None if folder is None else folder / "tokenizer.json"
    if beside is None or not beside.is_file():
        return given
    if given is not None and given.is_file() and given.read_bytes() != beside.read_bytes():
        raise ValueError(f"{given} is not {beside}, the base weights' own, whose ids they know; leave out --tokenizer")
    return given if given is not None and not given.is_file() else beside  # the error of a file that is not there


def _source(config: GrowthConfig, cache: Path, text: Path | None, tokenizer: Path | None) -> sources.Source:
    chosen = sources.TextTokenizer(model_vocab=config.model.vocab, cache=cache, file=tokenizer, say=_say)
    if text is not None:
        return sources.TextFile(path=text, text_tokenizer=chosen)
    if config.data.source == "generated-stories":
        return sources.Generated(count=config.data.stories, seed=config.seed)
    return sources.TinyStories(count=config.data.stories, text_tokenizer=chosen, cache=cache, say=_say)


def _say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
