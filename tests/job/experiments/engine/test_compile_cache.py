"""A later start compiles nothing that an earlier one has: with Inductor, each start with an empty cache of its own."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import GRAPHS
from gpufleet.job.experiments.engine import step
from gpufleet.job.experiments.engine.compile_cache import CompileCache, name
from gpufleet.job.experiments.engine.experiment import Phase, Session
from gpufleet.job.experiments.models.selective import keep_products
from gpufleet.job.kind.common import Rung
from tests.job import train_world as world

pytestmark = pytest.mark.filterwarnings("default")  # of the compiler's own code
PHASE = Phase(index=0, name="dense", first=0, steps=10, flops_per_token=1.0, tokens_per_step=8)
RUNG = Rung(micro=4)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's kernels exist on a GPU alone")
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="kernels for a CPU need g++")


class CachedBlock(nn.Module):
    """One product, which needs no compiler beyond Inductor; with `kernels` an elementwise kernel too."""

    def __init__(self, *, kernels: bool = False, checkpointing: bool = False) -> None:
        super().__init__()
        self.kernels, self.checkpointing = kernels, checkpointing
        self.weight_DD = nn.Parameter(torch.eye(4))

    def forward(self, x_ND: Tensor) -> Tensor:
        if self.checkpointing:
            return cast(Tensor, checkpoint(self._product, x_ND, use_reentrant=False, context_fn=keep_products))
        return self._product(x_ND)

    def _product(self, x_ND: Tensor) -> Tensor:
        y_ND = x_ND @ self.weight_DD
        return y_ND.relu() + x_ND if self.kernels else y_ND


class CachedModel(nn.Module):
    def __init__(self, **named: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CachedBlock(**named)])


@pytest.fixture(autouse=True)
def _unasked_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a graph is pickled, and pickle asks every module there is for the names that it meets. Where tests of
    the program ran before in this process, that loads each of pulumi_aws's lazy 300: half a minute.
    """
    for module in [module for module in sys.modules if module.startswith("pulumi_aws.")]:
        monkeypatch.delitem(sys.modules, module)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    said: list[str] = []
    opened = world.experiment(world.make(tmp_path)).session
    yield replace(opened, say=said.append)
    opened.checkpoints.close()


def said(session: Session) -> str:
    """What was said of damage and the like."""
    return "\n".join(cast(list[str], cast(Any, session.say).__self__))


def start(session: Session, *, device: str = "cpu", **named: Any) -> list[str | None]:
    """A start of the trainer on a node whose disk is empty: three steps of a phase. What `keep` says after each."""
    model = CachedModel(**named).to(device)
    words = []
    with fresh_cache(), step.compiled(model, torch.device("cuda")):
        cache = CompileCache(session, PHASE, RUNG)
        for _ in range(3):
            out_ND = model.blocks[0](torch.ones(2, 4, device=device))
            out_ND.sum().backward()
            assert torch.equal(out_ND.cpu(), torch.full((2, 4), 2.0 if "kernels" in named else 1.0))
            words.append(cache.keep())
    return words


def misses() -> int:
    return counters["inductor"]["fxgraph_cache_miss"]


def compiled_graphs(session: Session) -> Path:
    (path,) = (session.workdir / GRAPHS).iterdir()
    return path


@pytest.mark.parametrize(
    "named",
    [
        pytest.param({}, id="a product"),
        pytest.param({"checkpointing": True}, id="activation checkpointing"),
        pytest.param({"kernels": True}, id="C++ kernels", marks=[pytest.mark.slow, COMPILER]),
        pytest.param({"kernels": True, "device": "cuda"}, id="Triton kernels", marks=GPU),
    ],
)
def test_a_node_with_an_empty_disk_compiles_nothing_that_another_has(session: Session, named: dict[str, Any]) -> None:
    before = misses()
    first, *later = start(session, **named)
    assert first is not None
    assert first.startswith("compiled in ")
    assert not first.endswith("from the cache")
    assert later == [None, None]
    compiled = misses()
    assert compiled == before + 2  # forward and backward
    written = compiled_graphs(session).stat().st_mtime_ns

    traced = counters["aot_autograd"]["autograd_cache_hit"]
    again, *later = start(session, **named)
    assert counters["aot_autograd"]["autograd_cache_hit"] == traced + 1
    assert misses() == compiled
    assert again is not None
    assert again.endswith(" s, from the cache")
    assert later == [None, None]
    assert compiled_graphs(session).stat().st_mtime_ns == written  # nothing was new
    noted = atomic.read_object(session.workdir / "compiled.json")
    assert noted is not None
    assert (noted["dense"]["graphs"], noted["dense"]["cached"]) == (2, 2)


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:]


def foreign(content: bytes) -> bytes:
    return hashlib.sha256(b"of another torch").digest() + b"of another torch"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("harm", [cut, flipped, foreign])
def test_a_damaged_or_foreign_file_is_named_and_replaced(session: Session, harm: Callable[[bytes], bytes]) -> None:
    start(session)
    whole = compiled_graphs(session).read_bytes()
    compiled_graphs(session).write_bytes(harm(whole))
    before = misses()
    words = start(session)
    assert misses() == before + 2
    assert words[0] is not None
    assert f"{compiled_graphs(session).name} cannot be used, graphs are compiled again" in said(session)
    assert len(compiled_graphs(session).read_bytes()) == pytest.approx(len(whole), rel=0.1)
    before = misses()
    start(session)
    assert misses() == before


def test_a_full_disk_costs_the_file_and_not_the_run(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpufleet.job.experiments.engine.compile_cache.atomic.write_bytes", full)
    assert start(session)[0] is not None
    assert "compiled graphs are not kept: [Errno 28]" in said(session)


def test_each_rank_phase_rung_and_device_has_a_file_of_its_own(session: Session) -> None:
    names = {
        name(session, PHASE, RUNG),
        name(session, replace(PHASE, name="moe"), RUNG),
        name(session, PHASE, Rung(micro=2)),
        name(session, PHASE, Rung(micro=4, checkpointing=True)),
        name(replace(session, world=replace(session.world, rank=1, size=2)), PHASE, RUNG),
        name(replace(session, device=replace(session.device, name="NVIDIA A10G")), PHASE, RUNG),
    }
    assert len(names) == 6
    assert all(each.endswith(".bin") and not set(each) & set("/ +") for each in names)


def test_a_run_resumed_in_a_later_phase_compiles_nothing_again_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU; what is compiled is a product beside each block, since these blocks' C++ takes minutes."""
    real, within = torch.compile, step.compiled

    def with_product(forward: Callable[..., Any], **named: Any) -> Callable[..., Any]:
        product = real(CachedBlock().forward, **named)

        def both(*given: Any) -> Any:
            product(torch.ones(2, 4))
            return forward(*given)

        return both

    monkeypatch.setattr(torch, "compile", with_product)
    monkeypatch.setattr(step, "compiled", lambda module, device, **named: within(module, torch.device("cuda"), **named))
    workdir = world.make(tmp_path, steps_per_phase=2, eval={"every": 1})
    with fresh_cache():
        assert world.train(workdir, world.StopAt(workdir, 5)) == 75
    assert world.committed(workdir)[-1] == 3  # after a step of the second phase
    torch.backends.cuda.matmul.fp32_precision = "none"  # as it is in a new process: a growth's check sets it
    with fresh_cache():
        assert world.train(workdir) == 0
    events = {record["step"]: record["event"] or "" for record in world.records(workdir)}
    # one line for each start and phase
    assert [number for number, event in events.items() if "compiled in" in event] == [1, 3, 4, 5]
    assert "from the cache" not in events[1]
    assert re.search(r"compiled in [0-9.]+ s, from the cache", events[4])
    assert "compiled in " in capsys.readouterr().out
    noted = atomic.read_object(workdir / "compiled.json")
    assert noted is not None
    assert noted["moe"]["cached"] == noted["moe"]["graphs"] > 0


def test_nothing_is_kept_where_nothing_is_compiled(tmp_path: Path) -> None:
    workdir = world.make(tmp_path, steps_per_phase=2)
    assert world.train(workdir) == 0
    assert not (workdir / GRAPHS).exists()
    assert not (workdir / "compiled.json").exists()
