"""The funnel: 1 static rules, 2 compile, 3 tiny run, 4 full run, 5 timing. A candidate stops at its first failure.

Only the judge decides: the candidate's process gets a source and inputs, and returns bytes. The judge computes the
expected output itself, after these bytes have arrived. Each candidate has one process that compiles and one that runs.
In each stage it has `candidate_s` seconds for its answers. The judge's own time between two questions is not included,
so that no candidate is rejected because the judge is busy. If a process hangs, crashes or sends a malformed answer,
only its candidate is rejected. A candidate that was right on every input, but was not timed within its limit, passes
without a speed-up.

Stages 1 and 2 need no GPU: on a machine with GPUs all cores do these stages in advance, and one worker per GPU does the
others. On a CPU, where kernels are interpreted, one worker per core does all five stages; even there, stage 2 compiles
for a GPU.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from gpufleet.job.experiments.kernel.judge import catalog, planted, rules, source_text, tasks, timing, wire
from gpufleet.job.experiments.kernel.judge.catalog import KernelTask
from gpufleet.job.experiments.kernel.judge.compilation import Compilation
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.timing import Rejected, Timing
from gpufleet.job.experiments.kernel.judge.verdict import STAGES, Course, Verdict
from gpufleet.job.experiments.kernel.judge.worker import (
    GREET_S,
    Lost,
    NoDeviceError,
    NotBegun,
    OutOfTime,
    Process,
    Workers,
)
from gpufleet.job.experiments.kernel.spec import Funnel as Limits

UNCONTAINED = "this machine's operating system does not allow namespaces for candidates (docs/kernels.md#containment)"


class _ReferenceLost(Exception):
    """The process of the reference was lost, so that there is nothing with which to compare the time."""


class Judge:
    """Judges candidates, one by one or many at once. `gpus`: the number of GPUs to use; if it is 0, candidates are
    interpreted on the CPU.
    """

    def __init__(self, limits: Limits, seed: int, workers: Workers, *, gpus: int = 0) -> None:
        self.limits, self.seed, self._workers, self._gpus = limits, seed, workers, gpus
        self._device = "cuda" if gpus else "cpu"
        self._case = tasks.Cases(seed, self._device).case
        self._cores = len(os.sched_getaffinity(0))
        self.parallel = limits.workers or gpus or self._cores
        self._at_once = self.parallel + (self._cores if gpus else 0)
        self.compilation = Compilation(workers, limits, seed)
        self._free: SimpleQueue[int] = SimpleQueue()
        self._idle: list[SimpleQueue[Process]] = [SimpleQueue() for _ in range(max(1, gpus))]
        for worker in range(self.parallel):
            self._free.put(worker % max(1, gpus))

    def prove(self, say: Callable[[str], None]) -> None:
        """Runs one kernel that is known to be correct on each GPU, in a process like that of a candidate, before the
        first candidate. If this fails twice, the machine is the cause, and not a candidate. Raises NoDeviceError, also
        if there are GPUs but the machine's kernel cannot isolate processes; if there are no GPUs, this is only printed.
        """
        gpus, failed, contained = range(len(self._idle)), list[str](), list[bool]()
        with ThreadPoolExecutor(len(gpus)) as pool:
            for _ in range(2):
                failures = pool.map(partial(self._failure, contained=contained), gpus)
                failed = [f"{gpu}: {why}" for gpu, why in zip(gpus, failures, strict=True) if why]
                if not failed:
                    break
        if failed:
            raise NoDeviceError(
                f"a test kernel that is known to be correct fails on this machine's {self._device}:{failed[0]}"
            )
        if not all(contained):
            if self._gpus:
                raise NoDeviceError(f"{UNCONTAINED}; no candidate runs")
            say(f"{UNCONTAINED}; only the filter of system calls isolates candidates")

    def _failure(self, gpu: int, contained: list[bool]) -> str | None:
        task = catalog.BY_NAME["relu"]
        try:
            with self._workers.start(memory_bytes=self.limits.memory_gb * 1e9, gpu=gpu) as process:
                contained.append(process.isolated)
                self._check(task, self._loaded(process, planted.source(task)), ["tiny"])
        except (Rejected, Lost, NoDeviceError) as error:
            return str(error)
        return None

    def bound_s(self, count: int) -> float:
        """The most seconds that the judge waits for `count` candidates, without its own computations."""
        reading = count * source_text.LONGEST_S  # only one thread reads at a time
        # One process compiles, and another one runs stages 3 to 5. In the last stage, the reference has the same time
        # again, and so has the repeated check among the trials.
        waiting = 3 * GREET_S + (len(STAGES) + 1) * self.limits.candidate_s
        return reading + -(-count // self.parallel) * waiting

    def all(
        self, candidates: Iterable[Candidate], done: Callable[[Verdict], None], check: Callable[[], None] = lambda: None
    ) -> None:
        """Judges in parallel; `done` is called with each verdict when it comes, in this thread. `check` may raise an
        error to stop the judge; running candidates then end without a verdict.
        """
        waiting, running, more = iter(candidates), set[Future[Course | Verdict]](), True
        with self._pools() as (compiles, runs):
            while more or running:
                check()
                while more and len(running) < self._at_once:
                    candidate = next(waiting, None)
                    more = candidate is not None
                    if candidate is not None:
                        running.add(compiles.submit(self._begun, candidate))
                ended, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in ended:
                    outcome = future.result()
                    if isinstance(outcome, Verdict):
                        done(outcome)
                    else:
                        running.add(runs.submit(self._ended, outcome))

    @contextmanager
    def _pools(self) -> Iterator[tuple[ThreadPoolExecutor, ThreadPoolExecutor]]:
        """The thread pools for stages 1 and 2, and for the others.

        After an error, waiting work does not begin, and running work ends.
        """
        runs = ThreadPoolExecutor(self.parallel)
        compiles = ThreadPoolExecutor(self._cores) if self._gpus else runs
        try:
            yield compiles, runs
        except BaseException:
            for pool in (compiles, runs):
                pool.shutdown(wait=False, cancel_futures=True)
            self._workers.give_up()
            raise
        finally:
            compiles.shutdown()
            runs.shutdown()
            self._close_idle()

    def verdict(self, candidate: Candidate) -> Verdict:
        outcome = self._begun(candidate)
        return outcome if isinstance(outcome, Verdict) else self._ended(outcome)

    def _begun(self, candidate: Candidate) -> Course | Verdict:
        course = Course(candidate, digest(candidate.source))
        try:
            with course.timed_stage("rules"):
                problem = rules.problem(candidate.source)
                if problem is not None:
                    raise Rejected(problem)
            with course.timed_stage("compile"):
                if (why := source_text.unreadable(candidate.source)) is not None:
                    raise Rejected(why)
                task = catalog.BY_NAME[candidate.task]
                compiled = self.compilation.compile(candidate.source, course.sha256, task, course.note)
            course.seconds["compile"] = compiled.seconds  # the seconds may be those of an earlier compilation
            if compiled.problem is not None:
                raise Rejected(compiled.problem)
            course.built = compiled.built
        except (Rejected, Lost) as error:
            return _fallen(course, error)
        return course

    def _ended(self, course: Course) -> Verdict:
        gpu = self._free.get()
        try:
            self._judge(course, gpu)
        except (Rejected, Lost) as error:
            return _fallen(course, error)
        finally:
            self._free.put(gpu)
        return course.verdict(None)

    def _judge(self, course: Course, gpu: int) -> None:
        built = course.built if self._gpus else None  # the interpreter cannot use a compiled kernel
        with course.timed_stage("tiny"):
            process = self._workers.start(memory_bytes=self.limits.memory_gb * 1e9, gpu=gpu, built=built)
        try:
            self._run(catalog.BY_NAME[course.candidate.task], process, course, gpu)
            process.look()  # the last answer may have come before the next look at the process
        finally:
            process.close()
            course.note(process)

    def _run(self, task: KernelTask, process: Process, course: Course, gpu: int) -> None:
        with course.timed_stage("tiny"):
            self._check(task, self._loaded(process, course.candidate.source), ["tiny"])
        with course.timed_stage("full"):
            ask = timing.bound(process, self.limits.candidate_s)
            self._check(task, ask, [*(f"random-{number}" for number in range(self.limits.inputs)), *tasks.ADVERSARIAL])
            # Without this, a program that first waits for signs of a timed call would never be caught.
            self._check(task, ask, ["timing"], as_timed=True)
        with course.timed_stage("timing"):
            try:
                with self._reference(gpu) as reference:
                    before = reference.cpu_s
                    try:
                        course.timing = self._time(task, process, reference, course)
                    finally:
                        course.cpu_s += reference.cpu_s - before
            except _ReferenceLost as error:  # the candidate is not the cause
                course.timing = Timing(speedup=None, why=f"the reference: {error}")

    def _time(self, task: KernelTask, process: Process, reference: Process, course: Course) -> Timing:
        ask, more, own = (timing.bound(one, self.limits.candidate_s) for one in (process, process, reference))

        def once_more(*asked: Any, **kwargs: Any) -> wire.Message:
            try:
                return more(*asked, **kwargs)
            except OutOfTime as error:  # as in stage 4: these calls use the stage's time, and measure nothing
                raise Rejected(str(error)) from error

        def other(*asked: Any, **kwargs: Any) -> wire.Message:
            try:
                with process.paused():
                    reply, blobs = own(*asked, **kwargs)
            except Lost as error:
                raise _ReferenceLost(str(error)) from error
            if "error" in reply:  # memory ran out, or the device was lost
                raise _ReferenceLost(reply["error"])
            return reply, blobs

        try:
            other({"do": "load"}, [task.reference_source.encode()])
            return timing.calibrated(
                task,
                self.seed,
                ask,
                other,
                self._case,
                trials=self.limits.trials,
                suspicious=self.limits.suspicious,
                ops=True,
                interpreted=not self._gpus,
                secret=course.sha256,
                limit_s=self.limits.candidate_s,
                others=[partial(self._check, task, once_more, [name], as_timed=True) for name in tasks.ADVERSARIAL],
            )
        except OutOfTime as error:  # it was right on every input; its speed depends on the machine's load
            return Timing(speedup=None, why=f"{error} while it was timed")

    @contextmanager
    def _reference(self, gpu: int) -> Iterator[Process]:
        """A process for references. The process is trusted, so it is used for the next candidate too, unless it is
        lost.
        """
        try:
            process = self._idle[gpu].get_nowait()
        except Empty:
            try:
                process = self._workers.start(memory_bytes=self.limits.memory_gb * 1e9, gpu=gpu, confined=False)
            except Lost as error:
                raise _ReferenceLost(str(error)) from error
        try:
            yield process
        except (Rejected, Lost):  # raised by the candidate: the reference's process waits for its next question
            self._idle[gpu].put(process)
            raise
        except BaseException:
            process.close()
            raise
        self._idle[gpu].put(process)

    def _close_idle(self) -> None:
        for idle in self._idle:
            while not idle.empty():
                idle.get().close()

    def _loaded(self, process: Process, source: str) -> timing.Ask:
        """Loads the candidate, which may not compute with torch. Returns the function by which the stage asks it
        questions.
        """
        ask = timing.bound(process, self.limits.candidate_s)
        turn = random.Random(f"{self.seed} {digest(source)} turn").getrandbits(30)
        problem = timing.load_problem(ask, source, turn, ops=True)
        if problem is not None:
            raise Rejected(problem)
        return ask

    def _check(self, task: KernelTask, ask: timing.Ask, names: Iterable[str], *, as_timed: bool = False) -> None:
        """Checks every case's output."""
        for name in names:
            timing.run(ask, task, self._case(task, name), as_timed=as_timed)


def _fallen(course: Course, error: Rejected | Lost) -> Verdict:
    """The verdict after an error; raises NoDeviceError if this machine failed, not the candidate."""
    if isinstance(error, NotBegun):
        raise NoDeviceError(f"a candidate's process, {error}") from error
    return course.verdict(str(error))


def digest(source: str) -> str:
    return hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
