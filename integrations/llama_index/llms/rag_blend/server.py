"""BlendServerLLM: what `BlendLLM(base_url=...)` makes, a LlamaIndex LLM on a vLLM server that blends."""

import os
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from typing import Any, TypeVar, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, Field
from llama_index.llms.openai_like import OpenAILike
from llama_index.llms.rag_blend.complaints import not_swallowed
from rag_blend_frameworks.server import NO_KEY, check_arguments, extra_fields, figures, naming_server, no_engine

Response = TypeVar("Response", ChatResponse, CompletionResponse)


class BlendServerLLM(OpenAILike):
    """LlamaIndex LLM on a vLLM server with rag_blend's connector (docs/vllm.md).

    It is LlamaIndex's own `OpenAILike`, whose arguments it takes, with two additions: requests ask the server to reuse
    stored chunks, and `response.raw["rag_blend"]` says how many tokens were. A call may name another `namespace`,
    `selector` or `recompute_ratio`, or ask for `reuse=False`. Where the server has a secret, RAG_BLEND_SECRET must be
    set here, too, or `additional_kwargs={"extra_body": ...}` holds the fields that a tenant was given.

    Example:
        ```python
        llm = BlendLLM(base_url="http://localhost:8000/v1", model="path/to/model", context_window=8192)
        response = index.as_query_engine(llm=llm).query("What is the warranty period?")
        ```
    """

    # A misspelt or foreign argument must not be dropped in silence.
    model_config = ConfigDict(extra="forbid")

    namespace: str = Field(default="default", description="Tenant; caches of another one are never used.")
    selector: str = Field(default="heads", description="Policy that picks the reused tokens to recompute.")
    recompute_ratio: float | None = Field(
        default=None, description="Share of the reused tokens to recompute; None: the selector's own choice."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More variables for the server's chat template, e.g. enable_thinking."
    )
    is_chat_model: bool = Field(default=True, description="Whether the served model has a chat template.")

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_new_tokens: int | None = None,
        **config: Any,
    ) -> None:
        """Configure the client; the server is not asked yet.

        Args:
            model: Name under which the server serves its model.
            base_url: The server's, up to ``/v1``.
            api_key: If the server wants one.
            max_new_tokens: Longest answer in tokens; None is 256.
            **config: The other attributes of this class and of `OpenAILike` (`context_window`, `timeout`, ...).

        Raises:
            ValueError: Something is missing, unknown, or means nothing without an engine.
        """
        url = base_url or config.pop("api_base", None)
        check_arguments("BlendLLM", config, url, model)
        limit = config.pop("max_tokens", None) if max_new_tokens is None else max_new_tokens
        config["max_tokens"] = 256 if limit is None else limit
        super().__init__(model=os.fspath(cast(str, model)), api_base=url, api_key=api_key or NO_KEY, **config)
        extra_fields({}, self)

    @classmethod
    def class_name(cls) -> str:
        """Return the name used in serialised components."""
        return "rag_blend_server_llm"

    # -- the request --

    def _get_model_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        fields = extra_fields(kwargs, self)
        limit = kwargs.pop("max_new_tokens", kwargs.get("max_tokens"))
        options = super()._get_model_kwargs(**kwargs)
        if limit is not None:
            options["max_tokens"] = limit  # the base class prefers the constructor's
        if kwargs.get("stream"):
            options.setdefault("stream_options", {"include_usage": True})
        if body := {**fields, **(options.get("extra_body") or {})}:
            options["extra_body"] = body
        return options

    # -- the eight endpoints, inside of what the base class does for callbacks --

    def _complete(self, prompt: str, **kwargs: Any) -> CompletionResponse:
        with self._readable_errors():
            response: CompletionResponse = super()._complete(prompt, **kwargs)
            return _reported(response)

    def _chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        with self._readable_errors():
            response: ChatResponse = super()._chat(messages, **kwargs)
            return _reported(response)

    def _stream_complete(self, prompt: str, **kwargs: Any) -> CompletionResponseGen:
        with self._readable_errors():
            return self._pieces(super()._stream_complete(prompt, **kwargs))

    def _stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        with self._readable_errors():
            return self._pieces(super()._stream_chat(messages, **kwargs))

    async def _acomplete(self, prompt: str, **kwargs: Any) -> CompletionResponse:
        with self._readable_errors():
            response: CompletionResponse = await super()._acomplete(prompt, **kwargs)
            return _reported(response)

    async def _achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        with self._readable_errors():
            response: ChatResponse = await super()._achat(messages, **kwargs)
            return _reported(response)

    async def _astream_complete(self, prompt: str, **kwargs: Any) -> CompletionResponseAsyncGen:
        with self._readable_errors():
            return self._apieces(await super()._astream_complete(prompt, **kwargs))

    async def _astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        with self._readable_errors():
            return self._apieces(await super()._astream_chat(messages, **kwargs))

    def _pieces(self, stream: Generator[Response, None, None]) -> Generator[Response, None, None]:
        with self._readable_errors(), closing(stream):
            for piece in stream:
                yield _reported(piece)

    async def _apieces(self, stream: AsyncGenerator[Response, None]) -> AsyncGenerator[Response, None]:
        with self._readable_errors():
            async with aclosing(stream):
                async for piece in stream:
                    yield _reported(piece)

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        with not_swallowed(), naming_server(self.api_base, self.model):
            yield

    # -- what a local BlendLLM has besides --

    def close(self) -> None:
        """Let go of the connections; the next call opens new ones."""
        self._client = self._aclient = None

    attach = head = head_of = no_engine
    engine = handle = property(no_engine)


def _reported(response: Response) -> Response:
    """Put the answer into `raw` as the local class does: a dict, with the blend's figures under `rag_blend`."""
    answer = cast(BaseModel, response.raw).model_dump()
    response.raw = {**answer, **figures(answer)}
    return response
