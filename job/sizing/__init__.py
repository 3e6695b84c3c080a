"""What a run config costs before anything runs: parameters, FLOPs, bytes. Pure: no torch, so the bill can import it.

One module per experiment; here they are asked by the config's type. Decides how the micro-batch ladder looks and which
rung is predicted to fit. Does not decide speed: throughput comes from a peak and an efficiency, or from a calibration,
and those belong to the bill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

from job.sizing import growth as _growth
from job.sizing import kernel as _kernel
from job.sizing import pretrain as _pretrain
from job.sizing import sft as _sft
from job.sizing import two_tower as _two_tower
from job.sizing.common import DEVICE_RESERVE_GB, PART_BYTES, Memory, PhaseSize, Rung
from job.sizing.growth import CAPACITY, Shape, flops_per_token, parameters, shape, state_dtype
from job.spec import GrowthConfig, JobConfig, KernelConfig, PretrainConfig, SftConfig, TwoTowerConfig

__all__ = [
    "CAPACITY",
    "DEVICE_RESERVE_GB",
    "PART_BYTES",
    "Memory",
    "PhaseSize",
    "Rung",
    "Shape",
    "checkpoint_bytes",
    "choose_rung",
    "cut_bytes",
    "dataset_bytes",
    "empty_rows",
    "end_bytes",
    "export_bytes",
    "final_bytes",
    "fits",
    "flops_per_token",
    "ladder",
    "least_gpus",
    "lower_rung",
    "memory",
    "micro_batches",
    "parameters",
    "phases",
    "problems",
    "ranks",
    "require",
    "rows",
    "shape",
    "state_dtype",
    "total_steps",
    "weights_bytes",
    "with_facts",
]


_remembered = lru_cache(maxsize=4096)  # pure functions of frozen configs, which a comparison asks thousands of times


class _Sizing(Protocol):
    """What each experiment's module answers about its own config."""

    def problems(self, config: Any) -> list[tuple[str, str]]: ...
    def phases(self, config: Any) -> tuple[PhaseSize, ...]: ...
    def ranks(self, config: Any, gpu_count: int) -> int: ...
    def rows_per_rank(self, config: Any, ranks: int) -> int: ...
    def ladder(self, config: Any, ranks: int = 1) -> tuple[Rung, ...]: ...
    def memory(
        self, config: Any, phase_index: int, micro_batch: int, *, checkpointing: bool = False, ranks: int = 1
    ) -> Memory: ...
    def checkpoint_bytes(self, config: Any, phase_index: int) -> int: ...
    def end_bytes(self, config: Any, phase_index: int) -> int: ...
    def export_bytes(self, config: Any) -> dict[str, int]: ...
    def cut_bytes(self, config: Any, phase_index: int) -> int: ...
    def final_bytes(self, config: Any) -> dict[str, int]: ...
    def dataset_bytes(self, config: Any) -> int: ...
    def weights_bytes(self, config: Any) -> int: ...


_MODULES: dict[type[JobConfig], _Sizing] = {
    GrowthConfig: _growth,
    SftConfig: _sft,
    PretrainConfig: _pretrain,
    KernelConfig: _kernel,
    TwoTowerConfig: _two_tower,
}


def with_facts(config: JobConfig, facts: Mapping[str, Any]) -> JobConfig:
    """The config as its prepared dataset is: counts that `data` and `eval` could only expect, from the facts of its
    manifest.
    """
    if isinstance(config, SftConfig) and "rows" in facts:
        held_out = facts["held_out_examples"] / (facts["examples"] + facts["held_out_examples"])
        data = replace(
            config.data,
            examples=facts["examples"] + facts["held_out_examples"],
            tokens_per_example=facts["tokens"] / facts["examples"],
            held_out=held_out,
            fill=facts["tokens"] / (facts["rows"] * facts["row"]),
        )
        rows, prompts = min(config.eval.rows, facts["held_out_rows"]), min(config.eval.prompts, facts["prompts"])
        return replace(config, data=data, eval=replace(config.eval, rows=rows, prompts=prompts))
    if isinstance(config, KernelConfig) and "rows" in facts:
        each = facts["rows"] * facts["row"] / facts["examples"]  # with what its rows leave empty
        return replace(config, data=replace(config.data, samples=facts["examples"], tokens_per_sample=each))
    if isinstance(config, PretrainConfig) and "train_characters" in facts:
        return replace(
            config,
            data=replace(config.data, characters=facts["train_characters"] + facts["validation_characters"]),
        )
    return config


def problems(config: JobConfig) -> list[tuple[str, str]]:
    """What no field's own range can say, as (path under job.parameters, sentence)."""
    return _MODULES[type(config)].problems(config)


def require(config: JobConfig) -> None:
    """Raises ValueError with every problem, for who is about to build the model."""
    if found := problems(config):
        raise ValueError("; ".join(f"job.parameters.{path}: {text}" for path, text in found))


@_remembered
def phases(config: JobConfig) -> tuple[PhaseSize, ...]:
    """Every phase in order. The last one may have no optimizer steps: what is done after training."""
    return _MODULES[type(config)].phases(config)


def ranks(config: JobConfig, gpu_count: int, nodes: int = 1) -> int:
    """Processes on a node with `gpu_count` GPUs, one per GPU used; on a CPU run as many as the config asks for. On
    several `nodes` as many on each, together never more than a step has rows.
    """
    each = _MODULES[type(config)].ranks(config, gpu_count)
    if nodes == 1 or isinstance(config, GrowthConfig | TwoTowerConfig):  # these are one process, wherever they run
        return each
    return min(each * nodes, rows(config))


def least_gpus(config: JobConfig) -> int:
    """Of a node: with fewer than the config asks for it would be refused."""
    asked: int | None = getattr(config, "gpus", None)
    return 1 if asked is None or config.device == "cpu" else asked


def rows(config: JobConfig) -> int:
    """Of a step, over all ranks."""
    return _MODULES[type(config)].rows_per_rank(config, 1)


def empty_rows(config: JobConfig, ranks: int) -> int:
    """Of a step, over all ranks: each takes as many rows as the others, and where they run out, empty ones."""
    return _MODULES[type(config)].rows_per_rank(config, ranks) * ranks - rows(config)


def total_steps(config: JobConfig) -> int:
    """Optimizer steps of all phases together."""
    return sum(phase.steps for phase in phases(config))


@_remembered
def memory(
    config: JobConfig, phase_index: int, micro_batch: int, *, checkpointing: bool = False, ranks: int = 1
) -> Memory:
    """Predicted bytes on one GPU. Assumes that gradients are freed between optimizer steps and that every activation
    which eager autograd keeps is kept: compile can only keep fewer.
    """
    module = _MODULES[type(config)]
    return module.memory(config, phase_index, micro_batch, checkpointing=checkpointing, ranks=ranks)


def ladder(config: JobConfig, ranks: int = 1) -> tuple[Rung, ...]:
    """Ways to cut the batch, largest first, then activation checkpointing. The global batch, and with it the result,
    never changes. A micro-batch set in the config starts it lower.
    """
    return _MODULES[type(config)].ladder(config, ranks)


def micro_batches(config: JobConfig, rung: Rung, ranks: int) -> int:
    """Of one rank in a step."""
    return -(-_MODULES[type(config)].rows_per_rank(config, ranks) // rung.micro)


def fits(config: JobConfig, rung: Rung, gpu_memory_gb: float, phase_index: int | None = None, ranks: int = 1) -> bool:
    """Whether the predicted peak and the reserve fit, in one phase or in all of them."""
    chosen = range(len(phases(config))) if phase_index is None else (phase_index,)
    return all(
        memory(config, i, rung.micro, checkpointing=rung.checkpointing, ranks=ranks).total_gb + DEVICE_RESERVE_GB
        <= gpu_memory_gb
        for i in chosen
    )


@_remembered
def choose_rung(config: JobConfig, gpu_memory_gb: float, phase_index: int | None = None, ranks: int = 1) -> Rung | None:
    """The highest rung predicted to fit (in every phase when `phase_index` is None). None: nothing fits."""
    rungs = ladder(config, ranks)
    return next((rung for rung in rungs if fits(config, rung, gpu_memory_gb, phase_index, ranks)), None)


def lower_rung(config: JobConfig, rung: Rung, phase_index: int, ranks: int = 1) -> Rung | None:
    """Where to go after a real out-of-memory: the next rung that is predicted to need less, so that a cut which
    starts to accumulate, and therefore keeps gradients beside activations, is passed over. None: the end.
    """
    rungs = ladder(config, ranks)
    now = memory(config, phase_index, rung.micro, checkpointing=rung.checkpointing, ranks=ranks).total_gb
    for lower in rungs[rungs.index(rung) + 1 :]:
        if memory(config, phase_index, lower.micro, checkpointing=lower.checkpointing, ranks=ranks).total_gb < now:
            return lower
    return None


@_remembered
def checkpoint_bytes(config: JobConfig, phase_index: int) -> int:
    """Trained weights and their two moments, over all ranks."""
    return _MODULES[type(config)].checkpoint_bytes(config, phase_index)


def end_bytes(config: JobConfig, phase_index: int) -> int:
    """The same at the end of a phase, where nobody needs the moments any more."""
    return _MODULES[type(config)].end_bytes(config, phase_index)


def products(config: JobConfig) -> str:
    """What a GPU's matrix products are in: `bf16`, `fp32`, or `tf32`, as two-tower's are where others would be fp32."""
    compute = config.precision.compute
    return "tf32" if compute == "fp32" and isinstance(config, TwoTowerConfig) else compute


def export_bytes(config: JobConfig) -> dict[str, int]:
    """Weights-only files kept beside the checkpoints, in order."""
    return _MODULES[type(config)].export_bytes(config)


def cut_bytes(config: JobConfig, phase_index: int) -> int:
    """Of final/ where a limit ends the run in this phase."""
    return _MODULES[type(config)].cut_bytes(config, phase_index)


def final_bytes(config: JobConfig) -> dict[str, int]:
    """What a run is for and `gpufleet results` brings, in the order it is written: final/, and two-tower's scores."""
    return _MODULES[type(config)].final_bytes(config)


def dataset_bytes(config: JobConfig) -> int:
    """Of the prepared dataset, estimated before there is one."""
    return _MODULES[type(config)].dataset_bytes(config)


def weights_bytes(config: JobConfig) -> int:
    """Of the base weights that a node stages before the first step; 0 for a job that starts from nothing."""
    return _MODULES[type(config)].weights_bytes(config)
