#!/usr/bin/env bash
# A vLLM server that answers from the ingested store: vllm.sh MODEL STORE [more options of vllm serve]
#
#   one GPU         vllm.sh MODEL redis://HOST:6379/0
#   four GPUs       vllm.sh MODEL s3://BUCKET/kv?region=REGION --tensor-parallel-size 4
#   several hosts   the same on each, with the same RAG_BLEND_SECRET, behind nginx.conf
#
# docs/vllm.md says what is reused, refused and safe.
set -euo pipefail
model=$1
store=$2
shift 2
exec vllm serve "$model" --worker-cls rag_blend.vllm.worker.BlendWorker --kv-transfer-config '{
  "kv_connector": "BlendConnector",
  "kv_connector_module_path": "rag_blend.vllm.connector",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"storage": "'"$store"'"}}' "$@"
