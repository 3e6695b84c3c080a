"""kernel-sft's pairs of a PyTorch program and a Triton program, packed into rows as packed.py writes them.

A JSONL file has {prompt, answer} per line, a form into which the pairs of KernelBook are easily converted;
`data.samples` of them are chosen by the seed. Generated pairs are seeded kernels of the twenty tasks, with a tokenizer
of bytes: any program can be written in 256 ids and a few special tokens. The loss is on the answer. User mistakes raise
ValueError.
"""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset.chat import Conversation, Turn, hashed, lines_of, object_of, text_at
from gpufleet.job.experiments.dataset.packed import prepare_packed
from gpufleet.job.experiments.dataset.packing import Packing
from gpufleet.job.experiments.dataset.rendering import TEMPLATES, FileTokenizer, Template, own_tokenizer
from gpufleet.job.experiments.kernel.judge import answers, planted, rules
from gpufleet.job.experiments.kernel.judge.catalog import TASKS
from gpufleet.job.experiments.kernel.judge.curriculum import require_practice, tasks_of
from gpufleet.job.experiments.kernel.spec import KernelConfig

HELD_OUT = 0.02  # the share of the pairs that is held out for the validation loss; at least one pair
LOOKED_AT = 1000  # at most this many answers are checked, because a very long one takes a second
# warns if a smaller share of the answers is accepted, because a model that learns from them would write mostly refused
# programs
FEW = 0.5
BLOCKS = (128, 256, 512, 1024, 2048)
WANTED = "prompt and answer"  # keys of a line


def prepare_kernels(
    folder: Path,
    config: KernelConfig,
    *,
    text: Path | None = None,
    tokenizer: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> DatasetManifest:
    """The dataset in `folder`, from a JSONL file (`text`) or generated. The dataset is made if it does not exist.
    `tokenizer`: the base weights' own tokenizer.json. Raises ValueError.
    """
    data, template = config.data, TEMPLATES[config.model.family]
    how = Packing(row=data.row, longest=data.row, held_out=HELD_OUT, seed=config.seed)
    if data.source == "generated-kernels" and text is None:
        pairs: GeneratedKernels | PairsFile = GeneratedKernels(data.samples, config.seed)
        own = byte_tokenizer(template)
    elif text is None:
        raise ValueError("data.source is jsonl: name the file, gpufleet prepare STACK pairs.jsonl")
    else:
        pairs, own = PairsFile(text, data.samples, config.seed), own_tokenizer(tokenizer)
        if data.curriculum != "off":
            _ = pairs.name  # raises ValueError if the file cannot be read
            tasks = (tasks_of(question.text) for question, _ in pairs.conversations())
            beginning = f"{text}: job.parameters.data.curriculum is {data.curriculum}, but no pair"
            # checked here, because the trainer would find it only on a paid node
            require_practice(tasks, TASKS[: config.generate.tasks], beginning)
    manifest = prepare_packed(folder, pairs, own, template, how, model_vocab=config.model.vocab, say=say)
    if isinstance(pairs, PairsFile):
        say(admitted(pairs))
    return manifest


def admitted(pairs: PairsFile) -> str:
    """A sentence about how many answers the funnel's rules would accept, and why they would refuse the others. This
    matters because a model learns to write programs like these.
    """
    first = itertools.islice(pairs.conversations(), LOOKED_AT)
    problems = [rules.problem(answers.program(answer.text)) for _, answer in first]
    why = Counter(re.sub(r"^line \d+: ", "", problem) for problem in problems if problem is not None)
    count = f"{problems.count(None)} of {len(problems)} answers are programs that the funnel's rules admit"
    if not why:
        return count
    often = ", ".join(f"{problem[:60]} ({number})" for problem, number in why.most_common(3))
    warning = "WARNING: " if problems.count(None) < FEW * len(problems) else ""
    return f"{warning}{count}; most often refused: {often}"


@dataclass(frozen=True)
class GeneratedKernels:
    """`count` kernels that are generated with a seed, for one task after another, with different block sizes."""

    count: int
    seed: int

    @property
    def name(self) -> str:
        return f"generated kernels: {self.count} from seed {self.seed}"

    def conversations(self) -> Iterator[Conversation]:
        draw = random.Random(f"kernels {self.seed}")
        for number in range(self.count):
            task = TASKS[number % len(TASKS)]
            yield Turn("user", task.prompt), Turn("assistant", planted.source(task, block=draw.choice(BLOCKS)))


@dataclass(frozen=True)
class PairsFile:
    """`samples` of the file's pairs, chosen by the seed, in the file's order; all pairs if there are fewer."""

    path: Path
    samples: int
    seed: int

    @cached_property
    def name(self) -> str:
        return f"kernel pairs: {self.samples} by seed {self.seed} of sha256 {hashed(self.path)}"

    def conversations(self) -> Iterator[Conversation]:
        """The pairs as conversations. Raises ValueError with the lines that are not pairs."""
        pairs = list(lines_of(self.path, _pair, WANTED))
        chosen = random.Random(f"pairs {self.seed}").sample(range(len(pairs)), min(self.samples, len(pairs)))
        yield from (pairs[index] for index in sorted(chosen))


def _pair(line: bytes) -> Conversation:
    tree = object_of(line, WANTED)
    return Turn("user", text_at(tree, "prompt")), Turn("assistant", text_at(tree, "answer"))


def byte_tokenizer(template: Template) -> FileTokenizer:
    """One id per byte, then the template's special tokens: 256 and a few."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(template.specials))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(made.to_str(), encoding="utf-8")
        return FileTokenizer(file)
