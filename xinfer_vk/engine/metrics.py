"""What a generation cost: counts and times, and the line that sums them up.

TTFT is the time from the call to the first token: prompt encoding, compiling and prefill included,
loading not.
Decode counts the steps after prefill: the first generated token comes out of the prefill itself.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

FELT_S = 0.05  # compiling of less is not told


@dataclass(repr=False)
class Metrics:
    """Times in seconds; the device is synchronised at every token."""

    load_s: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # those of the prompt that were in the cache already
    prefilled_tokens: int = 0  # those that were run
    prefill_s: float = 0.0
    compile_s: float = 0.0  # making pipelines and recording plans on first use; not in the rates
    ttft_s: float = 0.0
    ttft_compile_s: float = 0.0  # of compile_s, what fell into TTFT
    token_s: list[float] = field(default_factory=list)  # of each token after the first: TPOT
    dispatches_per_token: int = 0
    bytes_read_per_token: float = 0.0
    kv_bytes: int = 0
    weight_bytes: int = 0
    peak_host_bytes: int = 0
    device_bytes: int = 0

    def __repr__(self) -> str:
        return f"<Metrics {self.timing_line()}>"

    @property
    def decode_tokens(self) -> int:
        """Those after the first."""
        return len(self.token_s)

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return sum(self.token_s)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens run per second (PP)."""
        return self.prefilled_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second after the first (TG)."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    def timing_line(self) -> str:
        """``prefill: 26 tok in 69 ms (378 tok/s) | decode: 7 tok in 0.23 s (30.5 tok/s)``, and after them
        ``| compiling: 3.10 s`` if so much went into kernels that it is felt."""
        prefill, decode = format_seconds(self.prefill_s), format_seconds(self.decode_s)
        compiling = f" | compiling: {format_seconds(self.compile_s)}" if self.compile_s >= FELT_S else ""
        return (
            f"prefill: {self.prefilled_tokens} tok in {prefill} ({format_rate(self.prefill_rate)} tok/s) | "
            f"decode: {self.decode_tokens} tok in {decode} ({format_rate(self.decode_rate)} tok/s){compiling}"
        )

    def tpot_s(self, percentile: float | None = None) -> float:
        """Time per output token after the first: the mean, or a percentile (nearest rank)."""
        if not self.token_s:
            return 0.0
        if percentile is None:
            return self.decode_s / len(self.token_s)
        rank = max(1, math.ceil(percentile / 100 * len(self.token_s)))
        return sorted(self.token_s)[rank - 1]

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["token_s"]
        return {
            **fields,
            "decode_tokens": self.decode_tokens,
            "decode_s": self.decode_s,
            "tpot_mean_s": self.tpot_s(),
            "tpot_p50_s": self.tpot_s(50),
            "tpot_p99_s": self.tpot_s(99),
            "prefill_tok_per_s": self.prefill_rate,
            "decode_tok_per_s": self.decode_rate,
        }


def format_seconds(seconds: float) -> str:
    """Three significant digits or so: ``69 ms`` below 0.1 s, ``0.23 s`` above."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def format_rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"


def reset_peak_host_bytes() -> None:
    """Start again, where the system can (Linux, proc(5): clear_refs)."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass


def peak_host_bytes() -> int:
    """The most memory this process has had resident so far; 0 where the system does not tell.

    Linux's own ``VmHWM`` comes first: ``ru_maxrss`` begins at the size of the process that started this one.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
