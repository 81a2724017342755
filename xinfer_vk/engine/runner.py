"""One step of the model: a ragged batch of tokens goes in, tokens or logits come out.

A step has three visible parts: *prepare* writes the batch into the state buffer, *run* replays the
plan for its bucket, *finish* reads the result. A batch may mix prefill chunks and decode tokens of
any sequences; rows are not padded between sequences, a bucket's unused rows are skipped on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from xinfer_vk.cache import CachedSequence, KVCache
from xinfer_vk.engine.positions import RopeTables
from xinfer_vk.kernels import state as state_layout
from xinfer_vk.kernels.attention import appends, planned_context, query_tile
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.copy_region import list_words, region_list
from xinfer_vk.kernels.matmul import planned_rows
from xinfer_vk.kernels.matmul_a8 import FORMATS as A8_FORMATS
from xinfer_vk.kernels.quantize_rows import quantized_words
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.decoder import DecoderWeights, matrices
from xinfer_vk.models.graph import Activations, Graph
from xinfer_vk.models.registry import family
from xinfer_vk.plan import WORD_BYTES, Buffer, BufferKind, Plan, Recorded, Runtime
from xinfer_vk.sampling.device import (
    BIAS_ENTRIES,
    NAN_TOKEN,
    NO_TOKEN,
    DeviceSampler,
    SamplerVariant,
    check_tokens,
)
from xinfer_vk.sampling.logprobs import TokenLogprobs

T = TypeVar("T")
Outputs = Literal["none", "last", "all"]
Head: TypeAlias = Literal["argmax", "logits", "logprobs", "hidden"] | SamplerVariant

LONG_COMPILE_S = 0.5  # who waits so long for a prompt's kernels will wait for those of decoding, too
LONG_STEP_S = 0.4  # a dispatch that takes longer is for too many tokens: drivers give up on those of seconds
FEWEST_PREFILL_TOKENS = 64  # fewer would read the weights too often
MAX_AHEAD = 8  # decode steps in one plan
AHEAD_S = 0.05  # and so long at most: nobody waits longer for a token, or for a stop
GROWTH = 1.1  # of the time that a step is thought to take, at most, from one run to the next
GROWTH_AHEAD = 2.0  # the same where several steps were run: that says more
MAX_OUTPUTS = 32  # rows of logits kept at once: 32 x 152k x 4 bytes = 19 MB for Qwen2.5


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence; they are appended to what its cache holds. ``outputs``: the rows
    whose logits are wanted, "none", the "last" one, or "all"."""

    sequence: CachedSequence
    token_ids: Sequence[int]
    outputs: Outputs = "last"


def _decoding(chunks: Sequence[Chunk]) -> bool:
    return all(len(chunk.token_ids) == 1 for chunk in chunks)


def _longest(chunks: Sequence[Chunk]) -> int:
    return max(chunk.sequence.length + len(chunk.token_ids) for chunk in chunks)


def bucket(count: int) -> int:
    """The smallest power of two that holds ``count`` rows; 0 for none."""
    return 0 if count == 0 else 1 << (count - 1).bit_length()


class StepStopped(Exception):
    """A step was given up before its end: the sequences are as they were before it."""


class ModelRunner:
    """Runs batches of one model on one device over one KV cache.

    ``max_tokens`` bounds the rows of a step, ``cache.capacity`` the positions. Prefills should take
    ``prefill_tokens`` a step: at first as many, fewer once a single dispatch was seen to take too long.
    Plans are recorded on first use, one for each (planned tokens, outputs bucket, head) and kind of batch;
    ``progress(done, total)`` is called as pipelines compile. ``activation_dtype``: of the inputs of
    products, "f32", or "int8" where the weights' format allows it.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: ModelConfig,
        weights: DecoderWeights,
        cache: KVCache,
        max_tokens: int = 512,
        progress: Callable[[int, int], None] | None = None,
        max_outputs: int = MAX_OUTPUTS,
        activation_dtype: str = "f32",
    ) -> None:
        self.activation_dtype = activation_dtype
        self._progress = progress
        self.runtime, self.config, self.weights, self.cache = runtime, config, weights, cache
        held = min(cache.capacity * cache.max_sequences, cache.pool.count * state_layout.BLOCK_TOKENS)
        chunk = min(bucket(max_tokens), bucket(held))  # of all sequences together
        self.max_tokens = min(max(chunk, bucket(cache.max_sequences)), state_layout.MAX_TOKENS)
        self.max_outputs = min(bucket(max_outputs), max(self.max_tokens, bucket(cache.max_sequences)))
        self.prefill_tokens = self.max_tokens  # of a step; fewer where the device is slow
        self.steps_run = 0
        self.last_plan: Plan | None = None  # of the step run last
        self.device_s = 0.0  # from submits to their ends, so far; what else a step takes is the host's
        self.bytes_read = 0
        self.compile_s = 0.0  # spent on making pipelines and recording plans
        self._plans: dict[tuple[int, int, Head, int, bool, int], tuple[Recorded, Plan]] = {}
        self._step_s: dict[int, float] = {}  # of a decode step, by bucket of sequences
        self._table_stride = cache.blocks_per_sequence
        # What the state buffer has of the steps before: each sequence's blocks, by row of the cache, and the
        # rows of the sequences if the last step was one of decoding.
        self._tables: list[list[int]] = [[] for _ in range(cache.max_sequences)]
        self._decoding: list[int] = []
        self._sampler: DeviceSampler | None = None
        self._buffers: list[Buffer] = []
        self.rope = RopeTables(runtime, config, cache.capacity, self.max_tokens)
        try:
            tables = state_layout.state_words(cache.max_sequences, self._table_stride)
            words = tables + list_words(cache.max_sequences)
            self._state = self._allocate("step state", words, BufferKind.STATE)
            self._copy_list = tables
            self._copies: Recorded | None = None
            self._result = self._allocate("result tokens", self.max_outputs * MAX_AHEAD, BufferKind.RESULT)
            self._words, self._results = runtime.mapped(self._state), runtime.mapped(self._result)
            self._words[state_layout.TABLE_STRIDE] = self._table_stride
            self._activations = Activations(
                runtime,
                config,
                tokens=self.max_tokens,
                outputs=self.max_outputs,
                max_context=cache.capacity,
                ordered_width=max((m.cols for m in matrices(weights) if m.order is not None), default=0),
                quantized_width=self._quantized_width(),
            )
            self._buffers.append(self._activations.buffer)
        except BaseException:
            self.free()
            raise
        self._query_tile = query_tile(runtime.profile, config.head_dim)

    @property
    def sampler(self) -> DeviceSampler:
        """The sampler on the device, made when it is first used."""
        if self._sampler is None:
            self._sampler = DeviceSampler(
                self.runtime,
                self.config.vocab_size,
                self.max_outputs,
                slots=self.cache.max_sequences,
                history_tokens=self.cache.capacity,
                bias_entries=self.max_outputs * BIAS_ENTRIES,
            )
        return self._sampler

    def run(
        self, chunks: Sequence[Chunk], head: Head = "argmax", stopped: Callable[[], bool] | None = None
    ) -> np.ndarray:
        """:meth:`run_rows`, for those who trust every row. Raises :class:`NumericError` on NaN and +inf."""
        out = self.run_rows(chunks, head, stopped)
        if head in ("logits", "hidden"):
            if not (out < np.inf).all():  # NaN is not, either
                check_tokens(np.array([NAN_TOKEN]), [chunks[0].sequence.length], self.steps_run)
            return out
        positions = [chunk.sequence.length for chunk in chunks if chunk.outputs != "none"]
        check_tokens(out, positions if len(positions) == len(out) else positions * len(out), self.steps_run)
        return out

    def run_rows(
        self, chunks: Sequence[Chunk], head: Head = "argmax", stopped: Callable[[], bool] | None = None
    ) -> np.ndarray:
        """Append every chunk to its sequence and return, in order, for the rows asked for:

        * ``head="argmax"``: token ids, ``int64 [rows]``, :data:`NAN_TOKEN` for a row with NaN or +inf
        * a :class:`SamplerVariant`, from ``sampler.write_params``: sampled token ids, ``int64 [rows]``, or
          :data:`NAN_TOKEN`, or :data:`NO_TOKEN` for a row without a possible token
        * ``head="logits"``: ``float32 [rows, vocabulary]``
        * ``head="hidden"``: the final norm's rows, ``float32 [rows, hidden size]``; the head does not run
        * ``head="logprobs"``: nothing; ``sampler.read_logprobs`` has those of the rows' targets

        A step of many tokens may take seconds: between its submits ``stopped`` may say that it is not wanted
        any more, which raises :class:`StepStopped`. Raises :class:`OutOfMemoryError` when the cache is full.
        """
        rows = self._prepare(chunks)
        total = sum(len(chunk.token_ids) for chunk in chunks)
        planned, compiled = planned_rows(self.runtime.profile, total), self.compile_s
        recorded, self.last_plan = self._plan(
            planned, bucket(rows), head, 1, _decoding(chunks), self._context(planned, _longest(chunks))
        )
        if self.compile_s - compiled > LONG_COMPILE_S and not _decoding(chunks):
            self._prepare_decoding(chunks, rows, head)
        whole = recorded.run(stopped)
        self.device_s += recorded.seconds
        if not whole:
            raise StepStopped
        if recorded.longest_step_s > LONG_STEP_S and total > FEWEST_PREFILL_TOKENS:
            self.prefill_tokens = min(self.prefill_tokens, bucket(total) // 2)
        for chunk in chunks:
            chunk.sequence.length += len(chunk.token_ids)
        self.steps_run += 1
        return self._finish(rows, head)

    def decode(
        self,
        sequences: Sequence[CachedSequence],
        tokens: Sequence[int],
        head: Head = "argmax",
        steps: int = 1,
    ) -> list[list[int]]:
        """Decode steps: ``tokens`` are the last of each sequence, and what a step chooses is the next one's
        input. Returns the tokens chosen, a list for each step, with :data:`NAN_TOKEN` or :data:`NO_TOKEN` in
        a row that has none; what follows in that row means nothing, and its sequence ends before that step.
        ``head`` is argmax or a :class:`SamplerVariant`, for several steps one without log-probabilities.

        All of this runs between two submits, while the device waits, and with caches that its work has
        emptied: so it touches as little as it can. Raises what :meth:`run` raises."""
        assert 1 <= steps <= MAX_AHEAD and (steps == 1 or not self.rope.by_length)
        rows = len(sequences)
        self._unless_closed(self._prepare_decode, sequences, tokens, steps)
        planned, outputs = planned_rows(self.runtime.profile, rows), bucket(rows)
        context = self._context(planned, max([sequence.length for sequence in sequences]) + steps)
        recorded, self.last_plan = self._plan(planned, outputs, head, steps, True, context)
        recorded.run()
        seconds = recorded.seconds
        self.device_s += seconds
        self._note_time(outputs, seconds / steps, GROWTH_AHEAD if steps > 1 else GROWTH)
        self.steps_run += steps
        self.bytes_read += steps * rows * WORD_BYTES
        results, width = self._results, self.max_outputs
        chosen = [results[at : at + rows].tolist() for at in range(0, steps * width, width)]
        if max(map(max, chosen)) < NO_TOKEN:
            for sequence in sequences:
                sequence.length += steps
            return chosen
        for row, sequence in enumerate(sequences):
            good = 0
            while good < steps and chosen[good][row] < NO_TOKEN:
                good += 1
            sequence.length += max(good, 1)
        return chosen

    def steps_ahead(self, sequences: int, most: int) -> int:
        """How many decode steps of so many sequences may be run as one: a power of two, at most ``most``,
        and no more than fit in :data:`AHEAD_S` as far as is known."""
        step_s = self._step_s.get(bucket(sequences))
        if step_s is None or self.rope.by_length:
            return 1
        fitting = min(most, MAX_AHEAD, int(AHEAD_S / max(step_s, 1e-6)))
        return 1 << max(fitting, 1).bit_length() - 1

    def _note_time(self, key: int, seconds: float, growth: float) -> None:
        """Remember what a decode step takes, of so many sequences as the bucket ``key``: the shortest time
        lately, since the first one of a plan and those of a busy machine say little. ``growth``: of what is
        remembered, at most; several steps as one say more, and a context that has become long must soon be
        seen."""
        self._step_s[key] = min(seconds, self._step_s.get(key, seconds) * growth)

    def time_steps(self, chunks: Sequence[Chunk], repeats: int) -> tuple[Plan, np.ndarray]:
        """The plan that :meth:`run` would replay for ``chunks`` with argmax, and the device's time of each of
        its steps in nanoseconds, ``float64 [repeats, steps]``. The sequences stay as they were.

        Raises :class:`DeviceError` where the device's time cannot be had (no layer, no timestamps).
        """
        rows = self._prepare(chunks)
        total = sum(len(chunk.token_ids) for chunk in chunks)
        planned = planned_rows(self.runtime.profile, total)
        context = self._context(planned, _longest(chunks))
        plan = self._make_plan(planned, bucket(rows), "argmax", 1, _decoding(chunks), context)
        recorded = self.runtime.prepare(plan, timed=True)
        times = []
        for _ in range(repeats):
            recorded.run()
            times.append(recorded.times_ns())
        return plan, np.array(times)

    def rows_of(
        self, sequence: CachedSequence, tokens: Sequence[int], head: Literal["logits", "hidden"]
    ) -> np.ndarray:
        """Append ``tokens`` to a sequence, as many a step as it returns rows: what :meth:`run` returns for
        every token. Raises what :meth:`run` raises."""
        step = self.max_outputs
        chunks = (Chunk(sequence, tokens[at : at + step], "all") for at in range(0, len(tokens), step))
        return np.concatenate([self.run([chunk], head) for chunk in chunks])

    def target_logprobs(
        self, sequence: CachedSequence, tokens: Sequence[int], targets: Sequence[int]
    ) -> np.ndarray:
        """Append ``tokens`` to a sequence; the log-probability of each one's target, ``float64 [tokens]``,
        NaN where its logits hold NaN or +inf. Raises what :meth:`run_rows` raises."""
        self.sampler.write_targets(targets)
        self.run_rows([Chunk(sequence, tokens, "all")], "logprobs")
        return self.sampler.read_targets(len(tokens))

    def read_logprobs(self, row: int) -> TokenLogprobs:
        """Log-probabilities of the token that the last run chose (or had as its target) in ``row``, for
        rows whose parameters ask for them."""
        logprobs = self.sampler.read_logprobs(row)
        assert logprobs is not None, f"row {row} asked for no log-probabilities"
        self.bytes_read += self.sampler.logprobs_bytes(row)
        return logprobs

    def make_copies(self) -> None:
        """Copy the blocks that the cache wants copied; every step does it first."""
        cache, most = self.cache, self.cache.max_sequences
        if not cache.copies:
            return
        if self._copies is None:
            began = time.perf_counter()
            steps = cache.copy_steps(self._state, self._copy_list)
            self._copies = self.runtime.prepare(Plan("copied blocks", tuple(steps)))
            self.compile_s += time.perf_counter() - began
        regions = cache.copy_list()
        for at in range(0, len(regions), most):
            self._write(self._copy_list, region_list(regions[at : at + most]))
            self._copies.run()
            self.device_s += self._copies.seconds
        cache.copied()

    def free(self) -> None:
        """Give the device memory back, the cache's not included."""
        self._plans.clear()
        self._copies = None
        self.rope.free()
        for buffer in self._buffers:
            self.runtime.free(buffer)
        self._buffers.clear()
        if self._sampler is not None:
            self._sampler.free()
            self._sampler = None

    # -- prepare ------------------------------------------------------------------------------

    def _prepare(self, chunks: Sequence[Chunk]) -> int:
        """Write the batch into the state buffer; how many rows of output it asks for."""
        return self._unless_closed(self._write_batch, chunks)

    def _unless_closed(self, write: Callable[..., T], *arguments: Any) -> T:
        """Write into the mapped state buffer. To look first would cost every step."""
        try:
            return write(*arguments)
        except ValueError:
            self.runtime.mapped(self._state)  # says so if the runtime was closed
            raise

    def _write_batch(self, chunks: Sequence[Chunk]) -> int:
        s, host = state_layout, self._words
        self._decoding = []
        self.make_copies()
        row = tiles = rows = 0
        for chunk in chunks:
            sequence, count = chunk.sequence, len(chunk.token_ids)
            assert count > 0, "an empty chunk"
            assert row + count <= self.max_tokens, f"more than {self.max_tokens} tokens in one step"
            self.cache.reserve(sequence, count)
            positions = np.arange(sequence.length, sequence.length + count, dtype=np.uint32)
            blocks = np.asarray(sequence.blocks, np.uint32)
            slots = blocks[positions // s.BLOCK_TOKENS] * s.BLOCK_TOKENS + positions % s.BLOCK_TOKENS
            self._write_table(sequence)
            self._write(s.TOKEN_ID + row, chunk.token_ids)
            self._write(s.POSITION + row, positions)
            self._write(s.SEQUENCE + row, [sequence.row] * count)
            self._write(s.SLOT + row, slots)
            for start in range(0, count, self._query_tile):
                host[s.TILE_START + tiles] = row + start
                host[s.TILE_COUNT + tiles] = min(self._query_tile, count - start)
                tiles += 1
            first_output = {"none": row + count, "last": row + count - 1, "all": row}[chunk.outputs]
            for output_row in range(first_output, row + count):
                assert rows < self.max_outputs, f"more than {self.max_outputs} output rows in one step"
                host[s.OUTPUT_ROW + rows] = output_row
                rows += 1
            row += count
        host[s.N_TOKENS], host[s.N_OUTPUTS], host[s.N_QUERY_TILES] = row, rows, tiles
        self.rope.write([(chunk.sequence, len(chunk.token_ids)) for chunk in chunks])
        return rows

    def _prepare_decode(self, sequences: Sequence[CachedSequence], tokens: Sequence[int], steps: int) -> None:
        """The same for one token of each sequence, whose logits are wanted. Most of it stands in the buffer
        since the step before."""
        s, host = state_layout, self._words
        if self.cache.copies:
            self.make_copies()
        rows = [sequence.row for sequence in sequences]
        if rows != self._decoding:
            self._write(s.SEQUENCE, rows)
            self._write(s.OUTPUT_ROW, range(len(rows)))
            self._write(s.TILE_START, range(len(rows)))
            self._write(s.TILE_COUNT, [1] * len(rows))
            host[s.N_TOKENS] = host[s.N_OUTPUTS] = host[s.N_QUERY_TILES] = len(rows)
            self._decoding = rows
        for i, sequence in enumerate(sequences):
            position, blocks = sequence.length, sequence.blocks
            if position + steps > len(blocks) * s.BLOCK_TOKENS:
                self.cache.reserve(sequence, steps)
            if blocks != self._tables[sequence.row]:
                self._write_table(sequence)
            host[s.TOKEN_ID + i] = tokens[i]
            host[s.POSITION + i] = position
            host[s.SLOT + i] = blocks[position // s.BLOCK_TOKENS] * s.BLOCK_TOKENS + position % s.BLOCK_TOKENS
        if self.rope.by_length:
            self.rope.write([(sequence, 1) for sequence in sequences])

    def _write_table(self, sequence: CachedSequence) -> None:
        self._write(state_layout.BLOCK_TABLE + sequence.row * self._table_stride, sequence.blocks)
        self._tables[sequence.row] = sequence.blocks.copy()

    def _write(self, at: int, words: Sequence[int] | np.ndarray) -> None:
        self._words[at : at + len(words)] = np.asarray(words, np.uint32)  # type: ignore[call-overload]

    # -- run ----------------------------------------------------------------------------------

    def _context(self, tokens: int, longest: int) -> int:
        """The context to plan for. ``longest``: of the sequences, after all steps of the plan."""
        profile, capacity = self.runtime.profile, self.cache.capacity
        return planned_context(profile, tokens, self.config.heads, longest, capacity)

    def _plan(
        self, tokens: int, outputs: int, head: Head, ahead: int, decoding: bool, context: int
    ) -> tuple[Recorded, Plan]:
        key = (tokens, outputs, head, ahead, decoding and appends(self.runtime.profile, tokens), context)
        found = self._plans.get(key)
        if found is None:
            began = time.perf_counter()
            plan = self._make_plan(*key)
            found = self._plans[key] = (self.runtime.prepare(plan, progress=self._progress), plan)
            self.compile_s += time.perf_counter() - began
        return found

    def _prepare_decoding(self, chunks: Sequence[Chunk], rows: int, head: Head) -> None:
        """Compile what the token after a prompt needs before the prompt runs: while nothing is printed yet,
        a progress bar can say how far it is."""
        if rows and (head == "argmax" or isinstance(head, SamplerVariant)):
            planned = planned_rows(self.runtime.profile, rows)
            self._plan(planned, bucket(rows), head, 1, True, self._context(planned, _longest(chunks) + 1))

    def _make_plan(
        self, tokens: int, outputs: int, head: Head, ahead: int, decoding: bool = False, context: int = 0
    ) -> Plan:
        """``ahead`` steps one after the other, whose results lie ``max_outputs`` words apart. ``decoding``:
        each token is of another sequence. ``context``: of the sequences, at most; 0: what the cache holds."""
        graph = Graph(
            self.runtime.profile,
            self.config,
            tokens=tokens,
            outputs=outputs,
            activations=self._activations,
            state=self._state,
            cache=self.cache,
            rope_tables=self.rope.tables,
            max_context=context or self.cache.capacity,
            decoding=decoding,
            activation_dtype=self.activation_dtype,
        )
        for step in range(ahead):
            result = Ref(self._result, step * self.max_outputs)
            if step:
                graph.advance(Ref(self._result, (step - 1) * self.max_outputs))
            graph.ends_at_final_norm = head == "hidden"
            family(self.config.architecture).forward(graph, self.weights)
            if outputs:
                self._add_head(graph, outputs, head, result)
        return graph.plan(f"{tokens} tokens, {outputs} outputs, {head}" + (f", {ahead} steps" * (ahead > 1)))

    def _add_head(self, graph: Graph, outputs: int, head: Head, result: Ref) -> None:
        """What is done with the logits on the device."""
        logits = self._activations.logits
        if head == "argmax":
            graph.argmax(result)
        elif head == "logprobs":
            graph.steps.append(
                self.sampler.logprobs_step(logits.ref, logits.stride, outputs, result, self._state)
            )
        elif isinstance(head, SamplerVariant):
            graph.steps += self.sampler.steps(logits.ref, logits.stride, outputs, result, self._state, head)

    # -- finish -------------------------------------------------------------------------------

    def _finish(self, rows: int, head: Head) -> np.ndarray:
        if rows == 0 or head == "logprobs":
            return np.empty(0, np.int64)
        if head in ("logits", "hidden"):
            logits = self._activations.logits if head == "logits" else self._activations.final
            words = self.runtime.read(logits.ref.buffer, logits.ref.offset, rows * logits.stride)
            self.bytes_read += words.nbytes
            return words.view(np.float32).reshape(rows, logits.stride)
        words = self.runtime.read(self._result, 0, rows)
        self.bytes_read += words.nbytes
        return words.astype(np.int64)

    def _quantized_width(self) -> int:
        """Words of the widest row of activations in 8 bits."""
        if self.activation_dtype != "int8":
            return 0
        cols = [m.cols for m in matrices(self.weights) if m.fmt in A8_FORMATS]
        return quantized_words(max(cols, default=0))

    def _allocate(self, name: str, words: int, kind: BufferKind) -> Buffer:
        buffer = self.runtime.allocate(name, words, kind)
        self._buffers.append(buffer)
        return buffer


def make_runner(
    runtime: Runtime,
    config: ModelConfig,
    weights: DecoderWeights,
    kv_dtype: str,
    *,
    capacity: int,
    sequences: int = 1,
    total: int | None = None,
    blocks: int | None = None,
    max_tokens: int = 512,
    max_outputs: int = MAX_OUTPUTS,
    progress: Callable[[int, int], None] | None = None,
    activation_dtype: str = "f32",
) -> ModelRunner:
    """A runner with a cache of its own, which :class:`KVCache` explains. Nothing stays allocated if the
    device has no room for both."""
    cache = KVCache(
        runtime,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        kv_dtype=kv_dtype,
        capacity=capacity,
        sequences=sequences,
        total=total,
        blocks=blocks,
    )
    try:
        return ModelRunner(
            runtime, config, weights, cache, max_tokens, progress, max_outputs, activation_dtype
        )
    except BaseException:
        cache.free()
        raise
