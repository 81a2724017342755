"""``xinfer-vk inspect``: what a model's files say, and whether the model can be run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.completion import complete_model
from xinfer_vk.cli.output import say, say_json
from xinfer_vk.cli.progress import ProgressBar

if TYPE_CHECKING:
    from xinfer_vk.engine.inspect import Inspection

# Fields of the configuration that the summary tells in words of its own, or that say nothing by themselves.
TOLD = {
    "architecture", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim",
    "vocab_size", "max_position", "eos_token_ids", "bos_token_id", "rope_theta", "rope_scaling",
    "layer_windows", "layer_ropes", "experts",
}  # fmt: skip


@click.command("inspect")
@click.argument("model", shell_complete=complete_model)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, as_json: bool) -> None:
    """Show what MODEL (a directory, .gguf file, hub name or downloaded model) contains: architecture,
    dimensions, tensors by number format, tokenizer and chat template; and why it cannot run, if it cannot.

    Reads no weights and uses no device. The exit code is 1 if the model cannot run.
    """
    from xinfer_vk.engine.inspect import inspect_model
    from xinfer_vk.weights.hub import resolve_model

    with ProgressBar() as progress:
        found = inspect_model(resolve_model(model, progress))
    if as_json:
        say_json({**asdict(found), "path": str(found.path), "weights": found.weights})
    else:
        _print(found)
    if found.unsupported:
        raise click.exceptions.Exit(1)


def _print(found: Inspection) -> None:
    from xinfer_vk.units import format_bytes

    c = found.config
    rows: list[tuple[str, str]] = []
    if found.kind:
        size = f", {format_bytes(found.file_bytes)}" if found.file_bytes else ""
        rows.append(("file", f"{found.kind}{size}"))
    if c:
        rows.append(("architecture", str(c["architecture"])))
    if "layers" in c:
        rows += [
            ("dimensions", f"{c['layers']} layers, hidden {c['hidden_size']}, MLP {c['intermediate_size']}"),
            *([("experts", _experts(c))] if c["experts"] else []),
            ("attention", f"{c['heads']} heads, {c['kv_heads']} KV heads, head dim {c['head_dim']}"),
            ("vocabulary", f"{c['vocab_size']} tokens"),
            ("context", f"{c['max_position']} tokens{_windows(c)}"),
            ("RoPE", _rope(c)),
            ("more", ", ".join(f"{k} {_short(v)}" for k, v in c.items() if k not in TOLD and _says(v))),
        ]
    if found.formats:
        rows.append(("weights", f"{found.weights / 1e6:.1f} M, {found.bits_per_weight:.2f} bits each"))
        for fmt, f in found.formats.items():
            count = f"{f.tensors} tensor" + "s" * (f.tensors > 1)
            rows.append(("", f"{fmt}: {count}, {f.weights / 1e6:.1f} M, {format_bytes(f.bytes)}"))
    if t := found.tokenizer:
        rows.append(("tokenizer", f"{t['kind']}, {t['tokens']} tokens"))
        if t["around_a_text"]:
            rows.append(("", f"around every text: {_tokens(t['around_a_text'])}"))
        rows.append(("", f"a text ends at {_tokens(t['ends']) or 'no token'}"))
    if t := found.chat_template:
        rows.append(("chat template", f"{t['characters']} characters" if t["present"] else "none"))
        if t.get("variables"):
            rows.append(("", f"--template-arg can set {', '.join(t['variables'])}"))
    rows += [("not used", note) for note in found.notes]
    rows += [("not supported", problem) for problem in found.unsupported] or [("", "can be run")]
    say(found.name)
    for name, text in rows:
        say(f"  {name:<14}{text}")


def _experts(c: dict[str, Any]) -> str:
    e = c["experts"]
    layers = sum(e.layers)
    where = "every layer" if layers == c["layers"] else f"{layers} of {c['layers']} layers"
    return f"{e.count} in {where}, {e.per_token} for a token, MLP {e.width} each"


def _windows(c: dict[str, Any]) -> str:
    windows = [w for w in c["layer_windows"] if w]
    return f"; {len(windows)} layers see the last {windows[0]}" if windows else ""


def _rope(c: dict[str, Any]) -> str:
    scaling = c["rope_scaling"]
    scaled = f", {scaling.type} scaling" if scaling else ""
    scaled += f" by {scaling.factor:g}" if scaling and scaling.factor != 1.0 else ""
    without = sum(rope is None for rope in c["layer_ropes"])
    return f"theta {c['rope_theta']:g}{scaled}" + (f"; {without} layers without" if without else "")


def _says(value: Any) -> bool:
    return value is True or value not in (None, False, 0.0, 1.0, ())


def _short(value: Any) -> str:
    return "yes" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


def _tokens(tokens: dict[int, str]) -> str:
    return ", ".join(f"{i} {text!r}" for i, text in tokens.items())
