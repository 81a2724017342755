"""docs/api.md says what Python offers, as the docstrings have it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import xinfer_vk

DOCS = Path(__file__).parent.parent / "docs"


def written():
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()


def test_the_page_is_what_the_docstrings_say():
    page, now = (DOCS / "api.md").read_text(encoding="utf-8"), written()
    missing = [line for line in now.splitlines() if line not in page]
    extra = [line for line in page.splitlines() if line not in now]
    assert page == now, f"run `python docs/make_api.py`: docs/api.md lacks {missing} and still has {extra}"


def test_every_public_name_is_on_the_page():
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in xinfer_vk.__all__:
        assert name == "__version__" or f"### {name}\n" in page or f"| `{name}` |" in page, name
    for name in vars(xinfer_vk.LLM):
        assert name.startswith("_") or f"`{name}" in page, name
