"""One prompt, continued by several decoding strategies, as one batch.

All share the prompt's KV blocks, and all that draw use the same random numbers, so that what differs is
the method. How much probability a method's truncation keeps is found afterwards, by running each text
once more for its logits and asking the CPU reference which tokens were left to choose from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xinfer_vk.engine.generation import GenerationResult
from xinfer_vk.engine.repetition import distinct_ngrams, repeated_ngrams
from xinfer_vk.engine.runner import Chunk
from xinfer_vk.sampling import reference
from xinfer_vk.sampling.params import SamplingParams

if TYPE_CHECKING:
    from xinfer_vk.engine.llm import LLM

# Name → fields of SamplingParams. A truncation is shown at temperature 1, where it does the work alone.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "T = 0.8": {"temperature": 0.8},
    "top-k 20": {"temperature": 1.0, "top_k": 20},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "all three": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
}


@dataclass(frozen=True)
class Decoding:
    """What one method made of the prompt. ``repeated_4grams`` and ``distinct_2``: see engine/repetition.py;
    None where the text is too short to tell."""

    name: str
    params: SamplingParams
    result: GenerationResult
    repeated_4grams: float | None
    distinct_2: float | None


@dataclass(frozen=True)
class Kept:
    """What a method could choose from at each step: how much of the model's probability (at temperature 1),
    and how many tokens."""

    mass: tuple[float, ...]
    tokens: tuple[int, ...]


def compare_decoding(
    llm: LLM,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    seed: int,
    system: str | None = None,
    raw: bool | None = None,
    ignore_eos: bool = False,
    stop_event: threading.Event | None = None,
    on_step: Callable[[int], None] | None = None,
    on_decoding: Callable[[Decoding], None] | None = None,
) -> list[Decoding]:
    """The prompt's continuation by each of :data:`METHODS`. ``on_step`` is called with the number of
    tokens so far, ``on_decoding`` with each text as it ends, also with unfinished texts after an exception.

    Raises :class:`UsageError` as :meth:`LLM.batch` does.
    """
    params = [
        SamplingParams(seed=seed, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, **fields)
        for fields in METHODS.values()
    ]
    names = list(METHODS)

    def decoding(result: GenerationResult) -> Decoding:
        ids, method = result.token_ids, result.prompt
        return Decoding(
            names[method], params[method], result, repeated_ngrams(ids, 4), distinct_ngrams(ids, 2)
        )

    def ended(result: GenerationResult) -> None:
        if on_decoding is not None:
            on_decoding(decoding(result))

    results = llm.batch(
        [prompt] * len(params),
        params,
        system=system,
        raw=raw,
        stop_event=stop_event,
        on_step=on_step,
        on_result=ended,
    )
    return [decoding(result) for result in results]


def kept_at_each_step(
    llm: LLM,
    decodings: Sequence[Decoding],
    progress: Callable[[int, int], None] | None = None,
    stop_event: threading.Event | None = None,
) -> list[Kept]:
    """What each method could choose from for each token of its text. ``progress(done, total)`` is called
    with tokens; setting ``stop_event`` leaves out the rest."""
    total = sum(len(d.result.token_ids) for d in decodings)
    done, out = 0, []
    for decoding in decodings:
        mass, tokens = [], []
        for logits in _logits(llm, decoding.result):
            if stop_event is not None and stop_event.is_set():
                break
            kept = reference.sample(logits, decoding.params).kept
            mass.append(min(1.0, float(probabilities(logits)[kept].sum())))
            tokens.append(kept.size)
            done += 1
            if progress is not None:
                progress(done, total)
        out.append(Kept(tuple(mass), tuple(tokens)))
    return out


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax in float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def _logits(llm: LLM, result: GenerationResult) -> Iterator[np.ndarray]:
    """The logits ``[vocabulary]`` from which each token of a text was chosen."""
    prompt, answer = result.prompt_token_ids, result.token_ids
    if not answer:
        return
    engine = llm._open_engine()
    runner = engine.runner
    with engine.borrow(len(prompt) + len(answer)) as sequence:
        before = len(prompt) - 1  # the first token of the answer is predicted from the prompt's last
        for at in range(0, before, runner.max_tokens):
            piece = prompt[at : min(at + runner.max_tokens, before)]
            runner.run([Chunk(sequence, piece, "none")], "logits")
        inputs = [prompt[-1], *answer[:-1]]
        step = min(runner.max_tokens, runner.max_outputs)
        for at in range(0, len(inputs), step):
            yield from runner.run([Chunk(sequence, inputs[at : at + step], "all")], "logits")
