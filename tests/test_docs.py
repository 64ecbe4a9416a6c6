"""What the pages quote is there: messages in the code, metrics in the collector, options in the signatures."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from rag_blend import BlendEngine
from rag_blend.metrics import Metrics

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text("utf-8")


@cache
def texts_in_the_code() -> str:
    """All string literals, parts of f-strings included, joined as Python joins them."""
    files = [*(ROOT / "rag_blend").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    return "\n".join(
        "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    )


def quoted_messages() -> list[str]:
    """First cells of the tables of messages, those in quotation marks; foreign ones are the frameworks' own."""
    _, tables = page("troubleshooting").split("## Storage")
    cells = re.findall(r"^\| ([^|]+) \|", tables, re.MULTILINE)
    return [quote for cell in cells for quote in re.findall(r'"([^"]+)"', cell) if quote not in {"Empty Response"}]


@pytest.mark.parametrize("message", quoted_messages())
def test_messages_are_quoted_as_they_are(message: str) -> None:
    for piece in re.split(r"…|'[\w_]+'", message):
        assert piece.strip(" ,:") in texts_in_the_code()


def test_there_are_messages() -> None:
    assert len(quoted_messages()) > 15


def test_the_page_has_every_key_of_a_snapshot() -> None:
    for key in Metrics.__annotations__:
        assert re.search(rf"^\| .*`{key}`.* \|", page("observability"), re.MULTILINE), key


def test_the_page_has_every_metric() -> None:
    pytest.importorskip("prometheus_client")
    from rag_blend.prometheus import EngineCollector

    text = page("observability")
    for metric in EngineCollector({}).describe():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        assert f"`{name}`" in text or any(f"`…{name[i:]}`" in text for i in range(len("rag_blend"), len(name))), name


def test_options_that_pages_name_exist() -> None:
    options = set(inspect.signature(BlendEngine).parameters)
    for file in DOCS.glob("*.md"):
        for call in re.findall(r"`BlendEngine\(\.\.\., ([^`]*)\)`", file.read_text("utf-8")):
            assert set(re.findall(r"(\w+)=", call)) <= options, (file.name, call)
