"""BlendLLM: a LangChain text-completion model that reuses the KV caches of the retrieved documents."""

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LangSmithParams
from langchain_core.outputs import Generation as TextGeneration
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.prompt_values import PromptValue
from pydantic import ConfigDict
from rag_blend_frameworks.prompts import Prompt
from rag_blend_frameworks.threads import call_in_thread, iterate_in_thread

from langchain_rag_blend.base import BlendModel
from langchain_rag_blend.responses import metadata, usage
from rag_blend import Generation, GenerationStats


class BlendLLM(BlendModel, BaseLLM):
    """LangChain text-completion model on a `rag_blend.BlendEngine`, for base models and older chains.

    The prompt is completed as it stands, without a chat template; instruction models want `ChatBlend`. Everything
    said there about loading, sharing, cancellation and arguments holds here too. The usage is in `generation_info` of
    each generation, in the same form, and summed up in `llm_output["token_usage"]`.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @property
    def _llm_type(self) -> str:
        return "rag-blend"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "rag_blend"
        return params

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return self._complete(prompts, stop, kwargs)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for chunk in self._chunks(prompt, stop, kwargs):
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        cancel = threading.Event()
        return await call_in_thread(lambda: self._complete(prompts, stop, kwargs, cancel), cancel)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        cancel = threading.Event()
        async with aclosing(iterate_in_thread(lambda: self._chunks(prompt, stop, kwargs, cancel), cancel)) as chunks:
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    # -- requests --

    def _complete(
        self,
        prompts: Sequence[str],
        stop: list[str] | None,
        kwargs: dict[str, Any],
        cancel: threading.Event | None = None,
    ) -> LLMResult:
        generations = self._answers([Prompt(prompt) for prompt in prompts], stop, kwargs, cancel) if prompts else []
        return LLMResult(
            generations=[
                [TextGeneration(text=generation.text, generation_info=self._info(generation))]
                for generation in generations
            ],
            llm_output={"token_usage": _total(generations), "model_name": self.model},
        )

    def _chunks(
        self, prompt: str, stop: list[str] | None, kwargs: dict[str, Any], cancel: threading.Event | None = None
    ) -> Iterator[GenerationChunk]:
        """A chunk per piece of text, then an empty one that carries the usage."""
        with self._streamed(Prompt(prompt), stop, kwargs, cancel) as stream:
            yield from (GenerationChunk(text=piece) for piece in stream)
        yield GenerationChunk(text="", generation_info=self._info(stream))

    def _info(self, result: Any) -> dict[str, Any]:
        """What `generation_info` says of a finished answer or stream."""
        stats: GenerationStats | None = result.stats
        if stats is None:
            return {}
        return {"usage_metadata": usage(stats, len(result.token_ids)), **metadata(self.model, stats)}

    # -- heads --

    def _prompt_of_value(self, value: PromptValue, tools: Sequence[Any]) -> Prompt:
        return Prompt(value.to_string())

    def _prompt_of_text(self, text: str) -> Prompt:
        return Prompt(text)


def _total(generations: Sequence[Generation]) -> dict[str, int]:
    prompt = sum(generation.stats.prompt_tokens for generation in generations)
    completion = sum(len(generation.token_ids) for generation in generations)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
