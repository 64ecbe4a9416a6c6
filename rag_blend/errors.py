"""Every exception that a caller may want to catch.

    RagBlendError
    ├── UnsupportedModelError     the model cannot be blended; the text says what to do
    ├── ModelChangedError         its adapters or weights are not those the engine was made with: nothing is ingested
    ├── PromptTooLongError        prompt + answer do not fit the context window
    ├── GenerationCancelledError  the caller cancelled before the answer was complete
    └── StoreError                something about the chunk store
        ├── ChunkNotFoundError    no such entry (a plain miss)
        ├── CorruptChunkError     the entry is damaged; it has been set aside
        ├── FingerprintMismatchError  the entry belongs to another model, tokenizer, dtype, head or tenant
        └── StoreUnavailableError     the medium does not answer; the entry may well be there

The four leaves of `StoreError` never reach a user of `BlendEngine`: they cost a recompute and are counted.
"""


class RagBlendError(Exception):
    """Base class of all errors raised on purpose by this package."""


class UnsupportedModelError(RagBlendError):
    """The model cannot be blended correctly.

    Attributes:
        reason: Which model, and why; the exception's text adds the way out.
        servable: Whether there is one: the model can at least be served without blending.
    """

    def __init__(self, reason: str, servable: bool = True) -> None:
        way_out = "Use on_unsupported='full' to serve it without blending: by plain full prefill, of which only what "
        way_out += "earlier prompts begin with is reused."
        super().__init__(f"{reason} {way_out}" if servable else reason)
        self.reason = reason
        self.servable = servable


class ModelChangedError(RagBlendError):
    """The model's adapters or weights are not those that the engine was made with."""


class PromptTooLongError(RagBlendError):
    """The prompt and the requested answer do not fit the model's context window."""


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
