"""The short selftest: the cases that ``xinfer-vk selftest`` runs by default.

They dispatch every kernel family, and read and write every memory kind and KV format. A case costs what its
pipelines take to compile, up to seconds on CPU devices, so the list has few head sizes and number formats.
"""

from __future__ import annotations

from collections.abc import Iterable

from xinfer_vk.selftest.case import Case

FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k", "mxfp4", "int4_g128")
KERNELS = ("memory", "synchronization", "advance", "order_columns", "quantize_rows")  # with all their cases
NAMES = frozenset(
    {
        *(f"embed: {fmt}" for fmt in FORMATS),
        "linear: f16, 1 of 1 rows, store with bias",
        "linear: q4_0, 1 of 1 rows, store with bias",
        "linear: q4_0, 33 of 64 rows, swiglu with bias",
        "linear: q4_0, 33 of 64 rows, on matrix units",
        "linear: q4_0, 1 of 1 rows, the largest of each row",
        "linear: q4_0, 1 of 1 rows in 8 bits, store with bias",
        "linear: q4_0, 33 of 64 rows in 8 bits, swiglu with bias",
        "experts: q4_0, 5 of 8 tokens, 4 pairs a tile, store",
        "route_experts: 2 of 8 experts, 5 of 8 tokens",
        "group_experts: 2 of 8 experts, 5 of 8 tokens",
        "combine_experts: 2 experts, 67 dims, 5 of 8 rows",
        "copy_region: 3 regions",
        "copy_words: 257 words",
        "rmsnorm: 576 dims, 1 of 1 rows",
        "swiglu: 65 dims, 5 of 8 rows",
        "geglu: 65 dims, 5 of 8 rows",
        "softcap: 65 dims, 5 of 8 rows",
        "argmax: 33 values",
        *(
            f"append_kv: {kv_dtype}, 9 + 3 heads of 64, 64 turned, 42 of 48 rows"
            for kv_dtype in ("f32", "f16", "q8_0", "q4_0")
        ),
        "attention: prefill, f16, 9/3 heads of 64",
        "attention: decode, q8_0, 9/3 heads of 64",
        "attention: decode, q4_0, 9/3 heads of 64",
        "attention: decode split for a context of 4096, f32",
        "attention: appended, f16, 9/3 heads of 64, 64 turned, 5 of 8 rows",
        "sample: truncations from the list, vocabulary 9001",
        "sample: log-probabilities from the list",
    }
)  # fmt: skip


def short(cases: Iterable[Case]) -> list[Case]:
    """Those of ``cases`` that belong to the short selftest."""
    return [case for case in cases if case.quick and (case.kernel in KERNELS or str(case) in NAMES)]
