"""The storage bench measures what it says, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rag_blend.cli import app


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_disk_beside_plain_files(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "store", "--counts", "3,6", "--entry", "10KB", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["storage"], row["entries"]) for row in rows] == [
        ("plain files", 3), ("plain files", 6), ("disk", 3), ("disk", 6),
    ]  # fmt: skip
    for row in rows:
        assert row["entry_bytes"] == 10_000
        assert all(row[name] > 0 for name in ("write_mb_s", "cold_mb_s", "warm_mb_s", "open_ms", "list_s"))
    assert list(tmp_path.iterdir()) == []


def test_a_place_of_one_s_own_is_left_as_it_was(tmp_path: Path) -> None:
    url = f"disk://{tmp_path}/mine"
    result = CliRunner().invoke(app, ["bench", "store", "--storage", url, "--counts", "4", "--entry", "1KB"])
    assert result.exit_code == 0, result.output
    assert "cold" in result.output
    assert list((tmp_path / "mine").glob("??/*")) == []


@pytest.mark.parametrize("counts", ["0", "x", ""])
def test_counts_must_be_numbers(counts: str) -> None:
    assert CliRunner().invoke(app, ["bench", "store", "--counts", counts]).exit_code == 2
