"""Structured output without tools: the schema is described in words, and the answer begins with a brace."""

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass


def json_chain(
    llm: BaseChatModel, schema: dict[str, Any] | type, *, include_raw: bool, describe: bool
) -> Runnable[LanguageModelInput, Any]:
    """Return a chain that answers in JSON.

    Args:
        llm: The model, which understands `answer_start`.
        schema: Pydantic class, TypedDict, JSON schema or OpenAI tool.
        include_raw: Return a dict with `raw`, `parsed` and `parsing_error`, and raise nothing.
        describe: Tell the model the schema, at the end of the conversation, where it leaves the head alone.
    """
    method = "json_schema" if describe else "json_mode"
    answer: Runnable[LanguageModelInput, Any] = llm.bind(
        answer_start="{", ls_structured_output_format={"kwargs": {"method": method}, "schema": schema}
    )
    if describe:
        text = json.dumps(convert_to_json_schema(schema), ensure_ascii=False)
        ask: Runnable[LanguageModelInput, Any] = RunnableLambda(lambda given: _asked_for_json(llm, given, text))
        answer = ask | answer
    parser: BaseOutputParser[Any] = JsonOutputParser()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = PydanticOutputParser(pydantic_object=schema)
    if not include_raw:
        return answer | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=answer) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _asked_for_json(llm: BaseChatModel, given: LanguageModelInput, schema: str) -> Sequence[BaseMessage]:
    messages = list(llm._convert_input(given).to_messages())
    wish = f"Answer with a JSON object that follows this JSON schema, and with nothing else:\n{schema}"
    if messages and isinstance(messages[-1], HumanMessage) and isinstance(messages[-1].content, str):
        messages[-1] = messages[-1].model_copy(update={"content": f"{messages[-1].content}\n\n{wish}"})
    else:
        messages.append(HumanMessage(wish))
    return messages
