"""Moves regions within one buffer, by a list in the state buffer (shaders/copy_region.comp)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xinfer_vk.plan import Buffer, Kernel, OracleCall, Step, make_step

LOCAL_SIZE = 256
MOST_GROUPS = 64  # a region is a block of some kB: more would find nothing to do


def list_words(regions: int) -> int:
    """Words of a list of so many regions."""
    return 1 + 3 * regions


def region_list(regions: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """The list of regions ``(from word, to word, words)`` as the kernel reads it, ``uint32``."""
    return np.array([len(regions), *(word for region in regions for word in region)], np.uint32)


def _oracle(call: OracleCall) -> None:
    p, state, data = call.p, call.u32("state"), call.u32("data")
    for part in range(call.groups[1]):
        base = part * p.part_stride
        for region in range(int(state[p.list])):
            entry = p.list + 1 + 3 * region
            source, target, words = (int(word) for word in state[entry : entry + 3])
            data[base + target : base + target + words] = data[base + source : base + source + words]


KERNEL = Kernel(
    name="copy_region",
    shader="copy_region",
    bindings=("state", "data"),
    params=("list:u", "part_stride:u"),
    spec=(("local_size", LOCAL_SIZE),),
    oracle=_oracle,
)


def copy_region(state: Buffer, at: int, data: Buffer, parts: int, part_stride: int, words: int) -> Step:
    """A step that moves the regions listed at word ``at`` of ``state``, in each of ``parts`` parts of
    ``data`` that lie ``part_stride`` words apart. ``words``: of a usual region, for the number of workgroups.
    No region may be another's target."""
    return make_step(
        KERNEL,
        {"state": state, "data": data},
        {"list": at, "part_stride": part_stride},
        (max(1, min(MOST_GROUPS, -(-words // LOCAL_SIZE))), parts),
    )
