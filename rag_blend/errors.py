"""Every exception that a caller may want to catch.

    RagBlendError
    ├── UnsupportedModelError     the model cannot be blended; the text says what to do
    ├── ModelChangedError         its adapters or weights are not those the engine was made with: nothing is ingested
    ├── PromptTooLongError        the prompt leaves no room for an answer in the context window
    ├── GenerationCancelledError  the caller cancelled before the answer was complete
    └── StoreError                something about the chunk store
        ├── ChunkNotFoundError    no such entry (a plain miss)
        ├── CorruptChunkError     the entry is damaged; it has been set aside
        ├── FingerprintMismatchError  the entry belongs to another model, tokenizer, dtype, head or tenant
        └── StoreUnavailableError     the medium does not answer; the entry may well be there

The four leaves of `StoreError` never reach a user of `BlendEngine`: they cost a recompute and are counted.
"""

from __future__ import annotations


class RagBlendError(Exception):
    """Base class of all errors raised on purpose by this package."""


class UnsupportedModelError(RagBlendError):
    """The model cannot be blended correctly.

    Attributes:
        reason: Which model, and why; the exception's text adds the way out.
        servable: Whether there is one: the model can at least be served without blending.
        calibratable: Whether it can be blended, so that a calibration can tell how close that comes.
    """

    def __init__(self, reason: str, servable: bool = True, calibratable: bool = False) -> None:
        way_out = "Use on_unsupported='full' to serve it without blending: by plain full prefill, of which only what "
        way_out += "earlier prompts begin with is reused."
        if calibratable:
            way_out += (
                " Or on_unsupported='calibrated' to blend it where `rag-blend calibrate` finds that close enough."
            )
        super().__init__(f"{reason} {way_out}" if servable else reason)
        self.reason = reason
        self.servable = servable
        self.calibratable = calibratable

    def __reduce__(self) -> tuple[type[UnsupportedModelError], tuple[str, bool, bool]]:
        """Pickled by what it was made of: workers raise it in other processes."""
        return type(self), (self.reason, self.servable, self.calibratable)


class ModelChangedError(RagBlendError):
    """The model's adapters or weights are not those that the engine was made with."""


class PromptTooLongError(RagBlendError):
    """The prompt fills the model's context window: there is no room for a single token of an answer."""


class GenerationCancelledError(RagBlendError):
    """The caller cancelled the request before its answer was complete."""


class StoreError(RagBlendError):
    """Base class for problems with stored entries."""


class ChunkNotFoundError(StoreError, KeyError):
    """No entry with this key."""


class CorruptChunkError(StoreError):
    """An entry's bytes are not what was written."""


class FingerprintMismatchError(StoreError):
    """An entry was made by another model, tokenizer, dtype or tenant."""


class StoreUnavailableError(StoreError):
    """The medium does not answer: nothing is known about the entry."""


def install_hint(extra: str) -> str:
    """What to do when a library of one of our extras is missing; the package is on no index yet."""
    return f'in a clone of rag_blend: pip install -e ".[{extra}]"'
