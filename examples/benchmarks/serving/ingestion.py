"""Sessions' chunks in a store, as an engine with the same model puts them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sessions import Round

from rag_blend import BlendEngine


def ingest(
    rounds: Sequence[Round], model: Path, storage: Path, dtype: str, progress: Callable[[str], None] = lambda text: None
) -> None:
    """Store all that sessions know.

    Raises:
        RagBlendError: The model cannot be blended.
        OSError: There is no such model, or the store refuses.
    """
    known = [session.known for current in rounds for session in current.sessions]
    with BlendEngine.from_pretrained(str(model), storage=str(storage), device="cpu", dtype=dtype) as engine:
        for count, prompt in enumerate(known, start=1):
            engine.ingest(prompt.chunks, head=prompt.head, progress=False)
            progress(f"ingested {count} of {len(known)} prompts' chunks")
