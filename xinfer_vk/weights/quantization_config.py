"""What a checkpoint's ``quantization_config`` says of its weights, or why they cannot be read.

GPTQ's keys are those that AutoGPTQ and GPTQModel write (GPTQModel, gptqmodel/quantization/config.py), AWQ's
those of AutoAWQ, as transformers keeps them (src/transformers/utils/quantization_config.py). A key that is
not known may change what the bits mean, so it is refused, unless it is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields, parse_json, quoted
from xinfer_vk.kernels.layout import GROUP_NAMES, WHOLE_ROW
from xinfer_vk.weights.mapped import read_small_file

KEY = "quantization_config"
FILE = "quantize_config.json"  # of AutoGPTQ; config.json goes before it
MAX_BYTES = 1 << 20

METHODS = ("gptq", "awq")
BITS = {"gptq": (4, 8), "awq": (4,)}
GROUP_SIZES = (*(group for group in GROUP_NAMES if group != WHOLE_ROW), -1)
# How the tensors may be packed, in lower case (the first is meant where nothing is said), and the keys that
# say so.
PACKINGS = {
    "gptq": (("gptq", "gptq_v2"), ("checkpoint_format", "format")),
    "awq": (("gemm",), ("version", "checkpoint_format", "format")),
}
# Keys whose value must be this one: others pack the tensors otherwise, or need more than they hold.
NEUTRAL: dict[str, dict[str, Any]] = {
    "gptq": {"is_marlin_format": False, "pack_dtype": "int32"},
    "awq": {"zero_point": True, "backend": "autoawq", "pack_dtype": "int32"},
}
# Keys that tell how the weights were found, or what another program does with them.
IGNORED = frozenset(
    """
    act_group_aware auto_forward_data_parallel autoround_version batch_size block_name_to_quantize
    cache_block_outputs damp_auto_increment damp_percent data_type dataset dense_vram_strategy desc_act
    disable_exllama do_fuse enable_quanted_input exllama_config fail_safe failsafe fallback
    fuse_max_seq_len gc_mode gptaq gptaq_alpha hessian hyb_act iters lm_head low_gpu_mem_usage lr
    max_input_length meta minmax_lr mock_quantization model_file_base_name model_name_or_path
    model_seqlen module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse
    modules_to_not_convert moe_vram_strategy mse nsamples offload_to_disk offload_to_disk_path pack_impl
    pad_token_id quantizer scale_dtype seqlen static_groups sym to_quant_block_names tokenizer
    true_sequential use_cuda_fp16 use_exllama vram_strategy
    """.split()  # noqa: SIM905 (a list of this length is easier to read so)
)
READ = ("quant_method", "bits", "group_size", "checkpoint_format", "format", "version", "dynamic")


@dataclass(frozen=True)
class Quantization:
    """Integers of ``bits`` in groups of ``group`` columns. ``zero_offset`` is what a zero is above the
    stored one: 1 in the first of GPTQ's formats. ``needs_order``: every matrix must say which group its
    columns are in."""

    method: str  # "gptq" or "awq"
    bits: int
    group: int
    zero_offset: int
    needs_order: bool

    @property
    def fmt(self) -> str:
        """The number format of :mod:`xinfer_vk.kernels.layout`."""
        return f"int{self.bits}_{GROUP_NAMES[self.group]}"


def read_quantization(config: Mapping[str, Any], folder: Path) -> Quantization | None:
    """The quantization of the checkpoint in ``folder``, whose ``config.json`` is ``config``; None if its
    weights are plain floats. Raises :class:`ModelError` for any value that is not understood, by key."""
    value = config.get(KEY)
    if value is not None:
        if not isinstance(value, dict):
            raise ModelError(f"{folder / 'config.json'}: {KEY} is {quoted(value)}, an object was expected")
        return _parse(Fields(value, f"{folder / 'config.json'}: {KEY}"))
    path = folder / FILE
    if not path.exists():
        return None
    found = parse_json(read_small_file(path, MAX_BYTES), str(path))
    return _parse(Fields({"quant_method": "gptq", **found}, str(path)))


def _parse(f: Fields) -> Quantization:
    method = f.choice("quant_method", METHODS)
    bits = f.raw("bits")
    if type(bits) is not int or bits not in BITS[method]:
        raise f.wrong("bits", f"supported by {method}: {', '.join(map(str, BITS[method]))}")
    group = f.raw("group_size")
    if type(group) is not int or group not in GROUP_SIZES:
        raise f.wrong("group_size", f"supported: {', '.join(map(str, GROUP_SIZES))}")

    packings, keys = PACKINGS[method]
    packing = None
    for key in keys:
        if key not in f:
            continue
        found = f.text(key).lower()
        if found not in packings:
            raise f.wrong(key, f"supported by {method}: {', '.join(packings)}")
        if packing not in (None, found):
            raise f.wrong(key, f"another key says {packing}")
        packing = found
    for key, wanted in NEUTRAL[method].items():
        value = f.raw(key, wanted)
        if type(value) is not type(wanted) or value != wanted:
            raise f.wrong(key, f"supported: {wanted if isinstance(wanted, str) else str(wanted).lower()}")
    if f.raw("dynamic", None):
        raise f.wrong("dynamic", "rules for single modules are not supported: it must be empty")
    for key in ("sym", "desc_act"):
        f.flag(key, False)

    known = {*READ, *NEUTRAL[method], *IGNORED}
    for key, value in f.values.items():
        if key not in known and value not in (None, False, {}, []):
            raise ModelError(
                f"{f.where}: the key {quoted(key)} with the value {quoted(value)} is not understood: "
                f"known keys: {', '.join(sorted(known))}"
            )
    return Quantization(
        method,
        bits,
        WHOLE_ROW if group == -1 else group,
        zero_offset=int(method == "gptq" and packing != "gptq_v2"),
        needs_order=method == "gptq" and f.flag("desc_act", False),
    )
