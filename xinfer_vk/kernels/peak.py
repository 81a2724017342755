"""The yardsticks of ``bench``: kernels that do nothing but copy, or nothing but multiply and add."""

from __future__ import annotations

import numpy as np

from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

COPY_LOCAL_SIZE, FMA_LOCAL_SIZE = 256, 256
FLOPS_PER_ROUND = 128  # of one invocation: 16 vec4 products and 16 sums
MAX_GROUPS = 65535


def _copy_oracle(call: OracleCall) -> None:
    words = 4 * call.p.count
    call.u32("target")[:words] = call.u32("source")[:words]


def _fma_oracle(call: OracleCall) -> None:
    lanes = call.groups[0] * call.spec.local_size
    values = (np.arange(lanes, dtype=np.float32) % 8)[:, None] + np.arange(8, dtype=np.float32)
    for _ in range(2 * call.p.rounds):
        values = values * np.float32(0.5) + np.float32(1)
    call.f32("target")[:lanes] = 4 * values.sum(axis=1)


COPY = Kernel(
    name="peak_copy",
    shader="peak_copy",
    bindings=("source", "target"),
    params=("count:u",),
    spec=(("local_size", COPY_LOCAL_SIZE),),
    oracle=_copy_oracle,
)
FMA = Kernel(
    name="peak_fma",
    shader="peak_fma",
    bindings=("target",),
    params=("rounds:u",),
    spec=(("local_size", FMA_LOCAL_SIZE),),
    oracle=_fma_oracle,
)


def peak_copy(profile: DeviceProfile, source: Buffer, target: Buffer, words: int) -> Step:
    """A step that copies the first ``words`` (a multiple of 4) between two buffers: moves 8 bytes a word.
    An invocation of a GPU copies one vec4; a CPU device wants few, long workgroups."""
    groups = -(-words // (4 * COPY_LOCAL_SIZE))
    if profile.simd:
        groups = min(groups, 64)
    buffers = {"source": source, "target": target}
    return make_step(COPY, buffers, {"count": words // 4}, (min(groups, MAX_GROUPS),), "copy")


def peak_fma(target: Buffer, groups: int, rounds: int) -> Step:
    """A step of ``groups * FMA_LOCAL_SIZE * rounds * FLOPS_PER_ROUND`` flops. ``target`` has a word for
    each invocation."""
    return make_step(FMA, {"target": target}, {"rounds": rounds}, (groups,), "fma")
