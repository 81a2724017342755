"""Which tokens go into the next step, for any number of requests over one pool of blocks.

Pure: no device and no clock, so that a step can be replayed and tests can drive it at random. A step takes
one token of every request that is past its prompt, and shares what room is left among the prompts: prefill
and decode run in one ragged batch (Yu et al. 2022, "Orca"; Agrawal et al. 2023, "Sarathi": chunked prefill).

Blocks are taken when they are needed. When there is none, the request that came last, of those of the worst
priority, gives its blocks back and is computed again later: it goes to the front of the queue, and mostly
finds its blocks where it left them. The request that came first always runs on, so all come to their ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from xinfer_vk.blocks import Sequences, common_prefix
from xinfer_vk.engine.request import Request
from xinfer_vk.errors import UsageError, setting
from xinfer_vk.kernels.state import BLOCK_TOKENS

Outputs = Literal["none", "last", "all"]


@dataclass(frozen=True)
class Scheduled:
    """The next tokens of one request. ``outputs``: the rows whose logits are wanted."""

    request: Request
    tokens: Sequence[int]
    outputs: Outputs


@dataclass(frozen=True)
class StepBatch:
    """What one submit computes: ``steps`` decode steps of ``chunks`` of one token each, or one step of chunks
    of any size. ``admitted``: requests that begin, or begin again, with it."""

    chunks: list[Scheduled]
    steps: int = 1
    decoding: bool = False
    admitted: list[Request] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """What became of a request in a step: the ``tokens`` chosen that count, whether it has ``ended``, and
    whether its blocks must not be used again (``failed``: NaN)."""

    request: Request
    tokens: Sequence[int] = ()
    ended: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Limits:
    """Of a step: ``tokens`` computed (the budget), ``requests`` that run, ``outputs`` that are read."""

    tokens: int
    requests: int
    outputs: int


class Scheduler:
    """``limits``: of the next step. ``kind``: what decides how keys are rotated, by a sequence's length.
    ``renews``: whether keys rotated by another kind must be computed again. ``ahead(requests, most)``: how
    many decode steps of so many requests one submit may take."""

    def __init__(
        self,
        sequences: Sequences,
        limits: Callable[[], Limits],
        *,
        kind: Callable[[int], int] = lambda length: 0,
        renews: bool = False,
        ahead: Callable[[int, int], int] = lambda requests, most: 1,
    ) -> None:
        self.sequences = sequences
        self._limits, self._kind, self._renews, self._ahead = limits, kind, renews, ahead
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # a heap, by rank
        self._running: list[Request] = []  # in order of their admission
        self._arrivals = 0
        self.preemptions = 0  # so far

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def requests(self) -> list[Request]:
        """All that have not ended, those that run first."""
        return [*self._running, *(request for _, request in sorted(self._waiting, key=lambda w: w[0]))]

    @property
    def waiting(self) -> list[Request]:
        """In no order."""
        return [request for _, request in self._waiting]

    @property
    def running(self) -> Sequence[Request]:
        return self._running

    def add(self, request: Request) -> None:
        """Raises :class:`UsageError` for a request that the pool could never hold."""
        pool = self.sequences.pool.count * BLOCK_TOKENS
        if request.prompt >= min(pool, self.sequences.capacity):
            raise UsageError(
                f"the prompt is {request.prompt} tokens, and the KV cache has room for {pool}: use a larger "
                f"{setting('kv_memory')} or a shorter prompt"
            )
        request.most = min(request.most, min(pool, self.sequences.capacity) - request.prompt)
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        heapq.heappush(self._waiting, (request.rank, request))

    def abort(self, request: Request) -> None:
        """Nothing happens to one that has ended."""
        if request.ended:
            return
        request.ended = True
        if request.sequence is None:
            self._waiting = [entry for entry in self._waiting if entry[1] is not request]
            heapq.heapify(self._waiting)
        else:
            self._release(request)

    def make_room(self, tokens: int) -> None:
        """Have a row and blocks for ``tokens`` of somebody else's, if need be those of requests that run."""
        wanted = -(-tokens // BLOCK_TOKENS)
        while self._running and (not self.sequences.has_row or self.sequences.pool.free_blocks < wanted):
            self._preempt(max(self._running, key=lambda r: r.rank))

    # -- a step -----------------------------------------------------------------------------------

    def schedule(self) -> StepBatch | None:
        """What the next step computes; None if there is nothing to do."""
        limits = self._limits()
        if self._renews:
            self._begin_again()
        admitted = self._admit(limits)
        alone = next((r for r in self._running if r.wants_rows), None)
        if alone is not None:
            count = min(alone.prompt - 1 - alone.computed, limits.tokens, limits.outputs)
            if self._reserve(alone, count, admitted):
                at = alone.computed
                chunk = Scheduled(alone, alone.tokens[at : at + count], "all")
                return StepBatch([chunk], admitted=admitted)
        if self._running and all(r.decoding for r in self._running):
            return self._decode(admitted)
        return self._mix(limits, admitted)

    def update(self, rows: Iterable[Row]) -> list[Request]:
        """Take what a step gave; the requests that ended with it. The runner has moved ``length`` of their
        sequences on."""
        ended = []
        for row in rows:
            request, sequence = row.request, row.request.sequence
            if request.ended or sequence is None:
                continue
            request.tokens.extend(row.tokens)
            if row.failed:
                self.sequences.distrust(sequence)
            if row.ended:
                request.ended = True
                self._release(request)
                ended.append(request)
            else:
                self.sequences.note(sequence, request.tokens)
        return ended

    # -- who runs ---------------------------------------------------------------------------------

    def _admit(self, limits: Limits) -> list[Request]:
        admitted: list[Request] = []
        if not self._waiting:
            return admitted
        pool = self.sequences.pool
        # What the prompts that run will still take is theirs.
        promised = sum(self.sequences.missing(r.sequence, r.left) for r in self._running if r.sequence)
        while self._waiting and len(self._running) < limits.requests and self.sequences.has_row:
            request = self._waiting[0][1]
            needed = len(request.tokens) // BLOCK_TOKENS + 1
            if self._running and needed > pool.free_blocks - promised:
                # Some of its blocks may be there: a request whose beginning is shared needs fewer.
                needed -= self._shared_blocks(request)
                if needed > pool.free_blocks - promised:
                    break
            if self._comes_soon(request):
                break
            heapq.heappop(self._waiting)
            sequence = request.sequence = self.sequences.open(len(request.tokens))
            most = 0 if request.wants_rows else len(request.tokens) - 1
            kind = self._kind(len(request.tokens))
            self.sequences.begin(sequence, request.tokens, kind, request.salt, most)
            if request.preempted == 0:
                request.reused = sequence.length
            promised += self.sequences.missing(sequence, request.left)
            self._running.append(request)
            admitted.append(request)
        return admitted

    def _shared_blocks(self, request: Request) -> int:
        """Blocks of a request's beginning that others use now, and that so cost nothing."""
        kind = self._kind(len(request.tokens))
        hit = self.sequences.find(request.tokens, kind, request.salt, len(request.tokens) - 1)
        used = sum(self.sequences.pool.users(block) > 1 for block in hit.blocks)
        self.sequences.drop(hit)
        return used

    def _comes_soon(self, request: Request) -> bool:
        """Whether a request that runs is about to compute a beginning of this one's, which then need not be
        computed twice: of samples of one prompt the first computes it."""
        if request.every_row:
            return False
        for other in self._running:
            if other.computed < other.prompt - 1 and other.salt == request.salt:
                common = common_prefix(other.tokens, request.tokens)
                if common // BLOCK_TOKENS > other.computed // BLOCK_TOKENS:
                    return True
        return False

    def _begin_again(self) -> None:
        """Requests whose cached keys were rotated in another way than their next token will be are computed
        again (longrope)."""
        for request in list(self._running):
            sequence = request.sequence
            if sequence is not None and sequence.length:
                length = max(sequence.expected, sequence.length + 1)
                if sequence.rope_key != self._kind(length):
                    self._preempt(request)

    def _preempt(self, request: Request) -> None:
        request.preempted += 1
        self.preemptions += 1
        self._release(request)
        heapq.heappush(self._waiting, (request.rank, request))

    def _release(self, request: Request) -> None:
        assert request.sequence is not None
        self.sequences.finish(request.sequence, request.tokens)
        request.sequence = None
        self._running.remove(request)

    def _reserve(self, request: Request, tokens: int, admitted: list[Request]) -> bool:
        """Blocks for a request's next tokens, if need be those of others, of worse rank. False if it had to
        give way itself."""
        sequence = request.sequence
        assert sequence is not None
        while self.sequences.missing(sequence, tokens) > self.sequences.pool.free_blocks:
            victim = max(self._running, key=lambda r: r.rank)
            self._preempt(victim)
            if victim in admitted:
                admitted.remove(victim)
            if victim is request:
                return False
        self.sequences.reserve(sequence, tokens)
        return True

    # -- what runs --------------------------------------------------------------------------------

    def _decode(self, admitted: list[Request]) -> StepBatch | None:
        steps = 1
        if not self._waiting and not any(r.watched for r in self._running):
            left = min(r.may_choose for r in self._running)
            steps = self._ahead(len(self._running), left)
            if steps > 1:
                missing = sum(self.sequences.missing(r.sequence, steps) for r in self._running if r.sequence)
                if missing > self.sequences.pool.free_blocks:
                    steps = 1
        if any(self.sequences.missing(r.sequence, steps) for r in self._running if r.sequence):
            ready = self._reserve_all([(r, steps) for r in self._running], admitted)
            if not ready:
                return self.schedule()
        else:  # as in most steps
            ready = self._running
        chunks = [Scheduled(request, request.tokens[-1:], "last") for request in ready]
        return StepBatch(chunks, steps, True, admitted)

    def _mix(self, limits: Limits, admitted: list[Request]) -> StepBatch | None:
        decoding = [r for r in self._running if r.decoding][: limits.tokens]
        room = limits.tokens - len(decoding)
        prompts = [r for r in self._running if not r.decoding]
        # Each prompt gets an equal share; what a short one leaves goes to the others.
        shares: dict[Request, int] = {}
        for i, request in enumerate(sorted(prompts, key=lambda r: r.left)):
            shares[request] = min(request.left, room // (len(prompts) - i))
            room -= shares[request]
        wanted = [*((r, 1) for r in decoding), *((r, shares[r]) for r in prompts if shares[r])]
        ready = self._reserve_all(wanted, admitted)
        if not ready:
            return self.schedule() if self._waiting or self._running else None
        chunks = []
        for request in ready:
            at, count = request.computed, 1 if request in decoding else shares[request]
            last = at + count == len(request.tokens)
            chunks.append(Scheduled(request, request.tokens[at : at + count], "last" if last else "none"))
        return StepBatch(chunks, admitted=admitted)

    def _reserve_all(self, wanted: list[tuple[Request, int]], admitted: list[Request]) -> list[Request]:
        """Those of ``wanted`` that have their blocks: the best ranks first, since they may take others'."""
        for request, tokens in sorted(wanted, key=lambda pair: pair[0].rank):
            if request.sequence is not None:
                self._reserve(request, tokens, admitted)
        return [request for request, _ in wanted if request.sequence is not None]
