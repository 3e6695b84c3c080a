"""How decoder weights are published: config.json, and the names and shapes of their tensors. The module imports no
torch, because the bill uses it too. Values that would change the model in `transformers` or vLLM are read as these
programs read them, or refused. Keys about training (attention_dropout, initializer_range) or generation (use_cache,
token ids), and keys of other families, are ignored.
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from gpufleet.job import atomic
from gpufleet.job.experiments.dataset import weights
from gpufleet.job.experiments.dataset.weights import EMBED, HEAD, Stored
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.text import counted

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
QWEN3_HEAD = 128  # the default of `transformers` if Qwen3's config.json has no head_dim (configuration_qwen3.py)
# Llama-3.1's rope_scaling, from the config.json of its published weights (2024-07-23).
LLAMA3_FACTOR, LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 8.0, 1.0, 4.0, 8192
_COUNTS = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
_OPTIONAL = ("num_key_value_heads", "head_dim")
_LLAMA3 = {
    "factor": LLAMA3_FACTOR,
    "low_freq_factor": LLAMA3_LOW,
    "high_freq_factor": LLAMA3_HIGH,
    "original_max_position_embeddings": LLAMA3_CONTEXT,
}

_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_PARTS = {  # parts of a block: our name, the published name
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"},
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    **{f"ffn.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


_CORRECT = "correct it to what the weights were trained with"


def published(name: str) -> str:
    """The published name of one of our weights: `model.layers.3.self_attn.q_proj.weight` for
    `blocks.3.attention.q.weight`. The argument may also be a module's name.
    """
    words = name.split(".")
    leaf = words.pop() if words[-1] in ("weight", "bias") else None
    module_name = f"model.layers.{words[1]}.{_PARTS['.'.join(words[2:])]}" if words[0] == "blocks" else _TOP[words[0]]
    return module_name if leaf is None else f"{module_name}.{leaf}"


def tensors(s: Shape) -> dict[str, list[int]]:
    """The shape of every published tensor by its name."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    block = {
        **{f"{norm}.weight": [s.width] for norm in ("norm1", "norm2")},
        **{f"attention.{x}.weight": [out, s.width] for x, out in (("q", q), ("k", kv), ("v", kv))},
        "attention.o.weight": [s.width, q],
        **{f"ffn.{x}.weight": [s.ffn, s.width] for x in ("gate", "up")},
        "ffn.down.weight": [s.width, s.ffn],
    }
    if s.family == "qwen2":
        block |= {f"attention.{x}.bias": [out] for x, out in (("q", q), ("k", kv), ("v", kv))}
    if s.family == "qwen3":
        block |= {f"attention.{x}_norm.weight": [s.head_dim] for x in "qk"}
    ours = {"embed.weight": [s.vocab, s.width], "norm.weight": [s.width]}
    ours |= {} if s.tied else {"head.weight": [s.vocab, s.width]}
    ours |= {f"blocks.{i}.{name}": size for i in range(s.layers) for name, size in block.items()}
    return {published(name): size for name, size in ours.items()}


def read_shape(folder: Path) -> Shape:
    """The decoder that folder/config.json describes. Raises ValueError if this code cannot run it."""
    path = folder / CONFIG
    tree = atomic.read_object(path)
    if tree is None:
        raise ValueError(f"{path}: missing or not JSON; base weights are a folder with {CONFIG} and safetensors")
    family = tree.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{path}: model_type {family!r} is not one of {', '.join(FAMILIES)}")
    named = tree.get("architectures") or [FAMILIES[family]]
    if FAMILIES[family] not in named:  # vLLM uses this key, and `transformers` uses model_type
        raise ValueError(f"{path}: architectures {named!r:.60} is not {FAMILIES[family]}, the only supported {family}")
    counts = (*_COUNTS, *(key for key in _OPTIONAL if tree.get(key) is not None))
    lacking = [key for key in counts if not (_number(tree.get(key)) and isinstance(tree[key], int))]
    lacking += [] if _number(tree.get("rms_norm_eps")) else ["rms_norm_eps"]
    if lacking:
        raise ValueError(f"{path}: {', '.join(lacking)} missing or not a number; {_CORRECT}")
    tied = tree.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ValueError(f"{path}: tie_word_embeddings {tied!r:.60} is not true or false; {_CORRECT}")
    if any(tree.get(key) for key in ("quantization_config", "compression_config")):
        raise ValueError(
            f"{path}: quantization_config: instead of quantised weights use the original ones; leave the key out "
            "where the tensors are whole"
        )
    theta, scaled = _rotary(tree, path)
    layer_types = tree.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"{path}: layer_types {layer_types!r:.60} is not a list; {_CORRECT}")
    windows = tree.get("use_sliding_window") or any(layer_type != "full_attention" for layer_type in layer_types)
    # Qwen's attention window is used only if its switch is on.
    windows = windows or (family == "llama" and tree.get("sliding_window"))
    if windows or tree.get("mlp_bias") or (family != "qwen2" and tree.get("attention_bias")):
        raise ValueError(f"{path}: sliding windows and extra biases are not supported")
    if tree.get("is_causal", True) is not True:
        raise ValueError(f"{path}: is_causal {tree['is_causal']!r}: only decoders that attend to what came before")
    if tree.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {tree['hidden_act']!r} is not silu, the only one that is supported")
    heads = tree["num_attention_heads"]
    return Shape(
        family=family,
        vocab=tree["vocab_size"],
        layers=tree["num_hidden_layers"],
        width=tree["hidden_size"],
        heads=heads,
        kv_heads=tree.get("num_key_value_heads") or heads,
        head_dim=tree.get("head_dim") or (QWEN3_HEAD if family == "qwen3" else tree["hidden_size"] // heads),
        ffn=tree["intermediate_size"],
        tied=tied,
        norm_eps=float(tree["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaled,
    )


def positions(folder: Path) -> float:
    """The longest text, in tokens, for which the weights in `folder` were made; infinite if unknown."""
    most = (atomic.read_object(folder / CONFIG) or {}).get("max_position_embeddings")
    return most if isinstance(most, int) else math.inf


def _rotary(tree: dict[str, Any], path: Path) -> tuple[float, Literal["none", "llama3"]]:
    """Base and scaling of rotary positions. Raises ValueError for kinds that the decoder does not support."""
    # If both keys exist, `transformers` uses the first.
    rope = tree.get("rope_scaling") or tree.get("rope_parameters") or {}
    other = tree.get("rope_parameters") or {}
    if not isinstance(rope, dict) or not isinstance(other, dict):
        raise ValueError(f"{path}: rope_scaling {rope!r} is not an object; {_CORRECT}")
    theta = next((of["rope_theta"] for of in (rope, tree, other) if of.get("rope_theta")), 10_000.0)
    if not _number(theta):
        raise ValueError(f"{path}: rope_theta {theta!r:.60} is not a number; {_CORRECT}")
    kind = rope.get("rope_type", rope.get("type"))
    scaled = kind == "llama3" and not any(rope.get(k) != v for k, v in _LLAMA3.items())
    unnamed = kind is None and rope.keys() - {"rope_theta", "partial_rotary_factor"}  # a factor without a kind
    by_layer = any(isinstance(value, dict) for value in rope.values())
    if not scaled and (kind not in (None, "default") or unnamed or by_layer):
        raise ValueError(f"{path}: rotary scaling {rope} is neither none nor that of Llama-3.1, {_LLAMA3}")
    if any((of.get("partial_rotary_factor") or 1) != 1 for of in (rope, tree)):
        raise ValueError(f"{path}: partial_rotary_factor: positions that turn a part of each head are not supported")
    return float(theta), "llama3" if scaled else "none"


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def differences(actual: Shape, wanted: Shape) -> list[tuple[str, object, object]]:
    """The key, the found value and the wanted value of each difference."""
    both = ((field.name, getattr(actual, field.name), getattr(wanted, field.name)) for field in fields(Shape))
    return [(key, there, here) for key, there, here in both if there != here]


def check(folder: Path, wanted: Shape) -> dict[str, Stored]:
    """The tensors in `folder` by their published names. Raises ValueError if folder/config.json describes another
    decoder, or if the tensors beside this file are not those of the wanted decoder: a tensor is missing, unknown, of
    another shape, or in a file that cannot be opened (weights.py), or a tied head has numbers of its own.
    """
    held, needed = weights.check(folder), tensors(wanted)
    if differing := differences(read_shape(folder), wanted):
        words = ", ".join(f"model.{key} is {here}, there {there}" for key, there, here in differing)
        raise ValueError(f"{folder / CONFIG} describes another model than the run config: {words}. Make them agree.")
    if (folder / ADAPTER_CONFIG).exists():  # otherwise `transformers` would add the adapter to these weights
        raise ValueError(f"{folder}: an adapter lies there ({ADAPTER_CONFIG}): merge it first, or move its files away")
    # For a tied head: a copy of the embedding, or the only table.
    head = held.pop(HEAD, None) if wanted.tied else None
    if head is not None and not held.setdefault(EMBED, head).equals(head):
        raise ValueError(
            f"{folder}: {CONFIG} says tie_word_embeddings true, but {HEAD} has other numbers than {EMBED}, so the "
            "model has two tables: say false there, and model.tied: false in the run config"
        )
    for name, tensor in held.items():
        if name not in needed:
            raise ValueError(f"{folder}: tensor {name} belongs to no {wanted.family} decoder of this shape")
        if tensor.shape != needed[name]:
            raise ValueError(f"{folder}: {name} is {tensor.shape}, the model needs {needed[name]}")
    if missing := needed.keys() - held.keys():
        todo = "download the weights again; if they come the same, they are another model's, or a part of one"
        if missing == {HEAD}:
            todo = f"if the head is the embedding, say tie_word_embeddings true in {CONFIG}, and model.tied: true"
        raise ValueError(f"{folder}: {counted(len(missing), 'tensor')} missing, first {min(missing)}; {todo}")
    return held


def config_tree(shape: Shape, dtype: str) -> dict[str, Any]:
    """The config.json for these weights."""
    return {
        "architectures": [FAMILIES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **_LLAMA3} if shape.rope_scaling == "llama3" else None,
        "max_position_embeddings": 131_072 if shape.rope_scaling == "llama3" else 32_768,
        "hidden_act": "silu",
        "attention_bias": shape.family == "qwen2",
        "torch_dtype": dtype,
    }
