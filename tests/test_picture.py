"""Pictures show the very text, whatever is in it, and are small, whole and harmless pages."""

from __future__ import annotations

import re
import stat
import sys
import types
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import random_text, small_tokenizer
from exactness import HEAD, QUESTION
from hypothesis import given
from hypothesis import strategies as st

from rag_blend import BlendEngine, Generation, GenerationStats
from rag_blend.picture_page import document_of, fragment_of
from rag_blend.picture_pieces import excerpt_of, pieces_of
from rag_blend.trace import Kind, Seconds, Trace, TracedChunk

MakeEngine = Callable[..., BlendEngine]
TOKENIZER = small_tokenizer()
NASTY = "<script>alert('1')</script> & \"quoted\" </div></span><!-- <b onclick=x> ]]> &amp; \U0001f600 über 漢字\x1b[0m"


class Page(HTMLParser):
    """What a browser would make of a page: its elements, and the text of its prompt."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.prompt = ""
        self.about: dict[str, str] = {}  # what is said of a stretch of the prompt, by its text
        self._saying = ""
        self.feed(html)
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.attributes |= given.keys()
        self._saying = given.get("data-t", self._saying)
        if tag != "meta":
            self.open.append((tag, given.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        classes = [name for _, name in self.open]
        if "prompt" in classes and "chip" not in classes:
            self.prompt += data
            self.about[self._saying] = self.about.get(self._saying, "") + data


def trace_of(text: str, scores: bool = False, chunks: tuple[TracedChunk, ...] = (), **fields: object) -> Trace:
    ids = np.asarray(TOKENIZER(text)["input_ids"], dtype=np.int32)
    kinds = np.full(len(ids), Kind.FRESH, dtype=np.uint8)
    for chunk in chunks:
        kinds[chunk.start : chunk.end] = Kind.REUSED
    given = {"kinds": kinds, "kept": 0, "seconds": Seconds(0.1, 0, 0.2, 0.3, 0.1, 0.3), **fields}
    attention = np.full(len(ids), 1 / len(ids), dtype=np.float32) if scores else None
    return Trace(ids, chunks=chunks, scores=attention, tokenizer=TOKENIZER, **given)  # type: ignore[arg-type]


@given(st.text(max_size=40))
def test_pieces_are_the_text_and_all_tokens(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    pieces = pieces_of(TOKENIZER, ids)
    assert "".join(piece.text for piece in pieces) == TOKENIZER.decode(ids)
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert not pieces or (pieces[0].start, pieces[-1].end) == (0, len(ids))


def test_a_character_of_several_tokens_is_one_piece() -> None:
    ids = TOKENIZER("a漢\U0001f600b")["input_ids"]
    assert [(piece.text, piece.end - piece.start) for piece in pieces_of(TOKENIZER, ids)] == [
        ("a", 1), ("漢", 3), ("\U0001f600", 4), ("b", 1),
    ]  # fmt: skip
    cut = pieces_of(TOKENIZER, [*ids[:3], *TOKENIZER("b")["input_ids"]])  # two bytes of three
    assert cut[0].text == "a" and cut[1].text.endswith("b") and "\ufffd" in cut[1].text
    assert len(pieces_of(TOKENIZER, ids[1:2] * 40)) > 3  # what never makes a character does not swallow the rest


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("make", [document_of, fragment_of])
def test_nothing_in_a_prompt_can_become_markup(make: Callable[[Trace, str], str], scores: bool) -> None:
    text = f"{NASTY} and {NASTY}"
    length = len(TOKENIZER(text)["input_ids"])
    chunks = (TracedChunk("0" * 64, "blended", 3, length - 9, 0, length), TracedChunk("<b>" * 20, "lost"))
    html = make(trace_of(text, scores, chunks), NASTY)
    page = Page(html)
    assert page.prompt == text.replace("\x1b", "\u241b")
    assert not page.tags & {"script", "b", "img", "a"} and not page.attributes & {"onclick", "href", "src"}
    assert "<script" not in html and "http" not in html.replace("http-equiv", "")
    assert "&" not in re.sub(r"&(amp|lt|gt|quot|#x27);", "", html)


@pytest.mark.parametrize("scores", [False, True])
def test_a_prompt_of_eight_thousand_tokens_stays_small(scores: bool) -> None:
    text = " ".join(random_text(seed, 400) for seed in range(20))
    trace = trace_of(text, scores, (TracedChunk("0" * 64, "blended", 100, 7000, 0, 6900),))
    assert len(trace) > 8000
    trace.kinds[150:7000:7] = Kind.RECOMPUTED
    size = len(document_of(trace, None).encode())
    assert size < (1_000_000 if scores else 250_000)


def test_every_token_says_what_it_is_where_scores_are_known() -> None:
    trace = trace_of("the river 漢 of stone", scores=True, chunks=(TracedChunk("0" * 64, "blended", 1, 4, 2, 7),))
    about = {text: said for said, text in Page(fragment_of(trace, None)).about.items()}
    share = f"attention {1 / len(trace):.2%}"
    assert about["the"] == f"token 0 · id {trace.token_ids[0]} · {share}"
    start = next(piece.start for piece in pieces_of(TOKENIZER, trace.token_ids) if "漢" in piece.text)
    ids = " ".join(map(str, trace.token_ids[start : start + 3]))
    assert about["漢"] == f"tokens {start}-{start + 2} · id {ids} · attention {3 / len(trace):.2%}"


def test_equal_tokens_are_one_element_where_scores_are_not_known() -> None:
    trace = trace_of("the river of stone and water", chunks=(TracedChunk("0" * 64, "blended", 1, 4, 2, 7),))
    about = Page(fragment_of(trace, None)).about
    assert list(about) == ["token 0", "tokens 1-3", f"tokens 4-{len(trace) - 1}"]


def test_what_is_shown_of_chunks_and_times() -> None:
    text = random_text(1, 100)
    chunks = (
        TracedChunk("c" * 64, "lost"),
        TracedChunk("a" * 64, "exact", 0, 20, 0, 20),
        TracedChunk("b" * 64, "damaged", 30, 50, 5, 40),
        TracedChunk("d" * 64, "elsewhere", 60, 90, 0, 30),
    )
    html = fragment_of(trace_of(text, chunks=chunks), "yes")
    for words in (
        "Time to first token: 1.000 s", "hit, exact", "miss: damaged", "miss: cached behind another head",
        "miss: gone, or not delivered", "20 of 40", "30-49", "unknown", "aaaaaaaaaaaa",
        'wait for storage <span class="soft">300.0 ms, 30%',
    ):  # fmt: skip
        assert words in html, words
    assert html.count('class="chip"') == 4 + 3  # the lost one has no place in the prompt
    assert "queue" not in html.split("</style>")[1]  # nothing was waited for


def test_nothing_reused_and_an_earlier_prompt() -> None:
    assert "Nothing was reused" in fragment_of(trace_of("the river"), None)
    trace = trace_of("the river of stone", kept=2)
    trace.kinds[:2] = Kind.PREFIX
    html = fragment_of(trace, None)
    assert f"2 of {len(trace)} prompt tokens" in html and "an earlier prompt" in html


def test_excerpts_are_one_line() -> None:
    assert excerpt_of(TOKENIZER, trace_of("the\n\nriver  of").token_ids[:9]) == "the river of"
    cut = excerpt_of(TOKENIZER, trace_of(random_text(1, 200)).token_ids[5:150])
    assert cut.endswith(" …") and len(cut) <= 92


@pytest.fixture
def answer(make_engine: MakeEngine, texts: list[str]) -> Generation:
    engine = make_engine()
    engine.ingest([NASTY * 2, *texts[:2]], head=HEAD, progress=False)
    return engine.generate(HEAD + "\n\n".join([texts[0], NASTY * 2, texts[1]]) + QUESTION, 3)


def test_answers_draw_themselves(answer: Generation, tmp_path: Path) -> None:
    path = tmp_path / "answer.html"
    assert answer.show(path) == answer.save_html(path) == path
    page = Page(path.read_text("utf-8"))
    assert page.prompt.replace("\u241b", "\x1b") == TOKENIZER.decode(answer.trace.token_ids.tolist())
    assert Page(answer._repr_html_()).prompt == page.prompt


def test_without_a_notebook_show_writes_a_private_file(answer: Generation) -> None:
    path = answer.show()
    try:
        assert path.suffix == ".html" and stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "<!doctype html>" in path.read_text("utf-8")
    finally:
        path.unlink()


def test_in_a_notebook_show_displays(answer: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    shown: list[str] = []
    monkeypatch.setattr(display, "display", lambda html: shown.append(html.data))
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: types.SimpleNamespace(kernel=object()))
    assert answer.show() is None
    assert shown == [answer._repr_html_()]


def test_a_prefill_draws_itself(make_engine: MakeEngine, texts: list[str]) -> None:
    html = make_engine().prefill(texts[0])._repr_html_()
    assert html is not None and "Nothing was reused" in html and "<h2>Answer" not in html


def test_what_no_engine_made_cannot_be_drawn(tmp_path: Path) -> None:
    answer = Generation("text", [1], GenerationStats())
    assert answer._repr_html_() is None
    for draw in (answer.show, lambda: answer.save_html(tmp_path / "x.html")):
        with pytest.raises(ValueError, match="no trace to draw"):
            draw()
