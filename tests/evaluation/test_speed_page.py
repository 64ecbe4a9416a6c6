"""The page of all benchmarks is put together from JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rag_blend.cli import app
from rag_blend.evaluation.speed import peers
from rag_blend.evaluation.speed.matching import Collection, measure_matching
from rag_blend.evaluation.speed.page import page_of, read_results, write_page


def peer(name: str, seconds: list[float], kl: float | None = None, **more: Any) -> dict[str, Any]:
    row = {"case": "reordered", "length": 1024, "ttft_s": seconds, "cpu_s": [2 * s for s in seconds], "kl": kl}
    return {"peer": name, "version": "1.2", "settings": {"threads": 2}, "rows": [row], **more}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = measure_matching([10], Collection(64, 300, 5000), 2, progress=False)
    found.write(tmp_path / "a")
    (tmp_path / "a" / "list.json").write_text("[]", encoding="utf-8")  # somebody else's
    return tmp_path / "a"


@pytest.fixture
def with_peers(directory: Path) -> Path:
    there = directory.parent / "peers"
    there.mkdir()
    for one in (
        peer("transformers", [3.0, 1.0, 2.0], 0.0),
        peer("other", [0.5, 1.0, 1.0]),
        {"peer": "third", "version": "", "settings": {}, "error": "pip found nothing", "rows": []},
    ):
        (there / f"{one['peer']}.json").write_text(json.dumps(one), encoding="utf-8")
    return there


def test_the_page(directory: Path, with_peers: Path) -> None:
    page = page_of(read_results([directory, with_peers]))
    assert page.startswith("# Benchmarks\n") and page.index("## Matching") < page.index("## Peers")
    written = (directory / "match.md").read_text("utf-8")
    assert next(line for line in written.splitlines() if line.startswith("| 10 |")) in page
    assert "### 1,024 tokens of chunks: other order" in page
    assert "| other | 1.000 (0.500-1.000) | 2.000 | 2.00 | 0 | 2.00x |  |" in page
    assert "| third |  | pip found nothing |" in page and "| other | 1.2 | threads 2 |" in page


def test_plots_stand_beside_it(directory: Path, tmp_path: Path) -> None:
    twice = read_results([directory, directory])
    write_page(twice, tmp_path / "docs.md")
    page = (tmp_path / "docs.md").read_text("utf-8")
    assert "![Matching](images/bench-match.png)" in page and "![Matching](images/bench-match-2.png)" in page
    assert {path.name for path in (tmp_path / "images").iterdir()} == {"bench-match.png", "bench-match-2.png"}


def test_peers_are_set_in_relation_to_transformers() -> None:
    rows = {row["peer"]: row for row in peers.rows_of([peer("other", [1.0]), peer("transformers", [4.0], 0.0)])}
    assert rows["other"]["gain"] == 4.0 and rows["transformers"]["gain"] == 1.0 and rows["other"]["kl"] is None
    assert peers.rows_of([peer("alone", [1.0])])[0]["gain"] is None


@pytest.mark.parametrize(
    "text",
    ['{"bench": "match"}', '{"peer": "x", "rows": [{}]}', "{", '{"bench": "match", "environment": {}, "settings": {}, '
     '"rows": [{"chunks": 1}]}'],
)  # fmt: skip
def test_damaged_results_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken\.json: not the results of a bench"):
        read_results([tmp_path])


def report(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "report", *map(str, arguments)])


def test_the_command(directory: Path, tmp_path: Path) -> None:
    shown = report(directory)
    assert shown.exit_code == 0 and shown.stdout == page_of(read_results([directory]))
    written = report(directory, "--out", tmp_path / "page.md")
    assert written.exit_code == 0 and (tmp_path / "page.md").exists()
    nothing = report(tmp_path / "absent")
    assert nothing.exit_code == 2 and "no results in" in nothing.stderr


def test_the_command_says_what_it_has_made_of_what(directory: Path, with_peers: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    data = json.loads(report(with_peers, directory, "--out", page, "--json").stdout)
    names = ("other.json", "third.json", "transformers.json")
    assert data["sections"] == [
        {"title": "Matching", "files": [str(directory / "match.json")]},
        {"title": "Peers", "files": [str(with_peers / name) for name in names]},
    ]
    assert data["written"] == [str(page), str(tmp_path / "images" / "bench-match.png")]
    assert data["page"] is None
    assert all(Path(path).is_file() for path in data["written"])


def test_without_a_file_to_write_the_page_is_in_the_json(directory: Path) -> None:
    data = json.loads(report(directory, "--json").stdout)
    assert data["written"] == [] and data["page"] == report(directory).stdout
