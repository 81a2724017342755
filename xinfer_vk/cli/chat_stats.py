"""How full a chat's context is, and how fast it went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xinfer_vk.engine.metrics import Metrics, format_rate, format_seconds
from xinfer_vk.units import format_bytes

if TYPE_CHECKING:
    from xinfer_vk.engine.generation import GenerationResult
    from xinfer_vk.engine.session import ChatSession


@dataclass
class Totals:
    """Over the answers of this run, and the last one."""

    reused: int = 0
    prefilled: int = 0
    generated: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    last: Metrics | None = None

    def add(self, result: GenerationResult) -> None:
        m = self.last = result.metrics
        self.reused += m.reused_tokens
        self.prefilled += m.prefilled_tokens
        self.generated += len(result.token_ids)
        self.decode_tokens += m.decode_tokens
        self.decode_s += m.decode_s

    @property
    def rate(self) -> float:
        """Generated tokens per second, those after each answer's first."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


def fill(session: ChatSession) -> str:
    """``812 of 4096 tokens (20 %)``"""
    used, room = session.context_tokens, session.context
    dropped = f", {turns(session.dropped_turns)} dropped" if session.dropped_turns else ""
    return f"{used} of {room} tokens ({100 * used // room} %{dropped})"


def turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def stats_table(session: ChatSession, total: Totals) -> list[tuple[str, str]]:
    """What ``/stats`` shows."""
    llm = session.llm
    rows = [
        ("model", f"{llm.name}, {format_bytes(llm.weight_bytes)} of weights"),
        ("device", llm.runtime.profile.name),
        ("context", fill(session)),
        ("when full", session.on_full),
        ("turns", str(len(session.turns))),
    ]
    if total.last is None:
        return rows
    m = total.last
    return [
        *rows,
        ("KV cache", f"{format_bytes(m.kv_bytes)}, {llm.kv_dtype}"),
        ("last prompt", f"{m.prompt_tokens} tokens: {m.reused_tokens} reused, {m.prefilled_tokens} run"),
        ("last speed", m.timing_line()),
        ("last TTFT", format_seconds(m.ttft_s)),
        (
            "all answers",
            f"{total.reused} prompt tokens reused, {total.prefilled} run; {total.generated} tokens generated "
            f"({format_rate(total.rate)} tok/s)",
        ),
    ]
