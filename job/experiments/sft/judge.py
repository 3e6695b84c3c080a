"""Has a judge compare the stored answers with those of the data (verdicts.py), after final/ is written.

With an adapter, `eval.judge: base` is the trained model without its adapter. Any other judge takes the trained model's
place on the device. Each rank reads its share of the prompts, one at a time, so that no verdict depends on a batch.
stages/sft.jsonl has finished verdicts under the hash of the judge's weights, so a restart repeats at most those of
AT_ONCE questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gpufleet.job.contract.workdir import NAMED, USER
from gpufleet.job.experiments.dataset.rendering import open_chat_tokenizer
from gpufleet.job.experiments.engine.committed import weights_identity
from gpufleet.job.experiments.models import decoder, hf, lora
from gpufleet.job.experiments.models.blocks import DTYPES, any_length
from gpufleet.job.experiments.models.decoder import Cache, Decoder
from gpufleet.job.experiments.sft import verdicts
from gpufleet.job.experiments.sft.merge import DONE, FinishedVariants, SftRun
from gpufleet.job.experiments.sft.spec import JUDGE_BASE
from gpufleet.job.experiments.sft.verdicts import Choice
from gpufleet.job.experiments.tuning import run as tuning

AT_ONCE = 20  # number of questions whose verdicts are stored together


class AnswerJudge:
    """The judge of a run. Raises ValueError if it cannot be used, before anything is trained."""

    def __init__(self, sft: SftRun) -> None:
        self._sft = sft
        self._model: Decoder | None = None
        session, config = sft.session, sft.config
        self._tokenizer = open_chat_tokenizer(sft.manifest.facts["tokenizer"], session.data)
        self._folder = None if config.eval.judge == JUDGE_BASE else session.workdir / USER / NAMED / config.eval.judge
        if self._folder is None:
            self._shape = config.model
            self._reader = verdicts.JudgeReader(tuning.renderer(session, sft.manifest, config))
        else:
            self._shape, self._reader = verdicts.open_judge(self._folder, config)
        weights = self._folder or session.inputs
        # a base of generated data has no files, but is drawn from the seed
        self.identity = f"seed {config.seed}" if weights is None else weights_identity(weights)

    def judged(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The entries for results.json: the answers with their verdicts, and the figures of all verdicts. Must be
        called by all ranks, with rank 0's answers. Raises Stopped.
        """
        sft, session = self._sft, self._sft.session
        done = FinishedVariants(session.workdir / DONE, session, tuning.of_weights(*sft.trained))
        asked = [self._prompts(item) for item in session.world.agree([dict(item) for item in answers])]
        pairs: list[tuple[Choice, Choice]] = []
        for start in range(0, len(asked), AT_ONCE):
            prompts = [prompt for pair in asked[start : start + AT_ONCE] for prompt in pair]
            choices = done.get(f"verdicts {self.identity} {start}", partial(self._choices, prompts)) or []
            pairs += [(Choice(*a), Choice(*b)) for a, b in zip(choices[::2], choices[1::2], strict=True)]
            session.say(f"judge: {min(start + AT_ONCE, len(asked))} of {len(asked)} questions")
        if not session.world.first or not pairs:  # only rank 0 has the verdicts of earlier attempts
            return {}
        table = verdicts.table(pairs)
        session.say(f"judge {sft.config.eval.judge}: {verdicts.sentence(table)}")
        return {
            "answers": [{**item, **verdicts.entry(*pair)} for item, pair in zip(answers, pairs, strict=True)],
            "judge": {"weights": sft.config.eval.judge, "weights_identity": self.identity, **table},
        }

    def _prompts(self, item: Mapping[str, Any]) -> list[list[int]]:
        """The two prompts for a question. The answer of the data is cut where the trained model had to stop."""
        (reference,) = self._tokenizer.encode_batch([item["reference"]])
        theirs = self._tokenizer.decode(reference[: self._sft.config.eval.sample_tokens])
        return self._reader.prompts(item["prompt"], item["answer"], theirs)

    def _choices(self, prompts: Sequence[Sequence[int]]) -> list[Choice]:
        """The judge's choice after each prompt, on every rank. All ranks read as many prompts, because a model may be
        split over them. Raises Stopped between two prompts.
        """
        session = self._sft.session
        world, model, own = session.world, self._loaded(), []
        for number in range(world.rank, -(-len(prompts) // world.size) * world.size, world.size):
            session.check_stop()
            own.append(choice(model, prompts[number % len(prompts)], self._reader.words))
        shares = world.every(own)
        return [shares[number % world.size][number // world.size] for number in range(len(prompts))]

    def _loaded(self) -> Decoder:
        """The judge on the device."""
        if self._model is None:
            self._model = self._load()
            self._model.eval()
        return self._model

    def _load(self) -> Decoder:
        sft, session = self._sft, self._sft.session
        assert sft.module is not None
        if self._folder is None and sft.config.method == "lora":
            lora.set_mode(sft.module, "base")
            return sft.module
        sft.module.to("meta")  # frees its memory, although the loop still has the module
        sft.module = None  # final/ is complete, so that a limit has nothing more to write
        session.device.tidy()
        session.say(f"judge {sft.config.eval.judge}: its weights are read in place of the trained model's")
        if self._folder is None:
            return tuning.base(session, sft.config, torch.bfloat16)
        compute = DTYPES[sft.config.precision.compute]
        model = decoder.build(self._shape, compute=compute, dtype=torch.bfloat16, device=session.device.torch)
        hf.load(self._folder, model)
        return model


@torch.no_grad()
def choice(model: Decoder, prompt: Sequence[int], words: tuple[int, int]) -> Choice:
    """The log-probabilities of the two words after the prompt."""
    tokens_1T = torch.tensor([prompt], device=model.embed.weight.device)
    with any_length():
        logits_11V = model(tokens_1T, cache=Cache(model, 1, len(prompt))).logits
    logs_V = torch.log_softmax(logits_11V[0, 0].double(), -1)
    return Choice(*logs_V[list(words)].tolist())
