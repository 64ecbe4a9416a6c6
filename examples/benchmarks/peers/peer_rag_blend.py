"""rag_blend: texts are ingested behind their head when they are prepared, and blended into prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from protocol import Details, Peer, arguments, serve
from transformers import LogitsProcessor

import rag_blend
from rag_blend import BlendEngine


class FirstLogits(LogitsProcessor):
    """Keeps the logits from which the first token is chosen."""

    taken: torch.Tensor

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.taken = scores[0].float()
        return scores


class RagBlend(Peer):
    def __init__(self, model: str, threads: int, directory: str, dtype: str, options: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        self._engine = BlendEngine.from_pretrained(model, storage=directory, dtype=dtype, **options)
        self._first = FirstLogits()
        self.version = rag_blend.__version__
        self.settings = {
            "dtype": dtype,
            "threads": torch.get_num_threads(),
            "policy": str(self._engine.policy),
            "storage": "a directory",
            "torch": torch.__version__,
        }

    def prepare(self, head: str, texts: Sequence[str]) -> None:
        self._engine.ingest(texts, head=head, progress=False)

    def first_token(self, prompt: str, found: Callable[[int], None]) -> None:
        answer = self._engine.generate(prompt, max_new_tokens=1, do_sample=False, logits_processor=[self._first])
        found(int(self._first.taken.argmax()))
        self._stats = answer.stats

    def details(self) -> Details:
        cached = self._stats.prefix_tokens + self._stats.reused_tokens
        return Details(self._stats.prompt_tokens, cached, self._first.taken.log_softmax(-1).numpy().tobytes())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--selector", help="another than the default")
    args = parser.parse_args()
    options = {"selector": args.selector} if args.selector else {}
    serve(lambda: RagBlend(args.model, args.threads, args.directory, args.dtype, options))


if __name__ == "__main__":
    main()
