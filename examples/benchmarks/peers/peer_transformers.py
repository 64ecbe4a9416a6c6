"""Stock transformers: full prefill, or going on from what a prompt shares with the beginning of the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from protocol import Details, Peer, arguments, serve
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


class Transformers(Peer):
    def __init__(self, model: str, threads: int, dtype: str, prefix_cache: bool) -> None:
        torch.set_num_threads(threads)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
        self._prefix_cache = prefix_cache
        self._ids: list[int] = []
        self._cache: Any = DynamicCache()
        self.version = transformers.__version__
        self.settings = {
            "dtype": dtype,
            "attention": "sdpa",
            "threads": torch.get_num_threads(),
            "prefix cache": "the last prompt" if prefix_cache else "none",
            "torch": torch.__version__,
        }

    def first_token(self, prompt: str, found: Callable[[int], None]) -> None:
        ids: list[int] = self._tokenizer.encode(prompt)
        self._cached = self._keep_prefix(ids)
        self._ids = ids
        output = self._model.generate(
            torch.tensor([ids]),
            cache=self._cache,
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        self._logits = output.logits[0][0].float()
        found(int(output.sequences[0, -1]))

    def details(self) -> Details:
        return Details(len(self._ids), self._cached, self._logits.log_softmax(-1).numpy().tobytes())

    def _keep_prefix(self, ids: list[int]) -> int:
        """Leave in the cache what `ids` begins with, but not all of it: the last token's logits are needed."""
        shared = 0
        if self._prefix_cache:
            differing = (at for at, (old, new) in enumerate(zip(self._ids, ids, strict=False)) if old != new)
            shared = min(next(differing, len(self._ids)), len(ids) - 1)
        if not shared:
            self._cache = DynamicCache()
        elif shared < len(self._ids):
            self._cache.crop(shared - len(self._ids))  # negative: so many are taken off
        return shared


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prefix-cache", action="store_true", help="go on from the last prompt")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    serve(lambda: Transformers(args.model, args.threads, args.dtype, args.prefix_cache))


if __name__ == "__main__":
    main()
