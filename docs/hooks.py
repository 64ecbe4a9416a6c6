"""What mkdocs.yml asks for: the README as the first page, and links that work here as they do in a clone."""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_README = "<!-- README -->"
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    """Include the README where it is asked for; links to files that are no pages become plain text."""
    folder = "docs"
    if _README in markdown:
        markdown, folder = markdown.replace(_README, (ROOT / "README.md").read_text("utf-8")), "."

    def linked(found: re.Match[str]) -> str:
        text, path, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(folder, path))
        if not target.startswith("docs/"):
            return str(text)
        name = target.removeprefix("docs/")
        # A page that is missing stays a link, so that a strict build complains.
        return f"[{text}]({name}{anchor or ''})"

    # Odd parts are fenced code, where brackets are code.
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if i % 2 else _LINK.sub(linked, part) for i, part in enumerate(parts))
