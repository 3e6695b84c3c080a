"""Writes a finished kernel-sft's results: the verdicts' table and results.json. If the run has parts, the part `train`
passes the facts that the results need to the part `judge`, together with the candidates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import FINAL, RESULTS
from gpufleet.job.experiments.engine import metrics
from gpufleet.job.experiments.engine.experiment import Phase, Session
from gpufleet.job.experiments.kernel import stages
from gpufleet.job.experiments.kernel.judge import figures
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.verdict import STAGES, Verdict
from gpufleet.job.experiments.kernel.spec import CANDIDATES, TRAINING, KernelConfig, per_candidate
from gpufleet.job.experiments.kernel.stages import KernelRun, Made
from gpufleet.job.ledger import Ledger

HEAD = {"schema": 1, "experiment": "kernel-sft"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The facts about a finished training that the results need. The part `train` writes them as JSON into final/."""

    phases: Sequence[Phase]
    progress: Mapping[str, Any]  # the progress, as it is in the run's checkpoints
    figures: Mapping[str, Any]  # entries of results.json


def training(kernel: KernelRun, digest: str) -> Training:
    """The finished training. `digest`: the weights' sha256."""
    session, phase = kernel.session, kernel.phases[-1]
    own = {
        "steps": phase.steps,
        "val_loss": kernel.progress["val_loss"][phase.name],
        "device": session.device.name,
        "ranks": session.world.size,
        "torch": torch.__version__,
        "dataset": {"sha256": kernel.manifest.sha256, **kernel.manifest.facts},
        "predicted": session.prediction(phase.name),
        "measured": metrics.measured(session.metrics.records(phase.name)),
        "final": phase.name,
        **kernel.outcome,
        "weights_sha256": digest,
    }
    return Training(phases=kernel.phases, progress=kernel.progress, figures=own)


def hand_on(session: Session, trained: Training, made: Made) -> None:
    """Writes candidates and training into final/, and results.json without verdicts."""
    if not session.world.first:
        return
    lines = [
        {
            "name": candidate.name,
            "weights": stages.of_phase(phase, trained.progress),
            "task": candidate.task,
            "source": candidate.source,
        }
        for phase in trained.phases
        for candidate in made[phase.name]
    ]
    folder = session.workdir / FINAL
    atomic.write_bytes(folder / CANDIDATES, "".join(json.dumps(line) + "\n" for line in lines).encode())
    atomic.write_json(folder / TRAINING, asdict(trained))
    statement = f"{len(lines)} candidates are written and not yet judged: the part `judge` does that"
    atomic.write_json(session.workdir / RESULTS, {**HEAD, "statement": statement, **trained.figures})
    session.say(statement)


def handed_on(folder: Path) -> tuple[Training, dict[str, list[Candidate]]]:
    """The training and its candidates by phase, from the files of `hand_on`. Raises ValueError if these files are
    missing.
    """
    if (tree := atomic.read_object(folder / TRAINING)) is None:
        raise ValueError(f"{folder} has no {TRAINING}: job.parameters.candidates names a stage of the part `train`")
    trained = Training(**{**tree, "phases": [Phase(**entry) for entry in tree["phases"]]})
    written = Ledger(folder / CANDIDATES).read(stages.candidate)
    return trained, {
        phase.name: [made for weights, made in written if weights == stages.of_phase(phase, trained.progress)]
        for phase in trained.phases
    }


def write(session: Session, config: KernelConfig, trained: Training, verdicts: dict[str, list[Verdict]]) -> None:
    """Writes results.json and a few lines of the log. `verdicts`: those of each phase."""
    final = trained.phases[-1].name
    judged = verdicts[final]
    generated = [verdict for verdict in judged if verdict.origin == "generated"]
    own = figures.figures(final, generated)
    low, high = own["pass@1_interval"]
    statement = (
        f"{own['candidates']} candidates of {own['tasks']} tasks: pass@1 {own['pass@1']:.3f}, 95 % interval over tasks "
        f"{low:.3f} to {high:.3f}. Only {trained.figures['steps']} optimizer steps on "
        f"{trained.figures['dataset']['examples']} pairs were trained: expect the answers' format from that, not skill."
    )
    by_phase = {phase.name: generated if phase.name == final else verdicts[phase.name] for phase in trained.phases}
    compared = figures.compared(by_phase, seed=config.seed) if len(by_phase) > 1 else []
    compared = [{**row, "val_loss": trained.progress["val_loss"][row["row"]]} for row in compared]
    results = {
        **HEAD,
        "statement": statement,
        "generated": own,
        "stages_reached": {str(stage): sum(v.stage == stage for v in generated) for stage in range(1, 7)},
        "isolated": all(v.isolated for v in judged if v.isolated is not None),
        "curriculum": {
            "mode": config.data.curriculum,
            "evaluations": trained.progress["evaluations"],
            "compared": compared,
        },
        "funnel": {
            "predicted": per_candidate(config),
            "measured": _per_candidate(judged),
            "device": session.device.name,
        },
        **trained.figures,
    }
    atomic.write_json(session.workdir / RESULTS, results)
    session.say(statement)
    for text in figures.text(compared or [own]):
        session.say(text)
    if compared:
        session.say(f"final/ holds the weights of {final}")
    if not results["isolated"]:
        session.say(
            "this machine does not allow namespaces: only static rules, filter and limits isolated the candidates"
        )


def _per_candidate(judged: Sequence[Verdict]) -> dict[str, float]:
    """The mean seconds per candidate, by the names in the bill. A candidate that reaches stage 5 is taken to be
    correct.
    """
    after = STAGES[STAGES.index("compile") + 1 :]
    return {
        "compile_s": fmean(verdict.seconds.get("compile", 0.0) for verdict in judged),
        "judge_s": fmean(sum(verdict.seconds.get(stage, 0.0) for stage in after) for verdict in judged),
        "correct": fmean(verdict.stage > STAGES.index("full") + 1 for verdict in judged),
    }
