"""Heads that end in two line breaks, with a tokenizer that has two ways to write them."""

from __future__ import annotations

import pytest
from conftest import random_model, random_text, small_tokenizer
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_blend import BlendVectorStore, ChatBlend
from llama_index.core import Document as LlamaDocument
from llama_index.core import MockEmbedding, PromptTemplate, VectorStoreIndex
from llama_index.llms.rag_blend import BlendLLM
from rag_blend_frameworks.prompts import STAND_INS, Prompt, front_ids
from transformers import PreTrainedTokenizerFast

from rag_blend import BlendEngine

FRONT = "Answer from these texts, and from nothing else:\n\n"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return small_tokenizer(splits_digits=True)


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> BlendEngine:
    return BlendEngine(random_model(), tokenizer, storage=None, prime=random_text(99, 60), reuse_when="possible")


def followed_by(tokenizer: PreTrainedTokenizerFast, head: str) -> list[int]:
    return front_ids(tokenizer, Prompt(head, False), [Prompt(head + text, False) for text in STAND_INS])


def test_line_breaks_are_those_in_front_of_letters(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = followed_by(tokenizer, FRONT)
    assert tokenizer.decode(ids) == FRONT
    assert tokenizer(FRONT + "the river")["input_ids"][: len(ids)] == ids
    assert tokenizer(FRONT + "7 rivers")["input_ids"][: len(ids)] != ids


def test_what_is_not_blank_is_only_what_all_share(tokenizer: PreTrainedTokenizerFast) -> None:
    head = FRONT + "the riv"
    assert followed_by(tokenizer, head) == tokenizer(head)["input_ids"]
    unknown = Prompt(FRONT, False), [Prompt(f"{FRONT}<s> {i}", False) for i in range(len(STAND_INS))]
    assert front_ids(tokenizer, *unknown) == tokenizer(FRONT)["input_ids"]


def test_the_best_hit_is_exact_in_a_query_engine(engine: BlendEngine) -> None:
    llm = BlendLLM(engine=engine, max_new_tokens=2)
    documents = [LlamaDocument(text=random_text(seed)) for seed in range(3)]
    index = VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(8))
    template = PromptTemplate(FRONT + "{context_str}\n\n{query_str}")
    llm.attach(index, text_qa_template=template)
    with engine.listening() as answers:
        index.as_query_engine(llm=llm, text_qa_template=template).query("where?")
    assert answers[0].stats.prefix_tokens > len(followed_by(engine.tokenizer, FRONT)) + 16
    assert answers[0].stats.mode == "blend"


def test_the_best_hit_is_exact_in_a_chain(engine: BlendEngine) -> None:
    llm = ChatBlend(engine=engine, max_tokens=2)
    prompt = ChatPromptTemplate.from_template(FRONT + "{context}\n\nQuestion: {question}")
    store = BlendVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), llm, prompt=prompt)
    store.add_documents([Document(random_text(seed)) for seed in range(3)])
    found = "\n\n".join(document.page_content for document in store.similarity_search("where?", k=2))
    with engine.listening() as answers:
        (prompt | llm).invoke({"context": found, "question": "where?"})
    assert answers[0].stats.prefix_tokens > len(followed_by(engine.tokenizer, FRONT)) + 16
    assert answers[0].stats.mode == "blend"
