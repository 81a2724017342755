"""What every kernel module speaks in: where a tensor lies, and how work is cut into workgroups."""

from __future__ import annotations

from dataclasses import dataclass

from xinfer_vk.kernels import state as state_words
from xinfer_vk.plan import Buffer

# What a kernel may count its rows by: the word of the state buffer with how many are in use.
COUNTS = {"tokens": state_words.N_TOKENS, "outputs": state_words.N_OUTPUTS}


@dataclass(frozen=True)
class Ref:
    """A place in a buffer: ``offset`` in 32-bit words. A tensor there is row-major."""

    buffer: Buffer
    offset: int = 0


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a weight matrix, ``first_row`` a multiple of 8, at ``offset`` words of
    ``buffer``. A matrix over the device's storage-buffer range is several of these."""

    buffer: Buffer
    offset: int
    first_row: int
    rows: int


def ceil_div(n: int, d: int) -> int:
    """``n / d`` rounded up."""
    return -(-n // d)
