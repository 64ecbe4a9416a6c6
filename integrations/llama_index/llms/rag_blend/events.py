"""One event per answered prompt in LlamaIndex's instrumentation, and in words why not more was reused."""

from llama_index_instrumentation.base import BaseEvent

from rag_blend import GenerationStats


class BlendEvent(BaseEvent):
    """What happened to one prompt. Belongs to the span of the LLM call; comes before the call's own end event.

    `prompt_tokens` = `prefix_tokens` (reused exactly) + `reused_tokens` (from chunks cached elsewhere) +
    `recomputed_tokens` (of such chunks) + `fresh_tokens` (covered by nothing). Times are in seconds.
    """

    model_name: str
    mode: str
    prompt_tokens: int
    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    completion_tokens: int
    recompute_ratio: float
    hits: int
    declined: int
    misses: int
    misses_elsewhere: int
    load_s: float
    ttft_s: float
    note: str

    @classmethod
    def class_name(cls) -> str:
        """Return the name that handlers show."""
        return "BlendEvent"


def explain(stats: GenerationStats, foreign_head: bool, full_prefill: bool) -> str:
    """Say why not more of a prompt was reused.

    Args:
        stats: What was reused and computed.
        foreign_head: The prompt begins with none of the heads that chunks were cached behind.
        full_prefill: The engine does not blend at all.

    Returns:
        One or two clauses.
    """
    if full_prefill and stats.mode == "full":
        return "this engine answers by full prefill: the model cannot be blended, or calibration says so"
    clauses = []
    elsewhere = stats.misses_elsewhere
    if elsewhere and foreign_head:
        clauses.append(
            f"{elsewhere} cached chunks lie in the prompt, but it begins with another text than the one they were "
            "cached behind (template, system prompt, refine step, chat engine)"
        )
    elif elsewhere:
        clauses.append(f"{elsewhere} cached chunks lie in the prompt, but were cached behind another head")
    if lost := stats.misses - elsewhere:
        clauses.append(f"{lost} cached chunks lie in the prompt, but are lost or damaged: ingest again")
    if stats.mode == "full" and not stats.misses and not stats.declined:
        clauses.append("no cached chunk and no earlier prompt was found in the prompt")
    if stats.declined:
        clauses.append(f"{stats.declined} cached chunks were left alone, since computing them takes no longer")
    if stats.recomputed_tokens:
        clauses.append(f"{stats.recomputed_tokens} tokens of cached chunks were recomputed")
    if stats.mode != "full" and stats.fresh_tokens:
        clauses.append(f"{stats.fresh_tokens} tokens are neither in a cached chunk nor in an earlier prompt")
    return "; ".join(clauses)
