"""How a weight matrix lies on the device: rows interleaved by eight, word by word ("x8").

A matrix ``W[rows, cols]`` (``y = W x``) is cut into groups of eight rows, the last one padded with
zeros. Each row of a group is a list of ``row_words(fmt, cols)`` 32-bit words, and word ``k`` of the
eight rows stand side by side::

    word index = (row // 8) * 8 * row_words + k * 8 + row % 8

Neighbouring lanes, taken over (k, row), therefore read neighbouring words at every subgroup size,
and a CPU device reads one row per lane of an eight-wide register.

Words of a row, in order (a block is 32 weights, ``nb = cols / 32``):

========  ==================================================================================
f32       ``cols`` words
f16 bf16  ``ceil(cols / 2)`` words, weight 2k in the low half; an odd last half is zero
q8_0      ``ceil(nb / 2)`` scale words (f16, block 2j low, 2j+1 high), then 8 words a block:
          word k holds the int8 weights 4k..4k+3, lowest byte first; ``w = d q``
q4_0      scales as q8_0, then 4 words a block: byte i of word k holds weight 4k+i (low
          nibble) and 16+4k+i (high nibble), the order of GGML; ``w = d (q - 8)``
q4_1      ``nb`` words (f16 d low, f16 m high), then 4 words a block as q4_0; ``w = d q + m``
========  ==================================================================================

Only the order of bits differs from the model file: no value is rounded.
"""

from __future__ import annotations

ROWS = 8  # rows interleaved in one group
BLOCK = 32  # weights of one quantized block
FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
BLOCK_FORMATS = ("q8_0", "q4_0", "q4_1")


def scale_words(fmt: str, cols: int) -> int:
    """Words of scales at the start of a row: where its quantized weights begin."""
    blocks = cols // BLOCK
    if fmt in ("q8_0", "q4_0"):
        return -(-blocks // 2)
    return blocks if fmt == "q4_1" else 0


def data_words(fmt: str, cols: int) -> int:
    """Words of weights in a row of ``cols``, scales apart."""
    per_word = {"f32": 1, "f16": 2, "bf16": 2, "q8_0": 4, "q4_0": 8, "q4_1": 8}[fmt]
    return -(-cols // per_word)


def row_words(fmt: str, cols: int) -> int:
    """32-bit words of one row of ``cols`` weights. ``ValueError`` for an unknown format or a ``cols``
    that the format's blocks do not divide."""
    if fmt not in FORMATS:
        raise ValueError(f"weight format {fmt!r} is not supported (supported: {', '.join(FORMATS)})")
    if cols < 1:
        raise ValueError(f"a row of {cols} weights: must be at least 1")
    if fmt in BLOCK_FORMATS and cols % BLOCK:
        raise ValueError(f"{fmt} rows are blocks of {BLOCK} weights: {cols} columns are not a multiple")
    return scale_words(fmt, cols) + data_words(fmt, cols)


def padded_rows(rows: int) -> int:
    """Rows with the zero rows of the last group."""
    return -(-rows // ROWS) * ROWS


def matrix_words(fmt: str, rows: int, cols: int) -> int:
    """32-bit words of a whole matrix, padding included."""
    return padded_rows(rows) * row_words(fmt, cols)
