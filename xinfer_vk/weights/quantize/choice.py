"""Which tensor of a model gets which number format when the model is quantized.

The rules are those of llama.cpp's ``llama-quantize`` where it is asked for one type (its "pure" mixtures,
Q4_K_S without the exceptions for single layers):
- Vectors (norms, biases) and the router of a mixture of experts stay floats: they are small, and one wrong
  bit of theirs is in every token.
- The output head, which is the embedding where the two are tied, gets Q6_K beside 4-bit types: errors of
  logits are not averaged over anything.
- Where a row is not whole blocks of 256, the nearest type of blocks of 32 takes its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from xinfer_vk.errors import UsageError
from xinfer_vk.weights.formats import fitting_format

TYPES = ("q8_0", "q6_k", "q4_k", "q4_1", "q4_0")  # that a model can be quantized to
FOUR_BITS = ("q4_k", "q4_1", "q4_0")

# Names as Hugging Face and as GGUF files have them.
HEADS = ("lm_head.weight", "output.weight")
EMBEDDINGS = ("model.embed_tokens.weight", "token_embd.weight")
ROUTER = re.compile(r"\.(mlp\.gate|block_sparse_moe\.gate|ffn_gate_inp)\.weight$")


@dataclass(frozen=True)
class Choice:
    """``fmt``: what the tensor becomes; None: it stays as it is. ``fallback``: why it is another format
    than was asked for, empty if it is not."""

    fmt: str | None
    fallback: str = ""


def check_type(name: str, supported: Sequence[str] = TYPES) -> None:
    """Raises :class:`UsageError` for a type that models cannot be quantized to."""
    if name not in supported:
        raise UsageError(f"cannot quantize to {name!r}: supported are {', '.join(supported)}")


def choose(kind: str, name: str, shape: tuple[int, ...], *, tied: bool) -> Choice:
    """What the tensor ``name`` becomes in a model quantized to ``kind``. ``tied``: the embedding is the
    output head too."""
    if len(shape) < 2 or ROUTER.search(name):
        return Choice(None)
    wanted = kind
    if kind in FOUR_BITS and (name in HEADS or (tied and name in EMBEDDINGS)):
        wanted = "q6_k"
    cols = shape[-1]
    fitting = fitting_format(wanted, cols)
    if fitting == wanted:
        return Choice(wanted)
    if fitting == "f16":
        return Choice(None, f"not quantized: {cols} columns are not whole blocks of 32")
    return Choice(fitting, f"{fitting} instead of {wanted}: {cols} columns are not whole blocks of 256")
