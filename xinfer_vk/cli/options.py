"""The options that commands share: which model on which device, and how tokens are chosen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from xinfer_vk.cli.completion import complete_model
from xinfer_vk.cli.source import check_unicode
from xinfer_vk.errors import UsageError
from xinfer_vk.fields import quoted

if TYPE_CHECKING:
    from xinfer_vk.sampling.params import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

# Option name → field of SamplingParams, where they differ.
FIELDS = {"stop_token_id": "stop_token_ids", "bad_word": "bad_words"}
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "penalty_window", "seed", "stop", "stop_token_id", "min_new_tokens", "bad_word",
)  # fmt: skip

# Those of weights/quantize/choice.py, which takes long to import.
QUANTIZE_TYPES = ("q8_0", "q6_k", "q4_k", "q4_1", "q4_0")

KV_DTYPES = ("f16", "f32", "q8_0", "q4_0")

TUNE_OPTION = click.option(
    "--tune",
    type=click.Choice(["off", "quick", "full"]),
    default="quick",
    show_default=True,
    help="How thoroughly to search for the fastest GPU kernels on a model's first run.",
)

ACTIVATIONS_OPTION = click.option(
    "--activations",
    type=click.Choice(["f32", "int8"]),
    default="f32",
    show_default=True,
    help="int8 rounds the inputs of matrix products to 8 bits: results are approximate.",
)

MODEL_ARGUMENTS = ("model", "device", "kv_dtype", "quantize", "tune", "activations")
MODEL_OPTIONS = [
    click.option(
        "--model",
        "-m",
        default="smollm2-135m",
        show_default=True,
        shell_complete=complete_model,
        help="Hugging Face directory, .gguf file, hub name, or downloaded model (a unique prefix is enough).",
    ),
    click.option("--device", "-d", help="Device index, part of its name, or numpy. [default: best GPU]"),
    click.option(
        "--kv-dtype",
        type=click.Choice(KV_DTYPES),
        default="f16",
        show_default=True,
        help="Number format of the KV cache.",
    ),
    click.option(
        "--quantize",
        type=click.Choice(QUANTIZE_TYPES),
        help="Quantize an f16, bf16 or f32 model to this format while loading.",
    ),
    ACTIVATIONS_OPTION,
    TUNE_OPTION,
]

OPTIONS = [
    click.option(
        "--temperature", "--temp", "-t", "temperature", type=float,
        help="0 is greedy; higher is more varied. [default: 0]",
    ),
    click.option("--top-k", type=int, help="Keep the K most likely tokens; 0 is off. [default: 0]"),
    click.option(
        "--top-p", type=float, help="Keep the likeliest tokens up to this probability mass. [default: 1]"
    ),
    click.option(
        "--min-p", type=float,
        help="Keep tokens with at least this fraction of the top probability. [default: 0]",
    ),
    click.option(
        "--typical-p", type=float, help="Locally typical sampling up to this probability mass. [default: 1]"
    ),
    click.option(
        "--repetition-penalty", type=float, help="Divide the logits of earlier tokens by this. [default: 1]"
    ),
    click.option(
        "--presence-penalty", type=float, help="Subtract this from logits of earlier tokens. [default: 0]"
    ),
    click.option(
        "--frequency-penalty", type=float, help="Subtract this for each earlier occurrence. [default: 0]"
    ),
    click.option(
        "--penalty-window", type=int, help="Number of last tokens that penalties cover. [default: all]"
    ),
    click.option(
        "--logit-bias", multiple=True, metavar="ID=VALUE",
        help="Add VALUE to the logit of token ID. May be repeated.",
    ),
    click.option("--seed", type=int, help="The same seed gives the same tokens. [default: random]"),
    click.option("--stop", multiple=True, help="Stop before this text or special token. May be repeated."),
    click.option("--stop-token-id", type=int, multiple=True, help="Stop at this token. May be repeated."),
    click.option("--min-new-tokens", type=int, help="Minimum number of new tokens. [default: 0]"),
    click.option("--bad-word", multiple=True, help="Never generate this text. May be repeated."),
    click.option(
        "--sampler-order", metavar="STAGES", help="Order of the sampling stages, separated by commas."
    ),
    click.option(
        "--recommended", is_flag=True, help="Start from the sampling values that the model recommends."
    ),
    click.option(
        "--sampler",
        type=click.Choice(["device", "cpu"]),
        default="device",
        show_default=True,
        help="Where to choose tokens.",
    ),
]  # fmt: skip

TEMPLATE_OPTION = click.option(
    "--template-arg",
    "template_arg",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a chat template variable, for example enable_thinking=false. May be repeated.",
)


class MemorySize(click.ParamType):
    """Bytes, with or without a unit, or a share of what is free: 2GB, 512MiB, 50%."""

    name = "SIZE"
    UNITS = MappingProxyType(
        {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
    )

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float | None:
        if value is None or isinstance(value, (int, float)):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|(?:([kmg]i?)b?|b)?)", str(value).strip().lower())
        number = float(found[1]) if found else 0.0
        share = found is not None and found[2] == "%"
        if found is None or number <= 0 or (share and number > 100):
            raise UsageError(
                f"--kv-memory {quoted(value)}: write a size such as 2GB or 512MiB, or a share of what is "
                "free such as 50%"
            )
        return number / 100 if share else max(1, int(number * self.UNITS[found[3] or ""]))


KV_MEMORY_OPTION = click.option(
    "--kv-memory",
    type=MemorySize(),
    help="Memory of the KV cache, for all sequences: 2GB, 512MiB, or a share of what is free, 50%. "
    "[default: one context]",
)


def template_args_from_options(options: Sequence[str]) -> dict[str, Any]:
    """``--template-arg NAME=VALUE``, several: a value that is JSON is what it says, any other is text."""
    out: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(
                f"--template-arg {quoted(option)}: write it as NAME=VALUE, for example enable_thinking=false"
            )
        check_unicode(text, "--template-arg")
        if name in out:
            raise UsageError(f"--template-arg sets {name} twice: set it once")
        try:
            out[name] = json.loads(text.lower() if text in ("True", "False") else text)
        except (ValueError, RecursionError):
            out[name] = text
    return out


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --model, --device, --kv-dtype, --quantize, --tune and --activations. The command gets them as
    ``chosen``, the arguments of an :class:`~xinfer_vk.engine.llm.LLM`."""

    @wraps(command)
    def gathered(*args: Any, **values: Any) -> Any:
        return command(*args, chosen={name: values.pop(name) for name in MODEL_ARGUMENTS}, **values)

    for option in reversed(MODEL_OPTIONS):
        gathered = option(gathered)
    return gathered


def sampling_options(command: F) -> F:
    """Adds every sampling option to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def params_from_options(
    options: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, **fields: Any
) -> SamplingParams:
    """What the options say, over what ``generation_config`` recommends if ``recommended`` was given.

    ``fields``: others of SamplingParams. Raises :class:`UsageError`, naming the parameter.
    """
    from xinfer_vk.sampling.params import SamplingParams

    base = SamplingParams()
    if options.get("recommended"):
        base = SamplingParams.from_generation_config(generation_config or {})
    given = {
        FIELDS.get(name, name): value
        for name in SAMPLING
        if (value := options.get(name)) is not None and value != ()
    }
    check_unicode([given.get("stop"), given.get("bad_words")], "--stop or --bad-word")
    if biases := options.get("logit_bias"):
        given["logit_bias"] = dict(_bias(text) for text in biases)
    if (order := options.get("sampler_order")) is not None:
        given["sampler_order"] = tuple(stage.strip().replace("-", "_") for stage in order.split(","))
    return base.replace(**{**given, **fields})


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise UsageError(f"--logit-bias {text!r}: write it as TOKEN_ID=VALUE, for example 42=-1.5") from None
