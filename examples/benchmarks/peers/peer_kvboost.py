"""kvboost: its own chunk cache in front of a float32 model. Its clock is not used, it starts too late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata

import torch
from kvboost import KVBoost
from protocol import Details, Peer, arguments, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

CACHE_BYTES = 4 * 2**30  # so that nothing is displaced, as nothing is with the other peers
CACHE_CHUNKS = 2**20


class KvBoost(Peer):
    def __init__(self, model: str, threads: int, strategy: str) -> None:
        torch.set_num_threads(threads)
        self._engine = KVBoost(
            # Its from_pretrained loads float16, which most CPUs compute many times slower.
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
            AutoTokenizer.from_pretrained(model),
            max_cache_bytes=CACHE_BYTES,
            max_chunks=CACHE_CHUNKS,
            recompute_strategy=strategy,
            device="cpu",
        )
        self.version = metadata.version("kvboost")
        self.settings = {
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "strategy": strategy,
            "chunk tokens": self._engine.chunk_registry.chunk_size,
            "torch": torch.__version__,
        }

    def prepare(self, head: str, texts: Sequence[str]) -> None:
        # All in one: where a chunk stands is part of what it caches.
        self._engine.warm(head + "".join(texts))

    def first_token(self, prompt: str, found: Callable[[int], None]) -> None:
        self._result = self._engine.generate(prompt, max_new_tokens=1, on_token=found)  # stores the rest after `found`

    def details(self) -> Details:
        logits = torch.from_numpy(self._result.first_token_logits)
        return Details(self._result.prompt_tokens, self._result.cached_tokens, logits.log_softmax(-1).numpy().tobytes())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--strategy", default="selective", choices=["none", "selective", "cacheblend"])
    args = parser.parse_args()
    serve(lambda: KvBoost(args.model, args.threads, args.strategy))


if __name__ == "__main__":
    main()
