"""What is handed to workers, and what one of them does with it: no Ray needed."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from conftest import random_model, random_text, small_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import rag_blend.ray
from rag_blend import BlendEngine, UnsupportedModelError
from rag_blend.errors import install_hint
from rag_blend.ray.place import shared_place
from rag_blend.ray.source import Chunk, blocks_of, chunks_of
from rag_blend.ray.worker import IngestWorker, WorkerSettings
from rag_blend.storage.disk import DiskBackend

HEAD = "<s>Answer the question, using only the text below, in a few words.\n\n"
TEXTS = [random_text(seed) for seed in range(12)]
CHUNKS = [Chunk(text, f"document {number // 3}") for number, text in enumerate(TEXTS)]
PRIMING = {"prime_tokens": 32}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    random_model().save_pretrained(path)
    small_tokenizer().save_pretrained(path)
    return str(path)


def keys_in(directory: Path) -> set[str]:
    return set(DiskBackend(directory).keys())


def ingest_by_engine(model_dir: str, storage: Path, prime: str = "sample") -> set[str]:
    """The keys that one plain engine gives these chunks."""
    with BlendEngine.from_pretrained(model_dir, storage=storage, prime=prime, **PRIMING) as engine:
        engine.ingest(TEXTS, HEAD, [chunk.document for chunk in CHUNKS], progress=False)
    return keys_in(storage)


@pytest.mark.parametrize("prime", ["sample", "none", "preceding"])
def test_workers_give_chunks_the_keys_of_an_engine(model_dir: str, tmp_path: Path, prime: str) -> None:
    settings = WorkerSettings(model_dir, str(tmp_path / "bulk"), HEAD, prime=prime, **PRIMING)
    IngestWorker(settings).prepare(CHUNKS)
    for block in blocks_of(CHUNKS, 5, whole_documents=prime == "preceding"):
        IngestWorker(settings).ingest(block)
    assert keys_in(tmp_path / "bulk") == ingest_by_engine(model_dir, tmp_path / "plain", prime)


def test_without_a_common_sample_they_would_not(model_dir: str, tmp_path: Path) -> None:
    settings = WorkerSettings(model_dir, str(tmp_path / "bulk"), HEAD, **PRIMING)
    worker = IngestWorker(settings)
    for block in blocks_of(CHUNKS, 1, whole_documents=False):
        worker.ingest(block)
    assert keys_in(tmp_path / "bulk") != ingest_by_engine(model_dir, tmp_path / "plain")


def test_a_block_is_computed_once(model_dir: str, tmp_path: Path) -> None:
    settings = WorkerSettings(model_dir, str(tmp_path / "kv"), HEAD, **PRIMING)
    worker = IngestWorker(settings)
    worker.prepare(CHUNKS)
    first, again = worker.ingest(CHUNKS), IngestWorker(settings).ingest(CHUNKS)
    assert (first.chunks, first.skipped) == (len(TEXTS), 0)
    assert (again.chunks, again.skipped, again.bytes) == (0, len(TEXTS), 0)


def test_documents_can_be_forgotten(model_dir: str, tmp_path: Path) -> None:
    settings = WorkerSettings(model_dir, str(tmp_path), HEAD, prime="none")
    IngestWorker(settings).ingest(CHUNKS)
    with BlendEngine.from_pretrained(model_dir, storage=tmp_path, prime="none") as engine:
        assert engine.forget(["document 1"]).entries == 3


def test_a_head_of_another_model_is_refused(model_dir: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token id 4000 is outside the model's vocabulary"):
        IngestWorker(WorkerSettings(model_dir, str(tmp_path), [1, 4000]))


def test_a_model_that_cannot_be_blended_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_layer=1, n_embd=32, n_head=2, vocab_size=512)
    ).save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModelError):
        IngestWorker(WorkerSettings(str(tmp_path / "model"), str(tmp_path / "kv")))


def test_the_defaults_are_the_engines() -> None:
    engine = inspect.signature(BlendEngine).parameters | dict(inspect.signature(BlendEngine.from_pretrained).parameters)
    optional = [field for field in fields(WorkerSettings) if field.default is not MISSING and field.name != "head"]
    assert len(optional) == 10
    assert {field.name: field.default for field in optional} == {f.name: engine[f.name].default for f in optional}


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bulk", "blocks"):
        monkeypatch.delattr(rag_blend.ray, name, raising=False)
        monkeypatch.delitem(sys.modules, f"rag_blend.ray.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_hint("ray"))):
        rag_blend.ray.ingest(TEXTS, model="model", storage="kv", workers=1)


def test_nodes_and_documents_are_cached_as_the_integrations_do() -> None:
    nodes = pytest.importorskip("llama_index.core.schema")
    documents = pytest.importorskip("langchain_core.documents")
    node = nodes.TextNode(id_="n", text="text ", metadata={"title": "T", "path": "p"})
    node.excluded_llm_metadata_keys = ["path"]
    cut = nodes.TextNode(text="cut", relationships={nodes.NodeRelationship.SOURCE: nodes.RelatedNodeInfo(node_id="d")})
    items = ["plain", node, cut, documents.Document(" page\n", id="l"), documents.Document("page")]
    assert chunks_of(items) == [
        Chunk("plain", ""), Chunk("title: T\n\ntext", "n"), Chunk("cut", "d"), Chunk("page", "l"), Chunk("page", "")
    ]  # fmt: skip
    assert [chunk.document for chunk in chunks_of(items, list("abcde"))] == list("abcde")


@pytest.mark.parametrize(
    ("items", "doc_ids", "error"),
    [
        ("one text", None, "pass a list of texts"),
        ([Path("a.pdf")], None, "cannot ingest a PosixPath"),
        (["a", "b"], ["a"], "2 texts, but 1 doc_ids"),
    ],
)
def test_what_cannot_be_ingested_is_refused(items: list[str], doc_ids: list[str] | None, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        chunks_of(items, doc_ids)


def blocks(documents: str, size: int, whole_documents: bool) -> list[str]:
    """Blocks of chunks that are named by their documents, a letter each; "." has none."""
    chunks = [Chunk("", "" if letter == "." else letter) for letter in documents]
    return ["".join(chunk.document or "." for chunk in block) for block in blocks_of(chunks, size, whole_documents)]


def test_blocks_are_cut_anywhere() -> None:
    assert blocks("aabbb.c", 3, whole_documents=False) == ["aab", "bb.", "c"]
    assert blocks("", 3, whole_documents=False) == []


def test_blocks_of_whole_documents_keep_their_order() -> None:
    assert blocks("aabbb.c", 3, whole_documents=True) == ["aa", "bbb", ".c"]
    assert blocks("abab..b", 3, whole_documents=True) == ["aa", "bbb", ".."]
    assert blocks("aaaaab", 3, whole_documents=True) == ["aaaaa", "b"]


@pytest.mark.parametrize("given", ["kv", "./kv", Path("kv"), "disk://kv"])
def test_a_directory_is_the_same_for_all_workers(
    given: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = shared_place(given)
    monkeypatch.chdir("/")
    assert os.path.samefile(tmp_path, Path(place.removeprefix("disk://")).parent)


def test_options_and_other_urls_stay() -> None:
    assert shared_place("disk:///kv?quota=2GB") == "disk:///kv?quota=2GB"
    assert shared_place("s3://bucket/kv?region=eu") == "s3://bucket/kv?region=eu"


@pytest.mark.parametrize(
    ("storage", "error"),
    [
        ("memory://", "belongs to one process"),
        ("Memory://?quota=2GB", "belongs to one process"),
        (["kv/", "s3://bucket"], "name the one they share"),
        (None, "one directory or URL"),
    ],
)
def test_what_cannot_be_shared_is_refused(storage: object, error: str) -> None:
    take: Callable[..., str] = shared_place
    with pytest.raises((TypeError, ValueError), match=error):
        take(storage)
