"""Answers and prefills that can be looked at: the prompt coloured by what was reused, and where the time went."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rag_blend.picture_page import document_of, fragment_of
from rag_blend.trace import Trace


class Pictured:
    """What has a `Trace` draws itself.

    Attributes:
        trace: What happened to the prompt; None in what no engine has made.
    """

    __slots__ = ()
    trace: Trace | None

    def show(self, path: str | os.PathLike[str] | None = None) -> Path | None:
        """Look at what happened to the prompt.

        Args:
            path: Write a page there. None: in a notebook the picture appears below the cell; elsewhere the page goes
                to a new temporary file, which only you can read.

        Returns:
            The file, or None in a notebook.

        Raises:
            ValueError: There is no trace.
            OSError: The file cannot be written.
        """
        if path is not None:
            return self.save_html(path)
        if _in_notebook():
            from IPython.display import HTML, display

            display(HTML(fragment_of(self._traced(), self._answer())))  # type: ignore[no-untyped-call]
            return None
        self._traced()
        handle, name = tempfile.mkstemp(prefix="rag-blend-", suffix=".html")
        os.close(handle)
        return self.save_html(name)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture as a page of its own, with no script and nothing to load.

        Raises:
            ValueError: There is no trace.
            OSError: The file cannot be written.
        """
        page, target = document_of(self._traced(), self._answer()), Path(path)
        target.write_text(page, encoding="utf-8")
        return target

    def _repr_html_(self) -> str | None:
        return None if self.trace is None else fragment_of(self.trace, self._answer())

    def _answer(self) -> str | None:
        return getattr(self, "text", None)

    def _traced(self) -> Trace:
        if self.trace is None:
            raise ValueError("there is no trace to draw: only what an engine returns has one")
        return self.trace


def _in_notebook() -> bool:
    """Whether IPython is at work, with a front end that shows HTML."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
