"""ChatBlendServer: what `ChatBlend(base_url=...)` makes, a LangChain chat model on a vLLM server that blends."""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing
from typing import Any, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.utils import get_pydantic_field_names
from langchain_openai import ChatOpenAI
from pydantic import Field, model_validator
from rag_blend_frameworks.server import NO_KEY, check_arguments, extra_fields, figures, naming_server, no_engine

# They hold locks and connections; a copy in another process makes its own.
_CLIENTS = ("client", "async_client", "root_client", "root_async_client")


class ChatBlendServer(ChatOpenAI):
    """LangChain chat model on a vLLM server with rag_blend's connector (docs/vllm.md).

    It is LangChain's own `ChatOpenAI`, whose arguments it takes, with two additions: requests ask the server to reuse
    stored chunks, and `response_metadata["rag_blend"]` says how many tokens were. A call, or `bind`, may name another
    `namespace`, `selector` or `recompute_ratio`, or ask for `reuse=False`. Where the server has a secret,
    RAG_BLEND_SECRET must be set here, too, or `extra_body` holds the fields that a tenant was given.

    Example:
        ```python
        llm = ChatBlend(base_url="http://localhost:8000/v1", model="path/to/model", max_tokens=128)
        print(llm.invoke("What is the warranty period?").response_metadata["rag_blend"])
        ```
    """

    namespace: str = Field(default="default", description="Tenant; caches of another one are never used.")
    selector: str = Field(default="heads", description="Policy that picks the reused tokens to recompute.")
    recompute_ratio: float | None = Field(
        default=None, description="Share of the reused tokens to recompute; None: the selector's own choice."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More variables for the server's chat template, e.g. enable_thinking."
    )
    max_tokens: int | None = Field(default=256, alias="max_completion_tokens", description="Longest answer in tokens.")
    stream_usage: bool | None = Field(default=True, description="Whether streams end with the token usage.")
    use_responses_api: bool | None = Field(default=False, description="Only chat completions tell of reuse.")

    @model_validator(mode="before")
    @classmethod
    def build_extra(cls, values: dict[str, Any]) -> Any:
        """Refuse unknown arguments, which the base class would send to the server."""
        given = {name: os.fspath(value) if name == "model" and value else value for name, value in values.items()}
        if "max_new_tokens" in given:
            given["max_tokens"] = given.pop("max_new_tokens")
        url = given.get("base_url") or given.get("openai_api_base")
        check_arguments("ChatBlend", given, url, given.get("model") or given.get("model_name"))
        unknown = sorted(given.keys() - get_pydantic_field_names(cls))
        if unknown:
            raise ValueError(
                f"ChatBlend has no argument {', '.join(unknown)}; what vLLM knows besides goes to extra_body"
            )
        if given.get("api_key") is None and given.get("openai_api_key") is None:
            given["api_key"] = NO_KEY
        return given

    @model_validator(mode="after")
    def _check_recipe(self) -> "ChatBlendServer":
        extra_fields({}, self)
        return self

    @property
    def _llm_type(self) -> str:
        return "rag-blend-server-chat"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return False, as for the local class."""
        return False

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "rag_blend"
        return params

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        # A response cache must not mix up two recipes. Tracers see them, too, so the salt is not among these.
        recipe = {
            "namespace": self.namespace,
            "selector": self.selector,
            "recompute_ratio": self.recompute_ratio,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return {**super()._get_invocation_params(stop=stop, **kwargs), "rag_blend": recipe}

    # -- request and answer --

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        fields = extra_fields(kwargs, self)
        if "max_new_tokens" in kwargs:
            kwargs["max_tokens"] = kwargs.pop("max_new_tokens")
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        if body := {**fields, **(payload.get("extra_body") or {})}:
            payload["extra_body"] = body
        return payload

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        said = figures(response if isinstance(response, Mapping) else response.model_extra or {})
        for generation in result.generations:
            generation.message.response_metadata.update(said)
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        converted = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if converted is not None:
            converted.message.response_metadata.update(figures(chunk))
        return converted

    # -- the four endpoints --

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        with self._readable_errors():
            return super()._generate(*args, **kwargs)

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        with self._readable_errors():
            yield from super()._stream(*args, **kwargs)

    async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
        with self._readable_errors():
            return await super()._agenerate(*args, **kwargs)

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        with self._readable_errors():
            stream = cast(AsyncGenerator[ChatGenerationChunk, None], super()._astream(*args, **kwargs))
            async with aclosing(stream):
                async for chunk in stream:
                    yield chunk

    def _readable_errors(self) -> AbstractContextManager[None]:
        return naming_server(self.openai_api_base, self.model_name)

    # -- copies in other processes --

    def __getstate__(self) -> dict[Any, Any]:
        """Pickle the configuration; the copy makes its own connections."""
        fields = [name for name in type(self).model_fields if name not in _CLIENTS]
        return {"__dict__": {name: getattr(self, name) for name in fields}}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Rebuild from the configuration."""
        type(self).__init__(self, **state["__dict__"])

    # -- what a local ChatBlend has besides --

    def close(self) -> None:
        """Do nothing: connections are shared by all models of a process."""

    get_engine = head_of = learn_head = no_engine
    loaded_engine = contexts = tokenizer = property(no_engine)
