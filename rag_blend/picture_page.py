"""From a trace to HTML: plain markup and a style sheet, no script. Every text of a prompt is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from typing import NamedTuple

from rag_blend.picture_pieces import Piece, excerpt_of, pieces_of
from rag_blend.picture_style import STYLE
from rag_blend.trace import Kind, Outcome, Trace, TracedChunk

WHAT_KINDS_MEAN = {
    Kind.PREFIX: "reused exactly",
    Kind.REUSED: "reused",
    Kind.RECOMPUTED: "recomputed",
    Kind.FRESH: "fresh",
}
WHAT_OUTCOMES_MEAN: dict[Outcome, str] = {
    "exact": "hit, exact",
    "blended": "hit, blended",
    "declined": "left alone: computing it takes no longer",
    "elsewhere": "miss: cached behind another head",
    "lost": "miss: gone, or not delivered",
    "damaged": "miss: damaged",
}
_WHAT_PARTS_MEAN = {
    "tokenise": "tokenise",
    "queue": "wait for the model",
    "plan": "find chunks and plan",
    "storage": "wait for storage",
    "select": "choose what to recompute",
    "compute": "compute",
}
# What cannot be seen is shown by its picture; a line break and a tab do what they always do.
_UNSEEN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


class _Run(NamedTuple):
    """Pieces in a row of which the same became, in the same chunk."""

    kind: Kind
    owner: int
    pieces: list[Piece]


def document_of(trace: Trace, answer: str | None) -> str:
    """A whole HTML page; see `fragment_of`."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # Nothing in a prompt can get out of its escaping; were it otherwise, it could do nothing.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width">\n<meta name="color-scheme" content="light dark">\n'
        "<title>What happened to a prompt</title>\n"
        "<style>body { margin:24px auto; max-width:1126px; padding:0 16px; }\n"
        "@media (prefers-color-scheme:dark) { body { background:#0e1012; } }\n"
        f"</style>\n</head>\n<body>\n{fragment_of(trace, answer)}\n</body>\n</html>\n"
    )


def fragment_of(trace: Trace, answer: str | None) -> str:
    """A picture of a trace, as an element with its own style sheet; `answer` is shown below the headline."""
    parts = [
        f"<h1>{_headline(trace)}</h1>",
        "" if answer is None else f'<h2>Answer</h2><p class="answer">{_escaped(answer.strip())}</p>',
        f"<h2>Time to first token: {trace.seconds.total:.3f} s</h2>{_time_bar(trace)}",
        f"<h2>Stored chunks</h2>{_chunk_table(trace)}",
        f"<h2>Prompt</h2>{_legend(trace)}{_prompt(trace)}",
    ]
    return f'<style>{STYLE}</style>\n<div class="rag-blend">\n' + "\n".join(filter(None, parts)) + "\n</div>"


def _headline(trace: Trace) -> str:
    spared = trace.count(Kind.PREFIX) + trace.count(Kind.REUSED)
    if not spared:
        return f"Nothing was reused: all {len(trace):,} tokens of the prompt were computed"
    return f"{spared:,} of {len(trace):,} prompt tokens ({_percent(spared / len(trace))}) were reused"


def _time_bar(trace: Trace) -> str:
    spent = {part: seconds for part, seconds in trace.seconds._asdict().items() if seconds > 0}
    total = trace.seconds.total
    bars = "".join(f'<i class="t-{part}" style="width:{seconds / total:.3%}"></i>' for part, seconds in spent.items())
    names = "".join(
        f'<li><span class="swatch t-{part}"></span>{_WHAT_PARTS_MEAN[part]} <span class="soft">'
        f"{seconds * 1000:,.1f} ms, {_percent(seconds / total)}</span></li>"
        for part, seconds in spent.items()
    )
    return f'<div class="bar">{bars}</div><ul>{names}</ul>'


def _legend(trace: Trace) -> str:
    entries = ((kind, name, trace.count(kind)) for kind, name in WHAT_KINDS_MEAN.items())
    items = "".join(
        f'<li><span class="sample k{kind:d}">{name}</span>'
        f'<span class="soft">{count:,} ({_percent(count / len(trace))})</span></li>'
        for kind, name, count in entries
    )
    return f"<ul>{items}</ul>"


def _prompt(trace: Trace) -> str:
    shown = "".join(_run(trace, run, chip) for run, chip in _with_chips(_runs(trace)))
    what = "a token: its position, its id" if trace.scores is not None else "the text"
    seen = ", how much of the question's attention it gets" if trace.scores is not None else ""
    hint = f'<div class="hint">Point at {what}, what became of it{seen}.</div>'
    return f'<div class="frame"><div class="prompt">{shown}</div>{hint}</div>'


def _runs(trace: Trace) -> Iterator[_Run]:
    kinds, owners = trace.kinds.tolist(), trace.owners().tolist()
    for (kind, owner), pieces in groupby(
        pieces_of(trace.tokenizer, trace.token_ids), key=lambda piece: (kinds[piece.start], owners[piece.start])
    ):
        yield _Run(Kind(kind), owner, list(pieces))


def _with_chips(runs: Iterable[_Run]) -> Iterator[tuple[_Run, bool]]:
    """Each run, and whether a chunk begins with it."""
    last = -1
    for run in runs:
        yield run, run.owner not in (-1, last)
        last = run.owner


def _run(trace: Trace, run: _Run, chip: bool) -> str:
    number = run.owner + 1
    where = f" style='--in:\" of chunk {number}\"'" if run.owner >= 0 else ""
    if trace.scores is None:
        text = _text("".join(piece.text for piece in run.pieces))
        stretch = _stretch("token", run.pieces[0].start, run.pieces[-1].end)
        shown = f'<span class="k{run.kind:d}"{where} data-t="{stretch}">{text}</span>'
    else:
        shown = f'<span class="k{run.kind:d}"{where}>{"".join(_token(trace, p) for p in run.pieces)}</span>'
    return f'<span class="chip">{number}</span>{shown}' if chip else shown


def _token(trace: Trace, piece: Piece) -> str:
    assert trace.scores is not None
    ids = " ".join(str(token) for token in trace.token_ids[piece.start : piece.end])
    attention = float(trace.scores[piece.start : piece.end].sum())
    about = f"{_stretch('token', piece.start, piece.end)} · id {ids} · attention {attention:.2%}"
    return f'<span data-t="{about}">{_text(piece.text)}</span>'


def _chunk_table(trace: Trace) -> str:
    rows = [_chunk_row(trace, number, chunk) for number, chunk in enumerate(trace.chunks, 1)]
    if trace.kept:
        cells = (
            "",
            f"hit, {'exact' if trace.kinds[0] == Kind.PREFIX else 'blended'}: an earlier prompt",
            _place(0, trace.kept),
            "",
            "0",
            _excerpt(trace, 0, trace.kept),
            "",
        )
        rows.insert(0, _row(cells))
    if not rows:
        return '<p class="soft">None lies in this prompt.</p>'
    names = ("", "", "tokens", "of the chunk", "recomputed", "begins with", "key")
    header = "".join(f"<th{_class_of(column)}>{name}</th>" for column, name in enumerate(names))
    return f'<div class="scroll"><table><tr>{header}</tr>{"".join(rows)}</table></div>'


def _chunk_row(trace: Trace, number: int, chunk: TracedChunk) -> str:
    outcome = WHAT_OUTCOMES_MEAN[chunk.outcome]
    placed = len(chunk) > 0
    return _row(
        (
            f'<span class="chip">{number}</span>',
            f'<span class="miss">{outcome}</span>' if chunk.is_miss else outcome,
            _place(chunk.start, chunk.end) if placed else "unknown",
            f"{len(chunk):,} of {chunk.num_tokens:,}" if placed else "",
            f"{trace.count(Kind.RECOMPUTED, chunk.start, chunk.end):,}" if chunk.is_hit else "",
            _excerpt(trace, chunk.start, chunk.end),
            f"<code>{escape(chunk.key[:12])}</code>",
        )
    )


def _row(cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<td{_class_of(column)}>{cell}</td>" for column, cell in enumerate(cells)) + "</tr>"


def _class_of(column: int) -> str:
    return {2: ' class="number"', 3: ' class="number"', 4: ' class="number"', 5: ' class="text"'}.get(column, "")


def _excerpt(trace: Trace, start: int, end: int) -> str:
    return _escaped(excerpt_of(trace.tokenizer, trace.token_ids[start:end]))


def _percent(share: float) -> str:
    return "&lt;1%" if 0 < share < 0.01 else f"{share:.0%}"


def _place(start: int, end: int) -> str:
    return f"{start:,}-{end - 1:,}"


def _stretch(noun: str, start: int, end: int) -> str:
    return f"{noun} {start}" if end - start == 1 else f"{noun}s {start}-{end - 1}"


def _text(text: str) -> str:
    """As HTML; line breaks get a mark, or a token that is nothing else could not be seen."""
    return _escaped(text).replace("\n", "<i></i>\n")


def _escaped(text: str) -> str:
    return escape(text).translate(_UNSEEN)
