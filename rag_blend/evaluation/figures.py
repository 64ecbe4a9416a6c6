"""Figures 6, 7 and 8 of the CacheBlend paper (arXiv 2405.16444), measured on a model of ours.

6. The more of the tokens with high KV deviation are recomputed, the smaller the attention deviation.
7. Few tokens of a layer have a much higher KV deviation than the others.
8. Tokens with a high KV deviation in one layer are likely to have one in the next.

Each is measured twice: on caches of chunks that were prefilled directly behind the head, as in the paper, and on primed
ones (docs/architecture.md, Priming text).
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_blend.engine import BlendEngine
from rag_blend.evaluation.cases import Case
from rag_blend.evaluation.deviation import Floats, PromptDeviation, PromptSpans, spearman
from rag_blend.evaluation.figure_plots import (
    AttentionLine,
    DeviationLine,
    RankLine,
    plot_attention,
    plot_deviation,
    plot_ranks,
    require_matplotlib,
)
from rag_blend.evaluation.prompts import case_ids, head_ids
from rag_blend.prompt import chunk_ids

logger = logging.getLogger(__name__)

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
SELECTORS = ("hkvd", "heads", "random", "anchor")
CACHES = {"unprimed": "none", "primed": "sample"}  # what the engine calls them
_NUM_LAYERS = 5  # that figure 7 shows; more lines cannot be told apart


@dataclass(frozen=True, slots=True)
class CacheDeviation:
    """All that is measured on one kind of cache.

    Attributes:
        reuse: Attention deviation of the question and of the last token with nothing recomputed, (num_prompts, 2).
        attention: The same and the computed share, by selector, (num_prompts, num_ratios, 3).
        later: For each prompt the KV deviation of the tokens of all chunks but the first, (num_layers, num_tokens).
        first: The same of the first chunk's tokens.
    """

    reuse: Floats
    attention: dict[str, Floats]
    later: list[Floats]
    first: list[Floats]


def draw_figures(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cases: Sequence[Case], out: Path
) -> list[Path]:
    """Measure and draw the three figures.

    The caches are stored in the model's own dtype, in a temporary directory within `out`: what is shown is the effect
    of reuse, not that of rounding.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        cases: What to ask about which passages. Those with fewer than two passages of 16 tokens are left out.
        out: Directory for the figures; made if need be.

    Returns:
        What was written: a PNG and a JSON file with the same numbers for each figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: There is no case with two passages.
    """
    require_matplotlib()
    out.mkdir(parents=True, exist_ok=True)
    prompts = _usable([spans_of(tokenizer, case) for case in cases])
    passages = [passage.prompt_text for case in cases for passage in case.passages]
    measured = {}
    for cache, prime in CACHES.items():
        with (
            tempfile.TemporaryDirectory(dir=out) as storage,
            BlendEngine(
                model,
                tokenizer,
                storage,
                prime=prime,
                exact_first=False,  # what priming does to a first chunk is shown, too
                kv_dtype=model.dtype,
                prefix_cache_bytes=0,
                reuse_when="possible",
            ) as engine,
        ):
            engine.ingest(passages, head=head_ids(tokenizer))
            measured[cache] = measure(model, engine, tqdm(prompts, desc=f"deviation, {cache}", unit="prompt"))
            name = Path(engine.model_name).name
    n = f"{name}, n = {len(prompts)} prompts"
    tokens = f"{n}, {sum(len(prompt.later) for prompt in prompts)} tokens behind the first chunk"
    return [
        *plot_attention(attention_lines(measured), f"Attention deviation by recompute ratio\n{n}", out / "figure6"),
        *plot_deviation(deviation_lines(measured), f"KV deviation of reused tokens\n{tokens}", out / "figure7"),
        *plot_ranks(rank_lines(measured), f"KV deviation from layer to layer\n{tokens}", out / "figure8"),
    ]


def spans_of(tokenizer: PreTrainedTokenizerBase, case: Case) -> PromptSpans:
    """A case's prompt, and where its passages lie in it."""
    ids, head = (np.asarray(ids, dtype=np.int32) for ids in (case_ids(tokenizer, case), head_ids(tokenizer)))
    return PromptSpans.locate(ids, head, chunk_ids(tokenizer, [passage.prompt_text for passage in case.passages]))


def measure(
    model: PreTrainedModel,
    engine: BlendEngine,
    prompts: Iterable[PromptSpans],
    selectors: Sequence[str] = SELECTORS,
    ratios: Sequence[float] = RATIOS,
) -> CacheDeviation:
    """Measure what the figures show, on the caches that an engine has.

    Args:
        model: The engine's model.
        engine: Has ingested the prompts' chunks.
        prompts: At least one.
        selectors: Names of the selectors of figure 6.
        ratios: Its x axis.

    Raises:
        ValueError: Nothing of a prompt is stored.
    """
    reuse = []
    attention: dict[str, list[list[Sequence[float]]]] = {selector: [] for selector in selectors}
    later, first = [], []
    for prompt in prompts:
        deviation = PromptDeviation(model, engine, prompt)
        kv = deviation.kv().astype(np.float64)
        later.append(kv[:, prompt.later])
        first.append(kv[:, slice(*prompt.chunks[0])])
        reuse.append(deviation.attention("none", 0.0)[:2])
        full = deviation.attention("all", 1.0)  # what the engine does at ratio 1, whatever the selector
        for selector in selectors:
            blended = (full if ratio == 1.0 else deviation.attention(selector, ratio) for ratio in ratios)
            attention[selector].append(list(blended))
    return CacheDeviation(np.array(reuse), {name: np.array(rows) for name, rows in attention.items()}, later, first)


def attention_lines(measured: dict[str, CacheDeviation], ratios: Sequence[float] = RATIOS) -> list[AttentionLine]:
    """The lines of figure 6: attention deviation of each prompt, divided by that of plain reuse of unprimed caches.

    (Not by that of the selector itself at ratio 0: `hkvd` has computed everything up to its check layer even then.)
    """
    lines = []
    for cache, deviation in measured.items():
        for selector, values in deviation.attention.items():
            relative = values[..., :2] / measured["unprimed"].reuse[:, None]
            mean = relative.mean(axis=0)
            error = relative.std(axis=0, ddof=1) / len(relative) ** 0.5 if len(relative) > 1 else np.zeros_like(mean)
            lines.append(
                AttentionLine(
                    cache=cache,
                    selector=selector,
                    ratios=list(ratios),
                    computed=values[..., 2].mean(axis=0).tolist(),
                    question=mean[:, 0].tolist(),
                    question_error=error[:, 0].tolist(),
                    last=mean[:, 1].tolist(),
                    last_error=error[:, 1].tolist(),
                )
            )
    return lines


def deviation_lines(measured: dict[str, CacheDeviation]) -> list[DeviationLine]:
    """The lines of figure 7, for some layers from the second to the last: in layer 0 nothing deviates.

    The tokens of the first chunk are left out of both kinds of cache, since an unprimed one holds them exactly.
    """
    lines = []
    for cache, deviation in measured.items():
        later, first = np.concatenate(deviation.later, axis=1), np.concatenate(deviation.first, axis=1)
        for layer in np.unique(np.linspace(1, len(later) - 1, _NUM_LAYERS).round().astype(int)).tolist():
            percentiles = np.percentile(later[layer], np.arange(101)).tolist()
            lines.append(DeviationLine(cache, layer, later.shape[1], percentiles, float(first[layer].mean())))
    return lines


def rank_lines(measured: dict[str, CacheDeviation]) -> list[RankLine]:
    """The lines of figure 8, over the same tokens as figure 7 (exact ones would be last in every layer)."""
    lines = []
    for cache, deviation in measured.items():
        layers = list(range(1, len(deviation.later[0]) - 1))
        by_prompt = np.array([[spearman(kv[i], kv[i + 1]) for i in layers] for kv in deviation.later])
        mean, lowest, highest = (f(by_prompt, axis=0).tolist() for f in (np.mean, np.min, np.max))
        lines.append(RankLine(cache, layers, mean, lowest, highest))
    return lines


def _usable(prompts: Sequence[PromptSpans]) -> list[PromptSpans]:
    usable = [prompt for prompt in prompts if len(prompt.chunks) > 1]
    if len(usable) < len(prompts):
        logger.warning("%d of %d cases have no two passages to reuse", len(prompts) - len(usable), len(prompts))
    if not usable:
        raise ValueError("the figures need cases with at least two passages of 16 tokens")
    return usable
