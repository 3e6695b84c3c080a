"""What a kind of job is before it runs. Pure: no torch, no AWS, nothing of infra, so that the bill can import it.

One module per kind; what they share is in `common` and `decoder`, and `job` has the questions that each kind answers.
A new kind needs its module, its line in EXPERIMENTS, and the trainer that it names. User mistakes raise ValueError with
the choice to make.
"""

from __future__ import annotations

import math
import types
import typing
from dataclasses import Field, fields, is_dataclass, replace
from typing import Any

from job.spec.common import Checkpoint, Guard, Log, bounded
from job.spec.growth import AdamW, Batch, Eval, GrowthConfig, GrowthModel, Precision, TextData
from job.spec.job import JobConfig
from job.spec.kernel import KernelConfig
from job.spec.pretrain import PretrainConfig
from job.spec.sft import SftConfig
from job.spec.two_tower import TwoTowerConfig

__all__ = [
    "EXPERIMENTS",
    "AdamW",
    "Batch",
    "Checkpoint",
    "Eval",
    "GrowthConfig",
    "GrowthModel",
    "Guard",
    "JobConfig",
    "KernelConfig",
    "Log",
    "Precision",
    "PretrainConfig",
    "SftConfig",
    "TextData",
    "TwoTowerConfig",
    "bounded",
    "from_json",
]

EXPERIMENTS: dict[str, type[JobConfig]] = {
    "tinystories-growth": GrowthConfig,
    "sft-h100": SftConfig,
    "pretrain-d64": PretrainConfig,
    "kernel-sft": KernelConfig,
    "two-tower": TwoTowerConfig,
}


def from_json(experiment: str, tree: dict[str, Any]) -> JobConfig:
    """The typed config of `run.json`'s job.parameters. Raises ValueError naming an unknown experiment, or every unknown
    key and every value of another type or beyond its field's bounds, which are those that the loader checks.
    """
    if experiment not in EXPERIMENTS:
        raise ValueError(f"job.experiment: {experiment!r} is not one of {', '.join(sorted(EXPERIMENTS))}")
    problems: list[str] = []
    config: JobConfig = _build(EXPERIMENTS[experiment], tree, "job.parameters", problems, EXPERIMENTS[experiment]())
    if problems:
        raise ValueError("; ".join(problems))
    return config


def _build(cls: type[Any], tree: Any, path: str, problems: list[str], default: Any) -> Any:
    """What `tree` does not name is as in `default`."""
    if not isinstance(tree, dict):
        problems.append(f"{path}: {tree!r:.80} is not a section of keys")
        return default
    hints, known = typing.get_type_hints(cls), {f.name: f for f in fields(cls)}
    if unknown := sorted(set(tree) - set(known)):
        problems.append(f"{path}: unknown keys {', '.join(unknown)}")
    given = {key: value for key, value in tree.items() if key in known}
    return replace(
        default,
        **{
            key: _value(hints[key], value, f"{path}.{key}", known[key], problems, getattr(default, key))
            for key, value in given.items()
        },
    )


def _value(hint: Any, value: Any, path: str, spec: Field[Any], problems: list[str], default: Any = None) -> Any:
    """The typed value; where it is not allowed, a problem, and what was given."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    if is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, path, problems, default if isinstance(default, hint) else hint())
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        arm = typing.get_args(hint)[0]
        return tuple(_value(arm, item, f"{path}[{index}]", spec, problems) for index, item in enumerate(value))
    if hint is float and type(value) is int and abs(value) < 2**53:  # larger ones are refused as what they are
        value = float(value)
    if wanted := _not_allowed(hint, value, spec.metadata.get("minimum"), spec.metadata.get("maximum")):
        problems.append(f"{path}: {value!r:.80} is not {wanted}")
    return value


def _not_allowed(hint: Any, value: Any, minimum: float | None, maximum: float | None) -> str | None:
    """What it should be, in words; None: it is."""
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        return None if value in choices else f"one of {', '.join(choices)}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, "a list")
    if minimum is not None or maximum is not None:
        words += f" from {'any' if minimum is None else minimum} to {'any' if maximum is None else maximum}"
    if type(value) is not hint:
        return words
    if hint is float and not math.isfinite(value):
        return words
    low, high = minimum is not None and value < minimum, maximum is not None and value > maximum
    return words if low or high else None
