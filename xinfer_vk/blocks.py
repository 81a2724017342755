"""Blocks of the KV cache and who uses them: counted, found again by their content, taken back in turn.

Block ``i`` of a sequence holds the keys and values of its positions ``32 i … 32 i + 31``, and these depend on
all tokens up to there. So a full block is named by a hash chained over them, and a sequence that begins
with the same tokens shares it (Kwon et al. 2023, "Efficient Memory Management for Large Language Model
Serving with PagedAttention"; the chained hash is vLLM's). A block without users stays findable until it is
needed: the one released longest ago goes first, and of a sequence its last.

Rules, which the property tests hold: a key stands for a full block; a block with users is never handed out;
only a block of one user and without a key is written, so ``truncate`` into any other one copies it first. A
block that has only its first tokens in common is copied, so that sharing ends at the very token.

Nothing here knows a device: what must be copied there is in :attr:`Sequences.copies`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from xinfer_vk.errors import OutOfMemoryError, setting
from xinfer_vk.kernels.state import BLOCK_TOKENS

MOST_CANDIDATES = 32  # blocks that a common beginning is looked for in
MIXED = -1  # CachedSequence.rope_key of keys that were not all rotated by the same frequencies


def root_key(kind: int, salt: bytes = b"") -> bytes:
    """The key before a sequence's first block. ``kind``: how its keys are rotated
    (:meth:`RopeScaling.key <xinfer_vk.models.rope_scaling.RopeScaling.key>`); ``salt`` keeps apart those who
    must not share."""
    return hashlib.blake2b(b"%d\0" % kind + salt, digest_size=16).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block after the one with the key ``parent``."""
    return hashlib.blake2b(parent + array("I", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Content:
    """What a block holds: ``tokens`` after those of ``parent``. ``key``: of a full block."""

    parent: bytes
    tokens: tuple[int, ...]
    key: bytes | None


@dataclass(frozen=True, slots=True)
class Hit:
    """What was found of a sequence's beginning; its ``blocks``, full ones, are the finder's to release.
    ``source``: a block whose first ``common`` tokens are those that follow, to be copied and released."""

    blocks: list[int]
    keys: list[bytes]
    source: int | None
    common: int


class BlockPool:
    """Hands out block numbers ``0 … count-1``, and finds those again whose content is wanted."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # the next to go comes first
        self._content: list[Content | None] = [None] * count
        self._found: dict[bytes, int] = {}  # full blocks by key
        self._children: dict[tuple[bytes, int], dict[int, None]] = {}  # by parent and first token

    @property
    def free_blocks(self) -> int:
        """Those without a user; their content may still be found."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Full blocks whose content can be found."""
        return len(self._found)

    def users(self, block: int) -> int:
        return self._users[block]

    def content(self, block: int) -> Content | None:
        return self._content[block]

    def allocate(self) -> int:
        """A block of its own; what it held can no longer be found. Raises :class:`OutOfMemoryError`."""
        if not self._free:
            raise OutOfMemoryError(
                f"the KV cache is full ({self.count * BLOCK_TOKENS} tokens): "
                f"use a larger {setting('kv_memory')} or generate fewer tokens"
            )
        block, _ = self._free.popitem(last=False)
        self.forget(block)
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more user of ``block``, which may be one that nobody uses any more."""
        if self._users[block] == 0:
            del self._free[block]
        self._users[block] += 1

    def release(self, block: int) -> None:
        assert self._users[block] > 0, f"block {block} released more often than taken"
        self._users[block] -= 1
        if self._users[block] == 0:
            self._free[block] = None
            if self._content[block] is None:
                self._free.move_to_end(block, last=False)  # nothing is lost with it

    # -- content ----------------------------------------------------------------------------------

    def note(self, block: int, parent: bytes, tokens: Sequence[int]) -> bytes | None:
        """Say what a block holds, so that it can be found; returns the key of a full one. Of two blocks with
        the same content the first stays the one that is found."""
        assert 0 < len(tokens) <= BLOCK_TOKENS
        full = len(tokens) == BLOCK_TOKENS
        key = block_key(parent, tokens) if full else None
        self.forget(block)
        if key is not None and key in self._found:
            return key
        self._content[block] = Content(parent, tuple(tokens), key)
        self._children.setdefault((parent, tokens[0]), {})[block] = None
        if key is not None:
            self._found[key] = block
        return key

    def forget(self, block: int) -> None:
        """The block can no longer be found."""
        content, self._content[block] = self._content[block], None
        if content is None:
            return
        if content.key is not None:
            del self._found[content.key]
        among = self._children[content.parent, content.tokens[0]]
        del among[block]
        if not among:
            del self._children[content.parent, content.tokens[0]]

    def forget_all(self) -> None:
        """After an error: no content is to be trusted."""
        for block in range(self.count):
            self.forget(block)

    def find(self, root: bytes, tokens: Sequence[int], most: int) -> Hit:
        """The longest beginning of ``tokens`` that is cached, ``most`` at most; its blocks are shared."""
        blocks, keys, parent = [], [], root
        for at in range(0, most - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            piece = tuple(tokens[at : at + BLOCK_TOKENS])
            key = block_key(parent, piece)
            block = self._found.get(key)
            if block is None or self._content[block] != Content(parent, piece, key):
                break
            self.share(block)
            blocks.append(block)
            keys.append(key)
            parent = key
        at = len(blocks) * BLOCK_TOKENS
        source, common = self._most_common(parent, tokens[at : min(at + BLOCK_TOKENS, most)])
        if source is not None:
            self.share(source)
        return Hit(blocks, keys, source, common)

    def _most_common(self, parent: bytes, tokens: Sequence[int]) -> tuple[int | None, int]:
        """The block after ``parent`` that begins most like ``tokens``, and how many tokens that is."""
        best, common = None, 0
        if not tokens:
            return best, common
        among = self._children.get((parent, tokens[0]), {})
        for block, _ in zip(reversed(among), range(MOST_CANDIDATES)):
            content = self._content[block]
            assert content is not None
            count = common_prefix(content.tokens, tokens)
            if count > common:
                best, common = block, count
        return best, common


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements two sequences have in common from the beginning."""
    for i, (left, right) in enumerate(zip(a, b)):
        if left != right:
            return i
    return min(len(a), len(b))


@dataclass(slots=True)
class CachedSequence:
    """What the cache holds of one sequence: ``length`` tokens in ``blocks``; ``row`` is its line in
    the device's block table.

    ``expected``: how long it is known to become, its prompt's length. RoPE scalings that depend on the
    length use it for every piece of the prompt; ``rope_key`` tells by which of them the cached keys were
    rotated (:meth:`RopeScaling.key`), -1: not all by the same. ``keys``: of its full blocks, as far as others
    can find them; ``root``: the key before the first, None for a sequence that nobody is to find.
    """

    row: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    expected: int = 0
    rope_key: int = 0
    kind: int = 0  # the rope_key that ``root`` stands for
    root: bytes | None = None
    keys: list[bytes] = field(default_factory=list)

    def slot(self, position: int) -> int:
        """Where the token at ``position`` is stored: ``block * BLOCK_TOKENS + offset``."""
        return self.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


class Sequences:
    """Up to ``max_sequences`` sequences of up to ``capacity`` tokens over a pool of ``blocks`` blocks.

    ``copies``: pairs (source, target) of blocks whose content must be copied on the device before the next
    step writes; :meth:`copied` says that it was.
    """

    def __init__(self, blocks: int, capacity: int, max_sequences: int) -> None:
        self.pool = BlockPool(blocks)
        self.max_sequences = max_sequences
        self.blocks_per_sequence = -(-capacity // BLOCK_TOKENS)
        self.capacity = self.blocks_per_sequence * BLOCK_TOKENS
        self.copies: list[tuple[int, int]] = []
        self._rows = list(range(max_sequences - 1, -1, -1))

    @property
    def in_use(self) -> int:
        """Sequences that are open."""
        return self.max_sequences - len(self._rows)

    @property
    def has_row(self) -> bool:
        """Whether :meth:`open` can give a sequence."""
        return bool(self._rows)

    def open(self, expected: int = 0) -> CachedSequence:
        """A new, empty sequence (see :class:`CachedSequence` for ``expected``). Raises
        :class:`OutOfMemoryError` when all rows are taken."""
        if not self._rows:
            raise OutOfMemoryError(f"the KV cache holds {self.max_sequences} sequences and all are in use")
        return CachedSequence(self._rows.pop(), expected=expected)

    def missing(self, sequence: CachedSequence, tokens: int) -> int:
        """Blocks that :meth:`reserve` would take."""
        return max(0, -(-(sequence.length + tokens) // BLOCK_TOKENS) - len(sequence.blocks))

    def reserve(self, sequence: CachedSequence, tokens: int) -> None:
        """Blocks for ``tokens`` more tokens after ``sequence.length``; nothing is taken if not all can be."""
        wanted = self.missing(sequence, tokens)
        if len(sequence.blocks) + wanted > self.blocks_per_sequence or wanted > self.pool.free_blocks:
            raise OutOfMemoryError(
                f"{sequence.length + tokens} tokens do not fit the KV cache of {self.capacity}: "
                f"use a larger {setting('context')} or a shorter prompt"
            )
        sequence.blocks.extend(self.pool.allocate() for _ in range(wanted))

    def find(self, tokens: Sequence[int], kind: int, salt: bytes, most: int) -> Hit:
        """What the cache has of ``tokens``; :meth:`drop` it again."""
        return self.pool.find(root_key(kind, salt), tokens, most)

    def drop(self, hit: Hit) -> None:
        for block in (*hit.blocks[::-1], *(() if hit.source is None else (hit.source,))):
            self.pool.release(block)

    def begin(
        self, sequence: CachedSequence, tokens: Sequence[int], kind: int, salt: bytes = b"", most: int = 0
    ) -> None:
        """Give an empty sequence what the cache has of its ``tokens``, ``most`` of them at most, and let its
        blocks be found by others from now on."""
        assert sequence.length == 0 and not sequence.blocks
        sequence.kind = sequence.rope_key = kind
        sequence.root = root_key(kind, salt)
        hit = self.pool.find(sequence.root, tokens, most)
        sequence.blocks, sequence.keys = hit.blocks, hit.keys
        sequence.length = len(hit.blocks) * BLOCK_TOKENS
        if hit.source is None:
            return
        if self.pool.free_blocks < len(tokens) // BLOCK_TOKENS + 1 - len(hit.blocks):
            self.pool.release(hit.source)  # which would be missing until it is copied
            return
        self._copy(sequence, hit.source)
        sequence.length += hit.common

    def note(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Let the full blocks of a sequence be found, whose tokens are ``tokens``."""
        full = sequence.length // BLOCK_TOKENS
        if len(sequence.keys) >= full or sequence.root is None or sequence.rope_key != sequence.kind:
            return
        for i in range(len(sequence.keys), full):
            parent = sequence.keys[-1] if sequence.keys else sequence.root
            key = self.pool.note(
                sequence.blocks[i], parent, tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
            )
            assert key is not None
            sequence.keys.append(key)

    def finish(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Close a sequence whose tokens are ``tokens``. What it holds of them can be found, even the last
        block, which is not full."""
        sequence.length = min(sequence.length, len(tokens))
        self.note(sequence, tokens)
        full, left = divmod(sequence.length, BLOCK_TOKENS)
        known = sequence.root is not None and sequence.rope_key == sequence.kind
        if any(target in sequence.blocks for _, target in self.copies):
            left = 0  # what was to be copied never was
        if left and known and len(sequence.keys) == full and self.pool.users(sequence.blocks[full]) == 1:
            parent = sequence.keys[-1] if sequence.keys else sequence.root
            assert parent is not None
            self.pool.note(sequence.blocks[full], parent, tokens[full * BLOCK_TOKENS : sequence.length])
        self.close(sequence)

    def distrust(self, sequence: CachedSequence) -> None:
        """After NaN in a sequence: nobody is to find its blocks."""
        for block in sequence.blocks:
            self.pool.forget(block)
        sequence.root = None

    def fork(self, parent: CachedSequence, tokens: int) -> CachedSequence:
        """A new sequence that shares the parent's full blocks of its first ``tokens`` tokens; what is
        after them (under a block) is the new sequence's to fill. Shared blocks are never written again."""
        child = self.open()
        full = min(tokens, parent.length) // BLOCK_TOKENS
        child.blocks = parent.blocks[:full]
        for block in child.blocks:
            self.pool.share(block)
        child.length = full * BLOCK_TOKENS
        child.expected, child.rope_key = tokens, parent.rope_key
        return child

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget everything from position ``length`` on (rejected drafts, an edited turn). A last block that
        others use, or may find, is copied first: the sequence will write to its own."""
        assert 0 <= length <= sequence.length
        self._drop_copies(sequence, -(-length // BLOCK_TOKENS))
        keep = -(-length // BLOCK_TOKENS)
        for block in reversed(sequence.blocks[keep:]):
            self.pool.release(block)
        del sequence.blocks[keep:], sequence.keys[length // BLOCK_TOKENS :]
        sequence.length = length
        if length % BLOCK_TOKENS:
            last = sequence.blocks[-1]
            if self.pool.users(last) > 1:
                sequence.blocks.pop()
                self._copy(sequence, last)
            else:
                self.pool.forget(last)

    def close(self, sequence: CachedSequence) -> None:
        """Give back the sequence's blocks, the last one first, and its row."""
        self._drop_copies(sequence)
        for block in reversed(sequence.blocks):
            self.pool.release(block)
        sequence.blocks, sequence.keys, sequence.length = [], [], 0
        self._rows.append(sequence.row)

    def copied(self) -> None:
        """The copies were made."""
        for source, _ in self.copies:
            self.pool.release(source)
        self.copies.clear()

    def _drop_copies(self, sequence: CachedSequence, first: int = 0) -> None:
        """Nobody needs the copies to a sequence's own blocks from the ``first`` on any more."""
        if not self.copies:
            return
        dropped = {block for block in sequence.blocks[first:] if self.pool.users(block) == 1}
        for source, target in self.copies:
            if target in dropped:
                self.pool.release(source)
                self.pool.forget(target)
        self.copies = [pair for pair in self.copies if pair[1] not in dropped]

    def _copy(self, sequence: CachedSequence, source: int) -> None:
        """Append a copy of ``source`` to a sequence, which so gives up its use of it once it is copied."""
        target = self.pool.allocate()
        self.copies.append((source, target))
        sequence.blocks.append(target)
