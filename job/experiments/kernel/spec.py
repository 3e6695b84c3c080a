"""kernel-sft: trains all weights on packed rows, then generates, then runs the funnel. A micro-batch counts rows.

A run does all of this, or only one part: `train` ends with the candidates, and `judge` judges the candidates of an
earlier stage of the run.

The funnel's seconds per candidate are assumptions until a run has measured them, except for the judge's own work on a
CPU. Compilation is spread over all vCPUs: seconds to tens of seconds of one core. One worker per GPU does the other
stages, one candidate after another: the worker starts a process, sends inputs, and compares tens of megabytes per input
in one thread. For most of this time the GPU waits, but it is billed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from gpufleet.job.experiments.models.config import QWEN3_8B, DecoderConfig
from gpufleet.job.experiments.spec import CosineAdamW, warmup_doubts
from gpufleet.job.experiments.tuning import spec as tuning
from gpufleet.job.experiments.tuning.spec import TokenBatch, TuningConfig
from gpufleet.job.kind import common

COMPILE_CORE_S = 20.0  # seconds to compile one Triton kernel with its variants on one core
# Worker seconds per candidate: a new process (4 CPU-s to import torch and triton), its driver and its tiny run.
STARTED_GPU_S = 6.0
# A correct candidate also takes stages 4 and 5. For the sizes on a GPU, the judge itself needs 29 s of this time in one
# thread, if inputs are kept: 10 s for stage 4 (8 with float16, 9 to 10 with one argument, 12 with two, 17 with three),
# 7 s for each try of stage 5 (6 to 9), which is taken 1.4 times, and 9 s for the repeated check with timing (8 with one
# argument, 10 with two). Measured: thread CPU time of funnel.Judge on four tasks, the last only for packing and
# comparing, torch on the CPU instead of the candidate; 2 shared cores of an Intel Xeon, 2026-11-22. The rest, copies to
# the GPU and kernels, is assumed.
CORRECT_GPU_S = 35.0
# the seconds of that stage 4; the number of its random inputs at that time, and of those in tasks.py
FULL_RUN_S, INPUTS, ADVERSARIAL = 10.0, 5, 9
# seconds per rank for a candidate in Triton's interpreter; two ranks took 190 s for 1,300 (rehearsal, 2026-11-22)
INTERPRETED_S = 0.3
CORRECT_SHARE = 0.2  # assumed share of correct candidates; KernelLLM-8B reports a pass@1 of 20.2 %
AT_ONCE = 32  # number of sequences that a rank generates together; all of them are lost if the run is stopped
TRIED = 4  # number of candidates per task in an evaluation for a curriculum
HELD_OUT = 0.02  # share of the pairs in each evaluation (job/experiments/kernel/pairs.py)
CANDIDATES, TRAINING = HANDED = ("candidates.jsonl", "training.json")  # files in final/ of the part that trains
_KERNEL = "gpufleet.job.experiments.kernel"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelData:
    """PyTorch-to-Triton pairs; the loss is on the answer."""

    source: Literal["jsonl", "generated-kernels"] = "jsonl"
    samples: int = common.bounded(1000, 1, 10_000_000)
    # An expected value, which that of the prepared dataset replaces.
    tokens_per_sample: float = common.bounded(8192.0, 1.0, 131072.0)
    row: int = common.bounded(8192, 8, 131072)
    # Whether later epochs have more samples of half-mastered tasks; `compare` trains both ways.
    curriculum: Literal["off", "on", "compare"] = "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """`candidates` per task, sampled with seeds by (seed, task, candidate)."""

    tasks: int = common.bounded(20, 1, 20)  # as many as in job/experiments/kernel/judge/catalog.py
    candidates: int = common.bounded(10, 1, 10_000)
    max_tokens: int = common.bounded(2048, 1, 131072)
    temperature: float = common.bounded(0.8, 0.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Funnel:
    """Limits of the verification funnel. Each candidate runs in its own process."""

    # The number of planted candidates that are judged in addition to the generated ones; planted.py has no more than
    # this.
    planted: int = common.bounded(0, 0, 200)
    workers: int | None = common.bounded(None, 1, 1024)  # None = one per GPU, or one per CPU core without GPUs
    candidate_s: float = common.bounded(60.0, 0.1, 3600.0)  # wall-clock of one candidate in one stage
    memory_gb: float = common.bounded(16.0, 0.1, 1024.0)
    inputs: int = common.bounded(5, 1, 1000)  # random inputs of the full run, besides the adversarial inputs
    trials: int = common.bounded(100, 1, 100_000)  # number of trials in the timing
    # a candidate with a higher speed-up is run again with new inputs
    suspicious: float = common.bounded(2.0, 1.0, 1000.0)
    # used only by version 0.1.0, which judged all candidates again with each extension switched off
    ablations: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig(TuningConfig):
    """kernel-sft: all weights of a 7-8 B code model, 20 tasks x 10 candidates, judged on the node's GPUs and CPUs."""

    dataset_class: ClassVar[str] = f"{_KERNEL}.data:KernelPairs"
    leaves_speed: ClassVar[tuple[str, ...]] = (
        "epochs", "generate", "funnel", "data.samples", "data.curriculum", "part", "candidates",
    )  # fmt: skip

    part: Literal["all", "train", "judge"] = common.added_later("all")
    # for the part `judge`: the stage of the run that has written the candidates
    candidates: str = common.added_later("")
    epochs: int = common.bounded(1, 1, 1000)
    seed: int = common.bounded(1337, 0, 2**31 - 1)
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int | None = common.bounded(None, 1, 8)
    model: DecoderConfig = QWEN3_8B
    data: KernelData = KernelData()
    batch: TokenBatch = TokenBatch(tokens=524_288)
    optim: CosineAdamW = CosineAdamW(lr=1e-5, warmup=2)
    precision: common.Compute = common.Compute()
    reshard_after_forward: bool = True
    generate: Generation = Generation()
    funnel: Funnel = Funnel()
    checkpoint: common.Checkpoint = common.Checkpoint()
    guard: common.Guard = common.added_later(common.Guard(), version="0.1.0")
    log: common.Log = common.Log()

    @property
    def trainer(self) -> str:  # type: ignore[override]
        return f"{_KERNEL}.run:{'Kernel' if self.trains else 'Judging'}"

    @property
    def trains(self) -> bool:
        """Whether this part trains and generates."""
        return self.part != "judge"

    @property
    def dataset_kind(self) -> str:  # type: ignore[override]
        return "packed" if self.trains else ""

    @property
    def demands(self) -> common.Demands:  # type: ignore[override]
        return common.Demands(
            one_node="its candidates are judged on one node, while the others would wait and be billed",
            # Untrusted candidates run in namespaces, which docker's default profile forbids. This profile allows them,
            # and forbids everything else that the default profile forbids.
            container_options="--security-opt seccomp={app}/gpufleet/job/node/namespaces.json",
            inputs=(("candidates", self.candidates),) if self.candidates else (),
            takes=HANDED,
            leaves=HANDED if self.part == "train" else (),
        )

    def problems(self) -> list[tuple[str, str]]:
        problems = tuning.problems(self.model)
        if self.trains == bool(self.candidates):
            problems.append(
                ("candidates", "the name of an earlier stage with part `train`, and only for the part `judge`")
            )
        problems += tuning.batch_problems(self.batch, self.data.row, self.optim.betas)
        if self.data.curriculum != "off" and self.epochs < 2:
            problems.append(("data.curriculum", "off unless epochs is 2 or more, because it acts between two epochs"))
        return problems

    @common.remembered
    def phases(self) -> tuple[common.PhaseSize, ...]:
        """`sft`, or `sft-uniform` and `sft-adaptive`, each with its candidates; `generate`; `verify`, alone for the
        part `judge`.
        """
        m = self.model
        total = tuning.parameters(m)
        context = min(self.data.tokens_per_sample, self.data.row)
        tokens = self.epochs * self.data.samples * self.data.tokens_per_sample
        sizes = {
            "kind": "all weights",
            "params_total": total,
            "params_active": total,
            "params_trained": total,
            "flops_per_token": 6 * tuning.matmul_parameters(m) + tuning.attention_flops(m, context),
            "optimizer_traffic_bytes_per_param": 28,
            "tokens_per_step": self.batch.tokens,
            "launch_ms": tuning.LAUNCH_MS,
            "micro_launch_ms": m.layers * tuning.LAYER_LAUNCH_MS,
            "sharded": True,
            "gathered_bytes": tuning.gathered_bytes(m, self.precision.compute, again=self.reshard_after_forward),
            "workers": self.funnel.workers,
        }
        names, seconds = trainings(self), per_candidate(self)
        compile_s, judge_s = seconds["compile_s"], seconds["judge_s"]
        judged = len(names) * self.generate.tasks * self.generate.candidates + self.funnel.planted

        def training(name: str) -> common.PhaseSize:
            adaptive = self.data.curriculum != "off" and name == names[-1]
            tries = self.epochs - 1 if adaptive else 0
            tried = tries * self.generate.tasks * TRIED
            return common.PhaseSize(
                name=name,
                steps=tuning.steps(tokens, self.batch.tokens),
                forward_tokens=int(HELD_OUT * tokens),  # for an evaluation after each epoch
                decode_steps=tries * self.generate.max_tokens,
                decode_sequences=self.generate.tasks * TRIED,
                decode_at_once=AT_ONCE,
                cpu_core_s=tried * compile_s,
                gpu_s=tried * judge_s,
                **sizes,  # type: ignore[arg-type]
            )

        generate = common.PhaseSize(
            name="generate",
            steps=0,
            decode_steps=len(names) * self.generate.max_tokens,
            decode_sequences=self.generate.tasks * self.generate.candidates,
            decode_at_once=AT_ONCE,
            **sizes,  # type: ignore[arg-type]
        )
        verify = common.PhaseSize(
            name="verify",
            steps=0,
            cpu_core_s=judged * compile_s,
            gpu_s=judged * judge_s,
            **sizes,  # type: ignore[arg-type]
        )
        made = (*map(training, names), generate) if self.trains else ()
        return made if self.part == "train" else (*made, verify)

    @common.remembered
    def memory(self, phase_index: int, rung: common.Rung, ranks: int = 1) -> common.Memory:
        """The memory of each phase. Training needs the fp32 state, split over the ranks, and the gathered weights of
        two layers. `generate` needs the trained weights, still split; whole weights of the compute dtype on each GPU;
        and the cache for the GPU's share of the sequences. `verify` needs the memory limit of a candidate.
        """
        m, phase = self.model, self.phases()[phase_index]
        compute = 2 if self.precision.compute == "bf16" else 4
        total = tuning.parameters(m)
        weights = gradients = moments = activations = logits = 0.0
        if phase.steps:
            weights, gradients, moments = tuning.whole_state(
                m, compute, ranks, reshard=self.reshard_after_forward, checkpointing=rung.checkpointing
            )
            tokens = rung.micro * self.data.row
            activations = tuning.activations(m, tokens, compute, rung)
            logits = tuning.loss_bytes(m, tokens, trained=True)
        elif phase.decode_steps:
            weights = total * (compute + 4 / ranks)
            sequences = min(AT_ONCE, -(-self.generate.tasks * self.generate.candidates // ranks))
            cache = 2 * m.layers * m.kv_heads * m.head_dim * compute
            activations = sequences * cache * (self.generate.max_tokens + 1024)
            logits = sequences * m.vocab * 8
        else:
            activations = self.funnel.memory_gb * common.GB
        return common.in_gb(
            weights=weights, gradients=gradients, moments=moments, activations=activations, logits=logits
        )

    @common.remembered
    def ladder(self, ranks: int = 1) -> tuple[common.Rung, ...]:
        return tuning.ladder(self, ranks)

    def with_facts(self, facts: Mapping[str, Any]) -> KernelConfig:
        if "rows" not in facts:
            return self
        tokens_per_sample = facts["rows"] * facts["row"] / facts["examples"]  # with the padding of the rows
        return replace(self, data=replace(self.data, samples=facts["examples"], tokens_per_sample=tokens_per_sample))

    def doubts(self, steps: int) -> Iterator[str]:
        yield from warmup_doubts("warmup", self.optim.warmup, steps, self.optim.lr, "the whole run", "batch.tokens")

    @common.remembered
    def sizes(self) -> common.Sizes:
        """The sizes of checkpoints: the full state during training, and only fp32 weights during the later phases,
        which write only small results. The part `judge` has neither.
        """
        total = tuning.parameters(self.model) if self.trains else 0
        training = sum(1 for phase in self.phases() if phase.steps)
        after = (0,) * (len(self.phases()) - training)
        token_bytes = 6 if self.model.vocab > 1 << 16 else 4
        return common.Sizes(
            checkpoints=(12 * total,) * training + after,
            phase_ends=(4 * total,) * training + after,
            exports={},
            final={"weights": 2 * total},
            final_if_cut=(2 * total,) * len(self.phases()),
            dataset=int(self.data.samples * self.data.tokens_per_sample * token_bytes) if self.trains else 0,
            base_weights=2 * total,  # bf16, the published dtype
        )


def correct_s(config: KernelConfig) -> float:
    """The seconds of a worker that a correct candidate takes in addition to those of any candidate."""
    return CORRECT_GPU_S + FULL_RUN_S * (config.funnel.inputs - INPUTS) / (INPUTS + ADVERSARIAL)


def per_candidate(config: KernelConfig) -> dict[str, float]:
    """The parts of the funnel's time in the bill: the core-seconds of a compilation, the worker seconds of the later
    stages of the funnel, and the assumed share of correct candidates, if the seconds depend on this share.
    """
    if config.device != "cuda":
        return {"compile_s": 0.0, "judge_s": INTERPRETED_S}
    judge_s = STARTED_GPU_S + CORRECT_SHARE * correct_s(config)
    return {"compile_s": COMPILE_CORE_S, "judge_s": judge_s, "correct": CORRECT_SHARE}


def trainings(config: KernelConfig) -> tuple[str, ...]:
    """Names of the phases that train, each from the base weights. Only the last phase's weights are kept."""
    return ("sft-uniform", "sft-adaptive") if config.data.curriculum == "compare" else ("sft",)
