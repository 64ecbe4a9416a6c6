"""The engine behind a BlendLLM: made on first use, at most once, shared by copies of the LLM."""

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from llama_index.llms.rag_blend.known_heads import KnownHeads
from rag_blend_frameworks.prompts import Prompt
from transformers import AutoTokenizer

from rag_blend import BlendEngine, read_model_info

NO_MODEL = "BlendLLM needs a model: BlendLLM(model='path or hub id') or BlendLLM(engine=engine)"


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What LlamaIndex asks about the model before the first token."""

    name: str
    context_window: int
    """Tokens of prompt and answer together."""
    has_chat_template: bool


class Listener(Protocol):
    """Wants to know of every answered prompt."""

    def answered(self, prompt: Prompt) -> None:
        """A prompt has been answered. Must return at once, and raise nothing."""


class EngineHandle:
    """Holds a given engine, or the one that is made from a model name when it is first needed.

    The lock, the engine and its threads live here, outside of pydantic's fields, so that copying or dumping
    an LLM never touches them.
    """

    def __init__(self, engine: BlendEngine | None = None) -> None:
        """Hold `engine`; None means that one will be made."""
        self.given = engine is not None
        self.heads = KnownHeads()
        self.listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._engine = engine
        self._tokenizer: Any = None
        self._facts: ModelFacts | None = None
        self._lock = threading.Lock()

    def get(self, make: Callable[[], BlendEngine]) -> BlendEngine:
        """Return the engine; the first caller makes it while the others wait."""
        with self._lock:
            if self._engine is None:
                self._engine = make()
            return self._engine

    @property
    def is_loaded(self) -> bool:
        """Whether the engine is there already."""
        return self._engine is not None

    def tokenizer(self, model: str | None, loading: dict[str, Any]) -> Any:
        """Return the model's tokenizer, without loading weights.

        Args:
            model: Folder or hub id.
            loading: Arguments for `from_pretrained`.
        """
        engine = self._engine
        if engine is not None:
            return engine.tokenizer
        if model is None:
            raise ValueError(NO_MODEL)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = AutoTokenizer.from_pretrained(model, **loading)
            return self._tokenizer

    def facts(self, model: str | None) -> ModelFacts:
        """Return the facts about the model, from its config files when the engine is not there yet."""
        if self._facts is None:
            self._facts = _facts_of_engine(self._engine) if self.given else _facts_of_files(model)
        return self._facts

    def close(self) -> None:
        """Close an engine that was made here; a given one belongs to its giver."""
        with self._lock:
            if self._engine is not None and not self.given:
                self._engine.close()
                self._engine = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineHandle":
        """Share: a copy of an LLM must not load a second model."""
        return self


def _facts_of_engine(engine: BlendEngine | None) -> ModelFacts:
    assert engine is not None  # only called for a handle that was given an engine
    has_template = bool(getattr(engine.tokenizer, "chat_template", None))
    return ModelFacts(engine.model_name, engine.context_window, has_template)


def _facts_of_files(model: str | None) -> ModelFacts:
    if model is None:
        raise ValueError(NO_MODEL)
    info = read_model_info(model)
    return ModelFacts(info.name, info.context_window, info.has_chat_template)
