"""Time to first token of what a user could pick instead, and of rag_blend, side by side.

    python examples/benchmarks/peers/run.py --rounds 3 --lengths 1024 2048

Makes the environments that are missing, makes the prompts, starts all peers, asks them in turn, writes the results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from contestants import BFLOAT16, CONTESTANTS, Contestant
from cores import confine
from environments import NotInstalledError
from measure import Result, measure
from peer_process import PeerError, PeerProcess
from prompts import add_arguments, lines_of, prompts_for
from report import write
from weights import Model, NoWeightsError, demo_model

from rag_blend.errors import RagBlendError
from rag_blend.evaluation.environment import machine
from rag_blend.evaluation.speed.peers import REFERENCE

HERE = Path(__file__).parent


class Launch(NamedTuple):
    """How a peer is started."""

    command: list[str]
    directory: Path


def main() -> None:
    args = _arguments()
    chosen = _chosen(args)
    confine(args.threads)
    try:
        model = Model(args.model, args.gguf) if args.model else demo_model()
        prompts = prompts_for(args, str(model.directory))
    except (ValueError, OSError, RagBlendError) as error:
        sys.exit(str(error))
    environment = _environment(args, model)
    for directory in (args.root, args.out):
        directory.mkdir(parents=True, exist_ok=True)
    (args.out / "prompts.jsonl").write_text("".join(lines_of(prompts)), "utf-8")
    launches, left_out = _installed(chosen, model, args)
    with ExitStack() as stack:
        peers, not_started = _started(launches, args, stack)
        results = left_out | not_started | measure(peers, prompts, REFERENCE, partial(print, flush=True))
    in_order = [results[one.name] for one in chosen]
    for path in write(in_order, environment, REFERENCE, args.out):
        print(path)
    for result in in_order:
        if result.error:
            print(f"{result.peer}: {result.error}", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    names = [one.name for one in CONTESTANTS + BFLOAT16]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="PEER", help=f"besides {REFERENCE}, of {', '.join(names)}"
    )
    parser.add_argument("--bf16", action="store_true", help="also in bfloat16, for CPUs that compute in it")
    parser.add_argument("--threads", type=int, default=2, help="threads of every peer, and cores it is confined to")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for an answer; then the peer is left out")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: the demo model")
    parser.add_argument("--gguf", type=Path, help="the same model as a GGUF file, for peers that read these")
    parser.add_argument("--root", type=Path, default=Path(".peers"), help="where environments and made weights are")
    parser.add_argument("--out", type=Path, default=Path(".peers/results"), help="where results go")
    args = parser.parse_args()
    for name in ("model", "gguf", "root", "out"):
        path = getattr(args, name)
        setattr(args, name, path and path.absolute())  # peers run elsewhere
    return args


def _chosen(args: argparse.Namespace) -> list[Contestant]:
    if args.only:
        return [one for one in CONTESTANTS + BFLOAT16 if one.name in {REFERENCE, *args.only}]
    return [*CONTESTANTS, *(BFLOAT16 if args.bf16 else ())]


def _installed(
    chosen: Sequence[Contestant], model: Model, args: argparse.Namespace
) -> tuple[dict[str, Launch], dict[str, Result]]:
    """How to start each peer that can take part, and a result with the reason for each that cannot."""
    launches: dict[str, Launch] = {}
    left_out: dict[str, Result] = {}
    for one in chosen:
        print(f"installing {one.name}")
        program, directory = sys.executable, args.root
        try:
            if one.environment is not None:
                one.environment.make(args.root)
                program, directory = one.environment.program(args.root), args.root / one.environment.name
            weights = model.weights(one.weights, args.root / "weights")
        except (NotInstalledError, NoWeightsError) as error:
            left_out[one.name] = Result(one.name, error=str(error))
        else:
            common = ["--model", str(weights), "--threads", str(args.threads)]
            launches[one.name] = Launch([program, str(HERE / one.script), *common, *one.options], directory)
    return launches, left_out


def _started(
    launches: Mapping[str, Launch], args: argparse.Namespace, stack: ExitStack
) -> tuple[dict[str, PeerProcess], dict[str, Result]]:
    """Running peers, closed with the stack, and a result with the reason for each that did not come up."""
    peers: dict[str, PeerProcess] = {}
    failed: dict[str, Result] = {}
    for name, launch in launches.items():
        print(f"starting {name}")
        own = tempfile.mkdtemp(prefix="peer-", dir=args.root)
        stack.callback(shutil.rmtree, own, ignore_errors=True)
        command = [*launch.command, "--directory", own]
        log = args.out / f"{name}.log"
        try:
            peer = PeerProcess(command, _variables(args.threads), launch.directory, log, args.timeout)
        except PeerError as error:
            failed[name] = Result(name, error=str(error))
        else:
            stack.callback(peer.close)
            peers[name] = peer
    return peers, failed


def _variables(threads: int) -> dict[str, str]:
    """The environment variables of every peer."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",  # libgomp's spinning costs 2-4x on a shared machine
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _environment(args: argparse.Namespace, model: Model) -> dict[str, str]:
    """What the numbers depend on, and no peer says."""
    here = machine(torch.device("cpu"))
    return {
        "model": model.directory.name,
        "CPU": here["device"],
        "cores": str(os.cpu_count()),
        "threads": str(args.threads),
        "rounds": str(args.rounds),
        "load before": f"{os.getloadavg()[0]:.2f}",
        "date": here["date"],
    }


if __name__ == "__main__":
    main()
