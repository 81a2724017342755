"""Text as it is made: an iterator over the pieces of one generation.

The caller holds a stream, the stream holds a generator, and the generator does not refer to the stream. So
there is no cycle: a stream that is dropped ends its generation at once, without the garbage collector.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from xinfer_vk.engine.engine import Engine
from xinfer_vk.engine.generation import Generation, GenerationResult
from xinfer_vk.errors import UsageError
from xinfer_vk.text.thinking import Piece


class PieceStream:
    """An answer under way. Iterate to get text as it is made, whole characters only; then :attr:`result` has
    the whole. Each piece is a ``str`` that says whether it is part of the model's thinking
    (``piece.thinking``) or of the answer. It begins when the first piece is asked for, and then takes part in
    every step that any call runs: pieces wait for their reader. A context manager: leaving it closes the
    stream.

    Whatever ends the loop, an exception included, the generation's room in the KV cache becomes free: at
    once if the stream is dropped, and otherwise when another call needs the room.
    """

    def __init__(self, generation: Generation, pieces: Generator[Piece, None, None]) -> None:
        self._generation, self._pieces = generation, pieces
        self._left = False  # whether a loop over it was left before its end
        self._taken = ""  # why it cannot go on, if not by its caller's wish
        _streams.add(self)

    def __iter__(self) -> Iterator[Piece]:
        return _Loop(self)

    def __next__(self) -> Piece:
        self._left = False
        try:
            return next(self._pieces)
        except StopIteration:
            if self._taken:
                raise UsageError(self._taken) from None
            raise
        except ValueError as error:
            if "already executing" not in str(error):
                raise
            raise UsageError("this stream is being read in another thread: read it in one") from None

    def __enter__(self) -> PieceStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        generation = self._generation
        state = generation.finish_reason or ("running" if generation.fed else "not started")
        return f"<{type(self).__name__}: {len(generation.generated)} tokens, {state}>"

    def close(self) -> None:
        """End the generation here, with the last piece given out, and free its room in the KV cache. Does
        nothing if it has ended. Raises :class:`UsageError` while another thread reads the stream."""
        try:
            self._pieces.close()
        except ValueError:
            raise UsageError("an answer is under way in another thread: cancel it first") from None

    def cancel(self) -> None:
        """End the generation after the step under way. Safe from another thread or a signal handler."""
        self._generation.stop_event.set()

    @property
    def result(self) -> GenerationResult:
        """The whole result; runs what is left of the stream first."""
        for _ in self:
            pass
        return self.partial_result

    @property
    def partial_result(self) -> GenerationResult:
        """The result so far, without running anything: what remains after an error."""
        return self._generation.result()

    def end_if_left(self) -> None:
        """End it if its caller left the loop or cancelled it, because another call needs its room."""
        if self._left or self._generation.stop_event.is_set():
            self._end("this stream was left, and another call took its room: start it again")

    def _end(self, reason: str) -> None:
        """End it for another's sake. One that another thread is reading ends by itself."""
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_SUSPENDED:
            with contextlib.suppress(ValueError):  # another thread has taken it up meanwhile
                self._pieces.close()
                self._taken = reason


class _Loop:
    """One loop over a stream. Dropped early, by break, return or an exception, it marks it as left."""

    def __init__(self, stream: PieceStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._stream)

    def __del__(self) -> None:
        self._stream._left = True


class GenerationStream(PieceStream):
    """One generation under way; see :class:`PieceStream`. :meth:`LLM.stream` makes it. After a ``break`` and
    :meth:`close`, :attr:`partial_result` holds what was given out, and no token beyond it."""

    def __init__(
        self,
        begin: Callable[[Generation], Engine],
        generation: Generation,
        finished: Callable[[Generation], None],
    ) -> None:
        super().__init__(generation, pieces(begin, generation, finished))

    def __enter__(self) -> GenerationStream:
        return self


def pieces(
    begin: Callable[[Generation], Engine],
    generation: Generation,
    finished: Callable[[Generation], None],
) -> Generator[Piece, None, None]:
    """Run a generation to its end; the pieces of its text."""
    engine = begin(generation)
    try:
        while generation.finish_reason is None:
            engine.advance(lambda: generation.has_news)
            yield from generation.take()
        yield from generation.take()
        if generation.error is not None:
            raise generation.error
    except GeneratorExit:
        generation.leave()
        raise
    except Exception as error:
        generation.finish("error", error)
        raise
    finally:
        engine.abort(generation)
        finished(generation)


_streams: weakref.WeakSet[PieceStream] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A generator that is still open when the interpreter goes finds its modules gone."""
    for stream in list(_streams):
        with contextlib.suppress(Exception):
            stream._pieces.close()


def end_streams(streams: weakref.WeakSet[Any], reason: str) -> None:
    """End every stream that no thread is reading now."""
    for stream in list(streams):
        stream._end(reason)
