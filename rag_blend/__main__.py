"""``python -m rag_blend``: the command line."""

from rag_blend.cli import main

if __name__ == "__main__":
    main()
