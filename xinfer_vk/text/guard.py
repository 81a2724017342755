"""Calls into the ``tokenizers`` library, whose errors are of every kind, with one kind of error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted


def guarded(where: str, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``call(*args, **options)``; whatever goes wrong becomes ``ModelError(where: what: why)``.

    The library is written in Rust. Besides ordinary exceptions it panics on some damaged files, and a
    panic arrives as a ``BaseException`` that ``except Exception`` lets through.
    """
    try:
        return call(*args, **options)
    except Exception as e:
        why = str(e)
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        why = str(e)
    why = " ".join(why.split()) or "unknown error"
    raise ModelError(f"{where}: {what}: {why if why.isascii() and len(why) <= 160 else quoted(why)}")
