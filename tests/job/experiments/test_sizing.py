"""The numbers the bill and the trainer stand on, against figures worked out by hand."""

from dataclasses import replace

import pytest

from gpufleet.job.experiments.growth.spec import Batch, GrowthConfig, GrowthModel, Precision, TextData, shape
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.experiments.models.config import DecoderConfig, Lora
from gpufleet.job.experiments.pretrain.spec import CharData, CharModel, MuonAdamW, PretrainConfig, RowBatch
from gpufleet.job.experiments.sft.spec import ChatData, SftConfig, answers_at_once
from gpufleet.job.experiments.tuning import spec as tuning
from gpufleet.job.experiments.tuning.spec import TokenBatch
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig
from gpufleet.job.kind import JobConfig, batch
from gpufleet.job.kind.common import DEVICE_RESERVE_GB, Memory, Rung

FULL = GrowthConfig()
SMALL = replace(
    FULL,
    model=GrowthModel(vocab=512, layers=3, width=64, heads=4, ffn=256, new_layers=2),
    data=TextData(sequence=64, source="generated-stories", stories=2000),
    batch=Batch(sequences=8),
    precision=Precision(compute="fp32", phase3_state="fp32"),
)


@pytest.mark.parametrize(
    ("phase", "total", "active", "gflop_per_token"),
    [
        (0, 100_038_016, 100_038_016, 0.609),
        (1, 371_640_256, 138_878_272, 0.842),
        (2, 2_155_790_208, 693_264_000, 4.186),
    ],
)
def test_full_size_counts_and_flops_are_to_the_digit(
    phase: int, total: int, active: int, gflop_per_token: float
) -> None:
    size = FULL.phases()[phase]
    assert (size.params_total, size.params_active) == (total, active)
    assert round(size.flops_per_token / 1e9, 3) == gflop_per_token


def test_rehearsal_counts_are_to_the_digit() -> None:
    assert [p.params_total for p in SMALL.phases()] == [182_848, 879_232, 5_672_192]


def test_phases_carry_steps_and_tokens() -> None:
    assert [(p.name, p.steps, p.tokens_per_step) for p in FULL.phases()] == [
        ("dense", 1000, 4096),
        ("moe", 1000, 4096),
        ("grown", 1000, 4096),
    ]
    assert batch.total_steps(FULL) == 3000


def test_the_optimizers_traffic_follows_the_phase_3_key_only() -> None:
    wide = replace(FULL, precision=Precision(phase3_state="fp32"))
    assert [each.optimizer_traffic_bytes_per_param for each in FULL.phases()] == [28, 28, 14]
    assert [each.optimizer_traffic_bytes_per_param for each in wide.phases()] == [28, 28, 28]


@pytest.mark.parametrize(("graphs", "dense", "moe"), [(False, 1.9, 3.1), (True, 1.1, 2.7)])
def test_the_host_launches_each_micro_batch(graphs: bool, dense: float, moe: float) -> None:
    config = replace(FULL, cuda_graphs=graphs)
    whole = [size.launch_ms for size in config.phases()]
    cut = [size.launch_ms for size in replace(config, batch=replace(FULL.batch, micro=4)).phases()]
    micros = -(-FULL.batch.sequences // 4)
    assert [b - a for a, b in zip(whole, cut, strict=True)] == pytest.approx(
        [(micros - 1) * ms for ms in (7 * dense, 7 * moe, 11 * moe)]
    )


def test_a_graph_keeps_its_memory_beside_the_evaluation_s() -> None:
    rung, without = Rung(micro=16), replace(FULL, cuda_graphs=False)
    beside = [FULL.memory(i, rung).total_gb - without.memory(i, rung).total_gb for i in range(3)]
    assert all(0.4 < more < 1.0 for more in beside)  # the logits alone are 0.41 GB
    on_cpu = replace(FULL, device="cpu")
    assert on_cpu.memory(0, rung) == replace(without, device="cpu").memory(0, rung)


@pytest.mark.parametrize(("state", "gigabytes"), [("bf16", [1.2, 4.5, 12.9]), ("fp32", [1.2, 4.5, 25.9])])
def test_checkpoint_sizes(state: str, gigabytes: list[float]) -> None:
    config = replace(FULL, precision=Precision(phase3_state=state))  # type: ignore[arg-type]
    assert [round(config.sizes().checkpoints[i] / 1e9, 1) for i in range(3)] == gigabytes


@pytest.mark.parametrize(
    ("config", "whole", "end"),
    [
        (PretrainConfig(), 33.5, 16.7),
        (replace(PretrainConfig(), optim=MuonAdamW(kind="adamw")), 50.2, 16.7),
        (SftConfig(), 2.0, 0.7),
        (KernelConfig(), 98.3, 32.8),
    ],
)
def test_a_checkpoint_at_a_phases_end_is_its_fp32_weights(config: JobConfig, whole: float, end: float) -> None:
    assert round(config.sizes().checkpoints[0] / 1e9, 1) == whole
    assert round(config.sizes().phase_ends[0] / 1e9, 1) == end


def test_export_sizes_start_in_fp32_and_end_in_the_state_dtype() -> None:
    wide = replace(FULL, precision=Precision(phase3_state="fp32")).sizes().exports
    assert [round(b / 1e9, 1) for b in wide.values()] == [0.4, 1.5, 1.5, 8.6, 8.6]
    narrow = FULL.sizes().exports
    assert round(narrow["phase3_start"] / 1e9, 1) == 8.6
    assert round(narrow["phase3_end"] / 1e9, 1) == 4.3


def test_phase_3_fits_24_gb_in_bf16_and_not_in_fp32() -> None:
    assert batch.choose_rung(FULL, 24.0) is not None
    assert batch.choose_rung(replace(FULL, precision=Precision(phase3_state="fp32")), 24.0) is None
    assert batch.choose_rung(replace(FULL, precision=Precision(phase3_state="fp32")), 48.0) is not None


def test_the_ladder_cuts_the_batch_and_never_changes_it() -> None:
    rungs = FULL.ladder()
    assert [r.micro for r in rungs if not r.checkpointing] == [16, 12, 8, 4]
    assert [r.micro for r in rungs if r.checkpointing] == [4, 2, 1]
    assert [r.checkpointing for r in rungs] == sorted(r.checkpointing for r in rungs)


@pytest.mark.parametrize(
    ("sequences", "micro", "plain"),
    [(1, None, [1]), (8, None, [8, 6, 4, 2]), (16, 12, [12, 8, 4]), (16, 5, [5, 4]), (16, 64, [16, 12, 8, 4])],
)
def test_ladder_starts_at_the_asked_micro_batch(sequences: int, micro: int | None, plain: list[int]) -> None:
    config = replace(FULL, batch=Batch(sequences=sequences, micro=micro))
    assert [r.micro for r in config.ladder() if not r.checkpointing] == plain


def test_a_smaller_gpu_takes_a_lower_rung_and_a_tiny_one_none() -> None:
    top = batch.choose_rung(FULL, 80.0)
    assert top == Rung(micro=16)
    lower = batch.choose_rung(FULL, 19.0)
    assert lower is not None
    assert FULL.ladder().index(lower) > 0
    assert batch.choose_rung(FULL, 16.0) is None
    assert batch.choose_rung(FULL, 16.0, 0) == top  # the dense phase alone fits


def test_out_of_memory_goes_to_a_rung_that_needs_less() -> None:
    config, rung = FULL, Rung(micro=16)
    seen = [config.memory(2, Rung(micro=16)).total_gb]
    while (lower := batch.lower_rung(config, rung, 2)) is not None:
        seen.append(config.memory(2, Rung(micro=lower.micro, checkpointing=lower.checkpointing)).total_gb)
        rung = lower
    assert seen == sorted(seen, reverse=True)
    assert len(seen) > 2
    assert rung == Rung(micro=1, checkpointing=True)


def test_accumulating_keeps_gradients_beside_activations() -> None:
    without = replace(FULL, cuda_graphs=False)
    whole, cut = without.memory(2, Rung(micro=16)), without.memory(2, Rung(micro=8))
    assert cut.activations_gb < whole.activations_gb
    parts = cut.weights_gb + cut.gradients_gb + cut.moments_gb + cut.activations_gb + cut.logits_gb
    assert cut.total_gb == pytest.approx(parts)
    assert whole.total_gb < whole.weights_gb + whole.moments_gb + whole.gradients_gb + whole.activations_gb


@pytest.mark.parametrize(
    ("micro", "measured"), [(16, (4.76, 9.40, 20.97)), (12, (3.93, 8.36, 19.41)), (8, (3.49, 8.80, 21.37))]
)
def test_memory_is_what_torchs_allocator_counts(
    micro: int, measured: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a pretended A10G, eager (docs/decisions, cuda-without-a-gpu). Of 12 + 4 windows only the 4 meet gradients."""
    monkeypatch.setattr(GrowthConfig, "compiles", lambda config: False)
    asked_anew = GrowthConfig.memory.__wrapped__  # type: ignore[attr-defined]
    without = replace(FULL, cuda_graphs=False)
    assert [asked_anew(without, phase, Rung(micro=micro)).total_gb for phase in range(3)] == pytest.approx(
        measured, rel=0.03
    )


def test_checkpointing_keeps_fewer_activations() -> None:
    whole, cut = FULL.memory(2, Rung(micro=8)), FULL.memory(2, Rung(micro=8, checkpointing=True))
    assert cut.activations_gb < whole.activations_gb


def test_only_three_phases_exist() -> None:
    with pytest.raises(ValueError, match="phase 3 does not exist"):
        shape(FULL.model, 3)


def test_problems_name_what_ranges_cannot() -> None:
    bad = replace(
        FULL, model=GrowthModel(width=832, heads=5, experts=2, top_k=3), optim=replace(FULL.optim, lr=(1e-3,))
    )
    assert FULL.problems() == []
    assert [path for path, _ in bad.problems()] == ["model.heads", "model.top_k", "optim.lr"]


def test_a_prepared_dataset_replaces_what_the_config_expected() -> None:
    facts = {
        "examples": 570,
        "held_out_examples": 30,
        "tokens": 19472,
        "rows": 159,
        "row": 128,
        "held_out_rows": 9,
        "prompts": 30,
    }
    base = SftConfig()
    data = replace(base.data, row=128, longest=128)
    config = replace(base, epochs=2, data=data, batch=replace(base.batch, tokens=512))
    counted = config.with_facts(facts)
    assert counted.phases()[0].steps == -(-2 * 159 // 4)
    assert isinstance(counted, SftConfig)
    assert (counted.data.examples, counted.data.held_out) == (600, 0.05)
    train, merge = counted.phases()  # nothing is evaluated that is not there
    assert (train.evaluation_tokens, merge.forward_tokens) == (9 * 128, (3 + 2 * 15) * 9 * 128)
    assert merge.decode_steps == 2 * 128
    whole = replace(counted, method="full").phases()  # nothing to merge: its last evaluation is the one loss
    assert (whole[1].forward_tokens, whole[0].forward_share) == (0, 1 / 3)
    kernel = KernelConfig()
    rows = {"examples": 100, "rows": 150, "row": 8192}
    assert kernel.with_facts(rows).phases()[0].steps == -(-150 * 8192 // kernel.batch.tokens)
    assert config.with_facts({}) == config
    assert FULL.with_facts(facts) == FULL


def test_the_characters_lie_in_each_gpus_memory() -> None:
    config = PretrainConfig()
    large = config.with_facts({"train_characters": 19_000_000_000, "validation_characters": 1_350_000_000})
    more = large.memory(0, Rung(micro=4), 8).total_gb - config.memory(0, Rung(micro=4), 8).total_gb
    assert more == pytest.approx(20.0)
    assert (batch.choose_rung(config, 70.0, 0, 8), batch.choose_rung(large, 70.0, 0, 8)) == (
        Rung(micro=4),
        Rung(micro=2),
    )


def test_muons_rate_is_refused_for_adamw() -> None:
    assert PretrainConfig().problems() == []
    ((path, text),) = replace(PretrainConfig(), optim=MuonAdamW(kind="adamw")).problems()
    assert path == "optim.lr"
    assert "0.02 is Muon's" in text


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        (GrowthConfig(), 1),  # one process, however many nodes are paid
        (TwoTowerConfig(), 1),
        (SftConfig(), 4),  # the rows of a step
        (PretrainConfig(), 16),
        (KernelConfig(), 16),
    ],
)
def test_how_many_processes_of_two_nodes_with_eight_gpus_share_a_step(config: JobConfig, ranks: int) -> None:
    assert config.ranks(8, 2) == ranks


def test_a_token_of_a_layer_with_experts_keeps_what_is_worked_out_by_hand() -> None:
    """4 tokens, one layer of width 8 and 2 heads, 2 of 4 experts of 16; 1.25 rows for each token that goes to one."""
    model = GrowthModel(vocab=10, layers=1, width=8, heads=2, ffn=16, experts=4, top_k=2)
    data = replace(FULL.data, sequence=4)
    config = replace(FULL, model=model, data=data, batch=Batch(sequences=1), cuda_graphs=False)
    products = 4 * 8 + 2.5 * 16 + 2 * 8  # q, k, v, attention; up-projections; the experts' results
    rest = 6 * 8 + 2.5 * 16 + 2.5 * 8  # norms, q and k turned; after GELU; rows gathered
    layer = 2 * (products + rest) + 4 * 8 + 4 * 2 + 16 + 8 * 4  # in bf16; the router's input in fp32; its choices
    kept = 1e9 * config.memory(1, Rung(micro=1)).activations_gb  # compiled
    assert kept == pytest.approx(4 * (0.8 * layer + 2 * 2 * 8))


def test_a_rung_fits_where_a_gigabyte_is_left_beside_its_peak() -> None:
    rung = Rung(micro=4)
    config = replace(FULL, batch=replace(FULL.batch, micro=rung.micro))  # its ladder begins there
    peak = max(config.memory(phase, rung).total_gb for phase in range(3))
    assert batch.choose_rung(config, peak + 1.001) == rung
    assert batch.choose_rung(config, peak + 0.999) != rung


def test_what_is_left_of_the_steps_is_evaluated_too() -> None:
    growth, pretrain = GrowthConfig(), PretrainConfig()
    often = replace(growth, steps_per_phase=101, eval=replace(growth.eval, every=50))
    seldom = replace(pretrain, steps=101, eval=replace(pretrain.eval, every=50))
    assert [phase.evaluations for each in (often, seldom) for phase in each.phases()] == [3, 3, 3, 3]


def test_a_process_without_a_row_is_not_started_and_on_a_cpu_no_gpu_is_asked_for() -> None:
    assert SftConfig().ranks(8) == 4
    assert [SftConfig(gpus=2, device=device).gpus_needed() for device in ("cuda", "cpu")] == [2, 0]


def test_long_prompts_are_answered_fewer_at_once_and_billed_so() -> None:
    config = SftConfig()
    assert answers_at_once(config) == 20
    long = replace(config, data=replace(config.data, row=16384, longest=16384))
    assert answers_at_once(long) == 1
    billed = [each.phases()[1].decode_steps for each in (config, long)]
    assert billed == [5 * 128, 100 * 128]


def in_bytes(memory: Memory) -> tuple[float, ...]:
    """Weights, gradients, moments, activations, logits, all."""
    each = (memory.weights_gb, memory.gradients_gb, memory.moments_gb, memory.activations_gb, memory.logits_gb)
    return tuple(round(1e9 * gb, 3) for gb in (*each, memory.total_gb))


def test_a_small_character_models_memory_is_that_worked_out_by_hand() -> None:
    base = PretrainConfig()
    data = replace(base.data, characters=1000, sequence=16)
    config = replace(base, model=CharModel(layers=3, width=8, head_dim=4, vocab=20), data=data)
    block, total = 768, 3 * 768 + 2 * 160
    kept, cut, widths = 2 * 144 + 8, 2 * 88 + 8, 13 * 8 * 2  # of a token in a block; cut: with checkpointing
    whole = 32 * (3 * kept + widths)
    weights = 4 * total + 2 * total  # fp32, and all of them in bf16
    moments = 4 * 3 * block + 8 * 320  # Muon's one, AdamW's two of both tables
    found = in_bytes(config.memory(0, Rung(micro=2)))
    assert found == (weights, 4 * total + 1024, moments, whole, 32 * 20 * 6, sum(found[:5]) + 1000)
    eager = in_bytes(replace(config, device="cpu").memory(0, Rung(micro=2)))  # where nothing is compiled
    assert eager[4] == 32 * 20 * 16
    again = in_bytes(config.memory(0, Rung(micro=2, checkpointing=True)))
    assert (again[0], again[3]) == (4 * total + 2 * block, 32 * (2 * cut + kept + widths))
    assert in_bytes(replace(config, precision=Precision(compute="fp32")).memory(0, Rung(micro=2)))[0] == 4 * total
    for three, copies in ((False, total), (True, 2 * block)):
        halved = in_bytes(replace(config, reshard_after_forward=three).memory(0, Rung(micro=2), 2))
        assert halved[:3] == (2 * total + 2 * copies, 2 * total + 6 * block, moments / 2)


@pytest.mark.parametrize(("micro", "published_gb"), [(8, 8.1), (16, 13.4), (32, 25.7), (64, 50.3)])
def test_a_large_vocabularys_loss_takes_what_others_have_seen(micro: int, published_gb: float) -> None:
    """GPT-2's 124 M on windows of 1,024, compiled, torch 2.8: one public script's runs, as in speeds.csv."""
    config = PretrainConfig(
        model=CharModel(layers=12, width=768, head_dim=64, vocab=50_304),
        data=CharData(sequence=1024, characters=10_000_000),
        batch=RowBatch(rows=512),
    )
    assert config.memory(0, Rung(micro=micro)).total_gb + DEVICE_RESERVE_GB == pytest.approx(published_gb, rel=0.12)


LLAMA_70B = DecoderConfig(layers=80, width=8192, heads=64, kv_heads=8, head_dim=128, ffn=28_672)


@pytest.mark.parametrize(("row", "keeps"), [(2048, "products"), (4096, "inputs"), (8192, "inputs"), (16_384, "inputs")])
def test_an_adapter_of_70_b_fits_eight_gpus_of_80_gb_as_published(row: int, keeps: str) -> None:
    """Rows of 4,096 on 8 H100: NVIDIA NeMo AutoModel, docs/performance-summary.mdx, 2026-06."""
    config = SftConfig(
        model=LLAMA_70B,
        lora=Lora(rank=16, shard_base=True),
        data=ChatData(row=row),
        batch=TokenBatch(tokens=8 * row),
    )
    rung = batch.choose_rung(config, 80.0, ranks=8)
    assert rung is not None
    assert (rung.micro, rung.checkpointing, rung.products_too) == (1, True, keeps == "inputs")
    whole = replace(config, lora=Lora(rank=16))
    assert batch.choose_rung(whole, 80.0, ranks=8) is None  # a copy of the base on each is 141 GB


def test_a_character_models_edges() -> None:
    base = PretrainConfig()
    assert [replace(base, steps=steps).phases()[0].evaluations for steps in (500, 501)] == [2, 3]
    assert [rung.micro for rung in base.ladder(8) if not rung.checkpointing] == [32, 16, 8, 4, 2, 1]
    edge = replace(base, optim=MuonAdamW(kind="adamw", lr=0.01), eval=replace(base.eval, prompts=("1" * 2048,)))
    assert edge.problems() == []
    for prompt in ("1" * 2049, "1+x"):
        ((path, _),) = replace(base, eval=replace(base.eval, prompts=(prompt,))).problems()
        assert path == "eval.prompts"


def test_tuning_by_hand() -> None:
    base = SftConfig()
    full = replace(base, method="full")
    total, own = tuning.parameters(base.model), tuning.lora_parameters(base.model, 64)
    matmul = tuning.matmul_parameters(base.model)
    for longest, context in ((1024, 361), (200, 200)):
        config = replace(full, data=replace(base.data, longest=longest))
        assert config.phases()[0].flops_per_token == 6 * matmul + tuning.attention_flops(base.model, context)
        assert config.phases()[0].steps == -(-3 * 594_000 * context // (base.batch.tokens * 0.98))  # cut there
        assert config.sizes().dataset == pytest.approx(600_000 * context * 6 / 0.98, abs=1)
    padded = replace(base, measures=replace(base.measures, packing=False))  # a row holds one example
    assert padded.phases()[0].steps == -(-3 * 594_000 // (base.batch.tokens // 4096))
    assert padded.sizes().dataset == pytest.approx(600_000 * 4096 * 6, abs=1)
    assert [rung.micro for rung in base.ladder() if not rung.checkpointing] == [4, 2, 1]
    layer = 4096 * tuning.layer_activation_bytes(base.model, 2, Rung(micro=1))
    adapted = 4096 * tuning.layer_activation_bytes(base.model, 2, Rung(micro=1), adapters=64)
    logits = tuning.loss_bytes(base.model, 4096)
    # The merge holds a row of one layer at a time, and no gradient; all weights' training holds the head's as well.
    assert in_bytes(base.memory(1, Rung(micro=2)))[:5] == pytest.approx((2 * total + 4 * own, 0, 0, adapted, logits))
    assert in_bytes(full.memory(1, Rung(micro=2)))[:5] == pytest.approx((2 * total, 0, 0, layer, logits))
    trained = tuning.loss_bytes(base.model, 8192, trained=True)
    assert in_bytes(full.memory(0, Rung(micro=2)))[4] == pytest.approx(trained)
    assert full.sizes().final == {"merged": 2 * total}
    assert (base.sizes().final_if_cut[0], full.sizes().final_if_cut[0]) == (2 * own, 2 * total)
    assert replace(base, data=replace(base.data, longest=4096)).problems() == []
