"""OpenVINO GenAI: a GGUF file as it is, prefix caching on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino
import openvino_genai
from protocol import Details, Peer, arguments, serve

CACHE_GB = 4  # so that nothing is displaced, as nothing is with the other peers
LONGEST_PROMPT = 2**15  # tokens; a shorter one is computed in one go


class OpenVino(Peer):
    """It takes the cores that it is confined to. INFERENCE_NUM_THREADS=2 left one of two of them idle."""

    def __init__(self, model: str, precision: str | None) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = LONGEST_PROMPT
        properties: dict[str, Any] = {"scheduler_config": scheduler}
        if precision is not None:
            properties["INFERENCE_PRECISION_HINT"] = precision
        self._pipeline = openvino_genai.LLMPipeline(model, "CPU", **properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._options = openvino_genai.GenerationConfig(max_new_tokens=1, ignore_eos=True, do_sample=False)
        self.version = openvino_genai.__version__
        picked = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
        self.settings = {
            "weights": Path(model).name,
            "precision": precision or f"{picked}, its default here",
            "cores": len(os.sched_getaffinity(0)),
            "prefix cache": "on",
        }

    def first_token(self, prompt: str, found: Callable[[int], None]) -> None:
        inputs = self._tokenizer.encode(prompt)
        output = self._pipeline.generate(inputs, self._options)
        found(int(output.tokens[0][0]))
        self._prompt_tokens = int(inputs.input_ids.shape[1])

    def details(self) -> Details:
        return Details(self._prompt_tokens)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--precision", help="to compute in, for example f32; without it, what OpenVINO picks")
    args = parser.parse_args()
    serve(lambda: OpenVino(args.model, args.precision))


if __name__ == "__main__":
    main()
