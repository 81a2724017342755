"""``/set``: sampling parameters from text and back, and what of them goes into a file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from xinfer_vk.cli.logit_bias import bias_from_json, bias_to_json
from xinfer_vk.cli.source import check_unicode
from xinfer_vk.errors import UsageError, parameter_words
from xinfer_vk.fields import quoted
from xinfer_vk.sampling.params import SamplingParams

DEFAULTS: dict[str, Any] = {
    f.name: getattr(SamplingParams(), f.name)
    for f in dataclasses.fields(SamplingParams)
    if f.name != "logits_processors"  # functions, which no text sets
}
SETTING = re.compile(r"\s*([\w-]+)\s*=\s*")
TRUTH = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
LISTS = ("stop", "stop_token_ids", "bad_words", "sampler_order")


def with_settings(params: SamplingParams, text: str) -> SamplingParams:
    """``params`` with the changes that a line such as ``temperature=0.7 stop="\\n"`` makes.

    A value is a word, or JSON if it begins with a quote or a bracket; "default" puts a parameter back.
    Raises :class:`UsageError`, in the words of SamplingParams where it is the value that is wrong.
    """
    changes: dict[str, Any] = {}
    for name, value in _assignments(text):
        if name in changes:
            raise UsageError(f"{name} is set twice: set it once")
        changes[name] = _value(name, value)
    return params.replace(**changes)


def _assignments(text: str) -> Iterator[tuple[str, Any]]:
    at = 0
    while text[at:].strip():
        found = SETTING.match(text, at)
        if found is None:
            raise UsageError(
                f"{quoted(text[at:].strip())} sets nothing: write NAME=VALUE, for example temperature=0.7"
            )
        at = found.end()
        if text[at : at + 1] in ('"', "[", "{"):
            try:
                value, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                raise UsageError(f"{found[1]}: {quoted(text[at:])} is not valid JSON") from None
            check_unicode(value, found[1])
        else:
            word = re.compile(r"\S*").match(text, at)
            assert word is not None
            value, at = word[0], word.end()
        yield found[1].replace("-", "_"), value


def _value(name: str, value: Any) -> Any:
    """A word as what the parameter is. What cannot be read stays as it is, for SamplingParams to refuse."""
    if name not in DEFAULTS or not isinstance(value, str):
        return bias_from_json(value) if name == "logit_bias" else value
    default = DEFAULTS[name]
    if value == "default" or (value == "none" and default in (None, ())):
        return default
    if isinstance(default, bool):
        return TRUTH.get(value.lower(), value)
    if name == "logit_bias":
        return _bias_from_text(value)
    if name in LISTS:
        return _list(name, value)
    try:
        return float(value) if isinstance(default, float) else int(value)
    except ValueError:
        return value


def _list(name: str, value: str) -> tuple[Any, ...]:
    if name in ("stop", "bad_words"):  # a text may hold commas: several are written as JSON
        return (value,)
    parts = [part.strip() for part in value.split(",")]
    if name == "sampler_order":
        return tuple(part.replace("-", "_") for part in parts)
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def _bias_from_text(value: str) -> dict[int, float]:
    """``42:-1.5,7:-inf``"""
    try:
        pairs = [pair.split(":") for pair in value.split(",")]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise UsageError(
            f"logit_bias is {quoted(value)}: write TOKEN_ID:VALUE, several with commas, as in 42:-1.5,7:-inf"
        ) from None


def settings_table(params: SamplingParams) -> list[tuple[str, str]]:
    """Every parameter and its value, with the default where it differs."""
    rows = []
    for name, default in DEFAULTS.items():
        value = getattr(params, name)
        rows.append((name, _shown(value) + ("" if value == default else f"  (default {_shown(default)})")))
    return rows


def _shown(value: Any) -> str:
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, Mapping):
        return ",".join(f"{token}:{bias:g}" for token, bias in value.items())
    if value == DEFAULTS["sampler_order"] or (
        isinstance(value, tuple) and all(isinstance(v, str) and v.isidentifier() for v in value)
    ):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def settings_record(params: SamplingParams) -> dict[str, Any]:
    """Every parameter, as JSON can hold it."""
    record = {name: getattr(params, name) for name in DEFAULTS}
    record["logit_bias"] = bias_to_json(params.logit_bias)
    return record


def settings_from_record(record: Mapping[str, Any]) -> SamplingParams:
    """The inverse of :func:`settings_record`. Raises :class:`UsageError`."""
    fields = dict(record)
    if "logit_bias" in fields:
        fields["logit_bias"] = bias_from_json(fields["logit_bias"])
    with parameter_words():
        return SamplingParams.from_dict(fields)
