"""What follows kernel-sft's training: weights to keep, candidates, verdicts, and the table that judges the judging.

    final/                    bf16 weights as published ones look, the tokenizer, meta.json
    stages/candidates.jsonl   one generated program a line (candidates-R.jsonl: rank R's share)
    stages/verdicts.jsonl     one verdict a line: row of the ablation, stage reached, reason, seconds, times
    ablation.json             five rows: the full funnel, and without one or all of its extensions
    results.json

Each rank reads the finished weights whole, in the compute dtype, and generates its share; rank 0 judges.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from job import atomic
from job.dataset.chat import Turn
from job.experiments.merge import heed
from job.experiments.sft import COMPUTE
from job.kernels import ablation, adversarial, planted
from job.kernels.catalog import TASKS, Task
from job.kernels.funnel import Judge, Switches, Verdict
from job.kernels.ledger import Ledger
from job.kernels.planted import Candidate
from job.kernels.worker import Workers
from job.models import decoder, hf
from job.models.decoder import Decoder
from job.models.generate import generate
from job.train import parallel
from job.train.experiment import Stopped
from job.train.export import META

if TYPE_CHECKING:
    from job.experiments.kernel import Kernel

AT_ONCE = 32  # sequences of a rank generated together, and lost together when it is killed
TRIED = 4  # candidates per task of a curriculum's evaluation
FENCE = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)


def finish(kernel: Kernel, module: Decoder) -> None:
    """All of it. Raises Stopped between two tokens or candidates."""
    session = kernel.session
    digest = _export(kernel, module)
    made = _candidates(kernel)
    found = _verified(kernel, made) if session.world.first else None
    if session.world.agree(session.world.first and found is None):
        raise Stopped("in the funnel")
    if found is not None:
        _report(kernel, found, digest)


def pass_rates(kernel: Kernel, module: Decoder) -> dict[str, float]:
    """Per task, of a few candidates of the present weights. Every rank generates the same, so that sharded weights are
    gathered by all together; rank 0 judges.
    """
    tasks = TASKS[: kernel.config.generate.tasks]
    made = [(task, number) for task in tasks for number in range(TRIED)]
    texts = _generate(kernel, module, made, salt="curriculum", stop=False)
    passed: list[int] = []
    if kernel.session.world.first:
        sources = [_as_candidate(task, number, text) for (task, number), text in zip(made, texts, strict=True)]
        verdicts: dict[str, Verdict] = {}
        with _workers(kernel) as workers:
            _judge(kernel, workers).all(sources, Switches(), "curriculum", lambda v: verdicts.update({v.candidate: v}))
        passed = [
            sum(verdicts[c.name].stage > 4 for c in sources if c.task == task.name)  # correct, however fast
            for task in tasks
        ]
    counts = kernel.session.world.agree(passed)
    return {task.name: count / TRIED for task, count in zip(tasks, counts, strict=True)}


def code(text: str) -> str:
    """The program in an answer: what its first fence holds, or all of it."""
    fenced = FENCE.search(text)
    return (fenced[1] if fenced else text).strip() + "\n"


def _export(kernel: Kernel, module: Decoder) -> str:
    """final/. Gives the (first) weights file's sha256, on rank 0."""
    session, folder = kernel.session, kernel.session.workdir / "final"
    tensors = (
        pair
        for name, parameter in module.named_parameters()
        for pair in parallel.gather({name: parameter}, session.world).items()
    )
    facts = kernel.manifest.facts
    files: list[dict[str, Any]] = []
    if session.world.first:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / META).unlink(missing_ok=True)
        paths = hf.write(folder, tensors, kernel.config.model, torch.bfloat16)
        for name in ("tokenizer.json", "words.json"):
            if (session.data / name).exists():
                shutil.copyfile(session.data / name, folder / name)
        files = [{"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths]
        tree = {
            "schema": 1,
            "experiment": "kernel-sft",
            "step": kernel.phases[0].last,
            "val_loss": kernel.val_loss,
            "dtype": "bfloat16",
            "tokenizer": {key: facts[key] for key in ("tokenizer", "tokenizer_id", "vocab", "template")},
            "dataset_sha256": kernel.manifest.sha256,
            "config_sha256": session.config_sha256,
            "files": files,
        }
        atomic.write_json(folder / META, tree)
    else:
        for _ in tensors:  # gathered by all ranks together
            pass
    session.world.barrier()
    return str(files[0]["sha256"]) if files else ""


def _candidates(kernel: Kernel) -> list[Candidate]:
    """Every generated candidate, in order; the missing ones are generated now."""
    session, config = kernel.session, kernel.config.generate
    folder, rank = session.workdir / "stages", session.world.rank
    wanted = [(task, number) for task in TASKS[: config.tasks] for number in range(config.candidates)]
    ledger = Ledger(folder / ("candidates.jsonl" if rank == 0 else f"candidates-{rank}.jsonl"))
    session.world.barrier()  # nobody's last line is half written now
    known = _known(folder)
    session.world.barrier()
    missing = [pair for pair in wanted if _name(*pair) not in known]
    own = missing[rank :: session.world.size]
    if missing:
        session.say(f"generating {len(missing)} of {len(wanted)} candidates, at most {config.max_tokens} tokens each")
    if own:
        model = decoder.build(
            kernel.config.model,
            compute=COMPUTE[kernel.config.precision.compute],
            dtype=COMPUTE[kernel.config.precision.compute],
            device=session.device.torch,
        )
        hf.load(session.workdir / "final", model)
        for start in range(0, len(own), AT_ONCE):
            part = own[start : start + AT_ONCE]
            for pair, text in zip(part, _generate(kernel, model, part, salt="", stop=True), strict=True):
                made = _as_candidate(*pair, text)
                ledger.append({"name": made.name, "task": made.task, "source": made.source, "answer": text})
        del model
        session.device.tidy()
    heed(session)
    session.world.barrier()
    known = _known(folder)
    return [known[_name(*pair)] for pair in wanted]


def _known(folder: Path) -> dict[str, Candidate]:
    """From the files of all ranks."""
    entries = [entry for path in sorted(folder.glob("candidates*.jsonl")) for entry in Ledger(path).entries]
    return {
        entry["name"]: Candidate(
            name=entry["name"], task=entry["task"], source=entry["source"], origin="generated", label=""
        )
        for entry in entries
    }


def _generate(kernel: Kernel, module: Decoder, wanted: list[tuple[Task, int]], *, salt: str, stop: bool) -> list[str]:
    """Answers, sampled with a seed by (seed, task, number). Without `stop` all ranks take the same number of steps."""
    session, config = kernel.session, kernel.config.generate
    renderer = kernel.renderer
    asked = [renderer.prompt([Turn("user", task.prompt), Turn("assistant", "")]) for task, _ in wanted]
    seeds = [
        int.from_bytes(hashlib.sha256(f"{kernel.config.seed} {task.name} {number}{salt}".encode()).digest()[:8], "big")
        for task, number in wanted
    ]
    requests = session.requests

    def look() -> None:
        if stop and (asked_to := requests.stop()) is not None and session.world.size == 1:
            raise Stopped(asked_to.reason)

    ends = {renderer.end} if stop else set()
    written = generate(module, asked, config.max_tokens, config.temperature, seeds, ends, look)
    texts = []
    for ids in written:
        until = ids.index(renderer.end) if renderer.end in ids else len(ids)
        texts.append(renderer.tokenizer.decode(ids[:until]))
    return texts


def _verified(kernel: Kernel, generated: list[Candidate]) -> dict[str, list[Verdict]] | None:
    """Verdicts of every row; None when a stop was asked for."""
    session, funnel = kernel.session, kernel.config.funnel
    made = [*generated, *planted.candidates(funnel.planted)]
    if funnel.ablations:
        made += adversarial.candidates(gpus=session.device.torch.type == "cuda")
    rows = list(ablation.ROWS) if funnel.ablations else [ablation.FULL]
    ledger = Ledger(session.workdir / "stages" / "verdicts.jsonl")

    def check() -> None:
        if (stop := session.requests.stop()) is not None:
            raise Stopped(stop.reason)

    with _workers(kernel) as workers:
        judge = _judge(kernel, workers)
        session.say(
            f"funnel: {len(made)} candidates, {len(ledger.entries)} verdicts are there, {judge.parallel} workers, "
            f"at most {judge.bound_s(len(made)) / 60:.0f} min a row"
        )
        try:
            return ablation.verify(judge, made, ledger, rows=rows, check=check, say=session.say)
        except Stopped as error:
            session.say(f"stopped in the funnel: {error}")
            return None


def _workers(kernel: Kernel) -> Workers:
    return Workers(kernel.session.workdir / "scratch", gpus=kernel.session.device.torch.type == "cuda")


def _judge(kernel: Kernel, workers: Workers) -> Judge:
    gpus = torch.cuda.device_count() if kernel.session.device.torch.type == "cuda" else 0
    return Judge(kernel.config.funnel, kernel.config.seed, workers, gpus=gpus)


def _report(kernel: Kernel, found: dict[str, list[Verdict]], digest: str) -> None:
    """ablation.json, results.json and a few lines."""
    session, config = kernel.session, kernel.config
    full = found[ablation.FULL]
    table = [ablation.line(row, verdicts, full, seed=config.seed) for row, verdicts in found.items()]
    generated = [verdict for verdict in full if verdict.origin == "generated"]
    own = ablation.line(ablation.FULL, generated, generated, seed=config.seed)
    own = {key: own[key] for key in (*OWN, "pass@1_interval")}
    low, high = own["pass@1_interval"]
    steps = kernel.phases[0].last
    statement = (
        f"{own['candidates']} candidates of {own['tasks']} tasks: pass@1 {own['pass@1']:.3f}, 95 % interval over tasks "
        f"{low:.3f} to {high:.3f}. Only {steps} optimizer steps on {kernel.manifest.facts['examples']} pairs were "
        "trained: expect the answers' format from that, not skill."
    )
    atomic.write_json(session.workdir / "ablation.json", {"schema": 1, "rows": table})
    results = {
        "schema": 1,
        "experiment": "kernel-sft",
        "statement": statement,
        "steps": steps,
        "val_loss": kernel.val_loss,
        "generated": own,
        "stages_reached": {str(stage): sum(v.stage == stage for v in full) for stage in range(1, 7)},
        "isolated": all(v.isolated for v in full if v.isolated is not None),
        "curriculum": kernel.progress["evaluations"],
        "ablation": table,
        "device": session.device.name,
        "ranks": session.world.size,
        "torch": torch.__version__,
        "dataset": {"sha256": kernel.manifest.sha256, **kernel.manifest.facts},
        "predicted": next((p for p in session.predicted if p.get("phase") == kernel.phases[0].name), None),
        "weights_sha256": digest,
    }
    atomic.write_json(session.workdir / "results.json", results)
    session.say(statement)
    for text in ablation.text(table):
        session.say(text)
    if not results["isolated"]:
        session.say("this machine allows no namespaces: candidates ran with static rules, guard and limits alone")


OWN = ("candidates", "tasks", "pass@1", "pass@10", "fast_1", "fast_1.2", "timing_refused", "seconds_per_candidate")


def _name(task: Task, number: int) -> str:
    return f"generated-{task.name}-{number}"


def _as_candidate(task: Task, number: int, text: str) -> Candidate:
    return Candidate(name=_name(task, number), task=task.name, source=code(text), origin="generated", label="")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
