from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import random_text, small_tokenizer
from transformers import PreTrainedTokenizerFast

from rag_blend.prompt import bos_ids, chunk_ids, ids_in_front, prompt_ids

BOS = 1
MESSAGES = [{"role": "user", "content": "the river"}]


@pytest.fixture(scope="module")
def with_bos() -> PreTrainedTokenizerFast:
    return small_tokenizer(adds_bos=True)


def test_a_plain_prompt_is_tokenised_as_stock_transformers_does(
    with_bos: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    for each in (with_bos, tokenizer):
        text = random_text(1)
        ids = prompt_ids(each, text)
        assert ids.dtype == np.int32
        assert ids.tolist() == each(text)["input_ids"]
    assert prompt_ids(with_bos, "the river")[0] == BOS
    assert prompt_ids(tokenizer, "the river")[0] != BOS


def test_a_prompt_never_gets_two_bos(with_bos: PreTrainedTokenizerFast) -> None:
    text = "<s>the river"
    assert with_bos(text)["input_ids"][:2] == [BOS, BOS]  # what a careless caller would get
    ids = prompt_ids(with_bos, text)
    assert ids.tolist().count(BOS) == 1
    assert ids.tolist() == prompt_ids(with_bos, "the river").tolist()


def test_bos_elsewhere_in_the_text_changes_nothing(with_bos: PreTrainedTokenizerFast) -> None:
    assert prompt_ids(with_bos, "the <s>river").tolist() == with_bos("the <s>river")["input_ids"]


def test_the_caller_may_overrule(with_bos: PreTrainedTokenizerFast) -> None:
    assert prompt_ids(with_bos, "<s>the", add_special_tokens=True)[:2].tolist() == [BOS, BOS]
    assert BOS not in prompt_ids(with_bos, "the river", add_special_tokens=False)


def test_a_rendered_chat_template_gives_the_ids_of_the_template(with_bos: PreTrainedTokenizerFast) -> None:
    for start in ("", "{{ bos_token }}"):
        each = small_tokenizer(adds_bos=True)
        each.chat_template = start + with_bos.chat_template
        expected = each.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
        rendered = each.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
        assert prompt_ids(each, rendered, add_special_tokens=False).tolist() == expected
        if start:
            assert prompt_ids(each, rendered).tolist() == expected


def test_a_tokenizer_without_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert bare.bos_token is None
    assert prompt_ids(bare, "the river").tolist() == tokenizer("the river")["input_ids"]
    assert bos_ids(bare).tolist() == []


@pytest.mark.parametrize(
    "ids", [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), np.array([5, 6, 7], dtype=np.uint16), torch.tensor([5, 6, 7])]
)
def test_ids_are_taken_as_they_are(with_bos: PreTrainedTokenizerFast, ids: list[int]) -> None:
    taken = prompt_ids(with_bos, ids)
    assert taken.dtype == np.int32
    assert taken.tolist() == [5, 6, 7]


def test_ids_are_copied(with_bos: PreTrainedTokenizerFast) -> None:
    ids = np.array([5, 6, 7], dtype=np.int32)
    taken = prompt_ids(with_bos, ids)
    ids[0] = 99
    assert taken[0] == 5


@pytest.mark.parametrize(
    "prompt", ["", [], [[1, 2]], [[1], [2]], [1.5, 2.5], ["a"], [1, -2], [2**31], [2**70], [None], [True, False], 7]
)
def test_what_is_no_prompt_is_refused(tokenizer: PreTrainedTokenizerFast, prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="prompt"):
        prompt_ids(tokenizer, prompt)


def test_bos_ids(with_bos: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast) -> None:
    assert bos_ids(with_bos).tolist() == [BOS]
    assert bos_ids(tokenizer).tolist() == []
    assert bos_ids(with_bos).dtype == np.int32


def test_another_token_put_in_front_is_not_bos() -> None:
    tokenizer = small_tokenizer(adds_bos=True)
    tokenizer.bos_token = "</s>"
    assert tokenizer("")["input_ids"][:1] == [BOS]
    assert bos_ids(tokenizer).tolist() == []


def test_chunks_have_no_special_tokens_and_no_outer_space(with_bos: PreTrainedTokenizerFast) -> None:
    texts = ["the river", "  the river\n\n", "a stone   bridge"]
    first, second, third = chunk_ids(with_bos, texts)
    assert first.dtype == np.int32
    assert first.tolist() == second.tolist() == with_bos("the river", add_special_tokens=False)["input_ids"]
    assert with_bos.decode(third) == texts[2]


def test_chunks_are_neither_padded_nor_cut(with_bos: PreTrainedTokenizerFast) -> None:
    texts = [random_text(1, 300), "the", "", "  "]
    expected = [len(ids) for ids in chunk_ids(with_bos, texts)]
    assert expected[2:] == [0, 0]
    with_bos(["a", "the river"], padding=True, truncation=True, max_length=3)
    assert [len(ids) for ids in chunk_ids(with_bos, texts)] == expected
    assert len(prompt_ids(with_bos, texts[0])) == expected[0] + 1
    assert chunk_ids(with_bos, []) == []


@pytest.mark.parametrize("head", ["the river\n\n", "the river\n", "the river\n\n\n", "the river", "\n\n"])
@pytest.mark.parametrize("splits_digits", [True, False])
def test_a_head_is_what_prompts_with_a_letter_behind_it_begin_with(head: str, splits_digits: bool) -> None:
    each = small_tokenizer(splits_digits=splits_digits)
    ids = ids_in_front(each, head)
    for text in ("Bridges open", "a bridge opens", "(a bridge)"):
        assert prompt_ids(each, head + text).tolist() == [*ids, *prompt_ids(each, text)]
    differs = splits_digits and head in {"the river\n\n", "\n\n"}  # three are no token of this vocabulary
    assert (len(ids) > len(prompt_ids(each, head))) == differs


def test_a_head_that_ends_in_a_blank_or_in_ids_is_taken_as_it_is(with_bos: PreTrainedTokenizerFast) -> None:
    """The blank belongs to the next word; nothing can be done about it."""
    assert ids_in_front(with_bos, "the river ").tolist() == prompt_ids(with_bos, "the river ").tolist()
    assert ids_in_front(with_bos, [1, 7, 8]).tolist() == [1, 7, 8]
