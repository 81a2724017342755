"""Copy of a run of words between two buffers (upload and read-back on discrete devices)."""

from __future__ import annotations

from xinfer_vk.plan import Buffer, Kernel, OracleCall, Step, make_step

LOCAL_SIZE = 256
MAX_GROUPS = 65535


def _oracle(call: OracleCall) -> None:
    p = call.p
    words = call.u32("source")[p.source_offset : p.source_offset + p.count]
    call.u32("target")[p.target_offset : p.target_offset + p.count] = words


KERNEL = Kernel(
    name="copy_words",
    shader="copy_words",
    bindings=("source", "target"),
    params=("source_offset:u", "target_offset:u", "count:u"),
    spec=(("local_size", LOCAL_SIZE),),
    oracle=_oracle,
)


def copy_words(source: Buffer, source_offset: int, target: Buffer, target_offset: int, count: int) -> Step:
    """A step that copies ``count`` words."""
    groups = min(MAX_GROUPS, -(-count // LOCAL_SIZE))
    return make_step(
        KERNEL,
        {"source": source, "target": target},
        {"source_offset": source_offset, "target_offset": target_offset, "count": count},
        (groups,),
    )
