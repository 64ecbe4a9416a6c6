"""Around `model.generate`: stop strings, cancellation, time to first token, and text that streams."""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache
from transformers.generation.streamers import TextStreamer

from rag_blend.errors import GenerationCancelledError
from rag_blend.picture import Pictured
from rag_blend.trace import Trace


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What really happened to one prompt. All token counts are of prompt tokens and add up to `prompt_tokens`.

    Attributes:
        prompt_tokens: Length of the prompt.
        prefix_tokens: Reused without approximation, from stored chunks or from an earlier prompt.
        reused_tokens: Reused from chunks cached in another context, or from an earlier prompt that was blended.
        recomputed_tokens: Covered by such a chunk, but computed through all layers.
        fresh_tokens: Covered by neither.
        recompute_ratio: Fresh q/k/v rows of reused and recomputed tokens, as a share of layers x those tokens; what a
            selector computes in order to choose (dropped tokens, a pass of the question) is included.
        mode: ``"blend"`` when chunks were laid out, even if all their tokens were recomputed, or a blended prompt was
            gone on from; ``"prefix"`` when only exact rows were reused; ``"full"`` when nothing was.
        ttft_s: Seconds from the call to the first new token (or to the logits, for `prefill`).
        load_s: Seconds spent reading stored rows, hidden behind the computation, and putting them at their positions.
        hits: Stored chunks that were laid out in the prompt.
        declined: Stored chunks that were left alone, because computing them was expected to take no longer.
        misses: Stored chunks that lie in the prompt but could not be used: lost, damaged, or behind another head.
        misses_elsewhere: Those of them that are behind another head.
    """

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    fresh_tokens: int = 0
    recompute_ratio: float = 0.0
    mode: str = "full"
    ttft_s: float = 0.0
    load_s: float = 0.0
    hits: int = 0
    declined: int = 0
    misses: int = 0
    misses_elsewhere: int = 0


@dataclass(frozen=True, slots=True)
class Prefill(Pictured):
    """A prompt's prefill.

    Attributes:
        logits: Of the next token, float32, shape (vocab,).
        cache: Keys and values of all prompt tokens, ready to be decoded from.
        stats: What was reused and computed.
        trace: The same token by token, and where the time went; `show` draws it.
    """

    logits: torch.Tensor
    cache: Cache
    stats: GenerationStats
    trace: Trace | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Generation(Pictured):
    """An answer.

    Attributes:
        text: New text, cut before a stop string.
        token_ids: New token ids, as generated.
        stats: What was reused and computed for the prompt.
        trace: The same token by token, and where the time went; `show` draws it.
    """

    text: str
    token_ids: list[int]
    stats: GenerationStats
    trace: Trace | None = field(default=None, repr=False, compare=False)


class FirstTokenClock(StoppingCriteria):
    """Notes when the first token appears, and stops when `cancel` is set."""

    def __init__(self, cancel: threading.Event) -> None:
        self._cancel = cancel
        self.first_token_at: float | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """One answer per sequence: whether to stop."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        return torch.full((input_ids.shape[0],), self._cancel.is_set(), device=input_ids.device)


DEFAULT_NEW_TOKENS = 256
# Each of these would put another cache, or none, in the place of the blended one.
_CONTRADICTORY = ("cache", "cache_implementation", "inputs_embeds", "past_key_values", "prefill_chunk_size")
_STEERING = (vars(GenerationConfig()).keys() | inspect.signature(GenerationMixin.generate).parameters.keys()) - {
    "custom_generate"
}


def wanted_tokens(max_new_tokens: int | None, config: GenerationConfig, prompt_tokens: int) -> int:
    """How many tokens the caller wants at most: by argument, by configuration, or by default."""
    if max_new_tokens is not None:
        return max_new_tokens
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if config.max_length is not None and config.max_length > prompt_tokens:
        return int(config.max_length) - prompt_tokens
    return DEFAULT_NEW_TOKENS


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The caller's stop strings as a tuple.

    Raises:
        ValueError: One of them is empty.
    """
    words = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(words):
        raise ValueError("a stop string must not be empty")
    return words


def generate_arguments(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    stop: Sequence[str],
    clock: FirstTokenClock,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments for ``model.generate``: the caller's, and what stopping and timing need.

    Raises:
        ValueError: The caller asks for something that cannot go together with a blended cache.
    """
    config = kwargs.get("generation_config")
    for name in _CONTRADICTORY:
        if kwargs.get(name) is not None or getattr(config, name, None) is not None:
            raise ValueError(f"{name} cannot be given: the engine brings its own cache")
    if kwargs.get("use_cache", True) is False or getattr(config, "use_cache", True) is False:
        raise ValueError("use_cache=False cannot be given: reusing caches is what the engine is for")
    if any((n or 1) != 1 for n in (kwargs.get("num_return_sequences"), getattr(config, "num_return_sequences", None))):
        raise ValueError("one answer per call: num_return_sequences must be 1")
    # Checkpoints saved after training with gradient checkpointing often say use_cache=False.
    arguments = {**kwargs, "max_new_tokens": max_new_tokens, "use_cache": True}
    arguments["stopping_criteria"] = StoppingCriteriaList([clock, *kwargs.get("stopping_criteria", ())])
    if stop:
        arguments |= {"stop_strings": list(stop), "tokenizer": tokenizer}
    if model.generation_config.pad_token_id is None:
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        arguments.setdefault("pad_token_id", pad)
    return arguments


def steers_only(kwargs: Mapping[str, Any]) -> bool:
    """Whether these arguments of ``model.generate`` do no more than choose tokens.

    Others go to the model's forward (``position_ids``, ``adapter_names``) or replace the loop: rows computed under
    them may not be those that other calls get.
    """
    return not kwargs.keys() - _STEERING


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first stop string."""
    ends = [at for word in stop if (at := text.find(word)) >= 0]
    return text[: min(ends)] if ends else text


def held_back(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of `text` may yet turn out to begin a stop string."""
    for length in range(min(len(text), max((len(word) for word in stop), default=1) - 1), 0, -1):
        if any(word.startswith(text[-length:]) for word in stop):
            return length
    return 0


class PieceStreamer(TextStreamer):
    """Hands decoded text to a function; transformers decides where words end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, emit: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._emit = emit

    def restart(self) -> None:
        """Forget the prompt of an attempt that ended before its first token."""
        self.next_tokens_are_prompt = True

    def begin(self) -> None:
        """The prompt is over: what is taken next is answer."""
        self.next_tokens_are_prompt = False

    def take(self, token: int) -> None:
        """The answer's next token."""
        self.put(torch.tensor([token]))  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """The answer is complete."""
        self.end()  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers with each finished piece."""
        if text:
            self._emit(text)


class TextStream(Iterator[str]):
    """Text as it is generated. Closing it, or dropping it, stops the computation.

    Args:
        run: Generates with the given streamer, blocking; runs in a thread of its own.
        tokenizer: Decodes the tokens.
        stop: The text ends before the first of these.
        cancel: Set by `close`; `run` watches it.

    """

    def __init__(
        self,
        run: Callable[[PieceStreamer], Generation],
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        cancel: threading.Event,
    ) -> None:
        self._cancel = cancel
        self._closed = False
        # Neither thread nor generators may hold this object: dropping the stream must stop the computation.
        self._outcome: list[Generation] = []
        pieces: queue.Queue[str | BaseException | Generation] = queue.Queue()
        self._pieces = _until_stop(_drain(pieces, self._outcome), stop)
        self._thread = threading.Thread(
            target=_work,
            args=(run, PieceStreamer(tokenizer, pieces.put), pieces),
            name="rag-blend-stream",
            daemon=True,
        )
        self._thread.start()

    @property
    def result(self) -> Generation | None:
        """The whole answer, once the stream has ended; None before, and after an early `close`."""
        return self._outcome[0] if self._outcome else None

    @property
    def stats(self) -> GenerationStats | None:
        """Stats of the finished answer."""
        return self.result.stats if self.result else None

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the finished answer."""
        return self.result.token_ids if self.result else []

    def __next__(self) -> str:
        if self._closed:  # pieces may wait that nobody has asked for
            raise StopIteration
        return next(self._pieces)

    def close(self) -> None:
        """Stop the computation and wait until it has stopped. Harmless when it has ended."""
        self._closed = True
        self._cancel.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __del__(self) -> None:
        self._cancel.set()


def _work(
    run: Callable[[PieceStreamer], Generation],
    streamer: PieceStreamer,
    pieces: queue.Queue[str | BaseException | Generation],
) -> None:
    try:
        pieces.put(run(streamer))
    except BaseException as error:  # whatever it was, the consumer must hear of it instead of waiting for ever
        pieces.put(error)


def _drain(pieces: queue.Queue[str | BaseException | Generation], outcome: list[Generation]) -> Iterator[str]:
    while True:
        piece = pieces.get()
        if isinstance(piece, str):
            yield piece
        elif isinstance(piece, GenerationCancelledError):
            return
        elif isinstance(piece, BaseException):
            raise piece
        else:
            outcome.append(piece)
            return


def _until_stop(pieces: Iterator[str], stop: Sequence[str]) -> Iterator[str]:
    waiting = ""
    for piece in pieces:
        waiting += piece
        if any(word in waiting for word in stop):
            # The model stops here; what comes yet may complete a stop string that begins earlier.
            text = cut_at_stop(waiting + "".join(pieces), stop)
            if text:
                yield text
            return
        ready = len(waiting) - held_back(waiting, stop)
        if ready:
            yield waiting[:ready]
        waiting = waiting[ready:]
    if waiting:
        yield waiting
