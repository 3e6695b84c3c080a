"""The inputs that candidates are tried on, and how near to the reference an output must come."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from gpufleet.job.experiments.kernel.judge import catalog, tasks, wire
from tests.job.kernel_judge import SEED


def test_each_argument_has_strides_of_its_own() -> None:
    task = catalog.BY_NAME["addcmul"]
    for device in ("cpu", "cuda"):
        layout = tasks.layouts(task, SEED)[tasks.LAYOUTS.index("non-contiguous")]
        given = [torch.empty_strided(one["shape"], one["stride"], device="meta") for one in layout]
        if device == "cpu":
            given = list(tasks.case(task, SEED, "non-contiguous").tensors)
        assert len({tensor.shape for tensor in given}) == 1
        assert len({tensor.stride() for tensor in given}) == 3
        assert not any(tensor.is_contiguous() for tensor in given)
        assert torch.empty_like(given[0]).stride() != given[0].stride()


def test_inputs_are_a_pure_function_of_seed_task_and_case() -> None:
    task = catalog.BY_NAME["lerp"]
    for name in ("tiny", "random-0", "random-1", *tasks.ADVERSARIAL):
        one, two = tasks.case(task, SEED, name), tasks.case(task, SEED, name)
        assert all(a.isnan().equal(b.isnan()) for a, b in zip(one.tensors, two.tensors, strict=True))
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one.tensors, two.tensors, strict=True))
    assert not tasks.case(task, SEED, "non-contiguous").tensors[0].is_contiguous()
    assert not torch.equal(tasks.case(task, SEED, "random-0").tensors[0], tasks.case(task, SEED, "random-2").tensors[0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_are_drawn_from_the_judges_seed_and_multiples_of_blocks_and_of_none(device: str) -> None:
    task = catalog.BY_NAME["relu"]
    drawn = [{tuple(call[0]["shape"]) for call in tasks.layouts(task, seed)} for seed in range(20)]
    assert len({frozenset(shapes) for shapes in drawn}) == 20
    for seed in range(20):
        shapes = {name: tasks._shape(task, seed, name, device) for name in (*tasks.ADVERSARIAL, "tiny", "random-0")}
        assert shapes["one"] == (1,)
        assert math.prod(shapes["spread"]) % 8192 == 0
        assert shapes["many-blocks"][0] % 2 == 1
        assert shapes["many-blocks"][0] > 19 * 1024
        assert device == "cuda" or shapes["many-blocks"][0] < 20 * 1024
        assert len(shapes["four"]) == 4
        assert 1 not in shapes["four"]
        assert 1024 < math.prod(shapes["random-0"]) == math.prod(shapes["large"])


def test_values_between_ordinary_and_large_and_special_ones_are_tried() -> None:
    task = catalog.BY_NAME["add"]
    spread = tasks.case(task, SEED, "spread").tensors[0].abs()
    assert all(((spread > low) & (spread < 3 * low)).sum() > 40 for low in (0.1, 1, 5, 30, 100, 300))
    assert all(((spread > low) & (spread < 1e3 * low)).sum() > 40 for low in (1e4, 1e7, 1e10, 1e13))
    assert tasks.case(catalog.BY_NAME["maximum"], SEED, "spread").tensors[0].isfinite().all()
    special = tasks.case(task, SEED, "special").tensors[0]
    assert special.isnan().any()
    assert (special == 0).any()
    assert special.isposinf().any()
    assert special.isneginf().any()


def answered(task: str, name: str, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str | None:
    """What is said of the reference's result, changed by a function of the first input and it."""
    given = tasks.case(catalog.BY_NAME[task], SEED, name)
    found = change(given.tensors[0], tasks.expected(catalog.BY_NAME[task], given.tensors))
    dtype = str(found.dtype).removeprefix("torch.")
    return tasks.difference(catalog.BY_NAME[task], given, tuple(found.shape), dtype, wire.raw(found))


@pytest.mark.parametrize(("task", "inside", "outside"), [("add", 5e-5, 5e-4), ("maximum", 1e-3, 1e-2)])
def test_the_tolerance_is_the_dtypes_in_proportion_to_the_result(task: str, inside: float, outside: float) -> None:
    for name in ("tiny", "random-0", "large", "spread"):
        assert answered(task, name, lambda x, right: right * (1 - inside)) is None
        assert answered(task, name, lambda x, right: right * (1 - outside)) is not None


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("sigmoid", lambda x, right: torch.where(x < -20, right + 0.09, right)),
        ("hardtanh", lambda x, right: torch.where(x.abs() > 10, torch.zeros_like(right), right)),
        ("tanh", lambda x, right: torch.where(x > 7, right - 0.01, right)),
        ("silu", lambda x, right: torch.where(x < -20, right - 0.01, right)),
        ("elu", lambda x, right: torch.where(x < -50, right + 0.5, right)),
        ("hardswish", lambda x, right: torch.where(x > 1e3, 0.5 * right, right)),
    ],
)
@pytest.mark.parametrize("name", ["large", "spread"])
def test_a_bounded_result_is_not_measured_by_a_large_input(
    task: str, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], name: str
) -> None:
    assert answered(task, name, lambda x, right: right) is None
    assert answered(task, name, change) is not None


@pytest.mark.parametrize("task", ["square", "multiply", "squared_difference", "addcmul"])
def test_what_is_wrong_for_large_numbers_alone_is_found(task: str) -> None:
    assert (
        answered(task, "spread", lambda x, right: torch.where(x.abs() < 1e5, right, torch.zeros_like(right)))
        is not None
    )
    assert answered(task, "spread", lambda x, right: right) is None


def test_where_terms_cancel_another_order_of_the_same_terms_is_right() -> None:
    task = catalog.BY_NAME["lerp"]
    for name in ("random-3", "spread", "large"):
        given = tasks.case(task, SEED, name)
        x, y = given.tensors
        for other in (0.7 * x + 0.3 * y, x - 0.3 * (x - y)):
            assert tasks.difference(task, given, tuple(other.shape), "float32", wire.raw(other)) is None
        wrong = x + 0.301 * (y - x)
        assert tasks.difference(task, given, tuple(wrong.shape), "float32", wire.raw(wrong)) is not None


def test_infinity_counts_and_what_the_reference_makes_nan_does_not() -> None:
    assert answered("relu", "special", lambda x, right: right.nan_to_num(nan=7.0, posinf=float("inf"))) is None
    assert answered("relu", "special", lambda x, right: torch.where(x.isinf(), torch.zeros_like(x), right)) is not None
    assert answered("relu", "special", lambda x, right: torch.full_like(right, float("nan"))) is not None


def test_inputs_are_drawn_once_for_all_candidates_and_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CASES_BYTES", 2 * 16)
    made = list[str]()

    def counted(task: catalog.KernelTask, seed: int, name: str, device: str) -> tasks.Case:
        made.append(name)
        return tasks.Case(name=name, tensors=(torch.zeros(4),))

    monkeypatch.setattr(tasks, "case", counted)
    kept = tasks.Cases(SEED, "cpu")
    for name in ("a", "a", "b", "a", "c", "a", "b"):
        assert kept.case(catalog.BY_NAME["relu"], name).name == name
    assert made == ["a", "b", "c", "b"]  # the one that was not used for longest went
