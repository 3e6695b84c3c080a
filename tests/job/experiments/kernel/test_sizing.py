"""What kernel-sft's bill stands on, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from gpufleet.job.experiments.kernel import pairs
from gpufleet.job.experiments.kernel import spec as kernel
from gpufleet.job.experiments.kernel.judge import planted, tasks
from gpufleet.job.experiments.kernel.judge.catalog import TASKS
from gpufleet.job.experiments.kernel.spec import Funnel, Generation, KernelConfig
from gpufleet.job.experiments.models.config import DecoderConfig
from gpufleet.job.experiments.tuning import spec as tuning
from gpufleet.job.kind import batch
from gpufleet.job.kind.common import Rung
from tests.job import kernel_world as world

FULL = KernelConfig()
CODER = DecoderConfig(
    family="qwen2",
    vocab=152_064,
    layers=28,
    width=3584,
    heads=28,
    kv_heads=4,
    ffn=18_944,
    rope_scaling="none",
)
SMALL = replace(FULL.model, layers=28, width=2048, heads=16, kv_heads=8, ffn=6144, tied=True)


@pytest.mark.parametrize(
    ("model", "total"), [(FULL.model, 8_190_735_360), (CODER, 7_615_616_512), (SMALL, 1_720_574_976)]
)
def test_parameters_are_to_the_digit(model: DecoderConfig, total: int) -> None:
    assert replace(FULL, model=model).phases()[0].params_total == total


def test_a_small_decoders_bytes_are_those_worked_out_by_hand() -> None:
    m = DecoderConfig(family="llama", vocab=100, layers=3, width=8, heads=2, kv_heads=1, head_dim=4, ffn=16)
    assert tuning.parameters(m) == 3 * (576 + 16) + 2 * 800 + 8 == 3384
    # The fp32 state is split over two ranks. Weights add layers in bf16 (two with ZeRO-3, else all three) and both
    # tables; gradients add those of one layer, in bf16 and fp32.
    assert tuning.whole_state(m, 2, 2, reshard=True) == (6768 + 2 * 1184 + 3200, 6768 + 592 * 6, 13_536)
    assert tuning.whole_state(m, 2, 2, reshard=False) == (6768 + 3 * 1184 + 3200, 6768 + 592 * 6, 13_536)
    assert tuning.whole_state(m, 2, 1, reshard=True) == (13_536 + 6768, 13_536, 27_072)
    held = 13_536 + 2 * 592 + 2 * 800  # of the casts a layer's and the head's
    assert tuning.whole_state(m, 2, 1, reshard=True, checkpointing=True) == (held, 13_536, 27_072)
    assert tuning.whole_state(m, 4, 1, reshard=True) == (13_536, 13_536, 27_072)
    # Of a token: q, k, v, attention, gate, up (56); norms, activation, product (64); 7 narrow products of rank 3 and
    # the adapters' inputs after dropout (56); log-sum-exp in fp32.
    kept = [
        (of, tuning.layer_activation_bytes(m, 2, Rung(micro=1, checkpointing=on), adapters=of))
        for of in (0, 3)
        for on in (False, True)
    ]
    assert kept == [(0, 2 * 120 + 8), (0, 2 * 64 + 8), (3, 2 * 197 + 8), (3, 2 * 85 + 8)]
    assert tuning.activations(m, 5, 2, Rung(micro=1)) == 5 * (3 * 248 + 32)
    assert tuning.activations(m, 5, 2, Rung(micro=1, checkpointing=True)) == 5 * (3 * 136 + 248 + 32)
    # One chunk's logits, the hidden states' gradient in fp32, and the head's where it is trained.
    assert tuning.loss_bytes(m, 2000) == 1024 * 100 * 12 + 2000 * 8 * 4
    assert tuning.loss_bytes(m, 5, trained=True) == 5 * 100 * 12 + 5 * 8 * 4 + 3200


def test_sft_is_sixteen_steps_of_52_7_gflop_per_token() -> None:
    sft = FULL.phases()[0]
    assert (sft.name, sft.steps, sft.tokens_per_step) == ("sft", 16, 64 * 8192)
    assert round(sft.flops_per_token / 1e9, 1) == 52.7
    assert sft.flops_per_token * 1000 * 8192 == pytest.approx(4.3e17, rel=0.01)


def test_state_is_16_4_gb_per_gpu_on_eight() -> None:
    memory = FULL.memory(0, Rung(micro=1), 8)
    state = 16 * 8_190_735_360 / 8 / 1e9
    gathered = memory.weights_gb - 4 * 8_190_735_360 / 8 / 1e9
    layer = 6 * tuning.layer_parameters(FULL.model) / 1e9  # its whole gradients: bf16, and the fp32 that is sent
    assert memory.weights_gb + memory.gradients_gb + memory.moments_gb - gathered - layer == pytest.approx(state)
    assert state == pytest.approx(16.4, abs=0.05)


def test_what_follows_training_is_decode_steps_cores_and_gpus() -> None:
    _, generate, verify = FULL.phases()
    assert (generate.steps, generate.decode_steps) == (0, 2048)
    assert (generate.decode_sequences, generate.decode_at_once) == (200, 32)
    assert (verify.steps, verify.decode_steps) == (0, 0)
    assert verify.cpu_core_s == 200 * kernel.COMPILE_CORE_S
    assert verify.gpu_s == pytest.approx(200 * (6.0 + 0.2 * 35.0))
    assert kernel.per_candidate(FULL) == {"compile_s": 20.0, "judge_s": pytest.approx(13.0), "correct": 0.2}
    twice = replace(FULL, funnel=replace(FULL.funnel, inputs=5 + 14))  # stage 4 runs 28 cases instead of 14
    assert twice.phases()[2].gpu_s == pytest.approx(200 * (6.0 + 0.2 * (35.0 + 10.0)))


def test_planted_candidates_are_verified_too() -> None:
    more = replace(FULL, funnel=replace(FULL.funnel, planted=200))
    assert more.phases()[2].gpu_s == pytest.approx(FULL.phases()[2].gpu_s + 200 * 13.0)


def test_the_tasks_and_planted_candidates_are_those_there_are() -> None:
    most = {each.name: each.metadata.get("maximum") for section in (Generation, Funnel) for each in fields(section)}
    assert (len(TASKS), len(planted.candidates(10_000))) == (most["tasks"], most["planted"])
    assert (FULL.funnel.inputs, len(tasks.ADVERSARIAL)) == (kernel.INPUTS, kernel.ADVERSARIAL)


def test_the_test_worlds_parameters_are_counted() -> None:
    assert world.typed().phases()[0].params_total == 28_544


def test_rows_must_divide_the_batch() -> None:
    (problem,) = replace(FULL, batch=replace(FULL.batch, tokens=10_000)).problems()
    assert problem[0] == "batch.tokens"
    (problem,) = replace(FULL, batch=replace(FULL.batch, micro_tokens=2 * FULL.batch.tokens)).problems()
    assert problem[0] == "batch.micro_tokens"
    assert tuning.steps(2.1, 0.3) == 7  # not an eighth for what is only rounding


def test_generation_holds_the_cache_of_a_ranks_share_and_its_logits() -> None:
    few = replace(FULL, generate=replace(FULL.generate, tasks=2, candidates=5))
    memory = few.memory(1, Rung(micro=1), 4)  # ten sequences: three on a rank
    m = FULL.model
    cache = 2 * m.layers * m.kv_heads * m.head_dim * 2 * (FULL.generate.max_tokens + 1024)
    assert memory.activations_gb == pytest.approx(3e-9 * cache)
    assert memory.logits_gb == pytest.approx(3e-9 * m.vocab * 8)
    whole = batch.rows_per_rank(FULL, 8)
    plain = [rung.micro for rung in FULL.ladder(8) if not rung.checkpointing]
    assert plain == [whole >> n for n in range(whole.bit_length())]


def test_attention_reaches_as_far_as_a_sample_and_a_curriculum_needs_two_epochs() -> None:
    short = replace(FULL, data=replace(FULL.data, tokens_per_sample=100)).phases()[0].flops_per_token
    assert short == 6 * tuning.matmul_parameters(FULL.model) + tuning.attention_flops(FULL.model, 100)
    on = replace(FULL, data=replace(FULL.data, curriculum="on"))
    assert [path for path, _ in on.problems()] == ["data.curriculum"]
    assert replace(on, epochs=2).problems() == []


def test_a_comparison_trains_and_generates_twice_and_judges_both() -> None:
    once = replace(FULL, epochs=2)
    twice = replace(once, data=replace(FULL.data, curriculum="compare"))
    plain, generate, verify = once.phases()
    uniform, adaptive, both, judged = twice.phases()
    assert (uniform.name, adaptive.name) == ("sft-uniform", "sft-adaptive")
    assert uniform == replace(plain, name="sft-uniform")
    assert adaptive.steps == uniform.steps == 32
    assert both.decode_steps == 2 * generate.decode_steps
    assert judged.cpu_core_s == verify.cpu_core_s + 200 * kernel.COMPILE_CORE_S
    assert judged.gpu_s == pytest.approx(verify.gpu_s + 200 * 13.0)
    for old, new in ((0, 0), (0, 1), (1, 2), (2, 3)):
        assert twice.memory(new, Rung(micro=1), 8) == once.memory(old, Rung(micro=1), 8)
        assert twice.sizes().checkpoints[new] == once.sizes().checkpoints[old]
    assert twice.sizes().exports == once.sizes().exports  # one of the two is left


def test_each_evaluation_between_two_epochs_writes_four_candidates_per_task_and_judges_them() -> None:
    on = replace(FULL, epochs=3, data=replace(FULL.data, curriculum="on"))
    sft = on.phases()[0]
    assert sft.decode_steps == 2 * FULL.generate.max_tokens
    assert sft.cpu_core_s == 2 * 20 * 4 * kernel.COMPILE_CORE_S
    assert sft.gpu_s == pytest.approx(2 * 20 * 4 * (6.0 + 0.2 * 35.0))
    off = replace(FULL, epochs=3).phases()[0]
    assert (off.decode_steps, off.cpu_core_s, off.gpu_s) == (0, 0, 0)


def test_the_share_held_out_is_what_is_prepared() -> None:
    assert kernel.HELD_OUT == pairs.HELD_OUT
    assert replace(FULL, epochs=2).phases()[0].forward_tokens == int(2 * 0.02 * 1000 * 8192)


def test_two_parts_are_the_whole_and_the_judge_has_nothing_of_a_training() -> None:
    train, judge = replace(FULL, part="train"), replace(FULL, part="judge", candidates="train")
    assert (*train.phases(), *judge.phases()) == FULL.phases()
    assert [phase.name for phase in judge.phases()] == ["verify"]
    whole = replace(FULL.sizes(), checkpoints=FULL.sizes().checkpoints[:2], phase_ends=FULL.sizes().phase_ends[:2])
    assert train.sizes() == replace(whole, final_if_cut=whole.final_if_cut[:2])
    left = judge.sizes()
    assert (left.base_weights, left.dataset, left.checkpoints, left.phase_ends, left.final_if_cut) == (
        0, 0, (0,), (0,), (0,),
    )  # fmt: skip
    assert sum(left.final.values()) == 0
    assert judge.memory(0, Rung(micro=1)) == FULL.memory(2, Rung(micro=1))
    assert [train.memory(at, Rung(micro=1), 8) for at in (0, 1)] == [FULL.memory(at, Rung(micro=1), 8) for at in (0, 1)]
    assert (train.dataset_kind, judge.dataset_kind) == ("packed", "")
    assert set(judge.demands.takes) <= set(train.demands.leaves)
    assert judge.ranks(1) == judge.gpus_needed() == 1


@pytest.mark.parametrize(
    ("part", "candidates", "wrong"),
    [
        ("judge", "", True),
        ("judge", "train", False),
        ("train", "train", True),
        ("all", "train", True),
        ("all", "", False),
    ],
)
def test_a_stage_of_candidates_is_named_by_the_judge_alone(part: Any, candidates: str, wrong: bool) -> None:
    found = replace(FULL, part=part, candidates=candidates).problems()
    assert [path for path, _ in found] == (["candidates"] if wrong else [])
