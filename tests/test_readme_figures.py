"""Figures in README.md and docs/ that no machine changes are those that the program gives today.

`python benchmarks/readme_figures.py --exact --write` renews them when they have changed for a reason.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import vulkan_devices
from test_logits import TOLERANCE

from xinfer_vk.weights.pull import DEMO, is_present

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_figures", ROOT / "benchmarks" / "readme_figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["readme_figures"] = module
    spec.loader.exec_module(module)
    return module


figures = loaded()
BLOCKS = figures.blocks()
FAST = [block for block in BLOCKS if block.fast]


def numbers(text: str) -> list[str]:
    """Its figures in their order; how much memory is free and who drives the device depend on the machine."""
    text = re.sub(r"\([^()]* free\)|\(LLVM [^()]*\)", "", text)
    return re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)


def test_every_marked_place_has_a_block_and_every_block_its_place() -> None:
    marked = {(name, page) for page in PAGES for name in figures.places(page)}
    assert marked == {(block.name, block.page) for block in BLOCKS}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text.count("<!-- figures: ") == text.count("<!-- /figures -->") == len(figures.places(page)), (
            page
        )


@pytest.mark.parametrize("block", FAST, ids=lambda block: block.name)
def test_exact_figures_are_those_of_a_run(block: figures.Block) -> None:  # type: ignore[name-defined]
    if not is_present(DEMO):
        pytest.skip("needs the demo model: xinfer-vk pull smollm2-135m")
    if "lavapipe" not in {device.id for device in vulkan_devices()}:
        pytest.skip("the figures in the pages are lavapipe's")
    told, made = figures.places(block.page)[block.name], block.make()
    remedy = f"python benchmarks/readme_figures.py --only {block.name} --write"
    assert numbers(told) == numbers(made), f"{block.page}: {remedy}"


def test_timed_figures_say_when_and_where_they_were_measured() -> None:
    for block in BLOCKS:
        told = figures.places(block.page)[block.name]
        assert block.exact or re.search(r"\(20\d\d-\d\d-\d\d, .*cores.*\)", told), block.name


def test_the_errors_that_are_told_are_within_what_the_tests_allow() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = text[text.index("| model | NumPy |") :].split("\n\n")[0]
    errors = [float(x) for x in re.findall(r"\d\.\d+e-\d", table)]
    assert len(errors) > 60 and max(errors) <= TOLERANCE
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{max(errors):.1e}".replace("e-05", "e-5") in readme


def test_a_block_is_put_into_its_place_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    place = "a 1\n<!-- figures: {} -->\nold 2\n<!-- /figures -->\nb 3\n"
    page.write_text(place.format("one") + place.format("two"))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figures.write(figures.Block("two", "page.md", str), "new 4\n")
    assert page.read_text() == place.format("one") + place.format("two").replace("old 2", "new 4")
    with pytest.raises(figures.Failed, match="no place"):
        figures.write(figures.Block("three", "page.md", str), "")
