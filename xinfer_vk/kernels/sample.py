"""The device sampler: logits of a batch in, a token a row out (shaders/sample_*.comp).

``sample`` is the list of steps; ``sampling/device.py`` owns the buffers and writes the parameters.
A segment is three or four dispatches: *adjust* (penalties, bias, keys), *sum* (weights of chunks, for rows
that need them), *pick* from a short list, and *pick* from the whole vocabulary for the rows that are left.
Every sensible order of stages is one segment; penalties or a bias after a truncation begin another.
"""

from __future__ import annotations

from dataclasses import dataclass

from xinfer_vk.kernels import sample_layout as lay
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.sample_layout import Geometry
from xinfer_vk.kernels.sample_oracles import (
    adjust_oracle,
    list_oracle,
    logprobs_oracle,
    sum_oracle,
    vocabulary_oracle,
)
from xinfer_vk.plan import Buffer, BufferKind, DeviceProfile, Kernel, Runtime, Step, make_step


@dataclass(frozen=True)
class SampleBuffers:
    """What the sampler works on, for at most ``rows`` rows of one vocabulary."""

    geometry: Geometry
    rows: int
    history_stride: int
    parameters: Buffer  # [rows][ROW_WORDS], then bias entries [bias_entries][BIAS_WORDS]
    history: Buffer  # [slots][history_stride] token ids
    keys: Buffer  # [rows][vocabulary]
    partials: Buffer  # [rows][partials_stride]: groups' largest keys, chunks' sums, done
    kept: Buffer  # [rows][KEPT_WORDS]: what is left of the short list, for those who want to look

    @classmethod
    def allocate(
        cls, runtime: Runtime, vocabulary: int, rows: int, slots: int, history_stride: int, bias_entries: int
    ) -> SampleBuffers:
        g = Geometry(vocabulary)
        # Not STATE: parameters change when a sequence comes or goes, not at each step.
        scratch = {
            "parameters": rows * lay.ROW_WORDS + bias_entries * lay.BIAS_WORDS,
            "history": slots * history_stride,
            "keys": rows * vocabulary,
            "partials": rows * g.partials_stride,
            "kept": rows * lay.KEPT_WORDS,
        }
        buffers = {
            name: runtime.allocate(f"sampler {name}", words, BufferKind.SCRATCH)
            for name, words in scratch.items()
        }
        return cls(g, rows, history_stride, **buffers)

    @property
    def all(self) -> tuple[Buffer, ...]:
        return self.parameters, self.history, self.keys, self.partials, self.kept


def _words(names: str) -> tuple[str, ...]:
    """Push constants, all unsigned."""
    return tuple(f"{name}:u" for name in names.split())


def adjust_kernel(source: str, local_size: int) -> Kernel:
    """``source``: "logits" in the first segment, "keys" in later ones."""
    return Kernel(
        name=f"sample_adjust.{source}",
        shader=f"sample_adjust.{source}",
        bindings=("state", "parameters", "history", "keys", "partials", "logits")[
            : 6 if source == "logits" else 5
        ],
        params=_words(
            "logits_offset logits_stride vocabulary group_tokens partials_stride done history_stride segment"
        ),
        spec=(("local_size", local_size),),
        oracle=adjust_oracle,
    )


def sum_kernel(local_size: int) -> Kernel:
    return Kernel(
        name="sample_sum",
        shader="sample_sum",
        bindings=("state", "parameters", "keys", "partials"),
        params=_words("vocabulary groups partials_stride total segment"),
        spec=(("local_size", local_size),),
        oracle=sum_oracle,
    )


def pick_kernel(source: str, local_size: int) -> Kernel:
    """``source``: "list" or "vocabulary"."""
    return Kernel(
        name=f"sample_pick.{source}",
        shader=f"sample_pick.{source}",
        bindings=("state", "parameters", "keys", "partials", "kept", "history", "result"),
        params=_words(
            "vocabulary group_tokens groups chunks partials_stride done history_stride result_offset segment"
        ),
        spec=(("local_size", local_size),),
        oracle=list_oracle if source == "list" else vocabulary_oracle,
    )


def logprobs_kernel(local_size: int) -> Kernel:
    return Kernel(
        name="sample_logprobs",
        shader="sample_logprobs",
        bindings=("state", "parameters", "logits", "result", "logprobs"),
        params=_words("logits_offset logits_stride vocabulary result_offset logprobs_offset"),
        spec=(("local_size", local_size),),
        oracle=logprobs_oracle,
    )


def local_size(P: DeviceProfile) -> int:
    """A CPU device runs a workgroup on one core, and pays for each of its invocations at a barrier."""
    return 32 if P.simd else 256


def sample(
    P: DeviceProfile,
    buffers: SampleBuffers,
    logits: Ref,
    logits_stride: int,
    rows: int,
    result: Ref,
    state: Buffer,
    segments: int = 1,
    sums: bool = True,
) -> list[Step]:
    """``result[i]`` = the token drawn from ``logits[i]`` for the outputs in use of ``rows``.

    ``logits``: f32 ``[rows][logits_stride]``, of which the vocabulary's first words are read. Position and
    number of rows come from ``state``, all else from ``buffers.parameters``. A row with NaN or +inf gives
    0xFFFFFFFF, one in which no token is possible 0xFFFFFFFE. ``segments``: as many as the rows need;
    ``sums``: whether one of them asks for sums of weights.
    """
    assert rows <= buffers.rows
    g, lanes = buffers.geometry, local_size(P)
    steps: list[Step] = []
    for segment in range(segments):
        source = "keys" if segment else "logits"
        bound = {
            "state": state,
            "parameters": buffers.parameters,
            "keys": buffers.keys,
            "partials": buffers.partials,
        }
        shape = {"vocabulary": g.vocabulary, "partials_stride": g.partials_stride, "segment": segment}
        steps.append(
            make_step(
                adjust_kernel(source, lanes),
                {**bound, "history": buffers.history} | ({} if segment else {"logits": logits.buffer}),
                {
                    **shape,
                    "logits_offset": logits.offset,
                    "logits_stride": logits_stride,
                    "group_tokens": g.group_tokens,
                    "done": g.done,
                    "history_stride": buffers.history_stride,
                },
                (g.chunks, rows),
            )
        )
        if sums:
            steps.append(
                make_step(
                    sum_kernel(lanes),
                    bound,
                    {**shape, "groups": g.groups, "total": g.done + 1},
                    (g.chunks, rows),
                )
            )
        steps += [
            make_step(
                pick_kernel(part, lanes),
                {**bound, "kept": buffers.kept, "history": buffers.history, "result": result.buffer},
                {
                    **shape,
                    "group_tokens": g.group_tokens,
                    "groups": g.groups,
                    "chunks": g.chunks,
                    "done": g.done,
                    "history_stride": buffers.history_stride,
                    "result_offset": result.offset,
                },
                (rows,),
            )
            for part in ("list", "vocabulary")
        ]
    return steps


def logprobs(
    P: DeviceProfile,
    buffers: SampleBuffers,
    logits: Ref,
    logits_stride: int,
    rows: int,
    result: Ref,
    out: Ref,
    state: Buffer,
) -> Step:
    """``out[i]`` (``LOGPROB_WORDS`` words) = what tells the log-probabilities of ``result[i]``, or of the
    row's target, for the rows that ask for them. Sampling leaves the logits as the model made them."""
    return make_step(
        logprobs_kernel(local_size(P)),
        {
            "state": state,
            "parameters": buffers.parameters,
            "logits": logits.buffer,
            "result": result.buffer,
            "logprobs": out.buffer,
        },
        {
            "logits_offset": logits.offset,
            "logits_stride": logits_stride,
            "vocabulary": buffers.geometry.vocabulary,
            "result_offset": result.offset,
            "logprobs_offset": out.offset,
        },
        (rows,),
    )
