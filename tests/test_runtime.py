"""The Kompute runtime: buffers, plans, their order and their end."""

from __future__ import annotations

import numpy as np
import pytest

from xinfer_vk.kernels.copy_words import copy_words
from xinfer_vk.plan import BufferKind


@pytest.mark.parametrize("count", [1, 3, 255, 257, 70000])
def test_copy_words_moves_exactly_the_words_asked_for(check_steps, count):
    def build(rt):
        rng = np.random.default_rng(count)
        source = rt.allocate("source", count + 7, BufferKind.WEIGHTS)
        target = rt.allocate("target", count + 9, BufferKind.SCRATCH)
        rt.write(source, 0, rng.integers(0, 2**32, count + 7, np.uint32))
        return copy_words(source, 5, target, 3, count)

    check_steps(build, views={"source": "u32", "target": "u32"})
