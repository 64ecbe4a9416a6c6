"""Ingest a JSON lines file of chunks with vLLM, beside its servers; run it again to go on, or for what is new.

python vllm_ingest.py chunks.jsonl --model path/or/hub-id --storage s3://bucket/kv --tensor-parallel-size 4

Each line has a `text`, a chunk as it will stand in prompts, and perhaps a `doc_id`, which `engine.forget` takes.
"""

import argparse
import json
from pathlib import Path

from vllm import LLM

from rag_blend.vllm.ingest import ingest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--storage", required=True, help="as the servers have it")
    parser.add_argument("--head-file", type=Path, help="what stands in front of the first chunk of a prompt")
    parser.add_argument("--dtype", default="auto", help="as the servers have it")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, help="head, priming text and chunk together; default: the model's")
    arguments = parser.parse_args()
    with arguments.file.open(encoding="utf-8") as lines:
        chunks = [json.loads(line) for line in lines if line.strip()]
    llm = LLM(
        model=arguments.model,
        dtype=arguments.dtype,
        tensor_parallel_size=arguments.tensor_parallel_size,
        max_model_len=arguments.max_model_len,
        worker_cls="rag_blend.vllm.worker.BlendWorker",
        kv_transfer_config={
            "kv_connector": "BlendConnector",
            "kv_connector_module_path": "rag_blend.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"storage": arguments.storage},
        },
    )
    report = ingest(
        llm,
        [chunk["text"] for chunk in chunks],
        arguments.head_file and arguments.head_file.read_text("utf-8"),
        [chunk.get("doc_id", "") for chunk in chunks],
    )
    print(report)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
