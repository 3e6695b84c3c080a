"""A run whose steps are CUDA graphs ends with the weights of one whose kernels are launched one by one.

On a CPU a stand-in records: like a graph it runs the same passes over the same tensors, fills the tensors of the
recording, and gives no parameter a gradient. What a GPU's graph itself does is shown where there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from gpufleet.job.experiments.engine import optimizer, step
from gpufleet.job.experiments.engine.cuda_graph import LAUNCHED_FIRST, RecordedPasses, StepSums
from gpufleet.job.experiments.engine.experiment import Micro
from tests.job import train_world as world
from tests.job.train_world import STEPS, StopAt

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class StandIn:
    """Records on a CPU. `wrong` is a factor on what its graphs compute."""

    def __init__(self, parameters: Sequence[nn.Parameter], wrong: float = 1.0) -> None:
        self.parameters, self.wrong = parameters, wrong
        self.launched = self.recorded = self.replayed = 0
        self.passes: RecordedPasses | None = None

    def launch(self, run: Callable[[], StepSums]) -> StepSums:
        self.launched += 1
        return run()

    def record(self, run: Callable[[], StepSums]) -> tuple[Callable[[], None], StepSums]:
        self.recorded += 1
        sums = run()
        gradients = [parameter.grad for parameter in self.parameters]
        kept = [tensor for tensor in (sums.loss, *gradients) if tensor is not None]
        for tensor in kept:
            tensor.fill_(torch.nan)  # nothing has run yet

        def replay() -> None:
            before = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            again = run()
            new = [again.loss, *(parameter.grad for parameter in self.parameters)]
            for old, tensor in zip(kept, (tensor for tensor in new if tensor is not None), strict=True):
                old.copy_(tensor * self.wrong)
            for name, figure in again.aux.items():
                sums.aux[name].copy_(figure)
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            self.replayed += 1

        return replay, sums


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Every recorder that the test's runs make, one for a start of a phase."""
    made: list[StandIn] = []

    @contextlib.contextmanager
    def recorded(
        opt: Optimizer, device: torch.device, say: Callable[[str], None], *, wanted: bool = True
    ) -> Iterator[RecordedPasses | None]:
        if not wanted:
            yield None
            return
        made.append(recorder := StandIn(optimizer.parameters(opt)))
        recorder.passes = RecordedPasses(recorder, recorder.parameters, say)
        yield recorder.passes
        recorder.passes.drop()

    monkeypatch.setattr(step, "recorded", recorded)
    return made


def figures(workdir: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "grad_norm", "val_loss", "router_load", "router_entropy")
    return [tuple(record.get(key) for key in keys) for record in world.records(workdir)]


def exports(workdir: Path) -> dict[str, dict[str, Tensor]]:
    return {str(path.relative_to(workdir)): load_file(path) for path in sorted(workdir.glob("exports/*/*.safetensors"))}


@pytest.mark.parametrize("micro", [None, 3], ids=["one micro-batch", "3 + 1 windows"])
def test_a_run_of_graphs_has_the_weights_exports_and_figures_of_one_without(
    micro: int | None, tmp_path: Path, recorders: list[StandIn]
) -> None:
    batch = {} if micro is None else {"micro": micro}
    plain, graphs = (world.make(tmp_path / str(on), batch=batch, cuda_graphs=on) for on in (False, True))
    assert (world.train(plain), world.train(graphs)) == (0, 0)
    assert figures(plain) == figures(graphs)
    assert world.final_hash(plain) == world.final_hash(graphs)
    for name, tensors in exports(plain).items():
        other = exports(graphs)[name]
        assert all(torch.equal(tensor, other[key]) for key, tensor in tensors.items()), name
    # One for each phase, none where the parameters say no.
    assert [(each.recorded, each.replayed) for each in recorders] == [(1, STEPS - LAUNCHED_FIRST)] * 3


def test_a_run_of_graphs_that_is_stopped_within_a_phase_goes_on_with_the_same_weights(
    tmp_path: Path, recorders: list[StandIn]
) -> None:
    whole, stopped = (world.make(tmp_path / name, cuda_graphs=name == "stopped") for name in ("whole", "stopped"))
    assert world.train(whole) == 0
    assert world.train(stopped, StopAt(stopped, STEPS + 2 + STEPS - 1)) == 75  # before the second phase's last step
    assert [each.recorded for each in recorders] == [1, 1]
    assert world.train(stopped) == 0
    assert world.final_hash(stopped) == world.final_hash(whole)
    # The phase that was stopped had too few steps left for another graph.
    assert [each.recorded for each in recorders] == [1, 1, 0, 1]


def test_a_phase_s_graph_is_gone_before_the_next_model_is_made(tmp_path: Path, recorders: list[StandIn]) -> None:
    seen: list[bool] = []
    workdir = world.make(tmp_path)

    class Looking(StopAt):
        def stop(self) -> None:
            seen.extend(each.passes.is_recorded for each in recorders[:-1] if each.passes is not None)

    assert world.train(workdir, Looking(workdir)) == 0
    assert seen
    assert not any(seen)


def small(seed: int = 0) -> tuple[nn.Linear, Callable[[Sequence[Micro]], StepSums]]:
    torch.manual_seed(seed)
    module = nn.Linear(4, 1)

    def passes(micros: Sequence[Micro]) -> StepSums:
        total = torch.zeros(())
        for micro in micros:
            loss = module(*micro.inputs).square().sum()
            loss.backward()
            total = total + loss.detach()
        return StepSums(total, {})

    return module, passes


def batch(rows: int, seed: int) -> list[Micro]:
    wide = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
    return [Micro((wide[:, :-1],), rows)]  # a view, as windows of a text are


def run(recorder: StandIn, passes: Callable[[Sequence[Micro]], StepSums], work: list[list[Micro]]) -> list[str]:
    """Compares each step's loss and gradients with those of the passes alone; returns what was said."""
    said: list[str] = []
    recorded = RecordedPasses(recorder, recorder.parameters, said.append)
    for micros in work:
        loss = passes(micros).loss.clone()
        expected = [parameter.grad for parameter in recorder.parameters]
        for parameter in recorder.parameters:
            parameter.grad = None
        sums = recorded.run(passes, micros)
        assert torch.equal(sums.loss, loss)
        for parameter, gradient in zip(recorder.parameters, expected, strict=True):
            assert parameter.grad is not None
            assert gradient is not None
            assert torch.equal(parameter.grad, gradient)
            parameter.grad = None
    return said


def test_a_batch_of_another_shape_has_a_graph_of_its_own() -> None:
    module, passes = small()
    recorder = StandIn(list(module.parameters()))
    assert not run(recorder, passes, [batch(3, seed) for seed in range(5)] + [batch(2, seed) for seed in range(4)])
    assert recorder.recorded == 2
    assert recorder.launched == 2 * (LAUNCHED_FIRST + 1)  # the third is compared with its graph's


@pytest.mark.parametrize("why", ["wrong", "refused"])
def test_a_graph_that_cannot_be_or_computes_something_else_is_not_used(why: str) -> None:
    module, passes = small()
    recorder = StandIn(list(module.parameters()), wrong=1.01 if why == "wrong" else 1.0)
    if why == "refused":

        def refuse(run: Callable[[], StepSums]) -> tuple[Callable[[], None], StepSums]:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        recorder.record = refuse  # type: ignore[method-assign]
    said = run(recorder, passes, [batch(3, seed) for seed in range(6)])
    assert len(said) == 1
    assert ("differ by 1.0%" if why == "wrong" else "operation not permitted when stream is capturing") in said[0]
    assert "and more" not in said[0]


@needs_cuda
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("micro", [None, 3], ids=["one micro-batch", "3 + 1 windows"])
def test_on_a_gpu_graphs_end_with_the_weights_of_launched_kernels(
    micro: int | None, compute: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changed: dict[str, Any] = {
        "device": "cuda",
        "batch": {} if micro is None else {"micro": micro},
        "precision": {"compute": compute, "phase3_state": compute},
        "steps_per_phase": 12,
    }
    plain, graphs, stopped = (
        world.make(tmp_path / name, **changed, cuda_graphs=name != "plain") for name in ("plain", "graphs", "stopped")
    )
    assert (world.train(plain), world.train(graphs)) == (0, 0)
    assert world.train(stopped, StopAt(stopped, 12 + 2 + 6)) == 75
    assert world.train(stopped) == 0
    assert "no CUDA graph" not in capfd.readouterr().out
    tolerance = 1e-5 if compute == "fp32" else 2e-2
    for other in (graphs, stopped):
        for name, tensors in exports(plain).items():
            for key, tensor in tensors.items():
                torch.testing.assert_close(
                    exports(other)[name][key].float(), tensor.float(), rtol=tolerance, atol=tolerance
                )
