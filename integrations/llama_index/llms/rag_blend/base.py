"""BlendLLM: a LlamaIndex LLM that reuses the KV caches of the retrieved chunks."""

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Literal, cast

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt as plain_messages_to_prompt,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.indices.base import BaseIndex
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.llms.rag_blend import responses
from llama_index.llms.rag_blend.complaints import not_swallowed
from llama_index.llms.rag_blend.engine_handle import NO_MODEL, EngineHandle, ModelFacts
from llama_index.llms.rag_blend.head import head_ids
from llama_index.llms.rag_blend.messages import render_chat
from llama_index.llms.rag_blend.options import generation_options
from llama_index.llms.rag_blend.rehearsal import front_of, is_rehearsed
from llama_index.llms.rag_blend.reporting import report
from llama_index.llms.rag_blend.vector_store import attach_index
from rag_blend_frameworks.prompts import Prompt, says_today
from rag_blend_frameworks.server_class import server_class
from rag_blend_frameworks.threads import call_in_thread, iterate_in_thread

from rag_blend import BlendEngine, IngestReport

logger = logging.getLogger(__name__)

_DATED_HEAD = (
    "The model's chat template writes today's date in front of the context, so what is cached today is not "
    "reused tomorrow. Fix the date, for Llama 3.2 with chat_template_kwargs={'date_string': '26 Jul 2024'}."
)

# Arguments for loading a model that its tokenizer needs as well.
_TOKENIZER_OPTIONS = ("revision", "trust_remote_code", "local_files_only")

# These belong to the process, not to the configuration: a copy in another process gets its own.
_NOT_PICKLED = frozenset({"callback_manager", "rate_limiter"})


class BlendLLM(CustomLLM):
    """LlamaIndex LLM on a `rag_blend.BlendEngine`.

    Making one is cheap: the model is loaded at the first call (or taken from `engine`). Calls from several
    threads or tasks share one engine and queue up inside it.

    Attributes are set by the constructor; changing those of the engine after its first use has no effect.

    Example:
        ```python
        llm = BlendLLM(model="Qwen/Qwen2.5-1.5B-Instruct", storage="kv/", max_new_tokens=128)
        llm.attach(index)
        response = index.as_query_engine(llm=llm).query("What is the warranty period?")
        ```
    """

    # A misspelt or foreign argument must not be dropped in silence.
    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(default=None, description="Folder or hub id of the model.")
    storage: str = Field(default="kv/", description="Where the KV caches are kept: folder or storage URL.")
    selector: str = Field(
        default="anchor", description="Policy that picks the reused tokens to recompute, unless one was calibrated."
    )
    recompute_ratio: float | Literal["auto"] | None = Field(
        default="auto",
        description="Share of the reused tokens to recompute; 'auto': as calibrated; None: the selector's own choice.",
    )
    prime: str = Field(default="sample", description="What stands in front of a chunk while it is cached.")
    namespace: str = Field(default="default", description="Tenant; caches of another one are never used.")
    engine_options: dict[str, Any] = Field(
        default_factory=dict, description="More for `BlendEngine.from_pretrained`: device, dtype, ..."
    )
    max_new_tokens: int = Field(default=256, gt=0, description="Longest answer in tokens.")
    context_window: int | None = Field(
        default=None, gt=0, description="Window to report to LlamaIndex; None: the model's, less a reserve."
    )
    is_chat_model: bool | None = Field(
        default=None, description="None: a chat model if its tokenizer has a chat template."
    )
    generate_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Defaults for every call: temperature, top_p, stop, ..."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More variables for the chat template, e.g. enable_thinking."
    )

    _handle: EngineHandle = PrivateAttr()
    _reserves: dict[tuple[str, str], int] = PrivateAttr(default_factory=dict)

    def __new__(cls, *args: object, base_url: str | None = None, **config: object) -> Any:
        """Make an LLM, or with `base_url` a client of a vLLM server: a `BlendServerLLM`."""
        if base_url is None or cls is not BlendLLM:
            return super().__new__(cls)
        return server_class("llama_index.llms.rag_blend.server", "BlendServerLLM")(*args, base_url=base_url, **config)

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        engine: BlendEngine | None = None,
        base_url: str | None = None,
        storage: str | os.PathLike[str] = "kv/",
        **config: object,
    ) -> None:
        """Configure the LLM; nothing is loaded yet.

        Args:
            model: Folder or hub id of the model. Give this or `engine`.
            engine: A ready engine to use; it stays the caller's to close.
            base_url: Of a vLLM server that has the model and the chunks: it answers instead of an engine here, and
                the other arguments are those of `llama_index.llms.rag_blend.server.BlendServerLLM`.
            storage: Folder or URL for the KV caches (with `model` only).
            **config: The other attributes of this class and of LlamaIndex's `LLM` (`system_prompt`,
                `callback_manager`, `messages_to_prompt`, ...).
        """
        if base_url is not None:
            raise TypeError("for a client of a server derive from llama_index.llms.rag_blend.server.BlendServerLLM")
        if engine is not None and model is not None:
            raise ValueError("give BlendLLM either a model or an engine, not both")
        name = None if model is None else os.fspath(model)
        super().__init__(model=name, storage=os.fspath(storage), **config)
        self._handle = EngineHandle(engine)

    # -- what LlamaIndex asks without running the model --

    @classmethod
    def class_name(cls) -> str:
        """Return the name used in serialised components."""
        return "rag_blend_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """Window, answer length and kind of the model; read from config files, without loading weights."""
        facts = self._handle.facts(self.model)
        return LLMMetadata(
            context_window=self.context_window or facts.context_window - self._reserve(facts),
            num_output=int(self.generate_kwargs.get("max_new_tokens", self.max_new_tokens)),
            is_chat_model=self._is_chat(facts),
            model_name=facts.name,
        )

    def _reserve(self, facts: ModelFacts) -> int:
        """Return how many tokens of the window LlamaIndex must leave free.

        It packs chunks by the plain texts, and knows nothing of what the chat template and this LLM's own prompts
        add. A part that does not depend on that is left for a tokenizer that is not the model's.
        """
        wrapper = self.query_wrapper_prompt
        own = (self.system_prompt or "", wrapper.get_template() if wrapper is not None else "")
        if own not in self._reserves:
            try:
                around = self._chat_prompt([ChatMessage(role="system", content=own[0]), ChatMessage(content=own[1])])
            except ValueError:  # the template wants another conversation than this one
                around = Prompt("\n\n".join(own))
            self._reserves[own] = len(self.tokenizer(around.text))
        return self._reserves[own] + min(128, facts.context_window // 16)

    def _is_chat(self, facts: ModelFacts) -> bool:
        return facts.has_chat_template if self.is_chat_model is None else self.is_chat_model

    @property
    def tokenizer(self) -> Callable[[str], list[int]]:
        """The model's tokenizer as LlamaIndex wants it: `Settings.tokenizer = llm.tokenizer`.

        Splitters and prompt packing then count as the model does. Loads no weights.
        """
        return functools.partial(self._tokenizer.encode, add_special_tokens=False, verbose=False)

    @property
    def _tokenizer(self) -> Any:
        given = self.engine_options.get("model_kwargs") or {}
        loading = {name: given[name] for name in _TOKENIZER_OPTIONS if name in given}
        return self._handle.tokenizer(self.model, loading)

    # -- the engine --

    @property
    def handle(self) -> EngineHandle:
        """What copies of this LLM share: the engine, and what is known of its chunks and prompts."""
        return self._handle

    @property
    def engine(self) -> BlendEngine:
        """The engine; loads the model if this is its first use."""
        return self._handle.get(self._make_engine)

    def _make_engine(self) -> BlendEngine:
        if self.model is None:
            raise ValueError(NO_MODEL)
        return BlendEngine.from_pretrained(
            self.model,
            storage=self.storage,
            selector=self.selector,
            recompute_ratio=self.recompute_ratio,
            prime=self.prime,
            namespace=self.namespace,
            **self.engine_options,
        )

    def close(self) -> None:
        """Free the model if this LLM loaded it; the next call loads it again."""
        self._handle.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the configuration only; the copy loads the model when it is first used.

        Raises:
            TypeError: The LLM was built from an engine object, which cannot travel to another process.
        """
        if self._handle.given:
            raise TypeError(
                "this BlendLLM was built from an engine object, which cannot be pickled; build it by name, "
                "BlendLLM(model=..., storage=...), and every process will load its own engine"
            )
        names = [name for name in type(self).model_fields if name not in _NOT_PICKLED]
        return {"__dict__": {name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild from the configuration."""
        type(self).__init__(self, **state["__dict__"])

    # -- the eight endpoints --

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: object) -> CompletionResponse:
        """Complete a prompt.

        Args:
            prompt: The prompt. Unless `formatted`, a chat model reads it as one user message.
            formatted: The prompt is to be used exactly as it is.
            **kwargs: `stop`, `max_tokens` or `max_new_tokens`, `temperature`, `top_p`, ...

        Returns:
            The new text only, with the token usage in `raw`.
        """
        return self._complete(lambda: self._completion_prompt(prompt, formatted), kwargs)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: object) -> CompletionResponseGen:
        """Complete a prompt piece by piece; closing the generator stops the computation.

        Args:
            prompt: As for `complete`.
            formatted: As for `complete`.
            **kwargs: As for `complete`.

        Returns:
            Chunks with `delta` and the text so far; an empty last chunk carries the token usage.
        """
        return self._stream(lambda: self._completion_prompt(prompt, formatted), kwargs)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: object) -> ChatResponse:
        """Answer a conversation.

        Args:
            messages: The conversation; rendered by the model's own chat template.
            **kwargs: As for `complete`.

        Returns:
            The assistant's message, with the token usage in `raw`.
        """
        return responses.as_chat(self._complete(lambda: self._chat_prompt(messages), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: object) -> ChatResponseGen:
        """Answer a conversation piece by piece; closing the generator stops the computation.

        Args:
            messages: As for `chat`.
            **kwargs: As for `complete`.

        Returns:
            Chunks with `delta` and the message so far; an empty last chunk carries the token usage.
        """
        return self._stream_as_chat(lambda: self._chat_prompt(messages), kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: object) -> CompletionResponse:
        """Complete a prompt beside the event loop; cancelling the task stops the computation.

        Args:
            prompt: As for `complete`.
            formatted: As for `complete`.
            **kwargs: As for `complete`.

        Returns:
            As `complete`.
        """
        return await self._acomplete(lambda: self._completion_prompt(prompt, formatted), kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: object
    ) -> CompletionResponseAsyncGen:
        """Complete a prompt piece by piece beside the event loop; closing the generator stops it.

        Args:
            prompt: As for `complete`.
            formatted: As for `complete`.
            **kwargs: As for `complete`.

        Returns:
            As `stream_complete`.
        """
        cancel = threading.Event()
        return iterate_in_thread(
            lambda: self._stream(lambda: self._completion_prompt(prompt, formatted), kwargs, cancel), cancel
        )

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: object) -> ChatResponse:
        """Answer a conversation beside the event loop; cancelling the task stops the computation.

        Args:
            messages: As for `chat`.
            **kwargs: As for `complete`.

        Returns:
            As `chat`.
        """
        return responses.as_chat(await self._acomplete(lambda: self._chat_prompt(messages), kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: object) -> ChatResponseAsyncGen:
        """Answer a conversation piece by piece beside the event loop; closing the generator stops it.

        Args:
            messages: As for `chat`.
            **kwargs: As for `complete`.

        Returns:
            As `stream_chat`.
        """
        cancel = threading.Event()
        return iterate_in_thread(
            lambda: self._stream_as_chat(lambda: self._chat_prompt(messages), kwargs, cancel), cancel
        )

    # -- one request --

    def _complete(
        self,
        prompt: Callable[[], Prompt],
        kwargs: dict[str, Any],
        cancel: threading.Event | None = None,
    ) -> CompletionResponse:
        # The prompt comes as a callable: rendering needs the tokenizer, so it may load the model, and that
        # has to happen in the worker thread of the async endpoints.
        with not_swallowed():
            asked = prompt()
            if is_rehearsed(asked):
                return CompletionResponse(text="")
            options = self._options(kwargs)
            generation = self.engine.generate(
                asked.text, add_special_tokens=asked.add_special_tokens, cancel=cancel, **options
            )
        return responses.completion(generation, self._report(asked, active_span_id.get()))

    async def _acomplete(self, prompt: Callable[[], Prompt], kwargs: dict[str, Any]) -> CompletionResponse:
        cancel = threading.Event()
        return await call_in_thread(lambda: self._complete(prompt, kwargs, cancel), cancel)

    def _stream(
        self,
        prompt: Callable[[], Prompt],
        kwargs: dict[str, Any],
        cancel: threading.Event | None = None,
    ) -> CompletionResponseGen:
        return self._chunks(prompt, kwargs, cancel, active_span_id.get())

    def _chunks(
        self,
        prompt: Callable[[], Prompt],
        kwargs: dict[str, Any],
        cancel: threading.Event | None,
        span_id: str | None,
    ) -> CompletionResponseGen:
        with not_swallowed():
            asked = prompt()
            if is_rehearsed(asked):
                yield CompletionResponse(text="", delta="")
                return
            options = self._options(kwargs)
            text, special = asked
            # `closing` reaches the engine whether the consumer finishes, closes, fails or drops the generator.
            with closing(self.engine.stream(text, add_special_tokens=special, cancel=cancel, **options)) as stream:
                yield from responses.completion_chunks(stream, self._report(asked, span_id))

    def _report(self, asked: Prompt, span_id: str | None) -> responses.Report:
        return lambda stats, tokens: report(self, asked, stats, tokens, span_id)

    def _stream_as_chat(
        self,
        prompt: Callable[[], Prompt],
        kwargs: dict[str, Any],
        cancel: threading.Event | None = None,
    ) -> ChatResponseGen:
        return responses.chat_chunks(self._stream(prompt, kwargs, cancel))

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return generation_options(self.generate_kwargs, kwargs, self.max_new_tokens)

    # -- prompts --

    def _completion_prompt(self, prompt: str, formatted: bool) -> Prompt:
        if formatted:
            return Prompt(prompt)
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return Prompt(cast(Callable[[str], str], self.completion_to_prompt)(prompt))
        if self._is_chat(self._handle.facts(self.model)):
            return self._chat_prompt([ChatMessage(role=MessageRole.USER, content=prompt)])
        return Prompt(prompt)

    def _chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        own = self.messages_to_prompt
        if own is not None and own is not plain_messages_to_prompt:
            return Prompt(own(messages))
        facts = self._handle.facts(self.model)
        if facts.has_chat_template and self._is_chat(facts):
            return render_chat(self._tokenizer, messages, self.chat_template_kwargs)
        return Prompt(plain_messages_to_prompt(messages))

    def _template_prompt(self, template: BasePromptTemplate, context: str) -> Prompt:
        """Return the prompt that LlamaIndex's `predict` would send for this template and context."""
        values = {"context_str": context, "query_str": "?"}
        if self.metadata.is_chat_model:
            return self._chat_prompt(self._get_messages(template, **values))
        return Prompt(self._get_prompt(template, **values))

    # -- ingestion --

    def head(self, text_qa_template: BasePromptTemplate | None = None, engine: object = None) -> list[int]:
        """Return the token ids with which the prompts of an engine start, up to the context. Loads no weights.

        Args:
            text_qa_template: The template that a query engine uses; None: LlamaIndex's default.
            engine: Or a query engine, chat engine or response synthesizer made with this LLM. It is asked a question
                about a stand-in text, which never reaches the model, to see the prompt that it makes.

        Returns:
            Token ids, special tokens included.

        Raises:
            ValueError: The template, or the engine's prompt, does not show the context.
            TypeError: The engine leaves prompts to other engines.
        """
        if engine is not None:
            front, special = front_of(engine)
            return head_ids(self._tokenizer, lambda context: Prompt(front + context, special))
        template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        return head_ids(self._tokenizer, lambda context: self._template_prompt(template, context))

    def attach(
        self,
        index: BaseIndex[Any],
        head: str | Sequence[int] | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        engine: object = None,
        show_progress: bool = True,
    ) -> IngestReport:
        """Cache the chunks of an index now, and follow everything that is added, refreshed or deleted later.

        The index's vector store is wrapped in a `BlendVectorStore`. Calling this again is cheap (what is
        cached is skipped) and needed once per process, since the wrapping is not saved with the index.

        A chunk is reused only behind the text it was cached with, the head. By default that is the head of
        the prompts of `index.as_query_engine(llm=llm)`; name another by one of the three arguments. An index
        may be attached for several heads, one call each; every chunk is then cached once for each of them.

        Args:
            index: A vector index.
            head: Text (or token ids) in front of the context; for a chat model the rendered text.
            text_qa_template: The query engine's own `text_qa_template`.
            engine: The query or chat engine itself; see `head`.
            show_progress: Show progress bars, now and for later additions.

        Returns:
            What was cached now.
        """
        return attach_index(self, index, self.head_of(head, text_qa_template, engine), show_progress)

    def head_of(
        self, head: str | Sequence[int] | None, text_qa_template: BasePromptTemplate | None, engine: object
    ) -> list[int]:
        """Return the token ids of the head that the arguments of `attach` name.

        Args:
            head: See `attach`, like the other two.
            text_qa_template: See `attach`.
            engine: See `attach`.
        """
        if sum(given is not None for given in (head, text_qa_template, engine)) > 1:
            raise ValueError("give one of head, text_qa_template and engine: each of them names the head")
        if isinstance(head, str):
            special = False if self.metadata.is_chat_model else None
            return head_ids(self._tokenizer, lambda context: Prompt(head + context, special))
        if head is not None:
            return [int(token) for token in head]
        ids = self.head(text_qa_template, engine)
        if not self.chat_template_kwargs and says_today(self._tokenizer, ids):
            logger.warning(_DATED_HEAD)
        return ids
