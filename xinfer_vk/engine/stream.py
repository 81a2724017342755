"""Text as it is made: an iterator over the pieces of one generation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from xinfer_vk.engine.generation import Generation, GenerationResult
from xinfer_vk.engine.scheduler import Scheduler
from xinfer_vk.text.thinking import Piece


class GenerationStream:
    """Iterate to get text as it is made, whole characters only; afterwards :attr:`result` is there. Each
    piece is a ``str`` that says whether it is of the model's thinking (``piece.thinking``) or of the answer.
    Nothing runs before the first piece is asked for. A context manager, which closes it.

    Whatever ends the loop, an exception included, the sequence's cache blocks are given back, and
    :attr:`partial_result` holds what was made until then; after a ``break`` and :meth:`close`, what was given
    out, and no token beyond it.
    """

    def __init__(
        self,
        begin: Callable[[Generation], Scheduler],
        generation: Generation,
        finished: Callable[[Generation, Scheduler], None],
    ) -> None:
        self._begin, self._generation, self._finished = begin, generation, finished
        self._iterator = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._iterator

    def __next__(self) -> Piece:
        return next(self._iterator)

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the generation here and give its cache blocks back; nothing happens if it has ended."""
        self._iterator.close()

    def cancel(self) -> None:
        """End the generation after the step under way; safe from another thread or a signal handler."""
        self._generation.stop_event.set()

    @property
    def result(self) -> GenerationResult:
        """The whole result; runs what is left of the stream first."""
        for _ in self._iterator:
            pass
        return self.partial_result

    @property
    def partial_result(self) -> GenerationResult:
        """What there is so far, without running anything: what remains after an error."""
        return self._generation.result()

    def _run(self) -> Generator[Piece, None, None]:
        generation = self._generation
        scheduler = self._begin(generation)
        try:
            while scheduler.busy:
                scheduler.step()
                yield from generation.take()
        except GeneratorExit:
            generation.leave()
            raise
        except Exception:
            generation.finish("error")
            raise
        finally:
            scheduler.abandon()
            self._finished(generation, scheduler)
