"""Ingest Parquet files of chunks on the Ray cluster that this runs in; run it again to go on, or for what is new.

python ingest.py s3://bucket/chunks/ --model path/or/hub-id --storage s3://bucket/kv --workers 4 --gpus 1

The files have a column `text`, a chunk as it will stand in prompts, and perhaps `doc_id`, which `engine.forget` takes.
"""

import argparse
from pathlib import Path

import ray.data

import rag_blend.ray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", help="a file or directory that all nodes can read, or a URL")
    parser.add_argument("--model", required=True)
    parser.add_argument("--storage", required=True, help="a directory or URL that all nodes reach")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--gpus", type=float, default=0.0, help="of each worker")
    parser.add_argument("--head-file", type=Path, help="what stands in front of the first chunk of a prompt")
    arguments = parser.parse_args()
    report = rag_blend.ray.ingest(
        ray.data.read_parquet(arguments.files),
        model=arguments.model,
        storage=arguments.storage,
        workers=arguments.workers,
        num_gpus=arguments.gpus,
        head=arguments.head_file and arguments.head_file.read_text("utf-8"),
    )
    print(report)


if __name__ == "__main__":
    main()
