"""The TTFT bench: from a prompt's text to the first token, by everything a user could do with the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.divergence import kl
from rag_blend.engine import BlendEngine
from rag_blend.evaluation.environment import environment_of
from rag_blend.evaluation.journal import configuration_of
from rag_blend.evaluation.policies import Policy
from rag_blend.evaluation.speed.contestants import Blending, Contestant, FirstToken, FullPrefill, PrefixCached
from rag_blend.evaluation.speed.ideal import ideal_seconds
from rag_blend.evaluation.speed.report import SpeedReport
from rag_blend.evaluation.speed.rounds import Round, Samples, run_rounds
from rag_blend.evaluation.speed.texts import Texts, require_fit
from rag_blend.evaluation.speed.timing import Timed, in_turns, timed
from rag_blend.evaluation.speed.ttft_view import CASES, COLD, OTHER_ORDER, SAME_PREFIX, SAME_PROMPT, VIEW, rows_of

FULL = FullPrefill.name
POLICIES = {
    "CacheBlend as published": Policy.parse("none/hkvd:0.15,reuse_when=possible"),
    "rag_blend, heads": Policy.parse("sample/heads"),
    "rag_blend, default": Policy.parse("default"),
}
_WITH_IDEAL = (FULL, *POLICIES)


class RoundPrompts(NamedTuple):
    """The prompts of one round; those of other rounds have no chunk in common with them.

    Attributes:
        chunks: What is ingested in advance.
        first_order: Those chunks, as a prefix cache has met them.
        prompts: What is timed, by case. The first three are about chunks that nobody has ingested.
    """

    chunks: Sequence[str]
    first_order: str
    prompts: dict[str, str]

    @classmethod
    def drawn_from(cls, texts: Texts, num_chunks: int) -> RoundPrompts:
        """The next ones.

        Raises:
            ValueError: There is not enough text.
        """
        unknown, known = texts.chunks(num_chunks), texts.chunks(num_chunks)
        question, other = texts.question(), texts.question()
        cold = texts.prompt(unknown, question)
        prompts = {
            COLD: cold,
            SAME_PROMPT: cold,
            SAME_PREFIX: texts.prompt(unknown, other),
            OTHER_ORDER: texts.prompt(known[::-1], other),
        }
        return cls(known, texts.prompt(known, question), prompts)


def measure_ttft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    lengths: Sequence[int],
    rounds: int,
    out: Path,
    engine_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> SpeedReport:
    """Measure all contestants on the same prompts.

    Args:
        model: The model, which all share.
        tokenizer: Its tokenizer.
        texts: What prompts are made of.
        lengths: Tokens of the chunks in a prompt; its head and question come on top.
        rounds: How often each is measured, each time on other texts.
        out: Keeps what was measured, so that a run resumes; caches are below it while it runs.
        engine_options: More arguments of all engines; None: each decides by itself whether reuse is worth it.
        progress: Show progress bars.

    Raises:
        UnsupportedModelError: The model cannot be blended correctly.
        PromptTooLongError: A prompt does not fit the context window.
        ValueError: A length has no room for two chunks, or there is too little text.
        OSError: `out` cannot be used.
    """
    for length in lengths:
        if length < 2 * texts.chunk_tokens:
            raise ValueError(f"length {length} has no room for two chunks of {texts.chunk_tokens} tokens")
    drawn = [
        (length, RoundPrompts.drawn_from(texts, length // texts.chunk_tokens))
        for length in lengths
        for _ in range(rounds)
    ]
    require_fit(model, tokenizer, (prompt for _, prompts in drawn for prompt in prompts.prompts.values()))
    settings = {"chunk tokens": texts.chunk_tokens, "rounds": rounds, "texts": texts.source}
    options = dict(engine_options or {})

    def prepare(stack: ExitStack) -> Round:
        storage = Path(stack.enter_context(TemporaryDirectory(prefix="kv-", dir=out)))
        bench = _Bench(model, tokenizer, storage, options, stack)
        bench.ingest([prompts for _, prompts in drawn], progress)
        bench.round(*drawn[0], 0)  # lazy imports, thread pools: the first run of anything is not like the others
        return lambda turn: bench.round(*drawn[turn], turn)

    configuration = configuration_of(model, tokenizer, bench=VIEW.name, prompts=drawn, options=options)
    samples = run_rounds(out, configuration, len(drawn), prepare, progress)
    return SpeedReport(VIEW, environment_of(model), settings, rows_of(samples))


class _Bench:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        storage: Path,
        options: Mapping[str, Any],
        stack: ExitStack,
    ) -> None:
        self._model = model
        self._blending = []
        for name, policy in POLICIES.items():
            engine = BlendEngine(model, tokenizer, storage, **{**policy.engine_arguments, **options})
            self._blending.append(Blending(name, stack.enter_context(engine), policy))
        self._contestants: list[Contestant] = [
            FullPrefill(model, tokenizer),
            PrefixCached(model, tokenizer),
            *self._blending,
        ]

    def ingest(self, drawn: Sequence[RoundPrompts], progress: bool) -> None:
        """Store the chunks that prompts are about in another order, once per way of priming."""
        chunks = [chunk for prompts in drawn for chunk in prompts.chunks]
        for contestant in self._blending:  # those that prime alike find everything there
            contestant.ingest(chunks, progress)

    def round(self, length: int, prompts: RoundPrompts, turn: int) -> Samples:
        """Every case by everyone, one case after the other."""
        for contestant in self._contestants:
            contestant.forget()
        samples: Samples = []
        for case in CASES:
            if case == OTHER_ORDER:
                for contestant in self._contestants:
                    contestant.forget()
                    contestant.meet(prompts.first_order)
            samples += self._case(length, case, prompts.prompts[case], turn)
        return samples

    def _case(self, length: int, case: str, prompt: str, turn: int) -> Samples:
        runs: dict[str, Timed[FirstToken]] = {}
        ideal: dict[str, float | None] = {}
        for contestant in in_turns(self._contestants, turn):
            run = runs[contestant.name] = timed(partial(contestant.first_token, prompt))
            if case == OTHER_ORDER and contestant.name in _WITH_IDEAL:  # at once: the machine is as busy as it was
                ideal[contestant.name] = self._ideal_s(run.value)
        full = runs[FULL]
        samples = []
        for name in (contestant.name for contestant in self._contestants):
            run = runs[name]
            samples.append(
                {
                    "length": length,
                    "case": case,
                    "contestant": name,
                    "prompt_tokens": run.value.prompt_tokens,
                    "rows": run.value.rows,
                    "wall_s": run.wall_s,
                    "cpu_s": run.cpu_s,
                    "gain": full.wall_s / run.wall_s,
                    "kl": float(kl(full.value.logits[None], run.value.logits[None])),
                    "ideal_s": ideal.get(name),
                }
            )
        return samples

    def _ideal_s(self, first: FirstToken) -> float | None:
        alone = ideal_seconds(self._model, max(1, round(first.rows)), first.prompt_tokens)
        return None if alone is None else alone.wall_s
