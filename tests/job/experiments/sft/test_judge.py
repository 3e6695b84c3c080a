"""sft-h100's judge: what it reads, how its verdicts count, and a run that it judges, stopped and resumed."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpufleet.job import atomic
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.contract.goal import grade, results_in
from gpufleet.job.experiments.dataset.rendering import TEMPLATES, FileTokenizer, Renderer, open_chat_tokenizer
from gpufleet.job.experiments.engine.committed import weights_identity
from gpufleet.job.experiments.engine.experiment import Stopped
from gpufleet.job.experiments.models import hf
from gpufleet.job.experiments.models.config import DecoderConfig
from gpufleet.job.experiments.models.decoder import Decoder, build
from gpufleet.job.experiments.sft import judge, merge, verdicts
from gpufleet.job.experiments.sft.run import Sft
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.experiments.sft.verdicts import Choice
from gpufleet.job.experiments.tuning import run as tuning
from gpufleet.job.experiments.tuning.spec import parameters
from gpufleet.job.kind import from_json
from gpufleet.job.kind.common import Rung
from tests.job import sft_world as sft
from tests.job import train_world as world
from tests.job.train_world import StopAt

pytestmark = pytest.mark.xdist_group("ranks")

MANY = 10**6  # looks for a stop request, more than any run here has
A, B, EQUAL = Choice(-0.1, -2.4), Choice(-2.4, -0.1), Choice(-0.7, -0.7)
TINY = DecoderConfig(
    vocab=512, layers=1, width=16, heads=2, kv_heads=1, head_dim=8, ffn=32, rope_scaling="none", tied=True
)


def test_an_answer_wins_that_is_preferred_in_both_orders_and_all_else_is_a_tie() -> None:
    assert verdicts.verdict(A, B) == "win"
    assert verdicts.verdict(B, A) == "loss"
    assert {verdicts.verdict(*pair) for pair in ((A, A), (B, B), (A, EQUAL), (EQUAL, B), (EQUAL, EQUAL))} == {"tie"}
    assert verdicts.entry(A, B) == {"verdict": "win", "log_odds": [pytest.approx(2.3)] * 2}


def test_a_tie_is_half_a_win_and_the_preference_for_a_place_is_counted() -> None:
    found = verdicts.table([(A, B)] * 5 + [(B, A)] * 2 + [(A, A)] * 3)
    assert (found["questions"], found["wins"], found["losses"], found["ties"]) == (10, 5, 2, 3)
    assert (found["win_rate"], found["decided"]) == (0.65, 0.7)
    assert found["first_place"] == (5 + 2 + 6) / 20
    assert found["certain"] == pytest.approx(0.904837 + 0.090718, abs=1e-5)
    assert verdicts.sentence(found).startswith(
        "5 wins, 2 losses, 3 ties against the answers of the data; win rate 65.0%"
    )


@pytest.mark.parametrize(
    ("rate", "count", "low", "high"), [(0.5, 10, 0.2366, 0.7634), (1.0, 10, 0.7225, 1.0), (0.0, 100, 0.0, 0.0370)]
)
def test_the_interval_is_wilsons(rate: float, count: int, low: float, high: float) -> None:
    assert verdicts.interval(rate, count) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("family", "specials"), [("llama", sft.LLAMA), ("qwen3", sft.CHATML)])
def test_both_prompts_have_the_same_words_with_the_answers_exchanged(
    family: str, specials: Sequence[str], tmp_path: Path
) -> None:
    tokenizer = FileTokenizer(sft.bpe(tmp_path, *specials))
    reader = verdicts.JudgeReader(Renderer(TEMPLATES[family], tokenizer))
    first, second = (tokenizer.decode(prompt) for prompt in reader.prompts("Why {a}?", "ours", "theirs"))
    assert "[Question]\nWhy {a}?\n" in first
    assert re.findall(r"\[Answer of assistant ([AB])\]\n(\w+)\n", first) == [("A", "ours"), ("B", "theirs")]
    assert second == first.replace("ours", "-").replace("theirs", "ours").replace("-", "theirs")
    assert first.endswith(verdicts.BEGUN) or first.endswith(verdicts.BEGUN + " ")
    assert [tokenizer.decode([word]).strip() for word in reader.words] == ["A", "B"]


def test_a_choice_is_the_models_own_log_probability_of_each_word() -> None:
    model = build(TINY, compute=torch.float32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([[7, 8, 9, 10]])).logits[0, -1].double(), -1)
    found = judge.choice(model, [7, 8, 9, 10], (3, 400))
    assert list(found) == pytest.approx([float(logs[3]), float(logs[400])], abs=1e-6)


# --- a run


def judged_run(workdir: Path, name: str = "base", **changed: Any) -> Path:
    """A work folder whose answers are judged; any judge but `base` has weights of its own there."""
    changed = {**changed, "eval": {**changed.get("eval", {}), "judge": name}}
    if name != "base":
        folder = workdir / "user" / "inputs" / name
        model = build(TINY, compute=torch.float32, generator=torch.Generator().manual_seed(5))
        hf.write(folder, model.named_parameters(), TINY, torch.bfloat16)
        sft.bpe(folder, *sft.LLAMA)
        changed["eval"]["judge_parameters"] = parameters(TINY)
    return sft.make(workdir, **changed)


def opened(workdir: Path) -> tuple[Sft, judge.AnswerJudge]:
    """The experiment with its module, nothing trained, and its judge."""
    experiment = world.experiment(workdir)
    assert isinstance(experiment, Sft)
    experiment.begin(experiment.phases[0], None)
    assert experiment.judge is not None
    return experiment, experiment.judge


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = judged_run(tmp_path_factory.mktemp("judged"))
    looks = StopAt(workdir, MANY)
    assert world.train(workdir, looks) == 0
    (workdir / "looks").write_text(str(MANY - (looks._left or 0)))
    return workdir


def prefer_longer(experiment: Sft, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the judge's weights by a rule: the answer with more words. `read` gets every prompt."""
    tokenizer = open_chat_tokenizer("words", experiment.session.data)

    def choose(model: Decoder, prompt: Sequence[int], words: tuple[int, int]) -> Choice:
        read.append(tokenizer.decode(prompt))
        answers = re.findall(r"\[ ?Answer of assistant [AB] ?\](.*?)\[ ?End", read[-1], re.DOTALL)
        a, b = (len(answer.split()) for answer in answers)
        return A if a > b else B if b > a else EQUAL

    monkeypatch.setattr(judge, "choice", choose)


def answer(ours: str, theirs: str) -> dict[str, str]:
    return {"prompt": "Reverse this list of numbers: 1 2", "answer": ours, "reference": theirs}


LONG, SHORT = answer("2 1 3 4", "2 1"), answer("2", "2 1 3")
EVEN = answer("2 1", "1 2")


def test_a_judge_that_prefers_the_longer_answer_gives_the_rate_known_beforehand(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, own = opened(judged_run(tmp_path, eval={"sample_tokens": 3}))
    prefer_longer(experiment, [], monkeypatch)
    cut = answer("2 1 3 4", "2 1 3 4 5 6")  # cut at three tokens, as ours had to be
    found = own.judged([LONG, LONG, LONG, SHORT, EVEN, cut])
    assert [item["verdict"] for item in found["answers"]] == ["win"] * 3 + ["loss", "tie", "win"]
    assert found["judge"]["win_rate"] == 4.5 / 6
    assert found["judge"]["first_place"] == 0.5
    assert found["judge"]["weights_identity"] == "seed 1337"


def test_a_judge_that_prefers_a_place_gives_ties_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, own = opened(judged_run(tmp_path))
    monkeypatch.setattr(judge, "choice", lambda *given: A)
    found = own.judged([LONG, SHORT])["judge"]
    assert (found["ties"], found["win_rate"], found["decided"], found["first_place"]) == (2, 0.5, 0.0, 1.0)


def test_an_interrupted_judge_goes_on_with_the_questions_that_it_has_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir, asked, read = judged_run(tmp_path), [LONG, SHORT, EVEN, LONG], list[str]()
    monkeypatch.setattr(judge, "AT_ONCE", 1)
    experiment, own = opened(workdir)
    prefer_longer(experiment, read, monkeypatch)
    stopped = StopAt(workdir, 5)  # in the third question
    own._sft.session = replace(experiment.session, requests=stopped)
    with pytest.raises(Stopped):
        own.judged(asked)
    assert len(read) == 5
    _, again = opened(workdir)
    found = again.judged(asked)
    assert len(read) == 5 + 4
    assert [item["verdict"] for item in found["answers"]] == ["win", "loss", "tie", "win"]
    assert opened(workdir)[1].judged(asked) == found
    assert len(read) == 9  # nothing is read again, and no judge is loaded


def test_verdicts_of_other_weights_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir = judged_run(tmp_path, "open")
    monkeypatch.setattr(judge, "choice", lambda *given: A)
    _, own = opened(workdir)
    first = own.judged([LONG])
    folder = workdir / "user" / "inputs" / "open"
    assert first["judge"]["weights_identity"] == own.identity == weights_identity(folder)
    other = build(TINY, compute=torch.float32, generator=torch.Generator().manual_seed(6))
    hf.write(folder, other.named_parameters(), TINY, torch.bfloat16)
    monkeypatch.setattr(judge, "choice", lambda *given: B)
    second = opened(workdir)[1].judged([LONG])
    assert second["judge"]["weights_identity"] != first["judge"]["weights_identity"]
    assert second["judge"]["first_place"] == 0.0


def test_results_hold_each_verdict_beside_its_answer_and_the_figures_for_a_goal(finished: Path) -> None:
    table = sft.results(finished)
    assert len(table["answers"]) == table["judge"]["questions"] == 3
    for item in table["answers"]:
        assert set(item) == {"prompt", "answer", "reference", "verdict", "log_odds"}
    assert [line for line in (finished / merge.DONE).read_text().splitlines() if '"verdicts seed 1337 0"' in line]
    rate = Decimal(str(table["judge"]["win_rate"]))
    for wanted, met in ((rate, True), (rate + Decimal("0.01"), False)):
        (found,) = grade(
            {"judge/win_rate": wanted}, usd=Decimal(1), hours=Decimal(1), done=True, results=results_in(finished)
        )
        assert (found.met, found.reached) == (met, rate)


def test_a_judge_changes_nothing_of_what_is_trained(finished: Path, tmp_path: Path) -> None:
    plain = sft.make(tmp_path)
    (plain / "data").rename(tmp_path / "words-without-the-judges")
    (plain / "data").symlink_to(finished / "data")
    assert world.train(plain) == 0
    assert sft.hashes(plain) == sft.hashes(finished)
    one, other = sft.results(plain), sft.results(finished)
    assert "judge" not in one
    assert [item.items() <= judged.items() for item, judged in zip(one["answers"], other["answers"], strict=True)]
    assert one["losses"] == other["losses"]


def test_a_run_stopped_while_its_answers_are_judged_ends_with_the_same_results(finished: Path, tmp_path: Path) -> None:
    workdir = judged_run(tmp_path)
    last = int((finished / "looks").read_text())
    assert world.train(workdir, StopAt(workdir, last - 3)) == TrainerExit.STOPPED  # in the judge's six prompts
    assert (workdir / "final" / "meta.json").exists()
    assert not (workdir / "results.json").exists()
    assert world.train(workdir) == 0
    for key in ("answers", "judge", "losses", "weights_sha256"):
        assert sft.results(workdir)[key] == sft.results(finished)[key]


def embeddings() -> int:
    """How many embeddings of the trained model's shape there are in memory."""
    gc.collect()
    return sum(type(each) is nn.Parameter and each.shape == (512, 64) and not each.is_meta for each in gc.get_objects())


def test_a_judge_takes_the_place_of_the_trained_model_which_nothing_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir, before = judged_run(tmp_path, "open"), embeddings()
    there, real = list[int](), hf.load

    def load(folder: Path, module: Decoder) -> None:
        there.append(embeddings() - before)
        real(folder, module)

    monkeypatch.setattr(hf, "load", load)
    assert world.train(workdir) == 0
    assert there == [0]
    assert sft.results(workdir)["judge"]["questions"] == 3
    assert (workdir / "final" / hf.WEIGHTS).exists()


def test_after_training_all_weights_the_base_is_read_again(tmp_path: Path) -> None:
    experiment, own = opened(judged_run(tmp_path, method="full"))
    trained, base = experiment.module, tuning.base(experiment.session, experiment.config, torch.bfloat16)
    loaded = own._loaded()
    assert experiment.module is None
    assert trained is not None
    assert all(parameter.is_meta for parameter in trained.parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, base.get_parameter(name))


def test_the_base_judges_without_the_adapter(tmp_path: Path) -> None:
    experiment, own = opened(judged_run(tmp_path))
    module = experiment.module
    assert module is not None
    tokens = [5, 6, 7]
    plain = judge.choice(own._loaded(), tokens, (3, 4))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_b" in name:
                parameter.normal_()
    assert judge.choice(own._loaded(), tokens, (3, 4)) == plain


def test_without_an_answer_nothing_is_judged(finished: Path) -> None:
    assert opened(finished)[1].judged([]) == {}


# --- what is refused


def fatal(workdir: Path) -> str:
    assert world.train(workdir) == TrainerExit.FATAL
    tree = atomic.read_object(workdir / "fatal.json")
    assert tree is not None
    return str(tree["detail"])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("config.json", r"judge of job\.parameters\.eval\.judge: .*config\.json: missing"),
        ("model.safetensors", "neither model.safetensors nor"),
        ("tokenizer.json", r"tokenizer\.json: cannot be read"),
    ],
)
def test_a_judge_that_cannot_be_read_is_refused_before_anything_is_trained(
    harm: str, words: str, tmp_path: Path
) -> None:
    workdir = judged_run(tmp_path, "open")
    (workdir / "user" / "inputs" / "open" / harm).unlink()
    assert re.search(words, fatal(workdir))
    assert not (workdir / "metrics.jsonl").exists()


def test_a_judge_of_another_size_than_the_bill_has_priced_is_refused(tmp_path: Path) -> None:
    workdir = judged_run(tmp_path, "open")
    tree = atomic.read_object(workdir / "run.json")
    assert tree is not None
    tree["job"]["parameters"]["eval"]["judge_parameters"] = 2 * parameters(TINY)
    (workdir / "run.json").write_text(json.dumps(tree))
    assert "eval.judge_parameters is 21088, and the bill uses this number: write" in fatal(workdir)


def test_words_of_a_dataset_that_was_prepared_without_a_judge_are_refused(tmp_path: Path) -> None:
    workdir = sft.make(tmp_path)
    tree = atomic.read_object(workdir / "run.json")
    assert tree is not None
    tree["job"]["parameters"]["eval"]["judge"] = "base"
    (workdir / "run.json").write_text(json.dumps(tree))
    assert "prepare the dataset again" in fatal(workdir)


@pytest.mark.parametrize("lacking", [{"prompts": 0}, {"sample_tokens": 0}])
def test_a_judge_needs_answers(lacking: dict[str, int]) -> None:
    config = from_json("sft-h100", sft.config(eval={"judge": "base", **lacking}))
    assert [path for path, _ in config.problems()] == ["eval.judge"]


# --- what the bill counts


def priced(**evaluation: Any) -> SftConfig:
    return replace(SftConfig(), eval=replace(SftConfig().eval, **evaluation))


def test_judging_is_a_phase_of_its_own_in_tokens_of_the_trained_model() -> None:
    base, other = priced(judge="base").phases()[2], priced(judge="open", judge_parameters=32e9).phases()[2]
    assert base.forward_tokens == 2 * 100 * (361 + 2 * 128 + 250)
    assert other.forward_tokens == pytest.approx(base.forward_tokens * 32e9 / 8.03e9, rel=1e-3)
    assert (base.gpu_s, other.gpu_s) == (0.0, 64.0)  # the base is on the device already
    assert replace(priced(judge="base"), method="full").phases()[2].gpu_s == pytest.approx(16.06, rel=1e-3)
    assert [phase.name for phase in SftConfig().phases()] == ["train", "merge"]
    assert priced(judge="base").phases()[:2] == SftConfig().phases()


def test_a_judge_needs_its_own_memory_in_the_trained_models_place() -> None:
    rung = Rung(micro=1)
    other = priced(judge="open", judge_parameters=32e9)
    assert other.memory(2, rung).weights_gb == 64.0
    assert other.memory(2, rung).activations_gb == (1024 + 2 * 128 + 250) / 1e3
    assert priced(judge="base").memory(2, rung).weights_gb == SftConfig().memory(1, rung).weights_gb
    split = replace(other, lora=replace(other.lora, shard_base=True))
    assert split.memory(2, rung, 8).weights_gb > 64.0 + 2.0  # FSDP's part of the base stays


def test_a_judges_files_are_inputs_and_the_base_is_not() -> None:
    other = priced(judge="open", judge_parameters=32e9)
    assert other.demands.inputs == (("eval.judge", "open"),)
    assert other.sizes().inputs == 64_000_000_000
    assert (priced(judge="base").demands.inputs, priced(judge="base").sizes().inputs) == ((), 0)
    assert len(other.sizes().checkpoints) == len(other.sizes().phase_ends) == len(other.phases())
