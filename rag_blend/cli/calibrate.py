"""``rag-blend calibrate``: find the cheapest recomputation that is good enough, and have engines follow it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_blend.cli.common import (
    ExactFirstOption,
    ModelOption,
    OwnDtypeOption,
    PassagesOption,
    PrimeOption,
    PrimeTextsOption,
    PrimeTokensOption,
    console_of,
    given,
    load_model,
    read_cases,
    table_with,
    user_errors,
)

if TYPE_CHECKING:
    from rag_blend.evaluation import Calibration, Case


def calibrate(
    model: ModelOption,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="JSON lines of cases; may be repeated.", metavar="FILE")
    ] = None,
    documents: Annotated[
        Path | None, typer.Option(help="Instead of --data: .txt and .md files to ask about.", metavar="DIR")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Cases, per file.")] = 24,
    passages: PassagesOption = None,
    kl: Annotated[float, typer.Option(min=0.0, help="Largest mean KL to full prefill, nats.")] = 0.02,
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="Smallest share of equal tokens.")] = 0.97,
    storage: Annotated[str, typer.Option(help="The store whose engines shall follow.", metavar="DIR|URL")] = "kv",
    namespace: Annotated[str, typer.Option(help="Tenant.")] = "default",
    prime: PrimeOption = None,
    prime_tokens: PrimeTokensOption = None,
    prime_texts: PrimeTextsOption = None,
    exact_first: ExactFirstOption = None,
    codec: Annotated[
        str | None, typer.Option(help="The engine's, too: int8 and int4, not lossless, have verdicts of their own.")
    ] = None,
    dtype: OwnDtypeOption = None,
    seed: Annotated[int, typer.Option(help="Of the questions about --documents.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of a table.")] = False,
) -> None:
    """Choose the selector and ratio that engines with recompute_ratio="auto" use, by comparing with full prefill.

    Example: rag-blend calibrate --model path/to/model --storage kv/ --documents docs/
    """
    with user_errors():
        from rag_blend.evaluation import calibrate as find

        cases = _cases(data or [], documents, limit, passages, seed)
        loaded, tokenizer = load_model(model, dtype)
        options = given(
            prime=prime, prime_tokens=prime_tokens, prime_texts=prime_texts, exact_first=exact_first, codec=codec
        )
        progress = not as_json
        found = find(
            loaded, tokenizer, cases, storage, kl, agreement, progress=progress, namespace=namespace, **options
        )
        if as_json:
            typer.echo(found.to_json(), nl=False)
        else:
            _show(found, storage)


def _cases(data: list[Path], documents: Path | None, limit: int, passages: int | None, seed: int) -> list[Case]:
    if bool(data) == (documents is not None):
        raise ValueError("give either --data or --documents")
    if documents is None:
        return read_cases(data, limit, passages, seed=seed)
    from rag_blend.evaluation import cases_from_chunks, chunks_of

    return cases_from_chunks(chunks_of(documents), limit, passages or 10, seed)


def _show(found: Calibration, storage: str) -> None:
    console = console_of()
    verdict = found.verdict
    console.print(", ".join(f"{name} {value}" for name, value in found.environment.items()), highlight=False)
    target = f"KL at most {verdict.target_kl:g}, agreement at least {verdict.target_agreement:g}"
    title = f"{verdict.num_cases} prompts; target: {target}"
    rows = (
        (
            result.candidate.name,
            f"{result.kl.estimate:.4f} [{result.kl.low:.4f}, {result.kl.high:.4f}]",
            f"{result.agreement.estimate:.3f} [{result.agreement.low:.3f}, {result.agreement.high:.3f}]",
            f"{result.recompute_ratio:.1%}",
            f"{result.gain.estimate:.1f}x",
            "yes" if result.passed else "no",
        )
        for result in found.results
    )
    console.print(table_with(title, ("candidate", "KL", "agreement", "recomputed", "gain", "passed"), rows))
    choice = found.results[-1].candidate.name if verdict.passed else "full prefill: nothing faster met the target"
    console.print(f'Engines on {storage} that have recompute_ratio="auto" now use {choice}.', highlight=False)
