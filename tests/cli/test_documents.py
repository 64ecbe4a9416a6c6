"""Files of all kinds become documents."""
# ruff: noqa: RUF001 (letters of many languages)

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.readers.file")

from rag_blend_app.documents import files_in, read
from rag_blend_app.encoding import Decoded, decode
from toy_texts import pdf_of

PAGE = """<html><head><title>Bees</title><style>p { color: red }</style></head><body>
<nav>Home | About</nav><script>let hidden = 1</script><h1>Colonies</h1><p>Bees keep their <b>brood</b> warm.</p>
<p>Drones &amp; workers<br>differ.</p><ul><li>queen<li>worker</ul></body></html>"""


def texts_of(*paths: Path) -> dict[str, str]:
    reading = read(files_in(paths), progress=False)
    assert not reading.unread and not reading.empty
    return {Path(document.id_).name: document.text for document in reading.documents}


def test_a_directory_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a.TXT").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9 \n")
    (tmp_path / "sub" / "b.md").write_text("# Title\n\nBody")
    (tmp_path / "c.rst").write_bytes("Größe".encode("utf-16"))
    (tmp_path / "d.html").write_text(PAGE)
    (tmp_path / "e.pdf").write_bytes(pdf_of("Quartz drifts", "with temperature"))
    (tmp_path / "f.py").write_text("no document")
    (tmp_path / ".hidden" / "g.txt").write_text("hidden")
    assert texts_of(tmp_path) == {
        "a.TXT": "café",
        "c.rst": "Größe",
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
    assert reasons == {"binary.txt": "is no text"}
    assert [Path(path).name for path in reading.empty] == ["empty.md"]


@pytest.mark.parametrize(
    ("text", "written_in", "read_as"),
    [
        ("Le café est situé à côté de la gare, où les élèves mangent déjà.", "latin-1", "cp1252"),
        ("naïve “quotes”, and a dash—of cp1252", "cp1252", "cp1252"),
        ("Привет, это русский текст о погоде и природе. Сегодня хорошо.", "cp1251", "cp1251"),
        ("今日は天気がいいですね。明日も晴れるでしょう。", "shift_jis", "cp932"),
        ("Größe", "utf-16", "utf-16"),
    ],
)
def test_another_encoding_than_utf_8_is_found_and_named(
    tmp_path: Path, text: str, written_in: str, read_as: str
) -> None:
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_bytes(text.encode(written_in))
    (tmp_path / "c.txt").write_text(text, "utf-8")
    reading = read(files_in([tmp_path]), progress=False)
    assert [document.text for document in reading.documents] == [text] * 3
    assert {Path(path).name: found for path, found in reading.converted.items()} == {"a.txt": read_as, "b.md": read_as}


CZECH = """Dnešní počasí bude převážně oblačné a místy se objeví slabý déšť. Odpoledne se obloha vyjasní a teploty
vystoupí až na dvacet stupňů. Večer čekáme bouřky, hlavně na východě země. Řidiči by měli být opatrní,
protože vozovky budou kluzké.
"""
TURKISH = """Bugün hava güneşli ve açık olacak, ancak akşam saatlerinde yağmur bekleniyor. İstanbul'da yaşayan
insanlar şemsiyelerini yanlarına almalı. Çocuklar okuldan sonra parkta oynadılar. Şehrin ışıkları gece
boyunca parlıyordu.
"""
FRENCH = """Le château fut bâti au dix-septième siècle ; on y voit encore des fenêtres peintes. L’été, les marchés
sont très animés et l’on y achète des pêches, des mûres et du maïs. Ça va être une journée
extraordinaire, même s’il pleut.
"""


@pytest.mark.parametrize(("text", "written_in"), [(CZECH, "cp1250"), (TURKISH, "cp1254"), (FRENCH, "cp1252")])
def test_a_long_text_shows_its_language_and_so_its_encoding(text: str, written_in: str) -> None:
    """`charset_normalizer` by itself takes this French for cp1257."""
    assert decode((text * 9).encode(written_in)) == Decoded(text * 9, written_in)


@pytest.mark.parametrize(
    ("data", "text", "lost"),
    [
        (FRENCH.encode().replace(b"\xc3\xaa", b"\xff", 1), FRENCH.replace("ê", "\ufffd", 1), 1),
        ("Straße, gut".encode().replace(b"gut", "größ".encode()[:-1]), "Straße, grö\ufffd", 1),
        ("It was the town’".encode()[:-1], "It was the town\ufffd", 1),
        ("\ufeffÜber".encode() + "ß".encode()[:1], "Über\ufffd", 1),
    ],
    ids=["a byte is wrong", "its end is cut off", "the end of ASCII is cut off", "with a byte order mark"],
)
def test_damaged_utf_8_stays_utf_8(data: bytes, text: str, lost: int) -> None:
    assert decode(data) == Decoded(text, "utf-8", lost)


@pytest.mark.parametrize("text", ["Das ist ein Café", "Größe über Straßenschild ß"])
def test_latin_1_that_ends_as_cut_utf_8_would(text: str) -> None:
    assert decode(text.encode("latin-1")).text == text


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Straße, Größ".encode() + b"\xc3")
    reading = read(files_in([tmp_path]), progress=False)
    assert reading.damaged == {str(tmp_path / "a.txt"): 1} and not reading.converted
    assert reading.documents[0].text == "Straße, Größ\ufffd"


def test_bytes_in_no_encoding_are_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.txt").write_bytes(bytes(range(254, 127, -1)) * 9)
    (reason,) = read(files_in([tmp_path]), progress=False).unread.values()
    assert "convert it to UTF-8" in reason


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
