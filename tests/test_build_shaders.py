"""build_shaders.py and the SPIR-V reader: what is compiled, when, and what the manifest says about it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import build_shaders  # noqa: E402
from build_support import BuildError  # noqa: E402
from build_support.spirv import MAGIC, SpirvError, reflect  # noqa: E402

SIMPLE = """#version 450
layout(local_size_x_id = 0) in;
layout(set = 0, binding = 0) buffer A { uint a[]; };
void main() { a[gl_GlobalInvocationID.x] = 1u; }
"""

FULL = """// variants: FORMAT=f32,q4_0 KV=f16
#version 450
#extension GL_GOOGLE_include_directive : require
layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint TILE = 4u;
layout(constant_id = 2) const bool WIDE = true;
layout(set = 0, binding = 1) writeonly buffer Target { float target[]; };
layout(set = 0, binding = 0) readonly buffer Source { uint source[]; };
layout(set = 0, binding = 2) buffer Both { uint both[]; };
layout(push_constant) uniform Push { uint count; float eps; int shift; } p;
#include "outer.glsl"
void main() {
#if !defined(KV_F16) || (defined(FORMAT_F32) == defined(FORMAT_Q4_0))
#error the macros of the variant
#endif
    both[0] += source[TILE];
    if (WIDE) target[p.count + p.shift] = outer(p.eps);
}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """shaders/: `full` (two variants; includes outer.glsl, which includes inner.glsl) and `simple`."""
    include = tmp_path / "shaders" / "include"
    include.mkdir(parents=True)
    (include / "inner.glsl").write_text("float inner(float x) { return x + 1.0; }\n")
    (include / "outer.glsl").write_text('#include "inner.glsl"\nfloat outer(float x) { return inner(x); }\n')
    (tmp_path / "shaders" / "full.comp").write_text(FULL)
    (tmp_path / "shaders" / "simple.comp").write_text(SIMPLE)
    return tmp_path


def build(tree: Path) -> build_shaders.Result:
    return build_shaders.build(tree / "spirv", tree / "shaders")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_build_compiles_every_variant_once(tree: Path) -> None:
    first = build(tree)
    assert set(first.compiled) == {"full.f32.f16", "full.q4_0.f16", "simple"}
    assert not first.failed and not first.messages
    again = build(tree)
    assert again.compiled == () and set(again.unchanged) == set(first.compiled)


def test_the_manifest_tells_what_the_spirv_expects_of_its_caller(tree: Path) -> None:
    build(tree)
    manifest = json.loads((tree / "spirv" / "manifest.json").read_text())
    assert set(manifest) == {"full.f32.f16", "full.q4_0.f16", "simple"}
    full = manifest["full.q4_0.f16"]
    assert full["file"] == "full.q4_0.f16.spv" and (tree / "spirv" / full["file"]).is_file()
    assert full["source"] == "full.comp" and full["includes"] == ["outer.glsl", "inner.glsl"]
    assert full["bindings"] == ["source:r", "target:w", "both:rw"]
    assert full["push"] == ["count:u", "eps:f", "shift:i"]
    assert full["spec"] == [["local_size_x", 1], ["TILE", 4], ["WIDE", 1]]
    assert full["capabilities"] == []
    assert manifest["simple"]["push"] == []


def test_the_manifest_tells_a_whole_file_and_one_that_is_not_is_compiled_again(tree: Path) -> None:
    build(tree)
    file = tree / "spirv" / "simple.spv"
    whole = file.read_bytes()
    entry = build_shaders.read_manifest(tree / "spirv")["simple"]
    assert entry["bytes"] == len(whole) and entry["sha256"] == hashlib.sha256(whole).hexdigest()
    for damaged in (whole[:-4], bytes([whole[0] ^ 1]) + whole[1:]):
        file.write_bytes(damaged)
        assert build_shaders.stale(tree / "spirv", tree / "shaders") == ["simple"]
        assert build(tree).compiled == ("simple",) and file.read_bytes() == whole


def test_an_edited_include_rebuilds_only_what_includes_it_even_through_another_file(tree: Path) -> None:
    build(tree)
    edit(tree / "shaders" / "include" / "inner.glsl", "1.0", "2.0")
    result = build(tree)
    assert set(result.compiled) == {"full.f32.f16", "full.q4_0.f16"} and result.unchanged == ("simple",)


def test_an_include_that_nothing_uses_rebuilds_nothing(tree: Path) -> None:
    build(tree)
    (tree / "shaders" / "include" / "new.glsl").write_text("// not used\n")
    assert build(tree).compiled == ()


def test_a_new_variant_compiles_only_itself_and_a_dropped_one_is_removed(tree: Path) -> None:
    build(tree)
    edit(tree / "shaders" / "simple.comp", "#version", "// variants: N=1,2\n#version")
    result = build(tree)
    assert set(result.compiled) == {"simple.1", "simple.2"} and result.removed == ("simple",)
    assert not (tree / "spirv" / "simple.spv").exists()
    assert "simple" not in build_shaders.read_manifest(tree / "spirv")


def test_a_missing_or_unreadable_output_is_built_again(tree: Path) -> None:
    build(tree)
    (tree / "spirv" / "simple.spv").unlink()
    assert build(tree).compiled == ("simple",)
    (tree / "spirv" / "manifest.json").write_text("{ not json")
    assert set(build(tree).compiled) == {"full.f32.f16", "full.q4_0.f16", "simple"}


def test_a_shader_that_fails_gives_file_and_line_and_leaves_no_outdated_spirv(tree: Path) -> None:
    build(tree)
    edit(tree / "shaders" / "simple.comp", "= 1u;", "= nonsense;")
    result = build(tree)
    assert result.failed == ("simple",)
    assert "simple.comp:4" in result.messages["simple"] and "nonsense" in result.messages["simple"]
    assert not (tree / "spirv" / "simple.spv").exists()
    assert set(build_shaders.read_manifest(tree / "spirv")) == {"full.f32.f16", "full.q4_0.f16"}
    edit(tree / "shaders" / "simple.comp", "= nonsense;", "= 2u;")
    assert build(tree).compiled == ("simple",)


def test_an_error_in_an_include_names_the_include_and_its_line(tree: Path) -> None:
    edit(tree / "shaders" / "include" / "inner.glsl", "x + 1.0", "y + 1.0")
    result = build(tree)
    assert set(result.failed) == {"full.f32.f16", "full.q4_0.f16"} and result.compiled == ("simple",)
    assert "inner.glsl:1" in result.messages["full.f32.f16"]


def test_a_missing_include_is_reported_by_the_compiler(tree: Path) -> None:
    (tree / "shaders" / "include" / "inner.glsl").unlink()
    result = build(tree)
    assert "inner.glsl" in result.messages["full.f32.f16"]


def test_stale_names_what_a_build_would_change(tree: Path) -> None:
    output, shaders = tree / "spirv", tree / "shaders"
    assert set(build_shaders.stale(output, shaders)) == {"full.f32.f16", "full.q4_0.f16", "simple"}
    build(tree)
    assert build_shaders.stale(output, shaders) == []
    (output / "left-over.spv").write_bytes(b"")
    edit(shaders / "simple.comp", "= 1u;", "= 2u;")
    assert build_shaders.stale(output, shaders) == ["simple", "left-over"]


def test_clean_removes_what_was_built_and_nothing_else(tree: Path) -> None:
    build(tree)
    (tree / "spirv" / "mine.txt").write_text("keep")
    build_shaders.clean(tree / "spirv")
    assert [path.name for path in (tree / "spirv").iterdir()] == ["mine.txt"]


def test_outputs_are_replaced_whole_and_no_temporary_file_stays(tree: Path) -> None:
    build(tree)
    edit(tree / "shaders" / "simple.comp", "= 1u;", "= nonsense;")
    build(tree)
    names = sorted(path.name for path in (tree / "spirv").iterdir())
    assert names == ["full.f32.f16.spv", "full.q4_0.f16.spv", "manifest.json"]
    mode = stat.S_IMODE((tree / "spirv" / "manifest.json").stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    assert mode == 0o666 & ~umask


@pytest.mark.parametrize(
    "line",
    ["// variants: FORMAT", "// variants: format=f32", "// variants: FORMAT=", "// variants: FORMAT=F32"],
)
def test_a_malformed_variants_line_is_refused_by_file(tree: Path, line: str) -> None:
    (tree / "shaders" / "simple.comp").write_text(f"{line}\n{SIMPLE}")
    with pytest.raises(BuildError, match=r"simple\.comp: variants"):
        build(tree)


def test_two_variants_of_one_name_are_refused(tree: Path) -> None:
    edit(tree / "shaders" / "simple.comp", "#version", "// variants: N=1,1\n#version")
    with pytest.raises(BuildError, match=r"'simple\.1'"):
        build(tree)


def test_a_folder_without_shaders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no shaders"):
        build_shaders.build(tmp_path / "spirv", tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("binding = 0", "binding = 3", "run from 0"),
        ("set = 0", "set = 1", "descriptor set 0"),
        ("void main", "layout(constant_id = 2) const uint K = 1u;\nvoid main", "ids .0, 2."),
        ("void main", "layout(push_constant) uniform P { vec2 v; } p;\nvoid main", "'v' is not one"),
        (
            "void main",
            "layout(push_constant) uniform P { layout(offset = 8) uint n; } p;\nvoid main",
            "byte 0",
        ),
    ],
)
def test_a_shader_that_a_plan_could_not_dispatch_is_refused(
    tree: Path, old: str, new: str, message: str
) -> None:
    edit(tree / "shaders" / "simple.comp", old, new)
    result = build(tree)
    assert result.failed == ("simple",)
    assert "simple.comp" in result.messages["simple"]
    assert re.search(message, result.messages["simple"]), result.messages["simple"]


def test_a_named_compiler_that_does_not_work_is_not_silently_replaced(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_shaders.find_tools.cache_clear()
    monkeypatch.setenv("XINFER_GLSLANG", "/nonexistent/glslang")
    try:
        with pytest.raises(BuildError, match="XINFER_GLSLANG"):
            build(tree)
    finally:
        build_shaders.find_tools.cache_clear()


@pytest.mark.parametrize(
    ("spirv", "message"),
    [
        (b"", "not a SPIR-V module"),
        (b"\0" * 20, "magic number"),
        (struct.pack("<6I", MAGIC, 0x10300, 0, 1, 0, 5 << 16 | 71), "past the end"),
        (struct.pack("<6I", MAGIC, 0x10300, 0, 1, 0, 71), "past the end"),
    ],
)
def test_bytes_that_are_no_spirv_are_refused(spirv: bytes, message: str) -> None:
    with pytest.raises(SpirvError, match=message):
        reflect(spirv)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "build_shaders.py"), *arguments], capture_output=True, text=True
    )


def test_check_and_clean_on_the_command_line(tmp_path: Path) -> None:
    output = ["--output", str(tmp_path)]
    missing = command("--check", *output)
    assert missing.returncode == 1 and "copy_words" in missing.stderr
    assert command("-v", *output).returncode == 0
    assert command("--check", *output).returncode == 0
    assert command("--clean", *output).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_the_built_shaders_are_those_of_the_source_tree() -> None:
    assert build_shaders.stale() == [], "run `python build_shaders.py`"


def test_every_shader_has_a_variant_that_asks_nothing_optional_of_the_device() -> None:
    plain, special = set(), {}
    for name, entry in build_shaders.read_manifest(build_shaders.OUTPUT).items():
        asked = entry["capabilities"]
        assert isinstance(asked, list)
        if entry["source"] in ("matmul_coop.comp", "matmul_lanes.comp"):
            continue  # for matrix units alone, and lavapipe: others take their places elsewhere
        if asked:
            known = ("GroupNonUniform", "DotProduct")
            assert all(c.startswith(known) for c in asked), f"{name} asks for {asked}"
            special[name] = entry["source"]
        else:
            plain.add(entry["source"])
    assert set(special.values()) <= plain, f"no variant without them: {special}"
