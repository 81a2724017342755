"""Blocks and the scheduler, driven at random without a device: a small memory stands in for the KV cache.

What a step computes is written to it slot by slot, copies are made as the device makes them, and after every
step each sequence must find exactly its own tokens there. The rules of the block pool are checked beside it.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer_vk.blocks import BlockPool, Sequences
from xinfer_vk.engine.request import Request
from xinfer_vk.engine.scheduler import Limits, Row, Scheduler, StepBatch
from xinfer_vk.errors import OutOfMemoryError, UsageError
from xinfer_vk.kernels.state import BLOCK_TOKENS

B = BLOCK_TOKENS
FEW, MANY = 1000, 100_000


class Machine:
    """A device that remembers which token each slot holds, and checks what it is asked to do."""

    def __init__(self, blocks: int, capacity: int, requests: int = 4, budget: int = 64, **how: Any) -> None:
        self.sequences = Sequences(blocks, capacity, requests)
        self.budget = budget
        self.scheduler = Scheduler(self.sequences, lambda: Limits(budget, requests, 8), **how)
        self.slots: dict[int, int] = {}  # token by block * 32 + offset
        self.computed = 0
        self.last: StepBatch | None = None

    def step(self, choose: Any = lambda request: 7, fail: Any = lambda request: False) -> list[Request]:
        self.last = batch = self.scheduler.schedule()
        if batch is None:
            assert not self.scheduler.busy
            return []
        assert batch.chunks
        targets = [target for _, target in self.sequences.copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {source for source, _ in self.sequences.copies}
        before = dict(self.slots)
        for source, target in self.sequences.copies:
            for i in range(B):
                self.slots[target * B + i] = before.get(source * B + i, -1)
        self.sequences.copied()
        total = sum(len(chunk.tokens) for chunk in batch.chunks)
        assert total <= self.budget and sum(c.outputs != "none" for c in batch.chunks) <= 8
        rows = []
        for chunk in batch.chunks:
            request = chunk.request
            tokens, chosen = list(chunk.tokens), []
            for _ in range(batch.steps):
                self._write(request, tokens)
                if chunk.outputs == "last":
                    chosen.append(choose(request))
                    tokens = chosen[-1:]
            assert len(chosen) <= request.may_choose
            failed = fail(request)
            ended = failed or (chunk.outputs == "last" and len(chosen) >= request.may_choose)
            rows.append(Row(request, [] if failed else chosen, ended, failed))
        written = Counter(self.written(batch))
        assert max(written.values()) == 1, "two sequences wrote to one slot"
        ended_now = self.scheduler.update(rows)
        self.check()
        return ended_now

    def _write(self, request: Request, tokens: list[int]) -> None:
        sequence = request.sequence
        assert sequence is not None and tokens
        for token in tokens:
            assert sequence.length < self.sequences.capacity
            block = sequence.blocks[sequence.length // B]
            assert self.sequences.pool.users(block) == 1, "a block of others is written"
            content = self.sequences.pool.content(block)
            assert content is None, "a block that others may find is written"
            self.slots[sequence.slot(sequence.length)] = token
            sequence.length += 1
            self.computed += 1

    @staticmethod
    def written(batch: StepBatch) -> list[int]:
        slots = []
        for chunk in batch.chunks:
            sequence = chunk.request.sequence
            assert sequence is not None
            count = len(chunk.tokens) - 1 + batch.steps
            slots += [sequence.slot(p) for p in range(sequence.length - count, sequence.length)]
        return slots

    def check(self) -> None:
        """Every sequence finds its tokens, every block has as many users as it is used, or is free."""
        pool = self.sequences.pool
        users: Counter[int] = Counter()
        for request in self.scheduler.running:
            sequence = request.sequence
            assert sequence is not None
            users.update(sequence.blocks)
            found = [self.slots[sequence.slot(p)] for p in range(sequence.length)]
            assert found == request.tokens[: sequence.length]
        users.update(source for source, _ in self.sequences.copies)
        assert all(pool.users(block) == users[block] for block in range(pool.count))
        assert pool.free_blocks == sum(users[block] == 0 for block in range(pool.count))
        assert self.sequences.in_use == len(self.scheduler.running)
        for block in range(pool.count):
            content = pool.content(block)
            if content is not None:
                held = [self.slots[block * B + i] for i in range(len(content.tokens))]
                assert held == list(content.tokens)
                assert content.key is not None or users[block] == 0

    def run(self, limit: int = 10_000) -> int:
        for count in range(limit):
            if not self.scheduler.busy:
                return count
            self.step()
        raise AssertionError("it never ends")


def request(tokens: list[int] | int, most: int = 3, **fields: Any) -> Request:
    return Request(list(range(100, 100 + tokens)) if isinstance(tokens, int) else tokens, most, **fields)


# -- driven at random ------------------------------------------------------------------------------


def play(rng: random.Random) -> None:
    """A random mix of adds, aborts, failures and steps over a pool that is mostly too small for all."""
    blocks = rng.randint(1, 14)
    capacity = rng.choice([32, 64, 100, 256])
    renewing = rng.random() < 0.1
    how = {"ahead": lambda count, most: 1 << min(most, 8).bit_length() - 1} if rng.random() < 0.5 else {}
    kind = {"kind": lambda length: int(length > 40), "renews": True} if renewing else {}
    machine = Machine(blocks, capacity, rng.randint(1, 5), rng.choice([8, 33, 64, 512]), **how, **kind)
    bases = [[rng.randint(0, 3) for _ in range(200)] for _ in range(2)]
    live: list[Request] = []
    for _ in range(rng.randint(1, 25)):
        action = rng.random()
        if action < 0.35:
            base = rng.choice(bases)
            length = rng.choice([1, 2, 31, 32, 33, 63, 64, 65, 96, rng.randint(1, 120)])
            tokens = base[:length] + [rng.randint(0, 9)] * rng.randint(0, 1)
            added = request(
                tokens, rng.randint(1, 40), priority=rng.randint(0, 1), every_row=rng.random() < 0.1,
                watched=rng.random() < 0.3, salt=rng.choice([b"", b"", b"x"]),
            )  # fmt: skip
            try:
                machine.scheduler.add(added)
            except UsageError:
                assert len(tokens) >= min(blocks * B, machine.sequences.capacity)
                continue
            live.append(added)
        elif action < 0.45 and live:
            machine.scheduler.abort(live.pop(rng.randrange(len(live))))
            machine.check()
        else:
            ended = machine.step(choose=lambda r: rng.randint(0, 3), fail=lambda r: rng.random() < 0.02)
            live = [r for r in live if r not in ended]
    machine.run()
    pool = machine.sequences.pool
    assert pool.free_blocks == pool.count and machine.sequences.in_use == 0
    assert all(r.ended for r in live)


@pytest.mark.parametrize(
    "seeds", [range(FEW), pytest.param(range(FEW, MANY), marks=pytest.mark.tier_all)], ids=["few", "many"]
)
def test_random_sequences_lose_no_block_and_starve_nobody(seeds: range) -> None:
    for seed in seeds:
        try:
            play(random.Random(seed))
        except BaseException:
            print("seed", seed)
            raise


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**60))
def test_and_neither_do_those_that_hypothesis_thinks_of(seed: int) -> None:
    play(random.Random(seed))


# -- steps -----------------------------------------------------------------------------------------


def test_a_long_prompt_does_not_take_the_room_of_a_short_one() -> None:
    machine = Machine(64, 1024, budget=64)
    long, short = request(900), request([5] * 20)
    machine.scheduler.add(long)
    machine.scheduler.add(short)
    machine.step()
    assert machine.last is not None
    assert {c.request: len(c.tokens) for c in machine.last.chunks} == {long: 44, short: 20}
    machine.step()
    assert {c.request: len(c.tokens) for c in machine.last.chunks} == {long: 63, short: 1}


def test_decode_rows_are_in_every_step() -> None:
    machine = Machine(64, 1024, budget=33)
    first = request([5], most=30)
    machine.scheduler.add(first)
    machine.step()
    machine.scheduler.add(request(500))
    for _ in range(10):
        machine.step()
        assert machine.last is not None and first in [c.request for c in machine.last.chunks]


def test_the_last_one_admitted_gives_way_and_comes_back_first() -> None:
    machine = Machine(4, 128, requests=3)
    one, two, three = request([1] * 40, 60), request([2] * 40, 30), request([3] * 10, 5)
    for each in (one, two, three):
        machine.scheduler.add(each)
    while not two.preempted:
        machine.step()
    assert one.preempted == 0 and one.sequence is not None and two.sequence is None
    assert machine.scheduler.requests[1] is two
    machine.run()
    assert [len(r.tokens) for r in (one, two, three)] == [100, 70, 15]
    assert one.preempted == 0


def test_the_worst_priority_gives_way_first() -> None:
    machine = Machine(4, 128, requests=3)
    low, high = request([1] * 40, 40, priority=1), request([2] * 40, 40)
    machine.scheduler.add(low)
    machine.step()
    machine.scheduler.add(high)
    machine.run()
    assert (low.preempted > 0, high.preempted) == (True, 0)


def test_a_request_is_cut_to_what_the_pool_holds_and_refused_beyond() -> None:
    machine = Machine(2, 256)
    fits = request(60, most=100)
    machine.scheduler.add(fits)
    machine.run()
    assert len(fits.tokens) == 64
    with pytest.raises(
        UsageError, match="64 tokens, and the KV cache has room for 64: use a larger kv_memory"
    ):
        machine.scheduler.add(request(64))


def test_samples_of_a_prompt_compute_it_once() -> None:
    machine = Machine(32, 256)
    for _ in range(4):
        machine.scheduler.add(request(100, most=2))
    machine.run()
    assert machine.computed == 100 + 1 + 3 * (4 + 1)


def test_several_steps_are_taken_only_where_nobody_waits_and_the_host_need_not_look() -> None:
    ahead = {"ahead": lambda count, most: 4}
    machine = Machine(8, 128, requests=2, **ahead)
    machine.scheduler.add(request([5], most=30))
    machine.step()
    machine.step()
    assert machine.last is not None and machine.last.steps == 4
    machine.scheduler.add(request([6], most=30, watched=True))
    machine.step()
    machine.step()
    assert machine.last.steps == 1


# -- the cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [n + d for n in (B, 2 * B, 3 * B) for d in (-1, 0, 1)])
@pytest.mark.parametrize("more", [0, 1, B - 1, B])
def test_a_common_beginning_is_found_to_the_token(shared: int, more: int) -> None:
    machine = Machine(32, 256)
    common = list(range(1000, 1000 + shared))
    machine.scheduler.add(request([*common, 1, 2, 3]))
    machine.run()
    again = request([*common, *range(50, 50 + more)])
    machine.scheduler.add(again)
    machine.run()
    assert again.reused == min(shared, len(common) + more - 1)


def test_another_salt_and_another_rotation_share_nothing() -> None:
    machine = Machine(32, 256, kind=lambda length: int(length > 80))
    machine.scheduler.add(request(70))
    machine.run()
    other, longer, same = request(70, salt=b"x"), request(90), request(75)
    for each in (other, longer, same):
        machine.scheduler.add(each)
    machine.run()
    assert (other.reused, longer.reused, same.reused) == (0, 0, 70)


def test_the_block_let_go_longest_ago_goes_first_and_of_a_sequence_its_last() -> None:
    machine = Machine(4, 128)
    for first in (1, 2):
        machine.scheduler.add(request([first] * 64, most=1))
        machine.run()
    machine.scheduler.add(request([3] * 20, most=1))
    machine.run()
    hits = [machine.sequences.find([first] * 64, 0, b"", 64) for first in (1, 2)]
    assert [len(hit.blocks) for hit in hits] == [1, 2]
    for hit in hits:
        machine.sequences.drop(hit)
    machine.check()


def test_blocks_of_a_request_that_failed_are_not_found() -> None:
    machine = Machine(32, 256)
    machine.scheduler.add(request(100))
    machine.step()
    machine.step(fail=lambda r: True)
    assert machine.sequences.pool.cached_blocks == 0
    again = request(100)
    machine.scheduler.add(again)
    machine.run()
    assert again.reused == 0


def test_truncating_into_a_shared_block_copies_it() -> None:
    sequences = Sequences(8, 128, 3)
    parent = sequences.open()
    sequences.reserve(parent, 64)
    parent.length = 64
    child = sequences.fork(parent, 64)
    sequences.truncate(child, 40)
    assert child.blocks[0] == parent.blocks[0] and child.blocks[1] != parent.blocks[1]
    assert sequences.copies == [(parent.blocks[1], child.blocks[1])]
    sequences.copied()
    assert sequences.pool.users(parent.blocks[1]) == 1
    sequences.close(child)
    sequences.close(parent)
    assert sequences.pool.free_blocks == 8


def test_truncating_into_a_block_that_can_be_found_takes_it_back() -> None:
    sequences = Sequences(8, 128, 3)
    sequence, tokens = sequences.open(), list(range(64))
    sequences.begin(sequence, tokens, 0)
    sequences.reserve(sequence, 64)
    sequence.length = 64
    sequences.note(sequence, tokens)
    sequences.truncate(sequence, 40)
    assert sequences.copies == [] and sequences.pool.cached_blocks == 1


def test_a_copy_nobody_needs_any_more_is_not_made() -> None:
    machine = Machine(8, 128)
    machine.scheduler.add(request(40))
    machine.run()
    again = request(40)
    machine.scheduler.add(again)
    machine.scheduler.schedule()
    assert len(machine.sequences.copies) == 1
    machine.scheduler.abort(again)
    assert machine.sequences.copies == []
    machine.check()


def test_equal_hashes_of_unlike_tokens_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xinfer_vk.blocks.block_key", lambda parent, tokens: b"the same")
    machine = Machine(32, 256)
    machine.scheduler.add(request(100))
    machine.run()
    other = request(list(range(500, 600)))
    machine.scheduler.add(other)
    machine.run()
    assert other.reused == 0


def test_a_block_is_free_again_when_its_last_user_lets_go() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.free_blocks == 1
    pool.release(block)
    assert pool.free_blocks == 2


def test_no_block_is_handed_out_twice_and_a_full_cache_says_so() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate() for _ in range(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(OutOfMemoryError, match="kv_memory"):
        pool.allocate()
