"""The funnel: 1 static rules, 2 compile, 3 tiny run, 4 full run, 5 timing. It stops at the first failure.

A verdict is the judge's alone: the candidate's process gets a source and inputs and gives bytes; the expected output is
computed here, after those bytes have arrived. Each candidate has its own process, one worker per GPU or per core, and
`candidate_s` of wall-clock per stage, so the whole takes at most candidates x 4 x that / workers. A process that hangs,
crashes or does what is forbidden loses its candidate and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from job.config.kernel import Funnel as Limits
from job.kernels import catalog, rules, tasks, timing, wire
from job.kernels.catalog import Task
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


class _ReferenceLost(Exception):
    """Nothing can be timed against it."""


class Judge:
    """Judges candidates one after another or many at once. `gpus`: how many to use; 0 interprets on the CPU."""

    def __init__(self, limits: Limits, seed: int, workers: Workers, *, gpus: int = 0) -> None:
        self.limits, self.seed, self._workers, self._gpus = limits, seed, workers, gpus
        self._device = "cuda" if gpus else "cpu"
        self.parallel = limits.workers or gpus or len(os.sched_getaffinity(0))
        self._compiled: dict[str, str | None] = {}  # source hash -> what is wrong with it
        self._lock = threading.Lock()
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
        waiting = iter(candidates)
        running: set[Future[Verdict]] = set()
        try:
            with ThreadPoolExecutor(self.parallel) as pool, self._workers.given_up_on_error():
                more = True
                while more or running:
                    check()
                    while more and len(running) < self.parallel:
                        candidate = next(waiting, None)
                        more = candidate is not None
                        if candidate is not None:
                            running.add(pool.submit(self.verdict, candidate, switches, row))
                    ended, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                    for future in ended:
                        done(future.result())
        finally:
            self._close_idle()

    def verdict(self, candidate: Candidate, switches: Switches, row: str) -> Verdict:
        """One candidate through the funnel."""
        course, reason, passed = _Course(), "", False
        gpu = self._free.get()
        try:
            self._judge(candidate, switches, course, gpu)
            passed, course.stage = True, PASSED
        except (Rejected, Lost) as error:
            reason = str(error)
        finally:
            self._free.put(gpu)
        found = course.timing
        return Verdict(
            row=row,
            candidate=candidate.name,
            task=candidate.task,
            origin=candidate.origin,
            label=candidate.label,
            source_sha256=digest(candidate.source),
            passed=passed,
            stage=course.stage,
            reason=reason or (found.why if found else ""),
            seconds={name: round(value, 6) for name, value in course.seconds.items()},
            cpu_s=round(course.cpu_s, 6),
            isolated=course.isolated,
            speedup=found.speedup if found else None,
            kernel_s=found.kernel.quartiles if found and found.kernel else None,
            reference_s=found.reference.quartiles if found and found.reference else None,
        )

    def _judge(self, candidate: Candidate, switches: Switches, course: _Course, gpu: int) -> None:
        task, sha256 = catalog.BY_NAME[candidate.task], digest(candidate.source)
        if switches.funnel:
            with course.at("rules"):
                problem = rules.problem(candidate.source)
                if problem is not None:
                    raise Rejected(problem)
        with course.at("compile"):
            if (known := self._compiled.get(sha256)) is not None:
                raise Rejected(known)
            process = self._workers.start(memory_bytes=self.limits.memory_gb * 1e9, gpu=gpu)
        try:
            course.isolated = process.isolated
            with course.at("compile"):
                reply, _ = process.ask({"do": "load"}, [candidate.source.encode()], limit_s=self.limits.candidate_s)
                problem = f"does not load: {str(reply['error'])[:300]}" if "error" in reply else None
                with self._lock:
                    self._compiled[sha256] = problem
                if problem is not None:
                    raise Rejected(problem)
            self._run(task, process, switches, course, gpu)
        finally:
            process.close()
            course.cpu_s += process.cpu_s

    def _run(self, task: Task, process: Process, switches: Switches, course: _Course, gpu: int) -> None:
        wrong: Rejected | None = None
        if switches.funnel:
            with course.at("tiny"):
                self._check(task, process, [tasks.case(task, self.seed, "tiny", self._device)], switches)
        with course.at("full"):
            count = self.limits.inputs if switches.multi_input else 1
            try:
                given = tasks.cases(task, self.seed, count, self._device, adversarial=switches.multi_input)
                self._check(task, process, given, switches)
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

    def _check(self, task: Task, process: Process, given: Iterable[tasks.Case], switches: Switches) -> None:
        """Every case's output, each computed on inputs that the process has not seen before."""
        ask = timing.bound(process, self.limits.candidate_s)
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
