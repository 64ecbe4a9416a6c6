"""``rag-blend bench ttft|pipeline|control|throughput|ingest|match``: how fast, beside what else could be done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_blend.cli.common import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    console_of,
    load_model,
    read_cases,
    table_with,
    user_errors,
)
from rag_blend.errors import install_hint

if TYPE_CHECKING:
    from rag_blend.evaluation.speed.report import SpeedReport
    from rag_blend.evaluation.speed.texts import Texts

ChunkTokensOption = Annotated[int, typer.Option(min=16, help="Tokens of a chunk.")]
LengthOption = Annotated[int, typer.Option(min=1, help="Tokens of the chunks in a prompt.")]
LengthsOption = Annotated[str, typer.Option(help="Tokens of the chunks in a prompt, separated by commas.")]
TextsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        help="JSON lines of cases or articles; may be repeated. Default: random words, of which KL says little.",
        metavar="FILE",
    ),
]
RoundsOption = Annotated[int, typer.Option(min=1, help="How often everything is measured, each time on other texts.")]
OutOption = Annotated[Path, typer.Option(help="For report, plot and single rounds; a run resumes.", metavar="DIR")]
JsonReportOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")]
_OUT = Path("speed")
_ALL_CASES = 1_000_000


def ttft(
    model: ModelOption,
    lengths: LengthsOption = "1024,2048,4096",
    chunk_tokens: ChunkTokensOption = 512,
    rounds: RoundsOption = 5,
    data: TextsOption = None,
    out: OutOption = _OUT,
    as_json: JsonReportOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
) -> None:
    """Time to first token: full prefill, a prefix cache, CacheBlend as published, and rag_blend.

    Example: rag-blend bench ttft --model DIR --lengths 2048,4096 --data questions.jsonl
    """
    with user_errors("bench"):
        from rag_blend.evaluation.speed.ttft import measure_ttft

        wanted = _counts("lengths", lengths)
        loaded, tokenizer = load_model(model, dtype, device)
        texts = _texts(tokenizer, chunk_tokens, data)
        _finish(measure_ttft(loaded, tokenizer, texts, wanted, rounds, out, progress=not as_json), out, as_json)


def pipeline(
    model: ModelOption,
    length: LengthOption = 4096,
    rates: Annotated[str, typer.Option(help="Speeds of the store in MB/s, separated by commas.")] = (
        "10,20,50,100,200,1000"
    ),
    latency_ms: Annotated[float, typer.Option(min=0, help="From a read to its first byte.")] = 0.0,
    policy: Annotated[
        list[str] | None, typer.Option(help="As in bench quality; may be repeated. Default: sample/heads, default.")
    ] = None,
    chunk_tokens: ChunkTokensOption = 512,
    rounds: RoundsOption = 5,
    data: TextsOption = None,
    out: OutOption = _OUT,
    as_json: JsonReportOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
) -> None:
    """Time to first token from stores of several speeds, beside loading alone and computing alone.

    Example: rag-blend bench pipeline --model DIR --rates 20,100 --policy sample/heads
    """
    with user_errors("bench"):
        from rag_blend.evaluation.policies import Policy
        from rag_blend.evaluation.speed.pipeline import measure_pipeline

        speeds = _numbers("rates", rates)
        policies = [Policy.parse(text) for text in policy or ("sample/heads", "default")]
        loaded, tokenizer = load_model(model, dtype, device)
        texts = _texts(tokenizer, chunk_tokens, data)
        report = measure_pipeline(
            loaded, tokenizer, texts, length, speeds, policies, rounds, out, latency_ms / 1e3, progress=not as_json
        )
        _finish(report, out, as_json)


def control(
    model: ModelOption,
    lengths: LengthsOption = "128,512,2048,7680",  # the longest that fits a window of 8,192 with head and question
    hits: Annotated[str, typer.Option(help="Shares of a prompt's 8 chunks that are stored, separated by commas.")] = (
        "0,0.125,0.25,0.5,1"
    ),
    stores: Annotated[
        str, typer.Option(help="memory, disk, or MB/s of a line to a slow store, separated by commas.")
    ] = "memory,disk,50,10",
    latency_ms: Annotated[float, typer.Option(min=0, help="From a read through a slow line to its first byte.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each case is measured, on other prompts.")] = 5,
    out: OutOption = _OUT,
    as_json: JsonReportOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
) -> None:
    """An engine that decides by itself what to reuse, beside full prefill: is it ever slower?

    Example: rag-blend bench control --model DIR --lengths 128,2048 --stores disk,20
    """
    with user_errors("bench"):
        from rag_blend.evaluation.speed.sweep import Sweep, measure_control

        wanted = _counts("lengths", lengths)
        places = list(dict.fromkeys(store.strip() for store in stores.split(",")))
        sweep = Sweep(wanted, _numbers("hits", hits, or_zero=True), places, latency_ms / 1e3)
        loaded, tokenizer = load_model(model, dtype, device)
        _finish(measure_control(loaded, tokenizer, sweep, rounds, out, not as_json), out, as_json)


def throughput(
    model: ModelOption,
    length: LengthOption = 2048,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 32,
    concurrency: Annotated[str, typer.Option(help="Numbers of clients, separated by commas.")] = "1,4,16",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 16,
    chunk_tokens: ChunkTokensOption = 512,
    rounds: RoundsOption = 1,
    data: TextsOption = None,
    out: OutOption = _OUT,
    as_json: JsonReportOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
) -> None:
    """Requests a second, latency and memory with several clients at once.

    Example: rag-blend bench throughput --model DIR --requests 32 --concurrency 1,16
    """
    with user_errors("bench"):
        from rag_blend.evaluation.speed.throughput import Load, measure_throughput

        load = Load(requests, _counts("concurrency", concurrency), max_new_tokens)
        loaded, tokenizer = load_model(model, dtype, device)
        texts = _texts(tokenizer, chunk_tokens, data)
        _finish(measure_throughput(loaded, tokenizer, texts, length, load, rounds, out, not as_json), out, as_json)


def ingest(
    model: ModelOption,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of a round.")] = 16,
    chunk_tokens: ChunkTokensOption = 512,
    rounds: RoundsOption = 5,
    data: TextsOption = None,
    out: OutOption = _OUT,
    as_json: JsonReportOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
) -> None:
    """Tokens a second that are ingested, beside plain batched prefill of the same chunks.

    Example: rag-blend bench ingest --model DIR --chunks 32
    """
    with user_errors("bench"):
        from rag_blend.evaluation.speed.ingestion import measure_ingestion

        loaded, tokenizer = load_model(model, dtype, device)
        texts = _texts(tokenizer, chunk_tokens, data)
        _finish(measure_ingestion(loaded, tokenizer, texts, chunks, rounds, out, not as_json), out, as_json)


def match(
    chunks: Annotated[str, typer.Option(help="Numbers of chunks in the index, separated by commas.")] = (
        "1000,10000,100000"
    ),
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 512,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 8_000,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts that are matched.")] = 30,
    vocabulary: Annotated[int, typer.Option(min=1, help="Distinct ids in chunks.")] = 128_000,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Boilerplate that heads every chunk.")] = 0,
    window: Annotated[int, typer.Option(min=1, help="Tokens that a fingerprint covers.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the random ids.")] = 0,
    out: Annotated[Path, typer.Option(help="For report and plot.", metavar="DIR")] = _OUT,
    as_json: JsonReportOption = False,
) -> None:
    """How long finding stored chunks in a prompt takes, and how much memory their index needs.

    Example: rag-blend bench match --chunks 100000 --chunk-tokens 512
    """
    with user_errors("bench"):
        from rag_blend.evaluation.speed.matching import Collection, measure_matching

        counts = _counts("chunks", chunks)
        collection = Collection(chunk_tokens, prompt_tokens, vocabulary, shared_tokens, window, seed)
        _finish(measure_matching(counts, collection, rounds, not as_json), out, as_json)


COMMANDS = (ttft, pipeline, control, throughput, ingest, match)


def _numbers(option: str, text: str, or_zero: bool = False) -> list[float]:
    try:
        numbers = sorted({float(number) for number in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 0 or (numbers[0] == 0 and not or_zero):
        kind = "numbers from 0 on" if or_zero else "positive numbers"
        raise ValueError(f"--{option} takes {kind} separated by commas, not {text!r}")
    return numbers


def _counts(option: str, text: str) -> list[int]:
    return [int(number) for number in _numbers(option, text)]


def _texts(tokenizer: Any, chunk_tokens: int, data: list[Path] | None) -> Texts:
    from rag_blend.evaluation.speed.texts import Texts

    cases = read_cases(data, _ALL_CASES, None) if data else None
    return Texts(tokenizer, chunk_tokens, cases)


def _finish(report: SpeedReport, out: Path, as_json: bool) -> None:
    from rag_blend.evaluation.speed.plots import draw_plot

    written = report.write(out)
    try:
        draw_plot(report, out / f"{report.view.name}.png")
        written.append(out / f"{report.view.name}.png")
    except ImportError:
        typer.echo(f"rag-blend: no plot, matplotlib is missing; {install_hint('bench')}", err=True)
    if as_json:
        typer.echo(report.to_json(), nl=False)
        return
    console = console_of()
    console.print(", ".join(f"{name} {value}" for name, value in report.environment.items()), highlight=False)
    for section, (header, *rows) in report.tables().items():
        console.print(table_with(section, header, rows))
    for path in written:
        console.print(str(path), highlight=False, soft_wrap=True)
