"""The funnel: 1 static rules, 2 compile, 3 tiny run, 4 full run, 5 timing. It stops at the first failure.

A verdict is the judge's alone: the candidate's process gets a source and inputs and gives bytes; the expected output is
computed here, after those bytes have arrived. Each candidate has one process that compiles and one that runs, and
`candidate_s` of wall-clock per stage, so the whole takes at most candidates x 4 x that / workers. A process that hangs,
crashes or does what is forbidden loses its candidate and nothing else.

Stages 1 and 2 need no GPU: where there are GPUs they go ahead on all cores, and one worker per GPU does the others. On
a CPU, where kernels are interpreted, one worker per core does all five; stage 2 compiles for a GPU there too.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from job.config.kernel import Funnel as Limits
from job.kernels import catalog, rules, tasks, timing, wire
from job.kernels.catalog import Task
from job.kernels.compilation import Compilation
from job.kernels.planted import Candidate
from job.kernels.timing import Rejected, Timing
from job.kernels.worker import Lost, Process, Workers

STAGES = ("rules", "compile", "tiny", "full", "timing")
PASSED = len(STAGES) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches:
    """The extensions that can be left out for the ablation table. Isolation and limits cannot."""

    funnel: bool = True  # rules and the list of operations; stages that stop at the first failure
    multi_input: bool = True  # several random inputs and the adversarial ones; otherwise one random input
    timing: bool = True  # calibrated; otherwise one call by the wall clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`stage`: where it stopped, 1 to 5, or 6 when it passed all. Seconds are wall-clock."""

    row: str
    candidate: str
    task: str
    origin: str
    label: str
    source_sha256: str
    passed: bool
    stage: int
    reason: str
    seconds: dict[str, float]
    cpu_s: float  # of the candidate's and the reference's process
    isolated: bool | None  # namespaces were allowed; None: no process was needed
    speedup: float | None = None
    kernel_s: tuple[float, float, float] | None = None  # quartiles
    reference_s: tuple[float, float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Verdict:
        """Raises TypeError for another version's line."""
        pairs = {name: tuple(tree[name]) if tree[name] else None for name in ("kernel_s", "reference_s")}
        return cls(**{**tree, **pairs})


@dataclass(slots=True)
class _Course:
    """What is known of a candidate while it is judged."""

    candidate: Candidate
    switches: Switches
    row: str
    sha256: str
    built: Path | None = None  # what stage 2 left
    seconds: dict[str, float] = field(default_factory=dict)
    stage: int = 1
    cpu_s: float = 0.0
    isolated: bool | None = None
    timing: Timing | None = None

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        self.stage = STAGES.index(stage) + 1
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def note(self, process: Process) -> None:
        """One that is over."""
        self.isolated = process.isolated
        self.cpu_s += process.cpu_s

    def verdict(self, reason: str | None) -> Verdict:
        """None: it has passed."""
        found = self.timing
        return Verdict(
            row=self.row,
            candidate=self.candidate.name,
            task=self.candidate.task,
            origin=self.candidate.origin,
            label=self.candidate.label,
            source_sha256=self.sha256,
            passed=reason is None,
            stage=PASSED if reason is None else self.stage,
            reason=reason or (found.why if found else ""),
            seconds={name: round(value, 6) for name, value in self.seconds.items()},
            cpu_s=round(self.cpu_s, 6),
            isolated=self.isolated,
            speedup=found.speedup if found else None,
            kernel_s=found.kernel.quartiles if found and found.kernel else None,
            reference_s=found.reference.quartiles if found and found.reference else None,
        )


class _ReferenceLost(Exception):
    """Nothing can be timed against it."""


class Judge:
    """Judges candidates one after another or many at once. `gpus`: how many to use; 0 interprets on the CPU."""

    def __init__(self, limits: Limits, seed: int, workers: Workers, *, gpus: int = 0) -> None:
        self.limits, self.seed, self._workers, self._gpus = limits, seed, workers, gpus
        self._device = "cuda" if gpus else "cpu"
        self._cores = len(os.sched_getaffinity(0))
        self.parallel = limits.workers or gpus or self._cores
        self.compilation = Compilation(workers, limits)
        self._free: SimpleQueue[int] = SimpleQueue()
        self._idle: list[SimpleQueue[Process]] = [SimpleQueue() for _ in range(max(1, gpus))]
        for worker in range(self.parallel):
            self._free.put(worker % max(1, gpus))

    def bound_s(self, count: int) -> float:
        """No `count` candidates take longer."""
        return -(-count // self.parallel) * (len(STAGES) - 1) * self.limits.candidate_s

    def all(
        self,
        candidates: Iterable[Candidate],
        switches: Switches,
        row: str,
        done: Callable[[Verdict], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Judges in parallel; `done` gets each verdict as it falls, in this thread. `check` may raise to give up: then
        what is under way is ended, without a verdict.
        """
        waiting, running = iter(candidates), set[Future[_Course | Verdict]]()
        ahead = self._cores if self._gpus else 0
        try:
            with (
                ThreadPoolExecutor(self.parallel) as runs,
                ThreadPoolExecutor(ahead) if ahead else nullcontext(runs) as compiles,
                self._workers.given_up_on_error(),
            ):
                more = True
                while more or running:
                    check()
                    while more and len(running) < self.parallel + ahead:
                        candidate = next(waiting, None)
                        more = candidate is not None
                        if candidate is not None:
                            running.add(compiles.submit(self._begun, candidate, switches, row))
                    ended, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                    for future in ended:
                        found = future.result()
                        if isinstance(found, Verdict):
                            done(found)
                        else:
                            running.add(runs.submit(self._ended, found))
        finally:
            self._close_idle()

    def verdict(self, candidate: Candidate, switches: Switches, row: str) -> Verdict:
        """One candidate through the funnel."""
        found = self._begun(candidate, switches, row)
        return found if isinstance(found, Verdict) else self._ended(found)

    def _begun(self, candidate: Candidate, switches: Switches, row: str) -> _Course | Verdict:
        """Stages 1 and 2."""
        course = _Course(candidate, switches, row, digest(candidate.source))
        try:
            if switches.funnel:
                with course.at("rules"):
                    problem = rules.problem(candidate.source)
                    if problem is not None:
                        raise Rejected(problem)
            with course.at("compile"):
                task = catalog.BY_NAME[candidate.task]
                found = self.compilation.of(candidate.source, course.sha256, task, course.note)
                if found.problem is not None:
                    raise Rejected(found.problem)
                course.built = found.built
        except (Rejected, Lost) as error:
            return course.verdict(str(error))
        return course

    def _ended(self, course: _Course) -> Verdict:
        """Stages 3 to 5."""
        gpu = self._free.get()
        try:
            self._judge(course, gpu)
        except (Rejected, Lost) as error:
            return course.verdict(str(error))
        finally:
            self._free.put(gpu)
        return course.verdict(None)

    def _judge(self, course: _Course, gpu: int) -> None:
        built = course.built if self._gpus else None  # the interpreter has no use for it
        with course.at("tiny" if course.switches.funnel else "full"):
            process = self._workers.start(memory_bytes=self.limits.memory_gb * 1e9, gpu=gpu, built=built)
        try:
            self._run(catalog.BY_NAME[course.candidate.task], process, course, gpu)
        finally:
            process.close()
            course.note(process)

    def _run(self, task: Task, process: Process, course: _Course, gpu: int) -> None:
        wrong: Rejected | None = None
        switches, source = course.switches, course.candidate.source
        if switches.funnel:
            with course.at("tiny"):
                ask = self._loaded(process, source)
                self._check(task, ask, [tasks.case(task, self.seed, "tiny", self._device)], switches)
        with course.at("full"):
            ask = timing.bound(process, self.limits.candidate_s) if switches.funnel else self._loaded(process, source)
            count = self.limits.inputs if switches.multi_input else 1
            try:
                given = tasks.cases(task, self.seed, count, self._device, adversarial=switches.multi_input)
                self._check(task, ask, given, switches)
            except Rejected as error:
                if switches.funnel:
                    raise
                wrong = error  # without the funnel a wrong one is timed all the same
        with course.at("timing"), self._reference(gpu) as reference:
            before = reference.cpu_s
            try:
                course.timing = self._time(task, process, reference, switches)
            finally:
                course.cpu_s += reference.cpu_s - before
        if wrong is not None:
            course.stage = STAGES.index("full") + 1
            raise wrong

    def _time(self, task: Task, process: Process, reference: Process, switches: Switches) -> Timing:
        patience_s = len(STAGES) * self.limits.candidate_s  # it waits while the candidate runs
        ask, own = timing.bound(process, self.limits.candidate_s), timing.bound(reference, patience_s)

        def other(head: dict[str, Any], blobs: list[bytes] | None = None) -> tuple[dict[str, Any], list[bytes]]:
            try:
                return own(head, blobs)
            except Lost as error:
                raise _ReferenceLost(str(error)) from error

        try:
            other({"do": "load"}, [task.reference_source.encode()])
            if not switches.timing:
                return timing.stopwatch(task, self.seed, ask, other, self._device)
            return timing.calibrated(
                task,
                self.seed,
                ask,
                other,
                trials=self.limits.trials,
                suspicious=self.limits.suspicious,
                device=self._device,
            )
        except _ReferenceLost as error:  # no fault of the candidate's
            return Timing(speedup=None, why=f"the reference: {error}")

    @contextmanager
    def _reference(self, gpu: int) -> Iterator[Process]:
        """A process for references. It is ours, so the next candidate's may use it too."""
        try:
            process = self._idle[gpu].get_nowait()
        except Empty:
            process = self._workers.start(
                memory_bytes=self.limits.memory_gb * 1e9, gpu=gpu, confined=False, guarded=False
            )
        try:
            yield process
        except BaseException:
            process.close()
            raise
        self._idle[gpu].put(process)

    def _close_idle(self) -> None:
        for idle in self._idle:
            while not idle.empty():
                idle.get().close()

    def _loaded(self, process: Process, source: str) -> timing.Ask:
        """The stage's questions, the candidate loaded."""
        ask = timing.bound(process, self.limits.candidate_s)
        problem = timing.load_problem(ask, source)
        if problem is not None:
            raise Rejected(problem)
        return ask

    def _check(self, task: Task, ask: timing.Ask, given: Iterable[tasks.Case], switches: Switches) -> None:
        """Every case's output, each computed on inputs that the process has not seen before."""
        for case in given:
            packed = [wire.pack(tensor) for tensor in case.tensors]
            head = {"do": "run", "inputs": [spec for spec, _ in packed], "ops": switches.funnel}
            reply, blobs = ask(head, [blob for _, blob in packed])
            problem = timing.output_problem(task, case, reply, blobs)
            if problem is not None:
                raise Rejected(problem)
            if reply.get("alias") or reply.get("changed"):
                raise Rejected(f"{case.name}: gives its input back, or changes it")
            ops = reply.get("ops")
            if switches.funnel and (bad := rules.forbidden_ops(ops if isinstance(ops, list) else ["?"])):
                raise Rejected(f"{case.name}: computes with torch: {', '.join(bad)[:200]}")


def digest(source: str) -> str:
    """What names a source."""
    return hashlib.sha256(source.encode()).hexdigest()
