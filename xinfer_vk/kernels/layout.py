"""How a weight matrix lies on the device: rows interleaved by eight, word by word ("x8").

A matrix ``W[rows, cols]`` (``y = W x``) is cut into groups of eight rows, the last one padded with
zeros. Each row of a group is a list of ``row_words(fmt, cols)`` 32-bit words, and word ``k`` of the
eight rows stand side by side::

    word index = (row // 8) * 8 * row_words + k * 8 + row % 8

Neighbouring lanes, taken over (k, row), therefore read neighbouring words at every subgroup size,
and a CPU device reads one row per lane of an eight-wide register.

Words of a row, in order:

========  ==================================================================================
f32       ``cols`` words
f16 bf16  ``ceil(cols / 2)`` words, weight 2k in the low half; an odd last half is zero
others    all scales, then all weights: ``block_words`` words for every 32 columns
========  ==================================================================================

Weights of 32 columns. A *nibble word* ``i`` (of 4) holds 8 weights, in byte ``n`` one in the low and
one in the high nibble. In formats with a scale for every 32 columns these are weights ``4i + n`` and
``16 + 4i + n``, the order of GGML; in those with a scale for every 16 ("adjacent" below) they are
``8i + n`` and ``8i + 4 + n``, so that a word has one scale. Bits above the nibble lie in *planes*,
words after the nibble words, so that byte ``n`` of the plane, shifted, is the upper part of byte ``n``
of the nibbles: a *bit plane* has the low nibbles' bit at ``8n + i`` and the high nibbles' at
``8n + 4 + i``; a *pair plane* has two bits at ``8n + 2i``, one plane for the low nibbles and one for
the high.

=======  =======================  ============================================  ====================
format   scales                   weights of 32 columns                         value
=======  =======================  ============================================  ====================
q8_0     f16 d, two a word        8 words: weight 4k+n in byte n of word k      d q (q signed)
q4_0     f16 d, two a word        4 nibble words                                d (q - 8)
q4_1     f16 d, f16 m: a word     4 nibble words                                d q + m
q5_0     f16 d, two a word        4 nibble words, a bit plane                   d (q - 16)
q5_1     f16 d, f16 m: a word     4 nibble words, a bit plane                   d q + m
iq4_nl   f16 d, two a word        4 nibble words                                d IQ4_VALUES[q]
mxfp4    8-bit exponent, four a   4 nibble words                                2^(e-128)
         word                                                                   * MXFP4_VALUES[q]
q2_k     d m, then 16 bytes       adjacent: two pair planes                     d s q - m t
q3_k     d, then 12 bytes         adjacent: two pair planes, a bit plane        d (s - 32) (q - 4)
q4_k     d m, then 12 bytes       4 nibble words                                d s q - m t
q5_k     d m, then 12 bytes       4 nibble words, a bit plane                   d s q - m t
q6_k     d, then 16 bytes         adjacent: 4 nibble words, two pair planes     d s (q - 32), s signed
iq4_xs   d and 16 bits, 4 bytes   4 nibble words                                d (s - 32)
                                                                                * IQ4_VALUES[q]
=======  =======================  ============================================  ====================

Scales that do not fill their last word are followed by zeros. The last six formats have "super-blocks"
of 256 columns: a word with f16 ``d`` (low half) and f16 ``m`` (high; zero where there is none, the
upper two bits of iq4_xs' scales there), then the bytes of the smaller scales ``s`` and ``t`` exactly as
GGML has them.

GPTQ's and AWQ's formats are named after their bits and how many columns share a scale, ``int4_g128`` (or
``int4_row``: one scale for the whole row): value ``d (q - zero)`` with an integer zero for every group.
Their scales stand in chunks: for every 8 groups (4 of int8) a word of zeros, four bits (a byte) each, then
a word for every two f16 ``d``; the last chunk has as many words as its groups need. int8 has 128
subtracted from ``q`` and ``zero``, which makes both signed. Weights lie as in q4_0 and q8_0.

Only the order of bits differs from the model file: no value is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 8  # rows interleaved in one group
BLOCK = 32  # columns whose weights lie together


@dataclass(frozen=True)
class BlockLayout:
    """``columns`` share ``scale_words`` words of scales; ``block``: what a row must be a multiple of;
    ``block_words``: words of weights for every 32 columns."""

    block: int
    columns: int
    scale_words: int
    block_words: int


BLOCK_LAYOUTS = {
    "q8_0": BlockLayout(32, 64, 1, 8),
    "q4_0": BlockLayout(32, 64, 1, 4),
    "q4_1": BlockLayout(32, 32, 1, 4),
    "q5_0": BlockLayout(32, 64, 1, 5),
    "q5_1": BlockLayout(32, 32, 1, 5),
    "q2_k": BlockLayout(256, 256, 5, 2),
    "q3_k": BlockLayout(256, 256, 4, 3),
    "q4_k": BlockLayout(256, 256, 4, 4),
    "q5_k": BlockLayout(256, 256, 4, 5),
    "q6_k": BlockLayout(256, 256, 5, 6),
    "iq4_nl": BlockLayout(32, 64, 1, 4),
    "iq4_xs": BlockLayout(256, 256, 2, 4),
    "mxfp4": BlockLayout(32, 128, 1, 4),
}


@dataclass(frozen=True)
class GroupLayout:
    """Integers of ``bits`` with a scale and a zero for every ``group`` columns, a multiple of 32."""

    bits: int
    group: int

    @property
    def zeros(self) -> int:
        """Zeros in a word, which are the groups of a chunk."""
        return 32 // self.bits

    @property
    def chunk_words(self) -> int:
        """Words of a whole chunk."""
        return 1 + self.zeros // 2

    @property
    def block_words(self) -> int:
        """Words of weights for every 32 columns."""
        return self.bits

    def groups(self, cols: int) -> int:
        return -(-cols // self.group)

    def scale_words(self, cols: int) -> int:
        chunks, rest = divmod(self.groups(cols), self.zeros)
        return chunks * self.chunk_words + (1 + -(-rest // 2) if rest else 0)


WHOLE_ROW = 1 << 30  # as a group: more columns than any row has
GROUP_NAMES = {32: "g32", 64: "g64", 128: "g128", WHOLE_ROW: "row"}
GROUP_LAYOUTS = {
    f"int{bits}_{name}": GroupLayout(bits, group) for bits in (4, 8) for group, name in GROUP_NAMES.items()
}
PER_WORD = {"f32": 1, "f16": 2, "bf16": 2}  # weights in a word of the formats without blocks
BLOCK_FORMATS = tuple(BLOCK_LAYOUTS)
FORMATS = (*PER_WORD, *BLOCK_FORMATS, *GROUP_LAYOUTS)

# The values that four bits stand for in iq4_nl and iq4_xs, and in mxfp4 (doubled, so they are whole).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def scale_words(fmt: str, cols: int) -> int:
    """Words of scales at the start of a row: where its quantized weights begin."""
    if fmt in PER_WORD:
        return 0
    if fmt in GROUP_LAYOUTS:
        return GROUP_LAYOUTS[fmt].scale_words(cols)
    layout = BLOCK_LAYOUTS[fmt]
    return -(-cols // layout.columns) * layout.scale_words


def data_words(fmt: str, cols: int) -> int:
    """Words of weights in a row of ``cols``, scales apart."""
    if fmt in PER_WORD:
        return -(-cols // PER_WORD[fmt])
    return cols // BLOCK * (GROUP_LAYOUTS.get(fmt) or BLOCK_LAYOUTS[fmt]).block_words


def units(fmt: str, cols: int) -> int:
    """How many times the kernels decode to get a row: 1, 2, 4 or 8 weights at a time."""
    if fmt in PER_WORD:
        return data_words(fmt, cols)
    return cols // (4 if is_bytes(fmt) else 8)


def is_bytes(fmt: str) -> bool:
    """Whether a weight is a signed byte, four to a word."""
    return fmt == "q8_0" or (fmt in GROUP_LAYOUTS and GROUP_LAYOUTS[fmt].bits == 8)


def shader_format(fmt: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """The shaders' name of a format, and the specialization constants it adds to those of a kernel."""
    if fmt in GROUP_LAYOUTS:
        return f"int{GROUP_LAYOUTS[fmt].bits}", (("group", GROUP_LAYOUTS[fmt].group),)
    return fmt, ()


def row_words(fmt: str, cols: int) -> int:
    """32-bit words of one row of ``cols`` weights. ``ValueError`` for an unknown format or a ``cols``
    that the format's blocks do not divide."""
    if fmt not in FORMATS:
        raise ValueError(f"weight format {fmt!r} is not supported (supported: {', '.join(FORMATS)})")
    if cols < 1:
        raise ValueError(f"a row of {cols} weights: must be at least 1")
    block = 1 if fmt in PER_WORD else BLOCK if fmt in GROUP_LAYOUTS else BLOCK_LAYOUTS[fmt].block
    if cols % block:
        raise ValueError(f"{fmt} rows are blocks of {block} weights: {cols} columns are not a multiple")
    return scale_words(fmt, cols) + data_words(fmt, cols)


def padded_rows(rows: int) -> int:
    """Rows with the zero rows of the last group."""
    return -(-rows // ROWS) * ROWS


def matrix_words(fmt: str, rows: int, cols: int) -> int:
    """32-bit words of a whole matrix, padding included."""
    return padded_rows(rows) * row_words(fmt, cols)
