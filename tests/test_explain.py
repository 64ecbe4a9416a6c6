"""`rag-blend explain` says of every token why it was computed or not, and what to do where nothing is reused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import random_model, random_text, small_tokenizer
from exactness import HEAD, QUESTION
from typer.testing import CliRunner, Result

from rag_blend import BlendEngine
from rag_blend.calibration import Verdict
from rag_blend.cli import app

Run = Callable[..., Result]
TEXTS = [random_text(seed, 80) for seed in range(6)]
OTHER_HEAD = "<|im_start|>user\nAnother head of the valley and the river and the north.\n"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    random_model().save_pretrained(directory)
    small_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def engine(model_dir: Path, tmp_path: Path) -> Any:
    with BlendEngine.from_pretrained(model_dir, tmp_path / "kv", prime="none", device="cpu") as engine:
        yield engine


@pytest.fixture
def run(model_dir: Path, tmp_path: Path) -> Run:
    (tmp_path / "kv").mkdir(exist_ok=True)

    def run(prompt: str, *more: object, model: Path | None = model_dir, prime: str = "none") -> Result:
        (tmp_path / "prompt.txt").write_text(prompt, "utf-8")
        given = [] if model is None else ["--model", model, "--prime", prime, "--no-special-tokens"]
        arguments = ["--file", tmp_path / "prompt.txt", "--storage", tmp_path / "kv", *given, *more]
        return CliRunner().invoke(app, ["explain", *map(str, arguments)])

    return run


def explained(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    stretches = found["stretches"]
    assert stretches[0]["start"] == 0 and stretches[-1]["end"] == found["stats"]["prompt_tokens"]
    assert all(left["end"] == right["start"] for left, right in pairwise(stretches))
    for name, stat in (("prefix", "prefix_tokens"), ("recomputed", "recomputed_tokens"), ("fresh", "fresh_tokens")):
        assert sum(stretch[name] for stretch in stretches) == found["stats"][stat]
    return found


def test_a_cut_chunk_a_metadata_header_and_another_head(engine: BlendEngine, run: Run) -> None:
    engine.ingest(TEXTS[:3], head=HEAD, progress=False)
    engine.ingest(TEXTS[3:4], head=OTHER_HEAD, progress=False)
    cut = " ".join(TEXTS[2].split()[8:60])
    prompt = HEAD + "\n\n".join([TEXTS[0], "title: a.txt\npage: 7\n\n" + TEXTS[1], cut, TEXTS[3]]) + QUESTION
    found = explained(run(prompt, "--json"))
    by_text = {stretch["text"][:12]: stretch for stretch in found["stretches"]}
    whys = [stretch["why"] for stretch in found["stretches"]]
    assert whys[0] == "the head, as it was cached" and by_text[TEXTS[0][:12]]["why"] == "cached behind this very text"
    header = by_text["title: a.txt"]
    assert "a metadata header" in header["why"] and header["chunk"] is None and header["fresh"] > 5
    assert by_text[TEXTS[1][:12]]["why"].startswith("blended: cached behind the head, not behind all")
    (chunk,) = [s for s in found["stretches"] if "of the chunk's" in s["why"]]
    assert chunk["outcome"] == "blended" and chunk["key"] and chunk["reused"] + chunk["recomputed"] > 30
    edges = [why for why in whys if "it is cut" in why]
    assert [f"the {side}" in why for side, why in zip(("first", "last"), edges, strict=True)] == [True, True]
    elsewhere = by_text[TEXTS[3][:12]]
    assert elsewhere["outcome"] == "elsewhere" and elsewhere["fresh"] == elsewhere["end"] - elsewhere["start"]
    assert '"other head of the' in elsewhere["why"] and "goes on from token" in elsewhere["why"]
    assert whys[-1] == "behind the last chunk: the question is always computed"
    (hint,) = found["hints"]
    assert "1 chunk of this prompt cached behind a head" in hint and "any_head=True" in hint


def test_an_edge_that_tokenises_otherwise(engine: BlendEngine, run: Run) -> None:
    engine.ingest([TEXTS[0] + " ri", TEXTS[1]], head=HEAD, progress=False)
    whys = [
        s["why"]
        for s in explained(run(HEAD + TEXTS[1] + "\n\n" + TEXTS[0] + " river" + QUESTION, "--json"))["stretches"]
    ]
    assert any("the last 1 token of chunk 3, spelt with other tokens" in why for why in whys), whys


def test_primed_chunks_and_chunks_without_a_head(model_dir: Path, tmp_path: Path, run: Run) -> None:
    options = {"prime": TEXTS[5], "exact_first": False, "device": "cpu"}
    with BlendEngine.from_pretrained(model_dir, tmp_path / "kv", **options) as primed:
        primed.ingest(TEXTS[:1], head=HEAD, progress=False)
        primed.ingest(TEXTS[1:2], progress=False)
    prompt = HEAD + TEXTS[0] + "\n\n" + TEXTS[1] + QUESTION
    whys = {s["why"] for s in explained(run(prompt, "--json", prime=TEXTS[5]))["stretches"]}
    assert {"blended: cached behind the head and a priming text", "a separator"} <= whys
    unprimed = explained(run(prompt, "--json"))
    assert unprimed["stretches"][0]["outcome"] == "exact"  # the head, which is all that this engine may use
    assert [hint.partition(" primed")[0] for hint in unprimed["hints"]] == [
        "the store holds no chunk that this engine can use",
        "2 chunks",
    ]


def test_unprimed_copies(model_dir: Path, tmp_path: Path, run: Run) -> None:
    with BlendEngine.from_pretrained(model_dir, tmp_path / "kv", prime=TEXTS[5], device="cpu") as primed:
        primed.ingest(TEXTS[:2], head=HEAD, progress=False)
    stretches = explained(run(HEAD + TEXTS[0] + "\n\n" + TEXTS[1] + QUESTION, "--json", prime=TEXTS[5]))["stretches"]
    whys = [stretch["why"] for stretch in stretches if stretch["outcome"] in {"exact", "blended"}]
    assert whys[1:] == ["cached behind this very text", "blended: cached behind the head and a priming text"]
    nothing = explained(run("engine water stone", "--json", prime=TEXTS[5]))
    assert nothing["hints"][0] == "no chunk of this prompt is stored for this model and namespace, which have 2"
    assert not any("another way" in hint for hint in nothing["hints"])  # the copies are its own
    other = explained(run("engine water stone", "--json", prime=TEXTS[4]))
    assert other["hints"][1].startswith("4 chunks primed in another way")


@pytest.mark.parametrize(
    ("ingest", "options", "hints"),
    [
        (False, (), ["the store is empty"]),
        (True, (), ["no chunk of this prompt is stored for this model and namespace, which have 1"]),
        (True, ("--namespace", "other"), ["no chunk that this engine can use", "1 chunk of other namespaces"]),
        (True, ("--dtype", "float16"), ["no chunk that this engine can use", "1 chunk of another model fingerprint"]),
        (True, ("--prime", "sample"), ["no chunk that this engine can use", "1 chunk primed in another way"]),
    ],
)
def test_hints_where_nothing_is_reused(
    engine: BlendEngine, run: Run, ingest: bool, options: tuple[str, ...], hints: list[str]
) -> None:
    if ingest:
        engine.ingest([TEXTS[0]], head=HEAD, progress=False)
    found = explained(run(random_text(99, 100), "--json", *options))
    assert found["stats"]["hits"] == 0 and len(found["hints"]) == len(hints)
    assert all(words in hint for words, hint in zip(hints, found["hints"], strict=True)), found["hints"]


def test_sliding_windows_are_blended_where_a_calibration_has_passed(tmp_path: Path, run: Run) -> None:
    model = tmp_path / "slides"
    random_model("mistral", sliding_window=64).save_pretrained(model)
    small_tokenizer().save_pretrained(model)
    prompt = HEAD + "\n\n".join(TEXTS[:2]) + QUESTION
    assert explained(run(prompt, "--json", model=model))["policy"].startswith("full prefill")
    options = {"prime": "none", "on_unsupported": "measured", "device": "cpu"}
    with BlendEngine.from_pretrained(str(model), tmp_path / "kv", **options) as engine:
        engine.ingest(TEXTS[:2], head=HEAD, progress=False)
        engine.adopt(Verdict("heads", None, True, 0.02, 0.97, 0.01, 0.99, 0.1, 3.0, 24, "2026-01-01"))
    found = explained(run(prompt, "--json", model=model))
    assert found["policy"] == "heads (calibrated)" and found["stats"]["hits"] == 3  # the head, too


def test_a_question_alone_is_too_short(engine: BlendEngine, run: Run) -> None:
    engine.ingest(TEXTS, progress=False)
    hints = explained(run("which river?", "--json"))["hints"]
    assert "tokens: give the whole one, with the retrieved texts" in hints[-1]


def test_the_table_and_the_picture(engine: BlendEngine, run: Run, tmp_path: Path) -> None:
    engine.ingest(["[bold]the[/bold] " + TEXTS[0], TEXTS[1]], progress=False)
    result = run(HEAD + TEXTS[1] + "\n\n[bold]the[/bold] " + TEXTS[0] + QUESTION, "--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "[bold]the[/bold]" in result.stdout and "blended: cached without a head" in result.stdout
    assert "exact" not in result.stdout.splitlines()[2] and "Hint" not in result.stdout
    assert "hit, blended" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give either a prompt, a question, or --file"),
        (["x", "--file", "y"], "give either a prompt, a question, or --file"),
        (["x", "--storage", "nowhere"], "there is no store 'nowhere'"),
        (["x", "--storage", "disk://nowhere?quota=1GB"], "there is no store 'disk://nowhere?quota=1GB'"),
        (["--file", "nowhere.txt"], "nowhere.txt"),
        (["x", "--storage", "."], "give --model, and the whole prompt"),
        (["x", "--storage", ".", "--model", "nowhere"], "there is no model directory 'nowhere'"),
    ],
)
def test_mistakes_are_told_in_a_line(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == 2 and complaint in result.stderr and result.stderr.count("\n") == 1


def test_a_question_to_a_collection(model_dir: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "docs").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "docs" / f"{number}.txt").write_text(text, "utf-8")
    ingested = CliRunner().invoke(
        app, ["ingest", str(tmp_path / "docs"), "--model", str(model_dir), "--storage", str(tmp_path / "kv")]
    )
    assert ingested.exit_code == 0, ingested.output
    found = explained(run(" ".join(TEXTS[3].split()[:6]) + "?", "--json", "--top-k", "2", model=None))
    assert found["stats"]["hits"] >= 2 and found["stretches"][-1]["why"].startswith("behind the last chunk")
