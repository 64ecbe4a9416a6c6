"""ChatBlend: a LangChain chat model that reuses the KV caches of the retrieved documents."""

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field
from rag_blend_frameworks.prompts import Prompt
from rag_blend_frameworks.server_class import server_class
from rag_blend_frameworks.threads import call_in_thread, iterate_in_thread

from langchain_rag_blend.base import BlendModel
from langchain_rag_blend.messages import Tool, render, shows_tools
from langchain_rag_blend.responses import metadata, usage
from langchain_rag_blend.structured import json_chain
from langchain_rag_blend.tools import Answer, opening, parse, readable_part
from rag_blend import Generation


class _Request(NamedTuple):
    """What one call asks for."""

    messages: Sequence[BaseMessage]
    stop: list[str] | None
    tools: Sequence[Tool]
    choice: str | None
    """Which tool must be called: a name, "any", or None."""
    answer_start: str
    options: Mapping[str, Any]


class ChatBlend(BlendModel, BaseChatModel):
    """LangChain chat model on a `rag_blend.BlendEngine`.

    Making one is cheap: the model is loaded at the first call (or taken from `engine`), once per process for all
    objects with the same model, storage and engine settings. Calls from several threads or tasks queue up inside
    the engine. Leaving a stream or cancelling a task stops the computation.

    `usage_metadata["input_token_details"]["cache_read"]` counts the prompt tokens that were taken from caches;
    `response_metadata["rag_blend"]` has all figures. Every argument of `model.generate`, and the engine's `selector`,
    `recompute_ratio` and `reuse`, may be given to a call or to `bind`; `answer_start` is a text that the answer
    begins with.

    Example:
        ```python
        llm = ChatBlend(model="Qwen/Qwen2.5-1.5B-Instruct", storage="kv/", max_tokens=128)
        store = BlendVectorStore(InMemoryVectorStore(embedding), llm, prompt=prompt)
        store.add_documents(documents)  # cached, too
        chain = create_retrieval_chain(store.as_retriever(), create_stuff_documents_chain(llm, prompt))
        ```
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More variables for the chat template, e.g. enable_thinking."
    )

    def __new__(cls, *args: Any, **config: Any) -> Any:
        """Make a model, or with `base_url` a client of a vLLM server: a `ChatBlendServer`."""
        if config.get("base_url") is None or cls is not ChatBlend:
            return super().__new__(cls)
        return server_class("langchain_rag_blend.server", "ChatBlendServer")(*args, **config)

    @property
    def _llm_type(self) -> str:
        return "rag-blend-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "chat_template_kwargs": self.chat_template_kwargs}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "rag_blend"
        return params

    # -- the four endpoints --

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._chat(self._request(messages, stop, kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in self._chunks(self._request(messages, stop, kwargs)):
            if run_manager:
                run_manager.on_llm_new_token(cast(str, chunk.message.content), chunk=chunk)
            yield chunk

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request, cancel = self._request(messages, stop, kwargs), threading.Event()
        return await call_in_thread(lambda: self._chat(request, cancel), cancel)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        request, cancel = self._request(messages, stop, kwargs), threading.Event()
        async with aclosing(iterate_in_thread(lambda: self._chunks(request, cancel), cancel)) as chunks:
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(cast(str, chunk.message.content), chunk=chunk)
                yield chunk

    # -- one request --

    def _request(self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> _Request:
        options = dict(kwargs)
        tools = options.pop("tools", None) or ()
        choice = options.pop("tool_choice", None)
        return _Request(messages, stop, tools, choice, options.pop("answer_start", None) or "", options)

    def _prompt(self, request: _Request) -> tuple[Prompt, str]:
        """The prompt, and how the answer begins: with that its last part."""
        tokenizer = self.get_engine().tokenizer
        prompt = render(tokenizer, request.messages, request.tools, self.chat_template_kwargs)
        start = request.answer_start
        if request.choice is not None:
            only = request.tools[0]["function"]["name"] if len(request.tools) == 1 else None
            name = only if request.choice == "any" else request.choice
            start = opening(str(tokenizer.get_chat_template(tools=list(request.tools))), name)
        return prompt._replace(text=prompt.text + start), start

    def _chat(self, request: _Request, cancel: threading.Event | None = None) -> ChatResult:
        # Rendering needs the tokenizer, so it may load the model, which has to happen in the worker thread.
        prompt, start = self._prompt(request)
        (generation,) = self._answers([prompt], request.stop, request.options, cancel)
        message = self._message(_parsed(start + generation.text, request.tools), generation)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _message(self, answer: Answer, generation: Generation) -> AIMessage:
        return AIMessage(
            content=answer.text,
            tool_calls=answer.calls,
            invalid_tool_calls=answer.invalid,
            usage_metadata=usage(generation.stats, len(generation.token_ids)),
            response_metadata=metadata(self.model, generation.stats),
        )

    def _chunks(self, request: _Request, cancel: threading.Event | None = None) -> Iterator[ChatGenerationChunk]:
        """A chunk per piece of text, then one with the tool calls and the usage.

        The usage is known only after the last token. Holding every piece back until its successor arrives would
        put it on the last piece, but would show each word one token late.
        """
        prompt, start = self._prompt(request)
        shown = 0
        text = start
        with self._streamed(prompt, request.stop, request.options, cancel) as stream:
            for piece in stream:
                text += piece
                ready = readable_part(text) if request.tools else len(text)
                if ready > shown:
                    yield ChatGenerationChunk(message=AIMessageChunk(content=text[shown:ready]))
                    shown = ready
        answer = _parsed(text, request.tools)
        yield ChatGenerationChunk(
            message=AIMessageChunk(
                content=answer.text[shown:],
                tool_call_chunks=_tool_call_chunks(answer),
                usage_metadata=usage(stream.stats, len(stream.token_ids)) if stream.stats else None,
                response_metadata=metadata(self.model, stream.stats) if stream.stats else {},
                chunk_position="last",
            )
        )

    # -- tools and structured output --

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Give the model tools, which its chat template describes to it.

        Args:
            tools: Anything that LangChain can describe as a tool.
            tool_choice: "any", "required" or True: the answer is made to begin as a tool call; the name of a tool
                (or OpenAI's dict): as a call of that one. None, "auto" or False: the model decides. "none": it is
                not given the tools.
            kwargs: More arguments of every call.

        Raises:
            NotImplementedError: The model's chat template has no place for tools.
            ValueError: There is no tool of that name.
        """
        if not shows_tools(self.tokenizer):
            raise NotImplementedError(
                f"the chat template of {self.model} has no place for tools; use a model that was trained to call tools"
            )
        described = [convert_to_openai_tool(tool) for tool in tools]
        choice = _choice(tool_choice, [tool["function"]["name"] for tool in described])
        if choice == "none":
            return self.bind(**kwargs)
        return self.bind(tools=described, **({"tool_choice": choice} if choice else {}), **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["function_calling", "json_mode", "json_schema"] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Have answers formatted to match a schema.

        The model is made to begin its answer as a tool call or as JSON; what it goes on with is not constrained, so a
        small model may still fail, with LangChain's own parser errors.

        Args:
            schema: Pydantic class, TypedDict, JSON schema or OpenAI tool.
            include_raw: Return a dict with `raw`, `parsed` and `parsing_error`, and raise nothing.
            method: "function_calling": as a call of a tool with this schema. "json_schema": the schema is described
                at the end of the conversation. "json_mode": you describe it yourself. None: the first if the model's
                chat template has tools, else the second.
            kwargs: `strict` is accepted for compatibility and has no effect.

        Raises:
            NotImplementedError: "function_calling" with a model whose chat template has no place for tools.
            ValueError: Unknown arguments.
        """
        if method is None:
            method = "function_calling" if shows_tools(self.tokenizer) else "json_schema"
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        kwargs.pop("strict", None)
        if kwargs:
            raise ValueError(f"Received unsupported arguments {kwargs}")
        return json_chain(self, schema, include_raw=include_raw, describe=method == "json_schema")

    # -- heads --

    def _prompt_of_value(self, value: PromptValue, tools: Sequence[Any]) -> Prompt:
        described = [convert_to_openai_tool(tool) for tool in tools]
        return render(self.tokenizer, value.to_messages(), described, self.chat_template_kwargs)

    def _prompt_of_text(self, text: str) -> Prompt:
        return Prompt(text, False if getattr(self.tokenizer, "chat_template", None) else None)


def _parsed(text: str, tools: Sequence[Tool]) -> Answer:
    if not tools:
        return Answer(text, [], [])
    return parse(text, [tool["function"]["name"] for tool in tools])


def _tool_call_chunks(answer: Answer) -> list[Any]:
    """Calls as complete chunks; LangChain parses their arguments and sorts out the invalid ones."""
    calls: list[tuple[str | None, str | None, str | None]] = [
        (call["name"], json.dumps(call["args"], ensure_ascii=False), call["id"]) for call in answer.calls
    ]
    calls += [(None, call["args"], call["id"]) for call in answer.invalid]
    return [tool_call_chunk(name=name, args=args, id=id_, index=index) for index, (name, args, id_) in enumerate(calls)]


def _choice(tool_choice: dict[str, Any] | str | bool | None, names: Sequence[str]) -> str | None:
    """A tool's name, "any", "none", or None where the model decides."""
    if isinstance(tool_choice, Mapping):
        tool_choice = str(tool_choice.get("function", tool_choice).get("name", tool_choice.get("type", "")))
    if tool_choice in (None, False, "auto"):
        return None
    if tool_choice in (True, "any", "required"):
        return "any"
    if tool_choice == "none" or tool_choice in names:
        return str(tool_choice)
    raise ValueError(f"there is no tool {tool_choice!r} to choose, only {list(names)}")
