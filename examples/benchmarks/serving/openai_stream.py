"""Requests to an OpenAI server, several at once, and when their tokens arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lineup import SERVED_MODEL
from openai import AsyncOpenAI, OpenAIError

T = TypeVar("T")


class ServerError(Exception):
    """A server did not start, stopped, or did not answer as it should; the text says what happened."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer.

    Attributes:
        ttft_s: Seconds from sending the request until its first token arrived.
        total_s: Seconds until the last one had arrived.
        pieces: Of its text, as they came.
        prompt_tokens: By the server's count.
        cached_tokens: Those of them that were not computed by its ordinary steps; None: the server does not tell.
        new_tokens: Tokens of the answer.
    """

    ttft_s: float
    total_s: float
    pieces: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int | None
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Requests:
    """How prompts are sent.

    Attributes:
        base_url: Of the server's API.
        fields: Further fields of each request.
        new_tokens: Length of each answer.
        timeout_s: The longest that an answer may take.
    """

    base_url: str
    fields: Mapping[str, Any]
    new_tokens: int
    timeout_s: float

    def stream(self, prompts: Sequence[str]) -> list[Answer]:
        """Ask all of them at once.

        Raises:
            ServerError: One was not answered.
        """

        async def all_of_them() -> list[Answer]:
            async with self._client() as client:
                return await asyncio.gather(*(self._streamed(client, prompt) for prompt in prompts))

        return _run(all_of_them())

    def reuse(self, prompt: str) -> Mapping[str, int]:
        """Ask without streaming, because only then does vLLM hand on what a connector reports; empty without one.

        Raises:
            ServerError: It was not answered.
        """

        async def one() -> Mapping[str, int]:
            async with self._client() as client:
                answer: Any = await client.completions.create(**self._body(prompt))
                reported = (answer.model_extra or {}).get("kv_transfer_params") or {}
                return dict(reported.get("rag_blend", {}))

        return _run(one())

    def _client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.base_url, api_key="-", max_retries=0, timeout=self.timeout_s)

    def _body(self, prompt: str) -> dict[str, Any]:
        return {
            "model": SERVED_MODEL,
            "prompt": prompt,
            "max_tokens": self.new_tokens,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, **self.fields},  # or answers would have different lengths
        }

    async def _streamed(self, client: AsyncOpenAI, prompt: str) -> Answer:
        started = time.perf_counter()
        ttft_s, pieces, usage = None, [], None
        stream: Any = await client.completions.create(
            **self._body(prompt), stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            if chunk.choices:  # a token, even if it does not make up a character yet
                ttft_s = ttft_s or time.perf_counter() - started
                pieces.append(chunk.choices[0].text)
            usage = chunk.usage or usage
        total_s = time.perf_counter() - started
        if ttft_s is None or usage is None:
            raise ServerError("an answer ended without a token, or without saying how many there were")
        details = usage.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
        return Answer(ttft_s, total_s, tuple(pieces), usage.prompt_tokens, cached, usage.completion_tokens)


def _run(asking: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(asking)
    except OpenAIError as error:
        raise ServerError(" ".join(str(error).split())) from error
