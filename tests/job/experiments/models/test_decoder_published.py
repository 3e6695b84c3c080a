"""Published weights: read as `transformers` reads them, written so that it can, refused when another model's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gpufleet.job.experiments.dataset import weights
from gpufleet.job.experiments.engine.experiment import IGNORED
from gpufleet.job.experiments.models import hf, hf_config, lora
from gpufleet.job.experiments.models.config import QWEN3_8B, Lora
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.experiments.models.decoder import Decoder, build
from gpufleet.job.experiments.models.generate import generate
from tests.job.decoder_models import FAMILIES, generator, model, packed

SHARD = 20_000  # bytes: every family needs several files


@pytest.fixture
def transformers() -> Iterator[Any]:
    """The package, with a note where it lacks: it is no dependency, `pip install -e '.[hf]'` brings it."""
    found = pytest.importorskip("transformers", reason="parity needs the optional extra `hf`")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield found


def theirs(transformers: Any, shape: Shape) -> Any:
    """Their model of this shape, its weights scaled up so that attention is not uniform."""
    tree = hf_config.config_tree(shape, "float32")
    config = transformers.AutoConfig.for_model(tree.pop("model_type"), **tree)
    torch.manual_seed(3)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape))
            else:
                parameter.copy_(0.15 * torch.randn(parameter.shape))
    return module


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("shards", ["one file", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_transformers_gives_the_same_logits_and_losses(
    family: str, shards: str, transformers: Any, tmp_path: Path
) -> None:
    reference = theirs(transformers, FAMILIES[family])
    reference.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "sharded" else "1GB")
    assert (tmp_path / hf.INDEX).exists() == (shards == "sharded")
    module = build(hf_config.read_shape(tmp_path), compute=torch.float32)
    hf.load(tmp_path, module)
    tokens = torch.randint(96, (3, 40), generator=generator())
    with torch.no_grad():
        wanted, ours = reference(input_ids=tokens, labels=tokens), module(tokens).logits
        torch.testing.assert_close(ours, wanted.logits, rtol=1e-4, atol=1e-4)
        loss = module(tokens[:, :-1], tokens[:, 1:]).loss_sum / (3 * 39)
    assert abs(loss.item() - wanted.loss.item()) < 1e-5


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_steps_have_the_losses_of_transformers_within_a_ten_thousandth(
    family: str, transformers: Any, tmp_path: Path
) -> None:
    reference = theirs(transformers, FAMILIES[family])
    reference.save_pretrained(tmp_path)
    module = build(hf_config.read_shape(tmp_path), compute=torch.float32)
    hf.load(tmp_path, module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.0) for m in (module, reference)]
    source = generator(5)
    furthest = 0.0
    for _ in range(100):
        tokens = torch.randint(96, (2, 24), generator=source)
        losses = (
            module(tokens[:, :-1], tokens[:, 1:]).loss_sum / (2 * 23),
            reference(input_ids=tokens, labels=tokens).loss,
        )
        furthest = max(furthest, abs(losses[0].item() - losses[1].item()))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert furthest < 1e-4


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_we_write_and_continues_a_prompt_alike(
    family: str, transformers: Any, tmp_path: Path
) -> None:
    module = model(family)
    hf.write(tmp_path, module.named_parameters(), module.shape, torch.float32, shard=SHARD)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = torch.tensor([[5, 6, 7]])
    continued = read.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generate(module, prompt.tolist(), 8) == [continued[0, 3:].tolist()]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_survive_being_written_and_read_in_several_files(family: str, tmp_path: Path) -> None:
    module = model(family)
    paths = hf.write(tmp_path, module.named_parameters(), module.shape, torch.float32, shard=SHARD)
    assert len(paths) > 1
    assert all(path.stat().st_size < SHARD + 4000 for path in paths[1:])
    assert hf_config.read_shape(tmp_path) == module.shape
    again = build(module.shape, compute=torch.float32)
    hf.load(tmp_path, again)
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter, module.get_parameter(name), rtol=0, atol=0)


def test_the_published_shapes_of_llama_31_and_qwen3_are_recognised(tmp_path: Path) -> None:
    for shape in (Shape(), QWEN3_8B):
        (tmp_path / hf_config.CONFIG).write_text(json.dumps(hf_config.config_tree(shape, "bfloat16")))
        assert hf_config.read_shape(tmp_path) == shape


@pytest.mark.parametrize("theta", [None, 7.0])
def test_what_a_config_may_leave_out_is_what_transformers_takes(theta: float | None, tmp_path: Path) -> None:
    model = Shape()
    left_out = ("head_dim", "num_key_value_heads", "rope_theta")
    tree = {key: v for key, v in hf_config.config_tree(model, "bfloat16").items() if key not in left_out}
    (tmp_path / hf_config.CONFIG).write_text(
        json.dumps(tree | ({"rope_parameters": {"rope_theta": theta}} if theta else {}))
    )
    assert hf_config.read_shape(tmp_path) == replace(
        model, kv_heads=model.heads, head_dim=model.width // model.heads, rope_theta=theta or 10_000.0
    )


def test_a_qwen3_that_names_no_head_dim_has_the_familys_own(tmp_path: Path) -> None:
    narrow = replace(QWEN3_8B, width=1024, heads=16, kv_heads=8)  # as Qwen3-0.6B; 1024 / 16 would be 64
    tree = hf_config.config_tree(narrow, "bfloat16")
    del tree["head_dim"]
    (tmp_path / hf_config.CONFIG).write_text(json.dumps(tree))
    assert hf_config.read_shape(tmp_path).head_dim == 128


def test_the_older_word_for_a_rotary_scaling_is_read(tmp_path: Path) -> None:
    tree = hf_config.config_tree(Shape(), "bfloat16")
    tree["rope_scaling"]["type"] = tree["rope_scaling"].pop("rope_type")
    (tmp_path / hf_config.CONFIG).write_text(json.dumps(tree))
    assert hf_config.read_shape(tmp_path) == Shape()


def written(tmp_path: Path) -> Decoder:
    module = model("llama")
    hf.write(tmp_path, module.named_parameters(), module.shape, torch.float32)
    return module


def test_a_damaged_file_of_weights_is_the_users_to_mend(tmp_path: Path) -> None:
    module = written(tmp_path)
    path = tmp_path / hf.WEIGHTS
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model\.safetensors: .* not a safetensors file .*; download it again"):
        hf.load(tmp_path, module)


def test_weights_of_another_shape_are_refused_by_name_before_they_are_read(tmp_path: Path) -> None:
    written(tmp_path)
    other = build(replace(FAMILIES["llama"], ffn=56), compute=torch.float32)
    with pytest.raises(ValueError, match=r"another model than the run config: model\.ffn is 56, there 48"):
        hf.load(tmp_path, other)


def test_a_missing_an_unknown_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    module = written(tmp_path)
    tensors = load_file(tmp_path / hf.WEIGHTS)
    norm = "model.norm.weight"
    save_file({k: v for k, v in tensors.items() if k != norm}, tmp_path / hf.WEIGHTS)
    with pytest.raises(ValueError, match=r"1 tensor missing, first model\.norm\.weight"):
        hf.load(tmp_path, module)
    save_file({**tensors, "visual.proj": torch.ones(3)}, tmp_path / hf.WEIGHTS)
    with pytest.raises(ValueError, match=r"visual\.proj belongs to no llama decoder"):
        hf.load(tmp_path, module)
    save_file({**tensors, norm: torch.ones(33)}, tmp_path / hf.WEIGHTS)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is \[33\], the model needs \[32\]"):
        hf.load(tmp_path, module)
    (tmp_path / hf.WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        hf.load(tmp_path, module)


TABLE, HEAD = weights.EMBED, weights.HEAD


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.update({HEAD: held[TABLE].clone()}),
        lambda held: held.update({HEAD: held.pop(TABLE)}),  # as safetensors' save_model names shared weights
    ],
    ids=["a copy", "under the head's name alone"],
)
def test_tied_weights_are_read_however_they_were_saved(change: Any, tmp_path: Path) -> None:
    module = saved("qwen3", change, tmp_path)
    again = build(module.shape, compute=torch.float32)
    hf.load(tmp_path, again)
    torch.testing.assert_close(again.embed.weight, module.embed.weight, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("qwen3", lambda held: held.update({HEAD: held[TABLE] + 0.1}), "has other numbers .* model.tied: false"),
        ("qwen3", lambda held: held.update({HEAD: held[TABLE].half()}), "has other numbers"),
        ("llama", lambda held: held.pop(HEAD), "first lm_head.weight; if the head is the embedding, say tie_word"),
    ],
)
def test_tables_on_which_config_and_tensors_disagree_are_refused(
    family: str, change: Any, words: str, tmp_path: Path
) -> None:
    module = saved(family, change, tmp_path)
    with pytest.raises(ValueError, match=words):
        hf.load(tmp_path, module)


def test_an_adapter_beside_the_weights_is_not_passed_over(tmp_path: Path) -> None:
    module = written(tmp_path)
    hf.write_adapter(tmp_path, adapted(), Lora(rank=3), None)
    with pytest.raises(ValueError, match=r"an adapter lies there \(adapter_config\.json\): merge it first"):
        hf.load(tmp_path, module)


def saved(family: str, change: Any, tmp_path: Path) -> Decoder:
    """The model whose changed tensors are in the folder."""
    module = model(family)
    hf.write(tmp_path, module.named_parameters(), module.shape, torch.float32)
    held = load_file(tmp_path / hf.WEIGHTS)
    change(held)
    save_file(held, tmp_path / hf.WEIGHTS)
    return module


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of llama, qwen2, qwen3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "neither none nor that of Llama-3.1"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "neither none nor that of Llama-3.1"),
        (
            {"rope_scaling": {"type": "llama3", **hf_config._LLAMA3, "factor": 32.0}},
            "neither none nor that of Llama-3.1",
        ),  # Llama-3.2's
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn"}}, "neither none nor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"attention_bias": True}, "extra biases"),
        ({"mlp_bias": True}, "extra biases"),
        ({"rope_scaling": "llama3"}, "rope_scaling 'llama3' is not an object"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not silu"),
        ({"vocab_size": None, "rms_norm_eps": "1e-6"}, "vocab_size, rms_norm_eps missing or not a number"),
        ({"num_attention_heads": 0, "head_dim": "16"}, "num_attention_heads, head_dim missing or not a number"),
        ({"rope_theta": "1e6"}, "rope_theta '1e6' is not a number"),
        ({"layer_types": 2}, "layer_types 2 is not a list"),
        ({"layer_types": [{"full": 1}]}, "sliding windows"),
        ({"model_type": "llama", "architectures": None, "sliding_window": 16}, "sliding windows"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "is not Qwen3ForCausalLM, the only supported qwen3"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false' is not true or false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: instead of quantised weights use"),
        ({"is_causal": False}, "is_causal False"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers missing or not a number"),
        ({"rope_scaling": {"factor": 8.0}}, "neither none nor that of Llama-3.1"),
        ({"rope_scaling": {"rope_type": "default", "full_attention": {"rope_type": "yarn"}}}, "neither none nor"),
    ],
)
def test_models_that_we_cannot_run_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    tree = hf_config.config_tree(FAMILIES["qwen3"], "float32")
    (tmp_path / hf_config.CONFIG).write_text(json.dumps({**tree, **change}))
    with pytest.raises(ValueError, match=words):
        hf_config.read_shape(tmp_path)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "rms_norm_eps"],
)
def test_a_config_that_lacks_a_number_is_refused_by_its_name(key: str, tmp_path: Path) -> None:
    tree = hf_config.config_tree(FAMILIES["llama"], "float32")
    del tree[key]
    (tmp_path / hf_config.CONFIG).write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=f"{key} missing or not a number"):
        hf_config.read_shape(tmp_path)


def completed(tmp_path: Path, config: dict[str, Any] | None, generation: dict[str, Any] | None) -> tuple[Any, Any]:
    """config.json and generation_config.json beside weights in fp32 of such a base, in whose template 9 ends."""
    base, final = tmp_path / "base", tmp_path / "final"
    base.mkdir()
    for name, tree in ((hf_config.CONFIG, config), (hf.GENERATION, generation)):
        if tree is not None:
            (base / name).write_text(json.dumps(tree))
    written(final)
    hf.complete(final, base, torch.float32, 9)
    return json.loads((final / hf_config.CONFIG).read_text()), json.loads((final / hf.GENERATION).read_text())


def test_weights_from_random_ones_stop_at_the_templates_end(tmp_path: Path) -> None:
    config, generation = completed(tmp_path, None, None)
    assert config == {**hf_config.config_tree(FAMILIES["llama"], "float32"), "eos_token_id": 9}
    assert generation == {"eos_token_id": 9}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_published_config_is_kept_but_for_the_dtype(key: str, tmp_path: Path) -> None:
    theirs = {
        "model_type": "llama",
        "max_position_embeddings": 777,
        "rope_scaling": {"rope_type": "llama3"},
        "eos_token_id": [3, 4],
    }
    config, _ = completed(tmp_path, {**theirs, key: "bfloat16"}, None)
    assert config == {**theirs, key: "float32"}


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({}, {"temperature": 0.6, "eos_token_id": [3, 9]}, {"temperature": 0.6, "eos_token_id": [3, 9]}),
        ({}, {"eos_token_id": 9}, {"eos_token_id": 9}),
        ({}, {"eos_token_id": [3, 4]}, {"eos_token_id": [3, 4, 9]}),
        ({}, {"eos_token_id": 3}, {"eos_token_id": [3, 9]}),
        ({}, {"temperature": 0.6}, {"temperature": 0.6, "eos_token_id": 9}),
        ({"eos_token_id": 3, "pad_token_id": 1}, None, {"eos_token_id": [3, 9], "pad_token_id": 1}),
    ],
)
def test_generation_always_ends_at_the_templates_end_too(
    config: dict[str, Any], generation: dict[str, Any] | None, wanted: dict[str, Any], tmp_path: Path
) -> None:
    assert completed(tmp_path, {"model_type": "llama", **config}, generation)[1] == wanted


def adapted(family: str = "llama", rank: int = 3) -> Decoder:
    module = lora.attach(model(family), Lora(rank=rank, alpha=6.0, dropout=0.0), generator())
    with torch.no_grad():
        for _, layer in lora.layers(module):
            layer.lora_b.copy_(torch.randn(layer.lora_b.shape, generator=generator()) * 0.1)
    return module


def test_an_adapter_is_written_under_pefts_names_and_shapes(tmp_path: Path) -> None:
    module = adapted("qwen2")
    hf.write_adapter(tmp_path, module, Lora(rank=3, alpha=6.0), "base")
    with safe_open(tmp_path / hf.ADAPTER, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    s = FAMILIES["qwen2"]
    sizes = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (s.width, 8),
        "self_attn.v_proj": (s.width, 8),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (32, 40),
        "mlp.up_proj": (32, 40),
        "mlp.down_proj": (40, 32),
    }
    wanted: dict[str, tuple[int, int]] = {}
    for layer in range(2):
        for name, (inputs, outputs) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            wanted |= {f"{key}.lora_A.weight": (3, inputs), f"{key}.lora_B.weight": (outputs, 3)}
    assert shapes == wanted
    config = json.loads((tmp_path / hf_config.ADAPTER_CONFIG).read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "CAUSAL_LM", 3, 6)
    assert sorted(config["target_modules"]) == sorted(name.rpartition(".")[2] for name in sizes)
    assert config["base_model_name_or_path"] == "base"
    assert not any(config[key] for key in ("use_rslora", "use_dora", "fan_in_fan_out", "modules_to_save"))


def test_only_adapters_are_trained_and_checkpointed() -> None:
    module = adapted()
    names = {name for name, p in module.named_parameters() if p.requires_grad}
    assert names == set(lora.weights(module))
    assert len(names) == 2 * 7 * 2
    assert {p.dtype for p in lora.weights(module).values()} == {torch.float32}


def test_a_fresh_adapter_is_uniform_within_one_over_the_root_of_its_inputs_and_zero() -> None:
    for name, layer in lora.layers(lora.attach(model("llama"), Lora(rank=50), generator())):
        bound = layer.weight.shape[1] ** -0.5
        assert 0.98 * bound < layer.lora_a.abs().max() <= bound, name
        assert layer.lora_a.std().item() == pytest.approx(bound / 3**0.5, rel=0.05), name
        assert not layer.lora_b.any(), name


def test_a_fresh_adapter_answers_as_its_base() -> None:
    module, tokens = lora.attach(model("llama"), Lora(rank=4), generator()), torch.tensor([[1, 2, 3, 4]])
    module.eval()
    torch.testing.assert_close(module(tokens).logits, model("llama")(tokens).logits, rtol=0, atol=0)


def test_base_adapter_and_merge_answer_as_separate_models_would(tmp_path: Path) -> None:
    module, rows = adapted(), packed([[7, 17]], 24)
    module.eval()

    def loss(of: Decoder) -> float:
        counted = int((rows["targets"] != IGNORED).sum())
        return float(of(rows["tokens"], rows["targets"], rows["documents"]).loss_sum.item()) / counted

    with_adapter = loss(module)
    lora.set_mode(module, "base")
    assert loss(module) == loss(model("llama"))
    assert abs(loss(module) - with_adapter) > 1e-3
    lora.set_mode(module, "merged")
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 5e-2)):
        module.compute_dtype = dtype
        hf.write(tmp_path, lora.merged_weights(module), module.shape, dtype)
        plain = build(module.shape, compute=dtype, dtype=dtype)
        hf.load(tmp_path, plain)
        assert abs(loss(module) - with_adapter) < bound
        assert loss(plain) == loss(module)


def test_dropout_of_the_adapter_acts_in_training_alone() -> None:
    module, tokens = lora.attach(model("llama"), Lora(rank=4, dropout=0.5), generator()), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for _, layer in lora.layers(module):
            layer.lora_b.fill_(0.1)
    module.train()
    assert not torch.equal(module(tokens).logits, module(tokens).logits)
    module.eval()
    assert torch.equal(module(tokens).logits, module(tokens).logits)
