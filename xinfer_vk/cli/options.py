"""The options that commands share: which model on which device, and how tokens are chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
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
    help="How thoroughly to search for a GPU's fastest kernels on a model's first run.",
)

ACTIVATIONS_OPTION = click.option(
    "--activations",
    type=click.Choice(["f32", "int8"]),
    default="f32",
    show_default=True,
    help="int8 rounds the inputs of matrix products to 8 bits; results are not exact.",
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
    click.option("--top-k", type=int, help="Only the K most likely tokens; 0 is off. [default: 0]"),
    click.option("--top-p", type=float, help="Nucleus sampling: keep tokens up to this mass. [default: 1]"),
    click.option("--min-p", type=float, help="Tokens with this share of the top probability. [default: 0]"),
    click.option(
        "--typical-p", type=float,
        help="Locally typical sampling: keep tokens up to this mass. [default: 1]",
    ),
    click.option("--repetition-penalty", type=float, help="Divide the logits of tokens seen. [default: 1]"),
    click.option("--presence-penalty", type=float, help="Subtract once from tokens seen. [default: 0]"),
    click.option("--frequency-penalty", type=float, help="Subtract for each time seen. [default: 0]"),
    click.option("--penalty-window", type=int, help="Tokens that penalties look back over. [default: all]"),
    click.option("--logit-bias", multiple=True, metavar="ID=VALUE", help="Add to a token's logit."),
    click.option("--seed", type=int, help="The same seed gives the same tokens. [default: a new one]"),
    click.option("--stop", multiple=True, help="End before this text or special token. May be repeated."),
    click.option("--stop-token-id", type=int, multiple=True, help="End at this token. May be repeated."),
    click.option("--min-new-tokens", type=int, help="Minimum number of new tokens. [default: 0]"),
    click.option("--bad-word", multiple=True, help="Text that must not appear. May be repeated."),
    click.option("--sampler-order", metavar="STAGES", help="Stages in order, separated by commas."),
    click.option("--recommended", is_flag=True, help="Start from the values the model's makers recommend."),
    click.option(
        "--sampler",
        type=click.Choice(["device", "cpu"]),
        default="device",
        show_default=True,
        help="Where tokens are chosen.",
    ),
]  # fmt: skip

TEMPLATE_OPTION = click.option(
    "--template-arg",
    "template_arg",
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable of the chat template, as in enable_thinking=false. May be repeated.",
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
