"""Two nodes of one run as processes of this machine: one taken with a notice, one silently; at its end the weights are
those of one node with two ranks, bit for bit.
"""

from __future__ import annotations

import io
import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from gpufleet.job.contract import bucket
from gpufleet.job.contract.messages import Observed
from gpufleet.job.experiments.engine import __main__ as trainer
from gpufleet.job.experiments.engine import parallel
from tests.job import command_world as command
from tests.job import pretrain_world as pretrain
from tests.job import rank_world, train_world
from tests.rehearsal.gang_run import IMAGE, GangRun, cloud_of_two, dataset_of, tree_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP by what /proc says is Linux's"),
]

PARAMETERS: dict[str, Any] = {
    "steps": 400,
    "model": {"layers": 2, "width": 64, "head_dim": 32},
    "data": {"source": "generated-sums", "characters": 200_000, "sequence": 64},
    "batch": {"rows": 8, "micro": 4},  # one micro-batch a rank: a sum of two is the same in either order
    "optim": {"kind": "muon", "lr": 0.02},
    "checkpoint": {"interval_s": 2.0, "heartbeat_s": 1.0},
    "early_stop": {"after": 100_000},
    "eval": {"every": 100, "windows": 8, "sample_tokens": 4, "prompts": ["1+2"]},
    "log": {"every": 5},
}


def rank(number: int, size: int, port: int, folder: Path) -> None:
    """A rank's process of the run on one node."""
    torch.set_num_threads(1)
    rank_world.environment(number, size, port)
    assert parallel.expected().nodes == 1
    sys.exit(trainer.train(folder, 0, train_world.StopAt(folder, None)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one node with two ranks."""
    workdir = pretrain.make(tmp_path_factory.mktemp("one") / "run", **PARAMETERS)
    assert rank_world.launched(rank, 2, workdir) == [0, 0]
    return workdir


def run_tree(undisturbed: Path) -> dict[str, Any]:
    parameters = json.loads((undisturbed / "run.json").read_text())["job"]["parameters"]
    return tree_of("pretrain-d64", parameters, {"dataset": dataset_of(undisturbed / "data")})


def ready(run: GangRun, number: int) -> bool:
    return len(run.generations()) >= number


def trains(run: GangRun, number: int, least: int) -> bool:
    """The leader of a generation has logged so many steps in it."""
    made = run.generations()
    if len(made) < number:
        return False
    leader = made[number - 1]["members"][0]
    return f"generation {number}:" in run.said(leader) and max(run.steps(leader), default=0) >= least


def test_two_nodes_of_which_one_is_noticed_and_one_falls_silent_end_with_the_weights_of_one(
    undisturbed: Path, tmp_path: Path
) -> None:
    tree = run_tree(undisturbed)
    with cloud_of_two(tmp_path, tree) as run:
        for path in (undisturbed / "data").iterdir():
            run.put(bucket.input_key(tree["inputs"]["dataset"]["sha256"], path.name), path.read_bytes())
        run.wait(lambda: trains(run, 1, 40), "steps of the first generation")
        first = run.generations()[0]["members"]

        run.cloud.interrupt(first[1])
        run.wait(lambda: ready(run, 2), "the second generation")
        stopped_at = max(run.steps(first[0]))
        run.wait(lambda: trains(run, 2, stopped_at + 20), "steps of the second generation")
        second = run.generations()[1]["members"]
        (stopped,) = re.findall(r"stopped after step (\d+): notice", run.said(first[0]))
        assert first[0] in second
        assert f"resuming from step {stopped} (train, stop)" in run.said(second[0])  # none is done twice

        silent = second[1]
        run.pause(silent)
        run.wait(lambda: f"{silent} is lost" in run.said(second[0]), "the word that it is lost")
        run.lose(silent)
        run.wait(lambda: run.store.size(bucket.DONE) is not None, "the end of the run")
        run.wait(lambda: not [each for each in run.cloud.instances() if each.ended_at is None], "the end of all nodes")

        done, receipt = run.json(bucket.DONE), run.json("receipt.json")
        weights = load(run.store.get_bytes("final/model.safetensors") or b"")
        metrics = [json.loads(line)["step"] for line in (run.store.get_bytes("metrics.jsonl") or b"").splitlines()]
        leaders = {each["members"][0] for each in run.generations()}
        publishers = {
            run.json(entry.key)["instance"]
            for entry in run.store.entries(bucket.CHECKPOINTS)
            if bucket.MANIFEST_KEY.fullmatch(entry.key)
        }
    assert done["reason"] == "finished"
    assert publishers <= leaders
    assert metrics == sorted(set(metrics))
    whole = load((undisturbed / "final" / "model.safetensors").read_bytes())
    assert [name for name, tensor in whole.items() if not torch.equal(weights[name], tensor)] == []
    assert len(receipt["attempts"]) == 4
    paid = sum(Decimal(each["usd"]) - Decimal(each["free_usd"]) for each in receipt["attempts"])
    assert Decimal(receipt["usd"]["actual"]) == paid + Decimal(tree["extras"]["fixed_usd"])
    assert [each["exit"] is None for each in receipt["attempts"]].count(True) == 1  # the silent one


SCRIPT = Path(__file__).parent / "scripts" / "two_nodes.py"
STEPS = 200
COMMAND = (
    f"{sys.executable} -m torch.distributed.run --nnodes {{nodes}} --node-rank {{node_rank}} --nproc-per-node 1 "
    f"--master-addr {{master}} --master-port {{port}} {SCRIPT} --out {{checkpoints}} --steps {STEPS}"
)


C10D = COMMAND.replace("--node-rank {node_rank} ", "").replace(
    "--master-addr {master} --master-port {port}",
    "--rdzv-id {run} --rdzv-backend c10d --rdzv-endpoint {master}:{port}",
)


def parameters(command_line: str, **checkpoint: Any) -> dict[str, Any]:
    return command.parameters(
        command_line,
        checkpoint={**checkpoint, "heartbeat_s": 1.0, "every": {"steps": 40}},
        resume={"args": "--resume={checkpoint}"},
        stop={"saves": "true", "grace_s": 8.0},
        work={"steps": STEPS},
        gpus=1,
    )


def test_ranks_in_the_order_of_addresses_are_served_wherever_rank_0_is(tmp_path: Path) -> None:
    tree = tree_of("command", parameters(C10D, each=["ckpt-{step}.pt"]), {}, phase="command")
    tree["inputs"]["dataset"] = None
    with cloud_of_two(tmp_path, tree, job_image=IMAGE, programs=Path(sys.executable).parent) as run:
        run.wait(lambda: trains(run, len(run.generations()) or 1, 50), "steps that somebody takes")
        leader = run.generations()[-1]
        run.cloud.interrupt(leader["members"][0])
        run.wait(lambda: run.store.size(bucket.DONE) is not None, "the end of the run")
        done, made = run.json(bucket.DONE), run.generations()
        places = bucket.published(entry.key for entry in run.store.entries(bucket.CHECKPOINTS))
    assert leader["addresses"] == ["127.0.0.10", "127.0.0.9"]  # which is their order as text
    assert [each["addresses"] for each in made[-2:]] == [["127.0.0.9", "127.0.0.11"], ["127.0.0.11", "127.0.0.9"]]
    assert made[-1]["step"] >= 50
    assert (done["reason"], done["instance"]) == ("finished", made[-1]["members"][0])
    assert places[-1].step == STEPS


@pytest.mark.parametrize("saves", ["rank 0", "each rank"])
def test_a_script_of_one_s_own_trains_on_two_nodes_of_which_one_is_noticed(saves: str, tmp_path: Path) -> None:
    each: dict[str, Any] = {"each": ["ckpt-{step}.pt"]} if saves == "rank 0" else {"format": "dcp"}
    told = parameters(COMMAND + ("" if saves == "rank 0" else " --dcp"), **each)
    tree = tree_of("command", told, {}, phase="command")
    tree["inputs"]["dataset"] = None
    with cloud_of_two(tmp_path, tree, job_image=IMAGE, programs=Path(sys.executable).parent) as run:
        run.wait(lambda: trains(run, 1, 50), "steps of the first generation")
        first = run.generations()[0]["members"]
        run.cloud.interrupt(first[1])
        run.wait(lambda: run.store.size(bucket.DONE) is not None, "the end of the run")
        run.wait(lambda: not [each for each in run.cloud.instances() if each.ended_at is None], "the end of all nodes")
        done = run.json(bucket.DONE)
        content = run.store.get_bytes("final/weights.pt")
        made = run.generations()
        seen = Observed.read(run.workdir(first[0]))
        places = bucket.published(entry.key for entry in run.store.entries(bucket.CHECKPOINTS))
        manifest = run.json(places[-1].manifest)
    assert done["reason"] == "finished", done
    assert [each["members"][0] for each in made] == [first[0]] * 2
    assert seen is not None
    assert seen.met == "2 ranks, 1 of them on one node"
    assert [place.generation for place in places] == [2] * len(places)
    assert (manifest["nodes"], manifest["world_size"]) == (2, 2)
    assert [len(part["files"]) for part in manifest["parts"]] == [0 if saves == "rank 0" else 1]
    assert content is not None
    expected = torch.zeros(8, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        expected += torch.arange(8, dtype=torch.float64) / step + torch.arange(8, dtype=torch.float64) * 2 / step
    assert torch.allclose(torch.load(io.BytesIO(content)), expected, rtol=1e-12)
