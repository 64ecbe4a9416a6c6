"""What the pages quote is there: messages in the code, metrics in the collector, options in the signatures."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
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


FOREIGN = {"Empty Response", "llama-index-llms-openai package not found"}  # the frameworks' own
TABLES = [
    ("troubleshooting", "## Storage", 15),
    ("llama_index", "## Reuse is 0: why?", 4),
    ("langchain", "## Reuse is 0: why?", 3),
]  # page, what the tables of messages stand behind, how many messages there are at least


def quoted_messages(name: str, heading: str) -> list[str]:
    """First cells of the tables of messages, those in quotation marks."""
    _, tables = page(name).split(heading)
    cells = re.findall(r"^\| ([^|]+) \|", tables, re.MULTILINE)
    return [quote for cell in cells for quote in re.findall(r'"([^"]+)"', cell) if quote not in FOREIGN]


@pytest.mark.parametrize(
    "message", [message for name, heading, _ in TABLES for message in quoted_messages(name, heading)]
)
def test_messages_are_quoted_as_they_are(message: str) -> None:
    for piece in re.split(r"…|'[\w_]+'", message):
        assert piece.strip(" ,:") in texts_in_the_code()


@pytest.mark.parametrize(("name", "heading", "at_least"), TABLES)
def test_there_are_messages(name: str, heading: str, at_least: int) -> None:
    assert len(quoted_messages(name, heading)) >= at_least


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


def test_snippets_of_the_readme_leave_only_what_is_the_readers_own_undefined() -> None:
    pytest.importorskip("ruff")
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(snippets) >= 3
    undefined: set[str] = set()
    for snippet in snippets:
        command = [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--isolated",
            "--select",
            "F821",
            "--output-format",
            "concise",
            "-",
        ]
        found = subprocess.run(command, input=snippet, capture_output=True, text=True)
        undefined |= set(re.findall(r"F821 Undefined name `(\w+)`", found.stdout))
    assert undefined == {"embed_model", "embeddings", "texts", "chunks", "ids", "retrieved"}


def test_options_that_pages_name_exist() -> None:
    options = set(inspect.signature(BlendEngine).parameters)
    for file in DOCS.glob("*.md"):
        for call in re.findall(r"`BlendEngine\(\.\.\., ([^`]*)\)`", file.read_text("utf-8")):
            assert set(re.findall(r"(\w+)=", call)) <= options, (file.name, call)
