"""The command line: ``rag-blend``, or ``python -m rag_blend``."""

import sys

from rag_blend.errors import install_hint


def main() -> None:
    """Run it, if what it needs is installed."""
    try:
        from rag_blend.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(f"rag-blend: {error}; {install_hint('cli')}")
    run()


if __name__ == "__main__":
    main()
