"""What `ask`, `chat`, `explain` and `demo` print: never what a document tells the terminal to do, and what is true."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

pytest.importorskip("llama_index.readers.file")
pytest.importorskip("wordllama")

from conftest import random_text
from rag_blend_app.conversation import Conversation, Reply
from rag_blend_app.terminal import printable
from toy_texts import QUESTION

pytest_plugins = ["toy_documents"]
pytestmark = pytest.mark.usefixtures("one_thread")
Run = Callable[..., Result]

HOSTILE = "\x1b]52;c;cm0gLXJm\x07 \x9b31m The vessel passes the breakwater \x1b[2J of the harbour, with its tonnage."


def is_harmless(text: str) -> bool:
    return not any(
        (ord(character) < 32 and character not in "\n\t") or 127 <= ord(character) < 160 for character in text
    )


def test_printable_leaves_lines_and_letters_alone() -> None:
    assert printable("a\tb\nä \N{PILE OF POO}") == "a\tb\nä \N{PILE OF POO}"
    assert printable("\x1b[31mred\r\x9b\x7f") == "\N{REPLACEMENT CHARACTER}[31mred" + "\N{REPLACEMENT CHARACTER}" * 3
    assert all(is_harmless(printable(chr(code))) for code in range(256))


@pytest.fixture
def ingested(run: Run, documents: Path, model_dir: Path) -> Path:
    (documents / "ships.txt").write_text(HOSTILE)
    (documents / "name\x1b[31m.txt").write_text("The vessel passes the breakwater again and again, says the harbour.")
    result = run("ingest", documents, "--model", model_dir)
    assert result.exit_code == 0, result.output
    return documents


@pytest.mark.parametrize("command", ["ask", "explain", "chat"])
def test_documents_and_answers_cannot_speak_to_the_terminal(
    run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    answer = Conversation.answer

    def hostile(self: Conversation, reply: Reply, reuse: bool = True) -> Iterator[str]:
        yield from answer(self, reply, reuse)
        yield "answer \x1b[2J"

    monkeypatch.setattr(Conversation, "answer", hostile)
    given: dict[str, Any] = {"input": f"{QUESTION}\n"} if command == "chat" else {}
    options = ["--top-k", 2] if command == "explain" else ["--top-k", 2, "--max-new-tokens", 4]
    result = run(command, *([] if command == "chat" else [QUESTION]), *options, **given)
    assert result.exit_code == 0 and "\N{REPLACEMENT CHARACTER}" in result.stdout, result.output
    assert is_harmless(result.stdout)


def test_file_names_cannot_speak_to_the_terminal(run: Run, documents: Path, model_dir: Path) -> None:
    (documents / "empty\x1b[31m.txt").touch()
    result = run("ingest", documents, "--model", model_dir, "--json")
    assert "has no text" in result.stderr and "\x1b[31m" not in result.stderr


def test_demo_cannot_be_spoken_through(run: Run, tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "texts").mkdir()
    for seed in range(2):
        (tmp_path / "texts" / f"{seed}.md").write_text(f"Part \x1b]0;{seed}\x07\n\n{random_text(seed, 150)}")
    result = run("demo", "--documents", tmp_path / "texts", "--model", model_dir)
    assert result.exit_code == 0 and "Part \N{REPLACEMENT CHARACTER}]0;" in result.stdout, result.output
    assert is_harmless(result.stdout)


def test_a_damaged_entry_is_not_taken_for_another_head(
    run: Run, documents: Path, model_dir: Path, tmp_path: Path
) -> None:
    run("ingest", documents, "--model", model_dir)
    for entry in (tmp_path / "kv").rglob("*.safetensors"):
        damaged = bytearray(entry.read_bytes())
        damaged[-200:] = bytes(200)
        entry.write_bytes(damaged)
    note = json.loads(run("ask", QUESTION, "--max-new-tokens", 4, "--json").stdout)["stats"]["note"]
    assert "are lost or damaged: ingest again" in note and "begins with another text" not in note


def test_full_prefill_for_comparison(run: Run, documents: Path, model_dir: Path) -> None:
    run("ingest", documents, "--model", model_dir)
    found = json.loads(run("ask", QUESTION, "--max-new-tokens", 4, "--full", "--json").stdout)["stats"]
    assert (found["mode"], found["fresh_tokens"]) == ("full", found["prompt_tokens"])
    result = run("ask", QUESTION, "--max-new-tokens", 4, "--full")
    assert "first token after " in result.stdout and ": 0 reused, 0 recomputed" in result.stdout
    assert result.stdout.endswith("answered by full prefill: no cache was used\n")


def test_a_missing_calibration_is_told_at_ingestion_and_not_with_every_question(
    run: Run, documents: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run("ingest", documents, "--model", model_dir)
    assert caplog.text.count("no calibration for") == 1
    caplog.clear()
    assert run("ask", QUESTION, "--max-new-tokens", 4).exit_code == 0
    assert "no calibration" not in caplog.text
