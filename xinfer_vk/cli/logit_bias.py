"""``logit_bias`` in JSON, which has only texts for keys and no infinity: ``{"42": -1.5, "7": "-inf"}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_DIGITS = 20  # longer ones are no token ids, and Python does not convert the longest


def bias_from_json(value: Any) -> Any:
    """As SamplingParams takes it. What cannot be read stays as it is, for SamplingParams to refuse."""
    if not isinstance(value, Mapping):
        return value
    return {_token(token): -math.inf if bias == "-inf" else bias for token, bias in value.items()}


def bias_to_json(bias: Mapping[int, float]) -> dict[str, Any]:
    """The inverse of :func:`bias_from_json`."""
    return {str(token): "-inf" if value == -math.inf else value for token, value in bias.items()}


def _token(text: Any) -> Any:
    if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS:
        return int(text)
    return text
