"""What the trainer takes for a run config: the types and bounds that the loader of the definition file checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import atomic
from gpufleet.job.kind import EXPERIMENTS, from_json
from tests.job import train_world as world


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"steps": "many"}, "job.parameters.steps: 'many' is not a whole number from 1 to 10,000,000"),
        ({"steps": 0}, "job.parameters.steps: 0 is not a whole number from 1"),
        ({"steps": 3.5}, "job.parameters.steps: 3.5 is not a whole number"),
        ({"steps": True}, "job.parameters.steps: True is not a whole number"),
        ({"steps": None}, "job.parameters.steps: None is not a whole number"),
        ({"log": {"every": 0}}, "job.parameters.log.every: 0 is not a whole number from 1"),
        ({"log": {"tensorboard": "yes"}}, "job.parameters.log.tensorboard: 'yes' is not true or false"),
        ({"log": [1]}, r"job.parameters.log: \[1\] is not a section of keys"),
        ({"device": "tpu"}, "job.parameters.device: 'tpu' is not one of cuda, cpu"),
        ({"optim": {"lr": float("nan")}}, "job.parameters.optim.lr: nan is not a number from 1e-09 to 1"),
        ({"optim": {"betas": 0.9}}, "job.parameters.optim.betas: 0.9 is not a list"),
        ({"optim": {"betas": [0.8, 1.0]}}, r"job.parameters.optim.betas\[1\]: 1.0 is not a number from 0 to 0.99999"),
        ({"optim": {"momentum": [0.85, 1.5]}}, r"job.parameters.optim.momentum\[1\]: 1.5 is not a number from"),
        ({"optim": {"betas": [0.9, "x"]}}, r"job.parameters.optim.betas\[1\]: 'x' is not a number"),
        ({"gpus": 9}, "job.parameters.gpus: 9 is not a whole number from 1 to 8"),
        ({"steps": 0, "seed": -1, "stepz": 1}, "unknown keys stepz; .*steps: 0 is not .*; .*seed: -1 is not"),
    ],
)
def test_a_value_that_the_loader_would_refuse_is_refused_with_what_is_allowed(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_json("pretrain-d64", tree)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_defaults_a_whole_number_for_a_number_and_an_absent_choice_are_taken(name: str) -> None:
    assert from_json(name, {}) == EXPERIMENTS[name]()
    assert from_json(name, {"checkpoint": {"interval_s": 300}}) == EXPERIMENTS[name]()


@pytest.mark.parametrize("prompt", ["", " "])
def test_an_empty_prompt_is_refused_before_the_first_step(tmp_path: Path, prompt: str) -> None:
    workdir = world.make(tmp_path, eval={"prompts": ["One day", prompt]})
    assert world.train(workdir) == 65
    record = atomic.read_object(workdir / "fatal.json")
    assert record is not None
    assert "job.parameters.eval.prompts: an empty prompt" in record["detail"]
    assert not (workdir / "metrics.jsonl").exists()
    assert from_json("tinystories-growth", {}).problems() == []


def test_a_run_file_without_a_job_is_fatal_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema": 1}')
    assert world.train(tmp_path) == 65
    record = atomic.read_object(tmp_path / "fatal.json")
    assert record is not None
    assert "job.experiment and job.parameters are missing" in record["detail"]
