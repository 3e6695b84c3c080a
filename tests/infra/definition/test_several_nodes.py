"""The refusals of a definition with several nodes, all at once; and the meaning of its limits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.program.run_guard import creation_digest, timer_seconds
from tests.infra.command_files import FLEET as ONE_TYPE
from tests.infra.command_files import command_file, several_nodes
from tests.repository import ROOT

NOW = datetime(2026, 11, 26, tzinfo=UTC)
FLEET = "  nodes: 2\n  cards: one\n"


def read(folder: Path, text: str, name: str = "pretrain-d64") -> StackDefinition:
    file = folder / f"{name}.yaml"
    file.write_text(text)
    return load(file, now=NOW)


def problems(folder: Path, text: str, name: str = "pretrain-d64") -> dict[str, str]:
    with pytest.raises(DefinitionError) as refused:
        read(folder, text, name)
    return {each.path: each.allowed for each in refused.value.problems}


def test_two_nodes_of_one_type_in_one_zone_are_accepted(tmp_path: Path) -> None:
    found = read(tmp_path, several_nodes("all"))
    assert (found.nodes, found.fleet.cards) == (2, "all")


def test_zones_types_and_gpus_are_told_together(tmp_path: Path) -> None:
    text = several_nodes("one").replace("[us-east-2a]", "[us-east-2a, us-east-2b]")
    text = text.replace("[p5.48xlarge]", "[p5.48xlarge, p5en.48xlarge]")
    text = text.replace("    steps: 5000", "    gpus: 4\n    steps: 5000")
    found = problems(tmp_path, text)
    assert set(found) == {"fleet.zones", "fleet.instance_types", "job.parameters.gpus"}
    assert found["job.parameters.gpus"] == "all 8 of p5.48xlarge, where fleet.nodes is 2"


@pytest.mark.parametrize("name", ["tinystories-growth", "two-tower", "kernel-sft"])
def test_a_job_that_several_nodes_do_not_help_has_one(tmp_path: Path, name: str) -> None:
    text = (ROOT / "stacks" / f"{name}.yaml").read_text()
    text = text.replace("  capacity: spot\n", "  capacity: spot\n  nodes: 2\n", 1)
    found = problems(tmp_path, text, name)
    assert found["fleet.nodes"].startswith("1 for this job: it")


def test_more_gpus_than_a_step_has_rows_are_refused(tmp_path: Path) -> None:
    text = (
        several_nodes("one")
        .replace("nodes: 2", "nodes: 16")
        .replace("    steps: 5000", "    batch: {rows: 64}\n    steps: 5000")
    )
    assert problems(tmp_path, text)["fleet.nodes"] == "at most 8: a step has 64 rows"


@pytest.mark.parametrize(("old", "new", "said"), [
    ("p5.48xlarge", "p5.4xlarge", "only one network card"),
    ("nodes: 2", "nodes: 1", "where fleet.nodes is 1"),
])  # fmt: skip
def test_all_cards_want_several_nodes_and_several_cards(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = several_nodes("all").replace(old, new).replace("layers: 44", "layers: 20")
    assert said in problems(tmp_path, text)["fleet.cards"]


def test_several_nodes_do_not_fall_back(tmp_path: Path) -> None:
    text = several_nodes("one").replace("nodes: 2", "nodes: 2\n  fallback: on-demand")
    found = problems(tmp_path, text)
    assert found["fleet.fallback"] == "none where fleet.nodes is 2"


def test_hours_count_all_nodes_so_timer_and_expiry_are_a_share_of_them(tmp_path: Path) -> None:
    two = read(tmp_path, several_nodes("one"))
    one = read(tmp_path, several_nodes("one").replace(FLEET, ""))
    hours = float(two.limits.max_hours)
    margin = timer_seconds(one) - hours * 3600
    assert timer_seconds(two) == 1.5 * hours / 2 * 3600 + margin
    assert two.expiry(NOW) - NOW == timedelta(hours=hours / 2 + 24)


def test_a_file_without_the_keys_is_the_run_that_it_was_before_them(tmp_path: Path) -> None:
    one = read(tmp_path, several_nodes("one").replace(FLEET, ""))
    said = read(tmp_path, several_nodes("one").replace("nodes: 2", "nodes: 1"))
    assert creation_digest(one) == creation_digest(said)
    assert creation_digest(one) != creation_digest(read(tmp_path, several_nodes("one")))


C10D = "--rdzv-backend c10d"


@pytest.mark.parametrize(("command", "env", "apart"), [
    ("torchrun --nnodes {nodes} --node-rank {node_rank} --master-addr {master} t.py", {}, ""),
    ("accelerate launch --num_processes {ranks} --machine_rank {node_rank} t.py", {}, ""),
    ("python t.py", {"NODE_RANK": "{node_rank}"}, ""),
    ("python t.py --rank $GPUFLEET_NODE_RANK", {}, ""),
    ("torchrun --nnodes {nodes} --node_rank {node_rank} --rdzv_backend=static t.py", {}, ""),
    ("python t.py", {}, "{node_rank}, by which each node knows its ranks, as in torchrun --nnodes {nodes}"),
    ("accelerate launch --num_machines {nodes} t.py", {}, "{node_rank}, by which"),
    ("torchrun --standalone --nproc-per-node={gpus} t.py {node_rank}", {}, "instead of --standalone, which"),
    ("torchrun --rdzv-endpoint=localhost:0 t.py {node_rank}", {}, "instead of --rdzv-endpoint=localhost:0, which"),
    (f"torchrun {C10D} --rdzv_endpoint 127.0.0.1:29500 t.py", {}, "of --rdzv_endpoint 127.0.0.1, which makes each"),
    (f"torchrun {C10D} --rdzv-endpoint=localhost:{{port}} t.py", {}, "of --rdzv-endpoint=localhost, which makes each"),
    ("torchrun --node-rank {node_rank} --master-addr localhost t.py", {}, "of --master-addr localhost, which makes"),
    ("MASTER_ADDR=127.0.0.1 python t.py {node_rank}", {}, "of MASTER_ADDR=127.0.0.1, which makes each"),
    ("python t.py --rank {node_rank} --dist-url 'tcp://127.0.0.1:2345'", {}, "of --dist-url 'tcp://127.0.0.1, which"),
    ("accelerate launch --num_machines 1 --machine_rank {node_rank} t.py", {}, "of --num_machines 1, which makes each"),
    (f"torchrun --nnodes=1:2 {C10D} --rdzv_endpoint={{master}}:{{port}} t.py", {}, "of --nnodes=1, which makes each"),
    (f"torchrun --nnodes 2 {C10D} --rdzv_endpoint={{master}}:{{port}} t.py --log localhost:6006", {}, ""),
    ("torchrun --node-rank {node_rank} --nnodes 16 t.py", {}, ""),
    ("torchrun --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint {master}:{port} t.py", {}, ""),
    ("torchrun --rdzv_backend=static --rdzv_endpoint={master}:{port} t.py", {}, "{node_rank}, by which"),
])  # fmt: skip
def test_a_command_with_which_several_nodes_train_apart_is_refused_with_the_flags_to_write(
    command: str, env: dict[str, str], apart: str, tmp_path: Path
) -> None:
    made: dict[str, Any] = {"command": command, "env": env, "fleet": {**ONE_TYPE, "nodes": 2}}
    if apart:
        with pytest.raises(DefinitionError) as refused:
            load(command_file(tmp_path, **made), now=NOW)
        assert [each.path for each in refused.value.problems] == ["job.command"]
        allowed = refused.value.problems[0].allowed
        assert apart in allowed
        assert "--node-rank {node_rank} --master-addr {master} --master-port {port}" in allowed
    else:
        assert load(command_file(tmp_path, **made), now=NOW).nodes == 2
    assert load(command_file(tmp_path, command=command, env=env), now=NOW).nodes == 1
