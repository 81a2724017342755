"""Names that users type: matched whatever their case and by unique prefix, and suggested for near misses."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from xinfer_vk.errors import UsageError
from xinfer_vk.fields import quoted


def match_name(text: str, names: Iterable[str], what: str) -> str | None:
    """The one of ``names`` that ``text`` means: the same but for case, or the only one it begins.

    ``what`` they are ("model") is for the error. None if none fits. Raises :class:`UsageError` if several do.
    """
    lower = text.lower()
    names = list(dict.fromkeys(names))
    if text in names:
        return text
    same = [name for name in names if name.lower() == lower]
    found = same or [name for name in names if lower and name.lower().startswith(lower)]
    if len(found) > 1:
        raise UsageError(f"the {what} {quoted(text)} is ambiguous: choose from {', '.join(found)}")
    return found[0] if found else None


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """``"did you mean X?"`` for the nearest name, or of several that are as near; empty if none is near."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(text.lower(), by_lower, n=3, cutoff=0.7)
    return f"did you mean {' or '.join(by_lower[name] for name in near)}?" if near else ""
