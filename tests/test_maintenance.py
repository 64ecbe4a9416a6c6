"""What an operator does with a store, from Python and from the command line."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import random_text
from test_engine_storage import DOCUMENTS, HEAD, entries, prompt_with, records
from typer.testing import CliRunner, Result

from rag_blend import BlendEngine
from rag_blend.cli import app
from rag_blend.maintenance import export, forget, import_, verify
from rag_blend.storage.disk import DiskBackend
from rag_blend.storage.memory import MemoryBackend

MakeEngine = Callable[..., BlendEngine]
PRIMED = {"prime": "sample", "prime_tokens": 16, "exact_first": False}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["store", *map(str, arguments)])


@pytest.fixture
def kv(make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> Path:
    """A directory with a head, six primed chunks of six documents, and a priming sample."""
    engine = make_engine(storage=tmp_path / "kv", **PRIMED)
    engine.ingest(texts, head=HEAD, doc_ids=DOCUMENTS, progress=False)
    engine.close()
    assert len(entries(tmp_path / "kv")) == 7
    return tmp_path / "kv"


def damage(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class TestVerify:
    def test_a_sound_store(self, kv: Path) -> None:
        result = run("verify", kv)
        assert result.exit_code == 0
        assert "7 entries" in result.output and "7 sound, 0 damaged" in result.output

    def test_planted_damage_is_found_and_set_aside(self, kv: Path, make_engine: MakeEngine, texts: list[str]) -> None:
        spoilt = entries(kv)[1:4]
        damage(spoilt[0])
        damage(spoilt[1], 20)
        spoilt[2].write_bytes(b"")
        result = run("verify", kv, "--json")
        assert result.exit_code == 1
        found = json.loads(result.stdout)
        assert set(found["damaged"]) == {path.stem for path in spoilt}
        assert found["entries"] == 7
        assert len(entries(kv)) == 4
        assert run("verify", kv).exit_code == 0
        engine = make_engine(storage=kv, **PRIMED)
        engine.ingest(texts, head=HEAD, doc_ids=DOCUMENTS, progress=False)
        assert len(entries(kv)) == 7
        assert engine.prefill(prompt_with(*texts)).stats.hits == 7

    def test_keep_only_reports(self, kv: Path) -> None:
        damage(entries(kv)[0])
        for _ in range(2):
            result = run("verify", kv, "--keep")
            assert result.exit_code == 1 and "1 damaged" in result.output
        assert len(entries(kv)) == 7

    def test_a_medium_that_does_not_answer_is_not_damage(self, kv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = DiskBackend(kv)
        usual = backend.open
        silent = entries(kv)[0].stem

        def open_(key: str) -> object:
            if key == silent:
                raise TimeoutError("no answer")
            return usual(key)

        monkeypatch.setattr(backend, "open", open_)
        report = verify(backend)
        backend.close()
        assert set(report.unreadable) == {silent} and not report.damaged
        assert len(entries(kv)) == 7


class TestForget:
    def test_one_document(self, kv: Path, texts: list[str]) -> None:
        before = set(entries(kv))
        result = run("forget", kv, "doc 3", "--json")
        assert result.exit_code == 0
        gone = json.loads(result.stdout)["keys"]
        assert {path.stem for path in before - set(entries(kv))} == set(gone)

    def test_all_of_them_take_the_sample_along(self, kv: Path) -> None:
        result = run("forget", kv, *DOCUMENTS)
        assert result.exit_code == 0 and "ingest the remaining documents again" in result.output
        assert len(entries(kv)) == 1  # the head is nobody's
        assert not any(b"prime-sample" in path.read_bytes() for path in records(kv))

    def test_another_tenant_s_stay(self, kv: Path) -> None:
        assert forget(DiskBackend(kv), set(DOCUMENTS), namespace="other").keys == ()
        assert len(entries(kv)) == 7


class TestExport:
    def test_there_and_back(self, kv: Path, tmp_path: Path, make_engine: MakeEngine, texts: list[str]) -> None:
        tar = tmp_path / "kv.tar"
        assert run("export", kv, tar).exit_code == 0
        assert tar.stat().st_mode & 0o077 == 0  # as private as the store
        result = run("import", tar, tmp_path / "copy")
        assert result.exit_code == 0 and "7 entries imported" in result.output
        original, copy = (make_engine(storage=tmp_path / name, **PRIMED) for name in ("kv", "copy"))
        assert copy.num_chunks == original.num_chunks
        prompt = prompt_with(*texts)
        assert copy.prefill(prompt).stats.hits == 7
        assert torch.equal(copy.prefill(prompt).logits, original.prefill(prompt).logits)
        assert copy.forget(["doc 2"]).entries == original.forget(["doc 2"]).entries

    def test_an_existing_file_is_not_overwritten(self, kv: Path, tmp_path: Path) -> None:
        target = tmp_path / "precious"
        target.write_text("mine")
        assert run("export", kv, target).exit_code == 2
        assert target.read_text() == "mine"

    def test_what_is_damaged_or_foreign_is_refused(self, kv: Path) -> None:
        file = io.BytesIO()
        backend = DiskBackend(kv)
        assert export(backend, file) == 7
        backend.close()
        members = {}
        with tarfile.open(fileobj=io.BytesIO(file.getvalue())) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                members[member.name] = content.read()
        first, second = [name for name in members if name.startswith("entries/")][:2]
        members[first] = members[first][:-1] + bytes([members[first][-1] ^ 1])
        members[second], members["entries/" + "a" * 64 + ".safetensors"] = b"", members[second]
        members["../../etc/passwd"] = b"root"
        members["documents.jsonl"] += b'\n["x", ["../y"]]'
        hostile = io.BytesIO()
        with tarfile.open(fileobj=hostile, mode="w") as tar:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            link = tarfile.TarInfo("entries/" + "b" * 64 + ".safetensors")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
        hostile.seek(0)
        target = MemoryBackend()
        report = import_(target, hostile)
        assert report.entries == 5 == len(list(target.keys()))
        assert len(report.refused) == 6

    def test_what_is_no_tar_file_is_a_readable_error(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"nothing like it" * 100)
        result = run("import", tmp_path / "x", tmp_path / "copy")
        assert result.exit_code == 2 and "not an exported store" in result.output

    def test_a_file_that_is_not_there_makes_no_store(self, tmp_path: Path) -> None:
        result = run("import", tmp_path / "absent.tar", tmp_path / "copy")
        assert result.exit_code == 2 and "absent.tar" in result.stderr and result.stderr.count("\n") == 1
        assert not (tmp_path / "copy").exists()

    def test_names_in_a_file_cannot_speak_to_the_terminal(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "x.tar", mode="w") as tar:
            tar.addfile(tarfile.TarInfo("records/\x1b]0;owned\x07.json"))
        result = run("import", tmp_path / "x.tar", tmp_path / "copy")
        assert result.exit_code == 1 and "owned" in result.stdout
        assert "\x1b" not in result.stdout and "\x07" not in result.stdout


class TestStatsAndRoom:
    def test_stats(self, kv: Path) -> None:
        found = json.loads(run("stats", kv, "--json").stdout)
        assert found["entries"] == 7
        assert found["bytes"] == sum(path.stat().st_size for path in entries(kv))
        assert "7 entries" in run("stats", kv).output

    def test_gc_makes_room_now(self, kv: Path) -> None:
        size = sum(path.stat().st_size for path in entries(kv))
        result = run("gc", kv, "--quota", size // 2, "--json")
        assert result.exit_code == 0
        left = sum(path.stat().st_size for path in entries(kv))
        assert 0 < left <= size // 2
        found = json.loads(result.stdout)
        assert found["bytes"] == left and found["removed"] == 7 - len(entries(kv))

    def test_gc_takes_the_directorys_own_quota_where_none_is_given(self, kv: Path) -> None:
        size = sum(path.stat().st_size for path in entries(kv))
        assert json.loads(run("gc", kv, "--json").stdout)["removed"] == 0
        assert json.loads(run("gc", f"disk://{kv}?quota={size // 2}", "--json").stdout)["removed"] > 0
        result = run("gc", "memory://")
        assert result.exit_code == 2 and "only a directory" in result.stderr

    @pytest.mark.parametrize("command", ["stats", "verify", "forget", "export", "gc"])
    def test_a_directory_that_is_no_store_is_told_and_left_alone(self, command: str, tmp_path: Path) -> None:
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "a.txt").write_text("text")
        more = {"forget": ["doc"], "export": [tmp_path / "x.tar"]}.get(command, [])
        result = run(command, tmp_path / "notes", *more)
        assert result.exit_code == 2 and "is no store" in result.stderr
        assert [path.name for path in (tmp_path / "notes").iterdir()] == ["a.txt"]

    @pytest.mark.parametrize("command", ["stats", "verify", "forget", "export", "gc"])
    def test_a_directory_that_is_not_there_is_not_made(self, command: str, tmp_path: Path) -> None:
        more = {"forget": ["doc"], "export": [tmp_path / "x.tar"]}.get(command, [])
        for place in (tmp_path / "no", f"disk://{tmp_path / 'no'}?quota=1GB"):
            result = run(command, place, *more)
            assert result.exit_code == 2 and "there is no directory" in result.output
            assert not (tmp_path / "no").exists()

    def test_a_url_of_no_use_is_a_readable_error(self) -> None:
        result = run("stats", "ftp://host/kv")
        assert result.exit_code == 2 and result.output.startswith("rag-blend: ")


def test_a_hundred_queries_from_eight_threads_while_entries_are_evicted(
    make_engine: MakeEngine, texts: list[str], tmp_path: Path
) -> None:
    """Each chunk directly behind its head, so that it is exact and the answer the same with and without it."""
    prompts = [prompt_with(text) for text in texts]
    expected = [make_engine().generate(prompt, 4, do_sample=False).text for prompt in prompts]
    first = make_engine(storage=tmp_path)
    first.ingest(texts, head=HEAD, progress=False)
    size = sum(path.stat().st_size for path in entries(tmp_path))
    engine = make_engine(storage=DiskBackend(tmp_path, quota_bytes=size * 2 // 3))
    wrong: list[object] = []
    reused: list[int] = []
    turns = iter(range(100))
    lock = threading.Lock()

    def ask() -> None:
        while True:
            with lock:
                turn = next(turns, None)
            if turn is None:
                return
            try:
                answer = engine.generate(prompts[turn % 6], 4, do_sample=False)
                reused.append(answer.stats.prefix_tokens)
                if answer.text != expected[turn % 6]:
                    wrong.append(turn)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for seed in range(200, 212):
        engine.ingest([random_text(seed), texts[seed % 6]], head=HEAD, progress=False)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(reused) == 100 and max(reused) > len(engine.tokenizer(HEAD)["input_ids"])
    assert engine._backend.stats().counts["evicted"] > 0
    engine.ingest(texts[:1], head=HEAD, progress=False)
    assert engine.prefill(prompts[0]).stats.prefix_tokens > 0
