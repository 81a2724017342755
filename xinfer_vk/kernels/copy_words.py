"""Copy of a run of words between two buffers, and filling one (transfers on discrete devices)."""

from __future__ import annotations

from xinfer_vk.plan import Buffer, Kernel, OracleCall, Step, make_step

LOCAL_SIZE = 256
MAX_GROUPS = 65535


def _copy_oracle(call: OracleCall) -> None:
    p = call.p
    words = call.u32("source")[p.source_offset : p.source_offset + p.count]
    call.u32("target")[p.target_offset : p.target_offset + p.count] = words


def _fill_oracle(call: OracleCall) -> None:
    p = call.p
    call.u32("target")[p.target_offset : p.target_offset + p.count] = p.value


KERNEL = Kernel(
    name="copy_words",
    shader="copy_words",
    bindings=("source", "target"),
    params=("source_offset:u", "target_offset:u", "count:u"),
    spec=(("local_size", LOCAL_SIZE),),
    oracle=_copy_oracle,
)

FILL = Kernel(
    name="fill_words",
    shader="fill_words",
    bindings=("target",),
    params=("target_offset:u", "count:u", "value:u"),
    spec=(("local_size", LOCAL_SIZE),),
    oracle=_fill_oracle,
)


def copy_words(
    source: Buffer,
    source_offset: int,
    target: Buffer,
    target_offset: int,
    count: int,
    groups: int | None = None,
) -> Step:
    """A step that copies ``count`` words. Source and target must be different buffers.

    ``groups``: workgroups to use, any number covers any count; by default one for each 256 words. Steps
    of equal ``groups`` between the same buffers share a pipeline.
    """
    return make_step(
        KERNEL,
        {"source": source, "target": target},
        {"source_offset": source_offset, "target_offset": target_offset, "count": count},
        (groups or _groups(count),),
    )


def fill_words(target: Buffer, target_offset: int, count: int, value: int, groups: int | None = None) -> Step:
    """A step that sets ``count`` words to ``value`` (an unsigned 32-bit number)."""
    return make_step(
        FILL,
        {"target": target},
        {"target_offset": target_offset, "count": count, "value": value},
        (groups or _groups(count),),
    )


def _groups(count: int) -> int:
    return min(MAX_GROUPS, -(-count // LOCAL_SIZE))
