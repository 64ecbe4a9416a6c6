"""docs/models.md is made by tests/models/table.py; it must not fall behind the families that are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from conftest import ALL_FAMILIES
from models.test_prefix_only import NOTHING, ROWS, STATES
from models.test_windows import WINDOWED


def text() -> str:
    return (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")


@pytest.mark.skipif(f"transformers {transformers.__version__} and" not in text(), reason="others have other families")
def test_the_page_names_what_is_tested() -> None:
    blended, calibrated, served = re.split("## Blended after a calibration|## Served, not blended", text())
    assert set(re.findall(r"^\| (\w+) \| \de-", blended, re.MULTILINE)) >= set(ALL_FAMILIES)
    assert re.findall(r"^\| (\w+) \| \de-", calibrated, re.MULTILINE) == [*WINDOWED]
    named = re.findall(r"^\| (\w+) \| (?:any|whole|nothing) ", served, re.MULTILINE)
    assert named == [*ROWS, *STATES, *NOTHING]


def test_every_difference_on_the_page_is_small() -> None:
    differences = [float(number) for number in re.findall(r"\| (\de-\d\d) ", text())]
    assert len(differences) > 120
    assert max(differences) <= 1e-4
