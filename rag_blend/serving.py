"""From a request to an answer: alone through `model.generate`, or several whose prefills are done decoded together."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.cache import BlendCache
from rag_blend.decode import Row, decode_together
from rag_blend.errors import GenerationCancelledError
from rag_blend.generation import (
    FirstTokenClock,
    Generation,
    GenerationStats,
    PieceStreamer,
    cut_at_stop,
    generate_arguments,
    steers_only,
)
from rag_blend.models import cache_argument_of
from rag_blend.runner import BlendPolicy
from rag_blend.space import SharedSpace, Space
from rag_blend.trace import TraceRecorder

T = TypeVar("T")
Call = Callable[[BlendCache | None], tuple[T, Sequence[int]]]


class Run(Protocol):
    """Runs the model on a prompt; see `PromptRunner.run`. The cache is None where the model cannot be blended."""

    def __call__(
        self,
        ids: np.ndarray,
        policy: BlendPolicy,
        call: Call[T],
        record: TraceRecorder,
        room: int = 0,
        cancel: threading.Event | None = None,
        with_prefixes: bool = True,
        seat: Space | None = None,
    ) -> tuple[T, GenerationStats]:
        """The value that `call` returned, and the prompt's stats without `ttft_s`."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt to answer.

    Attributes:
        ids: The prompt, int32, shape (num_tokens,).
        policy: How to treat it.
        max_new_tokens: Upper limit of the answer.
        stop: The answer ends before the first of these strings.
        cancel: Ends it when set.
        streamer: Is handed the tokens as they come.
        kwargs: More arguments of ``model.generate``.
        record: Is told what happens to the prompt, from the call on.
        outcome: The answer, for those who wait.
    """

    ids: np.ndarray
    policy: BlendPolicy
    max_new_tokens: int
    stop: tuple[str, ...]
    cancel: threading.Event
    streamer: PieceStreamer | None
    kwargs: dict[str, Any]
    record: TraceRecorder
    outcome: Future[Generation] = field(default_factory=Future)


class Server:
    """Answers requests. The caller holds the model's lock.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        run: Prefills with what is stored.
        answered: Told of every answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        run: Run,
        answered: Callable[[Request, Generation], None],
    ) -> None:
        self._model: Any = model
        self._tokenizer = tokenizer
        self._cache_argument = cache_argument_of(model)
        # Bloom and kin, before transformers 5, compute the logits of all tokens whatever is asked.
        accepted = inspect.signature(inspect.unwrap(model.forward)).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._run = run
        self._answered = answered

    def answer(self, request: Request) -> Generation:
        """Answer one.

        Raises:
            GenerationCancelledError: It was cancelled.
            ValueError: ``model.generate`` cannot be called with its arguments.
        """
        if request.cancel.is_set():
            raise GenerationCancelledError("cancelled before it began")
        clock = FirstTokenClock(request.cancel)
        arguments = generate_arguments(
            self._model, self._tokenizer, request.max_new_tokens, request.stop, clock, request.kwargs
        )
        num_tokens, streamer = len(request.ids), request.streamer

        def call(cache: BlendCache | None) -> tuple[list[int], Sequence[int]]:
            given: dict[str, Any] = {} if cache is None else {self._cache_argument: cache}
            if streamer is not None:
                streamer.restart()
                given["streamer"] = streamer
            input_ids = self.input_of(request.ids)
            output = self._model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **arguments, **given)
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            all_ids: list[int] = sequences[0].tolist()
            return all_ids[num_tokens:], all_ids

        only_steers = steers_only(request.kwargs)
        new_ids, stats = self._run(
            request.ids, request.policy, call, request.record, request.max_new_tokens, request.cancel, only_steers
        )
        return self._finished(request, new_ids, stats, clock.first_token_at)

    def answer_together(self, requests: Sequence[Request]) -> None:
        """Prefill one after the other, decode all at once; the requests' outcomes are set."""
        for request, stats, row in self._decoded(requests):
            try:
                request.outcome.set_result(self._finished(request, row.token_ids, stats, row.first_token_at))
            except BaseException as error:
                request.outcome.set_exception(error)

    def _decoded(self, requests: Sequence[Request]) -> list[tuple[Request, GenerationStats, Row]]:
        """Those that have answers now; the others are told what failed. The memory for all of them is free again."""
        begun: list[tuple[Request, GenerationStats, Row]] = []
        room = max(request.max_new_tokens for request in requests)
        space = SharedSpace(len(requests), max(len(request.ids) for request in requests), room)
        for request in requests:
            try:
                stats, row = self._begin(request, space.seat(len(begun)))
            except BaseException as error:
                request.outcome.set_exception(error)
                continue
            begun.append((request, stats, row))
        if not begun:
            return []
        for request, _, _ in begun:
            request.record.turn("compute")
        try:
            rows = [row for _, _, row in begun]
            decode_together(self._model, self._tokenizer, rows, space, begun[0][0].kwargs)
        except BaseException as error:
            for request, _, _ in begun:
                request.outcome.set_exception(error)
            return []
        return begun

    def forward(self, ids: np.ndarray, cache: BlendCache | None) -> tuple[torch.Tensor, Any]:
        """Logits of the next token, float32, shape (vocab,), and the filled cache."""
        given = {} if cache is None else {self._cache_argument: cache}
        with torch.no_grad():
            held = 0 if cache is None else cache.get_seq_length()
            output = self._model(input_ids=self.input_of(ids[held:]), use_cache=True, **self._last_only, **given)
        return output.logits[0, -1].float(), output[self._cache_argument]

    def input_of(self, ids: np.ndarray) -> torch.Tensor:
        """A prompt as the model takes it, int64, shape (1, num_tokens)."""
        return torch.from_numpy(ids).long()[None].to(self._model.device)

    def _begin(self, request: Request, seat: Space) -> tuple[GenerationStats, Row]:
        if request.cancel.is_set():
            raise GenerationCancelledError("cancelled before it began")

        def call(cache: BlendCache | None) -> tuple[None, Sequence[int]]:
            self.forward(request.ids, cache)
            return None, request.ids.tolist()

        _, stats = self._run(request.ids, request.policy, call, request.record, 0, request.cancel, seat=seat)
        request.record.turn("queue")  # for the others of the batch
        row = Row(request.ids, request.max_new_tokens, request.stop, request.cancel, request.streamer)
        return stats, row

    def _finished(
        self, request: Request, new_ids: list[int], stats: GenerationStats, first_token_at: float | None
    ) -> Generation:
        if request.cancel.is_set():
            raise GenerationCancelledError("cancelled")
        text = cut_at_stop(str(self._tokenizer.decode(new_ids, skip_special_tokens=True)), request.stop)
        until = first_token_at or time.perf_counter()
        trace = request.record.trace(request.ids, self._tokenizer, until)
        generation = Generation(text, new_ids, replace(stats, ttft_s=until - request.record.started), trace)
        self._answered(request, generation)
        return generation
