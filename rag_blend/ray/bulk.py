"""A pool of Ray actors, each with the model, brings the blocks of a collection into one store.

Keys are made of content, so nothing has to be remembered between runs: a block that is tried again, because its worker
died or the whole ingestion was started once more, costs one look per chunk that is stored already.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from rag_blend.errors import install_hint
from rag_blend.ingest import IngestReport
from rag_blend.ray.blocks import Blocks, blocks_from, chunks_in
from rag_blend.ray.place import shared_place
from rag_blend.ray.source import Chunk, Item
from rag_blend.ray.worker import IngestWorker, WorkerSettings

try:
    import pyarrow as pa
    import ray
    from ray.data import ActorPoolStrategy
    from ray.exceptions import RayTaskError
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"{missing}; {install_hint('ray')}", name=missing.name) from None

if TYPE_CHECKING:
    from ray.data import Dataset


@dataclass(frozen=True, slots=True)
class BulkReport:
    """What one call of `ingest` did.

    Attributes:
        chunks: Chunks whose caches were computed and stored.
        tokens: Their tokens.
        bytes: What was written for them.
        skipped: Texts that were not computed; see `IngestReport`.
        seconds: Wall time.
        blocks: Blocks that were handed out.
        nodes: Chunks that each node has computed and stored, by its id in the cluster.
    """

    chunks: int
    tokens: int
    bytes: int
    skipped: int
    seconds: float
    blocks: int
    nodes: Mapping[str, int]


def ingest(
    source: Iterable[Item] | os.PathLike[str] | Dataset,
    *,
    model: str | os.PathLike[str],
    storage: str | os.PathLike[str],
    workers: int,
    head: str | Sequence[int] | None = None,
    doc_ids: Sequence[str] | None = None,
    namespace: str = "default",
    block: int = 64,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    progress: bool = True,
    **options: Any,
) -> BulkReport:
    """Prefill a collection on a Ray cluster and keep the caches, under the keys that `BlendEngine.ingest` gives them.

    Uses the cluster that this process is connected to, or what ``ray.init()`` finds or starts. When a worker dies, its
    block is tried again; when the whole run ends early, running it again computes what is missing.

    Args:
        source: Texts, LlamaIndex nodes or LangChain documents; a ``.jsonl`` or ``.parquet`` file of this machine, or a
            data set that Ray reads where it likes, with a column ``text`` and perhaps ``doc_id``. Each is one chunk,
            as it will stand in prompts.
        model: Hub id, or a directory that all nodes have.
        storage: Directory or URL that all nodes reach.
        workers: How many load the model; fewer work as long as the cluster has no room for all of them.
        head: See `BlendEngine.ingest`.
        doc_ids: One id per text, for `BlendEngine.forget`; of nodes and documents, instead of their own.
        namespace: See `BlendEngine`.
        block: Chunks that are handed out, and at worst lost, at once.
        num_cpus: Cores of a worker.
        num_gpus: GPUs of a worker; without one it computes on the CPU.
        progress: Show a progress bar.
        options: ``prime``, ``prime_tokens``, ``prime_texts``, ``exact_first``, ``kv_dtype``, ``codec``, ``device``,
            ``dtype`` and ``model_kwargs``, as for `BlendEngine.from_pretrained`.

    Raises:
        UnsupportedModelError: The model cannot be blended.
        ValueError: An argument is out of its range, or the storage cannot be shared.
        TypeError: An argument is of the wrong kind, or something that cannot be ingested.
        OSError: There is no such model, or the storage refused; what was written before stays.
    """
    started = time.perf_counter()
    if workers < 1 or block < 1:
        raise ValueError(f"workers and block must be at least 1, got {workers} and {block}")
    options.setdefault("device", None if num_gpus else "cpu")  # a GPU that Ray has not assigned may be somebody's
    local = Path(model).resolve() if Path(model).is_dir() else model  # workers have another working directory
    settings = WorkerSettings(local, shared_place(storage), head, namespace, **options)
    resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    with _told_as_by_an_engine():
        blocks = blocks_from(source, doc_ids, block, whole_documents=settings.prime == "preceding")
        # Where the workers will be, since the fingerprint depends on what they compute in. The process ends with it.
        prepare = ray.remote(max_calls=1, **resources)(_prepare)
        ray.get(prepare.remote(settings, blocks.sample))
        return _summed(_run(blocks, settings, workers, resources), blocks.num_chunks, progress, started)


class _Actor:
    """A worker as Ray Data wants it: called with a block, it reports in one row."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._worker = IngestWorker(settings)
        self._node = ray.get_runtime_context().get_node_id()

    def __call__(self, block: pa.Table) -> pa.Table:
        report = self._worker.ingest(chunks_in(block))
        return pa.Table.from_pylist([{"node": self._node, **asdict(report)}])


def _prepare(settings: WorkerSettings, sample: Sequence[Chunk]) -> None:
    IngestWorker(settings).prepare(sample)


def _run(blocks: Blocks, settings: WorkerSettings, workers: int, resources: Mapping[str, float]) -> Dataset:
    """One row per block, not computed yet."""
    # Where reading is left to Ray, it needs cores: the pool takes one worker's at first, and more while nobody reads.
    pool = ActorPoolStrategy(size=workers) if blocks.is_read else ActorPoolStrategy(min_size=1, max_size=workers)
    done = blocks.dataset.map_batches(
        _Actor,
        fn_constructor_args=(settings,),
        batch_size=blocks.batch_size,
        batch_format="pyarrow",
        compute=pool,
        **resources,
    )
    done.context.enable_progress_bars = False  # there is one, in chunks
    done.context.raise_original_map_exception = True  # not another one that has it in its text
    return done


def _summed(done: Dataset, num_chunks: int | None, progress: bool, started: float) -> BulkReport:
    total, blocks, nodes = IngestReport(), 0, Counter[str]()
    with tqdm(total=num_chunks, desc="KV caches", unit="chunk", disable=not progress) as bar:
        for row in done.iter_rows():
            blocks += 1
            nodes[row.pop("node")] += row["chunks"]
            total = IngestReport(**{name: value + row[name] for name, value in asdict(total).items()})
            bar.update(row["chunks"] + row["skipped"])
            bar.set_postfix_str(f"{total.bytes / 1e6:.0f} MB, {total.skipped} skipped")
    total = replace(total, seconds=time.perf_counter() - started)
    return BulkReport(**asdict(total), blocks=blocks, nodes=dict(nodes))


@contextmanager
def _told_as_by_an_engine() -> Iterator[None]:
    """What goes wrong in a worker is raised as what it is; Ray's account of it stays its cause."""
    try:
        yield
    except RayTaskError as error:
        raise error.cause from error
