"""Sizes as users read them: powers of ten everywhere, as those of files and rates (GB/s) are given."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """``47.2 MB``, one decimal, bytes whole."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
