"""A conversation over the KV cache: what is reused, that reuse changes nothing, and what stays in history.

The models are tiny ones with random weights. ``in_words`` biases one towards words that its tokenizer cuts
as the model wrote them; without it such a model writes fragments that are cut differently, which is the
harder case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import in_words, words, write_chat_model

from xinfer_vk import LLM
from xinfer_vk.blocks import common_prefix
from xinfer_vk.engine.runner import Chunk, ModelRunner
from xinfer_vk.engine.session import ChatSession, ChatStream
from xinfer_vk.errors import ModelError, NumericError, UsageError

pytestmark = pytest.mark.usefixtures("step_by_step")  # test_ahead.py has several steps in one

TOLERANCE = 1e-4  # log-probabilities, f32 cache: the same sums in another order
CONTEXT = 256


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_chat_model(tmp_path_factory.mktemp("model") / "tiny")
    with LLM(path, device="numpy", kv_dtype="f32", context=CONTEXT) as opened:
        yield opened


@pytest.fixture(autouse=True)
def empty_cache(llm: LLM) -> None:
    """What other tests said is not in the cache."""
    llm._open_engine().runner.cache.pool.forget_all()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step of the model took."""
    taken: list[int] = []
    run, decode = ModelRunner.run_rows, ModelRunner.decode

    def counted(self: ModelRunner, chunks: Any, *more: Any) -> np.ndarray:
        taken.append(sum(len(chunk.token_ids) for chunk in chunks))
        return run(self, chunks, *more)

    def counted_decode(
        self: ModelRunner, sequences: Any, tokens: Any, head: Any, steps: int
    ) -> list[list[int]]:
        taken.extend([len(sequences)] * steps)
        return decode(self, sequences, tokens, head, steps)

    monkeypatch.setattr(ModelRunner, "run_rows", counted)
    monkeypatch.setattr(ModelRunner, "decode", counted_decode)
    return taken


def fresh(llm: LLM, session: ChatSession) -> list[int]:
    """Token ids of the last turn's prompt, from its messages alone."""
    from xinfer_vk.text.chat import encode_chat

    return encode_chat(llm.tokenizer, llm.chat_template, session.messages[:-1])


# -- what is reused ------------------------------------------------------------------------------


def test_a_turn_runs_only_what_is_new(llm: LLM, run: list[int]) -> None:
    session = in_words(llm)
    first = session.send("Hello there").result
    assert (first.metrics.reused_tokens, len(first.token_ids)) == (0, 8)
    assert sum(run) == first.metrics.prompt_tokens + 7  # the last token chosen was not run
    run.clear()
    second = session.send("And now?").result
    # All but the end of the answer's turn and the new message was there.
    assert second.metrics.reused_tokens == first.metrics.prompt_tokens + 7
    assert second.metrics.prefilled_tokens == second.metrics.prompt_tokens - second.metrics.reused_tokens
    assert sum(run) == second.metrics.prefilled_tokens + 7
    assert run[0] == second.metrics.prefilled_tokens < second.metrics.prompt_tokens / 2


def test_a_long_conversation_is_never_run_twice(llm: LLM, run: list[int]) -> None:
    session = in_words(llm)
    said = [session.send(f"Say {i}").result.metrics for i in range(4)]
    answers = 4 * 7
    assert sum(run) == sum(m.prefilled_tokens for m in said) + answers
    assert sum(run) <= said[-1].prompt_tokens + answers


@pytest.mark.parametrize("again", ["retry", "the same message"])
def test_another_answer_to_the_same_message_runs_one_prompt_token(
    llm: LLM, run: list[int], again: str
) -> None:
    session = in_words(llm)
    session.send("Hello").result
    before = session.send("What is it?").result
    run.clear()
    if again == "retry":
        after = session.retry().result
    else:
        after = session.send(session.undo()).result
    assert run == [1] * 8
    assert after.metrics.prefilled_tokens == 1
    assert after.token_ids == before.token_ids
    assert len(session.turns) == 2


def test_an_edited_message_is_run_from_where_it_differs(llm: LLM, run: list[int]) -> None:
    session = in_words(llm)
    session.send("Hello").result
    before = session.send("the cat and the dog is").result
    run.clear()
    after = session.edit("the cat and the dog in").result
    assert after.metrics.reused_tokens > before.metrics.reused_tokens + 5  # into the edited message
    assert sum(run) == after.metrics.prefilled_tokens + 7
    assert [turn.user for turn in session.turns] == ["Hello", "the cat and the dog in"]


def test_a_new_system_text_is_read_with_all_that_follows(llm: LLM, run: list[int]) -> None:
    session = in_words(llm, system="be terse")
    session.send("Hello").result
    session.system = "be kind"
    run.clear()
    result = session.send("And now?").result
    assert 0 < result.metrics.reused_tokens < 10  # the markup and "be"
    assert sum(run) == result.metrics.prefilled_tokens + 7


def test_other_work_on_the_model_costs_nothing_while_there_is_room(llm: LLM) -> None:
    session, other = in_words(llm), in_words(llm)
    first = session.send("Hello").result
    other.send("Something else").result
    llm.generate([5, 6, 7], max_new_tokens=3)
    result = session.send("And now?").result
    assert result.metrics.reused_tokens == first.metrics.prompt_tokens + 7
    assert result.token_ids == llm.generate(fresh(llm, session), session.params).token_ids
    session.send("And then?").result
    assert llm._runner is not None and llm._runner.cache.in_use == 0


def test_what_was_evicted_is_computed_again(llm: LLM) -> None:
    session = in_words(llm)
    session.send("Hello").result
    llm.generate([5] * (CONTEXT - 2), max_new_tokens=1)  # takes every block
    assert session.send("And now?").result.metrics.reused_tokens == 0
    result = session.send("And then?").result
    assert result.token_ids == llm.generate(fresh(llm, session), session.params).token_ids


def test_a_conversation_without_a_given_context_keeps_its_cache(tmp_path: Path) -> None:
    with LLM(write_chat_model(tmp_path / "tiny"), device="numpy") as llm:
        session = in_words(llm)
        assert session.context == 512  # what the model was made for
        session.send("Hello").result
        assert session.send("the " * 100).result.metrics.reused_tokens > 0
        assert llm.capacity == 512


# -- reuse changes nothing -----------------------------------------------------------------------


def turns_of_all_kinds(session: ChatSession) -> Iterator[tuple[str, ChatStream]]:
    """Turns, each with what must have led to it."""
    yield "first", session.send("Hello there")
    yield "next", session.send("And now?", max_new_tokens=5)
    yield "retry", session.retry(max_new_tokens=3)
    yield "edit", session.edit("And then, what?")
    session.undo()
    yield "after undo", session.send("Once more")
    stream = session.send("Tell me a story")
    next(stream)
    stream.cancel()
    yield "interrupted", stream
    yield "after an interruption", session.send("Go on")
    session.system = "be terse"
    yield "other system text", session.send("Who are you?")


@pytest.mark.parametrize("as_words", [True, False], ids=["words", "fragments"])
def test_logprobs_and_text_equal_those_of_a_fresh_prefill(llm: LLM, tmp_path: Path, as_words: bool) -> None:
    params: dict[str, Any] = {"logit_bias": words(llm)} if as_words else {}
    session = llm.chat(max_new_tokens=10, logprobs=5, **params)
    reused = 0
    with LLM(write_chat_model(tmp_path / "tiny"), device="numpy", kv_dtype="f32", context=CONTEXT) as other:
        for name, stream in turns_of_all_kinds(session):
            got = stream.result
            assert list(got.prompt_token_ids) == fresh(llm, session), name
            want = other.generate(
                fresh(llm, session), session.params, max_new_tokens=max(1, len(got.token_ids))
            )
            assert got.token_ids == want.token_ids[: len(got.token_ids)], name
            for a, b in zip(got.logprobs or (), want.logprobs or ()):
                assert abs(a.logprob - b.logprob) <= TOLERANCE, name
                assert [token for token, _ in a.top] == [token for token, _ in b.top], name
            reused += got.metrics.reused_tokens
    assert reused > 200


def test_the_cache_holds_the_logits_of_a_fresh_prefill(llm: LLM) -> None:
    """All logits after the cached tokens, against a prefill of the same tokens."""
    session = llm.chat(max_new_tokens=10)
    for text in ("Hello there", "And now?"):
        session.send(text).result
    session.edit("And then, what?").result
    runner = llm._runner
    assert runner is not None
    tokens = fresh(llm, session)
    with llm._open_engine().borrow(CONTEXT // 2) as sequence:
        runner.cache.begin(sequence, [*tokens, 40], runner.rope.key(len(tokens) + 1), most=len(tokens))
        assert sequence.length == len(tokens)
        got = runner.run([Chunk(sequence, [*tokens, 40][sequence.length :])], "logits")[0]
    want = llm.logits([*tokens, 40])[-1]
    assert np.abs(got - want).max() <= TOLERANCE


def test_seeded_samples_do_not_depend_on_what_was_cached(llm: LLM) -> None:
    params = {"temperature": 1.0, "top_k": 40, "seed": 7, "repetition_penalty": 1.2}
    session = llm.chat(max_new_tokens=10, **params)
    session.send("Hello").result
    result = session.send("And now?").result
    assert result.metrics.reused_tokens > 0
    assert result.token_ids == llm.generate(fresh(llm, session), session.params).token_ids


TRIMS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETS = (  # as templates of thinking models do: earlier answers are not shown in full
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.role != 'assistant' else '(' ~ m.content | length ~ ')' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [TRIMS, FORGETS], ids=["trims", "forgets"])
def test_a_template_that_rewrites_answers_only_shortens_what_is_reused(tmp_path: Path, template: str) -> None:
    with LLM(
        write_chat_model(tmp_path / "tiny", template), device="numpy", kv_dtype="f32", context=CONTEXT
    ) as llm:
        session = in_words(llm)
        first = session.send("Hello").result
        second = session.send("And now?").result
        assert list(second.prompt_token_ids) == fresh(llm, session)
        assert second.metrics.reused_tokens == common_prefix(
            first.prompt_token_ids + first.token_ids, second.prompt_token_ids
        )
        assert second.token_ids == llm.generate(fresh(llm, session), session.params).token_ids


def test_devices_reuse_as_numpy_does(device: Any, tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "tiny")
    answers = []
    for name in ("numpy", str(device.index)):
        with LLM(path, device=name, kv_dtype="f32", context=CONTEXT) as llm:
            session = in_words(llm)
            session.send("Hello there").result
            second = session.send("And now?").result
            answers.append((second.token_ids, second.metrics.reused_tokens))
            assert second.token_ids == llm.generate(fresh(llm, session), session.params).token_ids
    assert answers[0] == answers[1]


def test_the_demo_model_remembers_and_reads_only_what_is_new(demo_model: Path) -> None:
    with LLM(demo_model, context=512) as llm:
        session = llm.chat(max_new_tokens=24)
        first = session.send("What is the capital of France?").result
        assert first.text == "The capital of France is Paris."
        second = session.send("And of Italy?").result
        # Everything but <|im_end|>, the new message and the markup around it.
        assert second.metrics.reused_tokens == first.metrics.prompt_tokens + len(first.token_ids)
        assert second.metrics.prefilled_tokens < 20 < second.metrics.reused_tokens
        assert second.token_ids == llm.generate(fresh(llm, session), max_new_tokens=24).token_ids
        assert "Rome" in second.text


# -- history -------------------------------------------------------------------------------------


def test_history_has_messages_in_order(llm: LLM) -> None:
    session = in_words(llm, system="be terse")
    answers = [session.send(text).result.text for text in ("One", "Two")]
    assert session.messages == [
        {"role": "system", "content": "be terse"},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": answers[1]},
    ]
    assert session.undo() == "Two"
    session.reset()
    assert session.messages == [{"role": "system", "content": "be terse"}]
    assert session.context_tokens == 0


def test_an_interrupted_answer_stays_as_far_as_it_came(llm: LLM) -> None:
    session = in_words(llm)
    stream = session.send("Tell me a story")
    shown = next(stream) + next(stream)
    stream.cancel()
    assert stream.result.finish_reason == "interrupted"
    assert session.turns[-1].assistant == shown == stream.result.text


def test_a_stream_left_unfinished_ends_at_the_next_message(llm: LLM) -> None:
    session = in_words(llm)
    for piece in session.send("Tell me a story"):
        shown = piece
        break
    result = session.send("Stop").result
    assert [turn.user for turn in session.turns] == ["Tell me a story", "Stop"]
    assert session.turns[0].assistant == shown
    assert result.metrics.reused_tokens > result.metrics.prefilled_tokens


def test_a_message_stopped_before_its_answer_is_not_part_of_the_conversation(llm: LLM) -> None:
    session = in_words(llm)
    session.send("Hello").result
    event = threading.Event()
    event.set()
    assert session.send("Never mind", stop_event=event).result.text == ""
    assert (len(session.turns), session.unanswered) == (1, "Never mind")
    session.retry().result
    assert (session.turns[-1].user, session.unanswered) == ("Never mind", None)
    session.send("Take me back", stop_event=event).result
    assert session.undo() == "Take me back"
    assert len(session.turns) == 2


def test_a_stream_never_begun_leaves_no_trace(llm: LLM) -> None:
    session = in_words(llm)
    old = session.send("Hello")
    session.send("Good day").result
    assert [turn.user for turn in session.turns] == ["Good day"]
    assert "".join(old) == ""


def test_an_answer_of_no_text_counts(llm: LLM) -> None:
    session = llm.chat(logit_bias={min(llm.eos_ids): 1000.0})
    assert session.send("Hello").result.finish_reason == "stop"
    assert [(turn.user, turn.assistant) for turn in session.turns] == [("Hello", "")]


def test_another_thread_ends_an_answer_within_a_step(llm: LLM, run: list[int]) -> None:
    session, event = in_words(llm), threading.Event()
    stream = session.send("Tell me a story", stop_event=event, max_new_tokens=100)
    next(stream)
    thread = threading.Thread(target=event.set)
    thread.start()
    thread.join()
    steps = len(run)
    assert stream.result.finish_reason == "interrupted"
    assert len(run) == steps


def test_after_an_error_the_cache_is_not_trusted_but_the_text_is_kept(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = in_words(llm)
    session.send("Hello").result
    stream = session.send("And now?")
    shown = next(stream)
    real = ModelRunner.decode

    def broken(self: ModelRunner, *arguments: Any) -> list[list[int]]:
        real(self, *arguments)
        raise NumericError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "decode", broken)
        with pytest.raises(NumericError):
            next(stream)
    assert session.turns[-1].assistant == shown
    result = session.send("Go on").result
    assert result.metrics.reused_tokens == 0
    assert result.token_ids == llm.generate(fresh(llm, session), session.params).token_ids


def test_a_session_goes_on_after_it_was_closed(llm: LLM) -> None:
    session = in_words(llm)
    session.send("Hello").result
    session.close()
    assert len(session.turns) == 1
    assert session.send("And now?").result.metrics.reused_tokens > 0


def test_a_saved_conversation_goes_on_as_it_was(llm: LLM) -> None:
    session = in_words(llm, system="be terse")
    session.send("Hello").result
    copy = in_words(llm, messages=session.messages)
    assert copy.system == "be terse"
    assert copy.send("And now?").result.token_ids == session.send("And now?").result.token_ids


# -- a full context ------------------------------------------------------------------------------


def fill(session: ChatSession, turns: int = 4) -> list[ChatStream]:
    streams = []
    for i in range(turns):
        streams.append(session.send(f"the cat {i} and " * 4))
        streams[-1].result
    return streams


def test_the_oldest_turns_are_dropped_until_half_is_free(llm: LLM, run: list[int]) -> None:
    session = in_words(llm, system="be terse", context=220)
    streams = fill(session, 6)
    dropped = [stream.newly_dropped for stream in streams]
    assert sum(dropped) == session.dropped_turns > 0
    full = next(i for i, count in enumerate(dropped) if count)
    assert dropped[full + 1] == 0  # there is room for a while
    assert streams[full].result.metrics.prompt_tokens <= 220 // 2
    assert len(session.turns) == 6  # they stay in the conversation
    last = streams[-1].result
    kept = [session.messages[0], *session.messages[1 + 2 * session.dropped_turns : -1]]
    from xinfer_vk.text.chat import encode_chat

    assert list(last.prompt_token_ids) == encode_chat(llm.tokenizer, llm.chat_template, kept)
    assert last.metrics.reused_tokens > 0
    assert session.context_tokens <= 220


def test_what_was_dropped_stays_dropped_until_nothing_else_is_left(llm: LLM) -> None:
    session = in_words(llm, context=220)
    fill(session, 6)
    dropped = session.dropped_turns
    assert 0 < dropped < 6
    session.retry().result
    assert session.dropped_turns == dropped
    while len(session.turns) > dropped + 1:
        session.undo()
    assert session.dropped_turns == dropped
    session.undo()
    assert session.dropped_turns == 0


def test_a_full_context_is_refused_on_request_and_nothing_changes(llm: LLM) -> None:
    session = in_words(llm, context=150, on_full="refuse")
    fill(session, 1)
    before = session.messages
    with pytest.raises(UsageError, match=r"the context is full: .* \d+ tokens, and 8 of the 150 .*on_full"):
        fill(session, 4)
    assert session.messages[: len(before)] == before
    assert session.dropped_turns == 0


@pytest.mark.parametrize("on_full", ["refuse", "drop-oldest"])
def test_a_message_too_long_by_itself_is_refused(llm: LLM, on_full: Any) -> None:
    session = in_words(llm, context=150, on_full=on_full)
    with pytest.raises(UsageError, match=r"message is too long: it takes \d+ tokens .* of 150 .* 142 "):
        session.send("the cat and " * 60)
    assert session.messages == []


def test_an_answer_is_cut_where_the_context_ends(llm: LLM) -> None:
    session = in_words(llm, context=120)
    result = session.send("Hello", max_new_tokens=500).result
    assert result.finish_reason == "length"
    assert len(result.prompt_token_ids) + len(result.token_ids) == 120


# -- bad input -----------------------------------------------------------------------------------


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "tiny")
    (path / "chat_template.jinja").unlink()
    with LLM(path, device="numpy") as llm, pytest.raises(UsageError, match="no chat template"):
        llm.chat()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.send("  \n"), "message is empty"),
        (lambda s: s.send("x", top_p=-1), "top_p is -1"),
        (lambda s: s.send("x", nonsense=1), "no sampling parameter 'nonsense'"),
        (lambda s: s.send("x", stop_token_ids=[656]), "stop_token_ids names token 656"),
        (lambda s: s.undo(), "no message to take back"),
        (lambda s: s.retry(), "no message to answer again"),
        (lambda s: s.edit("x"), "no message to change"),
        (lambda s: s.llm.chat(on_full="stop"), "on_full is 'stop': it is drop-oldest or refuse"),
        (lambda s: s.llm.chat(context=CONTEXT + 1), f"context is 257: it must be between 1 and {CONTEXT}"),
        (lambda s: s.llm.chat(context=0), "context is 0"),
        (lambda s: s.llm.chat(logit_bias={656: 1}), "logit_bias names token 656"),
    ],
)
def test_a_bad_call_says_what_is_wrong(llm: LLM, call: Callable[[ChatSession], Any], message: str) -> None:
    session = llm.chat()
    with pytest.raises(UsageError) as raised:
        call(session)
    assert message in str(raised.value)
    assert session.messages == []


NO_SYSTEM = (  # and, as some do, nothing that ends with an answer
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if messages[-1].role != 'user' %}{{ raise_exception('Speak first') }}{% endif %}" + FORGETS
)


def test_a_template_that_takes_no_system_text_says_so_at_once(tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "tiny", NO_SYSTEM)
    with LLM(path, device="numpy", context=CONTEXT) as llm:
        with pytest.raises(ModelError, match="System role not supported"):
            llm.chat(system="be terse")
        with pytest.raises(ModelError, match="System role not supported"):
            llm.chat(messages=[{"role": "system", "content": "be terse"}])
        session = in_words(llm)
        session.send("Hello").result
        with pytest.raises(ModelError, match="System role not supported"):
            session.system = "be terse"
        assert session.system is None
        session.send("And now?").result
        assert session.undo() == "And now?"
        assert session.context_tokens > 0


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([5], "message 1 is 5"),
        ([{"role": "user"}], "message 1 is"),
        ([{"role": "user", "content": "x", "name": "y"}], "message 1 is"),
        ([{"role": "tool", "content": "x"}], "message 1 has the role 'tool'"),
        ([{"role": "user", "content": ["x"]}], "message 1 has the content"),
        ([{"role": "assistant", "content": "x"}], "message 1 is of the role assistant: user"),
        (
            [{"role": "system", "content": "x"}, {"role": "system", "content": "x"}],
            "message 2 is of the role system: user",
        ),
        (
            [{"role": "user", "content": "x"}, {"role": "user", "content": "x"}],
            "message 2 is of the role user: assistant",
        ),
        ([{"role": "user", "content": " "}, {"role": "assistant", "content": "x"}], "message 1 is empty"),
        ([{"role": "user", "content": "x"}], "message 1, the last one, has no answer"),
    ],
)
def test_messages_that_are_no_conversation_are_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        llm.chat(messages=messages)
    assert message in str(raised.value)
