"""``xinfer-vk estimate``: what a model needs of a device's memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.completion import complete_model, complete_shape
from xinfer_vk.cli.estimate_bar import legend, save_estimate_plot, text_bar
from xinfer_vk.cli.options import ACTIVATIONS_OPTION, KV_DTYPES, QUANTIZE_TYPES
from xinfer_vk.cli.output import say, say_json, tell
from xinfer_vk.cli.plots import check_plot, plot_title
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from xinfer_vk.engine.config import Activations
    from xinfer_vk.engine.estimate import Estimate, Fit
    from xinfer_vk.weights.source import ModelSource

DEFAULT_CONTEXT = 4096


@click.command("estimate")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option(
    "--shape",
    shell_complete=complete_shape,
    help="A published model's shape instead of a file; 'list' prints the known shapes.",
)
@click.option(
    "--context",
    "-c",
    type=click.IntRange(min=1),
    help=f"Tokens per sequence. [default: {DEFAULT_CONTEXT}, or the model's context if that is less]",
)
@click.option(
    "--batch", "-b", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences per batch."
)
@click.option(
    "--kv-dtype",
    type=click.Choice(KV_DTYPES),
    default="f16",
    show_default=True,
    help="Number format of the KV cache.",
)
@click.option("--quantize", type=click.Choice(QUANTIZE_TYPES), help="As in generate.")
@ACTIVATIONS_OPTION
@click.option("--device", "-d", help="Device index, part of its name, or numpy. [default: all devices]")
@click.option("--plot", type=click.Path(), metavar="FILE.png", help="Plot the memory as bars.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str | None,
    shape: str | None,
    context: int | None,
    batch: int,
    kv_dtype: str,
    quantize: str | None,
    activations: Activations,
    device: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Estimate how much device memory MODEL, or a known shape, needs for weights, KV cache and activations,
    which devices of this machine it fits on, and the longest context that fits.

    Nothing is loaded or allocated; the figures are exactly what a run would allocate.
    """
    from xinfer_vk.engine.config import DEFAULT_MODEL, EngineConfig
    from xinfer_vk.engine.estimate import Estimator, fit, shape_source
    from xinfer_vk.loading import open_checkpoint
    from xinfer_vk.models.shapes import SHAPES
    from xinfer_vk.reference import NUMPY_PROFILE
    from xinfer_vk.vulkan.devices import choose_device, list_devices

    if plot is not None:
        check_plot(plot)
    if (model is None) == (shape is None):
        raise UsageError("give a model, or a known one with --shape NAME (--shape list prints them)")
    if shape == "list":
        return say("\n".join(SHAPES))
    config = EngineConfig(
        model or DEFAULT_MODEL, kv_dtype=kv_dtype, quantize=quantize, activations=activations, context=context
    )
    with ExitStack() as stack:
        if model is None:
            assert shape is not None
            source = shape_source(shape)
        else:
            with ProgressBar() as progress:
                source = stack.enter_context(open_checkpoint(config, progress))
        limit = source.config.max_position
        context = min(DEFAULT_CONTEXT, limit) if context is None else context
        config.check_model(source.config, source.name)
        try:
            found = [d for d in list_devices() if not d.rejected] if device is None else []
        except DeviceError:  # no Vulkan here: the figures are for the reference
            found = []
        chosen = choose_device(device, None if device else found).device if device or found else None
        devices = found if device is None else [chosen] if chosen is not None else []
        profile = NUMPY_PROFILE if chosen is None else chosen.profile(chosen.features)
        figures = Estimator(source, profile, config).estimate(context, batch, kv_dtype)
        fits = [fit(source, d, context, batch, kv_dtype, config) for d in devices]
    asked = {
        "context": context,
        "batch": batch,
        "kv_dtype": kv_dtype,
        "quantize": quantize,
        "activations": activations,
    }
    if as_json:
        say_json(_record(source, profile.name, asked, figures, fits))
    else:
        _print(source, profile.name, asked, figures, fits)
    if plot is not None:
        save_estimate_plot(plot, _plot_title(source, profile.name, asked, fits), figures, fits)
        tell(f"plot: {plot}")


def _plot_title(source: ModelSource, device: str, asked: dict[str, Any], fits: list[Fit]) -> str:
    quantized = f" in {asked['quantize']}" if asked["quantize"] else ""
    named = plot_title([source.name + quantized], [f.device.name for f in fits] or [device])
    return f"{named}: {asked['batch']} × {asked['context']} tokens"


def _record(
    source: ModelSource, device: str, asked: dict[str, Any], figures: Estimate, fits: list[Fit]
) -> dict[str, Any]:
    return {
        "model": source.name,
        "architecture": source.config.architecture,
        **asked,
        "device": device,
        **asdict(figures),
        "total_bytes": figures.total_bytes,
        "devices": [
            {
                "index": f.device.index,
                "name": f.device.name,
                "free_bytes": f.free_bytes,
                "total_bytes": f.total_bytes,
                "fits": f.fits,
                "largest_context": f.largest_context,
            }
            for f in fits
        ],
    }


def _print(
    source: ModelSource, device: str, asked: dict[str, Any], figures: Estimate, fits: list[Fit]
) -> None:
    from xinfer_vk.units import format_bytes

    c, f = source.config, figures
    quantized = f", quantized to {asked['quantize']}" if asked["quantize"] else ""
    rounded = ", int8 activations" if asked["activations"] == "int8" else ""
    batch = f"{asked['batch']} × {asked['context']} tokens"
    say(f"{source.name} ({c.architecture}{quantized}{rounded}), {batch}, on {device}")
    value_bytes = f.kv_bytes / (2 * c.layers * c.kv_heads * c.head_dim * f.kv_tokens)
    formula = (
        f" = 2 · {c.layers} layers · {c.kv_heads} KV heads · {c.head_dim} head dim · {f.kv_tokens} tokens · "
        f"{value_bytes:g} bytes"
    )
    for name, count, more in (
        ("weights", f.weight_bytes, ""),
        ("KV cache", f.kv_bytes, formula),
        ("activations", f.activation_bytes, ""),
        ("staging", f.staging_bytes, " for uploads"),
        ("total", f.total_bytes, f", plus {format_bytes(f.sampler_bytes)} when sampling"),
    ):
        if count:
            say(f"  {name:<12} {format_bytes(count):>9}{more}")
    if f.kv_tokens < (wanted := asked["batch"] * asked["context"]):
        say(
            f"  {device} binds a KV cache of {f.kv_tokens} tokens at most, not {wanted}: "
            "sequences of a batch wait for their turns"
        )
    if c.kv_heads < c.heads:
        full = format_bytes(f.kv_full_heads_bytes)
        saved = format_bytes(f.kv_full_heads_bytes - f.kv_bytes)
        say(f"  {c.kv_heads} KV heads for {c.heads} query heads (GQA) save {saved} of {full} of full heads")
    for one in fits:
        verdict = "fits" if one.fits else "does not fit"
        most = f"longest context {one.largest_context} tokens" if one.largest_context else "no context fits"
        say(f"  {one.device.name}: {verdict}; {most} ({format_bytes(one.free_bytes)} free)")
        say(f"  {text_bar(f, one.free_bytes)}")
    if not fits:
        say(f"  {text_bar(f, None)}")
    say(f"  {legend()}")
