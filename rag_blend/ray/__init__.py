"""Bulk ingestion on a Ray cluster: a model on every worker, and one store that all of them share.

    rag_blend.ray.ingest(chunks, model="path/or/hub-id", storage="s3://bucket/kv", workers=8, num_gpus=1)

Needs the extra ``rag-blend[ray]``; nothing else in this package imports Ray. docs/scaling.md has the rest.
"""

from rag_blend.ray.bulk import BulkReport, ingest

__all__ = ["BulkReport", "ingest"]
