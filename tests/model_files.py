"""Writes small models with random weights, in every file format the package reads.

The weights are float32 arrays under Hugging Face's names; a writer stores them in a number format,
and ``decoded`` says what values that format keeps. The GGUF files come from the ``gguf`` package, so
that reader and writer are not the same hand's mistakes.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SAFETENSORS_NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}

# Whole blocks of 256, as K-quants need them.
K_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}

# The smallest shapes that still have everything: grouped queries, whole blocks of 32, several layers.
TINY: dict[str, dict[str, Any]] = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    },
}
TINY["mixtral"] = {
    **TINY["llama"],
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}

QWEN2_5_0_5B: dict[str, Any] = {
    **TINY["qwen2"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


def tiny_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """The ``config.json`` of a tiny model; ``None`` removes a key."""
    config = {**TINY[architecture], **changes}
    return {key: value for key, value in config.items() if value is not None}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a model of this config has, in a checkpoint's order."""
    hidden, wide, vocabulary = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    qwen2 = config["architectures"] == ["Qwen2ForCausalLM"]
    qkv_bias = qwen2 or config.get("attention_bias", False)
    output_bias = not qwen2 and config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        projections = {
            "self_attn.q_proj": (heads * head_dim, hidden, qkv_bias),
            "self_attn.k_proj": (kv_heads * head_dim, hidden, qkv_bias),
            "self_attn.v_proj": (kv_heads * head_dim, hidden, qkv_bias),
            "self_attn.o_proj": (hidden, heads * head_dim, output_bias),
        }
        experts = config.get("num_local_experts", 0)
        for mlp in [f"mlp.experts.{e}" for e in range(experts)] or ["mlp"]:
            projections[f"{mlp}.gate_proj"] = (wide, hidden, mlp_bias)
            projections[f"{mlp}.up_proj"] = (wide, hidden, mlp_bias)
            projections[f"{mlp}.down_proj"] = (hidden, wide, mlp_bias)
        if experts:
            projections["mlp.gate"] = (experts, hidden, False)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, cols, bias) in projections.items():
            shapes[f"{layer}.{name}.weight"] = (rows, cols)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights of the size that keeps activations near 1; norms near 1, biases small."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in tensor_shapes(config).items():
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        values = rng.standard_normal(shape, np.float32) * np.float32(scale)
        out[name] = values + 1 if "norm" in name else values
    return out


# -- number formats ------------------------------------------------------------------------------


def to_bf16(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits, rounded to nearest even: ``uint16`` of the same shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def encode(values: np.ndarray, fmt: str) -> np.ndarray:
    """Bytes of ``values`` in a number format: ``uint8 [rows, row_bytes]`` (one row for a vector)."""
    values = np.ascontiguousarray(values, np.float32)
    rows = values.reshape(1, -1) if values.ndim == 1 else values
    if fmt == "f32":
        return rows.view(np.uint8)
    if fmt == "f16":
        return rows.astype(np.float16).view(np.uint8)
    if fmt == "bf16":
        return to_bf16(rows).view(np.uint8)
    if fmt in FIRST_SCALES:
        return _random_blocks(rows, fmt)
    return _gguf().quants.quantize(rows, _gguf().GGMLQuantizationType[fmt.upper()])


# The formats that the ``gguf`` package reads and does not write: where a block's f16 are.
FIRST_SCALES = {
    "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,),
    "iq4_xs": (0,),
}  # fmt: skip


def _random_blocks(rows: np.ndarray, fmt: str) -> np.ndarray:
    """Rows in one of those formats: not these values but others of their size, the same for the same
    row (any bits are a block)."""
    gguf = _gguf()
    kind = gguf.GGMLQuantizationType[fmt.upper()]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    assert rows.shape[1] % block == 0, f"{rows.shape[1]} columns are not whole {fmt} blocks"
    count = rows.shape[1] // block
    random = [np.random.default_rng(zlib.crc32(row.tobytes())) for row in rows]
    blocks = np.stack([rng.integers(0, 256, (count, size), np.uint8) for rng in random])

    def scaled(d: np.ndarray) -> np.ndarray:
        for at in FIRST_SCALES[fmt]:
            blocks[..., at : at + 2] = d.astype(np.float16)[..., None].view(np.uint8)
        return gguf.quants.dequantize(blocks.reshape(len(rows), -1), kind)

    unit = np.std(scaled(np.ones(blocks.shape[:2])), axis=1)
    factors = np.stack([rng.uniform(0.5, 1.5, count) for rng in random])
    scaled(factors * (np.std(rows, axis=1) / unit)[:, None])
    return blocks.reshape(len(rows), -1)


def decoded(values: np.ndarray, fmt: str) -> np.ndarray:
    """What ``values`` are after they were stored in a format: float32 of the same shape."""
    raw = encode(values, fmt)
    if fmt == "f32":
        out = raw.view(np.float32)
    elif fmt == "f16":
        out = raw.view(np.float16).astype(np.float32)
    elif fmt == "bf16":
        out = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        out = _gguf().quants.dequantize(raw, _gguf().GGMLQuantizationType[fmt.upper()])
    return out.reshape(values.shape)


def _gguf() -> Any:
    import gguf
    import gguf.quants

    return gguf


# -- safetensors ---------------------------------------------------------------------------------


def safetensors_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A safetensors file of ``(dtype, shape, data)`` tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    return with_header(header, b"".join(data for _, _, data in tensors.values()))


def with_header(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header, valid or not (``bytes`` are taken as they are)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def write_hf_model(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    fmt: str = "f32",
    shards: int = 1,
    seed: int = 0,
    generation_config: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """A directory in Hugging Face layout. Returns the values it holds, as float32 by name."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, seed) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    stored = {
        name: (SAFETENSORS_NAMES[fmt], values.shape, encode(values, fmt).tobytes())
        for name, values in tensors.items()
    }
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(stored, {"format": "pt"}))
    else:
        weight_map = {}
        for i in range(shards):
            shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            members = dict(list(stored.items())[i::shards])
            (folder / shard).write_bytes(safetensors_bytes(members, {"format": "pt"}))
            weight_map.update(dict.fromkeys(members, shard))
        index = {
            "metadata": {"total_size": sum(len(d) for _, _, d in stored.values())},
            "weight_map": weight_map,
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {name: decoded(values, fmt) for name, values in tensors.items()}


def write_qwen2_5_0_5b(folder: Path, seed: int = 0) -> Path:
    """A model of exactly Qwen2.5-0.5B's shape with random bf16 weights, 988 MB: returns ``folder``.

    Every tensor is cut from one pool of normal numbers, at another place each, and written as it is
    made, so that this takes seconds and little memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes = tensor_shapes(QWEN2_5_0_5B)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    rng = np.random.default_rng(seed)
    pool = to_bf16(rng.standard_normal(1 << 22, np.float32) * np.float32(0.02))
    one = to_bf16(np.ones(1, np.float32))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(with_header(header))
        for name, shape in shapes.items():
            for piece in _pieces(int(np.prod(shape)), pool, int(rng.integers(pool.size))):
                file.write((np.broadcast_to(one, piece.shape) if "norm" in name else piece).tobytes())
    (folder / "config.json").write_text(json.dumps(QWEN2_5_0_5B))
    return folder


def _pieces(count: int, pool: np.ndarray, start: int) -> Iterator[np.ndarray]:
    while count:
        piece = pool[start : start + count]
        yield piece
        count -= piece.size
        start = 0


# -- GGUF ----------------------------------------------------------------------------------------

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)(\.[a-z_]+\.weight)")


def gguf_name(name: str) -> str:
    """The GGUF specification's name of a Hugging Face tensor."""
    base, _, suffix = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, kind = base.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[kind]}.{suffix}"
    return f"{GGUF_NAMES[base]}.{suffix}"


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of Llama's queries and keys: each head's two halves
    are interleaved."""
    rest = values.shape[1:]
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *rest).swapaxes(1, 2).reshape(values.shape)


def write_gguf_model(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    fmt: str | Callable[[str], str] = "f32",
    seed: int = 0,
    rope_factors: np.ndarray | None = None,
    tokens: list[str] | None = None,
    extra: Callable[[Any], None] | None = None,
    tensors_per_file: int = 0,
) -> dict[str, np.ndarray]:
    """A GGUF file as llama.cpp's converter makes it. Returns the values it holds under Hugging Face's
    names, as float32.

    ``fmt``: of the matrices, one for all or by Hugging Face's name; vectors are f32. ``extra`` gets
    the ``gguf.GGUFWriter`` before it writes, to add keys. ``tensors_per_file``: split the model into
    files of so many tensors, named after ``path`` with ``-00001-of-…`` before the suffix.
    """
    gguf = _gguf()
    tensors = random_tensors(config, seed) if tensors is None else tensors
    arch = {"mixtral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=tensors_per_file)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head_dim)
    if head_dim != config["hidden_size"] // heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if experts := config.get("num_local_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if tokens is not None:
        writer.add_token_list(tokens)
    if extra is not None:
        extra(writer)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    kept, stacks = {}, dict[str, list[np.ndarray]]()
    for name, values in tensors.items():
        chosen = "f32" if values.ndim == 1 else fmt if isinstance(fmt, str) else fmt(name)
        kept[name] = decoded(values, chosen)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permute(values, heads if "q_proj" in name else kv_heads)
        kind = gguf.GGMLQuantizationType[chosen.upper()]
        raw = encode(values, chosen)
        if expert := EXPERT.fullmatch(name):  # they come in order, and are one tensor
            stack = stacks.setdefault(expert[1] + expert[3], [])
            stack.append(raw)
            if len(stack) == experts:
                writer.add_tensor(gguf_name(expert[1] + expert[3]), np.stack(stack), raw_dtype=kind)
            continue
        writer.add_tensor(gguf_name(name), raw.reshape(-1) if values.ndim == 1 else raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept
