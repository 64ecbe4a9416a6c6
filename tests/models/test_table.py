"""docs/models.md is made by tests/models/table.py; it must not fall behind the families that are tested."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import ALL_FAMILIES
from models.test_prefix_only import NOTHING, ROWS, STATES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_names_what_is_tested() -> None:
    blended, served = PAGE.read_text("utf-8").split("## Served, not blended")
    assert set(re.findall(r"^\| (\w+) \| \de-", blended, re.MULTILINE)) >= set(ALL_FAMILIES)
    named = re.findall(r"^\| (\w+) \| (?:any|whole|nothing) ", served, re.MULTILINE)
    assert named == [*ROWS, *STATES, *NOTHING]


def test_every_difference_on_the_page_is_small() -> None:
    differences = [float(number) for number in re.findall(r"\| (\de-\d\d) ", PAGE.read_text("utf-8"))]
    assert len(differences) > 80
    assert max(differences) <= 1e-4
