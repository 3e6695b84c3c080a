"""command: a user's own training script, in any container image, under the same promises as the ready-made jobs.

Only the definition file describes the script: how it is started, what one of its checkpoints is, how it reports its
step. A command has one phase and no shapes or FLOP. Its speed is measured or declared; its memory is declared or not
predicted. FORMATS has the settings that each checkpoint format fills in, from its framework's
behaviour (docs/own-training.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from gpufleet.job.kind import variables
from gpufleet.job.kind.batch import is_endless, total_steps
from gpufleet.job.kind.common import (
    ENDLESS_S,
    GB,
    LINES_PROBED,
    Code,
    Demands,
    Log,
    Memory,
    NodeParts,
    PhaseSize,
    Rung,
    Sizes,
    ToldSpeed,
    ToldTime,
    added_later,
    bounded,
    in_gb,
    one_or_more,
)
from gpufleet.job.kind.job import JobConfig, Probed, Processes, changed

PHASE = "train"
PROBE_SAVE_S = 600.0  # seconds for which a probe waits after its steps until the command saves by itself
STEP, EPOCH, RANK = "{step}", "{epoch}", "{rank}"
MINUTE_MS = 60_000.0
GPUS_NAMED = re.compile(r"(?P<gpus>[1-9][0-9]{0,2}) ?x ?(?P<gpu>\S.*)")

FormatName = Literal["hf-trainer", "lightning", "litgpt", "nanochat", "dcp", "deepspeed", "file", "none"]
Unit = Literal["step", "epoch"]
Signal = Literal["TERM", "INT", "USR1", "USR2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """The form of a framework's checkpoints and output, from the frameworks' sources of 2026-11."""

    each: tuple[str, ...] = ()  # names of one checkpoint below {checkpoints}; a folder ends in /
    complete: str = ""  # the file that is written last
    unless: str = ""  # a file that exists only while the checkpoint is unfinished
    progress: tuple[str, ...] = ()  # regular expressions with the groups that Progress names
    also: tuple[str, ...] = ()  # files that are kept with each checkpoint
    is_sharded: bool = False  # whether each rank writes its own files
    of_rank: str = ""  # a regular expression for names of files that only the writing rank reads


# The names of DeepSpeed's ZeRO files, which may also be inside of another framework's checkpoint. A rank reads only its
# own files (runtime/engine.py of 0.19.8), unless `elastic_checkpoint` allows a different number of GPUs to read them.
ZERO_OF_RANK = r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_.*\.pt"
FORMATS: dict[str, Format] = {
    "hf-trainer": Format(
        each=("checkpoint-{step}/",),
        complete="trainer_state.json",  # rank 0 writes this file after weights and optimizer
        unless="checkpoint-is-incomplete.txt",
        progress=(
            # The progress bar of the training is the only one without words in front of it.
            r"^\s*\d+%\|[^|]*\| *(?P<step>\d+)/(?P<total>\d+) \[",
            r"'loss': '?(?P<loss>[\d.]+(e[+-]?\d+)?)",
            r"'eval_loss': '?(?P<val>[\d.]+)",
        ),
    ),
    "lightning": Format(
        each=("*step={step}.ckpt",),
        progress=(r"Epoch (?P<epoch>\d+).* (?P<batch>\d+)/(?P<batches>\d+) \[", r"train_loss[a-z_]*=(?P<loss>[\d.]+)"),
    ),
    "litgpt": Format(
        each=("step-{step}/",),
        complete="model_config.yaml",
        progress=(r"step (?P<step>\d+) \| loss train: (?P<loss>[\d.]+)(, val: (?P<val>[\d.]+))?",),
    ),
    "nanochat": Format(
        each=("model_{step}.pt", "meta_{step}.json", "optim_{step}_rank*.pt"),
        progress=(r"^step (?P<step>\d+)/(?P<total>\d+).*loss: (?P<loss>[\d.]+).*dt: (?P<step_ms>[\d.]+)ms",),
        is_sharded=True,
        of_rank=r"optim_\d+_rank\d+\.pt",
    ),
    # Rank 0 writes .metadata after all ranks wrote their files; a rank may read another rank's file.
    "dcp": Format(each=("step-{step}/",), complete=".metadata", is_sharded=True),
    "deepspeed": Format(
        each=("global_step{step}/",),
        progress=(r"\[Rank 0\] step=(?P<step>\d+),",),
        also=("latest",),  # this file names the newest checkpoint
        is_sharded=True,
    ),
    "file": Format(),
    "none": Format(),  # a command that saves nothing
}
COUNTED = re.compile(r"\{(step|epoch)(?::[0-9a-z]+)?\}")  # the placeholders for numbers in a checkpoint's names
GROUPS = ("step", "loss", "val", "step_ms", "total", "epoch", "batch", "batches")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Words and environment variables that are added to the command only if a checkpoint was restored."""

    args: str = ""  # words with {checkpoint}, {step} and {epoch}
    env: dict[str, str] | None = None
    check: Literal["step", "none"] = "step"  # with `none`, gpufleet does not check whether the command resumes


@dataclass(frozen=True, kw_only=True, slots=True)
class Every:
    """How often the command saves by itself. After the loss of a node, at most this much work is repeated."""

    steps: int | None = bounded(None, 1, 100_000_000)
    minutes: float | None = bounded(None, 0.01, 10_000.0)
    epochs: int | None = added_later(None, 1, 1_000_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandCheckpoint:
    """The files that make one checkpoint of the command, below {checkpoints}. The single word `none` means that the
    command saves nothing.
    """

    WORDS: ClassVar[dict[str, dict[str, str]]] = {"none": {"format": "none"}}  # texts that stand for a whole section

    format: FormatName | None = None
    folder: str = "{checkpoints}"
    each: tuple[str, ...] = one_or_more()
    complete: str | None = None
    unless: str | None = None
    rewritten: bool = False  # whether one file is overwritten again and again; its step then comes from the progress
    also: tuple[str, ...] = ()  # names of files that are kept with each checkpoint, for example a tokenizer
    every: Every = Every()
    size_gb: float | None = bounded(None, 0.0001, 10_000.0)
    same_gpus: bool = True  # whether a checkpoint that 8 GPUs wrote can only be read by 8 GPUs
    # number of checkpoints kept among the command's own files; None if the command removes them itself
    keep_on_disk: int | None = bounded(None, 1, 10_000)
    heartbeat_s: float = bounded(60.0, 0.5, 3600.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How the command reports its step: by regular expressions on its output with groups such as `step` and `loss`, or
    by a file of JSON lines.
    """

    format: FormatName | None = None
    stdout: tuple[str, ...] = one_or_more()
    file: str | None = None
    silence_minutes: float = bounded(30.0, 0.05, 1440.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hours:
    """p10, p50 and p90 of the work, as the user estimates it."""

    low: float = bounded(0.0, 0.0, 10_000.0)
    likely: float = bounded(0.0, 0.0, 10_000.0)
    high: float = bounded(0.0, 0.0, 10_000.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandWork:
    """The command's length: steps, epochs, hours, or unknown."""

    steps: int | None = bounded(None, 1, 1_000_000_000)
    epochs: int | None = added_later(None, 1, 1_000_000)
    # if it is given, the run counts steps instead of epochs
    steps_per_epoch: int | None = added_later(None, 1, 1_000_000_000)
    # Milliseconds of a step, by the catalog's name of the GPU, or by `8 x H100`. They are declared, and not measured.
    step_ms: dict[str, float] | None = None
    epoch_minutes: dict[str, float] | None = added_later(None)  # minutes of an epoch, by GPU in the same way
    # where these times come from: from the user's own measurement, or from a web page
    from_: Literal["own", "page"] = added_later("own")
    hours: Hours | None = None
    early: bool = False  # whether it may end by itself before its last step


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRules:
    """How gpufleet asks the command to end."""

    signal: Signal = "TERM"
    saves: Literal["true", "false", "unknown"] = "unknown"  # whether the command saves on that signal
    grace_s: float = bounded(90.0, 0.1, 3600.0)
    request: Signal | None = None  # the signal on which the command saves and then continues


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitRules:
    """The meaning of the command's exit codes other than 0."""

    fatal: tuple[int, ...] = ()  # codes after which no node can succeed
    again: tuple[int, ...] = ()  # codes after which another node may succeed
    restarts: int = bounded(2, 0, 100)  # number of restarts on the same node, from the last complete checkpoint
    # Minutes for which a node stays after a failure, for `gpufleet shell`.
    hold_minutes: float = added_later(0.0, 0.0, 1440.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandConfig(JobConfig):
    """A script of the user's own."""

    module: ClassVar[str] = "gpufleet.job.command"
    path: ClassVar[str] = "job"
    processes: ClassVar[Processes] = "own"
    leaves_speed: ClassVar[tuple[str, ...]] = (
        "work", "stop", "exit", "outputs", "secrets", "registry", "resume", "memory_gb", "progress", "code", "aws",
        "workdir",
    )  # fmt: skip

    command: str = ""  # the text of the command, for `sh -ec`
    setup: str = ""  # text for `sh -ec` that runs once per node, before the command
    workdir: str = added_later("{code}")  # the folder in which the command starts, relative to that of the code
    code: Code | None = None
    registry: str | None = None  # ssm:/name of a secret with user:password, for a private image that is not in ECR
    resume: Resume = Resume()
    env: dict[str, str] | None = None
    secrets: dict[str, str] | None = None  # NAME: ssm:/name or secretsmanager:name
    gpus: int | None = bounded(None, 1, 8)
    aws: bool = False  # whether the command's container has the node's role
    checkpoint: CommandCheckpoint = CommandCheckpoint()
    progress: Progress = Progress()
    work: CommandWork = CommandWork()
    stop: StopRules = StopRules()
    exit: ExitRules = ExitRules()
    outputs: tuple[str, ...] = ("{outputs}",)
    memory_gb: float | None = bounded(None, 0.1, 1000.0)  # GB per GPU
    device: Literal["cuda", "cpu"] = "cuda"
    log: Log = Log()

    def __hash__(self) -> int:
        return hash(repr(self))  # the config has maps, which cannot be hashed

    @property
    def format(self) -> Format:
        """The settings of the declared checkpoint format; empty settings if the definition declares no format."""
        return FORMATS[self.checkpoint.format or "file"]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of one checkpoint's files below `checkpoint.folder`, with {step} or {epoch}."""
        return self.checkpoint.each or self.format.each

    @property
    def complete(self) -> str:
        """The file of a checkpoint that is written last; empty if unknown."""
        return self.format.complete if self.checkpoint.complete is None else self.checkpoint.complete

    @property
    def unless(self) -> str:
        """The file that marks a checkpoint as unfinished; empty if there is none."""
        return self.format.unless if self.checkpoint.unless is None else self.checkpoint.unless

    @property
    def patterns(self) -> tuple[str, ...]:
        """Regular expressions for the command's output."""
        if self.progress.stdout or self.progress.file:
            return self.progress.stdout
        return FORMATS[self.progress.format or self.checkpoint.format or "file"].progress

    @property
    def parts(self) -> NodeParts:  # type: ignore[override]
        """Which parts of a checkpoint the nodes write: each node writes its own part. Only the leader writes a file
        that is overwritten.
        """
        own = [re.sub(r"\\\{.*?\\\}|\\\*", "[^/]*", re.escape(name)) for name in self.names if RANK in name]
        zero = ZERO_OF_RANK if self.checkpoint.same_gpus else ""
        of_rank = (
            self.format.of_rank,
            zero,
            *(pattern + ".+" if pattern.endswith("/") else pattern for pattern in own),
        )
        leaves = self.saves and not self.checkpoint.rewritten
        return NodeParts(reads=True, leaves=leaves, of_rank=tuple(filter(None, of_rank)))

    @property
    def companions(self) -> tuple[str, ...]:
        """The files that are kept with each checkpoint, below `checkpoint.folder`."""
        return (*self.checkpoint.also, *self.format.also)

    @property
    def groups(self) -> frozenset[str]:
        """The names of the groups in the progress patterns; a pattern that is no regular expression has none."""
        names: set[str] = set()
        for pattern in self.patterns:
            with suppress(re.error):
                names |= set(re.compile(pattern).groupindex)
        return frozenset(names)

    @property
    def steps(self) -> int | None:
        """The steps of the whole run; None if not declared."""
        work = self.work
        if work.epochs is not None and work.steps_per_epoch is not None:
            return work.epochs * work.steps_per_epoch
        return work.steps

    @property
    def unit(self) -> Unit:
        """The unit of the run's bill, metrics and checkpoints: epochs if nothing is counted in steps."""
        if self.steps is None and self.work.epochs is not None:
            return "epoch"
        says_epochs = "epoch" in self.groups and not self.groups & {"step", "batch"}
        return "epoch" if says_epochs and self.steps is None else "step"

    @property
    def total(self) -> int | None:
        """The whole run in `unit`; None if not declared."""
        return self.steps if self.unit == "step" else self.work.epochs

    @property
    def stages(self) -> int:
        """The number of trainings that the command runs one after another, as far as its text shows; at least 1."""
        parts = re.split(r"&&|;|\n", self.command)
        scripts = [match[0] for part in parts if (match := TRAINING.search(part)) and not EVALUATION.search(match[0])]
        return max(1, len(scripts))

    @property
    def saves(self) -> bool:
        return self.checkpoint.format != "none"

    @property
    def saves_on_signal(self) -> bool | None:
        """Whether a stop leaves a checkpoint; None if unknown."""
        return {"true": True, "false": False, "unknown": None}[self.stop.saves] if self.saves else False

    def phases(self) -> tuple[PhaseSize, ...]:
        steps = self.total
        if steps is None:
            steps = ENDLESS_S if self.work.hours is None else max(1, round(self.work.hours.likely * 3600))
        return (
            PhaseSize(
                name=PHASE,
                params_total=0,
                params_active=0,
                params_trained=0,
                flops_per_token=0,
                attention=None,
                optimizer_traffic_bytes_per_param=0,
                steps=steps,
                tokens_per_step=1,
                counts="seconds" if self.total is None else "steps" if self.unit == "step" else "epochs",
            ),
        )

    @property
    def counts_steps(self) -> bool:
        """Whether `phases` has the command's steps or epochs, and not seconds."""
        return self.total is not None

    @property
    def demands(self) -> Demands:  # type: ignore[override]
        """What the command needs from a node. A set-up, or `install` in its text, means that it may install
        packages.
        """
        return Demands(
            apart=self._trains_apart(),
            like_nodes=self.checkpoint.same_gpus and self.gpus is None and self.device == "cuda",
            interval=self.saves and self.checkpoint.every == Every(),
            code=self.code,
            installs=bool(self.setup.strip()) or re.search(r"\binstall\b", self.command) is not None,
            inputs=tuple((path, match[1]) for path, text in self.texts() for match in INPUT.finditer(text)),
            secrets={**(self.secrets or {}), **({"registry": self.registry} if self.registry else {})},
            login=self.registry,
            node_role=self.aws,
            held_minutes=self.exit.hold_minutes,
        )

    def steps_between_saves(self) -> int | None:
        """The interval between saves, in `unit`; None if it is not declared in a countable unit."""
        every = self.checkpoint.every
        if self.unit == "epoch":
            return every.epochs
        per_epoch = self.work.steps_per_epoch
        return every.epochs * per_epoch if every.epochs is not None and per_epoch is not None else every.steps

    @property
    def told_speed(self) -> ToldSpeed:
        hours = (estimate.low, estimate.likely, estimate.high) if (estimate := self.work.hours) else None
        from_page, times = self.work.from_ == "page", tuple(self._told_times())
        return ToldSpeed(key=f"{self.path}.work.{self._counted_key}", times=times, from_page=from_page, hours=hours)

    @property
    def _counted_key(self) -> str:
        return "epoch_minutes" if self.unit == "epoch" else "step_ms"

    def _told_times(self) -> Iterator[ToldTime]:
        counted = self._counted_key
        for key, unit_ms in (("step_ms", 1.0), ("epoch_minutes", MINUTE_MS)):
            for name, duration in (getattr(self.work, key) or {}).items():
                match = GPUS_NAMED.fullmatch(name)
                gpu, gpus = (name, None) if match is None else (match["gpu"], int(match["gpus"]))
                section, ms = f"{self.path}.work.{key}", duration * unit_ms
                yield ToldTime(section=section, key=name, gpu=gpu, gpus=gpus, ms=ms, counts=key == counted)

    def save_interval_s(self, step_s: float) -> float:
        if not self.saves:
            return ENDLESS_S  # without checkpoints, all work is repeated after a loss
        every = self.checkpoint.every
        if every.minutes is not None:
            return every.minutes * 60
        if (count := self.steps_between_saves()) is not None and self.counts_steps:
            return count * step_s
        return self.work.hours.likely * 3600 if self.work.hours else 3600.0

    def completed(
        self,
        *,
        hours: float = 0.0,
        save_bytes: int | None = None,
        save_steps: int | None = None,
        saves_on_stop: bool = False,
    ) -> CommandConfig:
        """The config, in which a measured size replaces the declared one; other measured values are used only if no
        value is declared.
        """
        if hours:
            bought = Hours(low=hours, likely=hours, high=hours)
            return changed(self, work=replace(self.work, hours=bought)) if is_endless(self) else self
        size = self.checkpoint.size_gb if save_bytes is None else save_bytes / GB
        says = not self.demands.interval or save_steps is None or not self.counts_steps
        interval = Every(epochs=save_steps) if self.unit == "epoch" else Every(steps=save_steps)
        every = self.checkpoint.every if says else interval
        saves = "true" if saves_on_stop and self.stop.saves == "unknown" else self.stop.saves
        saved = replace(self.checkpoint, size_gb=size, every=every)
        return changed(self, checkpoint=saved, stop=replace(self.stop, saves=saves))

    def probed(self, steps: int) -> Probed:
        """A probe stops a command; it does not shorten it. It then waits until the command saves by itself, unless the
        command saves on a stop or on a request.
        """
        stop_at = min(steps, total_steps(self))
        log = replace(self.log, every=max(1, min(self.log.every, stop_at // LINES_PROBED)), tensorboard=False)
        waits = self.stop.saves != "true" and self.stop.request is None
        config = changed(self, log=log, exit=replace(self.exit, hold_minutes=0.0))
        return Probed(config, stop_at, PROBE_SAVE_S if waits else 0.0)

    def memory(self, phase_index: int, rung: Rung, ranks: int = 1) -> Memory | None:
        """The memory that the definition declares."""
        if self.memory_gb is None:
            return None
        return in_gb(weights=self.memory_gb * GB, gradients=0, moments=0, activations=0, logits=0)

    def sizes(self) -> Sizes:
        """The bytes of a checkpoint, as declared. The outputs are assumed to be as large as one checkpoint."""
        held = round((self.checkpoint.size_gb or 0.0) * GB)
        return Sizes(
            checkpoints=(held,),
            phase_ends=(held,),
            exports={},
            final={"outputs": held},
            final_if_cut=(0,),
            dataset=0,
            staged_in_memory=False,  # snapshots are copied from disk to disk
            results=False,  # the run leaves only the command's own outputs
        )

    def rows(self) -> None:
        return None

    def ladder(self, ranks: int = 1) -> tuple[Rung, ...]:
        return (Rung(micro=1),)

    def ranks(self, gpu_count: int, nodes: int = 1) -> int:
        """The number of GPUs that the command uses: the declared number, or all GPUs if the command starts a process
        for each.
        """
        several = any(word in self.command for word in LAUNCHERS) or any(
            stated.counts and stated.gpus and stated.gpus > 1 for stated in self._told_times()
        )
        return (self.gpus or (gpu_count if several and self.device == "cuda" else 1)) * nodes

    def gpus_needed(self, there: int = 1) -> int:
        return 0 if self.device == "cpu" else self.gpus or there

    @property
    def grace_s(self) -> float:
        return self.stop.grace_s

    def problems(self) -> list[tuple[str, str]]:
        """Problems that are more than a single value out of its range, each as (path under job, sentence)."""
        return list(self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        if not self.command.strip():
            yield "command", "the command that trains, as you would type it in the code's folder"
        yield from self._checkpoint_problems()
        yield from self._progress_problems()
        work = self.work
        lengths = [key for key in ("steps", "epochs", "hours") if getattr(work, key) is not None]
        if len(lengths) > 1:
            yield f"work.{lengths[1]}", f"only one of work.{' and work.'.join(lengths)}"
        if work.hours is not None and not 0 < work.hours.low <= work.hours.likely <= work.hours.high:
            yield "work.hours", "low, likely and high, above 0 and in rising order: your own p10, p50 and p90"
        if work.step_ms is not None and any(not 0 < milliseconds < 1e9 for milliseconds in work.step_ms.values()):
            yield "work.step_ms", "milliseconds above 0 by GPU, such as {A10G: 590}"
        if work.epoch_minutes is not None and any(not 0 < minutes < 1e6 for minutes in work.epoch_minutes.values()):
            yield "work.epoch_minutes", "minutes above 0 by GPU, such as {A10G: 12}"
        if work.step_ms is not None and self.unit == "epoch":
            yield "work.step_ms", "work.epoch_minutes if epochs are counted, or work.steps_per_epoch beside it"
        if work.epoch_minutes is not None and self.unit == "step":
            yield "work.epoch_minutes", "work.step_ms if steps are counted"
        usr = self.stop.signal in ("USR1", "USR2") or self.stop.request in ("USR1", "USR2")
        if usr and "torchrun" in self.command and "--signals-to-handle" not in self.command:
            yield (
                "stop.signal" if self.stop.signal in ("USR1", "USR2") else "stop.request",
                "TERM with torchrun: USR1 and USR2 end torchrun itself and leave its ranks running, unless"
                " --signals-to-handle names them",
            )
        yield from self._environment_problems()
        if _leaves(self.workdir):
            yield "workdir", "a folder of the run: {code}, {checkpoints}, {outputs}, {state}, or one below the code's"
        for path, text in self.texts():
            if unknown := unknown_placeholders(text, extra=path.startswith("resume")):
                yield (
                    path,
                    f"the placeholders {', '.join(PLACEHOLDERS)}; {{{{ is a brace; {unknown} is unknown",
                )

    def texts(self) -> Iterator[tuple[str, str]]:
        """All texts that may contain placeholders, as (path under job, text)."""
        yield from (("command", self.command), ("setup", self.setup), ("workdir", self.workdir))
        yield "resume.args", self.resume.args
        for path, table in (("env", self.env), ("resume.env", self.resume.env)):
            yield from ((f"{path}.{name}", value) for name, value in (table or {}).items())
        yield "checkpoint.folder", self.checkpoint.folder
        yield "progress.file", self.progress.file or ""
        for path, several in (("checkpoint.also", self.checkpoint.also), ("outputs", self.outputs)):
            yield from ((f"{path}[{index}]", text) for index, text in enumerate(several))

    def _trains_apart(self) -> str:
        if (alone := ALONE.search(self.command)) is not None:
            return f"{STATIC} instead of {alone[0]}, which makes each node train alone"
        names_rank = any("{node_rank}" in text or NODE_RANK in text for _, text in self.texts())
        if not names_rank and not GIVES_RANKS.search(self.command):
            return (
                "{node_rank}, by which each node knows its ranks, as in torchrun"
                f" {STATIC}; if your script reads {NODE_RANK} by itself, write under job.env:"
                " {NODE_RANK: '{node_rank}'}"
            )
        return ""

    def _checkpoint_problems(self) -> Iterator[tuple[str, str]]:
        saved = self.checkpoint
        if not self.saves:
            if beside := sorted(key for key in ("each", "complete", "unless", "also") if getattr(saved, key)):
                yield (
                    f"checkpoint.{beside[0]}",
                    "no other key beside checkpoint: none, which means that the command saves nothing",
                )
            return
        if not self.names:
            yield (
                "checkpoint.each",
                "what one checkpoint is, such as checkpoint-{step}/, epoch_{epoch}.pt or ckpt.pt, or a `format`; or"
                " checkpoint: none if the command saves nothing",
            )
            return
        counted = [bool(COUNTED.search(name)) for name in self.names]
        if not saved.rewritten and not all(counted):
            yield "checkpoint.each", "names with {step} or {epoch}; a name without them needs rewritten: true"
        if saved.rewritten and any(counted):
            yield (
                "checkpoint.rewritten",
                "false if the names have {step} or {epoch}, because each checkpoint is then a file of its own",
            )
        if saved.rewritten is False and len({frozenset(COUNTED.findall(name)) for name in self.names}) > 1:
            yield "checkpoint.each", "names that all hold {step}, or all {epoch}, or all both"
        folder = os.path.normpath(saved.folder)
        if folder in (".", "..", "{code}") or _leaves(folder):
            yield (
                "checkpoint.folder",
                "{checkpoints}, or a folder for checkpoints only, because gpufleet empties it before each start."
                " If the command saves into the folder in which it starts, write job.workdir: {checkpoints}",
            )
        for path, names in (("checkpoint.each", self.names), ("checkpoint.also", saved.also)):
            if any(name.startswith("/") or ".." in name.split("/") for name in names):
                yield path, "names below checkpoint.folder"
        yield from self._interval_problems()

    def _interval_problems(self) -> Iterator[tuple[str, str]]:
        every = self.checkpoint.every
        keys = [key for key in ("steps", "epochs", "minutes") if getattr(every, key) is not None]
        if len(keys) > 1:
            yield "checkpoint.every", "only one of steps, epochs and minutes"
        elif every.steps is not None and self.unit == "epoch":
            yield "checkpoint.every.steps", "epochs or minutes, because this run counts epochs"
        elif every.steps is not None and not self.counts_steps:
            yield "checkpoint.every.steps", "minutes, because work.steps is not given"
        elif every.epochs is not None and (self.steps_between_saves() is None or not self.counts_steps):
            yield (
                "checkpoint.every.epochs",
                "minutes; epochs need work.epochs or work.steps_per_epoch",
            )

    def _progress_problems(self) -> Iterator[tuple[str, str]]:
        if not self.patterns and not self.progress.file:
            yield (
                "progress",
                "stdout: a regular expression with the group (?P<step>...) or (?P<epoch>...), or file: a path of JSON"
                " lines",
            )
            return
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield "progress.stdout", f"a regular expression; at character {error.pos}: {error.msg}"
                return
        groups = self.groups
        if unknown := sorted(groups - set(GROUPS)):
            yield "progress.stdout", f"groups named {', '.join(GROUPS)}; unknown: {', '.join(unknown)}"
        elif self.patterns and not groups & {"step", "epoch"}:
            yield "progress.stdout", "a group named step, as in (?P<step>[0-9]+), or epoch"
        elif self.patterns and self.unit == "step" and not ("step" in groups or self._counts_batches(groups)):
            yield (
                "progress.stdout",
                "a group named step, or groups epoch, batch and batches, because this run counts steps; write"
                " work.epochs to count epochs",
            )

    def _counts_batches(self, groups: frozenset[str]) -> bool:
        """Whether epochs in the output can be counted in steps."""
        return "epoch" in groups and ({"batch", "batches"} <= groups or self.work.steps_per_epoch is not None)

    def _environment_problems(self) -> Iterator[tuple[str, str]]:
        for path, text in (("command", self.command), ("setup", self.setup), ("resume.args", self.resume.args)):
            if variables.KEY_LIKE.search(text):
                yield (
                    path,
                    "no secret key, because run.json can be read. Put it under job.secrets (NAME: ssm:/name), and read"
                    " $NAME",
                )
        yield from variables.problems(self.path, "", self.env, self.secrets)
        if self.registry is not None and not variables.SECRET.fullmatch(self.registry):
            yield "registry", "where user:password is kept: ssm:/name or secretsmanager:name. ECR needs none"

    def doubts(self, steps: int) -> Iterator[str]:
        """Settings by which a run could waste money, with a sentence for each."""
        for names, key in ((STEP_COUNTS, "steps"), (EPOCH_COUNTS, "epochs")):
            written, counted = setting(self.command, names), getattr(self.work, key)
            if written is not None and counted is not None and int(written["value"]) != counted:
                yield (
                    f"job.command has {written[0]} and job.work.{key} is {counted}: the script trains for the first"
                    " number, but the bill counts the second"
                )
        if self.stages > 1:
            yield (
                f"job.command trains {self.stages} times, and a run has one counter of steps: if a node is lost in a "
                "later training, that training begins anew, and nothing shows whether it resumes. Make a stack for "
                "each training"
            )
        if not self.saves:
            yield "job.checkpoint is none: a loss repeats all training before it, and the bill counts that"
            return
        if self.demands.interval:
            yield (
                "job.checkpoint.every is missing: only your script knows how often it saves, so the bill assumes"
                " that a loss repeats an hour"
            )
        if self.checkpoint.size_gb is None:
            yield ("job.checkpoint.size_gb is missing: the bill counts uploads and storage as nothing")
        if not self.resume.args and not self.resume.env and self.checkpoint.format in (None, "file"):
            yield (
                "job.resume is empty: the command is the same on a new node, so it must look for a checkpoint in"
                " {checkpoints} itself"
            )


def _leaves(folder: str) -> bool:
    """Whether a path, relative to the folder of the code, leads out of the run's own folders."""
    return os.path.normpath(folder).startswith(("/", "../")) or os.path.normpath(folder) == ".."


# Patterns for a program that trains, up to the name of its script, and for a program that does something else.
TRAINING = re.compile(
    r"\b(?:python[0-9.]*|torchrun|accelerate\s+launch|deepspeed)\s(?:\S+\s+)*?\S*(?:\.py\b|(?<=-m\s)[\w.]+)|\byolo\b"
)
EVALUATION = re.compile(r"eval|test|valid|predict|infer|generat|export|convert|merge|prepare|preprocess|download|data")

# The names that scripts give these settings. They match in upper and lower case, and with - instead of _.
STEP_COUNTS = (
    "max_iters",
    "max_steps",
    "num_iterations",
    "total_steps",
    "train_steps",
    "num_steps",
    "n_steps",
    "steps",
    "iterations",
)
EPOCH_COUNTS = ("num_train_epochs", "num_epochs", "max_epochs", "n_epochs", "train_epochs", "epochs")
SAVE_INTERVALS = (
    "save_every",
    "save_interval",
    "save_steps",
    "checkpoint_every",
    "checkpoint_interval",
    "ckpt_every",
    "ckpt_interval",
    "save_freq",
    "eval_interval",
)


def setting(command: str, names: Iterable[str]) -> re.Match[str] | None:
    """The first of these settings to which a command gives a whole number, as in `--max_steps 5000` or
    `--max_iters=600`. The group `value` has the number. None if the command has none of them.
    """
    matches = (
        re.search(rf"(?<!\S)--{name.replace('_', '[-_]')}(?:=|\s+)(?P<value>[0-9]+)(?![\w.])", command, re.IGNORECASE)
        for name in names
    )
    return next(filter(None, matches), None)


LAUNCHERS = ("{gpus}", "torchrun", "torch.distributed", "accelerate", "deepspeed", "mpirun", "litgpt", "axolotl")
PLACEHOLDERS = (
    *("{code}", "{checkpoints}", "{outputs}", "{state}", "{inputs.NAME}", "{gpus}", "{run}"),
    *("{nodes}", "{node_rank}", "{ranks}", "{master}", "{port}"),
)
NODE_RANK = "GPUFLEET_NODE_RANK"  # as in contract/environment.py
STATIC = "--nnodes {nodes} --node-rank {node_rank} --master-addr {master} --master-port {port}"  # options of torchrun
# Options with which each node waits only for itself: there is no rendezvous address, or it is the node's own address,
# or the number of nodes is 1.
_OWN = r"(localhost|127\.0\.0\.1|0\.0\.0\.0)\b"
_ADDRESS = "rdzv[-_]endpoint|master[-_]addr|main[-_]process[-_]ip|main[-_]address|dist[-_]url"
ALONE = re.compile(
    rf"(?<!\S)(--standalone\b|\S*{_OWN}:0\b|(--({_ADDRESS})[= ]+|MASTER_ADDR=)['\"]?(tcp://)?{_OWN}"
    r"|--(nnodes|num[-_]machines|num[-_]nodes)[= ]+1(?![0-9]))"
)
GIVES_RANKS = re.compile(r"(?<!\S)--rdzv[-_]backend[= ]+(?!static)\S+")
INPUT = re.compile(r"(?<![{$])\{inputs\.([A-Za-z0-9_-]+)\}(?!\})")
PLACEHOLDER = re.compile(r"(?<![{$])\{([A-Za-z_][A-Za-z0-9_.]*)(:[0-9a-z]+)?\}(?!\})")
PLACEHOLDER_NAMES = re.compile(
    r"code|checkpoints|outputs|state|inputs\.[A-Za-z0-9_-]+|gpus|run|nodes|node_rank|ranks|master|port"
)


def unknown_placeholders(text: str, *, extra: bool = False) -> str:
    """The first {word} of a text that is no placeholder; empty if there is none. `extra`: whether {checkpoint}, {step}
    and {epoch} are placeholders too. Braces without a plain name in them (${HOME}, {1..3}, {"json": 1}) are left to the
    shell.
    """
    for match in PLACEHOLDER.finditer(text):
        known = PLACEHOLDER_NAMES.fullmatch(match[1]) or (extra and match[1] in ("checkpoint", "step", "epoch"))
        if not known:
            return match[0]
    return ""


def filled(text: str, values: dict[str, str | int]) -> str:
    """The text in which placeholders, such as {step:06d}, are replaced, and {{ and }} become braces. Unknown
    placeholders stay.
    """

    def replaced(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        value = values.get(match["name"])
        if value is None:
            return match[0]
        return format(value, match["form"] or "")

    return re.sub(r"\{\{|\}\}|(?<!\$)\{(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)(:(?P<form>[0-9a-z]+))?\}", replaced, text)
