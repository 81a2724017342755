"""Reads from a SPIR-V module what a host program must agree with: bindings, push constants, spec constants.

SPIR-V (https://registry.khronos.org/SPIR-V/specs/unified1/SPIRV.html, section 2.3) is a stream of
32-bit words: a five-word header, then instructions whose first word holds their length (high half)
and opcode (low half). Only the handful of instructions that describe an interface are looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

MAGIC = 0x07230203
HEADER_WORDS = 5

# Opcodes, decorations, storage classes (section 3 of the specification)
OP_NAME, OP_MEMBER_NAME, OP_DECORATE, OP_MEMBER_DECORATE = 5, 6, 71, 72
OP_TYPE_INT, OP_TYPE_FLOAT, OP_TYPE_VECTOR, OP_TYPE_MATRIX = 21, 22, 23, 24
OP_TYPE_STRUCT, OP_TYPE_POINTER = 30, 32
OP_SPEC_CONSTANT_TRUE, OP_SPEC_CONSTANT_FALSE, OP_SPEC_CONSTANT = 48, 49, 50
OP_SPEC_CONSTANT_COMPOSITE, OP_VARIABLE, OP_CAPABILITY, OP_FUNCTION = 51, 59, 17, 54
SPEC_ID, BUILT_IN, NON_WRITABLE, NON_READABLE, BINDING, DESCRIPTOR_SET, OFFSET = 1, 11, 24, 25, 33, 34, 35
UNIFORM, PUSH_CONSTANT, STORAGE_BUFFER = 2, 9, 12
WORKGROUP_SIZE = 25  # the built-in that a spec constant of local_size_*_id is part of

CAPABILITIES = {  # only to name them; 1 (Shader) is what every compute shader has
    0: "Matrix", 1: "Shader", 9: "Float16", 10: "Float64", 11: "Int64", 22: "Int16", 39: "Int8",
    61: "GroupNonUniform", 62: "GroupNonUniformVote", 63: "GroupNonUniformArithmetic",
    64: "GroupNonUniformBallot", 65: "GroupNonUniformShuffle", 66: "GroupNonUniformShuffleRelative",
    67: "GroupNonUniformClustered", 68: "GroupNonUniformQuad", 4433: "StorageBuffer16BitAccess",
    4434: "UniformAndStorageBuffer16BitAccess", 4448: "StorageBuffer8BitAccess",
    4449: "UniformAndStorageBuffer8BitAccess", 6019: "DotProductKHR", 6018: "DotProductInput4x8BitPackedKHR",
    5347: "PhysicalStorageBufferAddresses", 6022: "CooperativeMatrixKHR",
}  # fmt: skip


class SpirvError(ValueError):
    """Not a SPIR-V module, or one that breaks this project's conventions for shaders."""


@dataclass(frozen=True)
class Interface:
    """What a compute shader expects of the program that dispatches it.

    ``bindings``: the storage buffers of set 0 in binding order, each ``name:access`` with access
    ``r``, ``w`` or ``rw`` and the name of the block's first member (``source`` of ``uint source[]``).
    ``push``: fields of the push-constant block, ``name:u`` / ``name:i`` / ``name:f``, one word each; a
    mat4 is 16 of them, ``name0:f`` to ``name15:f``, column by column, and a mat2x4 8.
    ``spec``: name and default of each specialization constant, in ``constant_id`` order; the one of
    ``layout(local_size_x_id = 0)``, which has no name in GLSL, is called ``local_size_x``.
    ``capabilities``: what it asks of the device beyond Shader.
    """

    bindings: tuple[str, ...]
    push: tuple[str, ...]
    spec: tuple[tuple[str, int], ...]
    capabilities: tuple[str, ...]


@dataclass
class _Module:
    names: dict[int, str] = field(default_factory=dict)
    member_names: dict[tuple[int, int], str] = field(default_factory=dict)
    decorations: dict[tuple[int, int], int] = field(default_factory=dict)  # (id, decoration) -> operand
    member_decorations: dict[tuple[int, int, int], int] = field(default_factory=dict)
    scalars: dict[int, str] = field(default_factory=dict)  # type id -> u, i, f
    vec4s: dict[int, int] = field(default_factory=dict)  # type id -> the element's
    matrices: dict[int, tuple[int, int]] = field(default_factory=dict)  # type id -> a column's, and how many
    structs: dict[int, list[int]] = field(default_factory=dict)
    pointees: dict[int, int] = field(default_factory=dict)
    variables: list[tuple[int, int, int]] = field(default_factory=list)  # id, type id, storage class
    spec_defaults: dict[int, int] = field(default_factory=dict)
    capabilities: list[int] = field(default_factory=list)


def reflect(spirv: bytes) -> Interface:
    """The interface of a compute shader; raises :class:`SpirvError` for what a plan could not use."""
    module = _read(spirv)
    return Interface(_bindings(module), _push(module), _spec(module), _capabilities(module))


def _instructions(spirv: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    if len(spirv) < 4 * HEADER_WORDS or len(spirv) % 4:
        raise SpirvError(f"{len(spirv)} bytes are not a SPIR-V module")
    words = struct.unpack(f"<{len(spirv) // 4}I", spirv)
    if words[0] != MAGIC:
        raise SpirvError(f"magic number {words[0]:#010x} is not SPIR-V's {MAGIC:#010x}")
    at = HEADER_WORDS
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        if length == 0 or at + length > len(words):
            raise SpirvError(f"instruction at word {at} runs past the end of the module")
        yield opcode, words[at + 1 : at + length]
        at += length


def _text(words: tuple[int, ...]) -> str:
    return struct.pack(f"<{len(words)}I", *words).split(b"\0", 1)[0].decode()


def _read(spirv: bytes) -> _Module:
    m = _Module()
    for opcode, operands in _instructions(spirv):
        if opcode == OP_NAME:
            m.names[operands[0]] = _text(operands[1:])
        elif opcode == OP_MEMBER_NAME:
            m.member_names[operands[0], operands[1]] = _text(operands[2:])
        elif opcode == OP_DECORATE:
            m.decorations[operands[0], operands[1]] = operands[2] if len(operands) > 2 else 0
        elif opcode == OP_MEMBER_DECORATE:
            value = operands[3] if len(operands) > 3 else 0
            m.member_decorations[operands[0], operands[1], operands[2]] = value
        elif opcode == OP_TYPE_INT and operands[1] == 32:
            m.scalars[operands[0]] = "i" if operands[2] else "u"
        elif opcode == OP_TYPE_FLOAT and operands[1] == 32:
            m.scalars[operands[0]] = "f"
        elif opcode == OP_TYPE_VECTOR and operands[2] == 4:
            m.vec4s[operands[0]] = operands[1]
        elif opcode == OP_TYPE_MATRIX:
            m.matrices[operands[0]] = operands[1], operands[2]
        elif opcode == OP_TYPE_STRUCT:
            m.structs[operands[0]] = list(operands[1:])
        elif opcode == OP_TYPE_POINTER:
            m.pointees[operands[0]] = operands[2]
        elif opcode in (OP_SPEC_CONSTANT_TRUE, OP_SPEC_CONSTANT_FALSE):
            m.spec_defaults[operands[1]] = int(opcode == OP_SPEC_CONSTANT_TRUE)
        elif opcode == OP_SPEC_CONSTANT:
            m.spec_defaults[operands[1]] = operands[2]
        elif opcode == OP_SPEC_CONSTANT_COMPOSITE:
            if m.decorations.get((operands[1], BUILT_IN)) == WORKGROUP_SIZE:
                for part, axis in zip(operands[2:], "xyz"):
                    m.names.setdefault(part, f"local_size_{axis}")
        elif opcode == OP_VARIABLE:
            m.variables.append((operands[1], operands[0], operands[2]))
        elif opcode == OP_CAPABILITY:
            m.capabilities.append(operands[0])
        elif opcode == OP_FUNCTION:  # the interface is all declared by now
            break
    return m


def _bindings(m: _Module) -> tuple[str, ...]:
    found: dict[int, str] = {}
    for variable, pointer, storage in m.variables:
        if storage not in (UNIFORM, STORAGE_BUFFER):
            continue
        block = m.pointees[pointer]
        name = m.member_names.get((block, 0)) or m.names.get(block, "")
        if m.decorations.get((variable, DESCRIPTOR_SET), 0) != 0:
            raise SpirvError(f"buffer {name!r} is not in descriptor set 0")
        binding = m.decorations.get((variable, BINDING), 0)
        if binding in found:
            raise SpirvError(f"buffers {found[binding].split(':')[0]!r} and {name!r} share binding {binding}")
        can_write = (variable, NON_WRITABLE) not in m.decorations
        can_read = (variable, NON_READABLE) not in m.decorations
        can_write &= (block, 0, NON_WRITABLE) not in m.member_decorations
        can_read &= (block, 0, NON_READABLE) not in m.member_decorations
        found[binding] = f"{name}:{'r' * can_read}{'w' * can_write}"
    if sorted(found) != list(range(len(found))):
        raise SpirvError(f"bindings {sorted(found)} do not run from 0 without gaps")
    return tuple(found[i] for i in range(len(found)))


def _push(m: _Module) -> tuple[str, ...]:
    blocks = [m.pointees[pointer] for _, pointer, storage in m.variables if storage == PUSH_CONSTANT]
    if not blocks:
        return ()
    if len(blocks) > 1:
        raise SpirvError("more than one push-constant block")
    fields: list[str] = []
    for i, member_type in enumerate(m.structs[blocks[0]]):
        name = m.member_names.get((blocks[0], i), str(i))
        column, columns = m.matrices.get(member_type, (0, 0))
        if m.member_decorations.get((blocks[0], i, OFFSET)) != 4 * len(fields):
            raise SpirvError(f"push constant {name!r} is not at byte {4 * len(fields)}")
        if member_type in m.scalars:
            fields.append(f"{name}:{m.scalars[member_type]}")
        elif (element := m.vec4s.get(column, 0)) in m.scalars:
            fields += [f"{name}{j}:{m.scalars[element]}" for j in range(4 * columns)]
        else:
            raise SpirvError(f"push constant {name!r} is not one 32-bit uint, int or float")
    return tuple(fields)


def _spec(m: _Module) -> tuple[tuple[str, int], ...]:
    ids = {m.decorations[i, SPEC_ID]: i for i in m.spec_defaults if (i, SPEC_ID) in m.decorations}
    if sorted(ids) != list(range(len(ids))):
        raise SpirvError(f"specialization constant ids {sorted(ids)} do not run from 0 without gaps")
    return tuple((m.names.get(ids[k], ""), m.spec_defaults[ids[k]]) for k in range(len(ids)))


def _capabilities(m: _Module) -> tuple[str, ...]:
    return tuple(sorted(CAPABILITIES.get(c, f"capability {c}") for c in m.capabilities if c not in (0, 1)))
