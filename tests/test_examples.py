"""The files of examples/: public training scripts, each written down as a user would."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra.bill.estimate import price, problems
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.job.kind.command import CommandConfig, filled

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
CATALOG = load_catalog(ROOT)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads_and_its_limits_let_it_end(path: Path) -> None:
    definition = load(path, now=datetime.now(UTC))
    bill = price(definition, CATALOG)
    assert not problems(definition, bill)
    config = definition.job.parameters
    assert isinstance(config, CommandConfig)
    (instance,) = (option.instance for option in bill.types)
    assert config.ranks(instance.gpu_count) == instance.gpu_count, "GPUs that are paid for stand idle"


@pytest.mark.parametrize(
    ("name", "line", "step"),
    [
        ("nanogpt", "iter 1200: loss 3.2175, time 590.12ms, mfu 38.10%", 1200),
        ("nanochat", "step 00250/21400 (1.17%) | loss: 4.100000 | lrm: 1.00 | dt: 480.11ms | tok/sec: 1,092,000", 250),
        ("hf-run-clm", " 25%|##5       | 1250/5000 [14:35<43:45,  1.43it/s]", 1250),
        ("litgpt", "Epoch 1 | iter 64 step 16 | loss train: 10.123, val: n/a | iter time: 300.12 ms", 16),
        ("axolotl", " 40%|####      | 1200/3000 [24:00<36:00,  1.20s/it]", 1200),
    ],
)
def test_an_example_reads_the_step_from_a_line_of_its_framework(name: str, line: str, step: int) -> None:

    config = load(ROOT / "examples" / f"{name}.yaml", now=datetime.now(UTC)).job.parameters
    assert isinstance(config, CommandConfig)
    found = [match["step"] for pattern in config.patterns if (match := re.search(pattern, line))]
    assert [int(each) for each in found] == [step]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_nothing_of_an_example_is_left_to_be_filled_in(path: Path) -> None:
    config = load(path, now=datetime.now(UTC)).job.parameters
    assert isinstance(config, CommandConfig)
    values: dict[str, str | int] = {
        name: f"/{name}" for name in ("checkpoints", "outputs", "state", "run", "checkpoint")
    }
    values |= {
        "gpus": 8,
        "step": 5,
        **{f"inputs.{name}": "/i" for name in ("openwebtext", "base", "model", "text", "tokenizer")},
    }
    for text in (config.command, config.setup, config.resume.args, *(config.env or {}).values(), *config.outputs):
        assert "{" not in filled(text, values)
