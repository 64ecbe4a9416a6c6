"""A Ray cluster for ``rag-blend ingest --ray``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rag_blend.ray import BulkReport

RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Prefill on a Ray cluster: HOST:PORT, auto (the one this machine is in), or local (this machine alone).",
    ),
]
RayWorkersOption = Annotated[int, typer.Option("--ray-workers", min=1, help="With --ray: how many load the model.")]
RayGpusOption = Annotated[float, typer.Option("--ray-gpus", min=0, help="With --ray: GPUs of each worker.")]


@contextmanager
def cluster_at(address: str) -> Iterator[Callable[..., BulkReport]]:
    """Connect to a cluster; gives `rag_blend.ray.ingest`, which uses it.

    Raises:
        ConnectionError: There is none.
        ModuleNotFoundError: Ray is not installed.
    """
    from rag_blend import ray as bulk

    ingest = bulk.ingest  # first, since it says what to install
    import ray

    ray.init(address, logging_level=logging.WARNING)
    try:
        yield ingest
    finally:
        ray.shutdown()
