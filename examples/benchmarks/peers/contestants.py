"""Who takes part. A new peer is one entry here, and a script that speaks `protocol`."""

from __future__ import annotations

from dataclasses import dataclass

from environments import Environment

from rag_blend.evaluation.speed.peers import REFERENCE

TRANSFORMERS = Environment("transformers", pip=(("torch", "transformers"),))
OPENVINO = Environment("openvino", pip=(("openvino-genai==2026.4.1.0",),))
KVBOOST = Environment("kvboost", pip=(("torch", "transformers"), ("--no-deps", "kvboost==0.9.0")))
LLAMA_CPP = Environment("llama_cpp", npm=("node-llama-cpp@3.21.1", "@node-llama-cpp/{platform}@3.21.1"))


@dataclass(frozen=True)
class Contestant:
    """One peer.

    Attributes:
        name: In results, and of its files.
        script: Beside this file.
        environment: What it runs in. None: the one that the driver runs in.
        weights: ``"hf"``, a Hugging Face directory, or the format of a GGUF file, such as ``"Q4_0"``.
        options: More arguments of its script.
    """

    name: str
    script: str
    environment: Environment | None
    weights: str = "hf"
    options: tuple[str, ...] = ()


CONTESTANTS = (
    Contestant(REFERENCE, "peer_transformers.py", TRANSFORMERS),
    Contestant("transformers-prefix-cache", "peer_transformers.py", TRANSFORMERS, options=("--prefix-cache",)),
    Contestant("openvino-Q4_1", "peer_openvino.py", OPENVINO, "Q4_1"),
    Contestant("openvino-F16", "peer_openvino.py", OPENVINO, "F16"),
    Contestant("openvino-F16-f32", "peer_openvino.py", OPENVINO, "F16", ("--precision", "f32")),
    Contestant("llama.cpp-Q4_0", "peer_llama_cpp.mjs", LLAMA_CPP, "Q4_0"),
    Contestant("llama.cpp-Q8_0", "peer_llama_cpp.mjs", LLAMA_CPP, "Q8_0"),
    Contestant("kvboost", "peer_kvboost.py", KVBOOST),
    Contestant("kvboost-none", "peer_kvboost.py", KVBOOST, options=("--strategy", "none")),
    Contestant("rag_blend", "peer_rag_blend.py", None),
    Contestant("rag_blend-heads", "peer_rag_blend.py", None, options=("--selector", "heads")),
)

BFLOAT16 = (
    Contestant("transformers-bf16", "peer_transformers.py", TRANSFORMERS, options=("--dtype", "bfloat16")),
    Contestant("rag_blend-bf16", "peer_rag_blend.py", None, options=("--dtype", "bfloat16")),
    Contestant(
        "rag_blend-heads-bf16", "peer_rag_blend.py", None, options=("--dtype", "bfloat16", "--selector", "heads")
    ),
)
"""Only for CPUs that compute in bfloat16 (AMX, AVX512_BF16); others take many times as long."""
