"""Files of all kinds become documents."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.readers.file")

from rag_blend_app.documents import files_in, read
from toy_texts import pdf_of

PAGE = """<html><head><title>Bees</title><style>p { color: red }</style></head><body>
<nav>Home | About</nav><script>let hidden = 1</script><h1>Colonies</h1><p>Bees keep their <b>brood</b> warm.</p>
<p>Drones &amp; workers<br>differ.</p><ul><li>queen<li>worker</ul></body></html>"""


def texts_of(*paths: Path) -> dict[str, str]:
    reading = read(files_in(paths), progress=False)
    assert not reading.unread
    return {Path(document.id_).name: document.text for document in reading.documents}


def test_a_directory_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a.TXT").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9 \n")
    (tmp_path / "sub" / "b.md").write_text("# Title\n\nBody")
    (tmp_path / "c.rst").write_bytes(b"latin \xe9")
    (tmp_path / "d.html").write_text(PAGE)
    (tmp_path / "e.pdf").write_bytes(pdf_of("Quartz drifts", "with temperature"))
    (tmp_path / "f.py").write_text("no document")
    (tmp_path / ".hidden" / "g.txt").write_text("hidden")
    assert texts_of(tmp_path) == {
        "a.TXT": "café",
        "c.rst": "latin \N{REPLACEMENT CHARACTER}",
        "d.html": "Bees\n\nColonies\n\nBees keep their brood warm.\n\nDrones & workers\n\ndiffer.\n\nqueen\nworker",
        "e.pdf": "Quartz drifts\nwith temperature",
        "b.md": "# Title\n\nBody",
    }


def test_what_is_embedded_and_prompted_is_the_text_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (document,) = read(files_in([tmp_path, tmp_path / "a.txt"]), progress=False).documents
    assert document.get_content("llm") == document.get_content("embed") == "text"
    assert document.id_ == str((tmp_path / "a.txt").resolve())


def test_files_that_cannot_be_read_do_not_stop_the_others(tmp_path: Path) -> None:
    for name, content in {
        "binary.txt": b"PK\0\1", "empty.md": b" \n", "broken.pdf": b"%PDF-1.4 no more", "good.txt": b"good",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    reading = read(files_in([tmp_path]), progress=False)
    assert [document.text for document in reading.documents] == ["good"]
    reasons = {Path(path).name: reason for path, reason in reading.unread.items()}
    assert "Stream" in reasons.pop("broken.pdf")
    assert reasons == {"binary.txt": "is no text", "empty.md": "has no text"}


def test_a_scan_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "scan.pdf").write_bytes(pdf_of(""))
    (reason,) = read(files_in([tmp_path]), progress=False).unread.values()
    assert "OCR" in reason


def test_what_cannot_be_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file or directory"):
        files_in([tmp_path / "absent"])
    with pytest.raises(FileNotFoundError, match=r"no documents in .*looked for \.txt"):
        files_in([tmp_path])
    (tmp_path / "code.py").touch()
    with pytest.raises(ValueError, match=r"code\.py: files of this kind are not read"):
        files_in([tmp_path / "code.py"])


def test_a_directory_that_cannot_be_listed_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what was ingested from it would count as gone, and be forgotten."""
    locked = tmp_path / "locked"
    locked.mkdir()
    for directory in (tmp_path, locked):
        (directory / "a.txt").write_text("some text")
    assert len(files_in([tmp_path])) == 2
    usual = os.scandir

    def scandir(path: str) -> Any:
        if Path(path) == locked:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path)

    monkeypatch.setattr(os, "scandir", scandir)  # as root, everything can be listed
    with pytest.raises(PermissionError, match="locked"):
        files_in([tmp_path])
