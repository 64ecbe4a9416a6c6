"""vLLM's OpenAI server without a prefix cache, with its own, and with stored chunks: times of the same requests.

    make bench-vllm ARGS="--loads 1x2048x3 8x2048x1"

Makes the prompts, ingests their chunks, starts all servers, asks them in turn, writes the results. It runs in an
environment with vLLM, in which it starts the servers as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parent.parent / "peers"))  # whose prompts these are

from cores import confine
from ingestion import ingest
from lineup import REFERENCE, Contender, command_of, contenders, intel_openmp, variables
from openai_stream import ServerError
from prompts import HEAD_TOKENS
from serving_report import VIEW, rows_of
from sessions import Load, Round, make_rounds, texts_for
from turns import Results, measure
from vllm_process import VllmServer, free_ports

from rag_blend.errors import RagBlendError
from rag_blend.evaluation.environment import machine
from rag_blend.evaluation.speed.report import SpeedReport

LOADS = (Load(1, 2048, 5), Load(1, 4096, 3), Load(8, 2048, 1))  # some 25 minutes on two cores
QUESTION_TOKENS = 128  # at most
say = partial(print, flush=True)


def main() -> None:
    args = _arguments()
    confine(args.threads)
    torch.set_num_threads(args.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # or servers, in sessions of their own, would stay
    args.out.mkdir(parents=True, exist_ok=True)
    storage = Path(tempfile.mkdtemp(prefix="kv-", dir=args.out))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, storage, ignore_errors=True)
        try:
            rounds = _rounds(args)
            ingest(rounds, args.model, storage, args.dtype, say)
        except (ValueError, OSError, RagBlendError) as error:
            sys.exit(str(error))
        environment = _environment(args)  # the load before
        servers, failed = _started(contenders(storage), args, stack)
        version, running = _ready(servers, failed)
        results = measure(running, rounds, REFERENCE, say)
    results.errors |= failed
    report = _report(results, environment | {"vllm": version}, args)
    for path in report.write(args.out):
        say(path)
    for name, reason in results.errors.items():
        print(f"{name}: {reason}", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument(
        "--loads", type=_load, nargs="+", default=LOADS, metavar="CLIENTSxTOKENSxROUNDS",
        help=f"clients at once, tokens of a prompt's chunks, rounds; default: {_written(LOADS)}",
    )  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=16, help="length of each answer")
    parser.add_argument("--dtype", default="float32", help="what is computed in")
    parser.add_argument("--threads", type=int, default=2, help="threads of each server, and cores all are confined to")
    parser.add_argument("--kv-gib", type=int, default=2, help="GiB for the KV cache of each server")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="JSON lines of questions and passages")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which text is used")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a start and for an answer")
    parser.add_argument("--out", type=Path, default=Path("speed/serving"), help="where results and logs go")
    args = parser.parse_args()
    for name in ("model", "out"):
        setattr(args, name, getattr(args, name).absolute())
    return args


def _load(text: str) -> Load:
    try:
        return Load.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _written(loads: Sequence[Load]) -> str:
    return " ".join("x".join(map(str, load)) for load in loads)


def _rounds(args: argparse.Namespace) -> list[Round]:
    texts = texts_for(args.loads, AutoTokenizer.from_pretrained(args.model), args.data, args.seed)
    return make_rounds(args.loads, texts, args.seed)


def _started(
    chosen: Sequence[Contender], args: argparse.Namespace, stack: ExitStack
) -> tuple[dict[str, VllmServer], dict[str, str]]:
    """Servers that were started, closed with the stack, and why others were not."""
    window = max(load.length for load in args.loads) + HEAD_TOKENS + QUESTION_TOKENS + args.new_tokens
    clients = max(load.clients for load in args.loads)
    environment = variables(args.threads, args.kv_gib, intel_openmp(Path(sys.executable)))
    servers: dict[str, VllmServer] = {}
    failed: dict[str, str] = {}
    for one, port in zip(chosen, free_ports(len(chosen)), strict=True):
        say(f"starting {one.name}")
        command = command_of(one, sys.executable, args.model, port, window, clients, args.dtype)
        log = args.out / f"{one.name}.log"
        try:
            server = VllmServer(command, environment, port, log, one.fields, args.new_tokens, args.timeout)
        except ServerError as error:
            failed[one.name] = str(error)
        else:
            stack.callback(server.close)
            servers[one.name] = server
    return servers, failed


def _ready(servers: Mapping[str, VllmServer], failed: dict[str, str]) -> tuple[str, dict[str, VllmServer]]:
    """The version of vLLM and the servers that answer; adds the others to `failed`."""
    version = ""
    running: dict[str, VllmServer] = {}
    for name, server in servers.items():
        try:
            version = server.wait()
        except ServerError as error:
            failed[name] = str(error)
        else:
            running[name] = server
    return version, running


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "model": args.model.name,
        "dtype": args.dtype,
        **machine(torch.device("cpu")),
        "OpenMP": "Intel's, passive" if intel_openmp(Path(sys.executable)) else "torch's, passive",
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def _report(results: Results, environment: Mapping[str, str], args: argparse.Namespace) -> SpeedReport:
    settings = {
        "loads (clients x tokens x rounds)": _written(args.loads),
        "tokens of answers": args.new_tokens,
        "KV cache of each server": f"{args.kv_gib} GiB",
        "texts": ", ".join(path.name for path in args.data) or "words of Python's manual in random order",
        **{f"left out, or stopped: {name}": error for name, error in results.errors.items()},
    }
    return SpeedReport(VIEW, environment, settings, rows_of(results))


if __name__ == "__main__":
    main()
