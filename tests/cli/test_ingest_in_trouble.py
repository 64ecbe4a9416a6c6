"""`ingest` beside another one, into what cannot be written, from files that are empty or huge, and interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import random_text
from typer.testing import Result

pytest.importorskip("llama_index.readers.file")
pytest.importorskip("wordllama")

from rag_blend_app.collection import Collection, Facts
from rag_blend_app.lock import alone_in
from toy_texts import QUESTION

pytest_plugins = ["toy_documents"]
pytestmark = pytest.mark.usefixtures("one_thread")
Run = Callable[..., Result]


def test_one_ingestion_at_a_time(run: Run, documents: Path, model_dir: Path, tmp_path: Path) -> None:
    with alone_in(tmp_path / "kv-index"):
        result = run("ingest", documents, "--model", model_dir)
    assert result.exit_code == 2 and "another ingestion is writing" in result.stderr
    assert not (tmp_path / "kv-index").exists()
    assert run("ingest", documents, "--model", model_dir).exit_code == 0
    with alone_in(tmp_path / "kv-index"):
        assert run("ask", QUESTION, "--max-new-tokens", 4).exit_code == 0


@pytest.mark.parametrize("locked", ["kv", "kv-index"])
def test_what_cannot_be_written_can_be_asked(
    run: Run, documents: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: str
) -> None:
    assert run("ingest", documents, "--model", model_dir).exit_code == 0
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != locked and access(path, mode))
    if locked == "kv-index":  # root may write whatever the mode says
        monkeypatch.setattr("filelock.FileLock.acquire", _denied)
    result = run("ingest", documents)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert locked in result.stderr and ("cannot be written" in result.stderr or "Permission denied" in result.stderr)
    assert run("ask", QUESTION, "--max-new-tokens", 4).exit_code == 0


def _denied(lock: object) -> None:
    raise PermissionError(13, "Permission denied", "kv-index/ingest.lock")


def test_empty_files_are_passed_over(run: Run, documents: Path, model_dir: Path) -> None:
    (documents / "empty.txt").touch()
    (documents / "latin.txt").write_bytes("Die Straße ist naß, und die Mädchen trinken süßen Tee.".encode("latin-1"))
    (documents / "cut.txt").write_bytes("Der süße Tee, die Straß".encode()[:-1])
    result = run("ingest", documents, "--model", model_dir, "--json")
    assert result.exit_code == 0
    assert "rag-blend: documents/cut.txt: is damaged, 1 of its characters are no UTF-8" in result.stderr
    assert "rag-blend: documents/empty.txt: has no text, is passed over\n" in result.stderr
    assert "rag-blend: documents/latin.txt: is not UTF-8, was read as cp1252\n" in result.stderr
    found = json.loads(result.stdout)["documents"]
    assert found["empty"] == [str(documents / "empty.txt")] and not found["unread"]
    assert found["converted"] == {str(documents / "latin.txt"): "cp1252"}
    assert found["damaged"] == {str(documents / "cut.txt"): 1}
    estimated = json.loads(run("estimate", documents, "--model", model_dir, "--no-time", "--json").stdout)
    for oddity in ("converted", "damaged", "empty", "unread"):
        assert estimated[oddity] == found[oddity]


def test_facts_that_cannot_be_written_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *content: object) -> None:
        raise OSError(28, "No space left on device")

    collection = Collection.__new__(Collection)
    collection.facts = Facts("model")
    collection.complete(tmp_path)
    before = (tmp_path / "collection.json").read_text()
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        collection.complete(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["collection.json"]
    assert (tmp_path / "collection.json").read_text() == before
    assert (tmp_path / "collection.json").stat().st_mode & 0o777 == 0o600


def test_a_file_that_was_emptied_is_forgotten(run: Run, documents: Path, model_dir: Path) -> None:
    assert run("ingest", documents, "--model", model_dir).exit_code == 0
    (documents / "ships.txt").write_text("")
    assert json.loads(run("ingest", documents, "--json").stdout)["documents"]["removed"] == [
        str(documents / "ships.txt")
    ]


def test_nothing_but_empty_files(run: Run, tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "a.txt").touch()
    result = run("ingest", tmp_path / "a.txt", "--model", model_dir)
    assert result.exit_code == 2 and "there is no text in any of the files" in result.stderr
    assert not (tmp_path / "kv-index").exists()


def test_estimate_warns_of_what_does_not_fit_and_of_much_to_read(
    run: Run, documents: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(100_000, 90_000, 10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(sys.modules["rag_blend.cli.collection"], "_MUCH_TEXT", 100)
    result = run("estimate", documents, "--model", model_dir, "--no-time")
    assert result.exit_code == 0
    assert "a store here holds 5.0 KB at most" in result.stderr and "disk://DIR?quota=" in result.stderr
    assert "4 files have " in result.stderr and "takes minutes" in result.stderr


@pytest.mark.timeout(300)  # another process imports torch
def test_ctrl_c_ends_with_a_line(documents: Path, model_dir: Path, tmp_path: Path) -> None:
    """In a process of its own, since a signal is for a process, and while it computes."""
    (documents / "long.txt").write_text("\n\n".join(random_text(seed, 900) for seed in range(60)))
    command = [sys.executable, "-m", "rag_blend", "ingest", str(documents), "--model", str(model_dir)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets what it starts in the background ignore it, and that would be inherited from these tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        deadline = time.monotonic() + 200
        while not list(tmp_path.glob("kv/??/*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints
    assert "rag-blend: interrupted; run the same command again, it resumes" in complaints
    assert "Traceback" not in complaints
