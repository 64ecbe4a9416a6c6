"""Bulk ingestion on a Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import random_model, random_text, small_tokenizer

ray = pytest.importorskip("ray", reason="Ray is not installed here: make test-ray")

import psutil  # noqa: E402
import yaml  # noqa: E402
from ray.autoscaler._private.util import prepare_config, validate_config  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.data import from_items, read_json  # noqa: E402

import rag_blend.ray  # noqa: E402
from rag_blend import BlendEngine  # noqa: E402
from rag_blend.ray import BulkReport  # noqa: E402
from rag_blend.storage.disk import DiskBackend  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLES = Path(__file__).parent.parent / "examples" / "cluster"
HEAD = "<s>Answer the question, using only the text below, in a few words.\n\n"
PRIMING = {"prime_tokens": 32}
BLOCKS, BLOCK = 40, 16
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def node_ids() -> Iterator[set[str]]:
    """The two nodes of a cluster that this process is connected to; each has room for one worker."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield {node["NodeID"] for node in ray.nodes()}
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model().save_pretrained(path)
    small_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def ingest(node_ids: set[str], model_dir: Path, tmp_path: Path) -> Callable[..., BulkReport]:
    """`rag_blend.ray.ingest` into ``tmp_path / "kv"`` by two workers."""

    def run(source: Any, **options: Any) -> BulkReport:
        options = {"storage": tmp_path / "kv", "head": HEAD, "block": BLOCK, **PRIMING, **options}
        return rag_blend.ray.ingest(source, model=model_dir, workers=2, progress=False, **options)

    return run


def texts_of(number: int) -> list[str]:
    return [random_text(seed) for seed in range(number)]


def test_a_killed_worker_costs_its_block_and_nothing_else(
    ingest: Callable[..., BulkReport], node_ids: set[str], model_dir: Path, tmp_path: Path
) -> None:
    texts = texts_of(BLOCKS * BLOCK)
    documents = [f"block {number // BLOCK}" for number in range(len(texts))]
    with ThreadPoolExecutor(1) as executor:
        over = threading.Event()
        killing = executor.submit(kill_one_mid_block, tmp_path / "kv", over)
        try:
            report = ingest(texts, doc_ids=documents)
        finally:
            over.set()
        begun = killing.result()
    assert set(report.nodes) == node_ids and all(report.nodes.values())
    assert (report.blocks, report.chunks + report.skipped) == (BLOCKS, len(texts))
    # What was stored of the lost block was not computed again, and no other was tried. A chunk comes before its copy.
    assert report.skipped in [-(-keys // 2) for keys in begun]
    with BlendEngine.from_pretrained(model_dir, storage=tmp_path / "kv", **PRIMING) as engine:
        again = engine.ingest(texts, HEAD, documents, progress=False)
        assert (again.chunks, again.skipped) == (0, len(texts))  # whole, readable, and under an engine's keys


def kill_one_mid_block(directory: Path, over: threading.Event) -> list[int]:
    """Kill one of two workers when each has stored some of its block, but not all; returns how many keys."""
    while not over.wait(0.02):
        workers = [child for child in psutil.Process().children(recursive=True) if "MapWorker" in name_of(child)]
        if len(workers) < 2:
            continue
        backend = DiskBackend(directory)
        blocks = [set(keys) for _, keys in backend.documents()]
        for worker in workers:
            worker.suspend()
        stored = set(backend.keys())
        begun = [len(keys & stored) for keys in blocks if 0 < len(keys & stored) < len(keys)]
        if len(begun) == 2:
            workers[0].kill()
        for worker in workers:
            worker.resume()
        backend.close()
        if len(begun) == 2:
            return begun
    raise AssertionError("it was over before both workers were in the middle of a block")


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def test_a_second_run_computes_what_is_new(ingest: Callable[..., BulkReport]) -> None:
    texts = texts_of(3 * BLOCK)
    assert ingest(texts[:BLOCK]).chunks == BLOCK
    report = ingest(texts)
    assert (report.chunks, report.skipped, sum(report.nodes.values())) == (2 * BLOCK, BLOCK, 2 * BLOCK)


def test_files_and_data_sets_are_collections_too(ingest: Callable[..., BulkReport], tmp_path: Path) -> None:
    rows = [{"text": text, "doc_id": str(number)} for number, text in enumerate(texts_of(2 * BLOCK))]
    file = tmp_path / "chunks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ingest(file).chunks == len(rows)
    assert ingest(read_json(str(file))).skipped == len(rows)
    assert len(list(DiskBackend(tmp_path / "kv").documents())) == len(rows)


def test_what_goes_wrong_in_a_worker_is_told_as_an_engine_tells_it(
    ingest: Callable[..., BulkReport], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="there is no model directory"):
        rag_blend.ray.ingest(["text"], model=tmp_path / "missing", storage=tmp_path, workers=1)
    with pytest.raises(OSError, match="larger than the quota of 9,000 bytes"):
        ingest(texts_of(BLOCK), storage=f"disk://{tmp_path}/small?quota=9KB", head=None)


@pytest.mark.parametrize(
    ("source", "options", "error"),
    [
        (["text"], {"block": 0}, "block must be at least 1"),
        (["text"], {"selector": "heads"}, "unexpected keyword argument 'selector'"),
        (Path("chunks.csv"), {}, "pass a .jsonl or .parquet file"),
        (Path("chunks.jsonl"), {"doc_ids": ["a"]}, "its column 'doc_id'"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    ingest: Callable[..., BulkReport], source: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        ingest(source, **options)


def test_data_sets_need_texts_and_cannot_keep_documents_whole(ingest: Callable[..., BulkReport]) -> None:
    with pytest.raises(ValueError, match="no column 'text' among words"):
        ingest(from_items([{"words": "a"}]))
    with pytest.raises(ValueError, match="pass a list or a file"):
        ingest(from_items([{"text": "a"}]), prime="preceding")


def test_the_command_line_ingests_on_a_cluster(node_ids: set[str], model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("rag_blend_app.collection")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text(random_text(1))
    command = [sys.executable, "-m", "rag_blend", "ingest", "docs", "--model", model_dir, "--json", "--ray"]
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run([*command, address], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["report"]
    assert report["chunks"] == 1 and set(report["nodes"]) <= node_ids
    with BlendEngine.from_pretrained(model_dir, storage=tmp_path / "kv") as engine:
        assert engine.num_chunks == 2  # and the head


def test_the_example_cluster_is_one_that_ray_takes() -> None:
    given = yaml.safe_load((EXAMPLES / "cluster.yaml").read_text("utf-8"))
    prepared = prepare_config(given)
    validate_config(prepared)
    assert prepared["max_workers"] == len(given["provider"]["worker_ips"])


def test_the_example_job_names_the_ray_of_its_image() -> None:
    job = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text("utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {container["image"] for pod in pods for container in pod["template"]["spec"]["containers"]}
    assert len(images) == 1 and images.pop().endswith(f":{cluster['rayVersion']}")
    assert f"rayproject/ray:{cluster['rayVersion']}-" in (EXAMPLES / "Dockerfile").read_text("utf-8")


def test_the_example_ingests_parquet_files(model_dir: Path, node_ids: set[str], tmp_path: Path) -> None:
    from_items([{"text": text} for text in texts_of(BLOCK)]).write_parquet(str(tmp_path / "chunks"))
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, EXAMPLES / "ingest.py", tmp_path / "chunks", "--model", model_dir, "--workers", "1"]
    done = subprocess.run(
        [*command, "--storage", tmp_path / "kv"],
        env=os.environ | {"RAY_ADDRESS": address}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"chunks={BLOCK}," in done.stdout
