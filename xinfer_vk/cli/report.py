"""What generate tells about a run: in words, as a table, as a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xinfer_vk.cache import KV_BYTES
from xinfer_vk.engine.metrics import format_rate, format_seconds
from xinfer_vk.sampling.params import RECOMMENDED
from xinfer_vk.units import format_bytes

if TYPE_CHECKING:
    from xinfer_vk.engine.llm import LLM, GenerationResult
    from xinfer_vk.sampling.logprobs import TokenLogprobs
    from xinfer_vk.sampling.params import SamplingParams


def describe(llm: LLM) -> str:
    """The model and where it runs."""
    return (
        f"model: {llm.name} ({llm.config.architecture}, {format_bytes(llm.weight_bytes)} of weights)\n"
        f"device: {llm.runtime.profile.name} ({llm.runtime.driver})\n"
        f"loaded in {format_seconds(llm.load_s)}"
    )


def recommends(generation_config: Mapping[str, Any]) -> bool:
    """Whether a model's files have sampling values that its makers recommend. GGUF files have none."""
    return any(generation_config.get(name) is not None for name in ("do_sample", *RECOMMENDED))


def describe_recommended(llm: LLM, params: SamplingParams) -> str:
    """The sampling values of a model that its makers recommend, or that there are none."""
    if not recommends(llm.generation_config):
        return f"--recommended: {llm.name} recommends no sampling values, so the defaults are used"
    values = {name: getattr(params, name) for name in RECOMMENDED}
    return "recommended: " + ", ".join(f"{name} {value:g}" for name, value in values.items())


def describe_run(llm: LLM, result: GenerationResult) -> str:
    """The KV cache by its formula, TTFT, traffic and memory."""
    m, c = result.metrics, llm.config
    return (
        f"KV cache: {format_bytes(m.kv_bytes)} = 2 · {c.layers} layers · {llm.cached_tokens} tokens · "
        f"{c.kv_heads} KV heads · {c.head_dim} head dim · {KV_BYTES[llm.kv_dtype]:g} bytes\n"
        f"TTFT: {format_seconds(m.ttft_s)}, {format_seconds(m.ttft_compile_s)} of it compiling "
        f"({format_seconds(m.compile_s)} in all); "
        f"{m.dispatches_per_token} dispatches and {m.bytes_read_per_token:.0f} bytes read back per token; "
        f"peak memory {format_bytes(m.peak_host_bytes)} host, {format_bytes(m.device_bytes)} device"
    )


def speed_report(result: GenerationResult) -> str:
    """TTFT, TPOT (mean, median, 99th percentile), PP and TG, a line each."""
    m = result.metrics
    tpot = "  ".join(
        f"{name} {1e3 * m.tpot_s(percentile):.1f} ms"
        for name, percentile in (("mean", None), ("p50", 50.0), ("p99", 99.0))
    )
    return (
        f"TTFT: {format_seconds(m.ttft_s)}\n"
        f"TPOT: {tpot}\n"
        f"PP: {format_rate(m.prefill_rate)} tok/s ({m.prefilled_tokens} tokens)\n"
        f"TG: {format_rate(m.decode_rate)} tok/s ({m.decode_tokens} tokens)"
    )


def as_record(llm: LLM, result: GenerationResult) -> dict[str, Any]:
    """What ``--json`` prints."""
    record: dict[str, Any] = {
        "model": llm.name,
        "device": llm.runtime.profile.name,
        "driver": llm.runtime.driver,
        "dtype": llm.dtype,
        "kv_dtype": llm.kv_dtype,
        "activations": llm.activations,
        "context": llm.capacity,
        "sample": result.sample,
        "seed": result.seed,
        "text": result.text,
        **({"thinking": result.thinking} if llm.thinks else {}),
        "token_ids": list(result.token_ids),
        "prompt_tokens": len(result.prompt_token_ids),
        "finish_reason": result.finish_reason,
        "stop": result.stop,
        "metrics": result.metrics.as_dict(),
    }
    if result.logprobs is not None:
        record["logprobs"] = [_logprob_record(llm, entry) for entry in result.logprobs]
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_logprob_record(llm, entry) for entry in result.prompt_logprobs]
    return record


def _logprob_record(llm: LLM, entry: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": entry.token,
        "token": _shown(llm, entry.token),
        "logprob": entry.logprob,
        "rank": entry.rank,
        "top": [{"token_id": t, "token": _shown(llm, t), "logprob": value} for t, value in entry.top],
    }


def logprob_table(llm: LLM, result: GenerationResult) -> str:
    """Log-probabilities, a token a line: its text, its own, its rank, and the most likely ones."""
    entries = [*(result.prompt_logprobs or ()), *(result.logprobs or ())]
    lines = []
    for entry in entries:
        top = "  ".join(f"{_shown(llm, t)!r} {value:.3f}" for t, value in entry.top)
        lines.append(
            f"{_shown(llm, entry.token)!r:>20} {entry.logprob:8.3f}  rank {entry.rank:<6} {top}".rstrip()
        )
    return "\n".join(lines)


def _shown(llm: LLM, token: int) -> str:
    return llm.tokenizer.token_bytes(token).decode("utf-8", errors="replace")
