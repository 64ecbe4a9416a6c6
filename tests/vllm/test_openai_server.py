"""vLLM's OpenAI server with two ranks, in processes of its own, asked by the `openai` package: our clients' base."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import random_model, random_text, small_tokenizer

pytest.importorskip("vllm.config", reason="vLLM is not installed here: make test-vllm")

import httpx
import openai
from vllm_server import CLOSE, SECRET, WORKER, fields_of, keys_in, transfer_config

from rag_blend import BlendEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
APART = 1e-2  # what blending without recompute does to this model is more
TEXTS = [random_text(seed) for seed in range(3)]
DAMAGED = random_text(3)
Messages = list[dict[str, str]]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAG_BLEND_SECRET": SECRET,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class Place(NamedTuple):
    """A directory with a model, and the caches of all texts behind the chat template's head."""

    path: Path
    damaged: Path  # the entry of the text that will be


def messages_of(texts: list[str]) -> Messages:
    return [{"role": "user", "content": "\n\n".join(texts) + "\n\nold new red green?"}]


def rendered(messages: Messages) -> str:
    return str(small_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("server")
    random_model(hidden_size=128, num_hidden_layers=4).save_pretrained(path / "model")
    small_tokenizer().save_pretrained(path / "model")
    head = rendered(messages_of(TEXTS)).partition(TEXTS[0])[0]
    with BlendEngine.from_pretrained(
        path / "model", str(path / "kv"), prime="none", kv_dtype=torch.float32, reuse_when="possible"
    ) as engine:
        engine.ingest(TEXTS, head, progress=False)
        before = keys_in(path / "kv")
        engine.ingest([DAMAGED], head, progress=False)
    (key,) = keys_in(path / "kv") - before
    (entry,) = [file for file in (path / "kv").rglob(f"{key}*") if file.is_file()]
    return Place(path, entry)


@pytest.fixture(scope="module")
def url(place: Place) -> Iterator[str]:
    path = place.path
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {
        "model": str(path / "model"), "served-model-name": "tiny", "host": "127.0.0.1", "port": port,
        "dtype": "float32", "max-model-len": 1024, "block-size": 32, "tensor-parallel-size": 2, "worker-cls": WORKER,
        "kv-transfer-config": json.dumps(transfer_config(path / "kv")),
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    with (path / "log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=path, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server, path / "log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # its children, too
        server.wait()


def _wait_for(health: str, server: subprocess.Popen[bytes], log: Path) -> None:
    while server.poll() is None:
        try:
            if httpx.get(health).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(log.read_text()[-4000:])


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="-") as client:
        yield client


@pytest.fixture
def ask(client: openai.OpenAI) -> Callable[..., Any]:
    def ask(fields: dict[str, Any] | None, texts: list[str] = TEXTS, **options: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=messages_of(texts), max_tokens=4, temperature=0, extra_body=fields, **options
        )

    return ask


def first_token(answer: Any) -> dict[str, float]:
    """Log probabilities of the 20 best, by token."""
    return {token.token: token.logprob for token in answer.choices[0].logprobs.content[0].top_logprobs}


def apart(one: Any, other: Any) -> float:
    """Largest difference between the log probabilities of one answer's 10 best first tokens in both."""
    here, there = first_token(one), first_token(other)
    best = sorted(here, key=here.__getitem__)[-10:]
    return max(abs(here[token] - there.get(token, float("-inf"))) for token in best)


def test_an_answer_says_what_was_reused(ask: Any) -> None:
    said = ask(fields_of("none")).kv_transfer_params["rag_blend"]
    assert said["reused_tokens"] > 150 and said["recomputed_tokens"] == 0


def test_everything_recomputed_is_the_plain_answer(ask: Any) -> None:
    plain, blended = ask(None), ask(fields_of("all"))
    assert plain.kv_transfer_params is None
    assert blended.kv_transfer_params["rag_blend"]["recomputed_tokens"] > 150
    assert blended.choices[0].message.content == plain.choices[0].message.content


def test_completions_are_blended_too(client: openai.OpenAI) -> None:
    texts = list(reversed(TEXTS))
    answer = client.completions.create(
        model="tiny", prompt=rendered(messages_of(texts)), max_tokens=1, extra_body=fields_of("random", 0.2)
    )
    said = answer.kv_transfer_params["rag_blend"]
    assert said["reused_tokens"] > 100 and said["recomputed_tokens"] > 10


def test_a_chunk_that_is_damaged_while_serving_is_computed(ask: Any, place: Place) -> None:
    """Another ratio is another recipe, so that vLLM's prefix cache does not answer."""
    texts = [TEXTS[0], DAMAGED]
    options = {"texts": texts, "logprobs": True, "top_logprobs": 20}
    plain, sound = ask(None, **options), ask(fields_of("random", 0.01), **options)
    assert apart(sound, plain) > APART
    data = bytearray(place.damaged.read_bytes())
    data[-100] ^= 1
    place.damaged.write_bytes(data)
    damaged = ask(fields_of("random", 0.02), **options)
    assert apart(damaged, plain) < CLOSE
    reused = [answer.kv_transfer_params["rag_blend"]["reused_tokens"] for answer in (sound, damaged)]
    assert reused[0] - 50 > reused[1] > 50, "the text that stands where it was cached is still reused"


def test_streams_do_not_say_it(ask: Any) -> None:
    """docs/vllm.md says so; our clients report it from whatever piece it comes in."""
    pieces = list(ask(fields_of("heads"), stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].usage.completion_tokens == 4
    assert not any("kv_transfer_params" in piece.model_extra for piece in pieces)
