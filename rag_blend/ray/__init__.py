"""Bulk ingestion on a Ray cluster: a model on every worker, and one store that all of them share.

    rag_blend.ray.ingest(chunks, model="path/or/hub-id", storage="s3://bucket/kv", workers=8, num_gpus=1)

Needs the extra ``ray``, but only when it is used: this module itself imports neither Ray nor torch. docs/scaling.md
has the rest.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_blend.ray.bulk import BulkReport, ingest

__all__ = ["BulkReport", "ingest"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rag_blend.ray import bulk

    return getattr(bulk, name)
