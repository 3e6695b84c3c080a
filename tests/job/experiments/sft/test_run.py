"""sft-h100 from its first step to final/: learning, stopping anywhere, ranks, the merge and what it leaves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from gpufleet.job import atomic
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.experiments.models import decoder, hf, hf_config, lora
from gpufleet.job.experiments.models.config import DecoderConfig
from gpufleet.job.experiments.models.decoder import build
from gpufleet.job.experiments.sft import merge
from gpufleet.job.experiments.sft.run import Sft
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.experiments.spec import CosineAdamW
from gpufleet.job.experiments.tuning import run as tuning
from gpufleet.job.kind import from_json
from gpufleet.job.kind.common import Rung
from tests.job import rank_world
from tests.job import sft_world as sft
from tests.job import train_world as world
from tests.job.train_world import StopAt

pytestmark = pytest.mark.xdist_group("ranks")

STEPS = 8
TRAINED = STEPS + 2  # looks at the stop request: after each step, and within each of two evaluations


def losses(workdir: Path) -> list[tuple[float, float | None]]:
    return [(record["loss"], record["val_loss"]) for record in world.records(workdir)]


def stages(workdir: Path) -> list[str]:
    return [json.loads(line)["name"] for line in (workdir / merge.DONE).read_text().splitlines()]


def base_of(workdir: Path, dtype: torch.dtype) -> decoder.Decoder:
    """The weights that the run starts from."""
    found = world.experiment(workdir)
    assert isinstance(found, Sft)
    return tuning.base(found.session, found.config, dtype)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = sft.make(tmp_path_factory.mktemp("finished"))
    assert world.train(workdir) == 0
    return workdir


def test_the_rehearsal_shape_has_the_counted_parameters() -> None:
    config = from_json("sft-h100", sft.config())
    size = config.phases()[0]
    assert (size.params_total, size.params_trained) == (167_360, 9_344)
    whole = from_json("sft-h100", sft.config(method="full")).phases()[0]
    assert (whole.params_total, whole.params_trained) == (158_016, 158_016)


def test_it_learns(finished: Path) -> None:
    found = losses(finished)
    assert len(found) == STEPS
    assert found[-1][0] < found[0][0] - 0.05
    assert sft.results(finished)["losses"]["adapter"]["loss"] < sft.results(finished)["losses"]["base"]["loss"] - 0.05


def test_a_last_step_of_fewer_rows_counts_as_no_whole_one(finished: Path) -> None:
    experiment = world.experiment(finished)
    rung = Rung(micro=1)
    found = [experiment.batch(experiment.phases[0], step, rung).full for step in range(STEPS)]
    assert found == [1.0] * 7 + [0.5]  # thirty rows in steps of four


def test_the_result_table_holds_the_four_validation_losses_and_what_they_say(finished: Path) -> None:
    table = sft.results(finished)
    found = table["losses"]
    assert set(found) == {"base", "adapter", "merged_bf16", "adapter_fp32", "merged_fp32"}
    assert {name: entry["compute"] for name, entry in found.items()} == {
        "base": "bfloat16",
        "adapter": "bfloat16",
        "merged_bf16": "bfloat16",
        "adapter_fp32": "float32",
        "merged_fp32": "float32",
    }
    assert found["adapter_fp32"]["loss"] == pytest.approx(losses(finished)[-1][1], abs=1e-6)
    verdict = table["merge"]
    assert verdict["fp32_matches"] is True
    assert verdict["fp32_difference"] == abs(found["merged_fp32"]["loss"] - found["adapter_fp32"]["loss"]) <= 1e-5
    assert verdict["bf16_difference"] == abs(found["merged_bf16"]["loss"] - found["adapter"]["loss"])
    assert verdict["deliverable"] == ("bf16" if verdict["bf16_difference"] <= 0.002 else "fp32")
    assert table["measures"]["packing"] is True
    assert table["dataset"]["fill"] > 0.9


def test_final_holds_the_merged_weights_whose_loss_was_reported(finished: Path) -> None:
    table, folder = sft.results(finished), finished / "final"
    assert table["merge"]["deliverable"] == "bf16"
    module = build(hf_config.read_shape(folder), compute=torch.bfloat16, dtype=torch.bfloat16)
    hf.load(folder, module)
    experiment = world.experiment(finished)
    assert isinstance(experiment, Sft)
    work = experiment.batches.work("validation", experiment.batches.fixed(3), 2)
    with torch.no_grad():
        total = sum(float(module(*micro.inputs).loss_sum) for micro in work.micros)
    assert total / work.total == table["losses"]["merged_bf16"]["loss"]
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["files"][0]["sha256"] == table["weights_sha256"]
    assert meta["tokens"] == world.records(finished)[-1]["tokens"]
    assert DecoderConfig(**meta["shape"]) == hf_config.read_shape(folder)
    assert (folder / "words.json").exists()
    found, sized = world.export_bytes(finished)
    merged = 2 * sum(layer.numel() for layer in module.parameters())
    assert found == sized - merged  # it is sized in fp32, which it could have had to be


def test_bf16_losses_are_of_all_validation_rows_and_fp32_ones_of_a_few(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "VALIDATION_ROWS", 2)
    experiment = world.experiment(finished)
    assert isinstance(experiment, Sft)
    module = experiment.begin(experiment.phases[0], None)
    assert isinstance(module, decoder.Decoder)
    found = {variant.name: merge._loss(experiment, module, variant)["rows"] for variant in merge.VARIANTS}
    assert found == {"base": 3, "adapter": 3, "merged_bf16": 3, "adapter_fp32": 2, "merged_fp32": 2}


def test_what_follows_training_says_how_far_it_is(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Silent for a quarter of an hour, as on a slow GPU, the trainer is killed, with its training paid for."""
    monkeypatch.setattr("gpufleet.job.experiments.engine.experiment.SPOKEN_S", 0.0)
    monkeypatch.setattr(merge, "answers_at_once", lambda config: 1)
    experiment = world.experiment(finished)
    assert isinstance(experiment, Sft)
    module = experiment.begin(experiment.phases[0], None)
    assert isinstance(module, decoder.Decoder)
    merge._loss(experiment, module, merge.VARIANTS[3])  # in micro-batches of one of its three rows
    asked = len(merge._answers(experiment, module, merge.FinishedVariants(tmp_path / "stages", experiment.session, "")))
    said = capsys.readouterr().out
    assert len(re.findall(r"evaluation: \d+% of its tokens", said)) == 2
    assert re.findall(r"answers: (\d+) of \d+", said) == [str(number) for number in range(1, asked + 1)]


def test_an_adapter_that_a_limit_cuts_short_is_left_as_its_last_step_made_it(tmp_path: Path, finished: Path) -> None:
    workdir = sft.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, 5, ends=True)) == TrainerExit.STOPPED
    folder = workdir / "final" / "adapter"
    found, whole = (load_file(each / hf.ADAPTER) for each in (folder, finished / "final" / "adapter"))
    assert found.keys() == whole.keys()
    assert max(float(b.abs().max()) for name, b in found.items() if "lora_B" in name) > 0
    assert [path.name for path in (workdir / "final").iterdir()] == ["adapter"]


def test_weights_that_a_limit_cuts_short_are_left_as_their_last_step_made_them(tmp_path: Path) -> None:
    workdir = sft.make(tmp_path, method="full")
    assert world.train(workdir, StopAt(workdir, 5, ends=True)) == TrainerExit.STOPPED
    step = atomic.read_object(workdir / "final" / "meta.json") or {}
    assert step["step"] == max(world.committed(workdir)) < STEPS
    module = build(hf_config.read_shape(workdir / "final"), compute=torch.float32)
    hf.load(workdir / "final", module)
    changed = [
        not torch.equal(a, b)
        for a, b in zip(module.parameters(), base_of(workdir, torch.bfloat16).parameters(), strict=True)
    ]
    assert all(changed)


def test_the_exported_adapter_gives_the_merged_weights(finished: Path) -> None:
    adapter = load_file(finished / "final" / "adapter" / hf.ADAPTER)
    base = base_of(finished, torch.bfloat16)
    merged = load_file(finished / "final" / hf.WEIGHTS)
    scale = 8 / 4
    for name, layer in base.named_parameters():
        key = f"base_model.model.{hf_config.published(name).removesuffix('.weight')}"
        weight = layer.detach().float()
        if f"{key}.lora_A.weight" in adapter:
            a, b = (adapter[f"{key}.lora_{x}.weight"].float() for x in "AB")
            assert b.abs().max() > 0
            weight = weight + scale * b @ a
        torch.testing.assert_close(merged[hf_config.published(name)].float(), weight, rtol=1e-2, atol=2e-4)


def test_held_out_questions_are_answered_and_stored(finished: Path) -> None:
    answers = sft.results(finished)["answers"]
    assert len(answers) == 3
    for item in answers:
        numbers = item["prompt"].removeprefix("Reverse this list of numbers: ").split()
        assert item["reference"].split() == numbers[::-1]
        assert len(item["answer"].split()) <= 4


def test_checkpoints_hold_the_adapter_and_its_moments_alone_and_the_last_one_no_moments(
    finished: Path, tmp_path: Path
) -> None:
    stopped = sft.make(tmp_path)
    assert world.train(stopped, StopAt(stopped, 1)) == 75
    for workdir, kinds in ((stopped, 3), (finished, 1)):
        newest = max((workdir / "ckpt").glob("step_*"))
        found = FileSystemReader(newest).read_metadata().state_dict_metadata
        assert len(found) == kinds * 2 * 7 * 2  # weights and two moments; layers, projections, A and B
        assert all(name.endswith(("lora_a", "lora_b")) for name in found)


# Looks at the stop request: one before the first step, one after each and between the two micro-batches of an
# evaluation, one after training; then one per micro-batch of the validations (three rows: 2 each in bf16, 3 each in
# fp32) and one per token of the answers.
@pytest.mark.parametrize(
    "look",
    [
        pytest.param(0, marks=pytest.mark.slow),
        3,
        4,  # within the first evaluation
        TRAINED - 1,  # and the last one
        pytest.param(TRAINED, marks=pytest.mark.slow),
        TRAINED + 1,
        pytest.param(TRAINED + 5, marks=pytest.mark.slow),
        TRAINED + 2 + 12,
    ],
)
def test_a_run_stopped_anywhere_ends_with_the_same_adapter_and_results(
    look: int, finished: Path, tmp_path: Path
) -> None:
    workdir = sft.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, look)) == TrainerExit.STOPPED
    assert not (workdir / "results.json").exists()
    assert world.train(workdir) == 0
    assert sft.hashes(workdir) == sft.hashes(finished)
    assert losses(workdir) == losses(finished)
    for key in ("losses", "merge", "answers"):
        assert sft.results(workdir)[key] == sft.results(finished)[key]
    assert stages(workdir) == stages(finished)  # nothing twice


def test_a_restart_after_the_merge_validates_nothing_again(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = sft.make(tmp_path)
    looks = TRAINED + 2 + 2 * 2  # two validations are done
    assert world.train(workdir, StopAt(workdir, looks)) == TrainerExit.STOPPED
    before = stages(workdir)
    assert before == ["loss base", "loss adapter"]
    made: list[str] = []
    real: Callable[..., Any] = merge._loss

    def counted(session: Any, module: Any, variant: Any) -> Any:
        made.append(variant.name)
        return real(session, module, variant)

    monkeypatch.setattr(merge, "_loss", counted)
    assert world.train(workdir) == 0
    assert made == [name.removeprefix("loss ") for name in stages(finished) if name.startswith("loss")][len(before) :]


def test_a_loss_that_was_made_up_for_stays_what_it_is_on_a_node_that_rounds_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was validated is kept under it."""
    workdir = sft.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, TRAINED - 1)) == TrainerExit.STOPPED  # in the last evaluation
    assert world.train(workdir, StopAt(workdir, 2 + 1 + 2 * 2)) == TrainerExit.STOPPED
    assert stages(workdir) == ["loss base", "loss adapter"]
    real: Callable[..., Any] = Sft.evaluate
    monkeypatch.setattr(Sft, "evaluate", lambda *given: real(*given) + 1e-9)
    assert world.train(workdir) == 0
    assert len(stages(workdir)) == len(set(stages(workdir)))
    assert world.records(workdir)[-1]["resumed"] == world.records(workdir)[-1]["step"]


def test_stages_of_other_weights_are_not_believed(finished: Path, tmp_path: Path) -> None:
    workdir = sft.make(tmp_path)
    (workdir / "stages").mkdir()
    wrong = {"name": "loss base", "weights": "others", "value": {"loss": 0.0, "rows": 1, "compute": "bfloat16"}}
    (workdir / merge.DONE).write_text(json.dumps(wrong) + "\n")
    assert world.train(workdir) == 0
    assert sft.results(workdir)["losses"] == sft.results(finished)["losses"]


def test_a_bf16_merge_that_loses_too_much_is_delivered_in_fp32() -> None:
    near = {"loss": 2.0}
    said: list[str] = []
    table = {"adapter": near, "adapter_fp32": near, "merged_fp32": near, "merged_bf16": {"loss": 2.0021}}
    report, dtype = merge._judge(table, said.append)
    assert (report["deliverable"], dtype) == ("fp32", torch.float32)
    report, dtype = merge._judge({**table, "merged_bf16": {"loss": 2.0019}}, said.append)
    assert (report["deliverable"], dtype) == ("bf16", torch.bfloat16)


@pytest.mark.parametrize("wrong", [2.00002, math.nan])
def test_a_merge_that_does_not_match_the_adapter_is_not_delivered(wrong: float) -> None:
    near = {"loss": 2.0}
    said: list[str] = []
    table = {"adapter": near, "adapter_fp32": near, "merged_bf16": near, "merged_fp32": {"loss": wrong}}
    report, dtype = merge._judge(table, said.append)
    assert (report["fp32_matches"], report["deliverable"], dtype) == (False, None, None)
    assert "DOES NOT MATCH" in said[-1]


def test_a_run_whose_merge_does_not_match_fails_with_its_adapter_and_evidence_kept(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = sft.make(tmp_path)
    merged = lora.LoraLinear.merged
    monkeypatch.setattr(lora.LoraLinear, "merged", lambda self: merged(self) * 1.05)
    assert world.train(workdir) == TrainerExit.FATAL
    fatal = atomic.read_object(workdir / "fatal.json")
    assert fatal is not None
    assert fatal["error"] == "MergeDiffersError"
    assert "no merged weights were written" in fatal["detail"]
    assert sorted(path.name for path in (workdir / "final").iterdir()) == ["adapter"]
    adapter, good = (load_file(folder / "final" / "adapter" / hf.ADAPTER) for folder in (workdir, finished))
    assert all(torch.equal(adapter[name], good[name]) for name in good)
    table = sft.results(workdir)
    assert (table["merge"]["fp32_matches"], table["merge"]["deliverable"]) == (False, None)
    assert table["answers"] == sft.results(finished)["answers"]
    assert "weights_sha256" not in table


def test_measures_that_are_off_cost_time_and_change_nothing(finished: Path, tmp_path: Path) -> None:
    off = {"pretokenised": False, "async_checkpoints": False, "compile": False}
    workdir = sft.make(tmp_path, measures=off)
    assert world.train(workdir) == 0
    assert losses(workdir) == losses(finished)
    assert sft.results(workdir)["measures"] == {**off, "packing": True}
    assert sft.hashes(workdir) == sft.hashes(finished)


@pytest.mark.parametrize(("method", "spread"), [("lora", False), ("lora", True), ("full", False)])
def test_two_ranks_train_as_one(method: str, spread: bool, tmp_path: Path) -> None:
    """`spread`: one of two ranks that share the base, against one that has all of it."""
    # Without dropout: it is drawn for each micro-batch, and the last, smaller step is cut differently.
    changed: dict[str, Any] = {"method": method, "optim": {"lr": 1e-3}, "lora": {"dropout": 0.0}}
    changed["eval"] = {"judge": "base"}
    one = sft.make(tmp_path / "one", **changed)
    two = sft.make(tmp_path / "two", **{**changed, "lora": {"dropout": 0.0, "shard_base": spread}})
    assert world.train(one) == 0
    assert rank_world.train(2, two) == 0
    for (a, val_a), (b, val_b) in zip(losses(one), losses(two), strict=True):
        assert b == pytest.approx(a, rel=1e-5)
        assert val_b == (None if val_a is None else pytest.approx(val_a, rel=1e-5))
    for name, entry in sft.results(one)["losses"].items():
        assert sft.results(two)["losses"][name]["loss"] == pytest.approx(entry["loss"], rel=1e-3)
    judged = zip(*(sft.results(folder)["answers"] for folder in (one, two)), strict=True)
    same = [pair for pair in judged if pair[0]["answer"] == pair[1]["answer"]]
    assert same  # two ranks round otherwise, which may change a word
    for one_rank, two_ranks in same:
        assert two_ranks["log_odds"] == pytest.approx(one_rank["log_odds"], abs=1e-4)
    ours, theirs = (load_file(folder / "final" / hf.WEIGHTS) for folder in (one, two))
    assert {t.dtype for t in ours.values()} == {torch.bfloat16}
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=2e-2, atol=1e-3)


def test_full_fine_tuning_moves_every_weight_and_learns(tmp_path: Path) -> None:
    workdir = sft.make(tmp_path, method="full", optim={"lr": 1e-3})
    assert world.train(workdir) == 0
    assert losses(workdir)[-1][0] < losses(workdir)[0][0] - 0.2
    base = base_of(workdir, torch.float32)
    trained = load_file(workdir / "final" / hf.WEIGHTS)
    assert all(
        not torch.equal(trained[hf_config.published(name)], p.detach().bfloat16())
        for name, p in base.named_parameters()
        if "norm" not in name
    )
    assert sft.results(workdir)["merge"] is None


def test_published_base_weights_are_what_training_starts_from(tmp_path: Path) -> None:
    workdir = sft.make(tmp_path)
    config = from_json("sft-h100", sft.config())
    assert isinstance(config, SftConfig)
    shape = config.model
    base = build(shape, compute=torch.float32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(99))
    hf.write(workdir / "inputs", base.named_parameters(), shape, torch.bfloat16)
    module = base_of(workdir, torch.bfloat16)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, base.get_parameter(name))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"data": {"source": "jsonl"}}, "no base weights: storage.base_weights must name a folder"),
        ({"data": {"row": 64, "longest": 64}}, "was prepared with row 128, the run config 64"),
        ({"data": {"loss_on": "all"}}, "loss_on response, the run config all"),
        ({"data": {"longest": 32}}, "longest 128, the run config 32"),
        ({"model": {"family": "qwen3"}}, "template llama-3, the run config chatml"),
        ({"measures": {"pretokenised": False}}, "texts False, the run config True"),
        ({"measures": {"packing": False}}, "packing True, the run config False"),
        ({"model": {"vocab": 64}}, r"115 ids, the model's vocabulary \(model.vocab\) is 64"),
        ({"batch": {"tokens": 500}}, r"job\.parameters\.batch\.tokens"),
    ],
)
def test_a_run_that_cannot_succeed_says_what_to_do(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    workdir = sft.make(tmp_path)
    tree = atomic.read_object(workdir / "run.json")
    assert tree is not None
    tree["job"]["parameters"] = sft.config(**changed)
    (workdir / "run.json").write_text(json.dumps(tree))
    assert world.train(workdir) == TrainerExit.FATAL
    fatal = atomic.read_object(workdir / "fatal.json")
    assert fatal is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(fatal["detail"])


def test_the_rate_warms_up_and_falls_to_its_floor() -> None:
    config = CosineAdamW(lr=2.0, warmup=4, floor=0.1)
    rates = [tuning.cosine(config, step, 20) for step in range(21)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[8] == pytest.approx(2.0 * (0.1 + 0.9 * 0.8536), rel=1e-4)  # a quarter of the cosine, no straight line
    assert rates[12] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert math.isclose(rates[20], 0.2)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_is_trained_decays_as_the_run_config_says(method: str, tmp_path: Path) -> None:
    experiment = world.experiment(sft.make(tmp_path, method=method, optim={"weight_decay": 0.3}))
    module = experiment.begin(experiment.phases[0], None)
    groups = experiment.optimizer(experiment.phases[0], module).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] == 0.3 for p in group["params"]}
    names = {name for name, p in module.named_parameters() if id(p) in decayed}
    assert names == (
        set(lora.weights(module)) if method == "lora" else set(filter(decoder.decays, module.state_dict()))
    )
    assert names
