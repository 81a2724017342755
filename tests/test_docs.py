"""README.md and docs/: links that lead somewhere, and the README's Python, which runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xinfer_vk.weights.pull import DEMO, is_present

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
         *sorted((ROOT / "docs").glob("*.md"))]  # fmt: skip


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).strip().replace(" ", "-") for h in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^()\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in headings(path), f"{page.name}: {target}"


def test_every_page_of_docs_is_linked_from_another() -> None:
    text = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for page in (ROOT / "docs").glob("*.md"):
        assert any(page.name in text[other] for other in PAGES if other != page), page.name


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    if not is_present(DEMO):
        pytest.skip("needs the demo model: xinfer-vk pull smollm2-135m")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code + "\nassert 'Paris' in result.text and logits.dtype == 'float32'"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
