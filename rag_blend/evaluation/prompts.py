"""How a case becomes a prompt: the words of LlamaIndex's default question-answering prompt, one head for all tasks.

The head, everything in front of the first passage, is what passages are ingested behind; so what depends on the task
stands behind the passages.
"""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rag_blend.evaluation.cases import Case
from rag_blend.prompt import prompt_ids

SYSTEM = (
    "You are an expert Q&A system that is trusted around the world. "
    "Always answer the query using the provided context information, and not prior knowledge."
)
_OPENING = "Context information is below.\n---------------------\n"
_CLOSING = "\n---------------------\n"
_ANSWER = (
    "Given the context information and not prior knowledge, answer the query in a few words from the context. "
    'If the answer is not in the context, say "not mentioned".\n'
)
_REPEAT = "Repeat what the query asks for from the context word for word, and write nothing else.\n"
_MARK = "Zqxjzkvw"  # stands in for the passages; no template has such a word
# Neither the day of the run nor the model's thoughts belong to what is measured; templates ignore what they don't know.
_TEMPLATE_OPTIONS: dict[str, Any] = {"enable_thinking": False, "date_string": "26 Jul 2024"}


def head_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything in front of the first passage, the same for every case.

    Raises:
        ValueError: The tokenizer's chat template accepts no such conversation.
    """
    return _render(tokenizer, _OPENING + _MARK).partition(_MARK)[0]


def prompt_of(tokenizer: PreTrainedTokenizerBase, case: Case) -> str:
    """The whole prompt: rendered by the tokenizer's chat template if it has one, else plain text.

    Raises:
        ValueError: See `head_of`.
    """
    passages = "\n\n".join(passage.prompt_text.strip() for passage in case.passages)
    instruction = _REPEAT if case.task == "copy" else _ANSWER
    # The marker first and the passages second: a template that trims or rewrites must not reach into them.
    rendered = _render(tokenizer, f"{_OPENING}{_MARK}{_CLOSING}{instruction}Query: {case.question}\nAnswer:")
    return rendered.replace(_MARK, passages, 1)


def adds_special_tokens(tokenizer: PreTrainedTokenizerBase) -> bool | None:
    """The engine's argument `add_special_tokens` for these prompts: a chat template has written the BOS itself."""
    return False if tokenizer.chat_template else None


def head_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the head, special tokens included: what `BlendEngine.ingest` takes as `head`."""
    ids: list[int] = prompt_ids(tokenizer, head_of(tokenizer), adds_special_tokens(tokenizer)).tolist()
    return ids


def case_ids(tokenizer: PreTrainedTokenizerBase, case: Case) -> list[int]:
    """Token ids of the whole prompt, special tokens included."""
    ids: list[int] = prompt_ids(tokenizer, prompt_of(tokenizer, case), adds_special_tokens(tokenizer)).tolist()
    return ids


def _render(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    if not tokenizer.chat_template:
        return f"{SYSTEM}\n\n{content}"
    user = {"role": "user", "content": content}
    folded = {"role": "user", "content": f"{SYSTEM}\n\n{content}"}
    refusal = None
    # Some templates refuse a system message and others drop it in silence.
    for messages in ([{"role": "system", "content": SYSTEM}, user], [folded]):
        try:
            text = str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **_TEMPLATE_OPTIONS)
            )
        except TemplateError as error:
            refusal = error
            continue
        if SYSTEM in text and content in text:
            return text
    raise ValueError(f"the tokenizer's chat template cannot express a system and a user message ({refusal})")
