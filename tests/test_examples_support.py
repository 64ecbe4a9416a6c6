"""The examples' documents, questions and embedding model."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import numpy as np
import pytest
from rag_blend_app import corpus


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    from rag_blend.demo import demo_model_dir

    return AutoTokenizer.from_pretrained(demo_model_dir())


@pytest.fixture(scope="module")
def embedding():
    pytest.importorskip("wordllama")
    pytest.importorskip("llama_index.core")
    from rag_blend_app.embedding import WordLlamaEmbedding

    return WordLlamaEmbedding()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


# --- the default collection


def test_default_collection_is_the_same_every_time():
    docs = corpus.load_documents()
    assert docs == corpus.load_documents()
    assert len({doc.title for doc in docs}) == len(docs) >= 5
    assert docs[0].title == "The standard type hierarchy"


@pytest.mark.timeout(300)  # converts the demo model if this machine has not done so yet
def test_default_collection_has_about_40000_tokens(tokenizer):
    total = sum(len(tokenizer.encode(doc.text, verbose=False)) for doc in corpus.load_documents())
    assert 36_000 < total < 44_000


def test_typography_is_taken_away_and_code_is_kept():
    docs = corpus.load_documents()
    for doc in docs:
        assert "\n***" not in doc.text and "\n===" not in doc.text and "\n\n\n" not in doc.text
        assert doc.text == doc.text.strip()
    text = "\n".join(doc.text for doc in docs)
    assert "PEP 634" in text and "**PEP 634**" not in text
    assert "**kwds)" in text and "'***********centered***********'" in text


def test_max_tokens_limits_the_collection_but_leaves_one_document():
    assert len(corpus.load_documents(max_tokens=12_000)) == 1
    assert len(corpus.load_documents(max_tokens=1)) == 1


def test_questions():
    assert len(corpus.QUESTIONS) >= 5
    assert len(set(corpus.QUESTIONS)) == len(corpus.QUESTIONS)
    assert all(question.endswith("?") for question in corpus.QUESTIONS)


# --- a user's own directory


def test_a_directory_of_ones_own(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b.md").write_text("# Pelicans\n\nThey fly.", encoding="utf-8")
    (tmp_path / "sub" / "a.TXT").write_bytes(b"caf\xe9 latin-1")
    (tmp_path / "c.rst").write_bytes(b"\xef\xbb\xbfwith a byte order mark\n")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"PK\x00\x01")
    (tmp_path / "code.py").write_text("print()")
    (tmp_path / ".secret.txt").write_text("no")
    (tmp_path / ".hidden" / "d.txt").write_text("no")

    docs = corpus.load_documents(tmp_path)

    assert [doc.title for doc in docs] == ["b.md", "c.rst", "sub/a.TXT"]
    assert [doc.text for doc in docs] == [
        "# Pelicans\n\nThey fly.",
        "with a byte order mark",
        "café latin-1",
    ]
    assert corpus.questions_for(docs)[0] == "What does the document 'b.md' say about \"Pelicans\"?"


def test_what_cannot_be_read_is_named_and_does_not_keep_the_others_away(tmp_path: Path, caplog):
    (tmp_path / "noise.txt").write_bytes(bytes(range(254, 127, -1)) * 9)
    (tmp_path / "binary.txt").write_bytes(b"PK\x00\x01")
    (tmp_path / "wide.txt").write_text("Größe", encoding="utf-16")
    (tmp_path / "good.txt").write_text("good", encoding="utf-8")
    assert [doc.text for doc in corpus.load_documents(tmp_path)] == ["good", "Größe"]
    assert "binary.txt: is no text; it is passed over" in caplog.messages
    assert any(said.startswith("noise.txt: ") and "convert it to UTF-8" in said for said in caplog.messages)
    assert "wide.txt: is no sound UTF-8, was read as utf-16" in caplog.messages


def test_a_directory_below_a_hidden_one_is_loaded(tmp_path: Path):
    directory = tmp_path / ".notes"
    directory.mkdir()
    (directory / "a.txt").write_text("text")
    assert len(corpus.load_documents(directory)) == 1


def test_a_directory_without_documents_is_an_error_that_says_so(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"No documents found in .*\.md, \.rst, \.txt"):
        corpus.load_documents(tmp_path)


def test_a_path_that_is_no_directory_is_an_error_that_says_so(tmp_path: Path):
    with pytest.raises(NotADirectoryError, match="is not a directory of documents"):
        corpus.load_documents(tmp_path / "nowhere")


def test_questions_for_are_spread_over_the_documents():
    docs = [corpus.Doc(title=f"{number}.txt", text=f"Heading {number}\nbody") for number in range(20)]
    questions = corpus.questions_for(docs, count=5)
    assert len(questions) == 5
    assert [question.split("'")[1] for question in questions] == [f"{n}.txt" for n in (0, 4, 8, 12, 16)]
    one = [corpus.Doc(title="t", text="\n\n".join(f"Paragraph {number}" for number in range(6)))]
    assert [question[-3] for question in corpus.questions_for(one, count=3)] == ["0", "2", "4"]
    assert len(corpus.questions_for([corpus.Doc(title="t", text="one line")])) == 1
    long = corpus.questions_for([corpus.Doc(title="t", text="word " * 50)])[0]
    assert len(long) < 120


# --- the embedding model


def test_embedding_shapes_and_lengths(embedding):
    vectors = embedding.get_text_embedding_batch(["one text", "another", "a third one"])
    assert embedding.embed_dim == 256
    assert np.shape(vectors) == (3, 256)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_a_text_without_tokens_is_the_zero_vector(embedding):
    empty, word = embedding.get_text_embedding_batch(["", "word"])
    assert not np.any(empty)
    assert np.linalg.norm(word) == pytest.approx(1.0, abs=1e-5)


def test_similar_sentences_are_closer_than_unrelated_ones(embedding):
    question = embedding.get_query_embedding("How do I stop the program at a breakpoint?")
    near = embedding.get_text_embedding("The debugger halts a program when a breakpoint is reached.")
    far = embedding.get_text_embedding("Pelicans catch fish in a pouch below the beak.")
    assert np.dot(question, near) > np.dot(question, far) + 0.1


def test_async_and_batch_give_the_same_vectors(embedding):
    texts = [f"sentence number {number}" for number in range(25)]  # more than one batch

    async def embed() -> tuple[list[list[float]], list[float], list[float]]:
        return (
            await embedding.aget_text_embedding_batch(texts),
            await embedding.aget_text_embedding(texts[0]),
            await embedding.aget_query_embedding(texts[0]),
        )

    batch, text, query = asyncio.run(embed())
    np.testing.assert_allclose(batch, embedding.get_text_embedding_batch(texts), atol=1e-6)
    np.testing.assert_allclose(batch[0], text, atol=1e-6)
    np.testing.assert_allclose(batch[0], query, atol=1e-6)


@pytest.mark.usefixtures("no_network")
def test_the_weights_load_without_a_network(embedding):
    assert len(type(embedding)().get_text_embedding("offline")) == 256


# --- both together


ANSWERS = {  # words of the passages that hold the answer
    "breakpoint": ["evaluate to true before the breakpoint is honored"],
    "finally": ["the saved exception is discarded"],
    "!r": ['calls "repr()"'],
    "default parameter": ["evaluated from left to right when the function definition is executed"],
    "UnboundLocalError": ["nearest enclosing scope", '"UnboundLocalError" exception is raised'],
    "__get__": ['underlying function ("__func__") is called', "If binding to an object instance"],
}


@pytest.mark.timeout(300)
def test_retrieval_finds_the_answer_to_every_question(embedding, tokenizer):
    """Top 4 of 512-token chunks, as the examples do it; the prompt is then about 2,000 tokens long."""
    faiss = pytest.importorskip("faiss")
    stores = pytest.importorskip("llama_index.vector_stores.faiss")
    from llama_index.core import Document, StorageContext, VectorStoreIndex
    from llama_index.core.node_parser import SentenceSplitter

    def count(text: str) -> list[int]:
        return tokenizer.encode(text, verbose=False)

    store = stores.FaissMapVectorStore(faiss_index=faiss.IndexIDMap2(faiss.IndexFlatIP(embedding.embed_dim)))
    docs = [Document(text=doc.text, metadata={"title": doc.title}) for doc in corpus.load_documents()]
    index = VectorStoreIndex.from_documents(
        docs,
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=embedding,
        transformations=[SentenceSplitter(chunk_size=512, chunk_overlap=20, tokenizer=count)],
    )
    retriever = index.as_retriever(similarity_top_k=4)

    assert len(ANSWERS) == len(corpus.QUESTIONS)
    for question, (word, passages) in zip(corpus.QUESTIONS, ANSWERS.items(), strict=True):
        assert word in question
        hits = [" ".join(hit.node.get_content().split()) for hit in retriever.retrieve(question)]
        missing = [passage for passage in passages if not any(passage in hit for hit in hits)]
        assert not missing, question
        assert 1_500 < sum(len(count(hit)) for hit in hits) < 2_100
