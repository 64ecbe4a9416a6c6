"""`ingest`, `ask`, `chat` and `estimate` on a tiny model: what they do and print, and how they fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

pytest.importorskip("llama_index.readers.file")
pytest.importorskip("wordllama")

from conftest import random_model, random_text, small_tokenizer
from rag_blend_app.conversation import Conversation, Reply
from toy_texts import QUESTION, TEXTS

from rag_blend import BlendEngine

pytest_plugins = ["toy_documents"]
pytestmark = pytest.mark.usefixtures("one_thread")
Run = Callable[..., Result]


def parsed(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def ingested(run: Run, documents: Path, model_dir: Path) -> Any:
    return parsed(run("ingest", documents, "--model", model_dir, "--json"))


# --- ingest


def test_ingest_writes_caches_and_an_index(ingested: Any, documents: Path, tmp_path: Path) -> None:
    assert [Path(id_).name for id_ in ingested["documents"]["added"]] == sorted([*TEXTS, "bread.pdf"])
    assert ingested["report"]["chunks"] == ingested["estimate"]["chunks"] == 4
    assert ingested["report"]["tokens"] == ingested["estimate"]["tokens"]
    index = tmp_path / "kv-index"
    assert ingested["index"] == str(index) and index.stat().st_mode & 0o777 == 0o700
    assert all(path.is_file() for path in index.iterdir())  # nothing half-written is left
    assert {path.stat().st_mode & 0o777 for path in index.iterdir()} == {0o600}


def test_the_estimate_comes_close(run: Run, documents: Path, model_dir: Path) -> None:
    """An entry's header weighs much in a tiny model, so chunks are made that outweigh it; equal ones are one."""
    text = "\n\n".join(random_text(seed, 900) for seed in range(4))
    for name in ("long.txt", "copy.txt"):
        (documents / name).write_text(text)
    done = parsed(run("ingest", documents, "--model", model_dir, "--chunk-tokens", 2000, "--json"))
    assert 0.9 < done["estimate"]["bytes"] / done["report"]["bytes"] < 1


def test_chunks_are_kept_twice_unless_it_is_said_otherwise(
    run: Run, documents: Path, model_dir: Path, tmp_path: Path
) -> None:
    def entries() -> int:
        return len(set((tmp_path / "kv").glob("??/*.safetensors")))

    once = parsed(run("ingest", documents, "--model", model_dir, "--no-exact-first", "--json"))
    assert once["report"]["chunks"] == 4 and entries() == 1 + 4
    parsed(run("ingest", documents, "--json"))  # as before
    assert entries() == 1 + 4
    twice = parsed(run("ingest", documents, "--exact-first", "--json"))
    assert twice["report"]["chunks"] == 0 and entries() == 1 + 2 * 4
    assert twice["estimate"]["bytes"] == 2 * once["estimate"]["bytes"]


def test_ingest_again_computes_nothing(run: Run, ingested: Any, documents: Path) -> None:
    result = run("ingest", documents)
    assert result.exit_code == 0 and "0 documents are new, 0 changed, 0 gone" in result.stdout
    assert "0 chunks cached" in result.stdout and "4 were cached already" in result.stdout


def test_a_file_is_the_same_document_by_itself(run: Run, ingested: Any, documents: Path) -> None:
    done = parsed(run("ingest", documents / "ships.txt", "--json"))
    assert not any(done["documents"].values()) and done["report"]["chunks"] == 0


def test_what_changed_is_replaced_and_what_is_gone_forgotten(run: Run, ingested: Any, documents: Path) -> None:
    (documents / "bees.md").write_text("Wasps make paper from weathered wood, and their nests last for one summer.")
    (documents / "ships.txt").unlink()
    done = parsed(run("ingest", documents, "--json"))["documents"]
    assert [Path(done[what][0]).name for what in ("replaced", "removed")] == ["bees.md", "ships.txt"]
    assert not done["added"]
    sources = parsed(run("ask", "wasps, bees, ships and harbours", "--top-k", 9, "--json"))["sources"]
    texts = " ".join(source["text"] for source in sources)
    assert "Wasps" in texts and "colony" not in texts and "harbour" not in texts
    with BlendEngine.from_pretrained(_model_of(ingested), "kv", device="cpu") as engine:
        assert engine.num_chunks == 4  # three chunks and the head: the old ones were erased


def test_an_interrupted_ingestion_goes_on(
    run: Run, documents: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rag_blend.ingest.Ingester.ingest", interrupt)
        stopped = run("ingest", documents, "--model", model_dir)
    assert stopped.exit_code == 130
    assert stopped.stderr.endswith("rag-blend: interrupted; run the same command again, it resumes\n")
    waiting = run("ask", QUESTION, "--max-new-tokens", 4)
    assert waiting.exit_code == 0
    assert "4 of 4 chunks are not cached: run `rag-blend ingest DIR --storage kv` again" in waiting.stderr
    done = parsed(run("ingest", documents, "--json"))
    assert not done["documents"]["added"] and done["report"]["chunks"] == 4
    assert "not cached" not in run("ask", QUESTION, "--max-new-tokens", 4).stderr


def test_half_an_index_counts_as_none(
    run: Run, ingested: Any, documents: Path, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "kv-index" / "collection.json").unlink()  # written last
    assert run("ask", QUESTION).exit_code == 2
    done = parsed(run("ingest", documents, "--model", model_dir, "--json"))
    assert len(done["documents"]["added"]) == 4 and done["report"]["chunks"] == 0


def test_a_file_that_cannot_be_read_fails_alone(run: Run, documents: Path, model_dir: Path) -> None:
    (documents / "broken.pdf").write_bytes(b"%PDF-1.4")
    result = run("ingest", documents, "--model", model_dir, "--json")
    assert result.exit_code == 1 and result.stderr.startswith("rag-blend: documents/broken.pdf: ")
    done = json.loads(result.stdout)
    assert list(done["documents"]["unread"]) == [str(documents / "broken.pdf")] and done["report"]["chunks"] == 4


def test_a_store_that_is_too_small_is_told_before(run: Run, documents: Path, model_dir: Path, tmp_path: Path) -> None:
    store = f"disk://{tmp_path / 'small'}?quota=2KB"
    result = run("ingest", documents, "--model", model_dir, "--storage", store, "--index", "index")
    assert "holds 2.0 KB at most" in result.stderr and (tmp_path / "index").is_dir()


def test_two_tenants_do_not_share_an_index(run: Run, ingested: Any, documents: Path) -> None:
    result = run("ingest", documents, "--namespace", "other")
    assert result.exit_code == 2 and "this collection has --namespace default" in result.stderr


# --- ask and chat


def test_ask_answers_from_stored_caches(run: Run, ingested: Any) -> None:
    found = parsed(run("ask", QUESTION, "--top-k", 2, "--max-new-tokens", 4, "--json"))
    assert found["question"] == QUESTION and isinstance(found["answer"], str)
    best = found["sources"][0]
    assert (Path(best["document"]).name, best["text"]) == ("ships.txt", TEXTS["ships.txt"]) and 0 < best["score"] <= 1
    stats = found["stats"]
    kinds = [stats[f"{kind}_tokens"] for kind in ("prefix", "reused", "recomputed", "fresh")]
    assert sum(kinds) == stats["prompt_tokens"] and stats["hits"] == 3  # two chunks and their head
    assert stats["misses"] == 0 and stats["ttft_s"] > 0


def test_ask_shows_sources_and_reuse(run: Run, ingested: Any) -> None:
    result = run("ask", QUESTION, "--max-new-tokens", 4)
    assert result.exit_code == 0
    assert "[1] documents/ships.txt, likeness 0." in result.stdout and "The harbour master logs" in result.stdout
    assert "first token after " in result.stdout and " recomputed, " in result.stdout


def test_nothing_resembles_the_question(run: Run, ingested: Any, documents: Path) -> None:
    result = run("ask", "foo", "--top-k", 1)
    assert result.exit_code == 1 and not result.stdout
    assert result.stderr == "rag-blend: nothing in the collection resembles the question\n"


def test_ask_without_the_caches_still_answers(run: Run, ingested: Any, tmp_path: Path) -> None:
    for entry in (tmp_path / "kv").rglob("*.safetensors"):
        entry.unlink()
    stats = parsed(run("ask", QUESTION, "--max-new-tokens", 4, "--json"))["stats"]
    assert stats["mode"] == "full" and "no cached chunk" in stats["note"]


def test_chat_remembers_what_was_said(run: Run, ingested: Any) -> None:
    given = f"{QUESTION}\n\n{QUESTION}\n"  # the empty line is passed over
    result = run("chat", "--max-new-tokens", 4, "--json", input=given)
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    texts = [{source["text"] for source in turn["sources"]} for turn in (first, second)]
    assert texts[0] == texts[1]
    assert second["stats"]["prompt_tokens"] > first["stats"]["prompt_tokens"]
    assert first["stats"]["hits"] > 0
    assert second["stats"]["reused_tokens"] >= first["stats"]["prompt_tokens"]  # it goes on from the first turn


def test_chat_prints_answers_and_goes_on_after_a_question_without_hits(run: Run, ingested: Any) -> None:
    result = run("chat", "--max-new-tokens", 4, "--top-k", 1, input=f"foo\n{QUESTION}\n")
    assert result.exit_code == 0 and "nothing in the collection resembles" in result.stderr
    assert "[documents/ships.txt; first token after " in result.stdout


def test_chat_at_a_terminal(run: Run, ingested: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C stops an answer, which is then forgotten; an empty line ends the conversation."""
    typed = iter([QUESTION, QUESTION, " ", QUESTION])
    monkeypatch.setattr(sys.modules["rag_blend.cli.chat"], "_at_a_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    answers = 0
    answer = Conversation.answer

    def interrupted_once(self: Conversation, reply: Reply, reuse: bool = True) -> Iterator[str]:
        nonlocal answers
        answers += 1
        for piece in answer(self, reply, reuse):
            if answers == 1:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(Conversation, "answer", interrupted_once)
    result = run("chat", "--max-new-tokens", 4, "--top-k", 1)
    assert result.exit_code == 0, result.output
    assert answers == 2 and next(typed) == QUESTION
    assert result.stdout.count("(stopped)") == 1 and result.stdout.count("first token after") == 1


def test_a_long_conversation_forgets_its_beginning(run: Run, ingested: Any, tmp_path: Path) -> None:
    config = json.loads((Path(_model_of(ingested)) / "config.json").read_text())
    moved = tmp_path / "short"
    moved.mkdir()
    for file in Path(_model_of(ingested)).iterdir():
        (moved / file.name).symlink_to(file)
    (moved / "config.json").unlink()
    (moved / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 400}))
    given = f"{QUESTION}\n" * 6
    result = run("chat", "--model", moved, "--top-k", 1, "--max-new-tokens", 32, "--json", input=given)
    assert result.exit_code == 0, result.output
    lengths = [json.loads(line)["stats"]["prompt_tokens"] for line in result.stdout.splitlines()]
    assert len(lengths) == 6 and max(lengths) + 32 <= 400 and lengths[1] > lengths[0]


# --- estimate


def test_estimate_agrees_with_ingest_and_loads_no_weights(
    run: Run, documents: Path, model_dir: Path, ingested: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag_blend.loading.load", None)
    found = parsed(run("estimate", documents, "--model", model_dir, "--no-time", "--json"))
    assert {name: found[name] for name in ("chunks", "tokens", "bytes")} == ingested["estimate"]
    assert found["documents"] == 4 and found["seconds"] is found["tokens_per_s"] is None


def test_estimate_measures_time_and_stores_nothing(run: Run, documents: Path, model_dir: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    found = parsed(run("estimate", documents, "--model", model_dir, "--json"))
    assert found["seconds"] == pytest.approx(found["tokens"] / found["tokens_per_s"]) and found["seconds"] > 0
    assert set(tmp_path.iterdir()) == before
    result = run("estimate", documents, "--model", model_dir, "--codec", "int4")
    assert "(int4)" in result.stdout and "time: about " in result.stdout
    assert (
        parsed(run("estimate", documents, "--model", model_dir, "--codec", "int4", "--no-time", "--json"))["bytes"]
        < found["bytes"] / 2
    )


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ask", QUESTION], "there is no collection in "),
        (["ask", QUESTION, "--storage", "redis://localhost"], "needs --index DIR"),
        (["ingest", "DOCUMENTS"], "which model is to answer?"),
        (["ingest", "DOCUMENTS", "--model", "./absent"], "there is no model directory './absent'"),
        (["ingest", "absent", "--model", "MODEL"], "there is no file or directory 'absent'"),
        (["ingest", "EMPTY", "--model", "MODEL"], "no documents in "),
        (["ingest", "DOCUMENTS", "--model", "MODEL", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["ingest", "DOCUMENTS", "--model", "MODEL", "--codec", "lzma"], "unknown codec 'lzma'"),
        (["estimate", "DOCUMENTS", "--model", "./absent"], "there is no model directory './absent'"),
        (["estimate", "EMPTY", "--model", "MODEL"], "no documents in "),
        (["estimate", "DOCUMENTS", "--model", "EMPTY"], "it has no config.json"),
        (["doctor", "EMPTY"], "it has no config.json"),
        (["chat"], "there is no collection in "),
        (
            ["ingest", "absent", "--model", "absent", "--on-unsupported", "calibrated", "--ray", "auto"],
            "does not go with --on-unsupported calibrated",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_two(
    run: Run, documents: Path, model_dir: Path, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"DOCUMENTS": documents, "MODEL": model_dir, "EMPTY": tmp_path / "empty"}
    result = run(*[places.get(argument, argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("rag-blend: ") and complaint in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout
    assert not (tmp_path / "kv").exists() and not (tmp_path / "kv-index").exists()


def test_an_empty_question(run: Run, ingested: Any) -> None:
    result = run("ask", " ")
    assert (result.exit_code, result.stderr) == (2, "rag-blend: the question is empty\n")


@pytest.mark.parametrize("name", ["collection.json", "docstore.json"])
def test_a_damaged_index_says_what_to_do(run: Run, ingested: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "kv-index" / name).write_text("{")
    result = run("ask", QUESTION)
    assert result.exit_code == 2 and "damaged" in result.stderr and "ingest again" in result.stderr


def test_a_model_that_cannot_be_blended(run: Run, documents: Path, tmp_path: Path) -> None:
    random_model("gpt2").save_pretrained(tmp_path / "gpt2")
    small_tokenizer().save_pretrained(tmp_path / "gpt2")
    result = run("ingest", documents, "--model", tmp_path / "gpt2")
    assert result.exit_code == 2 and "no rotary" in result.stderr and result.stderr.count("\n") == 1
    assert "Use --on-unsupported full" in result.stderr and "on_unsupported" not in result.stderr
    served = run("ingest", documents, "--model", tmp_path / "gpt2", "--on-unsupported", "full", "--json")
    assert parsed(served)["report"]["chunks"] == 0
    assert "nothing is cached: served by full prefill" in run("ingest", documents).stdout
    assert parsed(run("ask", QUESTION, "--json"))["stats"]["mode"] == "full"  # it is remembered
    clustered = run("ingest", documents, "--ray", "auto")
    assert clustered.exit_code == 2 and clustered.stderr.count("\n") == 1
    assert "--ray is for models that are blended" in clustered.stderr and "--on-unsupported full" in clustered.stderr
    mistake = run("ingest", documents, "--on-unsupported", "measured")
    assert mistake.exit_code == 2 and "error, full, calibrated" in mistake.stderr


def test_estimate_of_a_model_whose_attention_slides(run: Run, documents: Path, tmp_path: Path) -> None:
    """It is refused, served in full, or measured as if its calibration had passed."""
    random_model("mistral", sliding_window=64).save_pretrained(tmp_path / "slides")
    small_tokenizer().save_pretrained(tmp_path / "slides")
    estimate = ("estimate", documents, "--model", tmp_path / "slides")
    refused = run(*estimate)
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    assert "Use --on-unsupported full" in refused.stderr and "Or --on-unsupported calibrated" in refused.stderr
    full = run(*estimate, "--on-unsupported", "full")
    assert full.exit_code == 0 and "nothing is cached: served by full prefill" in full.stdout
    for copies, times in ((), 2), (("--no-exact-first",), 1):
        found = parsed(run(*estimate, "--on-unsupported", "calibrated", "--no-time", "--json", *copies))
        per_token = times * 2 * 2 * 2 * 2 * 16  # layers, K/V, bytes, heads
        assert found["bytes"] / found["tokens"] == pytest.approx(per_token, rel=0.05)
    assert "--on-unsupported is one of" in run(*estimate, "--on-unsupported", "perhaps").stderr


def test_without_the_extra_it_says_what_to_install(
    run: Run, documents: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith("rag_blend_app")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "wordllama", None)
    result = run("ingest", documents, "--model", model_dir)
    assert result.exit_code == 2 and result.stderr.endswith('in a clone of rag_blend: pip install -e ".[app]"\n')


def _model_of(ingested: Any) -> str:
    return str(json.loads((Path(ingested["index"]) / "collection.json").read_text())["model"])
