"""What `ChatBlend` and `BlendLLM` have in common: their settings, their engine, and one request to it."""

import json
import logging
import os
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Literal, Self

from langchain_core.prompt_values import PromptValue
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from rag_blend_frameworks.prompts import Prompt, says_today

from langchain_rag_blend.contexts import Contexts
from langchain_rag_blend.engines import Lease, SharedEngine, contexts_of, read_tokenizer, shared_engine
from langchain_rag_blend.head import HeadSource, head_ids, head_of_template, template_in
from langchain_rag_blend.options import generation_options
from rag_blend import BlendEngine, Generation, GenerationCancelledError, TextStream

logger = logging.getLogger(__name__)

NO_MODEL = "give a model, {name}(model='path or hub id'), or an engine, {name}(engine=engine)"
_DATED_HEAD = (
    "The model's chat template writes today's date in front of the context, so what is cached today is not "
    "reused tomorrow. Fix the date, for Llama 3.2 with chat_template_kwargs={'date_string': '26 Jul 2024'}."
)

# LangChain's standard parameters that mean something for a remote service only.
_MEANINGLESS = ("api_key", "max_retries")
_NO_CLIENT = (
    "base_url is an argument of ChatBlend only; derive from langchain_rag_blend.server.ChatBlendServer, or complete "
    "with langchain_openai.OpenAI(..., extra_body=rag_blend.vllm.request_fields())"
)


class BlendModel(BaseModel):
    """Settings and engine of a LangChain model on a `rag_blend.BlendEngine`."""

    # A misspelt argument must not be dropped in silence.
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: str = Field(default="", description="Folder or hub id of the model; that of `engine` if one is given.")
    engine: BlendEngine | None = Field(
        default=None, exclude=True, repr=False, description="A ready engine to use; it stays the caller's to close."
    )
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
    max_tokens: int = Field(default=256, gt=0, description="Longest answer in tokens.")
    temperature: float | None = Field(
        default=None, ge=0, description="0: the likeliest token always; None: as the model's generation_config says."
    )
    stop: list[str] | None = Field(default=None, description="The answer ends before the first of these.")
    timeout: float | None = Field(
        default=None, gt=0, description="Seconds after which an answer is given up with TimeoutError."
    )
    streaming: bool = Field(default=False, description="Stream inside of `invoke` too, for callbacks.")
    generate_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Defaults of more arguments of `model.generate`: top_p, do_sample, ..."
    )

    _lease: Lease = PrivateAttr(default_factory=Lease)

    @model_validator(mode="before")
    @classmethod
    def _accept_other_spellings(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = {name: value for name, value in values.items() if name not in _MEANINGLESS}
        if given.pop("base_url", None) is not None:
            raise ValueError(_NO_CLIENT)
        for name in ("model", "storage"):
            if isinstance(given.get(name), os.PathLike):
                given[name] = os.fspath(given[name])
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        if "max_new_tokens" in given:
            given["max_tokens"] = given.pop("max_new_tokens")
        return given

    @model_validator(mode="after")
    def _take_the_engines_name(self) -> Self:
        if self.engine is None and not self.model:
            raise ValueError(NO_MODEL.format(name=type(self).__name__))
        if self.engine is not None:
            if self.model not in ("", self.engine.model_name):
                raise ValueError("give either a model or an engine, not both")
            # Not by assignment: that would validate again.
            self.__dict__["model"] = self.engine.model_name
        return self

    # -- the engine --

    def get_engine(self) -> BlendEngine:
        """Return the engine; loads the model if nobody in this process has used it with these settings yet.

        Raises:
            OSError: There is no such model.
            UnsupportedModelError: The model cannot be blended correctly.
        """
        if self.engine is not None:
            return self.engine
        return self._shared.get(self._lease, self._make_engine)

    @property
    def loaded_engine(self) -> BlendEngine | None:
        """The engine if it is there already."""
        return self._shared.loaded if self.engine is None else self.engine

    @property
    def contexts(self) -> Contexts:
        """Notes on retrieved documents and heads, common to all objects on one engine."""
        return self._shared.contexts if self.engine is None else contexts_of(self.engine)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; read without the weights if those are not loaded yet."""
        engine = self.loaded_engine
        return read_tokenizer(self.model) if engine is None else engine.tokenizer

    def close(self) -> None:
        """Let go of the engine, which closes it unless other objects use it; the next call loads it again.

        An engine that was given stays open.
        """
        if self.engine is None:
            self._shared.release(self._lease)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own token ids of a text, without special tokens; `get_num_tokens` counts these."""
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    @property
    def _shared(self) -> SharedEngine:
        return shared_engine(json.dumps(self._engine_settings(), sort_keys=True, default=repr))

    def _engine_settings(self) -> dict[str, Any]:
        return {
            "model": os.path.abspath(self.model) if os.path.isdir(self.model) else self.model,
            "storage": self.storage if "://" in self.storage else os.path.abspath(self.storage),
            "selector": self.selector,
            "recompute_ratio": self.recompute_ratio,
            "prime": self.prime,
            "namespace": self.namespace,
            **self.engine_options,
        }

    def _make_engine(self) -> BlendEngine:
        return BlendEngine.from_pretrained(
            self.model,
            storage=self.storage,
            selector=self.selector,
            recompute_ratio=self.recompute_ratio,
            prime=self.prime,
            namespace=self.namespace,
            **self.engine_options,
        )

    # -- copies, pickles, tracers and response caches --

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the settings; the engine is shared."""
        return self.__copy__()

    def __getstate__(self) -> dict[Any, Any]:
        """Pickle the configuration only; the copy loads the model when it is first used.

        Raises:
            TypeError: It was built from an engine object, which cannot travel to another process.
        """
        name = type(self).__name__
        if self.engine is not None:
            raise TypeError(
                f"this {name} was built from an engine object, which cannot be pickled; build it by name, "
                f"{name}(model=..., storage=...), and every process will load its own engine"
            )
        return {**super().__getstate__(), "__pydantic_private__": None}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Rebuild from the configuration."""
        super().__setstate__(state)
        self.__pydantic_private__ = {
            name: private.get_default(call_default_factory=True)
            for name, private in type(self).__private_attributes__.items()
        }

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on: LangChain's response cache must not mix up two of these."""
        return {
            "model": self.model,
            "selector": self.selector,
            "recompute_ratio": self.recompute_ratio,
            "namespace": self.namespace,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": self.stop,
            "generate_kwargs": self.generate_kwargs,
        }

    # -- one request --

    def _answers(
        self,
        prompts: Sequence[Prompt],
        stop: Sequence[str] | None,
        kwargs: Mapping[str, Any],
        cancel: threading.Event | None = None,
    ) -> list[Generation]:
        """Answer prompts of one kind; several are decoded together."""
        options = self._options(kwargs, stop)
        engine = self.get_engine()
        special = prompts[0].add_special_tokens
        with self._deadline(cancel) as stopped:
            if len(prompts) == 1:
                answers = [engine.generate(prompts[0].text, add_special_tokens=special, cancel=stopped, **options)]
            else:
                texts = [prompt.text for prompt in prompts]
                answers = engine.generate_batch(texts, add_special_tokens=special, cancel=stopped, **options)
        for prompt, answer in zip(prompts, answers, strict=True):
            self.contexts.answered(engine, prompt, answer.stats)
        return answers

    @contextmanager
    def _streamed(
        self,
        prompt: Prompt,
        stop: Sequence[str] | None,
        kwargs: Mapping[str, Any],
        cancel: threading.Event | None = None,
    ) -> Iterator[TextStream]:
        """A stream that stops the computation when it is left; its end has the stats."""
        options = self._options(kwargs, stop)
        engine = self.get_engine()
        with (
            self._deadline(cancel) as stopped,
            # `closing` reaches the engine whether the consumer finishes, closes, fails or drops the generator.
            closing(
                engine.stream(prompt.text, add_special_tokens=prompt.add_special_tokens, cancel=stopped, **options)
            ) as stream,
        ):
            yield stream
            if stream.stats is None and stopped.is_set():
                raise GenerationCancelledError("cancelled")
        if stream.stats is not None:
            self.contexts.answered(engine, prompt, stream.stats)

    def _options(self, kwargs: Mapping[str, Any], stop: Sequence[str] | None) -> dict[str, Any]:
        call = dict(kwargs)
        if call.pop("model", self.model) != self.model:
            raise ValueError(f"{type(self).__name__} has one model, {self.model}; make another object for another one")
        defaults = {"max_tokens": self.max_tokens, "temperature": self.temperature, "stop": self.stop}
        return generation_options({**defaults, **self.generate_kwargs}, call, stop)

    @contextmanager
    def _deadline(self, cancel: threading.Event | None) -> Iterator[threading.Event]:
        """An event that stops the computation: the caller's, which is also set when the time is up."""
        cancel = cancel or threading.Event()
        if self.timeout is None:
            yield cancel
            return
        late = threading.Event()

        def give_up() -> None:
            late.set()
            cancel.set()

        timer = threading.Timer(self.timeout, give_up)
        timer.name, timer.daemon = "rag-blend-timeout", True
        timer.start()
        try:
            yield cancel
        except GenerationCancelledError as error:
            if late.is_set():
                raise TimeoutError(f"no complete answer within {self.timeout:g} s") from error
            raise
        finally:
            timer.cancel()

    # -- heads --

    def head_of(self, prompt: HeadSource, *, variable: str = "context", tools: Sequence[Any] = ()) -> list[int]:
        """Return the token ids in front of the context: chunks are reused only behind those they were cached with.

        Args:
            prompt: The prompt template, or the chain that has it; or the very text in front of the context, for a
                model with a chat template the rendered text; or its token ids.
            variable: The template's variable for the context.
            tools: Tools that the model is bound to, since templates write them in front of the conversation.

        Returns:
            Token ids, special tokens included; none if nothing stands in front of the context.

        Raises:
            ValueError: There is no such template, or its prompts have no fixed head; the text says what to do.
        """
        if isinstance(prompt, str):
            ids = head_ids(self.tokenizer, self._prompt_of_text(prompt))
        elif isinstance(prompt, Sequence):
            ids = [int(token) for token in prompt]
        else:
            template = template_in(prompt, variable)
            head = head_of_template(template, variable, lambda value: self._prompt_of_value(value, tools))
            ids = head_ids(self.tokenizer, head)
        if says_today(self.tokenizer, ids):
            logger.warning(_DATED_HEAD)
        return ids

    def learn_head(self, prompt: HeadSource, *, variable: str = "context", tools: Sequence[Any] = ()) -> list[int]:
        """Cache documents behind this head from now on, whatever object on the same engine ingests them.

        Args:
            prompt: See `head_of`.
            variable: See `head_of`.
            tools: See `head_of`.

        Returns:
            The head in token ids.

        Raises:
            ValueError: See `head_of`.
        """
        ids = self.head_of(prompt, variable=variable, tools=tools)
        self.contexts.head = tuple(ids) or None
        return ids

    @abstractmethod
    def _prompt_of_value(self, value: PromptValue, tools: Sequence[Any]) -> Prompt:
        """The prompt that the model reads for what a template has made."""

    @abstractmethod
    def _prompt_of_text(self, text: str) -> Prompt:
        """A prompt that the user has written out."""
