"""Tool calls in the text of an answer: how templates teach models to write them, and how to read them.

Three formats cover most templates: Hermes and Qwen (`<tool_call>{...}</tool_call>`), Mistral
(`[TOOL_CALLS][{...}]`) and Llama 3 (the bare object, `{"name": ..., "parameters": {...}}`). Tokenizers drop some of
the marks as special tokens, so bare objects and lists are read whatever the template.
"""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from langchain_core.messages import InvalidToolCall, ToolCall
from langchain_core.messages.tool import invalid_tool_call, tool_call

_MARK = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>")
_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_MAY_BE_JSON = re.compile(r"\s*(\Z|\{|\[\s*(\Z|\{))")
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


class Answer(NamedTuple):
    """An answer taken apart."""

    text: str
    calls: list[ToolCall]
    invalid: list[InvalidToolCall]


def opening(template: str, name: str | None) -> str:
    """Return how a tool call begins, to be put in the model's mouth when it must call a tool.

    Args:
        template: The model's chat template.
        name: The tool to be called; None: any.
    """
    mark = "<tool_call>\n" if "<tool_call>" in template else "[TOOL_CALLS]" if "[TOOL_CALLS]" in template else ""
    bracket = "[" if mark == "[TOOL_CALLS]" else ""
    start = f'{mark}{bracket}{{"name": "'
    if name is None:
        return start
    arguments = "arguments" if mark or '"parameters"' not in template else "parameters"
    return f'{start}{name}", "{arguments}": '


def parse(text: str, names: Sequence[str]) -> Answer:
    """Take the tool calls out of an answer.

    Args:
        text: The whole answer.
        names: Names of the tools that the model was given.

    Returns:
        The text that is no tool call, the calls, and what was marked as a call but cannot be read. An answer that
        only looks like JSON stays text.
    """
    mark = _MARK.search(text)
    if mark is None:
        calls = [call for value in _json_values(text.strip()) if (call := _call(value, names)) is not None]
        return Answer("", calls, []) if calls else Answer(text, [], [])
    hermes = [(found[0], found[1]) for found in _HERMES.finditer(text)]
    read, invalid = [], []
    for marked, body in hermes or [(text[mark.start() :], text[mark.end() :])]:
        calls = [call for value in _json_values(body.strip()) if (call := _call(value, None)) is not None]
        read += calls
        if not calls:
            # With its mark, so that nobody takes the beginning of a call that was cut off for a whole one.
            invalid.append(invalid_tool_call(args=marked, id=_new_id(), error="the model wrote a call that is no JSON"))
    return Answer(text[: mark.start()].rstrip(), read, invalid)


def readable_part(text: str) -> int:
    """Return how many characters of the beginning of an unfinished answer are surely no part of a tool call."""
    if _MAY_BE_JSON.match(text):
        return 0
    mark = _MARK.search(text)
    if mark is not None:
        return len(text[: mark.start()].rstrip())
    longest = max(map(len, _MARKS)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(word.startswith(text[-length:]) for word in _MARKS):
            text = text[:-length]
            break
    return len(text.rstrip())  # whitespace in front of a call is dropped with it


def _json_values(text: str) -> Iterator[Any]:
    """JSON objects at the start of a text: one, a list of them, or several divided by `;` or white space."""
    decoder = json.JSONDecoder(strict=False)  # models write line breaks into strings
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except ValueError:
            return
        yield from value if isinstance(value, list) else [value]
        text = text[end:].lstrip("; \n\t,")


def _call(value: Any, names: Sequence[str] | None) -> ToolCall | None:
    """The call that a JSON value describes; None if it describes none, or of a tool that is not among `names`."""
    if not isinstance(value, Mapping):
        return None
    if isinstance(value.get("function"), Mapping):  # OpenAI's own form
        value = value["function"]
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = next(_json_values(arguments), None)
    if not isinstance(name, str) or not isinstance(arguments, Mapping) or (names is not None and name not in names):
        return None
    return tool_call(name=name, args=dict(arguments), id=_new_id())


def _new_id() -> str:
    return uuid.uuid4().hex[:9]  # Mistral's templates accept nothing else than nine letters and digits
