"""Runs pytest, then a canary, in a process that the validation layer watches (see test_validation.py).

    driver.py LOG DEVICE [pytest arguments]

The canary is two dispatches of which the second reads what the first writes, with no barrier between
them: a hazard that validation must report. It shows that the layer was on, and that it saw. A line in
LOG separates what was reported before it from what it caused.
"""

from __future__ import annotations

import sys

CANARY = "---- canary ----"


def canary(device: str) -> None:
    from xinfer_vk.kernels.copy_words import copy_words
    from xinfer_vk.plan import BufferKind, Plan
    from xinfer_vk.vulkan.runtime import open_runtime

    with open_runtime(device) as runtime:
        runtime._layer.set_barriers(False)
        a, b, c = (runtime.allocate(name, 64, BufferKind.RESULT) for name in "abc")
        runtime.prepare(Plan("canary", (copy_words(a, 0, b, 0, 64), copy_words(b, 0, c, 0, 64)))).run()


def main() -> int:
    log, device, *arguments = sys.argv[1:]
    code = 0
    if arguments:
        import pytest

        code = int(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not invalid_on_purpose", *arguments]))
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{CANARY}\n")
    canary(device)
    return code


if __name__ == "__main__":
    sys.exit(main())
