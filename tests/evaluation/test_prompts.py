"""Prompts whose passages are found again, with and without a chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from conftest import CHAT_TEMPLATE, small_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rag_blend import BlendEngine
from rag_blend.evaluation import Case, prompts

pytest_plugins = ["toy_collection"]

PLAIN = "plain"
NO_SYSTEM = CHAT_TEMPLATE.replace(
    "{% for m", "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m"
)
DROPS_SYSTEM = CHAT_TEMPLATE.replace("in messages %}", "in messages if m['role'] != 'system' %}")
TRIMS = CHAT_TEMPLATE.replace("m['content']", "m['content'].strip()")


@pytest.fixture(params=[PLAIN, CHAT_TEMPLATE, NO_SYSTEM, DROPS_SYSTEM, TRIMS], ids=lambda t: str(len(t)))
def some_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    tokenizer = small_tokenizer(adds_bos=True)
    tokenizer.chat_template = None if request.param == PLAIN else request.param
    return tokenizer


def test_the_prompt_begins_with_the_head_and_holds_everything(
    some_tokenizer: PreTrainedTokenizerFast, cases: list[Case]
) -> None:
    head, prompt = prompts.head_of(some_tokenizer), prompts.prompt_of(some_tokenizer, cases[0])
    joined = "\n\n".join(passage.prompt_text for passage in cases[0].passages)
    assert prompt.startswith(head + joined + "\n---------------------\n")
    assert prompts.SYSTEM in head and head.endswith("Context information is below.\n---------------------\n")
    assert cases[0].question in prompt and '"not mentioned"' in prompt
    assert prompt.count("<|im_start|>system") == (1 if some_tokenizer.chat_template in {CHAT_TEMPLATE, TRIMS} else 0)


def test_special_tokens_are_added_to_plain_text_only(
    some_tokenizer: PreTrainedTokenizerFast, cases: list[Case]
) -> None:
    has_bos = prompts.case_ids(some_tokenizer, cases[0])[0] == some_tokenizer.bos_token_id
    assert has_bos == (some_tokenizer.chat_template is None)
    assert has_bos == (prompts.head_ids(some_tokenizer)[0] == some_tokenizer.bos_token_id)


def test_passages_are_hit_and_none_is_missed(
    some_tokenizer: PreTrainedTokenizerFast,
    cases: list[Case],
    model: PreTrainedModel,
    make_engine: Callable[..., BlendEngine],
) -> None:
    engine = make_engine(model=model, tokenizer=some_tokenizer)
    texts = [passage.prompt_text for passage in cases[0].passages]
    engine.ingest(texts, head=prompts.head_ids(some_tokenizer), progress=False)
    for case in cases:
        stats = engine.prefill(prompts.case_ids(some_tokenizer, case)).stats
        assert (stats.hits, stats.misses, stats.mode) == (len(texts) + 1, 0, "blend")  # and the head
        assert stats.prefix_tokens >= len(prompts.head_ids(some_tokenizer))


def test_the_task_changes_the_instruction_but_not_the_head(
    tokenizer: PreTrainedTokenizerFast, cases: list[Case]
) -> None:
    copying = prompts.prompt_of(tokenizer, replace(cases[0], task="copy"))
    assert "word for word" in copying and "not mentioned" not in copying
    assert copying.startswith(prompts.head_of(tokenizer))


def test_passages_that_look_like_a_template_are_left_alone(
    tokenizer: PreTrainedTokenizerFast, cases: list[Case]
) -> None:
    odd = replace(cases[0].passages[0], text="{{ braces }} \\1 and {question} stay")
    assert "{{ braces }} \\1 and {question} stay" in prompts.prompt_of(tokenizer, replace(cases[0], passages=(odd,)))


def test_a_template_that_takes_no_such_conversation(cases: list[Case]) -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('nothing is allowed') }}"
    with pytest.raises(ValueError, match="nothing is allowed"):
        prompts.head_of(tokenizer)
