"""Writes a finished kernel-sft's results: the verdicts' table and results.json."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import RESULTS
from gpufleet.job.experiments.engine import metrics
from gpufleet.job.experiments.kernel.judge import figures
from gpufleet.job.experiments.kernel.judge.verdict import STAGES, Verdict
from gpufleet.job.experiments.kernel.spec import per_candidate
from gpufleet.job.experiments.kernel.stages import KernelRun


def write(kernel: KernelRun, found: dict[str, list[Verdict]], digest: str) -> None:
    """Writes results.json and a few lines of the log. `found`: verdicts by phase; `digest`: the weights' sha256."""
    session, config, phase = kernel.session, kernel.config, kernel.phases[-1]
    judged = found[phase.name]
    generated = [verdict for verdict in judged if verdict.origin == "generated"]
    own = figures.figures(phase.name, generated)
    low, high = own["pass@1_interval"]
    statement = (
        f"{own['candidates']} candidates of {own['tasks']} tasks: pass@1 {own['pass@1']:.3f}, 95 % interval over tasks "
        f"{low:.3f} to {high:.3f}. Only {phase.steps} optimizer steps on {kernel.manifest.facts['examples']} pairs "
        "were trained: expect the answers' format from that, not skill."
    )
    trained = {each.name: generated if each is phase else found[each.name] for each in kernel.phases}
    val_loss = kernel.progress["val_loss"]
    compared = figures.compared(trained, seed=config.seed) if len(trained) > 1 else []
    compared = [{**row, "val_loss": val_loss[row["row"]]} for row in compared]
    results = {
        "schema": 1,
        "experiment": "kernel-sft",
        "statement": statement,
        "steps": phase.steps,
        "val_loss": val_loss[phase.name],
        "generated": own,
        "stages_reached": {str(stage): sum(v.stage == stage for v in generated) for stage in range(1, 7)},
        "isolated": all(v.isolated for v in judged if v.isolated is not None),
        "curriculum": {
            "mode": config.data.curriculum,
            "evaluations": kernel.progress["evaluations"],
            "compared": compared,
        },
        "device": session.device.name,
        "ranks": session.world.size,
        "torch": torch.__version__,
        "dataset": {"sha256": kernel.manifest.sha256, **kernel.manifest.facts},
        "predicted": session.prediction(phase.name),
        "measured": metrics.measured(session.metrics.records(phase.name)),
        "funnel": {"predicted": per_candidate(config), "measured": _per_candidate(judged)},
        "final": phase.name,
        **kernel.outcome,
        "weights_sha256": digest,
    }
    atomic.write_json(session.workdir / RESULTS, results)
    session.say(statement)
    for text in figures.text(compared or [own]):
        session.say(text)
    if compared:
        session.say(f"final/ holds the weights of {phase.name}")
    if not results["isolated"]:
        session.say("this machine allows no namespaces: candidates ran with static rules, filter and limits alone")


def _per_candidate(judged: Sequence[Verdict]) -> dict[str, float]:
    """Figures per candidate, by the bill's names. A candidate that reaches stage 5 counts as correct."""
    after = STAGES[STAGES.index("compile") + 1 :]
    return {
        "compile_s": fmean(verdict.seconds.get("compile", 0.0) for verdict in judged),
        "judge_s": fmean(sum(verdict.seconds.get(stage, 0.0) for stage in after) for verdict in judged),
        "correct": fmean(verdict.stage > STAGES.index("full") + 1 for verdict in judged),
    }
