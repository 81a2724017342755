"""Writes docs/api.md from the package's docstrings: ``python docs/make_api.py``. A test compares the two."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xinfer_vk
from xinfer_vk import errors
from xinfer_vk.engine.metrics import Metrics
from xinfer_vk.engine.perplexity import Perplexity
from xinfer_vk.engine.session import ChatSession
from xinfer_vk.sampling.logprobs import TokenLogprobs

PAGE = Path(__file__).with_name("api.md")
RETURNED = (ChatSession, Perplexity, Metrics, TokenLogprobs)  # what methods return
CONSTRUCTED = ("LLM", "EngineConfig", "SamplingParams")  # what users make themselves
HEAD = """# Python API

`docs/make_api.py` writes this page from the docstrings: run `python docs/make_api.py` after changing one.
The names under "xinfer_vk" are public; `from xinfer_vk import LLM` imports the first of them. The classes
under "What methods return" are made by the package, not by you.
"""


def page() -> str:
    exported = [getattr(xinfer_vk, name) for name in xinfer_vk.__all__ if name != "__version__"]
    failures = [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, errors.XinferError)]
    lines = [HEAD, "## xinfer_vk", ""]
    for thing in exported:
        if thing not in failures:
            lines += entry(thing)
    lines += ["## What methods return", ""]
    for thing in RETURNED:
        if thing not in exported:
            lines += entry(thing)
    lines += ["## Errors", "", f"In `{errors.__name__}`. {paragraph(errors, 1)}", ""]
    lines += ["| class | exit code | meaning |", "|---|---|---|"]
    for error in failures:
        lines.append(f"| `{error.__name__}` | {error.exit_code} | {paragraph(error)} |")
    return "\n".join(lines) + "\n"


def entry(thing: Any) -> Iterator[str]:
    """A class or function: its signature, docstring, and what it has."""
    yield f"### {thing.__name__}"
    yield ""
    if not inspect.isclass(thing):
        yield from (f"`{thing.__name__}{signature(thing)}`", "", text_of(thing), "")
        return
    fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    made_by_users = thing.__name__ in CONSTRUCTED
    if made_by_users:
        yield from (f"`{thing.__name__}{signature(thing.__init__)}`", "")
    yield from (text_of(thing), "")
    if fields and not made_by_users:
        yield "Fields: " + ", ".join(f"`{f.name}: {plain(str(f.type))}`" for f in fields) + "."
        yield ""
    for name, member in members(thing):
        kind = "" if callable(member) else f": {plain(str(returned(member)))}"
        shown = f"{name}{signature(member) if callable(member) else kind}"
        yield f"- `{shown}`"
        if paragraph(member):
            yield f"  {paragraph(member)}"
    yield ""


def members(thing: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, in the order of the source."""
    for name, member in vars(thing).items():
        if name.startswith("_"):
            continue
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if isinstance(function, property) or inspect.isfunction(function):
            yield name, function


def returned(member: property) -> str:
    assert member.fget is not None
    return str(member.fget.__annotations__.get("return", "Any"))


def signature(function: Any) -> str:
    found = inspect.signature(function)
    kept = [p for name, p in found.parameters.items() if name not in ("self", "cls")]
    return plain(str(found.replace(parameters=kept))).removesuffix(" -> None")


def plain(text: str) -> str:
    """Annotations without the quotes that ``from __future__ import annotations`` gives them."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def text_of(thing: Any) -> str:
    """The whole docstring as Markdown; code blocks stay."""
    return markdown(inspect.getdoc(thing) or "")


def paragraph(thing: Any, which: int = 0) -> str:
    """A paragraph of the docstring, as one line."""
    parts = (inspect.getdoc(thing) or "").split("\n\n")
    text = " ".join(markdown(parts[which]).split()) if which < len(parts) else ""
    return re.sub(r"::$", ".", text)


def markdown(text: str) -> str:
    text = re.sub(r":\w+:`([^`<]*) <[^`]*>`", r"`\1`", text)
    text = re.sub(r":(?:class|meth|func|data|mod):`~?([^`]*)`", lambda m: f"`{m[1].split('.')[-1]}`", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
