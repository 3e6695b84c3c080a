"""toy: which token follows which, on windows of generated stories. The smallest kind of job that there can be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset import prepare, sources
from gpufleet.job.experiments.dataset.prepared import PreparedDataset
from gpufleet.job.experiments.spec import CosineAdamW, ExperimentConfig, cuts
from gpufleet.job.kind.common import GB, Checkpoint, Compute, Guard, Log, Memory, PhaseSize, Rung, Sizes, bounded, in_gb
from gpufleet.job.kind.dataset import Given


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyData:
    """Stories that are made."""

    source: Literal["generated-stories"] = "generated-stories"
    stories: int = bounded(500, 1, 100_000)
    sequence: int = bounded(32, 2, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyEval:
    """Validation on the same windows."""

    every: int = bounded(10, 1, 1_000_000)
    windows: int = bounded(8, 1, 65536)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig(ExperimentConfig):
    """toy: an embedding and a head."""

    trainer: ClassVar[str] = "gpufleet.job.experiments.toy.run:Toy"
    dataset_class: ClassVar[str] = "gpufleet.job.experiments.toy.spec:ToyStories"
    dataset_kind: ClassVar[str] = "windows"
    leaves_speed: ClassVar[tuple[str, ...]] = ("steps",)

    steps: int = bounded(1000, 1, 1_000_000)
    vocab: int = bounded(1024, 2, 1_000_000)
    width: int = bounded(64, 1, 4096)
    windows: int = bounded(16, 1, 4096)  # of a step
    seed: int = bounded(1, 0, 2**31 - 1)
    device: Literal["cuda", "cpu"] = "cuda"
    data: ToyData = ToyData()
    optim: CosineAdamW = CosineAdamW(lr=1e-2, warmup=1)
    precision: Compute = Compute()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    eval: ToyEval = ToyEval()
    log: Log = Log()

    def parameters(self) -> int:
        return 2 * self.vocab * self.width

    def phases(self) -> tuple[PhaseSize, ...]:
        return (
            PhaseSize(
                name="train",
                params_total=self.parameters(),
                params_active=self.parameters(),
                params_trained=self.parameters(),
                flops_per_token=6 * self.vocab * self.width,
                attention=None,
                optimizer_traffic_bytes_per_param=28,
                steps=self.steps,
                tokens_per_step=self.windows * self.data.sequence,
                evaluations=-(-self.steps // self.eval.every),
                evaluation_tokens=self.eval.windows * self.data.sequence,
            ),
        )

    def memory(self, phase_index: int, rung: Rung, ranks: int = 1) -> Memory:
        weights, tokens = 4 * self.parameters(), rung.micro * self.data.sequence
        held = {"weights": weights, "gradients": weights, "moments": 2 * weights}
        return in_gb(**held, activations=4 * tokens * self.width, logits=12 * tokens * self.vocab + GB)

    def sizes(self) -> Sizes:
        weights = 4 * self.parameters()
        return Sizes(
            checkpoints=(3 * weights,),
            phase_ends=(weights,),
            exports={},
            final={"weights": weights},
            final_if_cut=(0,),
            dataset=444 * self.data.stories,
        )

    def rows(self) -> int:
        return self.windows

    def ladder(self, ranks: int = 1) -> tuple[Rung, ...]:
        return cuts(self.windows, None, [self.windows])

    def shortened(self, steps: int) -> ToyConfig:
        return replace(self, steps=min(self.steps, steps))


class ToyStories(PreparedDataset[ToyConfig]):
    """Windows of tokens."""

    def prepare(self, folder: Path, given: Given) -> DatasetManifest:
        stories = sources.Generated(count=self.config.data.stories, seed=self.config.seed)
        return prepare.prepare(folder, stories, model_vocab=self.config.vocab, say=given.say)
