"""The phases after the training of kernel-sft: they write the weights to keep, candidates and verdicts.

final/                    bf16 weights of the last phase as published ones look, the tokenizer, meta.json
    stages/candidates.jsonl   one generated program a line (candidates-R.jsonl: rank R's share)
    stages/verdicts.jsonl     one verdict a line: stage reached, reason, seconds, times
    stages/tried.jsonl, stages/verdicts-tried.jsonl the same for a curriculum's evaluations
    results.json

Each rank takes the whole trained weights, rounded to bf16 like the weights in final/, and generates its share of the
candidates alone, so that it can stop at the next token. Then all ranks agree. Rank 0 judges.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from gpufleet.job.contract import reading
from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.contract.reading import DoubtError, Fields
from gpufleet.job.contract.workdir import STAGES
from gpufleet.job.experiments.dataset.chat import Turn
from gpufleet.job.experiments.dataset.rendering import Renderer
from gpufleet.job.experiments.engine import parallel
from gpufleet.job.experiments.engine.device import NodeRefusedError
from gpufleet.job.experiments.engine.experiment import Phase, Session, Stopped
from gpufleet.job.experiments.kernel.judge import answers, figures, planted
from gpufleet.job.experiments.kernel.judge.catalog import BY_NAME, TASKS, KernelTask
from gpufleet.job.experiments.kernel.judge.funnel import Judge
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.verdict import Verdict
from gpufleet.job.experiments.kernel.judge.worker import NoDeviceError, Workers
from gpufleet.job.experiments.kernel.spec import AT_ONCE, TRIED, KernelConfig
from gpufleet.job.experiments.models import decoder
from gpufleet.job.experiments.models.blocks import DTYPES
from gpufleet.job.experiments.models.decoder import Decoder
from gpufleet.job.experiments.models.generate import generate
from gpufleet.job.experiments.tuning import run as tuning
from gpufleet.job.ledger import Ledger

SILENT_S = 60.0  # seconds between two lines of the log within a batch
T = TypeVar("T")
Pair = tuple[KernelTask, int]  # a task, and the number of its candidate
Made = Mapping[str, Sequence[Candidate]]  # the candidates of each phase, by its name, in the order of the phases


class KernelRun(Protocol):
    """The parts of the experiment that the phases after training need."""

    session: Session
    config: KernelConfig
    manifest: DatasetManifest
    renderer: Renderer
    phases: Sequence[Phase]
    progress: dict[str, Any]
    outcome: Mapping[str, Any]


def deliver(kernel: KernelRun, module: Decoder) -> str:
    """Writes the last phase's weights to final/; the first rank returns their sha256. Raises Stopped between
    tensors.
    """
    session, phase = kernel.session, kernel.phases[-1]
    tensors = tuning.gathered(session, module)
    val_loss = kernel.progress["val_loss"][phase.name]
    meta = {"experiment": "kernel-sft", "phase": phase.name, "step": phase.last, "val_loss": val_loss}
    meta |= kernel.outcome
    digest = tuning.deliver(session, kernel.manifest, kernel.config, tensors, torch.bfloat16, meta)
    session.world.barrier()
    return digest


def candidates(kernel: KernelRun, module: Decoder | None, phase: Phase) -> list[Candidate]:
    """All candidates of the weights at the end of `phase`, in order; `module` writes missing candidates now. Raises
    Stopped, and ValueError if candidates are missing and the weights do not exist any more.
    """
    weights = of_phase(phase, kernel.progress)
    return _written(kernel, module, "candidates", phase.name, weights, kernel.config.generate.candidates)


def of_phase(phase: Phase, progress: Mapping[str, Any]) -> str:
    """The name of the weights at the end of a phase."""
    return tuning.of_weights(phase.last, progress["val_loss"][phase.name])


def pass_rates(kernel: KernelRun, module: Decoder, weights: str) -> dict[str, float]:
    """The pass rate of each task, from a few candidates of the present weights, whose name is `weights`. All ranks
    generate candidates. Raises Stopped on all ranks; the next start with the same weights then uses what was already
    written and judged.
    """
    session, prefix = kernel.session, "curriculum"
    written = _written(kernel, module, "tried", prefix, weights, TRIED, salt=prefix)

    def judged() -> dict[str, float]:
        ledger = Ledger(session.workdir / STAGES / "verdicts-tried.jsonl")
        look = partial(_look, session)
        with _judge(session, kernel.config) as judge:
            verdicts = figures.verify(judge, written, ledger, check=look, say=session.say)
        correct = [verdict.task for verdict in verdicts if verdict.passed]  # correct, at any speed
        return {task.name: correct.count(task.name) / TRIED for task in TASKS[: kernel.config.generate.tasks]}

    return session.world.agree(_by_the_first(session, judged) or {})


def _written(
    kernel: KernelRun, module: Decoder | None, file: str, prefix: str, weights: str, count: int, *, salt: str = ""
) -> list[Candidate]:
    """`count` candidates of every task, in order, from stages/`file`*.jsonl, except those of other weights. Missing
    candidates are generated now. The names of all begin with `prefix`. Raises the errors of `candidates`.
    """
    session, config = kernel.session, kernel.config.generate
    folder, rank = session.workdir / STAGES, session.world.rank
    wanted = [(task, number) for task in TASKS[: config.tasks] for number in range(count)]
    ledger = Ledger(folder / (f"{file}.jsonl" if rank == 0 else f"{file}-{rank}.jsonl"))
    session.world.barrier()  # after this, the last line of every rank is complete
    known = _known(folder, file, weights)
    session.world.barrier()
    missing = [pair for pair in wanted if _name(prefix, *pair) not in known]

    def keep(part: list[Pair], texts: list[str]) -> None:
        for pair, text in zip(part, texts, strict=True):
            name, task = _name(prefix, *pair), pair[0].name
            entry = {"name": name, "weights": weights, "task": task, "source": answers.program(text), "answer": text}
            try:
                ledger.append(entry)
            except OSError as error:  # a full disk, on which the funnel could not judge either
                raise NodeRefusedError(f"{ledger.path} cannot be written: {error.strerror}") from error

    if missing:
        if module is None:
            raise ValueError(
                f"{folder}: {len(missing)} candidates of {prefix} are missing and its weights are gone:"
                " start the run again, with another run.id"
            )
        session.say(
            f"{prefix}: generating {len(missing)} of {len(wanted)} candidates, at most {config.max_tokens} tokens each"
        )
        _generate_share(kernel, module, missing, salt, keep, prefix)
        known = _known(folder, file, weights)
    return [known[_name(prefix, *pair)] for pair in wanted]


def _known(folder: Path, file: str, weights: str) -> dict[str, Candidate]:
    """The candidates of these weights, from the files of all ranks."""
    pairs = [pair for path in sorted(folder.glob(f"{file}*.jsonl")) for pair in Ledger(path).read(candidate)]
    return {made.name: made for of, made in pairs if of == weights}


def candidate(entry: dict[str, Any]) -> tuple[str, Candidate]:
    """The name of the weights that wrote the candidate, and the candidate. Raises DoubtError."""
    fields = Fields(entry)
    name, task, source = fields.need("name", reading.text), fields.need("task", reading.text), entry.get("source")
    # the source may have any characters, because stage 1 judges them
    if task not in BY_NAME or not isinstance(source, str):
        raise DoubtError(f"{name} is not a candidate")
    made = Candidate(name=name, task=task, source=source, origin="generated", label="")
    return fields.need("weights", reading.text), made


def _generate_share(
    kernel: KernelRun,
    module: Decoder,
    wanted: list[Pair],
    salt: str,
    keep: Callable[[list[Pair], list[str]], None],
    name: str,
) -> None:
    """Generates this rank's share of `wanted`, batch by batch. `keep` is called with each finished batch, and a line
    with `name` is logged, because a job that prints nothing is taken to be stuck. Raises Stopped on all ranks if any
    rank was stopped. During a batch no rank waits for another one; after the last batch all ranks wait for each other.
    """
    session, world = kernel.session, kernel.session.world
    model = _as_kept(kernel, module)
    own, mine = wanted[world.rank :: world.size], " by the first rank" if world.size > 1 else ""
    reason: tuple[str, bool] | None = None
    try:
        for start in range(0, len(own), AT_ONCE):
            part = own[start : start + AT_ONCE]
            keep(part, _generate(kernel, model, part, salt, f"{name}: {start} of {len(own)} candidates written{mine}"))
            session.say(f"{name}: {start + len(part)} of {len(own)} candidates written{mine}")
    except Stopped as error:
        reason = (str(error), error.ends)
    del model
    session.device.tidy()
    heeded = [answer for answer in world.every(reason) if answer is not None]
    if heeded:
        why, ends = heeded[0]
        session.say(f"stopped while generating: {why}")
        raise Stopped(why, ends=ends)


@torch.no_grad()
def _as_kept(kernel: KernelRun, module: Decoder) -> Decoder:
    """A whole decoder on this rank's device, in the compute dtype, with weights rounded like those in final/."""
    compute = DTYPES[kernel.config.precision.compute]
    model = decoder.build(kernel.config.model, compute=compute, dtype=compute, device=kernel.session.device.torch)
    for name, parameter in module.named_parameters():
        model.get_parameter(name).copy_(parallel.full_tensor(parameter).to(torch.bfloat16))
    return model


def _generate(kernel: KernelRun, model: Decoder, wanted: list[Pair], salt: str, far: str) -> list[str]:
    """Answers, which are sampled by (seed, task, number). Logs the progress as `far`. Raises Stopped between two
    tokens.
    """
    config, renderer = kernel.config.generate, kernel.renderer
    asked = [renderer.prompt([Turn("user", task.prompt), Turn("assistant", "")]) for task, _ in wanted]
    seeds = [
        int.from_bytes(hashlib.sha256(f"{kernel.config.seed} {task.name} {number}{salt}".encode()).digest()[:8], "big")
        for task, number in wanted
    ]
    token, said_s = itertools.count(), time.monotonic()

    def look() -> None:
        nonlocal said_s
        _look(kernel.session)
        number = next(token)
        if number and time.monotonic() >= said_s + SILENT_S:
            said_s = time.monotonic()
            kernel.session.say(f"{far}, {number} of at most {config.max_tokens} tokens of the next {len(wanted)}")

    written = generate(model, asked, config.max_tokens, config.temperature, seeds, {renderer.end}, look)
    return [renderer.tokenizer.decode(ids) for ids in written]


def _by_the_first(session: Session, act: Callable[[], T]) -> T | None:
    """The result of `act` on rank 0; None on other ranks, which wait for rank 0. Raises Stopped on all ranks."""
    outcome: T | None = None
    stopped: tuple[str, bool] | None = None
    if session.world.first:
        try:
            outcome = act()
        except Stopped as error:
            stopped = str(error), error.ends
    heeded = session.world.agree(stopped)
    if heeded is not None:
        reason, ends = heeded
        raise Stopped(reason, ends=ends)
    return outcome


def verified(session: Session, config: KernelConfig, made: Made) -> dict[str, list[Verdict]] | None:
    """The verdicts on each phase's candidates, by the phase's name; None on ranks other than the first. The candidates
    of the last phase, and the planted candidates, are judged first. Raises Stopped between two candidates.
    """
    return _by_the_first(session, partial(_verified, session, config, made))


def _verified(session: Session, config: KernelConfig, made: Made) -> dict[str, list[Verdict]]:
    last = [*made][-1]
    judged = [*made[last], *planted.candidates(config.funnel.planted)]
    ledger = Ledger(session.workdir / STAGES / "verdicts.jsonl")
    with _judge(session, config) as judge:
        session.say(
            f"funnel: {len(judged)} candidates, {len(ledger.entries)} verdicts exist, {judge.parallel} workers, "
            f"at most {judge.bound_s(len(judged)) / 60:.0f} min; stage 2 {judge.compilation.words}"
        )
        verify = partial(figures.verify, judge, ledger=ledger, check=partial(_look, session), say=session.say)
        try:
            verdicts = {last: verify(judged)}
            return verdicts | {name: verify(own) for name, own in made.items() if name != last}
        except Stopped as error:
            session.say(f"stopped in the funnel: {error}")
            raise


@contextmanager
def _judge(session: Session, config: KernelConfig) -> Iterator[Judge]:
    """A judge that was tested on this machine. If the test fails, the candidates have to be judged on another
    machine.
    """
    gpus = torch.cuda.device_count() if session.device.is_cuda else 0
    with _workers(session) as workers:
        judge = Judge(config.funnel, config.seed, workers, gpus=gpus)
        try:
            judge.prove(session.say)
            yield judge
        except NoDeviceError as error:
            raise NodeRefusedError(f"the funnel: {error}") from error


def _look(session: Session) -> None:
    """Checks whether a stop was requested, without asking other ranks. Raises Stopped."""
    if (stop := session.requests.stop()) is not None:
        raise Stopped(stop.reason, ends=stop.ends)


def _workers(session: Session) -> Workers:
    return Workers(session.workdir / "scratch", gpus=session.device.is_cuda)


def _name(phase: str, task: KernelTask, number: int) -> str:
    return f"{phase}-{task.name}-{number}"
